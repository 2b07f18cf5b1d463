"""SCAFFOLD against the paper's pseudocode in numpy, its optimum, and its control variates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import Clients, last, play, run_of, small
from quadratics import LR, Bowls, end, flat, pull, rest, start
from quadratics import play as play_bowls

from partita.core import tensors
from partita.core.method import Context, MethodError
from partita.core.optim import SGD, AdamW
from partita.core.plan import Phase, Plan
from partita.methods.fedavg import fedavg
from partita.methods.scaffold import ScaffoldClient, scaffold
from partita.storage.client_store import MemoryStore
from partita.testing.toy import ToyTransformer

EVEN = (2, 2, 2, 2)


@pytest.mark.parametrize("cohort", [1.0, 0.5])
@pytest.mark.parametrize("lr", [1.0, 0.6])
def test_every_round_is_the_papers(cohort: float, lr: float) -> None:
    """Sizes differ on purpose: in the paper all clients count equally."""
    bowls, steps = Bowls(), 5
    x, c, own = start(), np.zeros(5), np.zeros((4, 5))
    for each in play_bowls(scaffold(lr), bowls, steps, 12, cohort=cohort):
        asked = [int(client[1:]) for client in each.cohort]
        dx, dc = [], []
        for i in asked:
            y = x
            for _ in range(steps):
                y = y - LR * (bowls.H[i] @ (y - bowls.a[i]) - own[i] + c)
            new = own[i] - c + (x - y) / (steps * LR)
            dx.append(y - x)
            dc.append(new - own[i])
            own[i] = new
        x, c = x + lr * np.mean(dx, 0), c + np.sum(dc, 0) / 4
        np.testing.assert_allclose(flat(each.server.params), x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(flat(each.server.state["control"]), c, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("cohort", "count"), [(1.0, 45), (0.5, 100)])
def test_it_reaches_the_optimum_that_fedavg_misses(cohort: float, count: int) -> None:
    bowls = Bowls(sizes=EVEN)
    np.testing.assert_allclose(end(scaffold(), bowls, 5, count, cohort), bowls.optimum(), rtol=0, atol=1e-5)
    assert np.linalg.norm(rest(bowls.p, pull(bowls.H, 5), bowls.a) - bowls.optimum()) > 0.05


def test_fedavg_of_half_the_clients_misses_it_by_the_same_bias_on_average() -> None:
    """All cohorts are equally likely, so the mean affine map and its fixed point are those of all clients."""
    bowls, path = Bowls(sizes=EVEN), []
    for each in play_bowls(fedavg(), bowls, 5, 160, cohort=0.5):
        path.append(flat(each.server.params))
    fixed = rest(bowls.p, pull(bowls.H, 5), bowls.a)
    bias = np.linalg.norm(fixed - bowls.optimum())
    assert np.linalg.norm(np.mean(path[20:], 0) - fixed) < 0.35 * bias
    assert np.linalg.norm(np.mean(path[20:], 0) - bowls.optimum()) > 0.65 * bias


def test_the_common_variate_stays_the_mean_of_all_clients_own() -> None:
    store = MemoryStore()
    *_, final = play_bowls(scaffold(), Bowls(), 3, 9, cohort=0.5, store=store)
    own = [flat(store.load(client, 9).memory["control"]) for client in Bowls.clients if store.load(client, 9).memory]
    np.testing.assert_allclose(flat(final.server.state["control"]), np.sum(own, 0) / 4, rtol=0, atol=1e-12)


def test_the_first_round_is_fedavgs_bit_for_bit() -> None:
    """All control variates are zero in it, and clients of equal size have equal weights."""
    clients = Clients(a=6, b=6, c=6)
    one, two = (play(run_of(method, 1), small(), clients) for method in (scaffold(), fedavg()))
    assert tensors.equal(last(one), last(two))


def test_what_a_client_keeps_is_not_corrected() -> None:
    model = ToyTransformer(width=4, layers=1)
    head, body = model.names("head"), model.all_names() - model.names("head")
    plan = Plan((Phase(model.all_names()),), up=body, down=body, keep=head)
    ones = {name: torch.ones_like(value) for name, value in model.initial.items()}
    sent = {"control": tensors.scale(ones, 2.0)}
    ctx = Context(model, plan, model.initial, sent, {"control": tensors.scale(ones, 5.0)}, 0.1)
    part = {"layers.0.mlp.weight": ones["layers.0.mlp.weight"]}  # a phase that trains one tensor
    assert ScaffoldClient().gradient(part, ctx).keys() == part.keys()
    corrected = ScaffoldClient().gradient(ones, ctx)
    for name in model.all_names():
        assert torch.equal(corrected[name], ones[name] * (1.0 if name in head else -2.0))


@pytest.mark.parametrize("optimizer", [AdamW(), SGD(momentum=0.9)])
def test_other_optimizers_are_refused(optimizer: object) -> None:
    with pytest.raises(MethodError, match=r"scaffold: ScaffoldClient is derived for sgd, not for .*without momentum"):
        replace(run_of(scaffold()), training=run_of(fedavg(), optimizer=optimizer).training)  # type: ignore[arg-type]
