"""FedPart: cycles of some rounds on the whole model, then one layer at a time from the input to the head."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model, input_side_names, layer_tags
from partita.core.options import Count, Whole
from partita.core.plan import Plan, RoundInfo, share, share_everything
from partita.core.tensors import Names


def fedpart(full_rounds: Whole = 5, rounds_per_layer: Count = 2) -> Method:
    """Build FedPart.

    Args:
        full_rounds: Rounds at the start of a cycle that train the whole model.
        rounds_per_layer: Rounds for each group of parameters after that.

    Raises:
        MethodError: If `full_rounds` is below 0 or `rounds_per_layer` is below 1.
    """
    if full_rounds < 0 or rounds_per_layer < 1:
        raise MethodError(
            f"method.full_rounds is {full_rounds} and method.rounds_per_layer {rounds_per_layer}; the first must be at "
            "least 0 and the second at least 1"
        )

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        parts = groups(model)
        place = round_info.round % (full_rounds + rounds_per_layer * len(parts))
        if place < full_rounds:
            return share_everything(model, round_info)
        return share(parts[(place - full_rounds) // rounds_per_layer], down=model.all_names())

    return Method("fedpart", plan=plan)


def groups(model: Model) -> list[Names]:
    """Split the parameters into those before the layers, each layer, and those after them. Drop empty groups."""
    before = input_side_names(model)
    inner = [model.names(layer) for layer in layer_tags(model)]
    candidates = [before.difference(*inner), *inner, model.all_names().difference(before, *inner)]
    return [names for names in candidates if names]
