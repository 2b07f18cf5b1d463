"""The parts of a canary attack by themselves: who is drawn, what is observed, and how it is scored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Clients, toy_model, toy_run
from torch import Tensor

from partita.core.data import Batch
from partita.core.dp_settings import PrivacyError, PrivacySettings
from partita.core.rng import Key
from partita.core.rounds import ClientFailure, initial_server, make_job
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.methods.fedavg import fedavg
from partita.privacy import canaries
from partita.privacy.canaries import CanaryPopulation, Eavesdropper, canary_scores, choose_canaries
from partita.testing.toy import ToyExamples

MODEL = toy_model()
NAMES = ["head.weight", "layers.0.norm.weight"]
CLIENTS = Clients(a=5, b=40, c=3)


def slopes(batch: Batch) -> Tensor:
    """The gradients of NAMES, by a plain loop: (example, number)."""
    rows = []
    for place in range(len(batch.targets)):
        live = {name: MODEL.initial[name].clone().requires_grad_() for name in NAMES}
        out = MODEL({**MODEL.initial, **live}, {name: value[place : place + 1] for name, value in batch.inputs.items()})
        grads = torch.autograd.grad(MODEL.losses(out, batch.targets[place : place + 1]).sum(), list(live.values()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


def step_of(seed: int) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(MODEL.initial[name].shape, generator=draw) for name in NAMES}


def planted(count: int = 30, classes: int = 3) -> CanaryPopulation:
    return CanaryPopulation(CLIENTS, choose_canaries(CLIENTS, count, Key(1), classes))


# ---- the canaries


def test_canaries_are_drawn_from_all_examples_with_fair_coins() -> None:
    every = choose_canaries(CLIENTS, 48, Key(1))
    assert {client: places.tolist() for client, places in every.places.items()} == {
        client: list(range(size)) for client, size in (("a", 5), ("b", 40), ("c", 3))
    }
    assert not every.mislabeled
    assert not choose_canaries(CLIENTS, 4, Key(1), classes=1).mislabeled
    two = choose_canaries(CLIENTS, 4, Key(1), classes=2)
    assert (two.mislabeled, two.classes) == (True, 2)
    coins = np.stack([every.redraw(Key(seed)).included for seed in range(50)])
    assert coins.shape == (50, 48)
    assert abs(coins.mean() - 0.5) < 5 * 0.5 / 2400**0.5
    assert np.array_equal(coins[3], every.redraw(Key(3)).included)
    equal = choose_canaries(Clients(a=30, b=30), 60, Key(1)).coins
    assert not torch.equal(equal["a"], equal["b"]), "each client has coins of its own"
    some = choose_canaries(CLIENTS, 7, Key(1))
    assert sum(map(len, some.places.values())) == 7
    assert all(places.tolist() == sorted(set(places.tolist())) for places in some.places.values())


def test_coins_are_listed_by_client() -> None:
    chosen = canaries.Canaries({}, {"b": torch.tensor([True]), "a": torch.tensor([False, True])}, False)
    assert chosen.included.tolist() == [False, True, True]


def test_an_example_that_was_masked_before_stays_masked() -> None:
    class Masked(ToyExamples):
        def take(self, indices: Tensor) -> Batch:
            return replace(super().take(indices), mask=torch.tensor([1.0, 0.0, 1.0, 1.0]))

    chosen = replace(choose_canaries(Clients(a=4), 4, Key(1)), coins={"a": torch.tensor([True, True, False, True])})
    table = canaries._CanaryExamples(
        Masked(torch.zeros(4, 4, 4), torch.arange(4)), chosen.places["a"], chosen.coins["a"], chosen
    )
    batch = table.take(torch.arange(4))
    assert batch.mask is not None
    assert batch.mask.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert batch.targets.tolist() == table.all_examples().targets.tolist() == [0, 1, 2, 3]


def test_canaries_are_found_in_a_batch_wherever_they_are() -> None:
    clients = Clients(a=6)
    chosen = canaries.Canaries({"a": torch.tensor([1, 4])}, {"a": torch.tensor([True, False])}, True, 3)
    batch = CanaryPopulation(clients, chosen)["a"].train.take(torch.tensor([4, 0, 5, 1, 4]))
    plain = clients["a"].train.take(torch.tensor([4, 0, 5, 1, 4])).targets
    assert batch.mask is not None
    assert batch.mask.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert ((batch.targets - plain) % 3).tolist() == [1, 0, 0, 1, 1]


def test_wrong_targets_are_the_next_class() -> None:
    table = planted().table("b")
    places = table.places.tolist()
    plain = CLIENTS["b"].train.take(torch.arange(40)).targets.tolist()
    wanted = [(target + (place in places)) % 3 if place in places else target for place, target in enumerate(plain)]
    assert 0 < len(places) < 40
    assert table.all_examples().targets.tolist() == wanted
    assert table.all_examples().mask is None
    assert table.canaries_alone().targets.tolist() == [wanted[place] for place in places]


def test_clients_without_canaries_keep_their_examples() -> None:
    some = CanaryPopulation(
        CLIENTS, replace(planted().canaries, places={"a": torch.tensor([0])}, coins={"a": torch.tensor([True])})
    )
    assert some.clients == CLIENTS.clients
    assert some["b"].train is CLIENTS["b"].train
    assert len(some["a"].train) == 5
    assert some["a"].test is CLIENTS["a"].test


# ---- what is observed


def test_gradients_and_losses_of_more_examples_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canaries, "CHUNK", 3)
    batch = CLIENTS["b"].train.take(torch.arange(7))
    chunks = list(canaries.gradients_of(MODEL, MODEL.initial, NAMES, batch))
    assert [len(chunk) for chunk in chunks] == [3, 3, 1]
    assert torch.allclose(torch.cat(chunks), slopes(batch), atol=1e-5)
    losses = MODEL.losses(MODEL(MODEL.initial, batch.inputs), batch.targets).tolist()
    for most, count in ((7, 7), (4, 4), (99, 40), (0, 0)):
        found = canaries.losses_of(MODEL, MODEL.initial, CLIENTS["b"].train, most)
        assert found.shape == (count,)
        assert found[:7] == pytest.approx(losses[:count], rel=1e-5)
        assert len(canaries.first(CLIENTS["b"].train, most).targets) == count
    delta = step_of(0)
    step = -torch.cat([delta[name].flatten() for name in NAMES])
    cosines = [float(row @ step / (row.norm() * step.norm())) for row in slopes(batch)]
    assert canaries.gradient_cosines(MODEL, MODEL.initial, delta, batch).tolist() == pytest.approx(cosines, rel=1e-4)


def test_losses_of_canaries_are_in_the_order_of_their_coins() -> None:
    population = planted()
    batches = [population.table(client).canaries_alone() for client in sorted(population.canaries.places)]
    wanted = [
        float(loss) for batch in batches for loss in MODEL.losses(MODEL(MODEL.initial, batch.inputs), batch.targets)
    ]
    assert canaries.canary_losses(MODEL, MODEL.initial, population) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("clip", [None, 0.6])
def test_scores_are_those_of_a_ridge_regression_of_the_step_on_all_gradients(clip: float | None) -> None:
    population, delta, noise = planted(), step_of(1), 2.0
    table = population.table("b")
    rows = slopes(table.all_examples()).double()
    norms = rows.norm(dim=1)
    assert clip is None or 0 < int((norms > clip).sum()) < len(norms), "some are clipped, and some are not"
    if clip is None:
        rows = rows / norms.mean()
    else:
        rows = torch.stack([row * min(1.0, clip / float(norm)) / clip for row, norm in zip(rows, norms, strict=True)])
    step = -torch.cat([delta[name].flatten() for name in NAMES]).double()
    along = rows @ (step / step.norm())
    wanted = [
        torch.linalg.solve(rows @ rows.T + (trust * noise + canaries.RIDGE) * torch.eye(40).double(), along)
        for trust in canaries.TRUST
    ]
    private = None if clip is None else PrivacySettings(clip=clip, noise=1.0)
    found = canary_scores(MODEL, MODEL.initial, delta, table, noise, private)
    assert found.shape == (3, len(table.places))
    for row, exact in zip(found, wanted, strict=True):
        assert torch.allclose(row.double(), exact[table.places], rtol=0.05, atol=0.02 * float(exact.abs().max()))


def test_only_the_direction_of_a_step_counts() -> None:
    table, delta = planted().table("b"), step_of(1)
    small_step = {name: 1e-4 * value for name, value in delta.items()}
    one, other = (canary_scores(MODEL, MODEL.initial, step, table, 2.0, None) for step in (delta, small_step))
    assert torch.allclose(one, other, rtol=1e-2, atol=1e-3 * float(one.abs().max()))


def test_gradients_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table, delta = planted().table("b"), step_of(1)
    numbers = 40 * sum(MODEL.initial[name].numel() for name in NAMES)
    monkeypatch.setattr(canaries, "MAX_EXAMPLES", numbers)
    canary_scores(MODEL, MODEL.initial, delta, table, 2.0, None)
    monkeypatch.setattr(canaries, "MAX_EXAMPLES", numbers - 1)
    with pytest.raises(PrivacyError, match="the gradients of 40 examples"):
        canary_scores(MODEL, MODEL.initial, delta, table, 2.0, None)


def test_the_noise_in_an_update_beside_the_share_of_one_example() -> None:
    plain, private = fedavg(), replace(fedavg(), privacy=PrivacySettings(clip=1.0, noise=3.0))
    assert Eavesdropper(toy_run(plain), MODEL, planted())._strength(10) == 0.0
    eavesdropper = Eavesdropper(toy_run(private, batch_size=4, epochs=2), MODEL, planted())
    assert eavesdropper._strength(10) == pytest.approx(4 * 9 / (0.4**2 * 6))
    assert eavesdropper._strength(3) == pytest.approx(4 * 9 / (1.0 * 2))


def test_an_eavesdropper_adds_up_what_clients_with_canaries_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """By client in the order of the coins; clients it never observed score zero."""
    run, population = toy_run(fedavg()), planted(30)
    del population.canaries.places["a"]
    sizes = {client: len(places) for client, places in population.canaries.places.items()}
    assert sizes.keys() == {"b", "c"}
    server = initial_server(run, MODEL)
    failure = ClientFailure("c", "no memory")

    def answer(job: Any) -> Update | ClientFailure:
        return failure if job.client == "c" else Update(job.client, step_of(job.round), {}, 1.0, {}, None)

    def scores(model: Any, params: Tensors, delta: Any, table: Any, noise: float, private: object) -> Tensor:
        assert params.keys() == MODEL.initial.keys()
        assert (noise, private) == (0.0, None)
        seen.append(delta)
        return torch.full((3, len(table.places)), float(len(seen)))

    seen: list[Any] = []
    monkeypatch.setattr(canaries, "canary_scores", scores)
    eavesdropper = Eavesdropper(run, MODEL, population)
    for number in (0, 1):
        for client in "abc":
            job = make_job(run, MODEL, server, number, client)[0]
            eavesdropper.asks(job)
            eavesdropper.receives(answer(job))
    assert len(seen) == 2
    assert eavesdropper.scores().tolist() == [[3.0] * sizes["b"] + [0.0] * sizes["c"]] * 3
