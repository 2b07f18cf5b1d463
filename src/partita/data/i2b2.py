"""Concepts in the format of the i2b2 2010 challenge: NAME.txt with words, and NAME.con with concepts."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Annotated

from partita.core.options import closest_match, format_value
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.loading import Limit, TestPart
from partita.data.standoff import Document, DocumentFiles, Entity, StandoffPath, read_text, standoff_dataset
from partita.data.task import Task
from partita.data.text import Overlap
from partita.data.tokens import LongSentences, MaxTokens, WordTokenizer, tagged_words

CONCEPT = re.compile(r'c="(.*)" (\d+):(\d+) (\d+):(\d+)\|\|t="([^"]*)"\s*')
TYPES = ("problem", "test", "treatment")


def i2b2(
    path: StandoffPath,
    key: Key,
    types: Annotated[tuple[str, ...], "the concept types; any other is an error"] = TYPES,
    tokenizer: WordTokenizer = None,
    max_length: MaxTokens = 256,
    test: TestPart = 0.2,
    limit: Limit = None,
    long_texts: LongSentences = "error",
    overlap: Overlap = None,
) -> Task:
    """Concepts from i2b2 2010 files: NAME.txt with one sentence per line, and NAME.con with the concepts.

    Rows are lines and have the columns `document` and `folder`. Words are what spaces separate. Without a folder
    "test", whole documents are held out. Of concepts that overlap, the longest is kept; a warning counts the others.
    """

    def read(files: DocumentFiles) -> Document:
        return read_i2b2(files, types)

    source = standoff_dataset(path, key, ".con", read, test)
    return tagged_words(source, key, "tokens", "tags", tokenizer, max_length, limit, long_texts, overlap)


def read_i2b2(files: DocumentFiles, types: tuple[str, ...] = TYPES) -> Document:
    """Read a document.

    Args:
        files: Its files.
        types: The concept types.

    Raises:
        DataError: If a concept does not fit the text or has another type. It names the file and the line.
    """
    lines = [line.split() for line in read_text(files.text).split("\n")]
    starts = [0, *accumulate(map(len, lines))]
    words = [word for line in lines for word in line]
    entities = []
    for number, text in enumerate(read_text(files.annotations).split("\n"), 1):
        where = f"line {number} of '{files.annotations}'"
        if not text.strip():
            continue
        match = CONCEPT.fullmatch(text)
        if match is None:
            raise DataError(f"{where} is no concept of i2b2: {format_value(text)}; correct or remove it")
        if match[6] not in types:
            raise DataError(f"{where} has the unknown type {format_value(match[6])}; {closest_match(match[6], types)}")
        first, last = ((int(match[place]), int(match[place + 1])) for place in (2, 4))
        for line, word in (first, last):
            if not 1 <= line <= len(lines) or word >= len(lines[line - 1]):
                raise DataError(f"{where} is for word {word} of line {line}, which '{files.text}' lacks; correct it")
        start, end = starts[first[0] - 1] + first[1], starts[last[0] - 1] + last[1] + 1
        found = " ".join(words[start:end])
        if start >= end or found.casefold() != " ".join(match[1].split()).casefold():
            raise DataError(
                f"{where} says {format_value(match[1])}, but the text has {format_value(found)} there; do the files "
                "belong together?"
            )
        entities.append(Entity(start, end, match[6]))
    return Document(words, starts[1:-1], entities)
