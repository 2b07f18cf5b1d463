"""FedRep: in each round a client first fits its own head to the shared body, then trains the body."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.model import Model
from partita.core.options import Count, Whole
from partita.core.plan import Phase, Plan, RoundInfo


def fedrep(
    personal: tuple[str, ...] = ("head",), head_epochs: Count = 10, body_epochs: Count | None = 1, finetune: Whole = 10
) -> Method:
    """Build FedRep.

    Args:
        personal: Tags of the head, which stays on the client.
        head_epochs: Epochs on the head per round.
        body_epochs: Epochs on the body per round. None: as set by the run.
        finetune: Epochs for which a client refits its head before it is tested. 0: none.
    """

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        head = model.names(*personal)
        body = model.all_names() - head
        phases = (Phase(head, head_epochs), Phase(body, body_epochs))
        return Plan(tuple(phase for phase in phases if phase.names), up=body, down=body, keep=head)

    def adapt(model: Model) -> tuple[Phase, ...]:
        return (Phase(model.names(*personal), finetune),)

    return Method("fedrep", plan=plan, adapt=adapt if finetune and personal else None)
