"""Quadratic clients, whose rounds are affine maps with fixed points in closed form.

Client i holds f_i(w) = 1/2 (w - a_i)' H_i (w - a_i) and has the share p_i of all examples. E steps of plain gradient
descent at rate lr take w to a_i + M_i (w - a_i) with M_i = (I - lr H_i)^E, so a round of FedAvg is

    w  ->  w - sum p_i (I - M_i) (w - a_i),

which rests at (sum p_i (I - M_i))^-1 sum p_i (I - M_i) a_i. The optimum is (sum p_i H_i)^-1 sum p_i H_i a_i.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from partita.core.method import Method, compose
from partita.core.model import Batch, ClientData, Model, Output
from partita.core.optim import SGD
from partita.core.rng import Key
from partita.core.rounds import Round, rounds
from partita.core.run import Run, Training
from partita.core.tree import Tensors
from partita.engines.embedded import Embedded
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedprox import fedprox

X, Y = 3, 2  # the sizes of two blocks of coordinates
LR = 0.3  # below 2 over the largest curvature, so every client is stable


class Quadratic(Model):
    """w = (x, y), of which y is called a kernel so that FedFrozen freezes it."""

    name = "quadratic"
    tags = {"x": frozenset({"value", "head"}), "y": frozenset({"query", "key"})}  # noqa: RUF012

    def __init__(self) -> None:
        draw = Key(5).generator()
        self.initial = {
            name: torch.randn(size, generator=draw, dtype=torch.float64) for name, size in (("x", X), ("y", Y))
        }

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        away = torch.cat([params["x"], params["y"]]) - inputs["a"]  # (example, coordinate)
        return Output((away.unsqueeze(-2) @ inputs["H"] @ away.unsqueeze(-1)).squeeze(-1) / 2)

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return out.logits.squeeze(-1)


@dataclass(frozen=True)
class Copies:
    """The same example so many times: all of them are one batch, and their number is the client's weight."""

    a: Tensor
    H: Tensor
    count: int

    def __len__(self) -> int:
        return self.count

    def take(self, indices: Tensor) -> Batch:
        own = len(indices)
        return Batch({"a": self.a.expand(own, -1), "H": self.H.expand(own, -1, -1)}, torch.zeros(own))


class Bowls:
    """Four clients of different sizes, centres and, unless `alike`, curvatures between 0.3 and 3."""

    clients = ("c0", "c1", "c2", "c3")
    sizes = np.array([1, 2, 3, 4])

    def __init__(self, alike: bool = False) -> None:
        rng = np.random.default_rng(Key(9).seed())
        self.p = self.sizes / self.sizes.sum()
        self.a = rng.normal(size=(4, X + Y))
        turns = [np.linalg.qr(rng.normal(size=(X + Y, X + Y)))[0] for _ in range(4)]
        self.H = np.stack([turn @ np.diag(rng.uniform(0.3, 3.0, X + Y)) @ turn.T for turn in turns])
        if alike:
            self.H[:] = self.H[0]

    def __getitem__(self, client: str) -> ClientData:
        index = int(client[1:])
        part = Copies(torch.tensor(self.a[index]), torch.tensor(self.H[index]), int(self.sizes[index]))
        return ClientData(part, part, part)

    def optimum(self) -> np.ndarray:
        return np.linalg.solve(np.einsum("i,ijk->jk", self.p, self.H), np.einsum("i,ijk,ik->j", self.p, self.H, self.a))


def flat(params: Tensors) -> np.ndarray:
    return torch.cat([params["x"], params["y"]]).numpy()


def start() -> np.ndarray:
    return flat(Quadratic().initial)


def play(method: Method, bowls: Bowls, steps: int, count: int = 24, block: int = 4) -> Iterator[Round]:
    run = Run(method, Training(LR, SGD(), batch_size=9, steps=steps), count, Key(0), drift=False)
    model = Quadratic()
    return rounds(run, model, Embedded(run, model, bowls, block=block))


def end(method: Method, bowls: Bowls, steps: int, count: int = 24) -> np.ndarray:
    *_, final = play(method, bowls, steps, count)
    return flat(final.server.params)


def powers(matrices: np.ndarray, steps: int) -> np.ndarray:
    return np.stack([np.linalg.matrix_power(matrix, steps) for matrix in matrices])


def rest(p: np.ndarray, B: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Where sum p_i B_i (w - a_i) is zero."""
    return np.linalg.solve(np.einsum("i,ijk->jk", p, B), np.einsum("i,ijk,ik->j", p, B, a))


def pull(H: np.ndarray, steps: int, mu: float = 0.0) -> np.ndarray:
    """B_i, by which a client moves: w - B_i (w - a_i).

    A proximal term adds mu to the curvature, A_i = H_i + mu I, and pulls to the start: its bottom is at
    A_i^-1 (H_i a_i + mu w), so B_i = (I - (I - lr A_i)^E) A_i^-1 H_i.
    """
    eye = np.eye(H.shape[-1])
    A = H + mu * eye
    return (eye - powers(eye - LR * A, steps)) @ np.linalg.inv(A) @ H


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
    np.testing.assert_allclose(end(fedprox(2.0), bowls, 5, 40), fixed, rtol=0, atol=1e-7)
    plain = rest(bowls.p, pull(bowls.H, 5), bowls.a)
    assert 0.01 < np.linalg.norm(fixed - bowls.optimum()) < np.linalg.norm(plain - bowls.optimum())


def frozen_rest(bowls: Bowls, y: np.ndarray, steps: int, mu: float = 0.0) -> np.ndarray:
    """With y held, a client's bowl in x has the curvature H_xx and its bottom at a_x - H_xx^-1 H_xy (y - a_y)."""
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
    """Heavy ball in E steps is linear too: the map of (w, velocity) is a power of a block matrix."""
    bowls, beta, steps = Bowls(), 0.5, 4
    eye = np.eye(X + Y)
    B = []
    for H in bowls.H:
        one = np.block([[eye - LR * H, -LR * beta * eye], [H, beta * eye]])  # of (w - a, velocity)
        B.append(eye - np.linalg.matrix_power(one, steps)[: X + Y, : X + Y])
    fixed = rest(bowls.p, np.stack(B), bowls.a)
    run = Run(fedavg(), Training(LR, SGD(momentum=beta), batch_size=9, steps=steps), 24, Key(0), drift=False)
    model = Quadratic()
    *_, final = rounds(run, model, Embedded(run, model, bowls, block=4))
    np.testing.assert_allclose(flat(final.server.params), fixed, rtol=0, atol=1e-7)
