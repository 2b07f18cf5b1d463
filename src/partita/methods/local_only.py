"""Local-only: every client trains alone and nothing is sent. The baseline that federation must beat."""

from partita.core.method import Method
from partita.core.model import Model
from partita.core.plan import NO_NAMES, Phase, Plan, RoundInfo


def keep_everything(model: Model, round_info: RoundInfo) -> Plan:
    """Plan that trains all parameters and keeps them on the client."""
    return Plan((Phase(model.all_names()),), up=NO_NAMES, down=NO_NAMES, keep=model.all_names())


def local_only() -> Method:
    """Build the local-only baseline."""
    return Method("local-only", plan=keep_everything, carry_optimizer=True)
