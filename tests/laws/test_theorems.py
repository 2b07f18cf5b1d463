"""FedAvg, FedProx and FedFrozen on quadratic clients: rounds are affine maps with closed-form fixed points."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from quadratics import (
    LR,
    Quadratic,
    QuadraticClients,
    X,
    Y,
    as_vector,
    client_step_matrix,
    final_point,
    fixed_point,
    initial_point,
    quadratic_rounds,
)

from partita.core.compose import compose
from partita.core.optim import SGD
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.core.settings import Run, Training
from partita.engines.simulation import SimulationEngine
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedprox import fedprox


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("steps", [1, 5])
def test_every_round_is_an_affine_map(steps: int, mu: float) -> None:
    bowls, w = QuadraticClients(), initial_point()
    B = client_step_matrix(bowls.H, steps, mu)
    for each in islice(quadratic_rounds(fedprox(mu), bowls, steps), 4):
        w = w - np.einsum("i,ijk,ik->j", bowls.p, B, w - bowls.a)
        np.testing.assert_allclose(as_vector(each.server.params), w, rtol=0, atol=1e-12)


def test_fedavg_converges_to_its_closed_form_not_the_optimum() -> None:
    bowls = QuadraticClients()
    fixed = fixed_point(bowls.p, client_step_matrix(bowls.H, 5), bowls.a)
    np.testing.assert_allclose(final_point(fedavg(), bowls, 5), fixed, rtol=0, atol=1e-7)
    assert np.linalg.norm(fixed - bowls.optimum()) > 0.05


def test_fedavg_with_one_step_reaches_the_optimum() -> None:
    bowls = QuadraticClients()
    np.testing.assert_allclose(
        fixed_point(bowls.p, client_step_matrix(bowls.H, 1), bowls.a), bowls.optimum(), atol=1e-12
    )
    np.testing.assert_allclose(final_point(fedavg(), bowls, 1, 70), bowls.optimum(), rtol=0, atol=1e-7)


def test_fedavg_with_equal_curvatures_reaches_the_optimum() -> None:
    bowls = QuadraticClients(alike=True)
    np.testing.assert_allclose(bowls.optimum(), bowls.p @ bowls.a, atol=1e-12)
    np.testing.assert_allclose(final_point(fedavg(), bowls, 5), bowls.optimum(), rtol=0, atol=1e-7)


@pytest.mark.slow
def test_fedprox_converges_to_its_closed_form_closer_to_the_optimum() -> None:
    bowls = QuadraticClients()
    fixed = fixed_point(bowls.p, client_step_matrix(bowls.H, 5, mu=2.0), bowls.a)
    np.testing.assert_allclose(final_point(fedprox(2.0), bowls, 5, 80), fixed, rtol=0, atol=1e-7)
    plain = fixed_point(bowls.p, client_step_matrix(bowls.H, 5), bowls.a)
    assert 0.01 < np.linalg.norm(fixed - bowls.optimum()) < np.linalg.norm(plain - bowls.optimum())


def frozen_fixed_point(bowls: QuadraticClients, y: np.ndarray, steps: int, mu: float = 0.0) -> np.ndarray:
    """With y fixed, a client's loss in x has curvature H_xx and its minimum at a_x - H_xx^-1 H_xy (y - a_y)."""
    Hxx, Hxy = bowls.H[:, :X, :X], bowls.H[:, :X, X:]
    shift = np.linalg.solve(Hxx, np.einsum("ijk,ik->ij", Hxy, y - bowls.a[:, X:])[..., None])[..., 0]
    return fixed_point(bowls.p, client_step_matrix(Hxx, steps, mu), bowls.a[:, :X] - shift)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("warmup", [0, 3])
def test_fedfrozen_converges_to_the_fixed_point_of_the_unfrozen_block(warmup: int) -> None:
    bowls = QuadraticClients()
    w, B = initial_point(), client_step_matrix(bowls.H, 5)
    for _ in range(warmup):
        w = w - np.einsum("i,ijk,ik->j", bowls.p, B, w - bowls.a)
    final = final_point(fedfrozen(warmup), bowls, 5)
    np.testing.assert_allclose(final[X:], w[X:], rtol=0, atol=1e-12)
    np.testing.assert_allclose(final[:X], frozen_fixed_point(bowls, w[X:], 5), rtol=0, atol=1e-7)
    assert np.linalg.norm(final - fixed_point(bowls.p, B, bowls.a)) > 0.05


def test_fedfrozen_with_fedprox_converges_to_its_fixed_point() -> None:
    bowls = QuadraticClients()
    final = final_point(compose(fedfrozen(0), fedprox(0.7)), bowls, 5)
    np.testing.assert_allclose(final[:X], frozen_fixed_point(bowls, initial_point()[X:], 5, 0.7), rtol=0, atol=1e-7)


def test_client_momentum_has_its_own_fixed_point() -> None:
    """Heavy-ball momentum is linear too: the map of (w, velocity) is a power of a block matrix."""
    bowls, beta, steps = QuadraticClients(), 0.5, 4
    eye = np.eye(X + Y)
    B = []
    for H in bowls.H:
        one = np.block([[eye - LR * H, -LR * beta * eye], [H, beta * eye]])  # of (w - a, velocity)
        B.append(eye - np.linalg.matrix_power(one, steps)[: X + Y, : X + Y])
    fixed = fixed_point(bowls.p, np.stack(B), bowls.a)
    run = Run(fedavg(), Training(LR, SGD(momentum=beta), batch_size=9, steps=steps), 24, Key(0), drift=False)
    model = Quadratic()
    *_, final = rounds(run, model, SimulationEngine(run, model, bowls, block=4))
    np.testing.assert_allclose(as_vector(final.server.params), fixed, rtol=0, atol=1e-7)
