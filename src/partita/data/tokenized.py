"""Tasks on texts that are tokens already."""

from __future__ import annotations

from typing import Annotated, Any

from partita.core.data import IGNORE_INDEX
from partita.core.options import Text
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.labels import is_list, one_label
from partita.data.loading import DataPath, Dataset, DatasetPart, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.ragged import RaggedExamples, ragged
from partita.data.regression import read_targets
from partita.data.task import Task, text_task
from partita.data.tokenization import has_tokenizer, load_tokenizer
from partita.tasks import LM, TEXT, TEXT_REGRESSION, TOKENS, TaskKind

MASK, SEGMENTS = "attention_mask", "token_type_ids"


def tokenized(
    path: DataPath,
    key: Key,
    ids: Annotated[str, "column with the list of token ids"] = "input_ids",
    label: Annotated[
        str,
        "column with the label: a class or an integer; a floating-point number makes it a regression; a list with a "
        "number per token is for language modeling, or with `tags` for tagging; without the column, the tokens are "
        "modeled",
    ] = "labels",
    tags: Annotated[tuple[Text, ...], "names of the tags 0, 1, ... of tokens, in BIO"] = (),
    tokenizer: Annotated[str | None, "folder or Hub id, to save with the model; left out: none"] = None,
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
) -> Task:
    """Texts that are tokens already: a text classification, a regression, tags of tokens, or language modeling.

    Padding is removed where the column `attention_mask` is 0, and batches are padded anew. As in transformers, a label
    of -100 is ignored, and in language modeling the label of a token is the token itself.
    """
    source, _ = limit_rows(load_dataset(path, key, config, test), limit, key)
    parts = (source.train, source.test)
    rows = [_rows(part, ids) for part in parts]
    longest = max(len(row) for part in rows for row in part)
    kind, classes, tables = _with_targets(source, parts, rows, ids, label, tags, longest)
    saved = None if tokenizer is None or not has_tokenizer(tokenizer) else load_tokenizer(tokenizer)[0]
    columns, test_columns = (part.columns(ids, label, MASK, SEGMENTS) for part in parts)
    train, held_out = tables
    return text_task(source.name, train, held_out, classes, columns, kind, saved, (), test_columns)


def _with_targets(
    source: Dataset,
    parts: tuple[DatasetPart, DatasetPart],
    rows: list[list[list[int]]],
    ids: str,
    label: str,
    tags: tuple[str, ...],
    longest: int,
) -> tuple[TaskKind, tuple[str, ...], list[RaggedExamples]]:
    """Return the kind of task, its classes, and the examples of each part."""
    each = list(zip(parts, rows, strict=True))
    if label not in source.train.data.column_names or is_list(source.train, label):
        if not tags:
            return LM, (), [_next_tokens(part, of_part, ids, label) for part, of_part in each]
        for part in parts:
            part.need(label)
        made = [ragged(of_part, longest, tags=_per_token(part, of_part, label)) for part, of_part in each]
        for part, table in zip(parts, made, strict=True):
            if len(table.targets) and int(table.targets.max()) >= len(tags):
                raise DataError(
                    f"{part.where} has the tag {int(table.targets.max())} in '{label}', but data.tags has only "
                    f"{len(tags)} names; name all tags"
                )
        return TOKENS, tags, made
    kind: TaskKind
    classes: tuple[str, ...]
    if "float" in getattr(source.train.data.features[label], "dtype", ""):
        kind, (classes, *targets) = TEXT_REGRESSION, ((label,), *read_targets(source, [label]))
    else:
        kind, (classes, *targets) = TEXT, one_label(source, label)
    segments = [_column(part, SEGMENTS) if SEGMENTS in part.data.column_names else None for part in parts]
    return (
        kind,
        classes,
        [
            ragged(of_part, longest, of_rows, segments=None if types is None else _unpadded(part, types))
            for (part, of_part), of_rows, types in zip(each, targets, segments, strict=True)
        ],
    )


def _rows(part: DatasetPart, ids: str) -> list[list[int]]:
    rows = _unpadded(part, _column(part, ids))
    for place, row in enumerate(rows):
        if not row:
            raise DataError(f"{part.row(place)} has no tokens in '{ids}'; remove the row")
    return rows


def _column(part: DatasetPart, column: str) -> list[list[int]]:
    part.need(column)
    if not is_list(part, column):
        raise DataError(f"column '{column}' of {part.where} holds no lists of token ids; name the column that does")
    values: list[Any] = part.values(column)
    for place, row in enumerate(values):
        if row is None or any(type(token) is not int for token in row):
            raise DataError(f"{part.row(place)} has no list of whole numbers in '{column}'; tokenize it, or remove it")
    return values


def _unpadded(part: DatasetPart, rows: list[list[int]]) -> list[list[int]]:
    """Drop what the attention mask excludes."""
    if MASK not in part.data.column_names:
        return rows
    kept = []
    for place, (row, mask) in enumerate(zip(rows, _column(part, MASK), strict=True)):
        if len(row) != len(mask):
            raise DataError(f"{part.row(place)} has {len(row)} numbers, but {len(mask)} in '{MASK}'; correct the row")
        kept.append([token for token, real in zip(row, mask, strict=True) if real])
    return kept


def _per_token(part: DatasetPart, rows: list[list[int]], label: str) -> list[list[int]]:
    labels = _unpadded(part, _column(part, label))
    for place, (row, of_row) in enumerate(zip(rows, labels, strict=True)):
        if len(row) != len(of_row):
            raise DataError(f"{part.row(place)} has {len(row)} tokens, but {len(of_row)} labels; give one for each")
    return labels


def _next_tokens(part: DatasetPart, rows: list[list[int]], ids: str, label: str) -> RaggedExamples:
    """Return rows in which the target of a token is the label of the next one."""
    labels = _per_token(part, rows, label) if label in part.data.column_names else rows
    for place, row in enumerate(rows):
        if len(row) < 2:
            raise DataError(f"{part.row(place)} has one token in '{ids}', but language modeling needs two; remove it")
    longest = max(len(row) for row in rows) - 1
    table = ragged([row[:-1] for row in rows], longest, tags=[row[1:] for row in labels])
    if bool((table.targets == IGNORE_INDEX).all()):
        raise DataError(f"all labels of {part.where} are {IGNORE_INDEX}, so there is nothing to learn; correct them")
    return table
