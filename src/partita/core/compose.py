"""Combining methods into one."""

from __future__ import annotations

from typing import TypeVar

from partita.core.method import Extension, Method
from partita.core.method_error import MethodError
from partita.core.personal_copy import PlanWithCopy
from partita.core.plan import Planner, share_everything
from partita.core.server_rule import ServerRule

T = TypeVar("T")


def compose(first: Method, *others: Method) -> Method:
    """Combine methods into one.

    Client rules and transforms are concatenated in order. `carry_optimizer` and `pool` are set if any method sets them.
    Extensions of the model follow each other in order. A plan that adds personal copies does so to the other's plan.

    Args:
        first: The first method.
        *others: Further methods, whose rules and transforms follow in this order.

    Raises:
        MethodError: If two methods set the same one of plan, server rule, adapt, shape and privacy, or if two rules or
            transforms have the same slot.
    """
    result = first
    for other in others:
        name = f"{result.name}+{other.name}"
        result = Method(
            name,
            plan=_pick_plan(name, result.plan, other.plan),
            client_rules=result.client_rules + other.client_rules,
            transforms=result.transforms + other.transforms,
            server_rule=_pick_server_rule(name, result.server_rule, other.server_rule),
            adapt=_pick_one(name, "adapt", result.adapt, other.adapt, None),
            carry_optimizer=result.carry_optimizer or other.carry_optimizer,
            pool=result.pool or other.pool,
            extend=_chain(result.extend, other.extend),
            clients=result.clients | other.clients,
            shape=_pick_one(name, "shape", result.shape, other.shape, None),
            privacy=_pick_one(name, "privacy", result.privacy, other.privacy, None),
        )
    return result


def _pick_one(name: str, choice: str, first: T, second: T, default: T) -> T:
    if first != default and second != default:
        raise MethodError(f"{name}: both set the {choice}; a method has one, so leave one of them out")
    return second if first == default else first


def _pick_plan(name: str, first: Planner, second: Planner) -> Planner:
    for inner, outer in ((first, second), (second, first)):
        if isinstance(outer, PlanWithCopy) and not isinstance(inner, PlanWithCopy):
            return PlanWithCopy(_pick_one(name, "plan", outer.shared, inner, share_everything))
    return _pick_one(name, "plan", first, second, share_everything)


def _chain(first: Extension | None, second: Extension | None) -> Extension | None:
    if first is None or second is None:
        return first or second
    return lambda model, key: second(first(model, key), key)


def _pick_server_rule(name: str, first: ServerRule, second: ServerRule) -> ServerRule:
    if type(first) is not ServerRule and type(second) is not ServerRule:
        raise MethodError(f"{name}: both set the server's rule; a method has one, so leave one of them out")
    return second if type(first) is ServerRule else first
