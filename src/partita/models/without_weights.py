"""A model without weights: the names, shapes and tags of its parameters, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from partita.core.options import closest_match
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.architectures import is_known
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module
from partita.models.lifting import why_one_by_one
from partita.models.loading import check_kind, config_for, load_config, without_values
from partita.tasks import KINDS, Normalization, TaskKind

TOKENS = 8  # of the texts that the forward pass is tried on
AT_START = "a run tries it when it starts"


@dataclass(frozen=True)
class AnyTask:
    """A task of a kind, with the properties that a config needs."""

    kind: TaskKind
    classes: tuple[str, ...] = ("0", "1")
    channels: int = 3
    size: int = 224
    vocabulary_size: int = 0
    max_tokens: int = 0
    packed: bool = False
    tokenizer: Any = None
    normalization: Normalization | None = None


def model_without_weights(path: str, kind: str | None = None) -> FunctionalModel:
    """Build a model on the meta device. No weights are downloaded or read.

    Args:
        path: Folder or Hub id.
        kind: Name of the kind of task. Default: the kind that the checkpoint was trained for, else the first that fits.

    Raises:
        ModelError: If there is no such model, or it does not fit the kind.
    """
    kind_of_task, module = module_without_weights(path, kind)
    return from_module(str(module.config.model_type), module, kind=kind_of_task)


def module_without_weights(path: str, kind: str | None = None) -> tuple[TaskKind, PreTrainedModel]:
    """Return the kind of task and the module on the meta device. The arguments are those of `model_without_weights`."""
    if kind is not None and kind not in KINDS:
        raise ModelError(f"there is no kind of task '{kind}'; {closest_match(kind, KINDS)}")
    task = AnyTask(KINDS[kind] if kind else _kind_of(path))
    config = config_for(path, task)
    auto_class = getattr(transformers, task.kind.auto_class)
    check_kind(path, config, auto_class, task)
    return task.kind, without_values(config, auto_class)


def _kind_of(path: str) -> TaskKind:
    architectures = load_config(path).architectures or []
    fit = [kind for kind in KINDS.values() if _fits(path, kind)]
    if not fit:
        raise ModelError(f"'{path}' fits no kind of task: {', '.join(KINDS)}; choose another model")
    suffixes = {kind.auto_class.removeprefix("AutoModel"): kind for kind in reversed(fit)}
    return next((suffixes[end] for name in architectures for end in suffixes if name.endswith(end)), fit[0])


def _fits(path: str, kind: TaskKind) -> bool:
    return type(config_for(path, AnyTask(kind))) in getattr(transformers, kind.auto_class)._model_mapping


def blocks_of(model: FunctionalModel) -> tuple[bool | None, str]:
    """Return whether clients of a model without weights can train in a block, and why not.

    Returns:
        `(True, "")`, `(False, why)`, or `(None, why)` if it cannot be told without weights.
    """
    if is_known(str(model.module.config.model_type)):
        return True, ""
    inputs = _inputs(model)
    try:
        with torch.no_grad():
            model(model.initial, inputs)
    except (RuntimeError, ValueError, TypeError, AttributeError):  # values, or a missing setting, decide what it does
        return None, AT_START
    reason = why_one_by_one(model, inputs)
    return (not reason, reason)


def _inputs(model: FunctionalModel) -> Tensors:
    config: Any = model.module.config
    if model.kind.inputs == "text":
        ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", AnyTask.size)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), height, width, device="meta")}
