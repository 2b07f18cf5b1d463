"""A transformers module as a pure function of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import logging

from partita.core import tree
from partita.core.model import Model, Output
from partita.core.options import nearest
from partita.core.tree import Names, Tensors
from partita.models import ModelError, attention
from partita.models.architectures import architecture, tags_of

Place = tuple[dict[str, Any], str]  # a submodule's own parameters, and the name among them


@dataclass(frozen=True, eq=False)
class Adapted(Model):
    """Parameters are lent to the module for one call; between calls it holds only what is frozen for good.

    So two threads must not call it at once.
    """

    name: str
    module: PreTrainedModel
    forward: Callable[[Any, Tensors], Output]
    initial: Tensors
    tags: Mapping[str, Names]
    places: Mapping[str, tuple[Place, ...]]

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        with self._lent(params):
            return self.forward(self.module, inputs)

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return functional.cross_entropy(out.logits, targets, reduction="none")

    def to(self, device: torch.device) -> None:
        self.module.to(device)  # type: ignore[arg-type]
        self.initial.update(tree.to(self.initial, device))

    def save_pretrained(self, params: Tensors, folder: str | Path) -> None:
        """A plain transformers folder, which needs no partita to load."""
        with self._lent(params), quiet():
            self.module.save_pretrained(folder)

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


def adapt(name: str, module: PreTrainedModel, frozen: Iterable[str] = ()) -> Adapted:
    """Takes the module over. `frozen` gives parameter names or tags of what never trains nor travels."""
    # Every random draw has a key path, and dropout draws from global state: it stays off (decision 0003).
    module.train(False).requires_grad_(False)
    module.set_attn_implementation(attention.NAME)
    model_type = str(module.config.model_type)
    own = dict(module.named_parameters())
    tags = tags_of(model_type, own)
    stays = _frozen(name, tags, frozen)
    initial = {each: value.detach().clone() for each, value in own.items() if each not in stays}
    places = _places(module, initial.keys())
    _empty(places)
    return Adapted(
        name=name,
        module=module,
        forward=architecture(model_type).forward,
        initial=initial,
        tags={each: tags[each] for each in initial},
        places=places,
    )


def _places(module: nn.Module, names: Iterable[str]) -> dict[str, tuple[Place, ...]]:
    """Where each parameter sits: more than one place where weights are tied."""
    first = {id(value): name for name, value in module.named_parameters()}
    places: dict[str, tuple[Place, ...]] = dict.fromkeys(names, ())
    for path, value in module.named_parameters(remove_duplicate=False):
        owner, _, leaf = path.rpartition(".")
        if (name := first[id(value)]) in places:
            places[name] += ((module.get_submodule(owner)._parameters, leaf),)
    return places


def _empty(places: Mapping[str, tuple[Place, ...]]) -> None:
    for found in places.values():
        for owner, leaf in found:
            owner[leaf] = None


def _frozen(model: str, tags: Mapping[str, Names], wanted: Iterable[str]) -> Names:
    stays: set[str] = set()
    for word in wanted:
        found = {name for name, carried in tags.items() if word == name or word in carried}
        if not found:
            known = frozenset[str]().union(*tags.values())
            raise ModelError(f"frozen: no parameter of {model} is named or tagged '{word}'; {nearest(word, known)}")
        stays |= found
    if stays >= tags.keys():
        raise ModelError(f"frozen: nothing of {model} is left to train; freeze fewer tags")
    return frozenset(stays)


def _wrong_names(model: str, given: Iterable[str], wanted: Iterable[str]) -> str:
    wrong = {"missing": set(wanted) - set(given), "unknown": set(given) - set(wanted)}
    shown = "; ".join(f"{what}: {', '.join(sorted(names)[:3])}" for what, names in wrong.items() if names)
    return f"{model} is called with all parameters of model.initial and no others ({shown})"


@contextmanager
def quiet() -> Iterator[None]:
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
