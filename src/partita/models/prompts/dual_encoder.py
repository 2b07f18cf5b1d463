"""A frozen pair of towers: an image is of the class whose text lies nearest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from partita.core import tensors
from partita.core.model import Model, Output
from partita.core.options import closest_match
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors
from partita.models import CACHED_STATES, ModelError, attention
from partita.models.adapter import without_logs
from partita.models.architectures.dual_encoders import image_tower_spec, text_tower_spec
from partita.models.losses import losses_for

SCALE = "logit_scale"
Tokenize = Callable[[Sequence[str]], tuple[Tensor, Tensor]]  # texts to ids and what is no padding, (text, token)


@dataclass(frozen=True, eq=False)
class DualEncoder(Model):
    """All is frozen and held once, in one precision; only the temperature may train, if a method wants it to.

    `held` are tensors made once: what the template says of each class, and the embedded words of its name.
    """

    name: str
    module: Any  # a CLIPModel or VisionTextDualEncoderModel
    tokenize: Tokenize
    held: Tensors
    initial: Tensors
    tags: Mapping[str, Names]

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return self.compare(params, self.see(inputs)[:, 0], self.held["texts"])

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return losses_for("single", out.logits, targets)

    def to(self, device: torch.device) -> None:
        self.module.to(device)
        self.held.update(tensors.to(self.held, device))
        self.initial.update(tensors.to(self.initial, device))

    def prompted(self, kind: str, key: Key, **options: Any) -> Model:
        from partita.models.prompts.registry import KINDS

        if kind not in KINDS:
            raise ModelError(f"there are no prompts of the kind '{kind}'; {closest_match(kind, KINDS)}")
        return KINDS[kind](self, key, **options)

    def depth(self) -> int:
        return int(self.module.vision_model.config.num_hidden_layers)

    def width(self, tower: str) -> int:
        return int(getattr(self.module, f"{tower}_model").config.hidden_size)

    def remember(self, inputs: Tensors, patches: bool = False) -> Tensor:
        """What is the same of an image in every round, as `see` takes it: (example, token, feature)."""
        return self.look(inputs["pixel_values"].to(self.module.device), patches=patches).cpu()

    def see(self, inputs: Tensors, patches: bool = False) -> Tensor:
        """Looks at images without prompts, or remembers what was seen of them."""
        return inputs[CACHED_STATES] if CACHED_STATES in inputs else self.look(inputs["pixel_values"], patches=patches)

    def look(self, pixels: Tensor, prompts: Tensor | None = None, patches: bool = False) -> Tensor:
        """The image's feature, and with `patches` those of its patches behind it: (example, token, feature).

        Prompts (layer, token, width) stand between the image's token and the rest when they enter the first layer,
        and each further layer that has its own finds them in the place of those before.
        """
        tower: Any = self.module.vision_model
        sight, settings = image_tower_spec(str(tower.config.model_type)), tower.config
        states = sight.enter(tower, pixels.to(self.module.dtype))  # (example, token, width)
        length = 0 if prompts is None else prompts.shape[-2]
        for number, layer in enumerate(tower.get_submodule(sight.layers)):
            if prompts is not None and number < len(prompts):
                own = prompts[number].to(states.dtype).expand(len(states), -1, -1)
                states = torch.cat([states[:, :1], own, states[:, 1 + (length if number else 0) :]], 1)
            states = layer(states, *sight.beside)
        if patches:
            first = 1 + length + getattr(settings, "num_register_tokens", 0)
            states = torch.cat([states[:, :1], states[:, first:]], 1)
        else:
            states = states[:, :1]
        return tensors.upcast(self.module.visual_projection(sight.leave(tower, states)))

    def glance(self, tokens: int, depth: int) -> Tensor:
        """(layer, token, width): what enters each of the first layers in so many places of a grey image, spread evenly.

        Grey is the mean colour of the data, so that no image is needed.
        """
        tower: Any = self.module.vision_model
        sight, settings = image_tower_spec(str(tower.config.model_type)), tower.config
        side = int(settings.image_size)
        grey = torch.zeros(1, settings.num_channels, side, side, dtype=self.module.dtype, device=self.module.device)
        found = []
        with torch.no_grad():
            states = sight.enter(tower, grey)  # (1, token, width)
            first = 1 + getattr(settings, "num_register_tokens", 0)
            places = torch.linspace(first, states.shape[1] - 1, tokens).round().long()
            for layer in tower.get_submodule(sight.layers)[:depth]:
                found.append(states[0, places])
                states = layer(states, *sight.beside)
        return torch.stack(found)

    def read(self, context: Tensor) -> Tensor:
        """The feature of each class's text, in which the context (token, width) stands before the class's name."""
        words, seen = self.held["words"], self.held["seen"]
        own = context.to(words.dtype).expand(len(words), -1, -1)
        states = torch.cat([words[:, :1], own, words[:, 1:]], 1)  # (class, token, width)
        return self.encode(states, torch.cat([seen.new_ones(len(seen), len(context)), seen], 1))

    def encode(self, states: Tensor, seen: Tensor) -> Tensor:
        """From embedded tokens to features (text, feature)."""
        tower: Any = self.module.text_model
        reading = text_tower_spec(str(tower.config.model_type))
        states = reading.enter(tower, states)
        for layer in tower.get_submodule(reading.layers):
            # A token of a causal tower sees none after it, so padding, which comes last, needs no mask.
            states = layer(states, None, is_causal=True) if reading.causal else layer(states, seen[:, None, None])
        return tensors.upcast(self.module.text_projection(reading.pool(tower, states, seen)))

    def embed(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Embedded tokens (text, token, width), and where they are no padding."""
        ids, seen = self.tokenize(texts)
        tower: Any = self.module.text_model
        table = tower.get_submodule(text_tower_spec(str(tower.config.model_type)).words).weight
        return table[ids.to(table.device)], seen.to(table.device)

    def compare(self, params: Tensors, image: Tensor, texts: Tensor) -> Output:
        """Logits are the cosines of image (example, feature) and text (class, feature) over the temperature."""
        image, texts = functional.normalize(image, dim=-1), functional.normalize(texts, dim=-1)
        return Output(params[SCALE].exp() * image @ texts.to(image.dtype).mT, image)


def freeze(
    name: str, module: Any, tokenize: Tokenize, classes: Sequence[str], template: str, dtype: torch.dtype
) -> DualEncoder:
    """Takes the module over, and reads the classes once."""
    if template.count("{}") != 1:
        raise ModelError(f"template is '{template}'; it must have one {{}}, where the class is to stand")
    classes = [each.replace("_", " ") for each in classes]  # as people write them
    image_tower_spec(str(module.vision_model.config.model_type))
    text_tower_spec(str(module.text_model.config.model_type))
    module.train(False).requires_grad_(False)
    scale = module.logit_scale.detach().float().clone()
    module.to(dtype)
    with without_logs():
        module.set_attn_implementation(attention.NAME)
    towers = DualEncoder(name, module, tokenize, {}, {SCALE: scale}, {SCALE: frozenset({"head"})})
    with torch.no_grad():
        towers.held["texts"] = towers.encode(*_read(towers, [template.format(each) for each in classes], classes))
        # What follows the name in the template follows it behind a context too.
        rest = template.partition("{}")[2]
        towers.held["words"], towers.held["seen"] = _read(towers, [each + rest for each in classes], classes)
    return towers


def _read(towers: DualEncoder, texts: Sequence[str], classes: Sequence[str]) -> tuple[Tensor, Tensor]:
    ids, seen = towers.tokenize(texts)
    rows = [tuple(row) for row in ids.tolist()]
    # Where a folder lacks the vocabulary, transformers makes a tokenizer that knows no word.
    if alike := [name for name, row in zip(classes, rows, strict=True) if rows.count(row) > 1]:
        raise ModelError(
            f"the tokenizer of {towers.name} makes the same of '{alike[0]}' and '{alike[1]}'; "
            "give a folder with the tokenizer's files, and classes whose names differ"
        )
    check_length(towers, int(seen.sum(1).max()))
    return towers.embed(texts)


def check_length(towers: DualEncoder, length: int) -> None:
    most = int(towers.module.text_model.config.max_position_embeddings)
    if length > most:
        raise ModelError(
            f"the longest text of a class is {length} tokens long, but {towers.name} reads no more than {most}; "
            "use a shorter context or template, or shorter names of classes"
        )
