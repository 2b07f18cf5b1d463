"""A plan that depends on how often it was called."""

from itertools import count

from partita import Method, Model, Plan, RoundInfo, share

calls = count()


def plan(model: Model, round_info: RoundInfo) -> Plan:
    frozen = model.names("head") if next(calls) % 7 == 0 else frozenset()
    return share(train=model.all_names() - frozen, down=model.all_names())


def broken() -> Method:
    return Method("broken", plan)
