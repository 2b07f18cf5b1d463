"""Local-only: every client trains alone and nothing travels. What federation must beat."""

from partita.core.method import Method
from partita.core.model import Model
from partita.core.plan import NONE, Phase, Plan, Turn


def keep_everything(model: Model, turn: Turn) -> Plan:
    return Plan((Phase(model.every()),), up=NONE, down=NONE, keep=model.every())


def local_only() -> Method:
    return Method("local-only", plan=keep_everything, carry_optimizer=True)
