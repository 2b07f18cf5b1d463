"""The interface of a model: named parameters with tags, a forward pass, and a loss per example."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from partita.core.data import Batch
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors, upcast

ATTENTION = "attention"  # the note that holds, by layer, a client's attention scores (head,) for the selected tokens
# Tags of the two towers of a vision-language model, and of the two stacks of a sequence-to-sequence model.
TOWERS = frozenset({"vision", "text", "encoder", "decoder"})
# Which tokens attention is measured on: a word such as "cls", or a list of words of the language.
TokenChoice = str | tuple[str, ...]
ADAPTERS = frozenset({"lora", "lokr", "hra", "miss", "ia3"})  # tags of an adapter's parameters, by its kind


class TagError(ValueError):
    """No parameter of the model has this tag, or the model does not support the operation."""


@dataclass(frozen=True)
class Output:
    """The result of a forward pass.

    Attributes:
        logits: The logits, with the example dimension first.
        features: Representations (example, width), for rules that compare them; None if the model has none.
    """

    logits: torch.Tensor
    features: torch.Tensor | None = None

    def with_logits(self) -> Output:
        """Return the output with logits that are computed already."""
        return self


class HeadOutput(Output):
    """The output of a model with a linear head over a vocabulary, whose logits are computed each time they are read.

    The loss can then be computed without the logits of the whole batch.

    Args:
        states: What the head is applied to, (example, token, width).
        weight: The weight of the head, (class, width).
        features: As in `Output`.
    """

    states: torch.Tensor
    weight: torch.Tensor

    def __init__(self, states: torch.Tensor, weight: torch.Tensor, features: torch.Tensor | None = None) -> None:
        for name, value in {"states": states, "weight": weight, "features": features}.items():
            object.__setattr__(self, name, value)

    @property
    def logits(self) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return upcast(torch.nn.functional.linear(self.states, self.weight))
        # By rows: with more dimensions, vmap needs a count that torch before 2.13 lacks for symbolic shapes.
        rows = torch.nn.functional.linear(self.states.flatten(0, -2), self.weight)
        return upcast(rows.view(*self.states.shape[:-1], -1))

    def with_logits(self) -> Output:
        return Output(self.logits, self.features)


class Model:
    """A model as a pure function of its parameters.

    Attributes:
        name: The name for messages and records.
        initial: The initial value of every parameter that can train or travel. Parameters that are always frozen may
            be stored inside the model instead.
        tags: For each name in `initial`, its tags. They say what the parameter is for ("query", "key", "value",
            "output", "mlp", "norm", "embedding", "head") and in which layer it is ("layer.3" is the fourth layer).
        frozen_tags: The tags of the parameters that are always frozen, by name.
    """

    name: str
    initial: Tensors
    tags: Mapping[str, Names]
    frozen_tags: Mapping[str, Names] = MappingProxyType({})

    def uses_dropout(self) -> bool:
        """Return whether the model has dropout, which draws from the input `EXAMPLE_SEEDS` in training.

        Raises:
            ValueError: If it has dropout that cannot draw from seeds.
        """
        return False

    def compute_in_float32(self, error: BaseException) -> str:
        """Let the part of the model that raised an error in bfloat16 compute in float32 from now on.

        Returns:
            The name of the part; "" if there is none.
        """
        return ""

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        """Run the forward pass. It must be pure and must work inside `torch.vmap`.

        Args:
            params: All parameters in `initial`.
            inputs: The inputs of a batch by name, each of shape (example, ...).
        """
        raise NotImplementedError

    def losses(self, out: Output, targets: torch.Tensor) -> torch.Tensor:
        """Return one loss for each example, of shape (example,).

        Args:
            out: The output of the forward pass.
            targets: The targets of the batch, of shape (example, ...).
        """
        raise NotImplementedError

    def class_losses(
        self, out: Output, targets: torch.Tensor, label_smoothing: float, class_weights: Sequence[float]
    ) -> torch.Tensor:
        """Return one training loss for each example, (example,), with smoothed labels and class weights.

        Args:
            out: The output of the forward pass.
            targets: The targets of the batch, of shape (example, ...).
            label_smoothing: `Training.label_smoothing`.
            class_weights: `Training.weights`.

        Raises:
            ValueError: If the model does not train by the cross-entropy of classes.
        """
        raise TagError(
            f"{self.name} does not train by the cross-entropy of classes; leave out training.label_smoothing and "
            "training.class_weights"
        )

    def to(self, device: torch.device) -> None:
        """Move the initial parameters, and any frozen parameters inside the model, to a device in place."""

    def frozen_weights(self) -> Tensors:
        """Return what is always frozen and stored inside the model, by name; empty if there is nothing.

        A run records its SHA-256, and refuses to continue with other values.
        """
        return {}

    def why_one_by_one(self, inputs: Tensors) -> str:
        """Return why clients cannot train together in a block; "" if they can, as far as the model knows.

        Args:
            inputs: The inputs of a batch, to try the forward pass on.
        """
        return ""

    def adapted(self, kind: str, key: Key, **options: Any) -> Model:
        """Return this model with an adapter. Everything else is frozen, except a task's head if the options say so.

        The adapter's parameters have the tags of their weight, the kind, and the name of the factor: "lora" and
        "lora_A" or "lora_B".

        Args:
            kind: The kind of adapter, such as "lora".
            key: The random key for its initial values.
            **options: The other options of `[model.adapter]`.

        Raises:
            TagError: If the model does not support adapters.
        """
        raise TagError(
            f"{self.name} cannot get an adapter; use a Hugging Face model, model.name = 'pretrained' or 'vit'"
        )

    def compiles_by_layer(self) -> bool:
        """Return whether to compile each layer on its own (`layer_compiler.py`) instead of the whole forward pass.

        The time to compile then does not grow with the number of layers.
        """
        return False

    def low_rank(self, rank: int, alpha: float, roles: tuple[str, ...], key: Key) -> Model:
        """Return this model with low-rank factors beside the weights with the given role tags, and nothing frozen.

        Args:
            rank: The rank of the factors.
            alpha: The LoRA scale.
            roles: The role tags of the weights, for example `("query", "value")`.
            key: The random key for the initial factors.

        Raises:
            TagError: If the model does not support low-rank factors.
        """
        raise TagError(f"{self.name} does not support low-rank factors; use a Hugging Face model")

    def attention(self, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, torch.Tensor]:
        """Return attention scores by layer tag, each of shape (example, head).

        A score is the share of its attention, from 0 to 1, that a token gives to the tokens selected by `tokens`. For
        "pooled" it says how concentrated the attention of the token is that the head reads, from 0 to 1.

        Args:
            params: All parameters in `initial`.
            batch: The batch to score.
            tokens: Which tokens to measure: a word such as "cls", or a list of words of the text.

        Raises:
            TagError: If the model cannot report its attention.
        """
        raise TagError(
            f"{self.name} cannot report its attention; use a Hugging Face model, or rank its layers differently"
        )

    def head_dimensions(self) -> dict[str, tuple[int, int]]:
        """Return, for each parameter with one part per attention head, `(dimension, number of heads)`.

        Raises:
            TagError: If the model cannot separate its heads.
        """
        raise TagError(f"{self.name} cannot separate its heads; use a Hugging Face model, or prune differently")

    def skip_layers(self, without: Names) -> Model:
        """Return this model with the layers of the given tags skipped in the forward pass.

        The parameters of skipped layers keep their names in `initial` and `tags`.

        Raises:
            TagError: If the model cannot skip layers.
        """
        raise TagError(f"{self.name} cannot skip layers; use a Hugging Face model")

    def prompted(self, kind: str, key: Key, **options: Any) -> Model:
        """Return this model, frozen, with trainable prompts or an adapter.

        Args:
            kind: Which prompts or adapter to add. Their tags say whose they are.
            key: The random key for their initial values.
            **options: Options of that kind.

        Raises:
            TagError: If the model does not support prompts.
        """
        raise TagError(f"{self.name} does not support prompts; use a two-tower model, model.name = 'clip'")

    def generate(self, params: Tensors, inputs: Tensors, max_new_tokens: int) -> list[str]:
        """Generate a text for each example, token by token, each time the most probable one.

        Args:
            params: All parameters in `initial`.
            inputs: The inputs of a batch by name, each of shape (example, ...).
            max_new_tokens: The maximum number of tokens of a text.

        Raises:
            TagError: If the model cannot generate text.
        """
        raise TagError(f"{self.name} cannot generate text; use a Hugging Face model such as T5 or BART")

    def decode(self, tokens: torch.Tensor) -> list[str]:
        """Return the texts of token ids, of shape (example, token), without special tokens and padding.

        Raises:
            TagError: If the model has no tokenizer.
        """
        raise TagError(f"{self.name} has no tokenizer; use a Hugging Face model with a text task")

    def for_classes(self, classes: tuple[str, ...]) -> Model:
        """Return this model for other classes, with the same parameters.

        Args:
            classes: The names of the classes.

        Raises:
            TagError: If the model has a parameter for each class, so that it knows no others.
        """
        raise TagError(
            f"{self.name} cannot predict classes that it was not trained on; use a two-tower model, model.name = "
            "'clip', or leave data.new_classes out"
        )

    def personal(self, params: Tensors) -> Tensors:
        """Return the parameters with which a client's own model is evaluated; by default they are unchanged.

        A model with a personal copy (`personal_copy.py`) returns the copy in place of the shared values.

        Args:
            params: All parameters of the client.
        """
        return params

    def all_names(self) -> Names:
        """The names of all parameters that can train or travel."""
        return frozenset(self.initial)

    def names(self, *wanted: str) -> Names:
        """Return the names of the parameters that have at least one of the given tags.

        Raises:
            TagError: If no parameter has one of the tags.
        """
        known = sorted(set().union(*self.tags.values()))
        for tag in wanted:
            if tag not in known:
                if any(tag in tags for tags in self.frozen_tags.values()):
                    raise TagError(
                        f"all parameters of {self.name} that are tagged '{tag}' are frozen for the whole run "
                        f"(model.frozen or [model.adapter]); choose among what trains: {', '.join(known)}"
                    )
                near = difflib.get_close_matches(tag, known)
                hint = f" Did you mean '{near[0]}'?" if near else ""
                if unknown := [name for name, tags in self.tags.items() if "other" in tags]:
                    hint += f" Parameters without a role, such as '{unknown[0]}', are tagged 'other'."
                raise TagError(f"no parameter of {self.name} is tagged '{tag}'; it has: {', '.join(known)}.{hint}")
        return frozenset(name for name, tags in self.tags.items() if not tags.isdisjoint(wanted))


def layer_tag(tags: Names) -> str | None:
    """Return the layer tag among a parameter's tags; None for a parameter outside all layers."""
    return next((tag for tag in sorted(tags) if tag.startswith("layer.")), None)


def layer_tags(model: Model) -> list[str]:
    """Return the model's layer tags, from the input to the output."""
    layers = {layer for tags in model.tags.values() if (layer := layer_tag(tags))}
    return sorted(layers, key=layer_number)


def layer_number(layer: str) -> int:
    """Return the number in a layer tag: 3 for "layer.3"."""
    return int(layer.removeprefix("layer."))


def input_side_names(model: Model) -> Names:
    """Return the embeddings, and the norms between them and the first layer.

    To train any of these, the gradient must flow back through all layers.
    """
    found: set[str] = set()
    reached: set[Names] = set()  # towers whose first layer has been passed
    for name in model.initial:
        tags = model.tags[name]
        if layer_tag(tags):
            reached.add(tags & TOWERS)
        elif "embedding" in tags or ("head" not in tags and tags & TOWERS not in reached):
            found.add(name)
    return frozenset(found)


def role_tag(tags: Names) -> str:
    """Return what a parameter is for, independent of its layer and tower; "" if no tag says.

    An adapter's parameters have a role of their own, its kind.
    """
    own = sorted(tags & ADAPTERS) or sorted(tags - TOWERS)
    return next((tag for tag in own if not tag.startswith("layer.")), "")


# Computes what an evaluation needs of a batch: (model, params, inputs, targets) -> logits and losses.
Forward: TypeAlias = "Callable[[Model, Tensors, Tensors, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]"


def logits_and_losses(
    model: Model, params: Tensors, inputs: Tensors, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a batch and the loss of each example."""
    out = model(params, inputs).with_logits()
    return out.logits, model.losses(out, targets)
