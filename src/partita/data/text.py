"""Text classification tasks, single-label and multi-label."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Annotated, Any

from torch import Tensor

from partita.core.options import Count
from partita.core.rng import Key
from partita.data.labels import is_list, many_labels, one_label
from partita.data.loading import DataPath, Dataset, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.ragged import RaggedExamples, ragged
from partita.data.task import Task, text_task
from partita.data.tokenization import text_encoder
from partita.tasks import MULTI_LABEL_TEXT, TEXT

Tokenizer = Annotated[str | None, "folder or Hub id; default: the model's tokenizer"]
MaxLength = Annotated[Count, "longer texts are truncated to this number of tokens"]


def text(
    path: DataPath,
    key: Key,
    text: Annotated[str, "text column"] = "text",
    label: Annotated[str, "label column; lists of labels make the task multi-label"] = "label",
    tokenizer: Tokenizer = None,
    max_length: MaxLength = 256,
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
) -> Task:
    """Text classification. If the label column holds lists, the task is multi-label.

    Labels are class labels with names, texts or integers. Longer texts are truncated to `max_length` tokens.
    """
    source = load_dataset(path, key, config, test)
    source.train.need(label)
    multi = is_list(source.train, label)
    classes, *labels = (many_labels if multi else one_label)(source, label)
    source, targets = limit_rows(source, limit, key, labels)
    train, held_out, used = read_texts(source, text, targets, tokenizer, max_length)
    columns, test_columns = (part.columns(text, label) for part in (source.train, source.test))
    kind = MULTI_LABEL_TEXT if multi else TEXT
    return text_task(source.name, train, held_out, classes, columns, kind, used, test_columns)


def read_texts(
    source: Dataset, column: str, targets: Iterable[Tensor], tokenizer: str | None, max_length: int
) -> tuple[RaggedExamples, RaggedExamples, Any]:
    """Tokenize a text column.

    Args:
        source: The dataset.
        column: The text column.
        targets: The targets of the train rows and of the test rows, each (row, ...).
        tokenizer: The tokenizer, as in `text_encoder`.
        max_length: Maximum number of tokens of a text.

    Returns:
        The train examples, the test examples, and the tokenizer.
    """
    texts = [part.texts(column) for part in (source.train, source.test)]
    encode = text_encoder(tokenizer, max_length)
    encoded = [encode.texts(rows) for rows in texts]
    cut = sum(encode.count_longer(rows, ids) for rows, ids in zip(texts, encoded, strict=True))
    if cut:
        warnings.warn(
            f"{cut:,} of {sum(map(len, texts)):,} texts of '{source.path}' are longer than {max_length} tokens, and "
            f"their rest is not read; to read more, raise data.max_length (up to {encode.longest:,} with this model)",
            stacklevel=2,
        )
    train, test = (ragged(ids, max_length, of_rows) for ids, of_rows in zip(encoded, targets, strict=True))
    return train, test, encode.tokenizer
