"""Tokenization of texts with a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from partita.core.given import given, is_given
from partita.core.hub import offline_reason
from partita.data.errors import DataError, first_line

REMEDY = "give a folder with the tokenizer's files, or a Hub id"


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A tokenizer with a maximum number of tokens per row, `limit`."""

    tokenizer: Any
    limit: int
    longest: int = 10**9  # the largest limit that the tokenizer and its model allow
    digest: str = ""  # of the tokenizer; empty if its content cannot be hashed

    @property
    def end(self) -> list[int]:
        """The end-of-text token as a list; empty if the tokenizer has none."""
        token = self.tokenizer.eos_token_id
        return [] if token is None else [token]

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts with special tokens, truncated to the limit."""
        return self._encode(texts, truncation=True, max_length=self.limit)

    def with_special_tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts with special tokens and without truncation."""
        return self._encode(texts)

    def pairs(self, texts: Sequence[str], seconds: Sequence[str]) -> tuple[list[list[int]], list[list[int]] | None]:
        """Tokenize pairs of texts with special tokens. The longer text of a pair is truncated first.

        Returns:
            The tokens of each pair, and which text each token belongs to; None if the tokenizer's model does not use
            that (`token_type_ids`).

        Raises:
            DataError: If the tokenizer puts nothing between two texts, or the limit has no room for both.
        """
        name, special = self.tokenizer.name_or_path, self.tokenizer.num_special_tokens_to_add(pair=True)
        if not texts:
            return [], None
        if not special:
            raise DataError(
                f"the tokenizer '{name}' puts nothing between the two texts of a pair; join them in one column, or use "
                "a model that takes pairs, such as BERT or RoBERTa"
            )
        if self.limit < special + 2:
            raise DataError(
                f"max_length = {self.limit} has no room for a pair of texts; '{name}' needs at least {special + 2} "
                "tokens; raise data.max_length"
            )
        typed = "token_type_ids" in self.tokenizer.model_input_names
        encoded = self.tokenizer(
            list(texts),
            list(seconds),
            truncation="longest_first",
            max_length=self.limit,
            return_attention_mask=False,
            return_token_type_ids=typed,
            verbose=False,
        )
        return encoded["input_ids"], encoded["token_type_ids"] if typed else None

    def target_texts(self, texts: Sequence[str], truncated: bool = True) -> list[list[int]]:
        """Tokenize texts that a decoder writes, with special tokens. Some models have other tokens for them."""
        if not texts:
            return []
        options: dict[str, Any] = {"truncation": True, "max_length": self.limit} if truncated else {}
        rows: list[list[int]] = self.tokenizer(
            text_target=list(texts),
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )["input_ids"]
        return rows

    def lengths(
        self, texts: Sequence[str], rows: Sequence[Sequence[int]], seconds: Sequence[str] | None = None
    ) -> list[int]:
        """Return the number of tokens of each text without truncation.

        Args:
            texts: The texts.
            rows: Their tokens, truncated to the limit.
            seconds: The second text of each pair, if the texts are pairs.
        """

        def complete(places: Sequence[int]) -> list[list[int]]:
            pairs = {} if seconds is None else {"text_pair": [seconds[place] for place in places]}
            return self._encode([texts[place] for place in places], **pairs)

        return self._lengths(rows, complete)

    def target_lengths(self, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> list[int]:
        """Return the number of tokens of each text that a decoder writes, without truncation.

        Args:
            texts: The texts.
            rows: Their tokens, truncated to the limit.
        """
        return self._lengths(rows, lambda places: self.target_texts([texts[place] for place in places], False))

    def _lengths(
        self, rows: Sequence[Sequence[int]], complete: Callable[[Sequence[int]], list[list[int]]]
    ) -> list[int]:
        """Tokenize only those rows again that are as long as the limit."""
        found = [len(ids) for ids in rows]
        full = [place for place, length in enumerate(found) if length == self.limit]
        for place, ids in zip(full, complete(full) if full else [], strict=True):
            found[place] = len(ids)
        return found

    def windows(self, texts: Sequence[str], overlap: int) -> tuple[list[list[int]], list[int]]:
        """Tokenize texts and cut them into windows of at most `limit` tokens, each with special tokens.

        Args:
            texts: The texts.
            overlap: Tokens that consecutive windows of a text share.

        Returns:
            The windows, and for each the number of its text.
        """
        encoded = self.tokenizer(
            list(texts),
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            truncation=True,
            max_length=self.limit,
            stride=overlap,
            return_overflowing_tokens=True,
        )
        return encoded["input_ids"], encoded["overflow_to_sample_mapping"]

    def word_windows(self, ids: Sequence[int], before: int, overlap: int | None) -> list[Window]:
        """Cut a tokenized sentence into windows of at most `limit` tokens, each with the special tokens.

        Args:
            ids: The tokens of the sentence, with special tokens at its ends.
            before: Number of special tokens before the first word.
            overlap: Tokens that consecutive windows share; None for the first window only.
        """
        if len(ids) <= self.limit:
            return [Window(range(len(ids)), range(len(ids)))]
        if overlap is None:
            return [Window(range(self.limit), range(self.limit))]
        specials: int = self.tokenizer.num_special_tokens_to_add()
        stop, room = len(ids) - (specials - before), self.limit - specials
        starts = [*range(before, stop - room, room - overlap), stop - room]
        return [
            Window((*range(before), *range(start, start + room), *range(stop, len(ids))), _own(starts, number, room))
            for number, start in enumerate(starts)
        ]

    def check_overlap(self, overlap: int) -> None:
        """Raise a DataError if windows cannot overlap by so many tokens."""
        room = self.limit - self.tokenizer.num_special_tokens_to_add()
        if overlap >= room:
            raise DataError(
                f"overlap is {overlap}, but a window of {self.limit} tokens holds only {room} of a text; set "
                f"data.overlap to at most {room - 1}, or raise data.max_length"
            )
        if not self.tokenizer.is_fast:
            raise DataError("this tokenizer cannot cut texts into windows; give one with a tokenizer.json")

    def without_special_tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts without special tokens and without truncation."""
        return self._encode(texts, add_special_tokens=False)

    def words(self, sentences: Sequence[Sequence[str]]) -> list[tuple[list[int], list[int]]]:
        """Tokenize sentences that are already split into words.

        A word without any token, such as a single control character, is replaced by the unknown token.

        Returns:
            For each sentence, its tokens and the index of each word's first token.

        Raises:
            DataError: If a word has no token and the tokenizer has no unknown token.
        """
        encoded = self._word_starts(sentences)
        for number, (_, word_starts) in enumerate(encoded):
            if None in word_starts:
                unknown = self.tokenizer.unk_token
                words = [
                    word if first is not None else unknown
                    for word, first in zip(sentences[number], word_starts, strict=True)
                ]
                if None in words:
                    word = sentences[number][word_starts.index(None)]
                    raise DataError(f"the tokenizer has no token for the word {word!r}; remove the word")
                [encoded[number]] = self._word_starts([words])
        return encoded  # type: ignore[return-value]

    def _word_starts(self, sentences: Sequence[Sequence[str]]) -> list[tuple[list[int], list[int | None]]]:
        encoded = self.tokenizer([list(words) for words in sentences], is_split_into_words=True, verbose=False)
        rows = []
        for number, words in enumerate(sentences):
            word_starts: list[int | None] = [None] * len(words)
            for place, word in reversed(list(enumerate(encoded.word_ids(number)))):
                if word is not None:
                    word_starts[word] = place
            rows.append((encoded["input_ids"][number], word_starts))
        return rows

    def _encode(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts), return_attention_mask=False, return_token_type_ids=False, verbose=False, **options
        )
        rows: list[list[int]] = encoded["input_ids"]
        return rows


@dataclass(frozen=True)
class Window:
    """A part of a tokenized sentence.

    Attributes:
        places: The tokens of the window, by their place in the sentence.
        own: The tokens that have more tokens around them in this window than in any other.
    """

    places: Sequence[int]
    own: range


def _own(starts: Sequence[int], number: int, room: int) -> range:
    """Return the tokens of window `number`. Two windows meet in the middle of the tokens that they share."""
    first = 0 if number == 0 else (starts[number] + starts[number - 1] + room) // 2
    after = (starts[number + 1] + starts[number] + room) // 2 if number + 1 < len(starts) else 10**18
    return range(first, after)


def text_encoder(path: str | None, limit: int, words: bool = False, option: str = "max_length") -> TextEncoder:
    """Load a tokenizer for rows of at most `limit` tokens.

    Args:
        path: Folder or Hub id.
        limit: Maximum number of tokens per row.
        words: Whether the texts are already split into words.
        option: Option of the task that sets the limit, for the error message.

    Raises:
        DataError: If the tokenizer cannot be loaded, does not fit word-level data, or does not support the limit.
    """
    if path is None or not has_tokenizer(path):
        raise DataError(
            "a text task needs a tokenizer; set data.tokenizer, or model.path to use the model's tokenizer; with "
            "objects, partita.from_dataset(..., tokenizer=...)"
        )
    tokenizer, shortest, longest = load_tokenizer(path, words)
    if not shortest <= limit <= longest:
        raise DataError(
            f"'{path}' takes rows of {shortest} to {longest} tokens, not {limit}; set data.{option} in that range"
        )
    return TextEncoder(tokenizer, limit, longest, _digest(tokenizer))


def _digest(tokenizer: Any) -> str:
    """Hash everything that decides how texts become tokens."""
    if not tokenizer.is_fast:
        return ""
    content = f"{version('transformers')} {version('tokenizers')} {tokenizer.backend_tokenizer.to_str()}"
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def load_tokenizer(path: str, words: bool = False) -> tuple[Any, int, int]:
    """Load a tokenizer.

    Args:
        path: Folder or Hub id.
        words: Whether the texts are already split into words.

    Returns:
        `(tokenizer, shortest, longest)`: the tokenizer, and the numbers of tokens that a row may have.

    Raises:
        DataError: If the tokenizer cannot be loaded, or does not fit word-level data.
    """
    if is_given(path):
        return _given_tokenizer(path, words)
    from transformers import AutoTokenizer  # slow to import, and only text tasks need it

    # Byte-level tokenizers mark the start of a word by the space before it.
    options = {"add_prefix_space": True} if words else {}
    try:
        offline = Path(path).is_dir() or offline_reason() is not None
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=offline, **options)
    except Exception as error:  # a broken file can raise many exception types
        raise DataError(f"cannot load the tokenizer '{path}': {first_line(error)}; {REMEDY}") from error
    # If a folder lacks the vocabulary, transformers builds a tokenizer with special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise DataError(
            f"'{path}' has no tokenizer; copy the files of the original model's tokenizer into the folder, or set "
            "data.tokenizer to that model"
        )
    if words and not tokenizer.is_fast:
        raise DataError(f"the tokenizer '{path}' cannot map tokens to words; give one with a tokenizer.json")
    return tokenizer, tokenizer.num_special_tokens_to_add() + 1, min(tokenizer.model_max_length, _positions(path))


def has_tokenizer(path: str) -> bool:
    """Return whether an object that was handed over is a tokenizer, and not a model; True for a folder and a Hub id."""
    return not is_given(path) or hasattr(given(path).value, "all_special_ids")


def _given_tokenizer(path: str, words: bool) -> tuple[Any, int, int]:
    """Return a tokenizer that was handed over, as `load_tokenizer` does."""
    tokenizer = given(path).value
    if words and not tokenizer.is_fast:
        raise DataError("the tokenizer cannot map tokens to words; hand over a fast one")
    if words and getattr(tokenizer, "add_prefix_space", True) is False:
        raise DataError("the tokenizer does not take words; load it with add_prefix_space=True")
    return tokenizer, tokenizer.num_special_tokens_to_add() + 1, min(tokenizer.model_max_length, _positions(path))


def decoder_tokens(path: str) -> tuple[int, int]:
    """Return the tokens with which the decoder of the model in the tokenizer's folder starts and ends a text.

    Raises:
        DataError: If there is no config of a model that writes texts.
    """
    config = _config(path)
    start, end = (getattr(config, f"{name}_token_id", None) for name in ("decoder_start", "eos"))
    if not getattr(config, "is_encoder_decoder", False) or start is None or end is None:
        raise DataError(
            f"the config of '{path}' is not that of an encoder-decoder with decoder_start_token_id and eos_token_id; "
            "set model.path, or data.tokenizer, to a folder or Hub id of one, such as 'google-t5/t5-small'"
        )
    return int(start), int(end[0] if isinstance(end, list) else end)


def _config(path: str) -> Any:
    """Return the config of the model in the tokenizer's folder, or None if there is no model."""
    if is_given(path):
        return given(path).config
    from transformers import AutoConfig

    folder = Path(path).is_dir()
    if folder and not (Path(path) / "config.json").is_file():
        return None
    offline = folder or offline_reason() is not None
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=offline)
    except (OSError, ValueError):
        return None


def _positions(path: str) -> int:
    """Return the maximum row length of the model in the tokenizer's folder, or 10**9 if there is no model."""
    config = _config(path)
    return int(getattr(config, "max_position_embeddings", None) or 10**9)
