"""FedAvg, FedProx and FedFrozen on quadratic clients: rounds are affine maps with closed-form fixed points."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from quadratics import LR, Bowls, Quadratic, X, Y, end, flat, play, pull, rest, start

from partita.core.method import compose
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
def test_every_round_is_the_affine_map(steps: int, mu: float) -> None:
    bowls, w = Bowls(), start()
    B = pull(bowls.H, steps, mu)
    for each in islice(play(fedprox(mu), bowls, steps), 4):
        w = w - np.einsum("i,ijk,ik->j", bowls.p, B, w - bowls.a)
        np.testing.assert_allclose(flat(each.server.params), w, rtol=0, atol=1e-12)


def test_fedavg_rests_at_its_closed_form_and_not_at_the_optimum() -> None:
    bowls = Bowls()
    fixed = rest(bowls.p, pull(bowls.H, 5), bowls.a)
    np.testing.assert_allclose(end(fedavg(), bowls, 5), fixed, rtol=0, atol=1e-7)
    assert np.linalg.norm(fixed - bowls.optimum()) > 0.05


def test_with_one_step_fedavg_is_gradient_descent_and_reaches_the_optimum() -> None:
    bowls = Bowls()
    np.testing.assert_allclose(rest(bowls.p, pull(bowls.H, 1), bowls.a), bowls.optimum(), atol=1e-12)
    np.testing.assert_allclose(end(fedavg(), bowls, 1, 70), bowls.optimum(), rtol=0, atol=1e-7)


def test_with_equal_curvatures_fedavg_reaches_the_optimum_with_any_steps() -> None:
    bowls = Bowls(alike=True)
    np.testing.assert_allclose(bowls.optimum(), bowls.p @ bowls.a, atol=1e-12)
    np.testing.assert_allclose(end(fedavg(), bowls, 5), bowls.optimum(), rtol=0, atol=1e-7)


def test_fedprox_rests_at_its_closed_form_nearer_to_the_optimum() -> None:
    bowls = Bowls()
    fixed = rest(bowls.p, pull(bowls.H, 5, mu=2.0), bowls.a)
    np.testing.assert_allclose(end(fedprox(2.0), bowls, 5, 80), fixed, rtol=0, atol=1e-7)
    plain = rest(bowls.p, pull(bowls.H, 5), bowls.a)
    assert 0.01 < np.linalg.norm(fixed - bowls.optimum()) < np.linalg.norm(plain - bowls.optimum())


def frozen_rest(bowls: Bowls, y: np.ndarray, steps: int, mu: float = 0.0) -> np.ndarray:
    """With y fixed, a client's loss in x has curvature H_xx and its minimum at a_x - H_xx^-1 H_xy (y - a_y)."""
    Hxx, Hxy = bowls.H[:, :X, :X], bowls.H[:, :X, X:]
    shift = np.linalg.solve(Hxx, np.einsum("ijk,ik->ij", Hxy, y - bowls.a[:, X:])[..., None])[..., 0]
    return rest(bowls.p, pull(Hxx, steps, mu), bowls.a[:, :X] - shift)


@pytest.mark.parametrize("warmup", [0, 3])
def test_with_a_frozen_block_the_rest_goes_to_its_own_fixed_point(warmup: int) -> None:
    bowls = Bowls()
    w, B = start(), pull(bowls.H, 5)
    for _ in range(warmup):
        w = w - np.einsum("i,ijk,ik->j", bowls.p, B, w - bowls.a)
    final = end(fedfrozen(warmup), bowls, 5)
    np.testing.assert_allclose(final[X:], w[X:], rtol=0, atol=1e-12)
    np.testing.assert_allclose(final[:X], frozen_rest(bowls, w[X:], 5), rtol=0, atol=1e-7)
    assert np.linalg.norm(final - rest(bowls.p, B, bowls.a)) > 0.05


def test_a_frozen_block_under_a_proximal_term() -> None:
    bowls = Bowls()
    final = end(compose(fedfrozen(0), fedprox(0.7)), bowls, 5)
    np.testing.assert_allclose(final[:X], frozen_rest(bowls, start()[X:], 5, 0.7), rtol=0, atol=1e-7)


def test_momentum_on_the_client_changes_the_fixed_point_by_its_own_map() -> None:
    """Heavy-ball momentum is linear too: the map of (w, velocity) is a power of a block matrix."""
    bowls, beta, steps = Bowls(), 0.5, 4
    eye = np.eye(X + Y)
    B = []
    for H in bowls.H:
        one = np.block([[eye - LR * H, -LR * beta * eye], [H, beta * eye]])  # of (w - a, velocity)
        B.append(eye - np.linalg.matrix_power(one, steps)[: X + Y, : X + Y])
    fixed = rest(bowls.p, np.stack(B), bowls.a)
    run = Run(fedavg(), Training(LR, SGD(momentum=beta), batch_size=9, steps=steps), 24, Key(0), drift=False)
    model = Quadratic()
    *_, final = rounds(run, model, SimulationEngine(run, model, bowls, block=4))
    np.testing.assert_allclose(flat(final.server.params), fixed, rtol=0, atol=1e-7)
