"""FedAvg: train everything, send everything, average the updates weighted by the number of examples."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.model import Model
from partita.core.options import Whole
from partita.core.plan import Phase


def fedavg(finetune: Whole = 0) -> Method:
    """Build FedAvg.

    Args:
        finetune: Epochs for which a client trains a copy of the shared model before it is tested on its own data, the
            baseline of personalized methods. 0: none.
    """

    def adapt(model: Model) -> tuple[Phase, ...]:
        return (Phase(model.all_names(), finetune),)

    return Method("fedavg", adapt=adapt if finetune else None)
