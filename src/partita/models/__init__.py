"""Build models by name. transformers is imported only when a model is built."""

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

CACHED_STATES = "hidden"  # input name of cached frozen-layer outputs, which replace the original input

Kind = Literal["image", "text", "tokens", "lm"]


class ModelError(ValueError):
    """A model cannot be built, called or saved."""


class ImageTask(Protocol):
    """Task properties that a vision model needs.

    The input "pixel_values" holds square images, (example, channel, size, size).
    """

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def channels(self) -> int: ...

    @property
    def size(self) -> int: ...


class Task(ImageTask, Protocol):
    """Task properties that a pretrained model needs. `channels` and `size` are 0 for tasks without images.

    | kind | inputs | targets |
    |---|---|---|
    | "image" | "pixel_values" (example, channel, size, size) | class (example,) |
    | "text" | "input_ids", "attention_mask" (example, token) | class (example,) |
    | "tokens" | as for "text" | class of each token (example, token), -100 for tokens without a target |
    | "lm" | as for "text" | next token (example, token), -100 for tokens without a target; `classes` is empty |

    With `multi_label`, the targets of "image" and "text" are multi-hot (example, class).
    """

    @property
    def kind(self) -> Kind: ...

    @property
    def multi_label(self) -> bool: ...

    @property
    def words(self) -> int:
        """Upper bound of token ids, exclusive."""
        ...


def build(name: str, task: ImageTask, key: Key, /, **options: Any) -> Model:
    """Build a model for a task.

    Args:
        name: Name of the model, a key of `INDEX`.
        task: Task that the model is built for.
        key: Key for all random draws.
        **options: Options of the model.
    """
    make = import_from_registry(INDEX, name, "model")
    model: Model = make(task, key, **validate_options(make, options, "model", given=["task", "key"]))
    return model
