"""Server rules applied to given deltas, and torch.optim applied to the same deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from partita.core.model import Model
from partita.core.rng import Key
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Tensors
from partita.core.update import Aggregate


class TwoParameters(Model):
    """A model with two parameters and no forward pass."""

    name = "two"
    tags = {"a": frozenset({"query"}), "b": frozenset({"head"})}  # noqa: RUF012

    def __init__(self) -> None:
        self.initial = {"a": torch.zeros(4, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}


def random_deltas(count: int = 6) -> list[Tensors]:
    """Large and small deltas, so that second moments both grow and shrink."""
    draw = Key(1).generator()
    model = TwoParameters()
    return [
        {
            name: torch.randn(value.shape, generator=draw, dtype=torch.float64) * (1.0 if number % 2 else 0.1)
            for name, value in model.initial.items()
        }
        for number in range(count)
    ]


def apply_all(rule: ServerRule, deltas: Sequence[Tensors]) -> Tensors:
    model = TwoParameters()
    server = Server(dict(model.initial), rule.init(model))
    for delta in deltas:
        before = server.params
        server = rule.apply(server, Aggregate(delta, {}, 1))
        assert all(server.params[name] is before[name] for name in before if name not in delta)
    return server.params


class TorchServer:
    def __init__(self, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
        self.params = {name: value.clone() for name, value in TwoParameters().initial.items()}
        self.optimizer = make(list(self.params.values()))

    def apply_all(self, deltas: Sequence[Tensors]) -> Tensors:
        for delta in deltas:
            for name, value in self.params.items():
                value.grad = -delta[name]
            self.optimizer.step()
        return self.params
