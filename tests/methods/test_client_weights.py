"""SCAFFOLD and FedDyn with clients weighted by examples: rounds in numpy, resting points, and equal sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import Clients, final_params, play, toy_model, toy_run
from quadratics import LR, QuadraticClients, as_vector, final_point, fixed_point, initial_point, quadratic_rounds

from partita.core import tensors
from partita.core.method import Method
from partita.core.sampling import BySize
from partita.core.server_rule import Server
from partita.core.settings import RunError
from partita.core.update import Update
from partita.methods.client_weights import PopulationWeights, Weigh
from partita.methods.feddyn import feddyn
from partita.methods.scaffold import scaffold
from partita.storage.client_store import MemoryStore
from partita.testing.conformance import check_method

SIZES = (1, 2, 5, 12)
Make = Callable[[Weigh], Method]
MAKE: dict[str, Make] = {
    "scaffold": lambda weigh: scaffold(weigh=weigh),
    "feddyn": lambda weigh: feddyn(1.0, weigh=weigh),
}
methods = pytest.mark.parametrize("make", MAKE.values(), ids=list(MAKE))


@pytest.mark.slow
@methods
@pytest.mark.parametrize("cohort", [1.0, 0.5])
def test_clients_rest_at_the_optimum_of_the_mean_with_their_weights(make: Make, cohort: float) -> None:
    bowls, count = QuadraticClients(sizes=SIZES), round(50 / cohort)
    unweighted, pooled = fixed_point(np.ones(4), bowls.H, bowls.a), bowls.optimum()
    assert np.linalg.norm(unweighted - pooled) > 0.5
    np.testing.assert_allclose(final_point(make("clients"), bowls, 5, count, cohort), unweighted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(final_point(make("examples"), bowls, 5, count, cohort), pooled, rtol=0, atol=1e-6)


def total_of(seen: dict[int, int]) -> float:
    """The examples of four clients, as their mean over the clients that have answered."""
    return 4 * sum(seen.values()) / len(seen)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("cohort", [1.0, 0.25])
def test_weighted_scaffold_rounds_match_numpy(cohort: float) -> None:
    """The reference keeps all variates and forms their weighted mean from the start in every round."""
    bowls, steps, lr = QuadraticClients(sizes=SIZES), 5, 0.6
    x, c, own, seen = initial_point(), np.zeros(5), np.zeros((4, 5)), dict[int, int]()
    for each in quadratic_rounds(scaffold(lr, "examples"), bowls, steps, 10, cohort=cohort):
        asked = [int(client[1:]) for client in each.cohort]
        ends = []
        for i in asked:
            y = x
            for _ in range(steps):
                y = y - LR * (bowls.H[i] @ (y - bowls.a[i]) - own[i] + c)
            own[i] = own[i] - c + (x - y) / (steps * LR)
            ends.append(y)
            seen[i] = SIZES[i]
        x = x + lr * (np.average(ends, 0, [SIZES[i] for i in asked]) - x)
        c = np.array(SIZES) @ own / total_of(seen)
        np.testing.assert_allclose(as_vector(each.server.params), x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(as_vector(each.server.state["control"]), c, rtol=0, atol=1e-12)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("cohort", [1.0, 0.25])
def test_weighted_feddyn_rounds_match_numpy(cohort: float) -> None:
    bowls, steps, alpha = QuadraticClients(sizes=SIZES), 5, 0.8
    w, g, seen = initial_point(), np.zeros((4, 5)), dict[int, int]()
    for each in quadratic_rounds(feddyn(alpha, "examples"), bowls, steps, 10, cohort=cohort):
        asked = [int(client[1:]) for client in each.cohort]
        ends = []
        for i in asked:
            y = w
            for _ in range(steps):
                y = y - LR * (bowls.H[i] @ (y - bowls.a[i]) - g[i] + alpha * (y - w))
            g[i] = g[i] - alpha * (y - w)
            ends.append(y)
            seen[i] = SIZES[i]
        h = np.array(SIZES) @ g / total_of(seen)
        w = np.average(ends, 0, [SIZES[i] for i in asked]) - h / alpha
        np.testing.assert_allclose(as_vector(each.server.params), w, rtol=0, atol=1e-11)


def test_weighted_common_variate_is_the_weighted_mean_of_client_variates() -> None:
    bowls, store = QuadraticClients(sizes=SIZES), MemoryStore()
    *_, final = quadratic_rounds(scaffold(weigh="examples"), bowls, 3, 12, cohort=0.5, store=store)
    own = [as_vector(store.load(client, 12).memory["control"]) for client in bowls.clients]  # all have taken part
    np.testing.assert_allclose(as_vector(final.server.state["control"]), bowls.p @ own, rtol=0, atol=1e-12)


@pytest.mark.fast_cases(1)
@methods
@pytest.mark.parametrize("cohort", [1.0, 0.4])
def test_equal_sizes_give_the_same_bits_with_both_weights(make: Make, cohort: float) -> None:
    clients = Clients(a=6, b=6, c=6, d=6, e=6)
    one, two = (
        final_params(play(toy_run(make(weigh), 6, cohort=cohort), toy_model(), clients))
        for weigh in ("clients", "examples")
    )
    assert tensors.equal(one, two)


@pytest.mark.slow
@methods
def test_weights_by_examples_keep_the_promises_of_a_method(make: Make) -> None:
    """Resuming matters most here: the server's state has sizes of clients. Rounding grows in a variate, so 1e-4."""
    check_method(make("examples"), toy_model(), Clients(c0=3, c1=9, c2=12, c3=6), tolerance=1e-4)


@pytest.mark.fast_cases(1)
@methods
def test_unequal_sizes_do_not(make: Make) -> None:
    clients = Clients(a=2, b=6, c=12)
    one, two = (final_params(play(toy_run(make(weigh), 2), toy_model(), clients)) for weigh in ("clients", "examples"))
    assert not tensors.equal(one, two)


def test_a_client_that_left_keeps_its_weight() -> None:
    sizes = {client: torch.tensor(size, dtype=torch.float64) for client, size in (("a", 1.0), ("b", 2.0), ("c", 9.0))}
    weights = PopulationWeights("examples", Server({}, {"examples": sizes}))
    assert weights.total(3) == 12
    assert weights.total(2) == 12  # one of the three is not connected
    assert weights.total(6) == 24  # three have not answered yet
    assert weights.add(Update("d", {}, {}, 4.0, {}, None)) == 4
    assert weights.total(4) == 16
    assert weights.slots(4)["total"]["examples"] == 16


@methods
def test_weights_by_examples_refuse_a_sampling_that_hides_sizes(make: Make) -> None:
    assert toy_run(make("clients"), sampling=BySize())
    assert toy_run(make("examples"), sampling=BySize(equal_weights=False))
    with pytest.raises(
        RunError, match=r"sampling\.equal_weights is true and .* weighs clients by .*method\.weigh = 'clients'"
    ):
        toy_run(make("examples"), sampling=BySize())
