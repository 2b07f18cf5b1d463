"""Models of transformers from a folder or the Hugging Face Hub, with the head that the task needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    CLIPConfig,
    CLIPVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from partita.core import memory
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models import ImageTask, Kind, ModelError, Task
from partita.models.adapter import FunctionalModel, from_module, without_logs
from partita.models.architectures import forward_of, heads_among
from partita.models.losses import Objective

MODULES: dict[Kind, Any] = {
    "image": AutoModelForImageClassification,
    "text": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "lm": AutoModelForCausalLM,
}
ANY_SIZE = ("dinov2", "dinov2_with_registers")  # they stretch their position embeddings to the image
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
REMEDY = "give a folder that save_pretrained has written, or the id of a model that the Hub has"


def pretrained(
    task: Task,
    key: Key,
    *,
    path: Annotated[str, "folder that save_pretrained has written, or id of the Hugging Face Hub"],
    prompt: Annotated[str | None, "for a CLIP: text of a class, with {} for its name; there is then no head"] = None,
    fresh_head: Annotated[bool, "draw a new head even where the checkpoint has one that fits"] = False,
    frozen: Annotated[tuple[str, ...], "tags or names of parameters that never train nor travel"] = (),
    dtype: Annotated[Literal["float32", "bfloat16"], "type to compute in, and to hold frozen weights in"] = "float32",
    checkpointing: Annotated[bool, "recompute activations in the backward pass, to save memory"] = False,
) -> FunctionalModel:
    """A model from a folder or the Hub; its head is kept if it has as many classes as the task.

    `prompt`, such as "a photo of a {}", has a CLIP compare images with the text of each class, without a head.
    `dtype` is the type to compute in and to hold what is frozen in; what trains is held in float32.
    `checkpointing` saves memory: layers compute again on the way back what they would have to remember.
    """
    if task.kind == "image":
        check_has_images(task)
    config = config_for(path, task)
    objective = _objective(task)
    forward_of(config.model_type, task.kind)  # an architecture that will not do is refused before it is loaded
    if task.kind == "image":
        check_images(path, config, task)
    _check_tokens(path, config, task)
    if prompt is not None and (config.model_type != "clip" or task.kind != "image" or "{}" not in prompt):
        raise ModelError(
            f"prompt is '{prompt}' for a '{config.model_type}' and a task of kind '{task.kind}'; it is for a 'clip' "
            "and a task of images, and has {} where the class is to stand"
        )
    if fresh_head and (prompt is not None or task.kind == "lm"):
        raise ModelError("fresh_head: there is no head here that could be drawn anew; leave it out")
    has_head = prompt is None and task.kind != "lm"
    module = load_module(path, config, MODULES[task.kind] if prompt is None else AutoModel, key, has_head, fresh_head)
    return from_module(
        config.model_type,
        module,
        frozen,
        objective=objective,
        fixed=None if prompt is None else _texts(path, prompt, task),
        dtype=None if dtype == "float32" else torch.bfloat16,
        checkpointing=checkpointing,
    )


def check_has_images(task: ImageTask) -> None:
    if not (task.channels and task.size):
        raise ModelError("the task has no square images, which this model needs; choose a task of images")


def set_labels(config: PreTrainedConfig, task: ImageTask) -> None:
    config.id2label = dict(enumerate(task.classes))
    config.label2id = {label: index for index, label in enumerate(task.classes)}


@contextmanager
def seeded(key: Key) -> Iterator[None]:
    """Modules draw from torch's global CPU generator: seed it for a while. torch.manual_seed would reseed GPUs too."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(key.generator().get_state())
        yield


def _objective(task: Task) -> Objective:
    if task.kind in ("image", "text"):
        return "multi" if task.multi_label else "single"
    return "tokens" if task.kind == "tokens" else "lm"


def config_for(path: str, task: Task) -> Any:
    """The model's config, made to fit the task."""
    folder = Path(path).is_dir()
    if folder and not (Path(path) / "config.json").is_file():
        raise ModelError(f"the folder '{path}' has no config.json; give one that save_pretrained has written")
    if not folder and not HUB_ID.fullmatch(path):
        raise ModelError(f"there is no folder '{path}'; {REMEDY}")
    try:
        with without_logs():
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the config.json in '{path}' cannot be read: {_first_line(error)}"
            if folder
            else f"cannot load '{path}': it is no folder here, and from the Hub: {_first_line(error)}; {REMEDY}"
        ) from error
    if isinstance(config, CLIPVisionConfig):  # the image tower alone
        config = CLIPConfig(vision_config=config.to_dict())
    config.architectures = []  # of several classes for one head, the plain one
    if task.kind != "lm":
        set_labels(config, task)
    if task.multi_label:
        config.problem_type = "multi_label_classification"
    if task.kind == "text" and config.pad_token_id is None:
        # Here the mask tells what is padding, but transformers takes no batch from a decoder without such a token.
        ends = config.eos_token_id
        config.pad_token_id = ends[0] if isinstance(ends, list) else ends
    return config


def check_images(path: str, config: Any, task: ImageTask) -> None:
    config = getattr(config, "vision_config", config)
    if config.num_channels != task.channels:
        raise ModelError(
            f"'{path}' takes images of {config.num_channels} channels, but the task's have {task.channels}; "
            f"give the task's images {config.num_channels} channels"
        )
    size, patch = config.image_size, config.patch_size
    if config.model_type in ANY_SIZE:
        if task.size % patch:
            fit = -(-task.size // patch) * patch
            raise ModelError(
                f"'{path}' cuts images into patches of {patch}, but the task's are of size {task.size}; "
                f"resize the task's images to {fit}"
            )
    elif size not in (task.size, [task.size] * 2, (task.size,) * 2):
        raise ModelError(
            f"'{path}' takes images of size {size}, but the task's are of size {task.size}; "
            f"resize the task's images to {size}"
        )


def _check_tokens(path: str, config: Any, task: Task) -> None:
    known = getattr(config, "vocab_size", None)
    if known is not None and task.words > known:
        raise ModelError(
            f"the task's texts hold the token {task.words - 1}, but '{path}' knows {known}, from 0 to {known - 1}; "
            "leave data.tokenizer out to cut texts with the model's own, or name one that fits it"
        )


def load_module(path: str, config: Any, kind: Any, key: Key, has_head: bool, fresh_head: bool) -> PreTrainedModel:
    load: Callable[..., Any] = kind.from_pretrained
    with seeded(key):
        _check_size(path, config, kind)
    with without_logs(), seeded(key):
        try:
            module, report = load(
                path,
                config=config,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
                use_safetensors=True,  # other weights are pickled
            )
        except OSError as error:
            raise ModelError(f"'{path}' has no weights that can be loaded: {_first_line(error)}; {REMEDY}") from error
    own = dict(module.named_parameters())
    head = heads_among(config.model_type, own) if has_head else frozenset[str]()
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    missing = {*report["missing_keys"]} - mismatched
    _refuse(path, "lacks", missing - head)
    _refuse(path, "has in another shape", mismatched - head)
    _refuse(path, "has, but this model has not", {n for n in report["unexpected_keys"] if _in_body(module, n)})
    for name in sorted(head if fresh_head else head & (missing | mismatched)):
        # Not left to transformers, whose draw would depend on what else it fills in.
        with torch.no_grad():
            if own[name].ndim > 1:
                width = getattr(config, "initializer_range", 0.02)
                own[name].normal_(std=width, generator=(key / "head" / name).generator())
            else:
                own[name].zero_()
    return module


def _check_size(path: str, config: Any, kind: Any) -> None:
    """A module on the meta device has shapes and no values, so it can be counted before memory is taken."""
    with without_logs(), torch.device("meta"):
        module = kind.from_config(config, trust_remote_code=False)
    wanted = sum(each.numel() * torch.float32.itemsize for each in module.parameters())
    memory.require(wanted, f"the model of '{path}' in float32", "choose a smaller one, or a machine with more memory")


def _in_body(module: PreTrainedModel, name: str) -> bool:
    """Whether a checkpoint's parameter belongs to the Transformer and not to the task it was pretrained on."""
    body, within = module.base_model, name.removeprefix(f"{module.base_model_prefix}.")
    first = within.partition(".")[0]
    return first != "pooler" and (within != name or first in dict(body.named_children()))


def _refuse(path: str, fault: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ModelError(f"'{path}' {fault}: {shown}; give a checkpoint that is whole, with or without a head")


def _texts(path: str, prompt: str, task: Task) -> Tensors:
    """The prompt for each class: (class, token)."""
    try:
        with without_logs():
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' has no tokenizer, which a prompt needs: {_first_line(error)}") from error
    tokens = tokenizer([prompt.format(name) for name in task.classes], padding=True, return_tensors="pt")
    rows = [tuple(row) for row in tokens["input_ids"].tolist()]
    # Where a folder lacks the vocabulary, transformers makes a tokenizer that knows no word.
    if alike := [name for name, row in zip(task.classes, rows, strict=True) if rows.count(row) > 1]:
        raise ModelError(
            f"the tokenizer of '{path}' makes the same of '{alike[0]}' and '{alike[1]}'; "
            "give a folder with the tokenizer's files, and classes whose names differ"
        )
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
