"""Token classification tasks: sentences with one BIO tag per word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch

from partita.core.data import IGNORE_INDEX
from partita.core.options import Count, format_value
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.labels import label_lists
from partita.data.loading import DataPath, Dataset, DatasetPart, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.ragged import RaggedExamples, ragged
from partita.data.task import Task, text_task
from partita.data.text import Overlap, cut_notes
from partita.data.token_rows import CutCounter
from partita.data.tokenization import Window, text_encoder
from partita.tasks import TOKENS

TAG = re.compile(r"O|[BI]-.+")

WordTokenizer = Annotated[str | None, "folder or Hub id; default: the model's tokenizer"]
MaxTokens = Annotated[Count, "maximum number of tokens per sentence"]
LongSentences = Annotated[
    Literal["cut", "windows", "error"],
    "sentences of more than `max_length` tokens: `cut` drops the rest, with a warning; `windows` makes several "
    "examples of a sentence; `error` stops",
]


def tokens(
    path: DataPath,
    key: Key,
    tokens: Annotated[str, "column with the list of words"] = "tokens",
    tags: Annotated[str, "column with the list of BIO tags"] = "tags",
    tokenizer: WordTokenizer = None,
    max_length: MaxTokens = 256,
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
    long_texts: LongSentences = "error",
    overlap: Overlap = None,
) -> Task:
    """Token classification from a column of words and a column of BIO tags (O, B-type, I-type).

    The first token of a word carries its tag. With `long_texts = "windows"`, a longer sentence becomes several training
    examples, all at one client and in one part. Each word is trained on and scored in one window only, the one with the
    most tokens around it; in the others it is context. Scores are those of whole sentences.
    """
    source = load_dataset(path, key, config, test)
    return tagged_words(source, key, tokens, tags, tokenizer, max_length, limit, long_texts, overlap)


def tagged_words(
    source: Dataset,
    key: Key,
    tokens: str,
    tags: str,
    tokenizer: str | None,
    max_length: int,
    limit: int | None,
    long_texts: str,
    overlap: int | None,
) -> Task:
    """Build the task from a dataset. The arguments are as in `tokens`."""
    words = [_words(part, tokens, tags) for part in (source.train, source.test)]
    classes, *numbers = label_lists(source, tags)
    if not any(classes[number] != "O" for rows in numbers for row in rows for number in row):
        raise DataError(f"no word of '{source.path}' has an entity tag in '{tags}'; tag some, or name another column")
    pairs = [list(zip(*each, strict=True)) for each in zip(words, numbers, strict=True)]
    source, pairs = limit_rows(source, limit, key, pairs)
    encode = text_encoder(tokenizer, max_length, words=True)
    shared = max_length // 4 if overlap is None else overlap
    if long_texts == "windows":
        encode.check_overlap(shared)
    cut = CutCounter()
    tables = []
    for part, rows in zip((source.train, source.test), pairs, strict=True):
        sentences, tagged = [row for row, _ in rows], [row for _, row in rows]
        _check_tags(part, classes, sentences, tagged)
        encoded = encode.words(sentences)
        found = CutCounter()
        found.add(enumerate(len(ids) for ids, _ in encoded), max_length)
        if found.texts and long_texts == "error":
            assert found.first is not None
            raise DataError(
                f"{found.texts} of {len(encoded)} sentences are longer than max_length = {max_length} tokens, the "
                f"first is {part.row(found.first)} with {found.length}; raise max_length, or set long_texts to "
                "'windows' or 'cut'"
            )
        cut += found
        targets = [_targets(ids, starts, numbers) for (ids, starts), numbers in zip(encoded, tagged, strict=True)]
        step = shared if long_texts == "windows" else None
        windows = [encode.word_windows(ids, starts[0], step) for ids, starts in encoded]
        tables.append(_examples(encoded, targets, windows, max_length, long_texts == "windows"))
    train, held_out = tables
    notes = () if long_texts == "windows" else cut_notes(source, cut, sum(map(len, pairs)), encode)
    columns, test_columns = source.train.columns(), source.test.columns()
    return text_task(source.name, train, held_out, classes, columns, TOKENS, encode.tokenizer, notes, test_columns)


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


def _targets(ids: Sequence[int], word_starts: Sequence[int], numbers: Sequence[int]) -> list[int]:
    """Return the target of each token: the tag of a word at its first token."""
    row = [IGNORE_INDEX] * len(ids)
    for first, number in zip(word_starts, numbers, strict=True):
        row[first] = number
    return row


def _examples(
    encoded: Sequence[tuple[Sequence[int], Sequence[int]]],
    targets: Sequence[Sequence[int]],
    windows: Sequence[Sequence[Window]],
    limit: int,
    several: bool,
) -> RaggedExamples:
    """Return one example for each window of a sentence."""
    rows, tags, documents = [], [], []
    for number, ((ids, _), row, of_sentence) in enumerate(zip(encoded, targets, windows, strict=True)):
        for window in of_sentence:
            rows.append([ids[place] for place in window.places])
            tags.append([row[place] if place in window.own else IGNORE_INDEX for place in window.places])
            documents.append(number)
    examples = ragged(rows, limit, tags=tags)
    return replace(examples, documents=torch.tensor(documents, dtype=torch.long)) if several else examples
