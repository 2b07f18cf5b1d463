"""Load configs, weights and tokenizers of transformers from a folder or the Hugging Face Hub, and check them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    CLIPConfig,
    CLIPVisionConfig,
    PreTrainedModel,
)

from partita.core import memory
from partita.core.given import is_given, origin
from partita.core.hub import offline_reason
from partita.core.rng import Key, seeded
from partita.core.tensors import Names, Tensors
from partita.models import ModelError, split_qkv
from partita.models.architectures import ARCHITECTURES, architecture, forward_of, head_names
from partita.models.from_task import REMEDY, check_path, set_labels
from partita.models.functional import without_logs
from partita.models.given_model import copy_of_given, given_config
from partita.models.hugging_face import frozen_parameters
from partita.models.quantization import Mode, quantizable, stored_bytes
from partita.tasks import KINDS, TaskInfo

POSITIONS_AFTER_PADDING = ("camembert", "roberta", "xlm-roberta")  # positions start after the padding token's number
ANY_SIZE = ("dinov2", "dinov2_with_registers")  # they interpolate position embeddings to the image size
FULLY_CONVOLUTIONAL = ("swin", "swinv2", "segformer")  # they take images of any size that their windows divide
BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
NOTHING_AMISS: dict[str, tuple[Any, ...]] = dict.fromkeys(("missing_keys", "mismatched_keys", "unexpected_keys"), ())
TOKENIZER_REMEDY = "copy the files of the original model's tokenizer into the folder"


def check_kind(path: str, config: Any, auto_class: Any, task: TaskInfo) -> None:
    """Raise a ModelError if transformers or partita has no model of this type for the kind of task."""
    forward_of(config.model_type, task.kind.head)
    if type(config) not in auto_class._model_mapping:
        fit = [kind for kind in KINDS.values() if type(config) in getattr(transformers, kind.auto_class)._model_mapping]
        heads = dict.fromkeys(kind.name for kind in fit)
        remedy = f"it can be trained on tasks of kind {', '.join(heads)}" if heads else "choose another model"
        raise ModelError(
            f"'{path}' is a '{config.model_type}', for which transformers has no {auto_class.__name__}, which a task "
            f"of kind '{task.kind.name}' needs; {remedy}"
        )


def config_for(path: str, task: TaskInfo) -> Any:
    """Load the config of a model and adapt it to the task.

    Raises:
        ModelError: If there is no config, or it cannot be read.
    """
    config = load_config(path)
    config.architectures = []  # if a head has several classes in transformers, use the plain one
    if task.kind.outputs != "vocabulary":
        set_labels(config, task)
    if task.kind.head == "text" and getattr(config, "pad_token_id", None) is None:
        # partita marks padding by the mask, but transformers rejects batches for a decoder without a padding token.
        ends = getattr(config, "eos_token_id", None)
        config.pad_token_id = ends[0] if isinstance(ends, list) else ends
    return config


def load_config(path: str) -> Any:
    """Load the config of a model as it is.

    Raises:
        ModelError: If there is no config, or it cannot be read.
    """
    check_path(path)
    if is_given(path):
        return given_config(path)
    folder = Path(path).is_dir()
    offline = None if folder else offline_reason()
    try:
        with without_logs():
            config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=offline is not None)
    except (OSError, ValueError) as error:
        if "model type" in str(error) and "does not recognize" in str(error):
            raise ModelError(
                f"'{path}' has a model type that transformers {transformers.__version__} does not know: "
                f"{_first_line(error)}; upgrade transformers, or choose a model whose code is part of it"
            ) from error
        if folder:
            raise ModelError(f"the config.json in '{path}' cannot be read: {_first_line(error)}") from error
        if offline:
            raise ModelError(
                f"there is no folder '{path}' here, no model of this name was downloaded earlier, and {offline}; "
                f"{REMEDY}"
            ) from error
        raise ModelError(
            f"cannot load '{path}': not a local folder, and the Hub failed with: {_first_line(error)}; {REMEDY}"
        ) from error
    if isinstance(config, CLIPVisionConfig):  # a CLIP checkpoint with only the image tower
        config = CLIPConfig(vision_config=config.to_dict())
    return config


def check_images(path: str, config: Any, task: TaskInfo) -> None:
    """Raise a ModelError if the model does not take the task's image size or channels.

    Args:
        path: Where the model comes from, for the error message.
        config: The config of transformers.
        task: The task.
    """
    config = getattr(config, "vision_config", config)
    channels = getattr(config, "num_channels", task.channels)
    if channels != task.channels:
        raise ModelError(
            f"'{path}' takes images with {channels} channels, but the task's have {task.channels}; "
            f"load the task's images with {channels} channels"
        )
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if not isinstance(patch, int) or size is None or config.model_type in FULLY_CONVOLUTIONAL:
        return  # the module checks the size itself, or takes any
    if config.model_type in ANY_SIZE:
        if task.size % patch:
            fit = -(-task.size // patch) * patch
            raise ModelError(
                f"'{path}' divides images into patches of {patch}, but the task's images have size {task.size}; "
                f"resize the task's images to {fit}"
            )
    elif size not in (task.size, [task.size] * 2, (task.size,) * 2):
        raise ModelError(
            f"'{path}' takes images of size {size}, but the task's images have size {task.size}; "
            f"resize the task's images to {size}"
        )


def check_tokens(path: str, config: Any, task: TaskInfo) -> None:
    known = getattr(config, "vocab_size", None)
    if known is not None and task.vocabulary_size > known:
        raise ModelError(
            f"the task's texts contain token {task.vocabulary_size - 1}, but '{path}' has {known} tokens, 0 to "
            f"{known - 1}; remove data.tokenizer to use the model's tokenizer, or set one that fits the model"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions and config.model_type in POSITIONS_AFTER_PADDING:
        positions -= config.pad_token_id + 1
    if task.kind.inputs == "text" and positions and 0 < positions < task.max_tokens:  # -1 stands for any number
        raise ModelError(
            f"the task has rows of {task.max_tokens} tokens, but '{path}' has {positions} positions; lower "
            "data.max_length (data.block_size for 'lm')"
        )


def check_packing(path: str, config: Any, task: TaskInfo) -> None:
    """Raise a ModelError if examples that are packed into one row would attend to one another."""
    if not task.packed:
        return
    kind = config.model_type
    if not architecture(kind).packs:
        known = ", ".join(sorted(name for name, each in ARCHITECTURES.items() if each.packs))
        raise ModelError(
            f"data.pack = true needs a model that keeps the examples of a row apart, which partita knows of {known}, "
            f"but '{path}' is a '{kind}'; set data.pack = false, or use one of them"
        )
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None) if "sliding_attention" in types else None
    if window and window < task.max_tokens:
        raise ModelError(
            f"'{path}' has layers that attend to the last {window} tokens only, which packed rows of "
            f"{task.max_tokens} tokens do not support; set data.pack = false, or data.max_length to at most {window}"
        )


def load_module(
    path: str,
    config: Any,
    kind: Any,
    key: Key,
    has_head: bool,
    fresh_head: bool,
    frozen: Iterable[str] = (),
    dtype: torch.dtype | None = None,
    quantize: Mode | None = None,
) -> PreTrainedModel:
    """Load a pretrained module in float32, and what is frozen in its own dtype.

    A weight that the files hold in its dtype is not copied: it is a view of the file, which several processes share.

    Args:
        path: Folder or Hub id.
        config: Config of the module, adapted to the task.
        kind: Auto class of transformers to load it with.
        key: Key for the weights of a new head.
        has_head: Whether the module has a head, which may be missing in the checkpoint or have another shape.
        fresh_head: Whether to initialize the head even if the checkpoint has one that fits.
        frozen: Names or tags of parameters that are never trained.
        dtype: The dtype of frozen parameters. Default: float32.
        quantize: The format to which frozen linear weights will be quantized, which counts in the check of memory.

    Raises:
        ModelError: If the weights cannot be loaded or do not match the module outside the head.
    """
    load: Callable[..., Any] = kind.from_pretrained
    with seeded(key):
        shapes = without_values(config, kind)
    frozen = tuple(frozen)
    fixed = frozen_parameters(config.model_type, shapes, frozen) if frozen else frozenset[str]()
    _check_size(path, shapes, fixed, dtype, quantize)
    trained = {split_qkv.fused_name(shapes, name) for name, _ in shapes.named_parameters() if name not in fixed}
    frozen_dtypes = {} if dtype is None else dict.fromkeys(_unsplit(shapes, fixed) - trained, dtype)
    if is_given(path):
        module, report = copy_of_given(path, config, type(shapes)), NOTHING_AMISS
    else:
        with without_logs(), seeded(key), _loading_in(frozen_dtypes, type(shapes)):
            try:
                module, report = load(
                    path,
                    config=config,
                    dtype=torch.float32,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    trust_remote_code=False,
                    use_safetensors=True,  # other formats are pickles
                    local_files_only=Path(path).is_dir() or offline_reason() is not None,
                )
            except OSError as error:
                reason = _first_line(error)
                raise ModelError(f"'{path}' has no weights that can be loaded: {reason}; {REMEDY}") from error
    own = dict(module.named_parameters())
    if frozen_dtypes and not is_given(path) and any(own[name].dtype != torch.float32 for name in trained):
        # The checkpoint holds a trained and a frozen parameter in one tensor, which was rounded.
        return load_module(path, config, kind, key, has_head, fresh_head)
    head = head_names(module) if has_head else frozenset[str]()
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    missing = {*report["missing_keys"]} - mismatched - _reset_statistics(module, head, {*report["missing_keys"]})
    _refuse(path, "lacks", missing - head)
    _refuse(path, "has with another shape", mismatched - head)
    _refuse(path, "has, but this model does not have", {n for n in report["unexpected_keys"] if _in_body(module, n)})
    for name in sorted(head if fresh_head else head & (missing | mismatched)):
        # Not left to transformers: its draws depend on which other parameters it initializes.
        with torch.no_grad():
            if own[name].ndim > 1:
                width = getattr(config, "initializer_range", 0.02)
                own[name].normal_(std=width, generator=(key / "head" / name).generator())
            else:
                own[name].fill_(1.0 if _scales(module, name) else 0.0)
    return module


def _scales(module: PreTrainedModel, name: str) -> bool:
    """Return whether a parameter is the scale of a norm, such as the batch norm in SegFormer's head."""
    owner, _, leaf = name.rpartition(".")
    return leaf == "weight" and isinstance(
        module.get_submodule(owner), (*BATCH_NORMS, torch.nn.LayerNorm, torch.nn.GroupNorm)
    )


def _reset_statistics(module: PreTrainedModel, head: Names, missing: set[str]) -> set[str]:
    """Give the batch norms of a new head the statistics 0 and 1, and return the names of these buffers."""
    owners = {name.rpartition(".")[0] for name in head}
    reset = {name for name in missing if name.rpartition(".")[0] in owners and name not in head}
    for owner in {name.rpartition(".")[0] for name in reset}:
        part = module.get_submodule(owner)
        if isinstance(part, BATCH_NORMS):
            part.reset_running_stats()
    return reset


def without_values(config: Any, kind: Any) -> PreTrainedModel:
    """Return the module on the meta device, where it has names and shapes but no values, with split projections."""
    with without_logs(), torch.device("meta"):
        module: PreTrainedModel = kind.from_config(config, trust_remote_code=False)
    split_qkv.split(module)
    return module


def _check_size(
    path: str, shapes: PreTrainedModel, fixed: Names, dtype: torch.dtype | None, quantize: Mode | None
) -> None:
    """Check the memory before loading."""
    remedy = "choose a smaller model, or a machine with more memory"
    held = " and ".join(word for word in (str(dtype or "").removeprefix("torch."), quantize) if word)
    if fixed and held:
        what = f"the model of '{path}' with its frozen weights in {held}"
    else:
        what, remedy = f"the model of '{path}' in float32", f"{remedy}; model.dtype = 'bfloat16' halves a frozen base"
    trained = sum(value.numel() for name, value in shapes.named_parameters() if name not in fixed)
    wanted = stored_size(shapes, fixed, dtype, quantize) + torch.float32.itemsize * trained
    memory.require(wanted, what, remedy)


def stored_size(shapes: PreTrainedModel, fixed: Names, dtype: torch.dtype | None, quantize: Mode | None) -> int:
    """Return how many bytes frozen parameters take as they are stored.

    Args:
        shapes: The module, which may be on the meta device.
        fixed: The names of the frozen parameters.
        dtype: Their dtype. Default: float32.
        quantize: The format of linear weights.
    """
    codes = quantizable(str(shapes.config.model_type), shapes, fixed) if quantize else frozenset[str]()
    total = 0
    for name, value in shapes.named_parameters():
        if quantize and name in codes:
            total += stored_bytes(quantize, *value.shape)
        elif name in fixed:
            total += value.numel() * (dtype or torch.float32).itemsize
    return total


def _unsplit(shapes: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return the names of parameters in transformers, all of them for tied ones."""
    values = dict(shapes.named_parameters())
    wanted = {id(values[name]) for name in names}
    paths = (path for path, value in shapes.named_parameters(remove_duplicate=False) if id(value) in wanted)
    return {split_qkv.fused_name(shapes, path) for path in paths}


@contextmanager
def _loading_in(dtypes: Mapping[str, torch.dtype], model_class: Any) -> Iterator[None]:
    """Let transformers load some parameters of a class of modules in other dtypes than the rest."""
    if not dtypes:
        yield
        return
    plan = {f"^{re.escape(name)}$": dtype for name, dtype in dtypes.items()}
    inherited = "_get_dtype_plan" not in vars(model_class)
    before = model_class._get_dtype_plan
    model_class._get_dtype_plan = lambda module, dtype: {**before(module, dtype), **plan}
    try:
        yield
    finally:
        if inherited:
            del model_class._get_dtype_plan
        else:
            model_class._get_dtype_plan = before


def _in_body(module: PreTrainedModel, name: str) -> bool:
    """Return whether a checkpoint parameter belongs to the Transformer body, not to its pretraining head."""
    body, within = module.base_model, name.removeprefix(f"{module.base_model_prefix}.")
    first = within.partition(".")[0]
    return first != "pooler" and (within != name or first in dict(body.named_children()))


def _refuse(path: str, fault: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ModelError(f"'{path}' {fault}: {shown}; give a complete checkpoint, with or without a head")


def tokenizer_of(path: str) -> Any:
    """Load the tokenizer of a model for class names.

    Raises:
        ModelError: If the folder has none. transformers would then build one that knows only special tokens.
    """
    path = origin(path)
    try:
        with without_logs():
            offline = Path(path).is_dir() or offline_reason() is not None
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=offline)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"'{path}' has no tokenizer, but class names need one: {_first_line(error)}; {TOKENIZER_REMEDY}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(f"'{path}' has no tokenizer, but class names need one; {TOKENIZER_REMEDY}")
    return tokenizer


def texts(path: str, prompt: str, task: TaskInfo) -> Tensors:
    """Tokenize the prompt of each class, (class, token)."""
    tokenizer = tokenizer_of(path)
    tokens = tokenizer([prompt.format(name) for name in task.classes], padding=True, return_tensors="pt")
    rows = [tuple(row) for row in tokens["input_ids"].tolist()]
    if duplicates := [name for name, row in zip(task.classes, rows, strict=True) if rows.count(row) > 1]:
        raise ModelError(
            f"the tokenizer of '{path}' gives the same tokens for '{duplicates[0]}' and '{duplicates[1]}'; "
            "give a folder with the tokenizer's files, and classes with different names"
        )
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
