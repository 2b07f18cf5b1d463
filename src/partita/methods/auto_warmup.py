"""Server rule for FedFrozen's automatic warm-up: it detects when client disagreement exceeds the kernel's progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from partita.core.model import Model
from partita.core.server_rule import Server, ServerRule, average
from partita.core.tensors import Names, Slots, upcast
from partita.core.update import Aggregate, Update

SMOOTHING = 0.7  # decay of the running means per round
FACTOR = 10.0  # of the default threshold, chosen in studies/laboratory


def default_threshold(clients: float) -> float:
    """Return the default threshold, which grows with the number of clients in the mean.

    With more clients the mean has less drift, so freezing gains less.

    Args:
        clients: Effective number of clients: 1 / Σ p² for weights p that sum to one.
    """
    return float(FACTOR * max(clients - 1.0, 0.0) ** 0.25)


@dataclass(frozen=True)
class AutoWarmup(ServerRule):
    """FedAvg with a signal "frozen", set once clients disagree on the watched parameters more than these progress.

    The server state holds running means over rounds: the mean update per parameter, and the clients' spread around it.

    Attributes:
        watched: Returns the names of the parameters to watch.
        threshold: Freeze when the spread exceeds the progress by this factor. None: `default_threshold`.
        patience: Number of consecutive rounds above the threshold before the signal is set.
    """

    watched: Callable[[Model], Names]
    threshold: float | None
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
        clients = {"warmup_clients": {"effective": _scalar(power.effective_clients())}}
        return replace(aggregate, slots={**aggregate.slots, "warmup_spread": spread, **clients})

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        spread = aggregate.slots["warmup_spread"]
        server = super().apply(server, aggregate)
        if not spread:  # no client trained the watched parameters
            return server
        old, past = server.state["warmup"], server.state["progress"]
        progress = {
            name: SMOOTHING * value + (1 - SMOOTHING) * aggregate.delta[name] if name in spread else value
            for name, value in past.items()
        }
        variance = SMOOTHING * float(old["spread"]) + (1 - SMOOTHING) * sum(float(value) for value in spread.values())
        rounds = float(old["rounds"]) + 1
        # Bias correction: both running means start at zero. Dividing by it gives the mean over the rounds so far.
        # The progress enters squared, so one factor of the correction remains on the side of the variance.
        correction = 1 - SMOOTHING**rounds
        clients = float(aggregate.slots["warmup_clients"]["effective"])
        threshold = default_threshold(clients) if self.threshold is None else self.threshold
        squared_progress = sum(squared_norm(progress, name) for name in progress)
        streak = float(old["streak"]) + 1 if variance * correction > threshold**2 * squared_progress else 0.0
        warmup = {
            "spread": _scalar(variance),
            "rounds": _scalar(rounds),
            "streak": _scalar(streak),
            "frozen": _scalar(float(streak >= self.patience)),
        }
        return replace(server, state={"progress": progress, "warmup": warmup})


class _MeanSquare:
    """Weighted mean of the clients' squared norms per parameter, and their effective number.

    Memory does not grow with the cohort.
    """

    def __init__(self, names: Names) -> None:
        self.names = names
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.total, self.squares = 0.0, 0.0  # of the weights of clients that sent a watched parameter

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        for update in updates:
            watched = update.delta.keys() & self.names
            if watched:
                self.total, self.squares = self.total + update.weight, self.squares + update.weight**2
            for name in watched:
                self.sums[name] = self.sums.get(name, 0.0) + update.weight * squared_norm(update.delta, name)
                self.weights[name] = self.weights.get(name, 0.0) + update.weight
            yield update

    def effective_clients(self) -> float:
        """Return (Σ w)² / Σ w²: the number of clients if all weights are equal, else fewer; 0 without clients."""
        return self.total**2 / self.squares if self.squares > 0 else 0.0

    def means(self) -> dict[str, float]:
        return {name: self.sums[name] / weight for name, weight in sorted(self.weights.items()) if weight > 0}


def squared_norm(tensors: Mapping[str, torch.Tensor], name: str) -> float:
    """Return the squared L2 norm of the tensor `name`, summed in float64."""
    return float(tensors[name].pow(2).sum(dtype=torch.float64))


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
