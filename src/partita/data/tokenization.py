"""Texts to tokens, by the tokenizer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.data.errors import DataError, first_line

REMEDY = "give a folder that holds a tokenizer's files, or an id of the Hub"


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A tokenizer, and how many tokens a row may have."""

    tokenizer: Any
    limit: int

    @property
    def end(self) -> list[int]:
        """The token that parts texts, where there is one."""
        token = self.tokenizer.eos_token_id
        return [] if token is None else [token]

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """With the special tokens that the model knows a text by, and no longer than the limit."""
        return self._encode(texts, truncation=True, max_length=self.limit)

    def bare(self, texts: Sequence[str]) -> list[list[int]]:
        """Without special tokens, and as long as they are."""
        return self._encode(texts, add_special_tokens=False)

    def words(self, sentences: Sequence[Sequence[str]]) -> list[tuple[list[int], list[int]]]:
        """For each sentence its tokens, and the place of each word's first one.

        A word that the tokenizer makes nothing of, such as a lone control character, is an unknown word.
        """
        found = self._first_pieces(sentences)
        for number, (_, firsts) in enumerate(found):
            if None in firsts:
                unknown = self.tokenizer.unk_token
                words = [
                    word if first is not None else unknown
                    for word, first in zip(sentences[number], firsts, strict=True)
                ]
                if None in words:
                    word = sentences[number][firsts.index(None)]
                    raise DataError(f"the tokenizer makes nothing of the word {word!r}; leave it out")
                [found[number]] = self._first_pieces([words])
        return found  # type: ignore[return-value]

    def _first_pieces(self, sentences: Sequence[Sequence[str]]) -> list[tuple[list[int], list[int | None]]]:
        encoded = self.tokenizer([list(words) for words in sentences], is_split_into_words=True, verbose=False)
        found = []
        for number, words in enumerate(sentences):
            firsts: list[int | None] = [None] * len(words)
            for place, word in reversed(list(enumerate(encoded.word_ids(number)))):
                if word is not None:
                    firsts[word] = place
            found.append((encoded["input_ids"][number], firsts))
        return found

    def _encode(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        encoded = self.tokenizer(
            list(texts), return_attention_mask=False, return_token_type_ids=False, verbose=False, **options
        )
        rows: list[list[int]] = encoded["input_ids"]
        return rows


def text_encoder(path: str | None, limit: int, words: bool = False) -> TextEncoder:
    """The tokenizer of a folder or of the Hub; `words` is for texts that come as words."""
    from transformers import AutoTokenizer  # slow to import, and only tasks of text need it

    if path is None:
        raise DataError(
            "a task of text needs a tokenizer; set data.tokenizer, or a model with a path, whose own is used"
        )
    # A tokenizer of bytes tells words by the space before them.
    options = {"add_prefix_space": True} if words else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:  # of many kinds, where one of its files is broken
        raise DataError(f"cannot load the tokenizer '{path}': {first_line(error)}; {REMEDY}") from error
    # Where a folder lacks the vocabulary, transformers makes a tokenizer that knows no word.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise DataError(f"the tokenizer '{path}' has no words; {REMEDY}")
    if words and not tokenizer.is_fast:
        raise DataError(f"the tokenizer '{path}' cannot tell which word a token is of; give one with a tokenizer.json")
    least, most = tokenizer.num_special_tokens_to_add() + 1, min(tokenizer.model_max_length, _positions(path))
    if not least <= limit <= most:
        raise DataError(
            f"rows of {limit} tokens do not suit '{path}', which takes {least} to {most}; set another length"
        )
    return TextEncoder(tokenizer, limit)


def _positions(path: str) -> int:
    """How long a row the model beside the tokenizer takes; where there is none, that is left to the tokenizer."""
    from transformers import AutoConfig

    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        return 10**9
    try:
        return int(
            getattr(AutoConfig.from_pretrained(path, trust_remote_code=False), "max_position_embeddings", None) or 10**9
        )
    except (OSError, ValueError):
        return 10**9
