"""FedNova removes the bias of unequal numbers of local steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import Clients, final_params, play, toy_model, toy_run
from quadratics import LR, Quadratic, QuadraticClients, X, as_vector, fixed_point, initial_point, matrix_powers

from partita.core import tensors
from partita.core.compose import compose
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.optim import SGD, AdamW
from partita.core.rounds import RoundResult
from partita.core.server_rule import Server
from partita.core.versions import ParameterVersions
from partita.methods.fedavg import fedavg
from partita.methods.fednova import fednova
from partita.methods.fedprox import fedprox

STEPS = np.array([1, 2, 3, 4])  # one epoch in batches of one: as many steps as examples


def play_quadratics(method: Method, count: int, cohort: float = 1.0) -> list[RoundResult]:
    return play(
        toy_run(method, count, lr=LR, batch_size=1, cohort=cohort, drift=False),
        Quadratic(),
        QuadraticClients(),
        block=1,
    )


def client_step_matrices(lr: float) -> np.ndarray:
    """The matrices I - (I - lr H_i)^steps_i of the client maps."""
    eye = np.eye(5)
    maps = eye - lr * QuadraticClients().H
    return np.stack([eye - matrix_powers(maps[i : i + 1], int(STEPS[i]))[0] for i in range(4)])


@pytest.mark.parametrize("cohort", [1.0, 0.5])
def test_fednova_rounds_match_the_formula(cohort: float) -> None:
    bowls, w, B = QuadraticClients(), initial_point(), client_step_matrices(LR)
    for each in play_quadratics(fednova(), 8, cohort):
        asked = [int(client[1:]) for client in each.cohort]
        p = bowls.p[asked] / bowls.p[asked].sum()
        directions = [-(B[i] @ (w - bowls.a[i])) / STEPS[i] for i in asked]
        w = w + (p @ STEPS[asked]) * np.einsum("i,ij->j", p, np.stack(directions))
        np.testing.assert_allclose(as_vector(each.server.params), w, rtol=0, atol=1e-12)


def test_fednova_removes_the_bias_of_unequal_steps() -> None:
    """At small rates a client moves by lr · steps_i · H_i: FedAvg weights clients by steps, FedNova does not."""
    bowls = QuadraticClients()
    weighted = fixed_point(bowls.p * STEPS, bowls.H, bowls.a)
    bias = np.linalg.norm(weighted - bowls.optimum())
    assert bias > 0.1
    for rate in (1e-2, 1e-3, 1e-4):
        plain = fixed_point(bowls.p, client_step_matrices(rate), bowls.a)
        nova = fixed_point(bowls.p / STEPS, client_step_matrices(rate), bowls.a)
        assert np.linalg.norm(plain - weighted) < 10 * rate
        assert np.linalg.norm(nova - bowls.optimum()) < 10 * rate


def test_fednova_converges_to_its_closed_form() -> None:
    fixed = fixed_point(QuadraticClients().p / STEPS, client_step_matrices(LR), QuadraticClients().a)
    np.testing.assert_allclose(as_vector(final_params(play_quadratics(fednova(), 60))), fixed, rtol=0, atol=1e-7)


def test_fednova_leaves_the_optimum_only_in_second_order() -> None:
    """From the optimum, half the rate moves half as far under FedAvg and a quarter as far under FedNova."""
    best = torch.tensor(QuadraticClients().optimum())
    there = Server({"x": best[:X], "y": best[X:]}, versions=ParameterVersions({"x": 0, "y": 0}))
    moved = {}
    for method in (fedavg(), fednova()):
        for rate in (0.01, 0.005):
            run = toy_run(method, 1, lr=rate, batch_size=1)
            after = as_vector(final_params(play(run, Quadratic(), QuadraticClients(), there)))
            moved[method.name, rate] = np.linalg.norm(after - best.numpy())
    assert moved["fedavg", 0.01] / moved["fedavg", 0.005] == pytest.approx(2, abs=0.1)
    assert moved["fednova", 0.01] / moved["fednova", 0.005] == pytest.approx(4, abs=0.1)
    assert moved["fednova", 0.005] < 0.05 * moved["fedavg", 0.005]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_fednova_with_equal_steps_is_fedavg_bit_for_bit(steps: int) -> None:
    """Division by powers of two is exact."""
    clients = Clients(a=5, b=9, c=6)
    one, two = (play(toy_run(method, 3, steps=steps), toy_model(), clients) for method in (fednova(), fedavg()))
    assert tensors.equal(final_params(one), final_params(two))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": AdamW()}, "FedNovaServer is derived for sgd, not for adamw"),
        ({"optimizer": SGD(0.9)}, "FedNovaServer is derived for sgd, not for sgd with momentum"),
        ({"optimizer": SGD(0.9, nesterov=True)}, "FedNovaServer is derived for sgd, not for sgd with momentum"),
        ({"clip": 0.5}, r"training\.clip is 0.5, but FedNovaServer is derived for .*leave"),
    ],
)
def test_fednova_refuses_what_it_is_not_derived_for(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(MethodError, match=f"fednova: {words}"):
        toy_run(fednova(), **settings)


@pytest.mark.parametrize("order", [(fednova(), fedprox(0.1)), (fedprox(0.1), fednova())])
def test_fednova_refuses_a_proximal_term(order: tuple[Method, Method]) -> None:
    """With the pull mu, step k of tau counts (1 - lr mu)^(tau - k) in the update, so the steps do not count alike."""
    with pytest.raises(MethodError, match=r"FedNovaServer divides .* the proximal term of FedProxClient"):
        compose(*order)
    assert compose(fednova(), fedprox(0.0))


def test_fednova_with_weight_decay_leaves_the_regularized_optimum_only_in_second_order() -> None:
    """SGD adds the decay to the gradient, so it belongs to the objective, and all steps still count alike."""
    bowls, decay = QuadraticClients(), 0.4
    curvature = np.einsum("i,ijk->jk", bowls.p, bowls.H) + decay * np.eye(5)
    best = torch.tensor(np.linalg.solve(curvature, np.einsum("i,ijk,ik->j", bowls.p, bowls.H, bowls.a)))
    there = Server({"x": best[:X], "y": best[X:]}, versions=ParameterVersions({"x": 0, "y": 0}))
    moved = []
    for rate in (0.01, 0.005):
        run = toy_run(fednova(), 1, SGD(weight_decay=decay), lr=rate, batch_size=1)
        after = as_vector(final_params(play(run, Quadratic(), bowls, there)))
        moved.append(np.linalg.norm(after - best.numpy()))
    assert moved[0] / moved[1] == pytest.approx(4, abs=0.1)
