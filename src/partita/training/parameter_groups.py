"""Parameters by how the optimizer steps them, as the parameter groups of torch.optim."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from partita.core.model import Model, input_side_names, layer_number, layer_tag, layer_tags
from partita.core.optim import Optimizer
from partita.core.personal_copy import original_name
from partita.core.settings import RunError, Training
from partita.core.tensors import Tensors


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same optimizer and learning rate.

    Attributes:
        optimizer: The optimizer, with or without weight decay.
        lr_factor: The factor on the learning rate.
        names: The parameters, sorted.
    """

    optimizer: Optimizer
    lr_factor: float
    names: tuple[str, ...]


def parameter_groups(training: Training, model: Model, names: Collection[str]) -> list[ParameterGroup]:
    """Divide parameters into groups by `Training.layer_decay` and `Training.decay_norms_and_biases`.

    Args:
        training: The training settings.
        model: The model, whose tags say in which layer a parameter is.
        names: The parameters that train.

    Returns:
        The groups; one with all names if both settings have their defaults.

    Raises:
        RunError: If `layer_decay` is set and the model has no layers.
    """
    factors = _lr_factors(model, training.layer_decay) if training.layer_decay < 1 else {}
    groups: dict[tuple[float, bool], list[str]] = {}
    for name in sorted(names):
        decays = training.decay_norms_and_biases or not is_norm_or_bias(model, name)
        groups.setdefault((factors.get(name, 1.0), decays), []).append(name)
    optimizer = training.steps_by
    return [
        ParameterGroup(optimizer if decays else optimizer.without_weight_decay(), factor, tuple(own))
        for (factor, decays), own in groups.items()
    ]


def is_norm_or_bias(model: Model, name: str) -> bool:
    """Whether a parameter is a bias, or the weight of a norm."""
    original = original_name(name)
    return "norm" in model.tags.get(original, ()) or name.endswith("bias")


def split_by_group(groups: Sequence[ParameterGroup], grads: Tensors) -> list[Tensors]:
    """Return the gradients of each group. They can lack names, whose parameters the step does not change."""
    if len(groups) == 1:
        return [grads]
    return [{name: grads[name] for name in group.names if name in grads} for group in groups]


def _lr_factors(model: Model, decay: float) -> dict[str, float]:
    """Return the factors of BEiT and timm: `decay` to the power of the number of layers above the parameter.

    The head and what follows the last layer count as one layer, and the embeddings are below the first.
    """
    layers = layer_tags(model)
    if not layers:
        raise RunError(
            f"training.layer_decay is {decay}, but {model.name} has no layers that train or travel; leave it out"
        )
    top = layer_number(layers[-1]) + 1
    embeddings = input_side_names(model)
    factors = {}
    for name, tags in model.tags.items():
        layer = layer_tag(tags)
        depth = top - layer_number(layer) if layer else top + 1 if name in embeddings else 0
        factors[name] = decay**depth
    # A personal copy has no role of its own.
    return {name: factors.get(original_name(name), factor) for name, factor in factors.items()}
