"""A frozen dual encoder: it assigns an image to the class with the most similar text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from partita.core import tensors
from partita.core.model import Model, Output
from partita.core.options import closest_match
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors
from partita.models import CACHED_STATES, ModelError
from partita.models.architectures.dual_encoders import image_tower_spec, text_tower_spec
from partita.models.transformers_attention import use_attention
from partita.tasks.losses import class_losses, cross_entropy

SCALE = "logit_scale"
# From texts to token ids and a mask that is false for padding, each (text, token).
Tokenize = Callable[[Sequence[str]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class DualEncoder(Model):
    """A frozen image tower and text tower, stored once in one dtype. Only the temperature can train.

    Attributes:
        name: Name of the model.
        module: A CLIPModel, SiglipModel or VisionTextDualEncoderModel.
        tokenize: Tokenizes texts.
        precomputed: Tensors computed once: "texts", the features of each class's template text (class, feature);
            "token_embeddings", the embedded tokens of each class name (class, token, width); "attention_mask", their
            attention mask (class, token).
        initial: Initial value of the temperature, as a log scale.
        tags: Tags of the temperature.
        template: Text of a class, with {} for its name.
        kinds: By name, what makes a model with trainable prompts or adapters from this one.
    """

    name: str
    module: Any
    tokenize: Tokenize
    precomputed: Tensors
    initial: Tensors
    tags: Mapping[str, Names]
    template: str
    kinds: Mapping[str, Callable[..., Model]]

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return self.compare(params, self.image_features(inputs)[:, 0], self.precomputed["texts"])

    def losses(self, out: Output, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(out.logits, targets)

    def class_losses(
        self, out: Output, targets: torch.Tensor, label_smoothing: float, class_weights: Sequence[float]
    ) -> torch.Tensor:
        return class_losses(out.logits, targets, label_smoothing, class_weights)

    def to(self, device: torch.device) -> None:
        self.module.to(device)
        self.precomputed.update(tensors.to(self.precomputed, device))
        self.initial.update(tensors.to(self.initial, device))

    def frozen_weights(self) -> Tensors:
        return dict(self.module.state_dict())

    def prompted(self, kind: str, key: Key, **options: Any) -> Model:
        """Return a model with trainable prompts or adapters of the given kind."""
        if kind not in self.kinds:
            raise ModelError(f"unknown kind of prompts '{kind}'; {closest_match(kind, self.kinds)}")
        return self.kinds[kind](self, key, **options)

    def for_classes(self, classes: tuple[str, ...]) -> DualEncoder:
        return replace(self, precomputed=_encode_classes(self, classes))

    def depth(self) -> int:
        """Return the number of layers of the image tower."""
        return int(self.module.vision_model.config.num_hidden_layers)

    def start_tokens(self) -> int:
        """Return the number of special tokens before a text."""
        return text_tower_spec(str(self.module.text_model.config.model_type)).start_tokens

    def width(self, tower: str) -> int:
        """Return the hidden size of a tower, "vision" or "text"."""
        return int(getattr(self.module, f"{tower}_model").config.hidden_size)

    def features_to_cache(self, inputs: Tensors, patches: bool = False) -> torch.Tensor:
        """Return the image features to cache, (example, token, feature). They are the same in every round.

        Args:
            inputs: The inputs of a batch, with the images as "pixel_values".
            patches: Whether to include the features of the patches, after the image feature.
        """
        return self.encode_image(inputs["pixel_values"].to(self.module.device), patches=patches).cpu()

    def image_features(self, inputs: Tensors, patches: bool = False) -> torch.Tensor:
        """Return image features without prompts, (example, token, feature), from the cache if the inputs have them.

        Args:
            inputs: The inputs of a batch.
            patches: Whether to include the features of the patches. Cached features are returned as they are.
        """
        if CACHED_STATES in inputs:
            return inputs[CACHED_STATES]
        return self.encode_image(inputs["pixel_values"], patches=patches)

    def encode_image(
        self, pixels: torch.Tensor, prompts: torch.Tensor | None = None, patches: bool = False
    ) -> torch.Tensor:
        """Run the image tower.

        Args:
            pixels: Images, (example, channel, height, width).
            prompts: Prompts of the first layers, (layer, token, width). They are inserted after the image token at the
                first layer. Each further layer with prompts replaces the previous ones.
            patches: Whether to also return the features of the patches, after the image feature.

        Returns:
            (example, token, feature).
        """
        tower: Any = self.module.vision_model
        spec, settings = image_tower_spec(str(tower.config.model_type)), tower.config
        states = spec.first_states(tower, pixels.to(self.module.dtype))  # (example, token, width)
        length, own_tokens = 0 if prompts is None else prompts.shape[-2], spec.image_tokens
        for number, layer in enumerate(tower.get_submodule(spec.layers)):
            if prompts is not None and number < len(prompts):
                own = prompts[number].to(states.dtype).expand(len(states), -1, -1)
                rest = states[:, own_tokens + (length if number else 0) :]
                states = torch.cat([states[:, :own_tokens], own, rest], 1)
            states = layer(states, *spec.layer_args)
        first = own_tokens + length + getattr(settings, "num_register_tokens", 0)
        if spec.pool is not None:
            states = spec.finish(tower, states)
            image = spec.pool(tower, states).unsqueeze(1)
        else:
            image = spec.finish(tower, states[:, :1])
            states = spec.finish(tower, states[:, first:]) if patches else states
        found = torch.cat([image, states if spec.pool is None else states[:, first:]], 1) if patches else image
        return tensors.upcast(self._project("visual_projection", found))

    def _project(self, name: str, features: torch.Tensor) -> torch.Tensor:
        """Apply a projection of the module. SigLIP has none, because its towers end in the shared width."""
        projection = getattr(self.module, name, None)
        return features if projection is None else projection(features)

    def gray_image_states(self, tokens: int, depth: int) -> torch.Tensor:
        """Run a gray image, the mean color of the data, through the image tower.

        Args:
            tokens: Number of patches to read, spread evenly over the image.
            depth: Number of layers.

        Returns:
            The inputs of each of the first layers at these patches, (layer, token, width).
        """
        patches, first = self.gray_image_patches(depth), self.first_patch()
        positions = torch.linspace(first, first + patches.shape[1] - 1, tokens).round().long()
        return patches[:, positions - first]

    def first_patch(self) -> int:
        """Return the number of tokens of the image tower before the patches."""
        settings: Any = self.module.vision_model.config
        return image_tower_spec(str(settings.model_type)).image_tokens + getattr(settings, "num_register_tokens", 0)

    def gray_image_patches(self, depth: int) -> torch.Tensor:
        """Return the inputs of the first `depth` layers at all patches of a gray image, (layer, patch, width)."""
        tower: Any = self.module.vision_model
        spec, settings = image_tower_spec(str(tower.config.model_type)), tower.config
        side = int(settings.image_size)
        gray = torch.zeros(1, settings.num_channels, side, side, dtype=self.module.dtype, device=self.module.device)
        inputs = []
        with torch.no_grad():
            states = spec.first_states(tower, gray)  # (1, token, width)
            for layer in tower.get_submodule(spec.layers)[:depth]:
                inputs.append(states[0, self.first_patch() :])
                states = layer(states, *spec.layer_args)
        return torch.stack(inputs)

    def text_features(self, context: torch.Tensor) -> torch.Tensor:
        """Return the text features (class, feature) with `context` (token, width) before each class name."""
        embeddings, attention_mask = self.precomputed["token_embeddings"], self.precomputed["attention_mask"]
        settings = self.module.text_model.config
        spec = text_tower_spec(str(settings.model_type))
        start, limit = spec.start_tokens, int(settings.max_position_embeddings)
        own = context.to(embeddings.dtype).expand(len(embeddings), -1, -1)
        # If texts are padded to the tower's length, padding makes room for the context.
        states = torch.cat([embeddings[:, :start], own, embeddings[:, start:]], 1)[:, :limit]  # (class, token, width)
        context_mask = attention_mask.new_ones(len(attention_mask), len(context))
        return self.encode_text(states, torch.cat([context_mask, attention_mask], 1)[:, :limit])

    def encode_text(self, states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Run the text tower.

        Args:
            states: Embedded tokens, (text, token, width).
            attention_mask: False for padding, (text, token).

        Returns:
            (text, feature).
        """
        tower: Any = self.module.text_model
        spec = text_tower_spec(str(tower.config.model_type))
        states = spec.first_states(tower, states)
        for layer in tower.get_submodule(spec.layers):
            # In a causal tower, tokens do not attend to later tokens, so padding at the end needs no mask.
            if spec.causal:
                states = layer(states, None, is_causal=True)
            else:
                states = layer(states, None if spec.full_length else attention_mask[:, None, None])
        return tensors.upcast(self._project("text_projection", spec.pool(tower, states, attention_mask)))

    def token_embeddings(self) -> torch.Tensor:
        """Return the text tower's embedding of every token, (token, width)."""
        tower: Any = self.module.text_model
        table: torch.Tensor = tower.get_submodule(text_tower_spec(str(tower.config.model_type)).token_embedding).weight
        return table

    def embed(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embedded tokens (text, token, width) and their padding mask (text, token), false for padding."""
        ids, attention_mask = self.tokenize(texts)
        table = self.token_embeddings()
        return table[ids.to(table.device)], attention_mask.to(table.device)

    def compare(self, params: Tensors, image: torch.Tensor, texts: torch.Tensor) -> Output:
        """Compute logits: cosine similarities of image (example, feature) and texts (class, feature) / temperature."""
        image, texts = functional.normalize(image, dim=-1), functional.normalize(texts, dim=-1)
        return Output(params[SCALE].exp() * image @ texts.to(image.dtype).mT, image)


def freeze(
    name: str,
    module: Any,
    tokenize: Tokenize,
    classes: Sequence[str],
    template: str,
    dtype: torch.dtype,
    kinds: Mapping[str, Callable[..., Model]],
) -> DualEncoder:
    """Build a DualEncoder from a module and encode the classes once.

    The module is modified in place and belongs to the model afterwards.

    Args:
        name: Name of the model.
        module: A CLIPModel, SiglipModel or VisionTextDualEncoderModel.
        tokenize: Tokenizes texts.
        classes: Class names. Underscores are replaced by spaces.
        template: Text of a class, with {} for its name.
        dtype: Dtype of the towers.
        kinds: By name, what makes a model with trainable prompts or adapters.

    Raises:
        ModelError: If the template does not have exactly one {}, a tower is not supported, two classes have the same
            tokens, or a class text is too long.
    """
    if template.count("{}") != 1:
        raise ModelError(f"template is '{template}'; it must have exactly one {{}} as the placeholder of the class")
    image_tower_spec(str(module.vision_model.config.model_type))
    text_tower_spec(str(module.text_model.config.model_type))
    module.train(False).requires_grad_(False)
    scale = module.logit_scale.detach().float().reshape(()).clone()  # SigLIP's has the shape (1,)
    module.to(dtype)
    use_attention(module)
    towers = DualEncoder(name, module, tokenize, {}, {SCALE: scale}, {SCALE: frozenset({"head"})}, template, kinds)
    towers.precomputed.update(_encode_classes(towers, classes))
    return towers


@torch.no_grad()
def _encode_classes(towers: DualEncoder, classes: Sequence[str]) -> Tensors:
    """Return what is precomputed for classes; see `DualEncoder`."""
    names = [label.replace("_", " ") for label in classes]
    texts = towers.encode_text(*_embed_classes(towers, [towers.template.format(label) for label in names], names))
    # With a learned context, the end of the template still follows the class name.
    rest = towers.template.partition("{}")[2]
    token_embeddings, attention_mask = _embed_classes(towers, [label + rest for label in names], names)
    return {"texts": texts, "token_embeddings": token_embeddings, "attention_mask": attention_mask}


def _embed_classes(
    towers: DualEncoder, texts: Sequence[str], classes: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, attention_mask = towers.tokenize(texts)
    rows = [tuple(row) for row in ids.tolist()]
    # If a folder lacks the vocabulary, transformers builds a tokenizer with special tokens only.
    if duplicates := [name for name, row in zip(classes, rows, strict=True) if rows.count(row) > 1]:
        raise ModelError(
            f"the tokenizer of {towers.name} gives the same tokens for '{duplicates[0]}' and '{duplicates[1]}'; "
            "give a folder with the tokenizer's files, and classes with different names"
        )
    check_length(towers, int(attention_mask.sum(1).max()))
    return towers.embed(texts)


def check_length(towers: DualEncoder, length: int) -> None:
    """Raise a ModelError if the text tower cannot take `length` tokens."""
    limit = int(towers.module.text_model.config.max_position_embeddings)
    if length > limit:
        raise ModelError(
            f"the longest class text has {length} tokens, but {towers.name} takes at most {limit}; "
            "use a shorter context or template, or shorter class names"
        )
