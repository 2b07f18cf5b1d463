"""The server's part of FedFrozen's automatic warm-up: it sees when clients disagree more than the kernel gets ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita.core.method import Aggregate, Server, ServerRule, Update, average
from partita.core.model import Model
from partita.core.tensors import Names, Slots, upcast

SMOOTHING = 0.7  # what a round leaves of the past in the running means


@dataclass(frozen=True)
class AutoWarmup(ServerRule):
    """FedAvg's mean, and a signal "frozen" once clients disagree on the watched names more than these get ahead.

    The state holds running means over rounds: of the mean update, by name, and of the clients' spread around it.
    """

    watched: Callable[[Model], Names]
    threshold: float
    patience: int

    def init(self, model: Model) -> Slots:
        start = {name: model.initial[name] for name in sorted(self.watched(model))}
        return {
            "progress": {name: torch.zeros_like(upcast(value)) for name, value in start.items()},
            "warmup": {name: _scalar(0.0) for name in ("spread", "rounds", "streak", "frozen")},
        }

    def signal(self, server: Server) -> Mapping[str, float]:
        return {"frozen": float(server.state["warmup"]["frozen"])}

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        power = _MeanSquare(frozenset(server.state["progress"]))
        aggregate = average(power.watch(updates))
        spread = {
            name: _scalar(max(0.0, mean - squared_norm(aggregate.delta, name))) for name, mean in power.means().items()
        }
        return replace(aggregate, slots={**aggregate.slots, "warmup_spread": spread})

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        spread = aggregate.slots["warmup_spread"]
        server = super().apply(server, aggregate)
        if not spread:  # nobody trained the watched names
            return server
        old, past = server.state["warmup"], server.state["progress"]
        progress = {
            name: SMOOTHING * value + (1 - SMOOTHING) * aggregate.delta[name] if name in spread else value
            for name, value in past.items()
        }
        apart = SMOOTHING * float(old["spread"]) + (1 - SMOOTHING) * sum(float(each) for each in spread.values())
        rounds = float(old["rounds"]) + 1
        # Both means start at zero; divided by this they are means of the rounds so far. The progress enters squared.
        started = 1 - SMOOTHING**rounds
        ahead = sum(squared_norm(progress, name) for name in progress)
        streak = float(old["streak"]) + 1 if apart * started > self.threshold**2 * ahead else 0.0
        warmup = {
            "spread": _scalar(apart),
            "rounds": _scalar(rounds),
            "streak": _scalar(streak),
            "frozen": _scalar(float(streak >= self.patience)),
        }
        return replace(server, state={"progress": progress, "warmup": warmup})


class _MeanSquare:
    """The weighted mean of clients' squared norms by name: a few numbers, however large the cohort."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        for update in updates:
            for name in update.delta.keys() & self.names:
                self.sums[name] = self.sums.get(name, 0.0) + update.weight * squared_norm(update.delta, name)
                self.weights[name] = self.weights.get(name, 0.0) + update.weight
            yield update

    def means(self) -> dict[str, float]:
        return {name: self.sums[name] / weight for name, weight in sorted(self.weights.items()) if weight > 0}


def squared_norm(tensors: Mapping[str, Tensor], name: str) -> float:
    return float(tensors[name].pow(2).sum(dtype=torch.float64))


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
