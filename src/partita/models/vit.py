"""A randomly initialized Vision Transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from partita.core import memory
from partita.core.options import Count, Range
from partita.core.rng import Key, seeded
from partita.models import ModelError
from partita.models.from_task import check_has_images, processor_of, set_labels
from partita.tasks import TaskInfo

if TYPE_CHECKING:
    from partita.models.functional import FunctionalModel


def vit(
    task: TaskInfo,
    key: Key,
    *,
    layers: Annotated[int, Range(low=1, high=1000), "number of layers"] = 2,
    width: Annotated[int, Range(low=1, high=10**6), "hidden size"] = 64,
    heads: Annotated[Count, "attention heads per layer; must divide the width"] = 4,
    mlp_ratio: Annotated[int, Range(low=1, high=1000), "MLP width as a multiple of the width"] = 2,
    patch: Annotated[Count, "side length of a patch in pixels; must divide the image size"] = 2,
    frozen: Annotated[tuple[str, ...], "tags or names of parameters that are never trained or sent"] = (),
) -> FunctionalModel:
    """A randomly initialized Vision Transformer.

    Raises:
        ModelError: If the task has no square images, `heads` does not divide `width`, or `patch` does not divide the
            image size.
        SizeError: If the model would not fit into memory.
    """
    from partita.models.hugging_face import from_module
    from partita.models.vision_transformer import Config, VisionTransformer

    check_has_images(task)
    if width % heads:
        fit = -(-width // heads) * heads
        raise ModelError(f"width {width} is not divisible by {heads} heads; use a width of {fit}")
    if task.size % patch:
        fits = ", ".join(str(side) for side in range(1, task.size + 1) if task.size % side == 0)
        raise ModelError(f"image size {task.size} is not divisible by patch size {patch}; use a patch of {fits}")
    tokens = (task.size // patch) ** 2 + 1
    numbers = layers * width * (4 * width + 2 * width * mlp_ratio + mlp_ratio + 9)
    numbers += width * (tokens + task.channels * patch**2 + len(task.classes))
    remedy = "lower model.layers, model.width or model.mlp_ratio"
    memory.require(4 * numbers, f"a vit of {layers} layers of width {width}", remedy)
    config = Config(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=width * mlp_ratio,
        image_size=task.size,
        patch_size=patch,
        num_channels=task.channels,
    )
    set_labels(config, task)
    with seeded(key):
        module: Any = VisionTransformer(config)
    return from_module("vit", module, frozen, kind=task.kind, processor=processor_of(task))
