"""Tiny dual encoders saved by transformers with their tokenizers, for tests of prompts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from image_fixtures import Images
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipModel,
    VisionTextDualEncoderModel,
)

from partita.core.rng import Key, seeded
from partita.models.functional import without_logs
from partita.models.prompts.clip import clip
from partita.models.prompts.dual_encoder import DualEncoder

SIZE, PATCHES = 8, 4
CLASSES = ("cat", "golden_eagle", "dog")
WORDS = ("photo", "cat", "dog", "of", "golden", "eagle")
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VISION_CONFIG = {"hidden_size": 16, **LAYERS, "image_size": SIZE, "patch_size": 4, "num_channels": 1}
PAIRS = ("clip", "dinov2+bert", "registers+bert", "clip+bert", "siglip")


def images(count: int = 5, seed: int = 3) -> Tensor:
    return torch.randn(count, 1, SIZE, SIZE, generator=(Key(seed) / "images").generator())


def task(classes: tuple[str, ...] = CLASSES) -> Any:
    labels = torch.arange(5) % len(classes)
    return Images(images(), labels, classes=classes, size=SIZE)


def byte_pair_tokenizer() -> CLIPTokenizer:
    """Has a token for every letter and for a few whole words."""
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = {token: place for place, token in enumerate([*letters, *(letter + "</w>" for letter in letters)])}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        known = word[0]
        for letter in [*word[1:-1], f"{word[-1]}</w>"]:
            if (known, letter) not in merges:
                merges.append((known, letter))
            known += letter
            vocabulary.setdefault(known, len(vocabulary))
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[special] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=merges)  # type: ignore[arg-type]


def word_tokenizer() -> BertTokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "a", *WORDS]
    return BertTokenizer(vocab={word: place for place, word in enumerate(words)})


def end_token_tokenizer() -> PreTrainedTokenizerFast:
    """Like SigLIP's: no start token, and an end token."""
    words = ["[PAD]", "[UNK]", "[SEP]", ".", "a", *WORDS]
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = BertPreTokenizer()
    made.post_processor = TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", sep_token="[SEP]")


def tokenizer_of(pair: str) -> Any:
    """The tokenizer of a pair."""
    kinds = {"clip": byte_pair_tokenizer, "siglip": end_token_tokenizer}
    return kinds.get(pair, word_tokenizer)()


def _vision_model(kind: str) -> Any:
    if kind == "clip":
        return CLIPVisionModel(CLIPVisionConfig(**VISION_CONFIG))
    options = {key: value for key, value in VISION_CONFIG.items() if key != "intermediate_size"}
    if kind == "registers":
        return Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**options, mlp_ratio=2, num_register_tokens=2))
    return Dinov2Model(Dinov2Config(**options, mlp_ratio=2))


@cache
def folder(pair: str) -> str:
    """A saved pair with perturbed weights, because initial zeros and ones hide mistakes."""
    path = mkdtemp()
    with seeded(Key(1) / pair):
        if pair == "clip":
            tokenizer: Any = byte_pair_tokenizer()
            ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
            words = {"hidden_size": 12, **LAYERS, "vocab_size": len(tokenizer), "max_position_embeddings": 16, **ids}
            module: Any = CLIPModel(CLIPConfig(text_config=words, vision_config=VISION_CONFIG, projection_dim=8))
        elif pair == "siglip":
            tokenizer = end_token_tokenizer()
            words = {"hidden_size": 16, **LAYERS, "vocab_size": len(tokenizer), "max_position_embeddings": 16}
            module = SiglipModel(
                SiglipConfig(text_config={**words, "projection_size": 16}, vision_config=VISION_CONFIG)
            )
        else:
            tokenizer = word_tokenizer()
            words = {"hidden_size": 12, **LAYERS, "vocab_size": len(tokenizer), "max_position_embeddings": 16}
            sight = _vision_model(pair.partition("+")[0])
            module = VisionTextDualEncoderModel(vision_model=sight, text_model=BertModel(BertConfig(**words)))
        with torch.no_grad():
            for name, value in module.named_parameters():
                if name != "logit_scale":
                    value += 0.3 * torch.randn(value.shape)
    with without_logs():
        module.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def transformers_model(pair: str) -> Any:
    """The same weights in transformers, in float64. SigLIP's eager attention computes softmax in float32."""
    kind = {"clip": CLIPModel, "siglip": SiglipModel}.get(pair, VisionTextDualEncoderModel)
    attention = "sdpa" if pair == "siglip" else "eager"
    return kind.from_pretrained(folder(pair), attn_implementation=attention).eval().double()


def load_pair(pair: str = "clip", dtype: Any = "float64", **options: Any) -> DualEncoder:
    return clip(task(), Key(2), path=folder(pair), dtype=dtype, **options)


def copy_without(path: str, *files: str) -> str:
    """A copy of a folder without some files."""
    copy = Path(mkdtemp())
    for file in Path(path).iterdir():
        if file.name not in files:
            (copy / file.name).write_bytes(file.read_bytes())
    return str(copy)
