"""FedSA-LoRA: clients train both factors, share A, and keep B."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.model import Model
from partita.core.plan import Plan, RoundInfo, share
from partita.methods.ffa_lora import factor_names


def fedsa_lora() -> Method:
    """Build FedSA-LoRA for a model with a LoRA adapter."""

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        kept = factor_names(model, "lora_B", "fedsa-lora")
        return share(model.all_names(), down=model.all_names() - kept, keep=kept)

    return Method("fedsa-lora", plan=plan)
