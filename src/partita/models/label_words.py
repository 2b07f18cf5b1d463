"""Find words in tokenized texts: those of the class names, or given ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

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
