"""Models by name. transformers is imported when one is built, and not before."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from partita.core.model import Model
from partita.core.options import import_from_registry, validate_options
from partita.core.rng import Key

INDEX = {
    "vit": "partita.models.vit:vit",
    "pretrained": "partita.models.pretrained:pretrained",
    "clip": "partita.models.prompts.clip:clip",
}

CACHED_STATES = "hidden"  # the input that stands for what frozen layers made of another

Kind = Literal["image", "text", "tokens", "lm"]


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


class Task(ImageTask, Protocol):
    """What a pretrained model needs to know. Channels and size are zero where there are no images.

    | kind | inputs | targets |
    |---|---|---|
    | "image" | "pixel_values" (example, channel, size, size) | class (example,) |
    | "text" | "input_ids", "attention_mask" (example, token) | class (example,) |
    | "tokens" | as for "text" | class of each token (example, token), -100 where none is asked |
    | "lm" | as for "text" | the next token (example, token), -100 where none is asked; `classes` is empty |

    With `multi_label`, the targets of images and texts are zeros and ones (example, class).
    """

    @property
    def kind(self) -> Kind: ...

    @property
    def multi_label(self) -> bool: ...

    @property
    def words(self) -> int:
        """Token ids are below this."""
        ...


def build(name: str, task: ImageTask, key: Key, /, **options: Any) -> Model:
    """The named model for a task; every random draw comes from the key."""
    make = import_from_registry(INDEX, name, "model")
    model: Model = make(task, key, **validate_options(make, options, "model", given=["task", "key"]))
    return model
