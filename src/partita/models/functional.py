"""A transformers module as a pure function of its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from partita.core import tensors
from partita.core.data import EXAMPLE_SEEDS, Batch
from partita.core.model import HeadOutput, Model, Output, TokenChoice
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors
from partita.models import ModelError
from partita.models.architectures import is_known
from partita.models.dropout import DropoutDraws
from partita.models.layer_forward import layer_forwards
from partita.models.quantization import dequantized
from partita.tasks import TaskKind
from partita.tasks.chunked_loss import linear_cross_entropy
from partita.tasks.losses import CLASS_LOSSES, class_losses, token_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANY_LAYERS = 12  # compiling more as a whole takes minutes
SMALL_MODEL = 2**24  # parameters, up to which calling the programs of single layers takes longer than their work
ParameterSlot = tuple[dict[str, Any], str]  # the `_parameters` dict of a submodule, and a name in it


@dataclass(frozen=True)
class Operations:
    """What a model does beside its forward pass. Each function takes the model first, as the methods of `Model` do.

    The functions need a whole model, so the model cannot import them: `from_module` hands them over.
    """

    attention: Callable[..., dict[str, torch.Tensor]]
    head_dimensions: Callable[..., dict[str, tuple[int, int]]]
    generate: Callable[..., list[str]]
    decode: Callable[..., list[str]]
    skip_layers: Callable[..., FunctionalModel]
    adapted: Callable[..., FunctionalModel]
    low_rank: Callable[..., FunctionalModel]


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
        only_here: Why transformers would run the saved module differently; empty if it would not.
        operations: What the model does beside its forward pass.
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
    operations: Operations = field(kw_only=True, repr=False)

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
        return self.operations.skip_layers(self, without)

    def low_rank(self, rank: int, alpha: float, roles: tuple[str, ...], key: Key) -> FunctionalModel:
        return self.operations.low_rank(self, rank, alpha, roles, key)

    def adapted(self, kind: str, key: Key, **options: Any) -> FunctionalModel:
        return self.operations.adapted(self, kind, key, **options)

    def attention(self, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, torch.Tensor]:
        return self.operations.attention(self, params, batch, tokens)

    def generate(self, params: Tensors, inputs: Tensors, max_new_tokens: int) -> list[str]:
        return self.operations.generate(self, params, inputs, max_new_tokens)

    def decode(self, tokens: torch.Tensor) -> list[str]:
        return self.operations.decode(self, tokens)

    def attention_maps(self, params: Tensors, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        """Return the attention maps of all layers, (example, head, query, key), by the module's own code."""
        with self._installed(params):
            return tuple(self.module(**inputs, **self.fixed, output_attentions=True).attentions or ())

    def head_dimensions(self) -> dict[str, tuple[int, int]]:
        return self.operations.head_dimensions(self)

    def save_pretrained(self, params: Tensors, folder: str | Path) -> None:
        """Write a plain transformers folder, which loads without partita: the model and its tokenizer or processor.

        Raises:
            ModelError: If transformers would run the module differently.
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
        """Raise a ModelError if transformers would run the saved module differently."""
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
            empty_slots(self.parameter_slots)


def of_transformers(module: Any) -> bool:
    """Whether a module is one of transformers, and not partita's own Vision Transformer."""
    return hasattr(module, "set_attn_implementation")


def empty_slots(parameter_slots: Mapping[str, tuple[ParameterSlot, ...]]) -> None:
    """Remove the parameters from their slots."""
    for slots in parameter_slots.values():
        for owner, leaf in slots:
            owner[leaf] = None


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
