"""FedBABU: train only the shared body; the head keeps its initial values until a client fine-tunes before its test."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.options import Whole
from partita.core.plan import Phase, Plan, RoundInfo, share


def fedbabu(
    fixed: tuple[str, ...] = ("head",), finetune: Whole = 5, tune: Literal["all", "head", "body"] = "all"
) -> Method:
    """Build FedBABU.

    Args:
        fixed: Tags of the head, which is not trained during federation.
        finetune: Epochs of fine-tuning on a client's own data before it is tested. 0: none.
        tune: What this fine-tuning trains.

    Raises:
        MethodError: If `tune` is "head" and `fixed` is empty.
    """
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
