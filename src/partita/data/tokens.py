"""Sentences in which entities are told by a tag for each word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from partita.core.data import IGNORE_INDEX
from partita.core.options import Count, format_value
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.labels import label_lists
from partita.data.loading import DatasetPart, TestPart, load_dataset
from partita.data.ragged import RaggedExamples, ragged
from partita.data.task import Task
from partita.data.tokenization import TextEncoder, text_encoder

TAG = re.compile(r"O|[BI]-.+")


def tokens(
    path: Annotated[str | Path, "file, folder, or id of the Hugging Face Hub"],
    key: Key,
    tokens: Annotated[str, "column of the words"] = "tokens",
    tags: Annotated[str, "column of their BIO tags"] = "tags",
    tokenizer: Annotated[str | None, "folder or id of the Hub; the model's own if left out"] = None,
    max_length: Annotated[Count, "most tokens of a sentence"] = 256,
    truncate: Annotated[bool, "cut longer sentences instead of refusing them"] = False,
    config: Annotated[str | None, "configuration of a data set of the Hub"] = None,
    test: Annotated[TestPart, "part to test on, or share of the rows to hold out where there is no test part"] = 0.2,
) -> Task:
    """Token classification: columns of words and of their BIO tags (O, B-type, I-type).

    The first token of a word bears its tag. Sentences of more than `max_length` tokens are refused, unless `truncate`
    says that they may be cut, and the words beyond go untold.
    """
    source = load_dataset(path, key, config, test)
    parts = (source.train, source.test)
    words = [_words(part, tokens, tags) for part in parts]
    classes, *numbers = label_lists(source, tags)
    encode = text_encoder(tokenizer, max_length, words=True)
    tables = []
    for part, sentences, tagged in zip(parts, words, numbers, strict=True):
        _check_tags(part, classes, sentences, tagged)
        tables.append(_aligned(part, encode, sentences, tagged, truncate))
    train, held_out = tables
    vocabulary = max(train.words(), held_out.words())
    return Task(source.name, train, held_out, classes, source.train.columns(), kind="tokens", words=vocabulary)


def _words(part: DatasetPart, tokens: str, tags: str) -> list[list[str]]:
    part.need(tokens, tags)
    for column in (tokens, tags):
        if not hasattr(part.data.features[column], "feature"):
            raise DataError(
                f"column '{column}' of {part.where} holds no lists, one item a word; name the one that does"
            )
    sentences: list[list[str]] = part.values(tokens)
    for place, words in enumerate(sentences):
        if not words:
            raise DataError(f"{part.row(place)} has no words in '{tokens}'; leave the row out")
        if not all(isinstance(word, str) for word in words):
            raise DataError(f"{part.row(place)} has something else than words in '{tokens}'; make it texts")
    return sentences


def _check_tags(part: DatasetPart, classes: Sequence[str], sentences: list[list[str]], tagged: list[list[int]]) -> None:
    for name in classes:
        if not TAG.fullmatch(name):
            raise DataError(
                f"{format_value(name)} is no tag of an entity; use O, B-type and I-type, as in B-Chemical, "
                f"in {part.where}"
            )
    for place, (words, numbers) in enumerate(zip(sentences, tagged, strict=True)):
        if len(words) != len(numbers):
            raise DataError(f"{part.row(place)} has {len(words)} words, but {len(numbers)} tags; give each word one")
        before = "O"
        for tag in (classes[number] for number in numbers):
            if tag.startswith("I-") and before[2:] != tag[2:]:
                begin = format_value(f"B-{tag[2:]}")
                raise DataError(
                    f"{part.row(place)} has {format_value(tag)} after {format_value(before)}; an entity begins "
                    f"with {begin}"
                )
            before = tag


def _aligned(
    part: DatasetPart, encode: TextEncoder, sentences: list[list[str]], tagged: list[list[int]], truncate: bool
) -> RaggedExamples:
    encoded = encode.words(sentences)
    long = [place for place, (ids, _) in enumerate(encoded) if len(ids) > encode.limit]
    if long and not truncate:
        raise DataError(
            f"{len(long)} of {len(encoded)} sentences are longer than max_length = {encode.limit} tokens, the first is "
            f"{part.row(long[0])} with {len(encoded[long[0]][0])}; raise max_length, or set truncate = true"
        )
    targets = []
    for (ids, firsts), numbers in zip(encoded, tagged, strict=True):
        row = [IGNORE_INDEX] * len(ids)
        for first, number in zip(firsts, numbers, strict=True):
            row[first] = number
        targets.append(row[: encode.limit])
    return ragged([ids[: encode.limit] for ids, _ in encoded], encode.limit, tags=targets)
