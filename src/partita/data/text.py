"""Text classification tasks, single-label and multi-label."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch

from partita.core.options import Count, Whole
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.labels import is_list, many_labels, one_label
from partita.data.loading import DataPath, Dataset, DatasetPart, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.ragged import RaggedExamples, from_rows, ragged
from partita.data.task import Task, text_task
from partita.data.token_rows import Chunk, CutCounter, TextMemory, collect, digest, flat, keep_on_disk
from partita.data.tokenization import TextEncoder, text_encoder
from partita.tasks import MULTI_LABEL_TEXT, TEXT

MAPPED = "tokens are memory-mapped"  # note on a task
Tokenizer = Annotated[str | None, "folder or Hub id; default: the model's tokenizer"]
MaxLength = Annotated[Count, "maximum number of tokens per example; see `long_texts`"]
LongTexts = Annotated[
    Literal["cut", "windows", "error"],
    "texts of more than `max_length` tokens: `cut` drops the rest, with a warning; `windows` makes several examples of "
    "a text; `error` stops",
]
Overlap = Annotated[
    Whole | None, "`windows`: tokens that consecutive windows of a text share; default: a quarter of `max_length`"
]
Pair = Annotated[str | None, "column with the second text of a pair, such as a hypothesis; left out: single texts"]


@dataclass(frozen=True)
class TextOptions:
    """What to do with long texts, and where the tokens are kept."""

    long_texts: Literal["cut", "windows", "error"]
    overlap: int | None
    memory: float | Literal["auto"]


def text(
    path: DataPath,
    key: Key,
    text: Annotated[str, "text column"] = "text",
    label: Annotated[str, "label column; lists of labels make the task multi-label"] = "label",
    pair: Pair = None,
    tokenizer: Tokenizer = None,
    max_length: MaxLength = 256,
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
    long_texts: LongTexts = "cut",
    overlap: Overlap = None,
    memory: TextMemory = "auto",
) -> Task:
    """Text classification. If the label column holds lists, the task is multi-label.

    Labels are class labels with names, texts or integers. With `long_texts = "windows"`, a longer text becomes several
    training examples with its label, all at one client and in one part. Its prediction is the mean of their logits.
    With `pair`, a text and a second one are read together, as the model's tokenizer joins them.
    """
    source = load_dataset(path, key, config, test)
    source.train.need(label)
    multi = is_list(source.train, label)
    classes, *labels = (many_labels if multi else one_label)(source, label)
    source, targets = limit_rows(source, limit, key, labels)
    options = TextOptions(long_texts, overlap, memory)
    train, held_out, used, notes = read_texts(source, text, targets, tokenizer, max_length, options, pair)
    columns, test_columns = (part.columns(text, label, pair or text) for part in (source.train, source.test))
    kind = MULTI_LABEL_TEXT if multi else TEXT
    return text_task(source.name, train, held_out, classes, columns, kind, used, notes, test_columns)


def read_texts(
    source: Dataset,
    column: str,
    targets: Iterable[torch.Tensor],
    tokenizer: str | None,
    max_length: int,
    options: TextOptions,
    pair: str | None = None,
) -> tuple[RaggedExamples, RaggedExamples, Any, tuple[str, ...]]:
    """Tokenize a text column.

    Args:
        source: The dataset.
        column: The text column.
        targets: The targets of the train rows and of the test rows, each (row, ...).
        tokenizer: The tokenizer, as in `text_encoder`.
        max_length: Maximum number of tokens of a row, or of both texts of a pair.
        options: What to do with longer texts, and where tokens are kept.
        pair: The column of the second texts; None for single texts.

    Returns:
        The train examples, the test examples, the tokenizer, and notes for the run's record.

    Raises:
        DataError: If a text is longer, and `long_texts` is "error".
    """
    if pair is not None:
        return _read_pairs(source, (column, pair), targets, tokenizer, max_length, options)
    parts = (source.train, source.test)
    scanned = [scan_texts(part, column) for part in parts]
    encode = text_encoder(tokenizer, max_length)
    overlap = max_length // 4 if options.overlap is None else options.overlap
    if options.long_texts == "windows":
        encode.check_overlap(overlap)
    settings = (encode.digest, str(max_length), options.long_texts, str(overlap))
    on_disk = keep_on_disk(sum(size for _, size in scanned), options.memory)
    tables: list[RaggedExamples] = []
    total = CutCounter()
    for part, (content, _), of_rows in zip(parts, scanned, targets, strict=True):
        key = digest(*settings, content) if on_disk else ""
        rows = collect(partial(_chunks, part, column, encode, options.long_texts, overlap), key)
        total += rows.cut
        spread = of_rows if rows.documents is None else of_rows[rows.documents]
        tables.append(from_rows(rows, max_length, spread))
    train, test = tables
    notes = cut_notes(source, total, sum(len(part.rows) for part in parts), encode)
    where = (MAPPED,) if on_disk and encode.digest else ()
    return train, test, encode.tokenizer, notes + where


def _read_pairs(
    source: Dataset,
    columns: tuple[str, str],
    targets: Iterable[torch.Tensor],
    tokenizer: str | None,
    max_length: int,
    options: TextOptions,
) -> tuple[RaggedExamples, RaggedExamples, Any, tuple[str, ...]]:
    """Read pairs of texts into memory. The arguments are those of `read_texts`."""
    if options.long_texts == "windows":
        raise DataError(
            "long_texts = 'windows' does not work for pairs of texts, because a window would hold a part of one of "
            "them; set data.long_texts to 'cut' or 'error', or raise data.max_length"
        )
    encode, total, tables, count = text_encoder(tokenizer, max_length), CutCounter(), [], 0
    for part, of_rows in zip((source.train, source.test), targets, strict=True):
        first, second = (part.texts(column) for column in columns)
        rows, segments = encode.pairs(first, second)
        cut = CutCounter()
        cut.add(enumerate(encode.lengths(first, rows, second)), max_length)
        _refuse_cut(part, cut, len(first), encode, options.long_texts)
        total, count = total + cut, count + len(first)
        tables.append(ragged(rows, max_length, of_rows, segments=segments))
    train, test = tables
    return train, test, encode.tokenizer, cut_notes(source, total, count, encode)


def scan_texts(part: DatasetPart, column: str) -> tuple[str, int]:
    """Check a text column, and return its digest and its size in bytes."""
    found, size = hashlib.blake2b(digest_size=16), 0
    for texts in part.text_batches(column):
        for text in texts:
            content = text.encode(errors="surrogatepass")
            found.update(len(content).to_bytes(8, "big"))
            found.update(content)
            size += len(content)
    return found.hexdigest(), size


def _chunks(
    part: DatasetPart, column: str, encode: TextEncoder, long_texts: str, overlap: int, cut: CutCounter
) -> Iterator[Chunk]:
    done = 0
    for texts in part.text_batches(column):
        if long_texts == "windows":
            rows, text_of_row = encode.windows(texts, overlap)
            yield Chunk(*flat(rows), documents=np.array(text_of_row, np.int64) + done)
        else:
            rows = encode.texts(texts)
            cut.add(enumerate(encode.lengths(texts, rows), done), encode.limit)
            yield Chunk(*flat(rows))
        done += len(texts)
    _refuse_cut(part, cut, done, encode, long_texts)


def _refuse_cut(part: DatasetPart, cut: CutCounter, count: int, encode: TextEncoder, long_texts: str) -> None:
    """Raise a DataError if texts were cut and `long_texts` is "error"."""
    if cut.texts and long_texts == "error":
        assert cut.first is not None
        raise DataError(
            f"{cut.texts:,} of {count:,} texts are longer than max_length = {encode.limit} tokens, the first is "
            f"{part.row(cut.first)} with {cut.length:,}; {_raise_limit(encode)}set data.long_texts to "
            "'windows' or 'cut'"
        )


def cut_notes(source: Dataset, cut: CutCounter, count: int, encode: TextEncoder) -> tuple[str, ...]:
    """Warn about texts that were cut, and return what to record.

    Args:
        source: The dataset.
        cut: What was cut.
        count: Number of all texts.
        encode: The tokenizer and its limit.
    """
    if not cut.texts:
        return ()
    what = f"{cut.texts:,} of {count:,} texts of '{source.path}' are longer than {encode.limit} tokens, and their last "
    warnings.warn(
        f"{what}{cut.tokens:,} tokens are not read; to read them, {_raise_limit(encode)}set data.long_texts = "
        "'windows'",
        stacklevel=3,
    )
    return (f"{what}{cut.tokens:,} tokens are not read",)


def _raise_limit(encode: TextEncoder) -> str:
    """Return the start of a remedy: to raise the limit, if the model takes longer rows."""
    if encode.limit >= encode.longest:
        return ""
    return f"raise data.max_length (up to {encode.longest:,} with this model), or "
