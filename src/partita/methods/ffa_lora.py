"""FFA-LoRA: A keeps its random initial value, and clients train and send only B, so that averaging is exact."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.model import Model, TagError
from partita.core.plan import Plan, RoundInfo, share
from partita.core.tensors import Names


def ffa_lora() -> Method:
    """Build FFA-LoRA for a model with a LoRA adapter."""

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        train = model.all_names() - factor_names(model, "lora_A", "ffa-lora")
        return share(train, down=train)

    return Method("ffa-lora", plan=plan)


def factor_names(model: Model, factor: str, method: str) -> Names:
    """Return the names of a factor.

    Args:
        model: The model.
        factor: "lora_A" or "lora_B".
        method: The method that needs it, for the error message.

    Raises:
        TagError: If the model has no low-rank factors.
    """
    if not any(factor in tags for tags in model.tags.values()):
        raise TagError(
            f"{method} needs a model with low-rank factors, but {model.name} has none; set [model.adapter] with "
            "kind = 'lora'"
        )
    return model.names(factor)
