"""Token classification tasks: sentences with one BIO tag per word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from partita.core.data import IGNORE_INDEX
from partita.core.options import Count, format_value
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.labels import label_lists
from partita.data.loading import DataPath, Dataset, DatasetPart, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.ragged import RaggedExamples, ragged
from partita.data.task import Task, text_task
from partita.data.tokenization import TextEncoder, text_encoder
from partita.tasks import TOKENS

TAG = re.compile(r"O|[BI]-.+")

WordTokenizer = Annotated[str | None, "folder or Hub id; default: the model's tokenizer"]
MaxTokens = Annotated[Count, "maximum number of tokens per sentence"]
Truncate = Annotated[bool, "truncate longer sentences instead of raising an error"]


def tokens(
    path: DataPath,
    key: Key,
    tokens: Annotated[str, "column with the list of words"] = "tokens",
    tags: Annotated[str, "column with the list of BIO tags"] = "tags",
    tokenizer: WordTokenizer = None,
    max_length: MaxTokens = 256,
    truncate: Truncate = False,
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
) -> Task:
    """Token classification from a column of words and a column of BIO tags (O, B-type, I-type).

    The first token of a word carries its tag. Sentences of more than `max_length` tokens raise an error. With
    `truncate` they are truncated, and the words beyond are neither trained on nor scored.
    """
    source = load_dataset(path, key, config, test)
    return tagged_words(source, key, tokens, tags, tokenizer, max_length, truncate, limit)


def tagged_words(
    source: Dataset,
    key: Key,
    tokens: str,
    tags: str,
    tokenizer: str | None,
    max_length: int,
    truncate: bool,
    limit: int | None,
) -> Task:
    """Build the task from a dataset. The arguments are as in `tokens`."""
    words = [_words(part, tokens, tags) for part in (source.train, source.test)]
    classes, *numbers = label_lists(source, tags)
    if not any(classes[number] != "O" for rows in numbers for row in rows for number in row):
        raise DataError(f"no word of '{source.path}' has an entity tag in '{tags}'; tag some, or name another column")
    pairs = [list(zip(*each, strict=True)) for each in zip(words, numbers, strict=True)]
    source, pairs = limit_rows(source, limit, key, pairs)
    encode = text_encoder(tokenizer, max_length, words=True)
    tables = []
    for part, rows in zip((source.train, source.test), pairs, strict=True):
        sentences, tagged = [row for row, _ in rows], [row for _, row in rows]
        _check_tags(part, classes, sentences, tagged)
        tables.append(_aligned(part, encode, sentences, tagged, truncate))
    train, held_out = tables
    columns, test_columns = source.train.columns(), source.test.columns()
    return text_task(source.name, train, held_out, classes, columns, TOKENS, encode.tokenizer, test_columns)


def _words(part: DatasetPart, tokens: str, tags: str) -> list[list[str]]:
    part.need(tokens, tags)
    for column in (tokens, tags):
        if not hasattr(part.data.features[column], "feature"):
            raise DataError(
                f"column '{column}' of {part.where} holds no lists with one item per word; name a column that does"
            )
    sentences: list[list[str]] = part.values(tokens)
    for place, words in enumerate(sentences):
        if not words:
            raise DataError(f"{part.row(place)} has no words in '{tokens}'; remove the row")
        if not all(isinstance(word, str) for word in words):
            raise DataError(f"{part.row(place)} has an item in '{tokens}' that is not text; convert it to text")
    return sentences


def _check_tags(part: DatasetPart, classes: Sequence[str], sentences: list[list[str]], tagged: list[list[int]]) -> None:
    for name in classes:
        if not TAG.fullmatch(name):
            raise DataError(
                f"{format_value(name)} in {part.where} is not a BIO tag; use O, B-type and I-type, such as B-Chemical"
            )
    for place, (words, numbers) in enumerate(zip(sentences, tagged, strict=True)):
        if len(words) != len(numbers):
            raise DataError(f"{part.row(place)} has {len(words)} words, but {len(numbers)} tags; give one tag per word")
        before = "O"
        for tag in (classes[number] for number in numbers):
            if tag.startswith("I-") and before[2:] != tag[2:]:
                begin = format_value(f"B-{tag[2:]}")
                raise DataError(
                    f"{part.row(place)} has {format_value(tag)} after {format_value(before)}; an entity must "
                    f"start with {begin}"
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
    for (ids, word_starts), numbers in zip(encoded, tagged, strict=True):
        row = [IGNORE_INDEX] * len(ids)
        for first, number in zip(word_starts, numbers, strict=True):
            row[first] = number
        targets.append(row[: encode.limit])
    return ragged([ids[: encode.limit] for ids, _ in encoded], encode.limit, tags=targets)
