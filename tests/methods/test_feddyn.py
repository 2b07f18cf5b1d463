"""FedDyn against the paper's pseudocode in numpy, and its optimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import Clients, final_params, play, toy_model, toy_run
from quadratics import LR, QuadraticClients, as_vector, client_step_matrix, final_point, fixed_point, initial_point
from quadratics import quadratic_rounds as play_bowls

from partita.core import tensors
from partita.core.client import ClientState, begin_round, finish_round
from partita.core.client_rule import Context
from partita.core.compose import compose
from partita.core.method_error import MethodError
from partita.core.model import Output
from partita.core.plan import Phase, Plan
from partita.core.rounds import initial_server, make_job
from partita.methods.feddyn import feddyn
from partita.methods.fedper import fedper
from partita.methods.fedprox import fedprox
from partita.storage.client_store import MemoryStore
from partita.training.local_training import train_clients

EQUAL_SIZES = (2, 2, 2, 2)


@pytest.mark.parametrize("cohort", [1.0, 0.5])
def test_feddyn_rounds_match_the_paper(cohort: float) -> None:
    bowls, steps, alpha = QuadraticClients(), 5, 0.8
    w, h, g = initial_point(), np.zeros(5), np.zeros((4, 5))
    for each in play_bowls(feddyn(alpha), bowls, steps, 12, cohort=cohort):
        ends = []
        for i in (int(client[1:]) for client in each.cohort):
            y = w
            for _ in range(steps):
                y = y - LR * (bowls.H[i] @ (y - bowls.a[i]) - g[i] + alpha * (y - w))
            g[i] = g[i] - alpha * (y - w)
            ends.append(y)
        h = h - alpha / 4 * np.sum(np.stack(ends) - w, 0)
        w = np.mean(ends, 0) - h / alpha
        np.testing.assert_allclose(as_vector(each.server.params), w, rtol=0, atol=1e-11)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("cohort", "count"), [(1.0, 50), (0.5, 120)])
def test_feddyn_reaches_the_optimum_that_fedavg_misses(cohort: float, count: int) -> None:
    bowls = QuadraticClients(sizes=EQUAL_SIZES)
    np.testing.assert_allclose(final_point(feddyn(1.0), bowls, 5, count, cohort), bowls.optimum(), rtol=0, atol=1e-6)
    assert np.linalg.norm(fixed_point(bowls.p, client_step_matrix(bowls.H, 5), bowls.a) - bowls.optimum()) > 0.05


def test_feddyn_first_client_round_is_fedprox_bit_for_bit() -> None:
    model, clients, updates = toy_model(), Clients(a=7, b=5), []
    for method in (feddyn(0.3), fedprox(0.3)):
        run = toy_run(method, 1)
        job, _ = make_job(run, model, initial_server(run, model), 0, "a")
        each = begin_round(run, model, job, ClientState(), clients["a"].train)
        updates.append(finish_round(run, each, train_clients(run, [each])[0])[0])
    assert tensors.equal(updates[0].delta, updates[1].delta)


def test_feddyn_first_round_moves_twice_as_far_as_fedprox() -> None:
    """There is no linear term yet, so the correction adds the mean once more."""
    model, clients = toy_model(), Clients(a=6, b=6)
    one, two = (final_params(play(toy_run(method, 1), model, clients)) for method in (feddyn(0.3), fedprox(0.3)))
    for name, value in model.initial.items():
        np.testing.assert_allclose(one[name] - value, 2 * (two[name] - value), rtol=0, atol=1e-6)


def test_feddyn_leaves_kept_parameters_alone() -> None:
    """With everything kept by the clients, training is plain."""
    model, clients = toy_model(), Clients(a=6, b=6)
    everything = tuple(sorted(frozenset().union(*model.tags.values())))
    mixed = compose(fedper(personal=everything, finetune=0), feddyn(0.5))
    stores = MemoryStore(), MemoryStore()
    for method, store in zip((mixed, fedper(personal=everything, finetune=0)), stores, strict=True):
        play(toy_run(method, 2), model, clients, store=store)
    for client in clients.clients:
        one, two = (store.load(client, 2).personal for store in stores)
        assert one.keys() == model.all_names()
        assert tensors.equal(one, two)


def test_feddyn_terms_cover_shared_parameters_only() -> None:
    """With a personal head, the gradient of both terms is that of the formula on the body and 0 on the head."""
    model, alpha = toy_model(), 0.5
    head, body = model.names("head"), model.all_names() - model.names("head")
    plan = Plan((Phase(model.all_names()),), up=body, down=body, keep=head)
    tilt = {name: torch.full_like(value, 3.0) for name, value in model.initial.items()}
    ctx = Context(model, plan, model.initial, {}, {"tilt": tilt}, 0.1)
    batch = Clients(a=6)["a"].train.take(torch.arange(6))
    params = {name: (value + 0.2).requires_grad_() for name, value in model.initial.items()}
    terms = [rule.penalty(Output(torch.zeros(())), params, batch, ctx) for rule in feddyn(alpha).client_rules]
    total = sum(term for term in terms if term is not None)
    grads = torch.autograd.grad(total, list(params.values()), materialize_grads=True)
    for name, grad in zip(params, grads, strict=True):
        wanted = torch.zeros_like(grad) if name in head else torch.full_like(grad, alpha * 0.2 - 3.0)
        torch.testing.assert_close(grad, wanted)


def test_feddyn_alpha_must_be_positive() -> None:
    with pytest.raises(MethodError, match=r"method.alpha is 0; it must be above 0"):
        feddyn(0)
