"""Noise, clipping, sampling and epsilon measured from outside, against their settings."""

from __future__ import annotations

import math
from dataclasses import replace

import dp_accounting as library
import pytest
import torch
from dp_accounting import pld, rdp
from helpers import Clients, max_difference, toy_model, toy_run
from privacy_fixtures import micro_batch_sum
from torch import Tensor
from torch.nn import functional

from partita.core.batch_schedule import poisson_batches
from partita.core.client import ClientRound, ClientState, begin_round
from partita.core.data import Batch, Examples
from partita.core.dp_settings import PrivacySettings
from partita.core.model import Model, Output
from partita.core.noise import gaussian_noise
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.settings import Run, Training
from partita.core.tensors import Tensors
from partita.methods.fedavg import fedavg
from partita.privacy.accountant import ORDERS
from partita.privacy.guard import make_private
from partita.training.local_training import train_clients


def test_poisson_sampling_rate_matches_the_charged_rate() -> None:
    """Within 0.005 over 100,000 draws, and within 0.5% over 4 million draws."""
    few = poisson_batches(500, Training(lr=1.0, batch_size=100, steps=200), None, Key(1))
    assert abs(sum(few.sizes) / 100_000 - 0.2) < 0.005
    many = poisson_batches(40_000, Training(lr=1.0, batch_size=8_000, steps=100), None, Key(2))
    assert sum(many.sizes) / 4e6 == pytest.approx(0.2, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("std", [0.37, 12.0])
def test_noise_has_the_requested_std_in_every_shape(std: float) -> None:
    shapes = {"flat": (120_000,), "matrix": (400, 300), "deep": (4, 50, 30, 20)}
    drawn = gaussian_noise({name: torch.zeros(shape) for name, shape in shapes.items()}, Key(3) / "noise", std)
    assert {name: tuple(value.shape) for name, value in drawn.items()} == shapes
    for value in drawn.values():
        assert float(value.double().square().mean().sqrt()) == pytest.approx(std, rel=0.01)
        assert abs(float(value.double().mean())) < 0.02 * std
    few = [gaussian_noise({"one": torch.zeros(()), "three": torch.zeros(3)}, Key(step), std) for step in range(3_000)]
    numbers = torch.cat([value.flatten() for each in few for value in each.values()]).double()
    assert float(numbers.square().mean().sqrt()) == pytest.approx(std, rel=0.04)


def begin_client_round(run: Run, model: Model, examples: Examples) -> ClientRound:
    job, _ = make_job(run, model, initial_server(run, model), 0, "a")
    return begin_round(run, model, job, ClientState(), examples)


@pytest.mark.parametrize(("size", "divisor"), [(3, 3), (8, 8), (12, 8)])
def test_private_step_divides_the_clipped_sum_by_the_expected_batch_size(size: int, divisor: int) -> None:
    """With a batch size of 8, a smaller client uses all its examples, and a larger one draws batches of any size."""
    run = toy_run(replace(fedavg(), privacy=PrivacySettings(clip=0.5, noise=0.0)), lr=1.0, batch_size=8, steps=1)
    model, examples = toy_model(), Clients(a=size)["a"].train
    each = begin_client_round(run, model, examples)
    [learned] = train_clients(run, [each])
    [batch] = each.schedules[0]
    total = micro_batch_sum(model, model.initial, examples.take(batch), 0.5)
    wanted = {name: model.initial[name] - value / divisor for name, value in total.items()}
    assert max_difference(learned.params, wanted) < 1e-6
    assert len(batch) == size if size <= 8 else len(batch) != 8


class LinearModel(Model):
    """A model in which the gradient of an example is the example."""

    name = "line"

    def __init__(self) -> None:
        self.initial = {"weight": torch.zeros(1, 4)}
        self.tags = {"weight": frozenset({"head"})}

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(functional.linear(inputs["x"], params["weight"]))

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return out.logits[:, 0]


class RowExamples:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def take(self, indices: Tensor) -> Batch:
        return Batch({"x": self.x[indices]}, torch.zeros(len(indices)))


@pytest.mark.parametrize("norms", ["direct", "ghost"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30], ids=["inf", "-inf", "nan", "overflow"])
def test_example_without_a_finite_gradient_norm_adds_nothing(value: float, norms: str) -> None:
    """The square of 1e30 is infinite, though the number is not."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    run = toy_run(
        replace(fedavg(), privacy=PrivacySettings(clip=0.5, noise=0.0, clipping=norms)),  # type: ignore[arg-type]
        lr=1.0,
        batch_size=6,
        steps=1,
    )
    broken = x.clone()
    broken[2, 1] = value
    [learned] = train_clients(run, [begin_client_round(run, LinearModel(), RowExamples(broken))])
    rest = x[[0, 1, 3, 4, 5]]
    wanted = -(rest * (0.5 / rest.norm(dim=1, keepdim=True)).clamp(max=1.0)).sum(0) / 6
    assert torch.allclose(learned.params["weight"][0], wanted, atol=1e-6)


def test_epsilon_of_a_run_matches_dp_accounting() -> None:
    """Against events of dp-accounting: the worst client has the highest sampling rate in every round."""
    sizes = {"a": 100, "b": 64, "c": 300}
    guard = make_private(
        toy_run(fedavg(), count=5, batch_size=32, epochs=2), toy_model(), sizes, PrivacySettings(noise=4.0)
    )
    costs = []
    for size in sizes.values():
        accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
        steps = 5 * 2 * math.ceil(size / 32)
        accountant.compose(library.PoissonSampledDpEvent(32 / size, library.GaussianDpEvent(4.0)), steps)
        costs.append(accountant.get_epsilon(1e-5))
    assert guard.privacy.delta == 1e-5
    assert guard.planned == pytest.approx(max(costs), rel=1e-6)


@pytest.mark.slow
def test_epsilon_of_a_client_level_run_matches_dp_accounting() -> None:
    sizes = {f"c{number}": 8 for number in range(50)}
    guard = make_private(toy_run(fedavg(), count=5, cohort=5), toy_model(), sizes, PrivacySettings("client", noise=8.0))
    accountant = rdp.RdpAccountant(ORDERS, library.NeighboringRelation.REPLACE_ONE)
    accountant.compose(library.SampledWithoutReplacementDpEvent(50, 5, library.GaussianDpEvent(4.0)), 5)
    assert guard.privacy.delta == 1e-5
    assert guard.planned == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
