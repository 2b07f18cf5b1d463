"""Layer-skipping: a fixed choice of layers trains and travels with the head; the others stay as they were loaded."""

from __future__ import annotations

from partita.core.method import Method, MethodError
from partita.core.model import Model, layer_of
from partita.core.plan import Plan, Turn, share


def layer_skipping(layers: float | tuple[int, ...] = 0.3, embeddings: bool = False) -> Method:
    """`layers` are the numbers of those that train, or a fraction: so many of the topmost ones, at least one."""

    def plan(model: Model, turn: Turn) -> Plan:
        known = {layer for tags in model.tags.values() if (layer := layer_of(tags))}
        wanted = [f"layer.{number}" for number in chosen(layers, len(known))]
        outside = {name for name, tags in model.tags.items() if layer_of(tags) is None and "embedding" not in tags}
        extra = model.names("embedding") if embeddings else frozenset()
        return share(model.names(*wanted) | outside | extra, down=model.every())

    return Method("layer-skipping", plan=plan)


def chosen(layers: float | tuple[int, ...], depth: int) -> tuple[int, ...]:
    if isinstance(layers, tuple):
        if wrong := [number for number in layers if not 0 <= number < depth]:
            raise MethodError(f"method.layers names layer {wrong[0]}, but the model has {depth}, from 0 to {depth - 1}")
        return layers
    if not 0 < layers <= 1:
        raise MethodError(f"method.layers is {layers}; give a fraction above 0 and up to 1, or a list of numbers")
    return tuple(range(depth - max(1, round(layers * depth)), depth))
