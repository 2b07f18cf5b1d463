"""FedAdam is torch's Adam and FedAdagrad torch's Adagrad on the mean update; FedYogi is its formula."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import numpy as np
import pytest
import torch
from helpers import Clients, final_params, play, toy_model, toy_run
from torch.testing import assert_close
from torch_servers import TorchServer, apply_all, random_deltas

from partita.core import tensors
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.rounds import initial_server, rounds
from partita.engines.simulation import SimulationEngine
from partita.methods.fedavg import fedavg
from partita.methods.fedopt import fedadagrad, fedadam, fedyogi
from partita.testing.toy import Float64Model, Float64Population

CLIENTS = Clients(a=5, b=9, c=6)


def test_fedadam_equals_torch_adam() -> None:
    torchs = TorchServer(lambda values: torch.optim.Adam(values, lr=0.3, betas=(0.8, 0.95), eps=0.02))
    ours = apply_all(fedadam(0.3, 0.8, 0.95, 0.02).server_rule, random_deltas())
    assert_close(ours, torchs.apply_all(random_deltas()), rtol=0, atol=1e-12)


def test_fedadam_run_equals_torch_adam_on_the_mean_delta() -> None:
    """A FedAvg round from FedAdam's server gives the mean delta for Adam."""
    model, clients = Float64Model(toy_model()), Float64Population(CLIENTS)
    values = {name: value.clone() for name, value in model.initial.items()}
    adam = torch.optim.Adam(list(values.values()), lr=0.02, betas=(0.9, 0.99), eps=1e-3)
    run = toy_run(fedavg(), 3, cohort=2)
    server = initial_server(run, model)
    for number, each in enumerate(play(toy_run(fedadam(0.02), 3, cohort=2), model, clients)):
        mean = next(rounds(run, model, SimulationEngine(run, model, clients), server, number)).server.params
        for name, value in values.items():
            value.grad = server.params[name] - mean[name]
        adam.step()
        assert_close(each.server.params, values, rtol=0, atol=1e-12)
        server = replace(each.server, state={})


def test_fedadam_and_fedyogi_without_debiasing_match_the_paper() -> None:
    lr, beta1, beta2, tau = 0.3, 0.8, 0.95, 0.02
    squares = {
        "fedadam": lambda v, d: beta2 * v + (1 - beta2) * d**2,
        "fedyogi": lambda v, d: v - (1 - beta2) * d**2 * np.sign(v - d**2),
    }
    for method in (fedadam(lr, beta1, beta2, tau, debias=False), fedyogi(lr, beta1, beta2, tau)):
        w, m, v = np.zeros(4), np.zeros(4), np.full(4, tau**2)
        for delta in random_deltas():
            d = delta["a"].numpy()
            m = beta1 * m + (1 - beta1) * d
            v = squares[method.name](v, d)
            w = w + lr * m / (np.sqrt(v) + tau)
        np.testing.assert_allclose(apply_all(method.server_rule, random_deltas())["a"], w, rtol=0, atol=1e-12)


def test_fedadagrad_equals_torch_adagrad() -> None:
    torchs = TorchServer(
        lambda values: torch.optim.Adagrad(values, lr=0.3, eps=0.02, initial_accumulator_value=0.02**2)
    )
    ours = apply_all(fedadagrad(0.3, 0.0, 0.02).server_rule, random_deltas())
    assert_close(ours, torchs.apply_all(random_deltas()), rtol=0, atol=1e-12)


def test_fedadam_age_of_a_name_counts_only_rounds_it_was_sent() -> None:
    both = random_deltas(count=3)
    apart = [both[0], {"a": both[1]["a"]}, both[2]]
    alone = apply_all(fedadam(0.3).server_rule, apart)["b"]
    assert_close(alone, apply_all(fedadam(0.3).server_rule, [both[0], both[2]])["b"])


@pytest.mark.parametrize("method", [fedadam(2.0, 0.0, 1.0, 1.0, debias=False), fedyogi(2.0, 0.0, 1.0, 1.0)])
def test_fedopt_with_moments_off_is_fedavg_bit_for_bit(method: Method) -> None:
    """The second moment then stays at 1, and 2 · delta / (1 + 1) is exact."""
    one, two = (play(toy_run(each, 3, cohort=2), toy_model(), CLIENTS) for each in (method, fedavg()))
    assert tensors.equal(final_params(one), final_params(two))


def test_first_rounds_of_fedadagrad_and_memoryless_fedyogi_are_equal() -> None:
    """Both add the square to a smaller initial value."""
    methods = fedadagrad(0.1, 0.0, 1e-12), fedyogi(0.1, 0.0, 0.0, 1e-12)
    one, two = (play(toy_run(each, 1), toy_model(), CLIENTS) for each in methods)
    assert tensors.equal(final_params(one), final_params(two))


def test_fedyogi_keeps_its_second_moment_when_the_square_equals_its_estimate() -> None:
    """The sign of 0 is 0, so the second moment stays tau^2 and round t moves by lr tau (1 - beta1^t) / (tau + tau)."""
    lr, beta1, tau, count = 0.3, 0.8, 0.5, 3
    rule = fedyogi(lr, beta1, tau=tau).server_rule
    still = [{name: torch.full_like(value, tau) for name, value in random_deltas(1)[0].items()}] * count
    wanted = sum(lr * (1 - beta1**number) / 2 for number in range(1, count + 1))
    for value in apply_all(rule, still).values():
        assert_close(value, torch.full_like(value, wanted), rtol=0, atol=1e-12)


@pytest.mark.parametrize("wrong", [{"beta1": 1.0}, {"beta2": 1.5}, {"tau": 0.0}])
def test_fedopt_refuses_invalid_options(wrong: dict[str, float]) -> None:
    for method in (fedadam, fedyogi, fedadagrad):
        if wrong.keys() <= signature(method).parameters.keys():
            with pytest.raises(MethodError, match=r"method.beta1 is"):
                method(**wrong)  # type: ignore[operator]
