"""Running text, of which each next token is to be told."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np

from partita.core.options import Count, format_value
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.loading import DatasetPart, TestPart, load_dataset
from partita.data.ragged import RaggedExamples, ragged
from partita.data.task import Task
from partita.data.tokenization import TextEncoder, text_encoder


def lm(
    path: Annotated[str | Path, "file, folder, or id of the Hugging Face Hub"],
    key: Key,
    text: Annotated[str, "column of the texts"] = "text",
    tokenizer: Annotated[str | None, "folder or id of the Hub; the model's own if left out"] = None,
    block_size: Annotated[Count, "tokens in an example"] = 128,
    group: Annotated[str | None, "column by whose values texts are joined, such as an author"] = None,
    config: Annotated[str | None, "configuration of a data set of the Hub"] = None,
    test: Annotated[TestPart, "part to test on, or share of the rows to hold out where there is no test part"] = 0.2,
) -> Task:
    """Causal language modelling. The rows that share a value of the column `group` (without it: all rows) are joined in
    their order, with the tokenizer's end token after each, and cut into blocks of so many tokens.

    For a client of its own for each value, split by_column on the same column.
    """
    source = load_dataset(path, key, config, test)
    encode = text_encoder(tokenizer, block_size)
    train, names = _blocks(source.train, encode, text, group)
    held_out, _ = _blocks(source.test, encode, text, group)
    columns = {} if group is None else {group: np.array(names)}
    words = max(train.words(), held_out.words())
    return Task(source.name, train, held_out, (), columns, kind="lm", words=words)


def _blocks(part: DatasetPart, encode: TextEncoder, text: str, group: str | None) -> tuple[RaggedExamples, list[str]]:
    """The blocks, and the group of each."""
    texts = part.texts(text)
    groups = [""] * len(texts)
    if group is not None:
        part.need(group)
        known = part.columns(text)
        if group not in known:
            raise DataError(
                f"column '{group}' of {part.where} holds no texts, whole numbers or classes; choose another"
            )
        groups = known[group].tolist()
    streams: dict[str, list[list[int]]] = {}
    for name, ids in zip(groups, encode.bare(texts), strict=True):
        streams.setdefault(name, []).append(ids + encode.end)
    rows, nexts, names = [], [], []
    for name, pieces in streams.items():
        stream = list(chain.from_iterable(pieces))
        if len(stream) < 2:
            raise DataError(
                f"{format_value(name)} of column '{group}' in {part.where} has no two tokens to tell one from the other"
            )
        for start in range(0, len(stream) - 1, encode.limit):
            # The target of the last token in a block is the first of the next block, so that each is told once.
            ahead = stream[start + 1 : start + 1 + encode.limit]
            rows.append(stream[start : start + len(ahead)])
            nexts.append(ahead)
            names.append(name)
    return ragged(rows, encode.limit, tags=nexts), names
