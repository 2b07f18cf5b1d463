"""The plan: which parameters train, go up, come down, and stay, for one client in one round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from partita.core.model import Model
from partita.core.tensors import Names

NO_NAMES: Names = frozenset()


class PlanError(ValueError):
    """A plan that contradicts itself or the model."""


@dataclass(frozen=True)
class RoundInfo:
    """One client's place in a run. `signal` is what the server's rule decided; it travels with the job."""

    round: int
    rounds: int
    client: str
    signal: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """Train these names together; `epochs` of None means the run's own setting."""

    names: Names
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise PlanError(f"a phase of {self.epochs} epochs trains nothing; leave it out, or give 1 or more")


@dataclass(frozen=True)
class Plan:
    """`down` is what the client needs of the server: what it already holds in that version is not sent again.

    A name in neither `down` nor `keep` stays as the model was loaded.
    """

    phases: tuple[Phase, ...]
    up: Names
    down: Names
    keep: Names = NO_NAMES

    def __post_init__(self) -> None:
        _refuse(self.keep & self.up, "are kept by the client and also sent up", "take them out of keep or of up")
        _refuse(self.keep & self.down, "are kept by the client and also sent down", "take them out of keep or of down")
        _refuse(self.up - self.train, "are sent up but never trained", "add them to a phase or take them out of up")
        _refuse(self.up - self.down, "are sent up but do not come down, so a delta has no anchor", "add them to down")
        _refuse(self.train - self.up - self.keep, "are trained and then lost", "add them to up or to keep")

    @cached_property
    def train(self) -> Names:
        return NO_NAMES.union(*(phase.names for phase in self.phases))

    def narrow(self, names: Names) -> Plan:
        """Train and send only what is also in names. Narrowing can take away, never add."""
        phases = tuple(Phase(phase.names & names, phase.epochs) for phase in self.phases)
        return Plan(tuple(phase for phase in phases if phase.names), self.up & names, self.down, self.keep)


Planner = Callable[[Model, RoundInfo], Plan]


@lru_cache(maxsize=64)  # clients who share a plan then share the object, and what is worked out from it
def share(train: Names, down: Names, keep: Names = NO_NAMES) -> Plan:
    """Train these names in one phase and send up all of them that are not kept."""
    return Plan((Phase(train),), up=train - keep, down=down, keep=keep)


def share_everything(model: Model, round_info: RoundInfo) -> Plan:
    return share(model.all_names(), down=model.all_names())


def plan_for(planner: Planner, model: Model, round_info: RoundInfo) -> Plan:
    """The plan, checked against the model."""
    plan = planner(model, round_info)
    known = model.all_names()
    if not (plan.down <= known >= plan.keep):  # what trains or goes up is in one of them
        what, remedy = (
            f"are in the plan but not in {model.name}",
            "build plans from model.names(...) and model.all_names()",
        )
        _refuse((plan.down | plan.keep) - known, what, remedy)
    return plan


def _refuse(names: Names, what: str, remedy: str) -> None:
    if names:
        shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise PlanError(f"{shown}: these names {what}; {remedy}")
