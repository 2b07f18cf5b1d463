"""Layer-skipping: train and send a fixed choice of layers and the head; the other layers stay as loaded."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model, input_side_names, layer_tags
from partita.core.options import PositiveShare, Whole
from partita.core.plan import NO_NAMES, Plan, RoundInfo, share


def layer_skipping(layers: PositiveShare | tuple[Whole, ...] = 0.3, embeddings: bool = False) -> Method:
    """Build layer-skipping.

    Args:
        layers: Indices of the layers to train, or the fraction of topmost layers to train (at least one).
        embeddings: Also train the parameters before the first layer.
    """

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        known = layer_tags(model)
        selected = [f"layer.{number}" for number in chosen(layers, len(known))]
        outside = model.all_names() - model.names(*known) - (NO_NAMES if embeddings else input_side_names(model))
        return share(model.names(*selected) | outside, down=model.all_names())

    return Method("layer-skipping", plan=plan)


def chosen(layers: float | tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Return the indices of the layers to train in a model of `depth` layers.

    Args:
        layers: The indices of the layers to train, or the fraction of topmost layers to train (at least one).
        depth: The number of layers.

    Raises:
        MethodError: If an index is not a layer of the model, or if the fraction is not above 0 and up to 1.
    """
    if isinstance(layers, tuple):
        if wrong := [number for number in layers if not 0 <= number < depth]:
            raise MethodError(f"method.layers names layer {wrong[0]}, but the model has {depth}, from 0 to {depth - 1}")
        return layers
    if not 0 < layers <= 1:
        raise MethodError(f"method.layers is {layers}; give a fraction above 0 and up to 1, or a list of numbers")
    return tuple(range(depth - max(1, round(layers * depth)), depth))
