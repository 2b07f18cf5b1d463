"""Zero-shot: the model as it was loaded. Nothing trains and nothing travels; what prompts must beat."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.model import Model
from partita.core.plan import NONE, Plan, Turn


def leave_everything(model: Model, turn: Turn) -> Plan:
    return Plan((), up=NONE, down=NONE)


def zero_shot() -> Method:
    return Method("zero-shot", plan=leave_everything)
