"""The plan: which parameters train, go up, come down, and stay, for one client in one round.

A method's plan is a function `(model, round_info) -> Plan` (`Planner`). It is called on the server for every job and on
the client for every round, so it must be pure: equal arguments give equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from partita.core.model import Model
from partita.core.tensors import Names

NO_NAMES: Names = frozenset()


class PlanError(ValueError):
    """The plan contradicts itself or the model."""


@dataclass(frozen=True)
class RoundInfo:
    """The arguments of a plan besides the model.

    Attributes:
        round: The round, from 0.
        rounds: The number of rounds in the run. A run whose earlier rounds depend on it cannot be extended.
        client: The client's name.
        signal: The result of `ServerRule.signal`. It travels with the job, so client and server see the same value.
    """

    round: int
    rounds: int
    client: str
    signal: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """A part of local training in which `names` train together and all other parameters are frozen.

    Attributes:
        names: The parameters to train.
        epochs: Passes over the client's examples; None for the run's own `training.epochs` or `training.steps`.

    Raises:
        PlanError: If `epochs` is below 1.
    """

    names: Names
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise PlanError(f"a phase of {self.epochs} epochs trains nothing; leave it out, or give 1 or more")


@dataclass(frozen=True)
class Plan:
    """Which parameters train, travel and stay, for one client in one round.

    A name in neither `down` nor `keep` has its value from the model as it was loaded.

    Attributes:
        phases: The phases of local training, in order. A name can be in several phases.
        up: Names whose delta goes to the server. Each must be in `train` and in `down`.
        down: Names that the client needs from the server. A name travels only if the client does not already hold its
            current version.
        keep: Names whose value stays with the client from round to round. They must not be in `up` or `down`. A client
            starts from the values in `Model.initial`.

    Raises:
        PlanError: If the sets contradict each other, for example if a name trains but is in neither `up` nor `keep`.
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
        """The names that train in any phase."""
        return NO_NAMES.union(*(phase.names for phase in self.phases))

    def narrow(self, names: Names) -> Plan:
        """Return the plan with `train` and `up` intersected with `names`; `down` and `keep` do not change.

        Phases without names are dropped.
        """
        phases = tuple(Phase(phase.names & names, phase.epochs) for phase in self.phases)
        return Plan(tuple(phase for phase in phases if phase.names), self.up & names, self.down, self.keep)


# Returns the plan of one client in one round. All names must be names of the model.
Planner = Callable[[Model, RoundInfo], Plan]


@lru_cache(maxsize=64)  # clients with equal plans then share one object, and everything that is cached by it
def share(train: Names, down: Names, keep: Names = NO_NAMES) -> Plan:
    """Return a plan that trains `train` in one phase and sends up all of it except `keep`.

    Args:
        train: The names to train.
        down: The names that the client needs from the server.
        keep: The names that stay with the client.

    Raises:
        PlanError: If the sets contradict each other; see `Plan`.
    """
    return Plan((Phase(train),), up=train - keep, down=down, keep=keep)


def share_everything(model: Model, round_info: RoundInfo) -> Plan:
    """The default planner: train, send and receive all parameters."""
    return share(model.all_names(), down=model.all_names())


def plan_for(planner: Planner, model: Model, round_info: RoundInfo) -> Plan:
    """Call the planner and check the plan against the model.

    Raises:
        PlanError: If the plan has names that the model does not have.
    """
    plan = planner(model, round_info)
    known = model.all_names()
    if not (plan.down <= known >= plan.keep):  # `train` and `up` are subsets of these two
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
