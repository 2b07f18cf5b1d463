"""Robust server rules: references on vectors, what a minority of attackers cannot do, and reductions to the mean."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import Clients, final_params, play, toy_model, toy_run
from hypothesis import given, settings
from hypothesis import strategies as st
from quadratics import LR, Quadratic, QuadraticClients, as_vector
from scipy.optimize import minimize

from partita.core import tensors
from partita.core.compose import compose
from partita.core.method import Method
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.core.update_transform import UpdateTransform
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.robust import geometric_median, krum, median, trimmed_mean

RULES = (median, trimmed_mean, krum, geometric_median)
HUGE = 1e20


def update(client: str, delta: Tensors, weight: float = 1.0, slots: Slots | None = None) -> Update:
    return Update(client, delta, slots or {}, weight, dict.fromkeys(delta, 1), None)


def reduced(method: Method, updates: list[Update]) -> Aggregate:
    return method.server_rule.reduce(Server({}), iter(updates), len(updates))


def vectors(count: int, seed: int = 0, width: int = 6) -> torch.Tensor:
    return torch.randn(count, width, generator=(Key(seed) / "vectors").generator())


def split_in_two(table: torch.Tensor) -> list[Update]:
    """One update per row, cut into the names `a` and `b`."""
    return [update(f"c{i}", {"a": row[:2], "b": row[2:].reshape(2, -1)}) for i, row in enumerate(table)]


def joined(delta: Tensors) -> np.ndarray:
    return np.concatenate([delta[name].flatten().double().numpy() for name in sorted(delta)])


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_median_and_trimmed_mean_match_numpy_and_scipy(count: int) -> None:
    from scipy.stats import trim_mean

    table = vectors(count)
    assert joined(reduced(median(), split_in_two(table)).delta) == pytest.approx(np.median(table.numpy(), axis=0))
    for share in (0.0, 0.2, 0.4):
        wanted = trim_mean(table.double().numpy(), share, axis=0)
        assert joined(reduced(trimmed_mean(share), split_in_two(table)).delta) == pytest.approx(wanted, abs=1e-6)


def krum_scores(table: np.ndarray, attackers: int) -> list[float]:
    """The formula of the paper, one client at a time."""
    scores = []
    for one in range(len(table)):
        gaps = sorted(float(((table[one] - table[other]) ** 2).sum()) for other in range(len(table)) if other != one)
        scores.append(sum(gaps[: len(table) - attackers - 2]))
    return scores


@pytest.mark.parametrize("keep", [1, 3])
def test_krum_averages_the_updates_with_the_lowest_scores(keep: int) -> None:
    for seed in range(5):
        table = vectors(9, seed)
        best = np.argsort(krum_scores(table.double().numpy(), attackers=2))[:keep]
        wanted = table.double().numpy()[best].mean(0)
        assert joined(reduced(krum(0.25, keep), split_in_two(table)).delta) == pytest.approx(wanted, abs=1e-6)


def test_krum_with_few_clients_uses_one_neighbor_and_decides_ties_by_name() -> None:
    updates = [update(f"c{i}", {"a": torch.tensor([place])}) for i, place in enumerate((1.5, 1.0, 0.0))]
    assert reduced(krum(0.34), updates).delta["a"] == 1.5, "c0 and c1 are as close to each other; c1 has closer others"


def test_geometric_median_minimizes_the_weighted_sum_of_distances() -> None:
    table, weights = vectors(7), np.array([1.0, 5.0, 2.0, 1.0, 3.0, 1.0, 4.0])
    updates = [update(f"c{i}", {"a": row}, float(weights[i])) for i, row in enumerate(table)]

    def distance(point: np.ndarray) -> float:
        return float(weights @ np.linalg.norm(table.double().numpy() - point, axis=1))

    wanted = minimize(distance, table.mean(0).double().numpy(), method="BFGS", options={"gtol": 1e-9}).x
    found = reduced(geometric_median(iterations=200), updates).delta["a"].double().numpy()
    assert found == pytest.approx(wanted, abs=1e-4)
    assert distance(found) <= distance(table.mean(0).double().numpy()) - 0.1


@settings(deadline=None, max_examples=40)
@given(
    honest=st.integers(4, 8),
    sign=st.sampled_from([-1.0, 1.0]),
    size=st.sampled_from([10.0, 1e6, HUGE]),
    same=st.booleans(),
)
def test_a_minority_of_attackers_cannot_move_the_result_far(honest: int, sign: float, size: float, same: bool) -> None:
    """Each coordinate of the median and the trimmed mean, and Krum's choice, stay among the honest values."""
    attackers = (honest - 1) // 3
    good = vectors(honest, honest)
    bad = sign * size * (torch.ones(attackers, 6) if same else 1 + vectors(attackers, 99).abs())
    updates = split_in_two(torch.cat([good, bad]))
    share = attackers / (honest + attackers) + 1e-9
    low, high = good.double().numpy().min(0) - 1e-6, good.double().numpy().max(0) + 1e-6
    for method in (median(), trimmed_mean(share), krum(share)):
        found = joined(reduced(method, updates).delta)
        assert ((low <= found) & (found <= high)).all(), method.name
    center = good.double().numpy().mean(0)
    spread = np.linalg.norm(good.double().numpy() - center, axis=1).max()
    bound = 2 * spread * honest / (honest - attackers) + 1e-3  # Lopuhaä and Rousseeuw 1991, as RFA cites it
    found = joined(reduced(geometric_median(iterations=50), updates).delta)
    assert np.linalg.norm(found - center) <= bound
    if attackers:
        assert np.linalg.norm(joined(reduced(fedavg(), updates).delta) - center) > size / 20, "the mean follows them"


@pytest.mark.parametrize("rule", RULES)
def test_each_name_is_combined_over_the_clients_that_sent_it(rule: Callable[[], Method]) -> None:
    table = vectors(5)
    both = split_in_two(table)
    mixed = [*both[:3], *(update(each.client, {"b": each.delta["b"]}) for each in both[3:])]
    found = reduced(rule(), mixed)
    of_a = reduced(rule(), [update(each.client, {"a": each.delta["a"]}) for each in both[:3]])
    of_b = reduced(rule(), [update(each.client, {"b": each.delta["b"]}) for each in both])
    assert tensors.equal(found.delta, {**of_a.delta, **of_b.delta})
    assert found.cohort == 5


@pytest.mark.parametrize("rule", RULES)
def test_arrival_order_types_and_slots(rule: Callable[[], Method]) -> None:
    table = vectors(6).to(torch.bfloat16)
    updates = [update(f"c{i}", {"a": row}, slots={"extra": {"a": 2 * row}}) for i, row in enumerate(table)]
    updates[4] = update("c4", updates[4].delta)  # without the slot
    forward, backward = (reduced(rule(), some) for some in (updates, updates[::-1]))
    assert tensors.equal(forward.delta, backward.delta)
    assert forward.delta["a"].dtype == torch.bfloat16
    kept = [each for each in updates if each.slots]
    doubled = reduced(rule(), [update(each.client, {"a": 2 * each.delta["a"]}) for each in kept])
    assert tensors.equal(dict(forward.slots["extra"]), doubled.delta)


class Mean(ServerRule):
    """The unweighted mean."""

    def reduce(self, server: Server, updates, population: int) -> Aggregate:  # type: ignore[no-untyped-def]
        received = sorted(updates, key=lambda each: each.client)
        names = received[0].delta
        return Aggregate(
            {name: torch.stack([each.delta[name] for each in received]).mean(0) for name in names}, {}, len(received)
        )


def test_rules_that_leave_nobody_out_are_the_mean() -> None:
    plain = final_params(
        play(toy_run(Method("mean", server_rule=Mean()), count=3), toy_model(), Clients(a=8, b=5, c=3))
    )
    for method in (trimmed_mean(0.0), krum(0.0, keep=3)):
        found = final_params(play(toy_run(method, count=3), toy_model(), Clients(a=8, b=5, c=3)))
        assert max(float((found[name] - plain[name]).abs().max()) for name in plain) < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_one_client_gives_fedavg_bit_for_bit(rule: Callable[[], Method]) -> None:
    robust, plain = (
        final_params(play(toy_run(method, count=2), toy_model(), Clients(a=8))) for method in (rule(), fedavg())
    )
    assert tensors.equal(robust, plain)


class SignFlip(UpdateTransform):
    """The clients in `bad` send six times the opposite of what they learned."""

    def __init__(self, *bad: str) -> None:
        self.bad = bad

    def encode(self, sent: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        if sent.client in self.bad:
            return Update(sent.client, tensors.scale(sent.delta, -6.0), {}, sent.weight, sent.steps, sent.loss), {}
        return sent, {}


class SameQuadratics(QuadraticClients):
    """All clients have the first client's problem, so every honest update points to one optimum."""

    def __init__(self) -> None:
        super().__init__()
        self.H, self.a = self.H[:1].repeat(4, 0), self.a[:1].repeat(4, 0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("rule", [median(), trimmed_mean(0.25), krum(0.25), geometric_median()], ids=lambda m: m.name)
def test_robust_rules_reach_the_optimum_that_an_attacker_hides_from_fedavg(rule: Method) -> None:
    clients = SameQuadratics()
    attack = Method("attack", transforms=(SignFlip("c1"),))

    def distance(method: Method, rounds: int) -> float:
        run = toy_run(compose(method, attack), rounds, lr=LR, batch_size=1, drift=False, max_norm=None)
        return float(np.linalg.norm(as_vector(final_params(play(run, Quadratic(), clients, block=1))) - clients.a[0]))

    assert distance(rule, 60) < 1e-2
    assert distance(fedavg(), 10) > 1.0


def test_shares_of_half_or_more_are_refused() -> None:
    with pytest.raises(OptionError, match=r"method\.trim is 0\.5; it must be a number from 0 and below 0\.5"):
        build("trimmed-mean", {"trim": 0.5})
    with pytest.raises(OptionError, match=r"method\.attackers"):
        build("krum", {"attackers": 0.7})
    with pytest.raises(OptionError, match=r"method\.keep"):
        build("krum", {"keep": 0})
