"""Rank by client: a client of a small rank trains, sends and receives the first pieces of the low-rank factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.personal_copy import copy_name
from partita.core.plan import Phase, Plan, Planner, RoundInfo
from partita.core.tensors import Names

TAG = "rank."  # "rank.8" is the tag of the piece that ends at rank 8


def rank_by_client(method: Method, ranks: Mapping[str, int]) -> Method:
    """Return the method with a rank for each client. The server averages a piece over the clients that send it.

    Args:
        method: The method. Its model has an adapter with these ranks.
        ranks: The rank of each client.

    Raises:
        MethodError: If the method adapts a client's model before its test, which would train all pieces.
    """
    if method.adapt is not None:
        raise MethodError(
            f"{method.name} trains a client's copy before its test, which has no rank by client; set "
            "method.finetune = 0, or leave model.adapter.ranks out"
        )
    return replace(method, plan=RankPlan(method.plan, ranks))


@dataclass(frozen=True)
class RankPlan:
    """A planner that takes the pieces beyond a client's rank out of its plan.

    There the client has the initial values. B is zero in them, so they add nothing to its model.

    Attributes:
        planner: The planner of the method.
        ranks: The rank of each client. Others, which only test the model, have all pieces.
    """

    planner: Planner
    ranks: Mapping[str, int]

    def __call__(self, model: Model, round_info: RoundInfo) -> Plan:
        plan, rank = self.planner(model, round_info), self.ranks.get(round_info.client, math.inf)
        beyond = {
            name
            for name, tags in model.tags.items()
            for tag in tags
            if tag.startswith(TAG) and int(tag.removeprefix(TAG)) > rank
        }
        beyond |= {copy for name in beyond if (copy := copy_name(name)) in model.tags}
        return _without(plan, frozenset(beyond)) if beyond else plan


@lru_cache(maxsize=64)  # clients with equal plans then share one object, as in `plan.share`
def _without(plan: Plan, names: Names) -> Plan:
    phases = tuple(Phase(phase.names - names, phase.epochs) for phase in plan.phases if phase.names - names)
    return Plan(phases, plan.up - names, plan.down - names, plan.keep - names)
