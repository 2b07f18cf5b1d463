"""FedPer: the body is shared, the head stays on the client; both train together."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.model import Model
from partita.core.options import Whole
from partita.core.plan import Phase, Plan, RoundInfo, share


def fedper(personal: tuple[str, ...] = ("head",), finetune: Whole = 1) -> Method:
    """Build FedPer.

    Args:
        personal: Tags of the parameters that stay on the client.
        finetune: Epochs for which a client trains its copy before it is tested. 0: none.
    """

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        kept = model.names(*personal)
        return share(model.all_names(), down=model.all_names() - kept, keep=kept)

    def adapt(model: Model) -> tuple[Phase, ...]:
        return (Phase(model.all_names(), finetune),)

    return Method("fedper", plan=plan, adapt=adapt if finetune else None)
