"""Build models by name. transformers is imported only when a model is built."""

from __future__ import annotations

from typing import Any

from partita.core.model import Model
from partita.core.options import validate_options
from partita.core.registry import check_result, find_function
from partita.core.rng import Key
from partita.tasks import TaskInfo

INDEX = {
    "vit": "partita.models.vit:vit",
    "pretrained": "partita.models.pretrained:pretrained",
    "clip": "partita.models.prompts.clip:clip",
}

CACHED_STATES = "hidden"  # input name of cached frozen-layer outputs, which replace the original input


class ModelError(ValueError):
    """A model cannot be built, called or saved."""


def build(name: str, task: TaskInfo, key: Key, /, **options: Any) -> Model:
    """Build a model for a task.

    Args:
        name: Name of the model: a key of `INDEX`, or the user's own function.
        task: Task that the model is built for.
        key: Key for all random draws.
        **options: Options of the model.
    """
    make = find_function(INDEX, name, "model")
    options = validate_options(make, options, "model", given=["task", "key"], name=name)
    return check_result(make(task, key, **options), Model, name, "model")
