"""Converts a transformers module to a pure function of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from partita.core.model import layer_tag
from partita.core.options import closest_match
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors
from partita.core.torch_private import own_parameters
from partita.models import ModelError
from partita.models.architectures import Pooling, architecture, forward_of, is_known, tags_of
from partita.models.architectures.general import HeadInputs
from partita.models.attention_scores import attention_to, head_dimensions
from partita.models.dropout import use_keyed_dropout
from partita.models.functional import FunctionalModel, Operations, ParameterSlot, empty_slots, of_transformers
from partita.models.generation import decode, generate
from partita.models.layer_forward import use_layer_forward
from partita.models.quantization import Mode, quantizable, quantize_frozen, warn_of_trained
from partita.models.skip_layers import skip_layers
from partita.models.vmap_layers import use_vmap_layers
from partita.tasks import IMAGE, TEXT, TaskKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEAN_POOLING = "its head reads a mean of all tokens (model.pooling), but transformers' reads one token"
BASE, ALL = "base", "all"  # words of `frozen`: everything but the head, and everything


def _adapted(model: FunctionalModel, kind: str, key: Key, **options: Any) -> FunctionalModel:
    from partita.models.adapter_options import adapter_options
    from partita.models.peft_adapters import add_adapter

    return add_adapter(model, adapter_options({"kind": kind, **options}), key)


def _low_rank(*arguments: Any) -> FunctionalModel:
    from partita.models.peft_adapters import low_rank

    return low_rank(*arguments)


OPERATIONS = Operations(attention_to, head_dimensions, generate, decode, skip_layers, _adapted, _low_rank)


def from_module(
    name: str,
    module: PreTrainedModel,
    frozen: Iterable[str] = (),
    *,
    kind: TaskKind | None = None,
    fixed: Tensors | None = None,
    dtype: torch.dtype | None = None,
    quantize: Mode | None = None,
    checkpointing: bool = False,
    processor: Any = None,
    pooling: Pooling = "model",
) -> FunctionalModel:
    """Convert a transformers module to a FunctionalModel.

    The module is modified in place and belongs to the model afterwards.

    Args:
        name: Name of the model.
        module: Module to convert.
        frozen: Names or tags of parameters that are never trained or sent. "base" is everything but the head, "all" is
            everything; with these two, nothing may be left to train, because an adapter can follow.
        kind: Kind of task. Default: images or texts with one class each, whichever the architecture takes.
        fixed: Inputs that are the same for every example.
        dtype: If set, the dtype of the forward pass and of frozen parameters.
        quantize: If set, the format of frozen linear weights.
        checkpointing: Whether to recompute activations in the backward pass.
        processor: Tokenizer or image processor, saved with the model.
        pooling: What the head of a text encoder reads: what it reads in transformers, or a mean of all tokens.

    Raises:
        ModelError: If the architecture does not support the kind or the pooling, or `frozen` matches no parameter or
            all parameters.
    """
    model_type = str(module.config.model_type)
    if kind is None:
        kind = IMAGE if module.main_input_name == "pixel_values" else TEXT
    forward = forward_of(model_type, kind.head, pooling)
    if not is_known(model_type):
        HeadInputs(module)
    if pooling != "model" and getattr(module.base_model, "pooler", None) is not None:
        module.base_model.register_module("pooler", None)  # nothing reads it
    if of_transformers(module):
        from partita.models import split_qkv

        split_qkv.split(module)
    # Every random draw must come from a key, but torch's dropout draws from global state. So the module stays in eval
    # mode, and its dropout is replaced (decision 0018).
    module.train(False).requires_grad_(False)
    draws = use_keyed_dropout(module)
    if of_transformers(module):
        from partita.models.torch_functions import use_own_functions
        from partita.models.transformers_attention import use_attention
        from partita.models.transformers_experts import use_gradients

        use_attention(module)
        use_own_functions(module)
        use_gradients()
    _treat_padding_as_any_token(module)
    use_vmap_layers(module)
    use_layer_forward(module, draws, checkpointing)
    own = dict(module.named_parameters())
    tags = tags_of(module)
    frozen_names = frozen_parameters(name, module, frozen)
    quantized = frozenset[str]()
    if quantize is not None:
        quantized = quantizable(name, module, frozen_names)
        warn_of_trained(module, frozen_names)
    param_dtype = None if dtype is None else torch.float32  # in half precision, small updates would be lost to rounding
    parameter_slots = parameter_slots_of(module, [path for path in own if path not in frozen_names])
    initial: Tensors = {}
    for path, slots in parameter_slots.items():
        initial[path] = own.pop(path).detach().to(param_dtype, copy=True)
        empty_slots({path: slots})  # at once, so that memory never holds all of them twice
    if dtype is not None:
        for path in frozen_names:
            own[path].data = own[path].data.to(dtype)
        for path, buffer in module.named_buffers():
            if path.endswith(("running_mean", "running_var")):  # batch norms need all their values in one dtype
                buffer.data = buffer.data.to(dtype)
    if quantize is not None:
        for path in frozen_names - quantized:
            own[path].data = own[path].data.clone()  # a view of a file would keep the pages of all weights in memory
        own.clear()  # so that each weight is freed as soon as its codes are there
        quantize_frozen(module, quantize, quantized)
    return FunctionalModel(
        name=name,
        module=module,
        forward=forward,
        initial=initial,
        tags={path: tags[path] for path in initial},
        frozen_tags={path: tags[path] for path in frozen_names},
        parameter_slots=parameter_slots,
        kind=kind,
        fixed=dict(fixed or {}),
        dtype=dtype,
        processor=processor,
        draws=draws,
        only_here="" if pooling == "model" else MEAN_POOLING,
        operations=OPERATIONS,
    )


def _treat_padding_as_any_token(module: torch.nn.Module) -> None:
    """Unset `padding_idx`: vmap would zero the gradient of the padding embedding for a block's first client only.

    This changes no result, because masked tokens have no gradient.
    """
    for part in module.modules():
        if isinstance(part, torch.nn.Embedding):
            part.padding_idx = None


def _first_names(module: torch.nn.Module) -> dict[int, str]:
    return {id(value): name for name, value in module.named_parameters()}


def parameter_slots_of(module: torch.nn.Module, names: Iterable[str]) -> dict[str, tuple[ParameterSlot, ...]]:
    """Return the slots of each parameter. Tied parameters have several."""
    first = _first_names(module)
    parameter_slots: dict[str, tuple[ParameterSlot, ...]] = dict.fromkeys(names, ())
    for path, value in module.named_parameters(remove_duplicate=False):
        owner, _, leaf = path.rpartition(".")
        if (name := first[id(value)]) in parameter_slots:
            parameter_slots[name] += ((own_parameters(module.get_submodule(owner)), leaf),)
    return parameter_slots


def frozen_parameters(model: str, module: PreTrainedModel, wanted: Iterable[str]) -> Names:
    """Return the names of the parameters to freeze. "embedding" stands for everything before the first layer.

    Args:
        model: Name of the model, for messages.
        module: The module, with split projections. It may be on the meta device.
        wanted: As `frozen` in `from_module`.

    Raises:
        ModelError: If a word matches no parameter, or nothing is left to train.
    """
    tags, words = tags_of(module), tuple(wanted)
    groups = {
        "embedding": embedding_names(module, tags),
        # A head that is tied to the embeddings is a part of the base.
        BASE: frozenset(name for name, carried in tags.items() if "head" not in carried or "embedding" in carried),
        ALL: frozenset(tags),
    }
    frozen_names: set[str] = set()
    for word in words:
        matched = {name for name, carried in tags.items() if word == name or word in carried}
        matched |= groups.get(word, frozenset())
        if not matched:
            known = frozenset[str]().union(*tags.values(), (BASE, ALL))
            raise ModelError(
                f"frozen: no parameter of {model} is named or tagged '{word}'; {closest_match(word, known)}"
            )
        frozen_names |= matched
    if frozen_names >= tags.keys() and not {BASE, ALL} & {*words}:
        raise ModelError(f"frozen: no parameter of {model} is left to train; freeze fewer tags")
    return frozenset(frozen_names)


def embedding_names(module: PreTrainedModel, names: Iterable[str]) -> Names:
    """Return the names of the parameters before the first layer, which include the norm of BERT's embeddings.

    That norm has the role "norm", so methods treat it like the other norms.
    """
    start = architecture(str(module.config.model_type)).start
    if start is None:
        tags = tags_of(module)
        before = takewhile(lambda name: layer_tag(tags[name]) is None, tags)
        return frozenset(name for name in before if "head" not in tags[name])
    body = next((path for path, part in module.named_modules() if part is module.base_model), "")
    stems = tuple(f"{body}.{part}.".lstrip(".") for part in start.embeds)
    return frozenset(name for name in names if name.startswith(stems))
