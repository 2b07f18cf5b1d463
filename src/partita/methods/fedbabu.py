"""FedBABU: only the body is learned together; the head stays as it was drawn, and is fitted when a client is tested."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method, MethodError
from partita.core.model import Model
from partita.core.options import Whole
from partita.core.plan import Phase, Plan, RoundInfo, share


def fedbabu(
    fixed: tuple[str, ...] = ("head",), finetune: Whole = 5, tune: Literal["all", "head", "body"] = "all"
) -> Method:
    """`finetune` are the epochs in which a client fits `tune` to its own data before it is tested."""
    if tune == "head" and not fixed:
        raise MethodError("method.tune is 'head', but method.fixed is empty; name the tags of the head there")

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        body = model.all_names() - model.names(*fixed)
        return share(body, down=body)

    def adapt(model: Model) -> tuple[Phase, ...]:
        head = model.names(*fixed)
        parts = {"all": model.all_names(), "head": head, "body": model.all_names() - head}
        return (Phase(parts[tune], finetune),)

    return Method("fedbabu", plan=plan, adapt=adapt if finetune else None)
