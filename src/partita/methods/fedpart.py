"""FedPart: some rounds of the whole model, then one layer at a time from the input to the head, over and over."""

from __future__ import annotations

from partita.core.method import Method, MethodError
from partita.core.model import Model, input_side_names, layer_tags
from partita.core.options import Count, Whole
from partita.core.plan import Plan, RoundInfo, share, share_everything
from partita.core.tensors import Names


def fedpart(full: Whole = 5, each: Count = 2) -> Method:
    """A cycle is `full` rounds of everything, then `each` rounds for every group of parameters."""
    if full < 0 or each < 1:
        raise MethodError(f"method.full is {full} and method.each {each}; give 0 or more, and 1 or more, rounds")

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        parts = groups(model)
        place = round_info.round % (full + each * len(parts))
        if place < full:
            return share_everything(model, round_info)
        return share(parts[(place - full) // each], down=model.all_names())

    return Method("fedpart", plan=plan)


def groups(model: Model) -> list[Names]:
    """What comes before the layers, each layer, and what comes after them."""
    before = input_side_names(model)
    inner = [model.names(layer) for layer in layer_tags(model)]
    found = [before.difference(*inner), *inner, model.all_names().difference(before, *inner)]
    return [names for names in found if names]
