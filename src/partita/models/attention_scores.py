"""Attention scores: how much each layer and head attends to chosen tokens, without materializing attention maps.

    score of layer l, head h = mean over tokens i of  sum over tokens j in T of  attention[l, h, i, j]

With tokens = "pooled", the score says how concentrated the attention of the one token is that the head reads. With
b the attention of that token to the n content tokens, scaled to a sum of 1:

    score of layer l, head h = 1 - entropy(b) / log n

The rows of attention sum to 1, so the attention to all content tokens is what the first token, an attention sink,
leaves. Scaling b to a sum of 1 removes the sink from the score.

The indicator of T is appended to the values as one more column. The fused kernel then returns the inner sum for every
token i, in memory linear in the number of tokens. The mean over an example's heads and unmasked tokens is the published
sum over both, divided by heads x tokens: padding and sequence length do not change the score.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from partita.core.data import IGNORE_INDEX, Batch
from partita.core.model import TagError, TokenChoice, layer_number, layer_tag, role_tag
from partita.core.options import closest_match
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models import attention as partita_attention
from partita.models.architectures import architecture, is_known
from partita.models.attention import attention_hook, for_each_head, probabilities, scaled_dot_product
from partita.models.functional import FunctionalModel

COMMON = frozenset(
    ["a", "an", "and", "by", "for", "from", "in", "none", "of", "on", "or", "other", "the", "to", "unknown", "with"]
)  # say nothing about a class
STARTS = ("\u0120", "\u2581")  # the marks of a space before a token, in byte-level BPE and SentencePiece


@dataclass(frozen=True, eq=False)
class WordTokens:
    """Words as tokens.

    Attributes:
        words: The token ids of each form of a word.
        continuing: The ids of tokens that continue a word, (token,).
    """

    words: tuple[tuple[int, ...], ...]
    continuing: torch.Tensor


def label_words(names: Iterable[str]) -> tuple[str, ...]:
    """Return the words of class names, without numbers, single letters and words such as "of".

    Args:
        names: The names of the classes.

    Returns:
        Each word once, in lower case. Empty if no name has one, as in "LABEL_0" or "C01".
    """
    found = dict.fromkeys(
        word.lower()
        for name in names
        if not re.fullmatch(r"LABEL_\d+", name)
        for word in re.findall(r"(?<![\w])[^\W\d_]{2,}(?![\d])", re.sub(r"(?<=[a-z])(?=[A-Z])|[_/-]", " ", name))
    )
    return tuple(word for word in found if word not in COMMON)


@lru_cache(maxsize=16)
def word_tokens(tokenizer: Any, words: tuple[str, ...]) -> WordTokens:
    """Return the tokens of words, in lower case, capitalized and as given, and after a space where that is marked.

    Args:
        tokenizer: The tokenizer of transformers.
        words: The words. They may hold spaces.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    pieces = {number for token, number in vocabulary.items() if token.startswith("##")}
    # The more frequent mark counts: byte-level BPE has "##" of headings, and "\u0120" is a letter of Maltese.
    spaced = sum(token.startswith(STARTS) for token in vocabulary) > len(pieces)
    if spaced:  # the mark of a space is a letter too
        plain = {token: number for token, number in vocabulary.items() if not token.startswith(STARTS)}
        continuing = {number for token, number in plain.items() if token[:1].isalnum()}
    else:
        continuing = pieces
    unknown = getattr(tokenizer, "unk_token_id", None)
    forms: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in dict.fromkeys((word, word.lower(), word.capitalize(), word.upper())):
            for form in (text, f" {text}") if spaced else (text,):
                ids = tuple(tokenizer(form, add_special_tokens=False)["input_ids"])
                if ids and unknown not in ids and ids[0] not in continuing:
                    forms[ids] = None
    return WordTokens(tuple(forms), torch.tensor(sorted(continuing), dtype=torch.long))


def matching_tokens(ids: torch.Tensor, wanted: WordTokens) -> torch.Tensor:
    """Return a mask of the tokens that belong to one of the words, (example, token). A part of a word does not match.

    Args:
        ids: Token ids, (example, token).
        wanted: The words.
    """
    found = torch.zeros_like(ids, dtype=torch.bool)
    continues = torch.isin(ids, wanted.continuing.to(ids))
    ends = torch.nn.functional.pad(~continues[:, 1:], (0, 1), value=True)  # no token of the same word follows
    for word in wanted.words:
        match = _starts(ids, word) & ends.roll(-(len(word) - 1), 1)
        for place in range(len(word)):
            found |= match.roll(place, 1)
    return found


def _starts(ids: torch.Tensor, word: Sequence[int]) -> torch.Tensor:
    """Return where a sequence of tokens begins, (example, token)."""
    count = ids.shape[1]
    match = torch.zeros_like(ids, dtype=torch.bool)
    if len(word) <= count:
        here = torch.ones_like(ids[:, : count - len(word) + 1], dtype=torch.bool)
        for place, token in enumerate(word):
            here &= ids[:, place : count - len(word) + 1 + place] == token
        match[:, : here.shape[1]] = here
    return match


ATTENTION_MASK = "attention_mask"
CROSS_ATTENTION = r"(?i)encdec|encoder_attn|crossattention|cross_attn"
KERNEL_WIDTH = 8  # fused kernels need widths that are a multiple of 8
TOKENS = ("auto", "cls", "entities", "content", "salient", "pooled", "labels")
DEGENERATE = {
    "all": "softmax makes attention to all tokens 1 in every layer",
    "last": "in a decoder only the last token attends to the last token; in an encoder it is a token like any other",
    "first": "in a decoder it is an attention sink; in an encoder it is called 'cls'",
    "bos": "in a decoder it is an attention sink; in an encoder it is called 'cls'",
}


@torch.no_grad()
def attention_to(model: FunctionalModel, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, torch.Tensor]:
    """Compute attention scores in one forward pass.

    Layers replaced by the frozen cache are not run and have no score. In a CLIP with two towers, the image tower is
    scored.

    Args:
        model: Model to score.
        params: Parameters of the model.
        batch: Examples.
        tokens: Tokens whose received attention is measured; see `resolve_tokens`.

    Returns:
        For each layer tag, the scores (example, head).
    """
    attention_mask, inputs = batch.inputs.get(ATTENTION_MASK), batch.inputs
    # Without a mask, fused kernels need only linear memory.
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask, inputs = None, {name: value for name, value in inputs.items() if name != ATTENTION_MASK}
    hook = _Scores(model, batch, resolve_tokens(model, tokens), attention_mask, _layers(model))
    if model.module.config._attn_implementation != partita_attention.NAME:
        return hook.from_maps(model.attention_maps(params, inputs))
    with attention_hook(hook):
        model(params, inputs)
    return dict(sorted(hook.scores.items(), key=lambda score: layer_number(score[0])))


def resolve_tokens(model: FunctionalModel, tokens: TokenChoice) -> TokenChoice:
    """Resolve "auto" to a choice of tokens that fits the model, and "labels" to the words of the class names.

    Raises:
        ModelError: If the choice is unknown, does not fit the model, or gives the same score in every layer.
    """
    is_decoder = _is_decoder(model)
    if tokens == "labels" or isinstance(tokens, tuple):
        return _words(model, tokens)
    if tokens in DEGENERATE:
        raise ModelError(f"tokens = '{tokens}' does not distinguish layers: {DEGENERATE[tokens]}; {_remedy(model)}")
    if tokens not in TOKENS:
        raise ModelError(f"tokens is '{tokens}'; {closest_match(tokens, TOKENS)}")
    if tokens == "cls" and is_decoder:
        raise ModelError(f"tokens = 'cls' is for encoders, but {model.name} is a decoder; {_remedy(model)}")
    if tokens == "cls" and not _has_first_token(model):
        raise ModelError(
            f"tokens = 'cls' needs a first token for the whole input, which {model.name} lacks; {_remedy(model)}"
        )
    if tokens == "content" and model.kind.inputs == "image" and not _has_first_token(model):
        raise ModelError(
            f"tokens = 'content' does not distinguish layers: all tokens of {model.name} are patches; {_remedy(model)}"
        )
    if tokens == "entities" and model.kind.head != "tokens":
        raise ModelError(f"tokens = 'entities' is for token classification tasks; {_remedy(model)}")
    if tokens == "pooled" and not _has_pooled_token(model):
        raise ModelError(
            f"tokens = 'pooled' needs a head that reads one token of each input, which {model.name} lacks; "
            f"{_remedy(model)}"
        )
    if tokens != "auto":
        return tokens
    if model.kind.head == "tokens":
        return "entities"
    if is_decoder:
        return "pooled" if _has_pooled_token(model) else "content"
    return "cls" if _has_first_token(model) else "salient" if model.kind.inputs == "image" else "content"


@dataclass(frozen=True, eq=False)
class _Scores:
    """An attention hook that computes the usual output and stores each layer's score."""

    model: FunctionalModel
    batch: Batch
    tokens: TokenChoice
    attention_mask: torch.Tensor | None  # (example, token)
    layers: dict[torch.nn.Module, str]
    scores: dict[str, torch.Tensor] = field(default_factory=dict)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        causal: bool,
        **modified: Any,
    ) -> torch.Tensor:
        if module not in self.layers:
            return scaled_dot_product(query, key, value, mask, scale, causal, **modified)
        if self.tokens == "pooled":
            rows = self._pooled_rows(query, key, mask, scale, **modified)
            self.scores[self.layers[module]] = self._concentration(rows)
            return scaled_dot_product(query, key, value, mask, scale, causal, **modified)
        width = value.shape[-1]
        padding = (0, KERNEL_WIDTH - width % KERNEL_WIDTH)
        if self.tokens == "salient":
            chosen = _salient(value)
        else:
            chosen = _chosen_tokens(self.model, self.batch, self.tokens, self.attention_mask, key.shape[2])[:, None]
        value = functional.pad(value, padding)
        value[..., width] = chosen.to(value)  # (example, head or 1, token)
        # Fused kernels need query and key as wide as the value. Zero padding does not change their product.
        query, key = functional.pad(query, padding), functional.pad(key, padding)
        out = scaled_dot_product(query, key, value, mask, width**-0.5 if scale is None else scale, causal, **modified)
        self.scores[self.layers[module]] = self._mean_over_queries(out[..., width].float())
        return out[..., :width]

    def from_maps(self, maps: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the scores from the attention maps of all layers, (example, head, query, key) each.

        Raises:
            ModelError: If the module does not return one map for each layer.
        """
        tags = sorted({*self.layers.values()}, key=layer_number)
        if len(maps) != len(tags) or self.tokens == "salient":
            raise ModelError(
                f"{self.model.name} cannot report its attention; use another model, or rank its layers differently"
            )
        for tag, attention in zip(tags, maps, strict=True):
            if self.tokens == "pooled":
                place = self._pooled_place(attention.shape[2])
                self.scores[tag] = self._concentration(attention[torch.arange(len(place)), :, place].float())
                continue
            chosen = _chosen_tokens(self.model, self.batch, self.tokens, self.attention_mask, attention.shape[-1])
            self.scores[tag] = self._mean_over_queries((attention.float() * chosen[:, None, None]).sum(-1))
        return self.scores

    def _pooled_place(self, count: int) -> torch.Tensor:
        """Return the place of the token that the head reads, (example,): the first of an encoder, a decoder's last."""
        mask, device = self.attention_mask, self.batch.targets.device
        valid = torch.ones(len(self.batch.targets), count, device=device) if mask is None else mask
        order = torch.arange(1, count + 1, device=device)
        return (valid.bool() * (order if _is_decoder(self.model) else order.flip(0))).argmax(1)

    def _pooled_rows(
        self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float | None, **modified: Any
    ) -> torch.Tensor:
        """Return the attention of the token that the head reads to all tokens, (example, head, token).

        Without a mask there is no padding, so a decoder's last token attends to all tokens.
        """
        place, rows = self._pooled_place(query.shape[2]), torch.arange(query.shape[0], device=query.device)
        if mask is not None and mask.shape[-2] > 1:
            mask = mask.expand(query.shape[0], -1, -1, -1)[rows, :, place][:, :, None]
        key, _ = for_each_head(query, key, key)
        return probabilities(query[rows, :, place][:, :, None], key, mask, scale, **modified)[:, :, 0].float()

    def _concentration(self, rows: torch.Tensor) -> torch.Tensor:
        """Return 1 - entropy / log(n) of the attention to the n content tokens, (example, head); 0 if n < 2.

        Args:
            rows: The attention of one token to all tokens, (example, head, token).
        """
        chosen = _chosen_tokens(self.model, self.batch, "content", self.attention_mask, rows.shape[-1])
        chosen = chosen.expand(rows.shape[0], -1)[:, None]  # (example, 1, token)
        share = rows.masked_fill(~chosen, 0.0)
        share = share / share.sum(-1, keepdim=True).clamp(min=1e-30)
        entropy = torch.special.entr(share).sum(-1)  # (example, head)
        count = chosen.sum(-1).to(rows.dtype)  # (example, 1)
        score = 1 - entropy / count.clamp(min=2).log()
        return torch.where((count > 1) & (share.sum(-1) > 0), score, 0.0).clamp(0.0, 1.0)

    def _mean_over_queries(self, received: torch.Tensor) -> torch.Tensor:
        """Average (example, head, query) over the queries that are not padding, and over the windows of an image."""
        examples = len(self.batch.targets)
        if received.shape[0] != examples:  # Swin attends within windows: (example x window, head, query)
            return received.mean(-1).unflatten(0, (examples, -1)).mean(1)
        if self.attention_mask is None or self.attention_mask.shape[1] != received.shape[-1]:
            return received.mean(-1)
        attention_mask = self.attention_mask[:, None].to(received)  # (example, 1, token)
        return (received * attention_mask).sum(-1) / attention_mask.sum(-1).clamp(min=1)


def _layers(model: FunctionalModel) -> dict[torch.nn.Module, str]:
    """Map the modules inside layers to layer tags. Each layer makes one attention call, from one of these modules.

    The text tower of a CLIP is left out, and so is the self-attention of a decoder that attends to an encoder.
    """
    every_tag = {**model.frozen_tags, **model.tags}
    of_module: dict[str, set[str | None]] = {}  # the layer tags of all parameters in a module
    for name, tags in every_tag.items():
        parts = name.split(".")
        for count in range(1, len(parts)):
            of_module.setdefault(".".join(parts[:count]), set()).add(None if "text" in tags else layer_tag(tags))
    crossing = any(re.search(CROSS_ATTENTION, path) for path in of_module)
    layers = {}
    for path, part in model.module.named_modules():
        found = of_module.get(path, {None})
        if len(found) == 1 and (tag := next(iter(found))) is not None:
            in_decoder = crossing and re.search(r"(^|\.)decoder\.", path)
            if not in_decoder or re.search(CROSS_ATTENTION, path):
                layers[part] = tag
    return layers


def _salient(value: torch.Tensor) -> torch.Tensor:
    """Choose the half of the tokens with the longest values, (example, head, token).

    The output of attention is a sum of values, so tokens with long values count for more in it.
    """
    lengths = torch.linalg.vector_norm(value.float(), dim=-1)
    middle = (lengths.shape[-1] - 1) // 2
    return lengths > lengths.sort(-1).values[..., middle : middle + 1]  # a median has no deterministic CUDA kernel


def _chosen_tokens(
    model: FunctionalModel, batch: Batch, tokens: TokenChoice, attention_mask: torch.Tensor | None, count: int
) -> torch.Tensor:
    """Return a mask of the chosen tokens, (example, token); one row may stand for all examples."""
    device = batch.targets.device
    if isinstance(tokens, tuple):
        if "input_ids" not in batch.inputs:
            raise ModelError("tokens of words need token ids, which are not cached; set engine.cache_frozen = false")
        return matching_tokens(batch.inputs["input_ids"], word_tokens(model.processor, tokens))
    if tokens == "entities":
        return (batch.targets != IGNORE_INDEX) & (batch.targets != _outside(model))
    valid = torch.ones(1, count, device=device).bool() if attention_mask is None else attention_mask.bool()
    rank = valid.cumsum(1)  # 1 at the first token that is not padding
    if tokens == "cls":
        return valid & (rank == 1)
    if "pixel_values" in batch.inputs:
        return rank > count - _patches(model, batch.inputs["pixel_values"])
    if not _is_decoder(model):  # encoder tokenizers add one special token at each end
        return valid & (rank > 1) & (rank < rank[:, -1:])
    if "input_ids" not in batch.inputs:
        raise ModelError("tokens = 'content' needs token ids, which are not cached; set engine.cache_frozen = false")
    config, special = model.module.config, []
    for token in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        special += token if isinstance(token, list) else [] if token is None else [token]
    ids = batch.inputs["input_ids"]
    positions = batch.inputs.get("position_ids")  # of packed rows, in which each example has a first token
    later = rank > 1 if positions is None else positions > 0
    return valid & later & ~torch.isin(ids, torch.tensor(special, device=device, dtype=ids.dtype))


def _outside(model: FunctionalModel) -> int:
    """Return the index of class "O", the class of tokens outside entities."""
    labels: Any = model.module.config.label2id
    if "O" not in labels:
        raise ModelError(
            f"tokens = 'entities' needs a class 'O' for tokens outside entities, but {model.name} has only: "
            f"{', '.join(labels)}; use BIO tags, or set tokens = 'content'"
        )
    return int(labels["O"])


def _patches(model: FunctionalModel, pixels: torch.Tensor) -> int:
    config: Any = model.module.config
    patch = getattr(config, "vision_config", config).patch_size
    return (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch)


def _is_decoder(model: FunctionalModel) -> bool:
    model_type = str(model.module.config.model_type)
    if is_known(model_type):
        return "lm" in architecture(model_type).heads
    if model.module.config.is_encoder_decoder:
        return False
    return any(getattr(part, "is_causal", False) for part in model.module.modules())


def _has_first_token(model: FunctionalModel) -> bool:
    """Return whether the first token stands for the whole input, as in BERT and ViT."""
    names = [*model.frozen_tags, *model.tags]
    if model.kind.inputs == "image":
        return any(re.search(r"cls_token|class_embedding|class_token", name) for name in names)
    return not _is_decoder(model) and not model.module.config.is_encoder_decoder


def _has_pooled_token(model: FunctionalModel) -> bool:
    """Return whether the head reads one token of each text: an encoder's first, or a decoder's last."""
    return model.kind.head == "text" and not model.only_here and (_is_decoder(model) or _has_first_token(model))


def _words(model: FunctionalModel, tokens: TokenChoice) -> tuple[str, ...]:
    """Return the words to look for: the given ones, or those of the class names."""
    if model.kind.inputs != "text" or model.processor is None:
        raise ModelError(
            f"tokens = {tokens if isinstance(tokens, str) else list(tokens)!r} looks for words in texts with the "
            f"model's tokenizer, but {model.name} has none; {_remedy(model)}"
        )
    if isinstance(tokens, tuple):
        if not tokens or not all(word.strip() for word in tokens):
            raise ModelError(f"tokens is {list(tokens)}; list words of the texts, such as ['tumor', 'cancer']")
        return tokens
    classes: Any = model.module.config.id2label
    if model.kind.outputs != "classes" or not (words := label_words(classes.values())):
        raise ModelError(
            f"tokens = 'labels' needs classes whose names are words, but {model.name} has "
            f"{', '.join(map(str, list(classes.values())[:3]))}; list the words: tokens = ['tumor', 'cancer']"
        )
    return words


def _remedy(model: FunctionalModel) -> str:
    first = _has_first_token(model)
    unfit = {"cls"} if not first else set()
    unfit |= {"content"} if model.kind.inputs == "image" and not first else set()
    unfit |= {"entities"} if model.kind.head != "tokens" else set()
    unfit |= {"salient"} if model.kind.inputs != "image" else set()
    unfit |= {"pooled"} if not _has_pooled_token(model) else set()
    unfit |= {"labels"} if model.kind.inputs != "text" or model.kind.outputs != "classes" else set()
    fit = [word for word in TOKENS[1:] if word not in unfit]
    return f"set it to 'auto', {' or '.join(repr(word) for word in fit)}"


def head_dimensions(model: FunctionalModel) -> dict[str, tuple[int, int]]:
    """Find the parameters that are divided into attention heads.

    These are the attention projections and their biases. Low-rank factors are excluded, because one factor of each pair
    is shared by all heads.

    Returns:
        For each parameter name, the dimension that is divided and the number of heads.
    """
    config: Any = model.module.config
    config = getattr(config, "vision_config", config)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise TagError(f"{model.name} has no one number of heads for all layers; prune differently")
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    transposed = architecture(str(model.module.config.model_type)).transposed
    dimensions = {}
    for name, tags in model.tags.items():
        role, matrix = role_tag(tags - {"lora"}), model.initial[name].ndim == 2
        if "lora" in tags or "text" in tags or role not in ("query", "key", "value", "output"):
            continue
        if role == "output":
            if matrix:
                dimensions[name] = (0 if transposed else 1, heads)
        elif matrix or name.endswith(".bias"):  # a norm of queries or keys is one for all heads
            dimensions[name] = (int(matrix and transposed), heads if role == "query" else shared)
    return dimensions
