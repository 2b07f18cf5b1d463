"""A frozen CLIP or other dual encoder from a folder or the Hub, or a random one for experiments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from partita.core.rng import Key, seeded
from partita.models import ModelError
from partita.models.from_task import check_has_images
from partita.tasks import TaskInfo

if TYPE_CHECKING:
    from transformers import CLIPConfig

    from partita.models.prompts.dual_encoder import DualEncoder, Tokenize

# For each shape: config of the image tower, config of the text tower, and width of the shared embedding.
SHAPES: dict[str, tuple[dict[str, int], dict[str, int], int]] = {
    "tiny": (
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
        {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
        16,
    ),
    "b16": (
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
        {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 2048}
        | {"vocab_size": 49408},
        512,
    ),
}
START, END, PAD = 0, 1, 2


def clip(
    task: TaskInfo,
    key: Key,
    *,
    path: Annotated[str | None, "folder or Hub id, with a tokenizer"] = None,
    shape: Annotated[Literal["tiny", "b16"] | None, "random towers of this shape, instead of `path`"] = None,
    template: Annotated[str, "text of a class, with {} for its name"] = "a photo of a {}.",
    dtype: Annotated[Literal["float32", "bfloat16", "float64"], "dtype of the towers"] = "float32",
) -> DualEncoder:
    """A frozen dual encoder with its tokenizer, from a folder or the Hub. A method adds trainable parameters.

    `shape` builds random towers instead: "tiny", or "b16" with the size of ViT-B/16. `template` is the class text for
    methods that do not learn one. `dtype` applies to the towers; trainable parameters are float32.

    Raises:
        ModelError: If the task does not have one class per image, both or neither of `path` and `shape` are given, or
            the model is not a supported dual encoder.
    """
    from transformers import AutoModel, CLIPModel

    from partita.models import loading
    from partita.models.architectures.dual_encoders import check_dual_encoder, full_length
    from partita.models.prompts.dual_encoder import freeze
    from partita.models.prompts.registry import KINDS

    check_has_images(task)
    kind = getattr(torch, dtype)
    if task.kind.inputs != "image" or not task.kind.one_class:
        raise ModelError("clip predicts one class per image; choose a single-label image task")
    if (path is None) == (shape is None):
        raise ModelError(
            "clip takes either a path or a shape; give path = 'openai/clip-vit-base-patch16' or a folder, "
            "or shape = 'tiny' for random towers"
        )
    if path is not None:
        config = loading.config_for(path, task)
        check_dual_encoder(path, config.model_type)
        loading.check_images(path, config, task)
        module: Any = loading.load_module(path, config, AutoModel, key, has_head=False, fresh_head=False)
        length = full_length(module.text_model.config)
        return freeze(config.model_type, module, _tokenizer(path, length), task.classes, template, kind, KINDS)
    assert shape is not None
    new = getattr(task, "new", None)  # random towers need a token for each word of the new classes too
    classes = (*task.classes, *(new.classes if new else ()))
    names = [label.replace("_", " ") for label in classes]
    words = sorted({word for text in (template.format(""), *names) for word in _words(text)})
    with seeded(key):
        module = CLIPModel(_config(shape, task, len(words)))
    return freeze(f"random {shape} clip", module, _word_tokenizer(words), task.classes, template, kind, KINDS)


def _tokenizer(path: str, length: int | None) -> Tokenize:
    """Return a tokenizer that pads texts to the longest, or to `length` tokens."""
    from partita.models.loading import tokenizer_of

    tokenizer = tokenizer_of(path)
    padding = {"padding": True} if length is None else {"padding": "max_length", "max_length": length}

    def tokenize(texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = tokenizer(
            list(texts), **padding, padding_side="right", return_tensors="pt", return_attention_mask=True
        )
        return tokens["input_ids"], tokens["attention_mask"].bool()

    return tokenize


def _config(shape: str, task: TaskInfo, words: int) -> CLIPConfig:
    from transformers import CLIPConfig

    vision, text_tower, projection = SHAPES[shape]
    image_size = task.size
    divisors = (part for part in (image_size // 4, image_size // 2, 1) if part and image_size % part == 0)
    patch = 16 if shape == "b16" else next(divisors)
    if image_size % patch:
        raise ModelError(
            f"image size {image_size} is not divisible by patch size {patch}; resize them to a multiple of it"
        )
    vocabulary = max(PAD + 1 + words, text_tower.get("vocab_size", 0))
    ids = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD, "vocab_size": vocabulary}
    images = {"image_size": image_size, "patch_size": patch, "num_channels": task.channels}
    return CLIPConfig(text_config={**text_tower, **ids}, vision_config={**vision, **images}, projection_dim=projection)


def _word_tokenizer(words: Sequence[str]) -> Tokenize:
    known = {word: place for place, word in enumerate(words, PAD + 1)}

    def tokenize(texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        for text in texts:
            if unknown := [word for word in _words(text) if word not in known]:
                raise ModelError(f"the random towers have no token for '{unknown[0]}', only for: {', '.join(known)}")
        rows = [[START, *(known[word] for word in _words(text)), END] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
        return ids, ids != PAD

    return tokenize


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())
