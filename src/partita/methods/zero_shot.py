"""Zero-shot: the model as loaded. Nothing trains and nothing is sent. The baseline that prompts must beat."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.model import Model
from partita.core.plan import NO_NAMES, Plan, RoundInfo


def leave_everything(model: Model, round_info: RoundInfo) -> Plan:
    """Plan that trains and sends nothing."""
    return Plan((), up=NO_NAMES, down=NO_NAMES)


def zero_shot() -> Method:
    """Build the zero-shot baseline."""
    return Method("zero-shot", plan=leave_everything)
