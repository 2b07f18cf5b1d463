"""Causal language modeling tasks: predict the next token of running text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np
import torch

from partita.core.options import Count, format_value
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.loading import DataPath, DatasetPart, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.ragged import RaggedExamples
from partita.data.task import Task, text_task
from partita.data.text import MAPPED, scan_texts
from partita.data.token_rows import Chunk, TextMemory, TokenRows, collect, digest, flat, keep_on_disk
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
    memory: TextMemory = "auto",
) -> Task:
    """Causal language modeling on blocks of tokens, cut from the concatenated rows of each value of `group`.

    Rows with the same value of column `group` (all rows if `group` is not set) are concatenated in order, with the
    tokenizer's end token after each row, and divided into blocks of `block_size` tokens. For one client per value, use
    the split `by_column` on the same column.
    """
    source, _ = limit_rows(load_dataset(path, key, config, test), limit, key)
    encode = text_encoder(tokenizer, block_size, option="block_size")
    scanned = [scan_texts(part, text) for part in (source.train, source.test)]
    on_disk = keep_on_disk(sum(size for _, size in scanned), memory)
    train, names = _blocks(source.train, encode, text, group, scanned[0][0], on_disk)
    held_out, test_names = _blocks(source.test, encode, text, group, scanned[1][0], on_disk)
    notes = (MAPPED,) if on_disk and encode.digest else ()
    columns, test_columns = ({} if group is None else {group: np.array(each)} for each in (names, test_names))
    return text_task(source.name, train, held_out, (), columns, LM, encode.tokenizer, notes, test_columns)


def _blocks(
    part: DatasetPart, encode: TextEncoder, text: str, group: str | None, content: str, on_disk: bool
) -> tuple[RaggedExamples, list[str]]:
    """Return the blocks and the group of each block."""
    rows = collect(lambda _: _streams(part, text, encode), digest(encode.digest, "lm", content) if on_disk else "")
    if not len(part.rows):  # nothing is trained
        nothing = torch.empty(0, dtype=torch.int32)
        return RaggedExamples(nothing, torch.zeros(1, dtype=torch.long), nothing, encode.limit, each_token=True), []
    groups = _groups(part, text, group)
    of_group: dict[str, list[int]] = {}
    for row, name in enumerate(groups):
        of_group.setdefault(name, []).append(row)
    starts, names, pieces = [0], list[str](), list[tuple[torch.Tensor, torch.Tensor]]()
    for name, members in of_group.items():
        # With one group, the stream is all rows in order, and is not copied.
        stream = rows.ids if len(of_group) == 1 else torch.cat([_row(rows, row) for row in members])
        if len(stream) < 2:
            raise DataError(
                f"group {format_value(name)} in column '{group}' of {part.where} has fewer than two tokens; language "
                "modeling needs at least two"
            )
        # The target of the last token in a block is the first token of the next block: each token is a target once.
        pieces.append((stream[:-1], stream[1:]))
        ends = [*range(encode.limit, len(stream) - 1, encode.limit), len(stream) - 1]
        starts.extend([starts[-1] + end for end in ends])
        names.extend([name] * len(ends))
    ids, targets = pieces[0] if len(pieces) == 1 else (torch.cat(part) for part in zip(*pieces, strict=True))
    blocks = RaggedExamples(
        ids, torch.tensor(starts), targets, encode.limit, each_token=True, known_vocabulary=rows.vocabulary_size
    )
    return blocks, names


def _streams(part: DatasetPart, text: str, encode: TextEncoder) -> Iterator[Chunk]:
    for texts in part.text_batches(text):
        yield Chunk(*flat([ids + encode.end for ids in encode.without_special_tokens(texts)]))


def _row(rows: TokenRows, row: int) -> torch.Tensor:
    return rows.ids[rows.offsets[row] : rows.offsets[row + 1]]


def _groups(part: DatasetPart, text: str, group: str | None) -> list[str]:
    """Return the group of each row."""
    if group is None:
        return [""] * len(part.rows)
    part.need(group)
    known = part.columns(text)
    if group not in known:
        raise DataError(f"column '{group}' of {part.where} holds no texts, integers or classes; choose another column")
    names: list[str] = known[group].tolist()
    return names
