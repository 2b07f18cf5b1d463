"""What the core asks of a model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.core.data import Batch
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors

ATTENTION = "attention"  # the note, by layer, of the attention (head,) that a client's heads pay to chosen tokens
TOWERS = frozenset({"vision", "text"})  # of models with two


class TagError(ValueError):
    """A tag that no parameter of the model carries."""


@dataclass(frozen=True)
class Output:
    """What a forward pass gives; features (example, width) are for rules that compare representations."""

    logits: Tensor
    features: Tensor | None = None


class Model:
    """A pure function of its parameters.

    `initial` holds all that may train or travel; a frozen rest may live inside. `tags` says what each parameter is
    for: "query", "key", "value", "output", "mlp", "norm", "embedding", "head", and "layer.3" for the fourth layer.
    """

    name: str
    initial: Tensors
    tags: Mapping[str, Names]

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        raise NotImplementedError

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        """One loss for each example: (example,)."""
        raise NotImplementedError

    def to(self, device: torch.device) -> None:
        """Move the initial parameters, and the frozen rest where there is one."""

    def low_rank(self, rank: int, alpha: float, roles: tuple[str, ...], key: Key) -> Model:
        """This model with low-rank factors, tagged "lora", beside the weights of the roles."""
        raise TagError(f"{self.name} cannot take low-rank factors; use a Hugging Face model")

    def attention(self, params: Tensors, batch: Batch, tokens: str) -> dict[str, Tensor]:
        """By layer, (example, head): the share of its attention, from 0 to 1, that a token pays to those asked for."""
        raise TagError(f"{self.name} cannot tell its attention; use a Hugging Face model, or rank its layers otherwise")

    def head_dimensions(self) -> dict[str, tuple[int, int]]:
        """Of each parameter made of one part for each head: along which dimension, and of how many."""
        raise TagError(f"{self.name} cannot tell its heads apart; use a Hugging Face model, or prune otherwise")

    def skip_layers(self, without: Names) -> Model:
        """This model as it runs without the layers of these tags, though it still names their parameters."""
        raise TagError(f"{self.name} cannot leave layers out; use a Hugging Face model")

    def prompted(self, kind: str, key: Key, **options: Any) -> Model:
        """This model, frozen, with prompts or an adapter of that kind, which are tagged by whose they are."""
        raise TagError(f"{self.name} cannot take prompts; use a pair of towers, model.name = 'clip'")

    def all_names(self) -> Names:
        return frozenset(self.initial)

    def names(self, *wanted: str) -> Names:
        """The parameters that carry any of the tags."""
        known = sorted(set().union(*self.tags.values()))
        for tag in wanted:
            if tag not in known:
                near = difflib.get_close_matches(tag, known, n=1)
                hint = f" Did you mean '{near[0]}'?" if near else ""
                raise TagError(f"no parameter of {self.name} is tagged '{tag}'; it has: {', '.join(known)}.{hint}")
        return frozenset(name for name, tags in self.tags.items() if not tags.isdisjoint(wanted))


def layer_tag(tags: Names) -> str | None:
    """The tag of a parameter's layer; None outside all layers."""
    return next((tag for tag in sorted(tags) if tag.startswith("layer.")), None)


def layer_tags(model: Model) -> list[str]:
    """The tags of its layers, from the input up."""
    found = {layer for tags in model.tags.values() if (layer := layer_tag(tags))}
    return sorted(found, key=layer_number)


def layer_number(layer: str) -> int:
    return int(layer.removeprefix("layer."))


def input_side_names(model: Model) -> Names:
    """The embeddings, and norms between them and the first layer: to train these, a gradient must come all the way."""
    found: set[str] = set()
    reached: set[Names] = set()  # towers
    for name in model.initial:
        tags = model.tags[name]
        if layer_tag(tags):
            reached.add(tags & TOWERS)
        elif "embedding" in tags or ("head" not in tags and tags & TOWERS not in reached):
            found.add(name)
    return frozenset(found)


def role_tag(tags: Names) -> str:
    """What the parameter is for, whichever layer or tower it sits in; low-rank factors are a role of their own."""
    return next((tag for tag in sorted(tags - TOWERS) if not tag.startswith("layer.")), "")
