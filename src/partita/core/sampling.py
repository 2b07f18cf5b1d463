"""Client sampling: which clients are asked in a round.

A rule is a pure function of its arguments, so that a resumed run, and a run on another engine, asks the same clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np

from partita.core.options import Count, OptionError
from partita.core.registry import make, named
from partita.core.rng import Key

# Name in a config -> "module:function". The function takes the options of the table [sampling] and returns the rule.
SAMPLING = {
    "uniform": "partita.core.sampling:Uniform",
    "by_size": "partita.core.sampling:BySize",
    "available": "partita.engines.availability:available",
    "power_of_choice": "partita.core.sampling:PowerOfChoice",
}
EqualWeights = Annotated[bool, "the server counts all updates of a round alike, instead of by number of examples"]


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of the clients before a round.

    Attributes:
        sizes: The registered number of training examples by client; 0 if it is unknown.
        losses: The training loss that a client reported last; clients that have not reported one are missing.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Uniform:
    """Every client with the same probability, without replacement. Other rules inherit from this one.

    Attributes:
        equal_weights: Whether the server gives all updates the weight 1 instead of the number of examples.
        name: The rule's name in a config.
        uses_losses: Whether the rule reads `ClientInfo.losses`. Then they are recorded, and privacy refuses the rule.
    """

    equal_weights: EqualWeights = False
    name: ClassVar[str] = "uniform"
    uses_losses: ClassVar[bool] = False

    def check(self, rounds: int, clients: Sequence[str], size: int, at_least: int, info: ClientInfo) -> None:
        """Raise OptionError before the first round if the rule cannot draw a cohort in all rounds.

        Args:
            rounds: The number of rounds.
            clients: All clients.
            size: The number of clients per round.
            at_least: The number of clients that a round needs.
            info: What is known of the clients.
        """

    def draw(self, key: Key, round: int, clients: Sequence[str], size: int, info: ClientInfo) -> list[str]:
        """Draw the cohort of a round.

        Args:
            key: The key of this draw.
            round: The round, from 0.
            clients: The available clients.
            size: The number of clients to ask.
            info: What is known of them.

        Returns:
            At least one and at most `size` different clients, in the order in which they are asked.
        """
        return key.sample(clients, size)


@dataclass(frozen=True)
class BySize(Uniform):
    """Probability proportional to the registered number of training examples, drawn one by one without replacement.

    With weights by number of examples, size would count twice, so `equal_weights` is on.
    """

    equal_weights: EqualWeights = True
    name: ClassVar[str] = "by_size"

    def check(self, rounds: int, clients: Sequence[str], size: int, at_least: int, info: ClientInfo) -> None:
        check_sizes(self.name, clients, info)

    def draw(self, key: Key, round: int, clients: Sequence[str], size: int, info: ClientInfo) -> list[str]:
        return sample_by_size(key, clients, size, info)


@dataclass(frozen=True)
class PowerOfChoice(Uniform):
    """Draws candidates by size and asks those with the highest loss that they reported last (Cho et al., 2022)."""

    equal_weights: EqualWeights = True
    candidates: Annotated[Count | None, "number of candidates; twice the cohort if left out"] = None
    name: ClassVar[str] = "power_of_choice"
    uses_losses: ClassVar[bool] = True

    def check(self, rounds: int, clients: Sequence[str], size: int, at_least: int, info: ClientInfo) -> None:
        check_sizes(self.name, clients, info)
        if self.candidates is not None and not size <= self.candidates <= len(clients):
            raise OptionError(
                f"sampling.candidates is {self.candidates}; it must be from {size}, the clients per round, to "
                f"{len(clients)}, all clients"
            )

    def draw(self, key: Key, round: int, clients: Sequence[str], size: int, info: ClientInfo) -> list[str]:
        # Fewer clients than at the start may be connected.
        count = min(self.candidates or 2 * size, len(clients))
        candidates = sample_by_size(key, clients, count, info)
        # A client without a loss comes first. The sort is stable, so the draw decides between equal losses.
        return sorted(candidates, key=lambda client: -info.losses.get(client, math.inf))[:size]


def sample_by_size(key: Key, clients: Sequence[str], count: int, info: ClientInfo) -> list[str]:
    """Draw clients one by one without replacement, each with probability proportional to its size."""
    sizes = np.array([info.sizes[client] for client in clients], np.float64)
    # The order of arrival of exponential times with these rates is such a draw.
    arrival = np.random.default_rng(key.seed()).standard_exponential(len(clients)) / sizes
    return [clients[place] for place in np.argsort(arrival, kind="stable")[:count]]


def check_sizes(name: str, clients: Sequence[str], info: ClientInfo) -> None:
    """Raise OptionError if the number of examples of a client is not registered."""
    unknown = next((client for client in clients if not info.sizes.get(client)), None)
    if unknown is not None:
        raise OptionError(
            f"sampling.name = '{name}' needs the number of examples of every client, and that of '{unknown}' is not "
            "known here; use sampling.name = 'uniform'"
        )


def build_sampling(options: Mapping[str, Any]) -> Uniform:
    """Build the sampling rule from the table `[sampling]`."""
    rule: Uniform = make("sampling", *named(options))
    return rule
