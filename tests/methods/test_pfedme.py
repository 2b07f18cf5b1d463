"""pFedMe: a plain torch loop, the proximal problem, and FedAvg with one step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import OPTIMIZERS, Clients, client_batches, max_difference, play, toy_model, toy_run
from quadratics import LR, QuadraticClients, as_vector, copy_as_vector, initial_point, quadratic_rounds
from torch import Tensor

from partita.core import tensors
from partita.core.dp_settings import PrivacySettings
from partita.core.method_error import MethodError
from partita.core.personal_copy import add_personal_copy, copy_name
from partita.core.tensors import Tensors
from partita.methods.fedavg import fedavg
from partita.methods.pfedme import pfedme
from partita.storage.client_store import MemoryStore

CLIENTS = Clients(a=5, b=9, c=6)
BASE = toy_model()
MODEL = add_personal_copy(toy_model())


def gradient(params: Tensors, inputs: Tensors, targets: Tensor) -> Tensors:
    live = {name: value.clone().requires_grad_() for name, value in params.items()}
    loss = BASE.losses(BASE(live, inputs), targets).mean()
    return dict(zip(live, torch.autograd.grad(loss, list(live.values())), strict=True))


@pytest.mark.parametrize("beta", [1.0, 1.5])
def test_rounds_equal_a_plain_loop(beta: float) -> None:
    lam, inner_lr, inner_steps, store = 4.0, 0.1, 3, MemoryStore()
    run = toy_run(pfedme(lam, inner_steps, inner_lr, beta), 3, cohort=2)
    start = BASE.initial
    for number, result in enumerate(play(run, MODEL, CLIENTS, store=store)):
        ends = []
        for client in result.cohort:
            w = theta = start
            for indices in client_batches(run, number, client, CLIENTS[client].train):
                batch = CLIENTS[client].train.take(indices)
                for _ in range(inner_steps):
                    slope = gradient(theta, batch.inputs, batch.targets)
                    theta = {name: theta[name] - inner_lr * (slope[name] + lam * (theta[name] - w[name])) for name in w}
                w = {name: w[name] - run.training.lr * lam * (w[name] - theta[name]) for name in w}
            ends.append(w)
            own = store.load(client, 3).personal
            if all(client not in later for later in _cohorts(run, number)):
                assert max_difference({name: own[copy_name(name)] for name in w}, theta) < 1e-5
        mean = {name: torch.stack([w[name] for w in ends]).mean(0) for name in start}
        start = {name: (1 - beta) * start[name] + beta * mean[name] for name in start}
        found = {name: result.server.params[name] for name in start}
        assert max_difference(found, start) < 1e-5
        start = found


def _cohorts(run: object, number: int) -> list[list[str]]:
    return [run.draw_cohort(later, list(CLIENTS.clients)) for later in range(number + 1, run.rounds)]  # type: ignore[attr-defined]


def test_many_inner_steps_solve_the_proximal_problem() -> None:
    """On a quadratic, theta(w) = (H + lam I)^-1 (H a + lam w), and w moves by lr lam (w - theta(w))."""
    bowls, lam, steps, store = QuadraticClients(), 2.0, 2, MemoryStore()
    [result] = quadratic_rounds(pfedme(lam, inner_steps=40, inner_lr=0.28), bowls, steps, 1, store=store)
    ends = []
    for place, client in enumerate(bowls.clients):
        H, a, w = bowls.H[place], bowls.a[place], initial_point()
        for _ in range(steps):
            theta = np.linalg.solve(H + lam * np.eye(5), H @ a + lam * w)
            w = w - LR * lam * (w - theta)
        np.testing.assert_allclose(copy_as_vector(store.load(client, 1)), theta, rtol=0, atol=1e-9)
        ends.append(w)
    np.testing.assert_allclose(as_vector(result.server.params), np.mean(ends, 0), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_shared_model_minimizes_the_mean_of_the_moreau_envelopes() -> None:
    """The gradient of a client's envelope at w is lam (w - theta(w)), so at the fixed point these add up to zero."""
    bowls, lam = QuadraticClients(), 2.0
    *_, result = quadratic_rounds(pfedme(lam, inner_steps=12, inner_lr=0.28, beta=2.5), bowls, 1, 25)
    w, eye = as_vector(result.server.params), np.eye(5)
    pulls = [w - np.linalg.solve(H + lam * eye, H @ a + lam * w) for H, a in zip(bowls.H, bowls.a, strict=True)]
    assert np.abs(np.mean(pulls, 0)).max() < 1e-4
    assert np.abs(np.mean(bowls.H @ (w - bowls.a)[..., None], 0)).max() > 1e-2, "it is not the optimum of the mean"


def test_one_step_with_one_inner_step_is_fedavg() -> None:
    """w - theta = inner_lr · gradient, up to the rounding of the difference, and lam = 1 / inner_lr."""
    bowls = QuadraticClients(sizes=(2, 2, 2, 2))
    one, two = (
        list(quadratic_rounds(method, bowls, 1, 6)) for method in (pfedme(2.0, inner_steps=1, inner_lr=0.5), fedavg())
    )
    for left, right in zip(one, two, strict=True):
        np.testing.assert_allclose(as_vector(left.server.params), as_vector(right.server.params), rtol=0, atol=1e-13)


def test_beta_scales_the_step_of_the_server() -> None:
    ends = [play(toy_run(pfedme(beta=beta), 1), MODEL, CLIENTS)[0].server.params for beta in (1.0, 2.0)]
    for name, value in BASE.initial.items():
        torch.testing.assert_close(ends[1][name] - value, 2 * (ends[0][name] - value), rtol=0, atol=1e-6)


def test_theta_starts_at_the_received_model_in_every_round() -> None:
    """The state that a client kept does not change its next round."""
    runs = []
    for kept in (0.0, 3.0):
        store, run = MemoryStore(), toy_run(pfedme(), 2)
        first = play(replace(run, rounds=1), MODEL, CLIENTS, store=store)
        for client in CLIENTS.clients:
            state = store.load(client, 1)
            moved = {name: value + kept for name, value in state.personal.items()}
            store.save(client, 0, replace(state, personal=moved))
        play(run, MODEL, CLIENTS, server=first[-1].server, start=1, store=store)
        runs.append(store.load("b", 2).personal)
    assert tensors.equal(*runs)


def test_parameters_without_a_copy_take_the_gradient_of_the_last_inner_step() -> None:
    model = add_personal_copy(toy_model(), ("head",))
    run = toy_run(pfedme(4.0, 1, 0.1, copied=("head",)), 1, steps=1, cohort=1, batch_size=50)
    [result] = play(run, model, CLIENTS)
    [client] = result.cohort
    batch = CLIENTS[client].train.take(torch.arange(len(CLIENTS[client].train)))
    slope = gradient(BASE.initial, batch.inputs, batch.targets)
    for name, value in BASE.initial.items():
        factor = 4.0 * 0.1 if name == "head.weight" else 1.0
        expected = value - run.training.lr * factor * slope[name]
        torch.testing.assert_close(result.server.params[name], expected, rtol=0, atol=1e-6)


def test_other_optimizers_invalid_numbers_and_example_level_privacy_are_refused() -> None:
    with pytest.raises(MethodError, match="pfedme: PFedMeClient is derived for sgd, not for adamw"):
        toy_run(pfedme(), 1, OPTIMIZERS["adamw"])
    for wrong in ({"lam": 0.0}, {"inner_steps": 0}, {"inner_lr": -1.0}, {"beta": 0.0}):
        with pytest.raises(MethodError, match=r"give 1 or more inner_steps, and more than 0 for the others"):
            pfedme(**wrong)  # type: ignore[arg-type]
    with pytest.raises(MethodError, match=r"pfedme: PFedMeClient .*one more release"):
        replace(pfedme(), privacy=PrivacySettings(clip=1.0, noise=1.0))
