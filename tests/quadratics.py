"""Quadratic clients, whose rounds are affine maps with fixed points in closed form.

Client i holds f_i(w) = 1/2 (w - a_i)' H_i (w - a_i) and has the share p_i of all examples. E steps of plain gradient
descent at rate lr take w to a_i + M_i (w - a_i) with M_i = (I - lr H_i)^E, so a round of FedAvg is

    w  ->  w - sum p_i (I - M_i) (w - a_i),

with the fixed point (sum p_i (I - M_i))^-1 sum p_i (I - M_i) a_i. The optimum is (sum p_i H_i)^-1 sum p_i H_i a_i.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.core.client import ClientState
from partita.core.data import Batch, ClientData
from partita.core.method import Method
from partita.core.model import Model, Output
from partita.core.optim import SGD
from partita.core.personal_copy import copy_name
from partita.core.rng import Key
from partita.core.rounds import RoundResult, rounds
from partita.core.settings import FederationSettings, Run, Training
from partita.core.tensors import Tensors
from partita.engines.simulation import SimulationEngine

X, Y = 3, 2  # the sizes of two blocks of coordinates
LR = 0.3  # below 2 over the largest curvature, so every client is stable


class Quadratic(Model):
    """w = (x, y), where y is tagged as the kernel so that FedFrozen freezes it."""

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
class RepeatedExample:
    """The same example `count` times: all in one batch, and the count is the client's weight."""

    a: Tensor
    H: Tensor
    count: int

    def __len__(self) -> int:
        return self.count

    def take(self, indices: Tensor) -> Batch:
        own = len(indices)
        return Batch({"a": self.a.expand(own, -1), "H": self.H.expand(own, -1, -1)}, torch.zeros(own))


class QuadraticClients:
    """Four clients with different sizes, centers and, unless `alike`, curvatures between 0.3 and 3."""

    clients = ("c0", "c1", "c2", "c3")

    def __init__(self, alike: bool = False, sizes: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        self.sizes = np.array(sizes)
        rng = np.random.default_rng(Key(9).seed())
        self.p = self.sizes / self.sizes.sum()
        self.a = rng.normal(size=(4, X + Y))
        turns = [np.linalg.qr(rng.normal(size=(X + Y, X + Y)))[0] for _ in range(4)]
        self.H = np.stack([turn @ np.diag(rng.uniform(0.3, 3.0, X + Y)) @ turn.T for turn in turns])
        if alike:
            self.H[:] = self.H[0]

    def __getitem__(self, client: str) -> ClientData:
        index = int(client[1:])
        part = RepeatedExample(torch.tensor(self.a[index]), torch.tensor(self.H[index]), int(self.sizes[index]))
        return ClientData(part, part, part)

    def optimum(self) -> np.ndarray:
        return np.linalg.solve(np.einsum("i,ijk->jk", self.p, self.H), np.einsum("i,ijk,ik->j", self.p, self.H, self.a))


def as_vector(params: Tensors) -> np.ndarray:
    return torch.cat([params["x"], params["y"]]).numpy()


def copy_as_vector(state: ClientState) -> np.ndarray:
    """A client's personal copy."""
    return as_vector({name: state.personal[copy_name(name)] for name in ("x", "y")})


def initial_point() -> np.ndarray:
    return as_vector(Quadratic().initial)


def quadratic_rounds(
    method: Method,
    bowls: QuadraticClients,
    steps: int,
    count: int = 24,
    block: int = 4,
    cohort: float = 1.0,
    **engine: Any,
) -> Iterator[RoundResult]:
    run = Run(
        method, Training(LR, SGD(), batch_size=9, steps=steps), count, Key(0), FederationSettings(cohort), drift=False
    )
    model: Model = method.extend(Quadratic(), Key(0)) if method.extend else Quadratic()
    return rounds(run, model, SimulationEngine(run, model, bowls, block=block, **engine))


def final_point(
    method: Method, bowls: QuadraticClients, steps: int, count: int = 24, cohort: float = 1.0
) -> np.ndarray:
    *_, final = quadratic_rounds(method, bowls, steps, count, cohort=cohort)
    return as_vector(final.server.params)


def matrix_powers(matrices: np.ndarray, steps: int) -> np.ndarray:
    return np.stack([np.linalg.matrix_power(matrix, steps) for matrix in matrices])


def fixed_point(p: np.ndarray, B: np.ndarray, a: np.ndarray) -> np.ndarray:
    """The point where sum p_i B_i (w - a_i) is zero."""
    return np.linalg.solve(np.einsum("i,ijk->jk", p, B), np.einsum("i,ijk,ik->j", p, B, a))


def client_step_matrix(H: np.ndarray, steps: int, mu: float = 0.0) -> np.ndarray:
    """The matrices B_i of the client maps w -> w - B_i (w - a_i).

    A proximal term adds mu to the curvature, A_i = H_i + mu I, and pulls to the start: its bottom is at
    A_i^-1 (H_i a_i + mu w), so B_i = (I - (I - lr A_i)^E) A_i^-1 H_i.
    """
    eye = np.eye(H.shape[-1])
    A = H + mu * eye
    return (eye - matrix_powers(eye - LR * A, steps)) @ np.linalg.inv(A) @ H
