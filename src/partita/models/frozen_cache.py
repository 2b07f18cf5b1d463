"""Cache the outputs of frozen layers, which are the same in every round.

Cached outputs equal recomputed ones up to rounding, because the batch shape can change the order of summation. With
`training.precision = "bfloat16"`, frozen layers are still computed in the model's own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from partita.core import memory, tensors
from partita.core.data import Batch, Examples, text_lengths
from partita.core.model import Model, Output
from partita.core.sharing import shared
from partita.core.tensors import Tensors
from partita.core.torch_private import own_parameters
from partita.models import CACHED_STATES, ModelError
from partita.models.architectures import Forward, architecture
from partita.models.functional import FunctionalModel
from partita.models.prompts.dual_encoder import DualEncoder
from partita.models.prompts.prompts import PromptModel
from partita.models.skip_layers import patched_forward

ATTENTION_MASK = "attention_mask"
IMAGE_TOWER = ("vision_model.", "visual_projection.")  # the weights of a dual encoder that change image features
CHUNK = 32  # rows computed together; fixed groups make the cache of a resumed run bit-identical


def cache_frozen(model: Model, *tables: Examples) -> tuple[Model, tuple[CachedExamples, ...]]:
    """Split a model at its first trainable layer.

    Returns:
        The model from that layer on, and for each table the examples with the cached inputs of that layer.

    Raises:
        ModelError: If the model has no frozen lower layers.
    """
    upper, lower, input_name = _cut_point(model)
    cached = tuple(_shared(model, _cached(table, lower, input_name)) for table in tables)
    size = sum(examples.states.nbytes for examples in cached)
    memory.require(size, "engine.cache_frozen", "set it to false, or use fewer or shorter examples")
    return upper, cached


def _cut_point(model: Model) -> tuple[Model, Callable[[Tensors], torch.Tensor], str]:
    """Return the upper model, the function that computes its cached inputs, and the input name that this one reads.

    Text prompts do not change the image tower, so all of it can be cached.
    """
    if isinstance(model, DualEncoder | PromptModel):
        return model, model.features_to_cache, "pixel_values"
    if not isinstance(model, FunctionalModel):
        raise ModelError(f"engine.cache_frozen needs a Hugging Face model, not {model.name}; set it to false")
    body, depth = _body(model), frozen_depth(model)
    upper = _UpperForward(model.forward, body.input_name, (*body.embeds, *body.layers[:depth]))
    return replace(model, forward=upper), FrozenForward(model, body.layers[depth - 1]), body.input_name


def frozen_depth(model: FunctionalModel) -> int:
    """Return the number of lowest layers that are permanently frozen.

    Raises:
        ModelError: If layer 0 or a parameter before it is trainable.
    """
    body = _body(model)
    before = _trainable(model, body.embeds)
    first = next((depth for depth, layer in enumerate(body.layers) if _trainable(model, [layer])), len(body.layers))
    if before or not first:
        names = before or _trainable(model, body.layers[:1])
        raise ModelError(_nothing_to_cache(model, names, "before the first layer" if before else "in layer 0"))
    return first


@dataclass(frozen=True, eq=False)
class FrozenForward:
    """Computes the output of the last frozen layer, (example, token, width)."""

    model: FunctionalModel
    last: torch.nn.Module

    def __call__(self, inputs: Tensors) -> torch.Tensor:
        hook = self.last.register_forward_hook(_stop_after)
        try:
            self.model(self.model.initial, tensors.to(inputs, next(self.last.parameters()).device))
        except _StopForward as stopped:
            return stopped.states.cpu()
        finally:
            hook.remove()
        raise AssertionError("the last frozen layer is always run")


@dataclass(frozen=True, eq=False)
class CachedExamples:
    """Examples whose input is replaced by cached states, computed on first access.

    Padding is not stored. Its states are zeros, which the attention mask excludes.

    Attributes:
        examples: The original examples.
        lower: Computes the states from the inputs.
        input_name: Name of the input that the states replace.
        offsets: Row boundaries in `states`, (row + 1,).
        states: States of all rows, (token, width): row i is states[offsets[i]:offsets[i + 1]].
        computed: Chunks that are already computed.
    """

    examples: Examples
    lower: Callable[[Tensors], torch.Tensor]
    input_name: str
    offsets: torch.Tensor
    states: torch.Tensor
    computed: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def limits(self) -> tuple[int, int] | None:
        """The longest padded rows of tokens, of the inputs and of the targets; None if the examples are no texts."""
        return getattr(self.examples, "limits", None)

    def lengths(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return the number of tokens of each example, (example,); None if the examples are not texts."""
        return text_lengths(self.examples, indices)

    @property
    def documents(self) -> torch.Tensor | None:
        """The document of each example, (example,); None if examples are documents."""
        found: torch.Tensor | None = getattr(self.examples, "documents", None)
        return found

    def take(self, indices: torch.Tensor) -> Batch:
        for chunk in set((indices // CHUNK).tolist()) - self.computed:
            self._compute(chunk)
        batch = self.examples.take(indices)
        mask = self._mask(batch.inputs, indices)
        index = (self.offsets[indices].unsqueeze(1) + mask.cumsum(1) - 1).clamp_(min=0)
        states = self.states[index].masked_fill_(~mask.unsqueeze(-1), 0)  # (row, token, width)
        others = {name: value for name, value in batch.inputs.items() if name != self.input_name}
        return Batch({CACHED_STATES: states, **others}, batch.targets, batch.mask)

    def _compute(self, chunk: int) -> None:
        rows = torch.arange(len(self))[chunk * CHUNK : (chunk + 1) * CHUNK]
        inputs = self.examples.take(rows).inputs
        self.states[self.offsets[rows[0]] : self.offsets[rows[-1] + 1]] = self.lower(inputs)[self._mask(inputs, rows)]
        self.computed.add(chunk)

    def _mask(self, inputs: Tensors, rows: torch.Tensor) -> torch.Tensor:
        """Return a mask of the tokens that are not padding, (row, token)."""
        if ATTENTION_MASK in inputs:
            return inputs[ATTENTION_MASK].bool()
        return torch.ones(len(rows), int(self.offsets[1]), dtype=torch.bool)


def _cached(examples: Examples, lower: Callable[[Tensors], torch.Tensor], input_name: str) -> CachedExamples:
    first = examples.take(torch.arange(1)).inputs
    example = lower(first)  # (1, token, width)
    if ATTENTION_MASK in first:
        rows = torch.arange(len(examples)).split(1024)
        lengths = torch.cat([examples.take(some).inputs[ATTENTION_MASK].bool().sum(1) for some in rows])
    else:
        lengths = torch.full((len(examples),), example.shape[1])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    # new_empty reserves address space only. Memory is used when states are written.
    return CachedExamples(examples, lower, input_name, offsets, example.new_empty(int(offsets[-1]), example.shape[-1]))


def _shared(model: Model, cached: CachedExamples) -> CachedExamples:
    """Let runs of this process share states of equal weights and inputs, if the process asks for it."""
    inputs = _inputs_in_memory(cached.examples)
    if inputs is None:
        return cached
    transform = getattr(cached.examples, "transform", None)

    def key() -> str:
        weights, depth = model.frozen_weights(), ""
        if isinstance(model, FunctionalModel):
            depth = f"{frozen_depth(model)} {model.dtype} {model.module.config.to_json_string()}"
        else:  # text prompts and their tower do not change image features
            weights = {name: value for name, value in weights.items() if name.startswith(IMAGE_TOWER)}
        shape = *cached.states.shape, int(cached.offsets[1])  # it tells whether a dual encoder's features are patches
        return f"states {shape} {transform} {depth} {tensors.sha256(weights)} {tensors.sha256(inputs)}"

    states, computed = shared(key, lambda: (cached.states, cached.computed), lambda built: built[0].nbytes)
    return replace(cached, states=states, computed=computed)


def _inputs_in_memory(examples: Examples) -> Tensors | None:
    """The inputs of a table of images or of texts; None if they are not in memory."""
    if hasattr(examples, "ids"):
        parts = {name: getattr(examples, name) for name in ("ids", "offsets", "segments")}
        return {name: value for name, value in parts.items() if value is not None}
    found: Tensors | None = getattr(examples, "inputs", None)
    return found


@dataclass(frozen=True, eq=False)
class _UpperForward:
    """Runs a module with its lowest parts replaced by the cached states."""

    forward: Forward
    input_name: str
    parts: tuple[torch.nn.Module, ...]

    def __call__(self, module: Any, inputs: Tensors) -> Output:
        others = dict(inputs)
        states = others.pop(CACHED_STATES)
        with patched_forward(self.parts, lambda *_, **__: states):
            return self.forward(module, {self.input_name: states, **others})


class _StopForward(Exception):
    """Stops a forward pass after the last frozen layer."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states


def _stop_after(layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    raise _StopForward(output)


@dataclass(frozen=True, eq=False)
class _Body:
    input_name: str
    embeds: Sequence[torch.nn.Module]
    layers: Sequence[torch.nn.Module]


def _body(model: FunctionalModel) -> _Body:
    model_type = str(model.module.config.model_type)
    start, body = architecture(model_type).start, model.module.base_model
    if start is None:
        raise ModelError(f"engine.cache_frozen does not support the architecture '{model_type}'; set it to false")
    embeds = [getattr(body, name) for name in start.embeds if hasattr(body, name)]
    return _Body(start.input_name, embeds, list(body.get_submodule(start.layers)))  # type: ignore[call-overload]


def _trainable(model: FunctionalModel, parts: Sequence[torch.nn.Module]) -> list[str]:
    """Return the names of trainable parameters in these modules."""
    owners = {id(own_parameters(child)) for part in parts for child in part.modules()}
    return [name for name, slots in model.parameter_slots.items() if any(id(owner) in owners for owner, _ in slots)]


def _nothing_to_cache(model: FunctionalModel, names: Sequence[str], where: str) -> str:
    if any("lora" in model.tags[name] for name in names):
        remedy = "low-rank factors are in every layer, so nothing can be cached; set it to false"
    else:
        wanted = "'embedding' and 'layer.0'" if where.startswith("before") else "'layer.0'"
        remedy = f"add {wanted} to model.frozen, or set it to false"
    shown = ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"engine.cache_frozen: {shown} of {model.name} can train {where}; {remedy}"
