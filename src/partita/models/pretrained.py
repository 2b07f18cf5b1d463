"""Pretrained transformers models from a folder or the Hugging Face Hub, with a head for the task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import torch

from partita.core.given import is_given
from partita.core.rng import Key
from partita.models import ModelError, Pooling
from partita.models.from_task import check_has_images, processor_of
from partita.tasks import TaskInfo

if TYPE_CHECKING:
    from partita.models.functional import FunctionalModel


def pretrained(
    task: TaskInfo,
    key: Key,
    *,
    path: Annotated[str, "folder written by save_pretrained, or Hugging Face Hub id"],
    prompt: Annotated[str | None, "CLIP only: text of a class, with {} for its name; replaces the head"] = None,
    fresh_head: Annotated[bool, "initialize a new head even if the checkpoint has one that fits"] = False,
    frozen: Annotated[
        tuple[str, ...], "tags or names of parameters that are never trained or sent; `base` is all but the head"
    ] = (),
    dtype: Annotated[Literal["float32", "bfloat16"], "dtype of the forward pass and of frozen weights"] = "float32",
    quantize: Annotated[Literal["8bit", "4bit"] | None, "store frozen linear weights in 8 or 4 bits"] = None,
    checkpointing: Annotated[bool, "recompute activations in the backward pass to save memory"] = False,
    pooling: Annotated[
        Pooling,
        "text encoders: what the head reads, as in transformers (`model`), the `mean` of all tokens, or that mean "
        "scaled to a length of one (`unit_mean`)",
    ] = "model",
) -> FunctionalModel:
    """A pretrained model from a folder or the Hub. Its head is kept if it has as many outputs as the task.

    With `prompt`, such as "a photo of a {}", a CLIP model has no head and compares images with the text of each class.
    Trainable parameters are float32 whatever `dtype` is.

    Raises:
        ModelError: If the model is not supported, does not take the task's inputs, or has no place for an option.
    """
    import transformers

    from partita.models import loading
    from partita.models.architectures import forward_of
    from partita.models.given_model import given_adapter
    from partita.models.hugging_face import from_module

    kind = task.kind
    if kind.inputs == "image":
        check_has_images(task)
    config = loading.config_for(path, task)
    auto_class = transformers.AutoModel if prompt is not None else getattr(transformers, kind.auto_class)
    loading.check_kind(path, config, auto_class, task)  # before loading weights
    forward_of(config.model_type, kind.head, pooling)
    if kind.inputs == "image":
        loading.check_images(path, config, task)
    loading.check_tokens(path, config, task)
    loading.check_packing(path, config, task)
    if prompt is not None and (
        config.model_type != "clip" or (kind.inputs, kind.outputs) != ("image", "classes") or "{}" not in prompt
    ):
        raise ModelError(
            f"prompt is '{prompt}' for a '{config.model_type}' and a task of kind '{kind.name}'; it needs a 'clip' "
            "model, an image task with classes, and {} as the placeholder of the class"
        )
    if fresh_head and (prompt is not None or kind.outputs == "vocabulary"):
        raise ModelError("fresh_head = true, but this model has no head to initialize; remove fresh_head")
    has_head = prompt is None and kind.outputs != "vocabulary"
    half = None if dtype == "float32" else torch.bfloat16
    adapter = given_adapter(path) if is_given(path) else None
    module = loading.load_module(path, config, auto_class, key, has_head, fresh_head, frozen, half, quantize)
    model = from_module(
        config.model_type,
        module,
        frozen if adapter is None else adapter.frozen(module),
        kind=kind,
        fixed=None if prompt is None else loading.texts(path, prompt, task),
        dtype=half,
        quantize=quantize,
        checkpointing=checkpointing,
        processor=processor_of(task),
        pooling=pooling,
    )
    if adapter is None:
        return model
    from partita.models.peft_adapters import add_given

    return add_given(model, adapter, key / "adapter")
