"""A Vision Transformer of transformers, from scratch."""

from __future__ import annotations

from transformers import ViTConfig, ViTForImageClassification

from partita.core.rng import Key
from partita.models import ImageTask, ModelError
from partita.models.adapter import Adapted, adapt
from partita.models.pretrained import check_has_images, drawing_from, label


def vit(
    task: ImageTask,
    key: Key,
    *,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    mlp_ratio: int = 2,
    patch: int = 2,
    frozen: tuple[str, ...] = (),
) -> Adapted:
    """A Vision Transformer from scratch. `frozen` gives tags or names of what never trains nor travels."""
    check_has_images(task)
    numbers = {"layers": layers, "width": width, "heads": heads, "mlp_ratio": mlp_ratio, "patch": patch}
    for option, number in numbers.items():
        if number < 1:
            raise ModelError(f"{option} is {number}; it must be at least 1")
    if width % heads:
        fit = -(-width // heads) * heads
        raise ModelError(f"width {width} is not divisible by {heads} heads; use a width of {fit}")
    if task.size % patch:
        fits = ", ".join(str(side) for side in range(1, task.size + 1) if task.size % side == 0)
        raise ModelError(f"images of size {task.size} do not divide into patches of {patch}; use a patch of {fits}")
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=width * mlp_ratio,
        image_size=task.size,
        patch_size=patch,
        num_channels=task.channels,
    )
    label(config, task)
    with drawing_from(key):
        module = ViTForImageClassification(config)
    return adapt("vit", module, frozen)
