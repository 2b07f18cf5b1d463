"""Causal language modeling tasks: predict the next token of running text."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import numpy as np

from partita.core.options import Count, format_value
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.loading import DataPath, DatasetPart, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.ragged import RaggedExamples, ragged
from partita.data.task import Task, text_task
from partita.data.tokenization import TextEncoder, text_encoder
from partita.tasks import LM


def lm(
    path: DataPath,
    key: Key,
    text: Annotated[str, "text column"] = "text",
    tokenizer: Annotated[str | None, "folder or Hub id; default: the model's tokenizer"] = None,
    block_size: Annotated[Count, "tokens per example"] = 128,
    group: Annotated[str | None, "column, such as an author; texts with the same value are concatenated"] = None,
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
) -> Task:
    """Causal language modeling on blocks of tokens, cut from the concatenated rows of each value of `group`.

    Rows with the same value of column `group` (all rows if `group` is not set) are concatenated in order, with the
    tokenizer's end token after each row, and divided into blocks of `block_size` tokens. For one client per value, use
    the split `by_column` on the same column.
    """
    source, _ = limit_rows(load_dataset(path, key, config, test), limit, key)
    encode = text_encoder(tokenizer, block_size, option="block_size")
    train, names = _blocks(source.train, encode, text, group)
    held_out, test_names = _blocks(source.test, encode, text, group)
    columns, test_columns = ({} if group is None else {group: np.array(each)} for each in (names, test_names))
    return text_task(source.name, train, held_out, (), columns, LM, encode.tokenizer, test_columns)


def _blocks(part: DatasetPart, encode: TextEncoder, text: str, group: str | None) -> tuple[RaggedExamples, list[str]]:
    """Return the blocks and the group of each block."""
    texts = part.texts(text)
    groups = [""] * len(texts)
    if group is not None:
        part.need(group)
        known = part.columns(text)
        if group not in known:
            raise DataError(
                f"column '{group}' of {part.where} holds no texts, integers or classes; choose another column"
            )
        groups = known[group].tolist()
    streams: dict[str, list[list[int]]] = {}
    for name, ids in zip(groups, encode.without_special_tokens(texts), strict=True):
        streams.setdefault(name, []).append(ids + encode.end)
    rows, next_tokens, names = [], [], []
    for name, pieces in streams.items():
        stream = list(chain.from_iterable(pieces))
        if len(stream) < 2:
            raise DataError(
                f"group {format_value(name)} in column '{group}' of {part.where} has fewer than two tokens; language "
                "modeling needs at least two"
            )
        for start in range(0, len(stream) - 1, encode.limit):
            # The target of the last token in a block is the first token of the next block: each token is a target once.
            targets = stream[start + 1 : start + 1 + encode.limit]
            rows.append(stream[start : start + len(targets)])
            next_tokens.append(targets)
            names.append(name)
    return ragged(rows, encode.limit, tags=next_tokens), names
