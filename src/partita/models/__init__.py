"""Build models by name. transformers is imported only when a model is built."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from partita.core.model import Model
from partita.core.registry import make, takes
from partita.core.rng import Key
from partita.models.adapter_options import adapter_options, frozen_part
from partita.tasks import TaskInfo

INDEX = {
    "vit": "partita.models.vit:vit",
    "pretrained": "partita.models.pretrained:pretrained",
    "clip": "partita.models.prompts.clip:clip",
    "module": "partita.models.plain:module",
    "trainer": "partita.trainers.at_sites:model",
}

# What the head of a text encoder reads: as in transformers, the mean of all tokens, or that mean at a length of one.
Pooling = Literal["model", "mean", "unit_mean"]
CACHED_STATES = "hidden"  # input name of cached frozen-layer outputs, which replace the original input


class ModelError(ValueError):
    """A model cannot be built, called or saved."""


def build(
    name: str,
    task: TaskInfo,
    key: Key,
    /,
    adapter: Annotated[
        dict[str, Any] | None, "an adapter, which trains instead of the weights; a table, see `[model.adapter]`"
    ] = None,
    **options: Any,
) -> Model:
    """Build a model for a task by its name and options, such as `partita.model("vit", task, key, layers=2)`.

    Args:
        name: Name of the model: a key of `INDEX`, or the user's own function.
        task: Task that the model is built for.
        key: Key for all random draws.
        adapter: Options of an adapter of PEFT: the table `[model.adapter]`. The rest of the model is frozen.
        **options: Options of the model.
    """
    wanted = None if adapter is None else asdict(adapter_options(adapter))
    frozen = options.get("frozen", ())
    if wanted is not None and takes("model", name, "frozen") and isinstance(frozen, tuple | list):
        # Frozen when loaded: otherwise, memory would hold a copy of the base to train.
        options["frozen"] = (*frozen, frozen_part(wanted["head"], task.kind.outputs))
    model: Model = make("model", name, options, task=task, key=key)
    return model if wanted is None else model.adapted(wanted.pop("kind"), key / "adapter", **wanted)
