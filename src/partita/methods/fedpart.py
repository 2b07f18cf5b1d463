"""FedPart: some rounds of the whole model, then one layer at a time from the input to the head, over and over."""

from __future__ import annotations

from partita.core.method import Method, MethodError
from partita.core.model import Model, before_layers, layers_of
from partita.core.options import Count, Whole
from partita.core.plan import Plan, Turn, share, share_everything
from partita.core.tensors import Names


def fedpart(full: Whole = 5, each: Count = 2) -> Method:
    """A cycle is `full` rounds of everything, then `each` rounds for every group of parameters."""
    if full < 0 or each < 1:
        raise MethodError(f"method.full is {full} and method.each {each}; give 0 or more, and 1 or more, rounds")

    def plan(model: Model, turn: Turn) -> Plan:
        parts = groups(model)
        place = turn.round % (full + each * len(parts))
        if place < full:
            return share_everything(model, turn)
        return share(parts[(place - full) // each], down=model.every())

    return Method("fedpart", plan=plan)


def groups(model: Model) -> list[Names]:
    """What comes before the layers, each layer, and what comes after them."""
    before = before_layers(model)
    inner = [model.names(layer) for layer in layers_of(model)]
    found = [before.difference(*inner), *inner, model.every().difference(before, *inner)]
    return [names for names in found if names]
