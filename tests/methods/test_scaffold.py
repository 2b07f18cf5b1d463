"""SCAFFOLD against the paper's pseudocode in numpy, its optimum, and its control variates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import Clients, final_params, play, toy_model, toy_run
from quadratics import (
    LR,
    Quadratic,
    QuadraticClients,
    as_vector,
    client_step_matrix,
    final_point,
    fixed_point,
    initial_point,
)
from quadratics import quadratic_rounds as play_bowls

from partita.core import tensors
from partita.core.client_rule import Context
from partita.core.method_error import MethodError
from partita.core.optim import SGD, AdamW
from partita.core.plan import Phase, Plan
from partita.core.rng import Key
from partita.core.settings import Run, Training
from partita.methods.fedavg import fedavg
from partita.methods.scaffold import ScaffoldClient, scaffold
from partita.storage.client_store import MemoryStore
from partita.testing.toy import ToyTransformer

EQUAL_SIZES = (2, 2, 2, 2)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("cohort", [1.0, 0.5])
@pytest.mark.parametrize("lr", [1.0, 0.6])
def test_scaffold_rounds_match_the_paper(cohort: float, lr: float) -> None:
    """Sizes differ on purpose: in the paper all clients count equally."""
    bowls, steps = QuadraticClients(), 5
    x, c, own = initial_point(), np.zeros(5), np.zeros((4, 5))
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
        np.testing.assert_allclose(as_vector(each.server.params), x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(as_vector(each.server.state["control"]), c, rtol=0, atol=1e-12)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("cohort", "count"), [(1.0, 45), (0.5, 100)])
def test_scaffold_reaches_the_optimum_that_fedavg_misses(cohort: float, count: int) -> None:
    bowls = QuadraticClients(sizes=EQUAL_SIZES)
    np.testing.assert_allclose(final_point(scaffold(), bowls, 5, count, cohort), bowls.optimum(), rtol=0, atol=1e-5)
    assert np.linalg.norm(fixed_point(bowls.p, client_step_matrix(bowls.H, 5), bowls.a) - bowls.optimum()) > 0.05


@pytest.mark.slow
def test_fedavg_with_half_the_clients_has_the_same_bias_on_average() -> None:
    """All cohorts are equally likely, so the mean affine map and its fixed point are those of all clients."""
    bowls, path = QuadraticClients(sizes=EQUAL_SIZES), []
    for each in play_bowls(fedavg(), bowls, 5, 160, cohort=0.5):
        path.append(as_vector(each.server.params))
    fixed = fixed_point(bowls.p, client_step_matrix(bowls.H, 5), bowls.a)
    bias = np.linalg.norm(fixed - bowls.optimum())
    assert np.linalg.norm(np.mean(path[20:], 0) - fixed) < 0.35 * bias
    assert np.linalg.norm(np.mean(path[20:], 0) - bowls.optimum()) > 0.65 * bias


def test_scaffold_server_control_is_the_mean_of_client_controls() -> None:
    store = MemoryStore()
    *_, final = play_bowls(scaffold(), QuadraticClients(), 3, 9, cohort=0.5, store=store)
    own = [
        as_vector(store.load(client, 9).memory["control"])
        for client in QuadraticClients.clients
        if store.load(client, 9).memory
    ]
    np.testing.assert_allclose(as_vector(final.server.state["control"]), np.sum(own, 0) / 4, rtol=0, atol=1e-12)


def test_scaffold_first_round_is_fedavg_bit_for_bit() -> None:
    """All control variates are zero in it, and clients of equal size have equal weights."""
    clients = Clients(a=6, b=6, c=6)
    one, two = (play(toy_run(method, 1), toy_model(), clients) for method in (scaffold(), fedavg()))
    assert tensors.equal(final_params(one), final_params(two))


def test_scaffold_does_not_correct_kept_parameters() -> None:
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


@pytest.mark.slow
def test_scaffold_with_weight_decay_reaches_the_regularized_optimum() -> None:
    """SGD adds the decay to the gradient, so it belongs to the objective, and control variates correct it too."""
    bowls, decay = QuadraticClients(sizes=EQUAL_SIZES), 0.4
    training = Training(LR, SGD(weight_decay=decay), batch_size=9, steps=5)
    run, model = Run(scaffold(), training, 45, Key(0), drift=False), Quadratic()
    final = as_vector(final_params(play(run, model, bowls)))
    regularized = np.linalg.solve(bowls.H.mean(0) + decay * np.eye(5), np.einsum("ijk,ik->j", bowls.H, bowls.a) / 4)
    np.testing.assert_allclose(final, regularized, rtol=0, atol=1e-5)
    assert np.linalg.norm(regularized - bowls.optimum()) > 0.05


def test_scaffold_refuses_clipped_gradients() -> None:
    said = r"scaffold: training\.clip is 0.5, but ScaffoldClient is derived for .*leave training\.clip out"
    with pytest.raises(MethodError, match=said):
        toy_run(scaffold(), clip=0.5)
    assert toy_run(fedavg(), clip=0.5)


@pytest.mark.parametrize("optimizer", [AdamW(), SGD(momentum=0.9)])
def test_scaffold_refuses_other_optimizers(optimizer: object) -> None:
    with pytest.raises(MethodError, match=r"scaffold: ScaffoldClient is derived for sgd, not for .*without momentum"):
        replace(toy_run(scaffold()), training=toy_run(fedavg(), optimizer=optimizer).training)  # type: ignore[arg-type]
