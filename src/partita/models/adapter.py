"""Wraps a transformers module as a pure function of its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from partita.core import tensors
from partita.core.data import EXAMPLE_SEEDS, Batch
from partita.core.model import HeadOutput, Model, Output, TokenChoice, layer_tag
from partita.core.options import closest_match
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors
from partita.core.torch_private import own_parameters
from partita.models import ModelError
from partita.models.architectures import Pooling, architecture, forward_of, is_known, tags_of
from partita.models.architectures.general import HeadInputs
from partita.models.dropout import DropoutDraws, use_keyed_dropout
from partita.models.layer_forward import layer_forwards, use_layer_forward
from partita.models.quantization import Mode, dequantized, quantizable, quantize_frozen, warn_of_trained
from partita.models.vmap_layers import use_vmap_layers
from partita.tasks import IMAGE, TEXT, TaskKind
from partita.tasks.chunked_loss import linear_cross_entropy
from partita.tasks.losses import CLASS_LOSSES, class_losses, token_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEAN_POOLING = "its head reads a mean of all tokens (model.pooling), but transformers' reads one token"
BASE, ALL = "base", "all"  # words of `frozen`: everything but the head, and everything
MANY_LAYERS = 12  # compiling more as a whole takes minutes
SMALL_MODEL = 2**24  # parameters, up to which calling the programs of single layers takes longer than their work
ParameterSlot = tuple[dict[str, Any], str]  # the `_parameters` dict of a submodule, and a name in it


@dataclass(frozen=True, eq=False)
class FunctionalModel(Model):
    """A transformers module as a function of its trainable parameters and inputs.

    Each call installs the parameters in the module and removes them afterwards. Between calls the module holds only
    permanently frozen parameters. The model is therefore not thread-safe.

    Attributes:
        name: Name of the model, used in error messages.
        module: The module, without its trainable parameters.
        forward: Runs the module on a batch of inputs.
        initial: Initial values of the trainable parameters.
        tags: Tags of each trainable parameter.
        parameter_slots: Slots of each trainable parameter in the module. Tied parameters have several.
        kind: Kind of task that the model is for.
        frozen_tags: Tags of each permanently frozen parameter.
        fixed: Inputs that are the same for every example.
        dtype: If set, the dtype of the forward pass. Trainable parameters stay in float32 and are cast in each call.
        processor: Tokenizer or image processor of transformers, saved with the model.
        draws: What the dropout layers of the module draw from; None if it has none.
        only_here: Why transformers would run the saved module in another way; empty if it would not.
    """

    name: str
    module: PreTrainedModel
    forward: Callable[[Any, Tensors], Output]
    initial: Tensors
    tags: Mapping[str, Names]
    parameter_slots: Mapping[str, tuple[ParameterSlot, ...]]
    kind: TaskKind = field(kw_only=True)
    frozen_tags: Mapping[str, Names] = field(default_factory=dict, kw_only=True)
    fixed: Tensors = field(default_factory=dict, kw_only=True)
    dtype: torch.dtype | None = field(default=None, kw_only=True)
    processor: Any = field(default=None, kw_only=True)
    draws: DropoutDraws | None = field(default=None, kw_only=True)
    only_here: str = field(default="", kw_only=True)

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        inputs = {**inputs, **self.fixed}
        seeds = inputs.pop(EXAMPLE_SEEDS, None)
        if seeds is None or self.draws is None:
            return self._run(params, inputs)
        with self.draws.using(seeds):
            return self._run(params, inputs)

    def _run(self, params: Tensors, inputs: Tensors) -> Output:
        if self.dtype is None:
            with self._installed(params):
                return self.forward(self.module, inputs)
        with self._installed(_cast(params, self.dtype)):
            out = self.forward(self.module, _cast(inputs, self.dtype))
        features = None if out.features is None else out.features.float()
        if isinstance(out, HeadOutput):
            return HeadOutput(out.states, out.weight, features)
        return Output(out.logits.float(), features)

    def uses_dropout(self) -> bool:
        if self.draws is not None and self.draws.left_out:
            more = f" and {len(self.draws.left_out) - 3} more" if len(self.draws.left_out) > 3 else ""
            warnings.warn(
                f"training.dropout: {self.name} trains without the random draws that cannot come from the examples' "
                f"seeds: {', '.join(self.draws.left_out[:3])}{more}",
                stacklevel=2,
            )
            self.draws.left_out = ()  # said once
        return self.draws is not None and self.draws.found

    def compute_in_float32(self, error: BaseException) -> str:
        from partita.models.half_precision import compute_in_float32

        return compute_in_float32(self.module, error)

    def losses(self, out: Output, targets: torch.Tensor) -> torch.Tensor:
        if isinstance(out, HeadOutput) and self.kind.loss is token_cross_entropy:
            return linear_cross_entropy(out, targets)
        return self.kind.loss(out.logits, targets)

    def class_losses(
        self, out: Output, targets: torch.Tensor, label_smoothing: float, class_weights: Sequence[float]
    ) -> torch.Tensor:
        if self.kind.loss not in CLASS_LOSSES:
            return super().class_losses(out, targets, label_smoothing, class_weights)
        return class_losses(out.logits, targets, label_smoothing, class_weights)

    def to(self, device: torch.device) -> None:
        self.module.to(device)  # type: ignore[arg-type]
        self.initial.update(tensors.to(self.initial, device))
        self.fixed.update(tensors.to(self.fixed, device))

    def frozen_weights(self) -> Tensors:
        """Return the frozen parameters with the buffers that a checkpoint holds, by their names without adapters."""
        if not self.frozen_tags:
            return {}
        return {name.replace(".base_layer.", "."): value for name, value in self.module.state_dict().items()}

    def why_one_by_one(self, inputs: Tensors) -> str:
        from partita.models.lifting import why_one_by_one

        return "" if is_known(str(self.module.config.model_type)) else why_one_by_one(self, inputs)

    def compiles_by_layer(self) -> bool:
        layers = layer_forwards(self.module)
        if any(layer.recomputes for layer in layers) or len(layers) > MANY_LAYERS:
            return True
        size = sum(value.numel() for value in (*self.initial.values(), *self.module.parameters()))
        return bool(layers) and (size > SMALL_MODEL or self.kind.outputs == "vocabulary")

    def skip_layers(self, without: Names) -> FunctionalModel:
        from partita.models.skip_layers import skip_layers

        return skip_layers(self, without)

    def low_rank(self, rank: int, alpha: float, roles: tuple[str, ...], key: Key) -> FunctionalModel:
        from partita.models.peft_adapters import low_rank

        return low_rank(self, rank, alpha, roles, key)

    def adapted(self, kind: str, key: Key, **options: Any) -> FunctionalModel:
        from partita.models.adapter_options import adapter_options
        from partita.models.peft_adapters import add_adapter

        return add_adapter(self, adapter_options({"kind": kind, **options}), key)

    def attention(self, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, torch.Tensor]:
        from partita.models.attention_scores import attention_to

        return attention_to(self, params, batch, tokens)

    def generate(self, params: Tensors, inputs: Tensors, max_new_tokens: int) -> list[str]:
        from partita.models.generation import generate

        return generate(self, params, inputs, max_new_tokens)

    def decode(self, tokens: torch.Tensor) -> list[str]:
        from partita.models.generation import decode

        return decode(self, tokens)

    def attention_maps(self, params: Tensors, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        """Return the attention maps of all layers, (example, head, query, key), by the module's own code."""
        with self._installed(params):
            return tuple(self.module(**inputs, **self.fixed, output_attentions=True).attentions or ())

    def head_dimensions(self) -> dict[str, tuple[int, int]]:
        from partita.models.attention_scores import head_dimensions

        return head_dimensions(self)

    def save_pretrained(self, params: Tensors, folder: str | Path) -> None:
        """Write a plain transformers folder, which loads without partita: the model and its tokenizer or processor.

        Raises:
            ModelError: If transformers would run the module in another way.
        """
        self.check_saves()
        with self._installed(params), without_logs():
            state = dequantized(self.module, self.module.state_dict(), self.dtype or torch.float32)
            if of_transformers(self.module):
                from partita.models import split_qkv

                state = split_qkv.join(self.module, state)
            self.module.save_pretrained(folder, state_dict=state)
        if self.dtype is not None:  # transformers records the first parameter's dtype, but there are two dtypes
            self.module.config.dtype = self.dtype
            self.module.config.save_pretrained(folder)
        self.save_processor(folder)

    def check_saves(self) -> None:
        """Raise a ModelError if transformers would run the saved module in another way."""
        if self.only_here:
            raise ModelError(f"{self.name} cannot be written as a folder of transformers: {self.only_here}")

    def save_processor(self, folder: str | Path) -> None:
        """Write the tokenizer or the image processor, if the task has one. `transformers.pipeline` needs it."""
        if self.processor is not None:
            self.processor.save_pretrained(folder)

    @contextmanager
    def installed(self, params: Tensors) -> Iterator[None]:
        """Put the parameters into the module inside the block, in the dtype of the forward pass."""
        with self._installed(params if self.dtype is None else _cast(params, self.dtype)):
            yield

    @contextmanager
    def _installed(self, params: Tensors) -> Iterator[None]:
        # Not torch.func.functional_call: it looks up every name in each call and silently keeps missing parameters.
        if params.keys() != self.parameter_slots.keys():
            raise ModelError(_wrong_names(self.name, params.keys(), self.parameter_slots.keys()))
        for name, value in params.items():
            for owner, leaf in self.parameter_slots[name]:
                owner[leaf] = value
        try:
            yield
        finally:
            _empty(self.parameter_slots)


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
    parameter_slots = _parameter_slots(module, [path for path in own if path not in frozen_names])
    initial: Tensors = {}
    for path, slots in parameter_slots.items():
        initial[path] = own.pop(path).detach().to(param_dtype, copy=True)
        _empty({path: slots})  # at once, so that memory never holds all of them twice
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
    )


def of_transformers(module: Any) -> bool:
    """Whether a module is one of transformers, and not partita's own Vision Transformer."""
    return hasattr(module, "set_attn_implementation")


def _treat_padding_as_any_token(module: torch.nn.Module) -> None:
    """Unset `padding_idx`: vmap would zero the gradient of the padding embedding for a block's first client only.

    This changes no result, because masked tokens have no gradient.
    """
    for part in module.modules():
        if isinstance(part, torch.nn.Embedding):
            part.padding_idx = None


def _first_names(module: torch.nn.Module) -> dict[int, str]:
    return {id(value): name for name, value in module.named_parameters()}


def _parameter_slots(module: torch.nn.Module, names: Iterable[str]) -> dict[str, tuple[ParameterSlot, ...]]:
    """Return the slots of each parameter. Tied parameters have several."""
    first = _first_names(module)
    parameter_slots: dict[str, tuple[ParameterSlot, ...]] = dict.fromkeys(names, ())
    for path, value in module.named_parameters(remove_duplicate=False):
        owner, _, leaf = path.rpartition(".")
        if (name := first[id(value)]) in parameter_slots:
            parameter_slots[name] += ((own_parameters(module.get_submodule(owner)), leaf),)
    return parameter_slots


def _empty(parameter_slots: Mapping[str, tuple[ParameterSlot, ...]]) -> None:
    for slots in parameter_slots.values():
        for owner, leaf in slots:
            owner[leaf] = None


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


def _cast(values: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()}


def _wrong_names(model: str, given: Iterable[str], wanted: Iterable[str]) -> str:
    wrong = {"missing": set(wanted) - set(given), "unknown": set(given) - set(wanted)}
    shown = "; ".join(f"{what}: {', '.join(sorted(names)[:3])}" for what, names in wrong.items() if names)
    return f"{model} must be called with exactly the parameters of model.initial ({shown})"


@contextmanager
def without_logs() -> Iterator[None]:
    """Silence the logs and progress bars of transformers. The loading report is checked in `load_module`."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
