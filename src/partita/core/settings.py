"""What both sides of a federation agree on before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from partita.core.method import Method
from partita.core.optim import SGD, Optimizer, Schedule
from partita.core.rng import Key


class RunError(ValueError):
    """A setting that cannot work."""


@dataclass(frozen=True)
class Training:
    """One client's work in a round: so many epochs, or so many steps, of shuffled batches."""

    lr: float
    optimizer: Optimizer = field(default_factory=SGD)
    schedule: Schedule = field(default_factory=Schedule)
    batch_size: int = 32
    epochs: int = 1
    steps: int | None = None  # overrides epochs
    clip: float | None = None  # of a client's gradient norm
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16: mixed, the weights stay in float32

    def __post_init__(self) -> None:
        for setting, value in (("lr", self.lr), ("batch_size", self.batch_size), ("epochs", self.epochs)):
            if not value > 0:
                raise RunError(f"training.{setting} is {value}; it must be above 0")
        for setting, limit in (("steps", self.steps), ("clip", self.clip)):
            if limit is not None and not limit > 0:
                raise RunError(f"training.{setting} is {limit}; it must be above 0, or left out")
        if self.precision not in ("float32", "bfloat16"):
            raise RunError(f"training.precision is '{self.precision}'; it can be float32 or bfloat16 (mixed)")


@dataclass(frozen=True)
class Run:
    method: Method
    training: Training
    rounds: int
    key: Key
    cohort: int | float = 1.0  # clients a round, as a number or (a float up to 1.0) as a fraction
    min_updates: int = 1  # answers without which a round is not applied but an error
    skip_failed_clients: bool = (
        False  # a client's fault (a loss or an update that is no use) is recorded and does not end the run
    )
    clients_have_initial_model: bool = False  # clients hold the initial model before the first round
    drift: bool = True  # measure drift each round
    max_norm: float | None = None  # of an update; longer ones are scaled down to it
    max_examples: int = 10_000_000  # that a client may claim where their number is not registered
    examples: Mapping[str, int] | None = None  # registered, by client; 0: not known; None: there is no register
    secret: Key | None = None  # what clients draw by where nobody else may know it; None: by the run's key, as all do
    hidden_cohorts: bool = False  # draw cohorts by the secret: what privacy gains from sampling needs that nobody knows

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise RunError(f"rounds is {self.rounds}; it must be at least 1")
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise RunError(f"federation.max_norm is {self.max_norm}; it must be a number above 0, or left out")
        if self.max_examples < 1:
            raise RunError(f"federation.max_examples is {self.max_examples}; it must be at least 1")
        if self.max_norm is not None and any(transform.hides for transform in self.method.transforms):
            raise RunError(
                "federation.max_norm and client-level privacy are both set; there privacy.clip bounds every update, so "
                "leave federation.max_norm out"
            )
        self.method.check_optimizer(self.training.optimizer.name)
        if self.method.privacy and self.training.clip is not None:
            raise RunError(
                "training.clip and privacy are both set; under privacy each example's gradient is clipped by "
                "privacy.clip, so leave training.clip out"
            )

    def rate(self, round: int) -> float:
        return self.training.lr * self.training.schedule.factor(round, self.rounds)

    def draw_cohort(self, round: int, clients: Sequence[str]) -> list[str]:
        """The clients that are asked in a round, of those there are."""
        key = self.secret if self.secret and self.hidden_cohorts else self.key
        return (key / "round" / round / "cohort").sample(clients, self.cohort_size(len(clients)))

    def cohort_size(self, population: int) -> int:
        share = isinstance(self.cohort, float)
        size = max(1, round(self.cohort * population)) if share else int(self.cohort)
        if not 1 <= size <= population or (share and not 0 < self.cohort <= 1):
            raise RunError(
                f"federation.cohort is {self.cohort}, but there are {population} clients; "
                "give a number from 1 to that, or a fraction such as 0.2"
            )
        return size
