"""Models by name. transformers is imported when one is built, and not before."""

from __future__ import annotations

from typing import Any, Protocol

from partita.core.model import Model
from partita.core.options import bind, pick
from partita.core.rng import Key

INDEX = {
    "vit": "partita.models.vit:vit",
    "vit-pretrained": "partita.models.vit:pretrained",
}


class ModelError(ValueError):
    """A model that cannot be built, called or saved as asked."""


class ImageTask(Protocol):
    """What a vision model needs to know: square images under "pixel_values" (example, channel, size, size)."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def channels(self) -> int: ...

    @property
    def size(self) -> int: ...


def build(name: str, task: ImageTask, key: Key, /, **options: Any) -> Model:
    """The named model for a task; every random draw comes from the key."""
    make = pick(INDEX, name, "model")
    model: Model = make(task, key, **bind(make, options, "model", given=["task", "key"]))
    return model
