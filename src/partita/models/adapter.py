"""A transformers module as a pure function of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from partita.core import tensors
from partita.core.data import Batch
from partita.core.model import Model, Output
from partita.core.options import closest_match
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors
from partita.models import ModelError, attention, split_qkv
from partita.models.activation_checkpointing import checkpoint_layers
from partita.models.architectures import architecture, forward_of, tags_of
from partita.models.losses import KINDS, Objective, losses_for
from partita.models.vmap_layers import use_vmap_layers

ParameterSlot = tuple[dict[str, Any], str]  # a submodule's own parameters, and the name among them


@dataclass(frozen=True, eq=False)
class FunctionalModel(Model):
    """Parameters are lent to the module for one call; between calls it holds only what is frozen for good.

    So two threads must not call it at once. `fixed` are inputs that are the same for every example. With a `dtype`,
    everything is computed in it, but what trains is held in float32 and cast for each call.
    """

    name: str
    module: PreTrainedModel
    forward: Callable[[Any, Tensors], Output]
    initial: Tensors
    tags: Mapping[str, Names]
    places: Mapping[str, tuple[ParameterSlot, ...]]
    objective: Objective = field(default="single", kw_only=True)
    fixed: Tensors = field(default_factory=dict, kw_only=True)
    dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        inputs = {**inputs, **self.fixed}
        if self.dtype is None:
            with self._lent(params):
                return self.forward(self.module, inputs)
        with self._lent(_cast(params, self.dtype)):
            out = self.forward(self.module, _cast(inputs, self.dtype))
        return Output(out.logits.float(), None if out.features is None else out.features.float())

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return losses_for(self.objective, out.logits, targets)

    def to(self, device: torch.device) -> None:
        self.module.to(device)  # type: ignore[arg-type]
        self.initial.update(tensors.to(self.initial, device))
        self.fixed.update(tensors.to(self.fixed, device))

    def skip_layers(self, without: Names) -> FunctionalModel:
        from partita.models.skip_layers import skip_layers

        return skip_layers(self, without)

    def low_rank(self, rank: int, alpha: float, roles: tuple[str, ...], key: Key) -> FunctionalModel:
        from partita.models.lora import low_rank

        return low_rank(self, rank, alpha, roles, key)

    def attention(self, params: Tensors, batch: Batch, tokens: str) -> dict[str, Tensor]:
        from partita.models.attention_scores import attention_to

        return attention_to(self, params, batch, tokens)

    def head_dimensions(self) -> dict[str, tuple[int, int]]:
        from partita.models.attention_scores import head_dimensions

        return head_dimensions(self)

    def save_pretrained(self, params: Tensors, folder: str | Path) -> None:
        """A plain transformers folder, which needs no partita to load."""
        with self._lent(params), without_logs():
            self.module.save_pretrained(folder, state_dict=split_qkv.join(self.module, self.module.state_dict()))
        if self.dtype is not None:  # transformers notes the type of the first parameter; ours are of two types
            self.module.config.dtype = self.dtype
            self.module.config.save_pretrained(folder)

    @contextmanager
    def _lent(self, params: Tensors) -> Iterator[None]:
        # torch.func.functional_call looks every name up again in each call and leaves a missing one as it was.
        if params.keys() != self.places.keys():
            raise ModelError(_wrong_names(self.name, params.keys(), self.places.keys()))
        for name, value in params.items():
            for owner, leaf in self.places[name]:
                owner[leaf] = value
        try:
            yield
        finally:
            _empty(self.places)


def from_module(
    name: str,
    module: PreTrainedModel,
    frozen: Iterable[str] = (),
    *,
    objective: Objective = "single",
    fixed: Tensors | None = None,
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
) -> FunctionalModel:
    """Takes the module over. `frozen` gives parameter names or tags of what never trains nor travels."""
    model_type = str(module.config.model_type)
    forward = forward_of(model_type, *KINDS[objective])
    if split := architecture(model_type).split:
        split(module)
    # Every random draw has a key path, and dropout draws from global state: it stays off (decision 0003).
    module.train(False).requires_grad_(False)
    with without_logs():
        module.set_attn_implementation(attention.NAME)
    _treat_padding_as_any_token(module)
    use_vmap_layers(module)
    if checkpointing:
        checkpoint_layers(module)
    own = dict(module.named_parameters())
    tags = _tags(model_type, module)
    stays = _frozen(name, tags, frozen)
    wide = None if dtype is None else torch.float32  # a step in half precision would be lost to rounding
    initial = {each: value.detach().to(wide, copy=True) for each, value in own.items() if each not in stays}
    if dtype is not None:
        for each in stays:
            own[each].data = own[each].data.to(dtype)
    places = _parameter_slots(module, initial.keys())
    _empty(places)
    return FunctionalModel(
        name=name,
        module=module,
        forward=forward,
        initial=initial,
        tags={each: tags[each] for each in initial},
        places=places,
        objective=objective,
        fixed=dict(fixed or {}),
        dtype=dtype,
    )


def _treat_padding_as_any_token(module: nn.Module) -> None:
    """vmap would leave out the gradient of the padding's embedding for a block's first client alone.

    Nothing is lost, since what attention does not see has no gradient.
    """
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.padding_idx = None


def _tags(model_type: str, module: nn.Module) -> dict[str, Names]:
    """A tied parameter has the tags of all its names: GPT-2's embedding is also its head."""
    paths = dict(module.named_parameters(remove_duplicate=False))
    by_path, first = tags_of(model_type, paths), _first_names(module)
    tags = dict.fromkeys(first.values(), frozenset[str]())
    for path, value in paths.items():
        tags[first[id(value)]] |= by_path[path]
    return tags


def _first_names(module: nn.Module) -> dict[int, str]:
    return {id(value): name for name, value in module.named_parameters()}


def _parameter_slots(module: nn.Module, names: Iterable[str]) -> dict[str, tuple[ParameterSlot, ...]]:
    """Where each parameter sits: more than one place where weights are tied."""
    first = _first_names(module)
    places: dict[str, tuple[ParameterSlot, ...]] = dict.fromkeys(names, ())
    for path, value in module.named_parameters(remove_duplicate=False):
        owner, _, leaf = path.rpartition(".")
        if (name := first[id(value)]) in places:
            places[name] += ((module.get_submodule(owner)._parameters, leaf),)
    return places


def _empty(places: Mapping[str, tuple[ParameterSlot, ...]]) -> None:
    for found in places.values():
        for owner, leaf in found:
            owner[leaf] = None


def _frozen(model: str, tags: Mapping[str, Names], wanted: Iterable[str]) -> Names:
    stays: set[str] = set()
    for word in wanted:
        found = {name for name, carried in tags.items() if word == name or word in carried}
        if not found:
            known = frozenset[str]().union(*tags.values())
            raise ModelError(
                f"frozen: no parameter of {model} is named or tagged '{word}'; {closest_match(word, known)}"
            )
        stays |= found
    if stays >= tags.keys():
        raise ModelError(f"frozen: nothing of {model} is left to train; freeze fewer tags")
    return frozenset(stays)


def _cast(values: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()}


def _wrong_names(model: str, given: Iterable[str], wanted: Iterable[str]) -> str:
    wrong = {"missing": set(wanted) - set(given), "unknown": set(given) - set(wanted)}
    shown = "; ".join(f"{what}: {', '.join(sorted(names)[:3])}" for what, names in wrong.items() if names)
    return f"{model} is called with all parameters of model.initial and no others ({shown})"


@contextmanager
def without_logs() -> Iterator[None]:
    """No reports and progress bars of transformers; what they would say is checked where it matters."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
