"""Text classification tasks, single-label and multi-label."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from partita.core.options import Count
from partita.core.rng import Key
from partita.data.labels import is_list, many_labels, one_label
from partita.data.loading import TestPart, load_dataset
from partita.data.ragged import ragged
from partita.data.task import Task
from partita.data.tokenization import text_encoder
from partita.tasks import MULTI_LABEL_TEXT, TEXT


def text(
    path: Annotated[str | Path, "file, folder, or Hugging Face Hub id"],
    key: Key,
    text: Annotated[str, "text column"] = "text",
    label: Annotated[str, "label column; lists of labels make the task multi-label"] = "label",
    tokenizer: Annotated[str | None, "folder or Hub id; default: the model's tokenizer"] = None,
    max_length: Annotated[Count, "longer texts are truncated to this number of tokens"] = 256,
    config: Annotated[str | None, "configuration of a Hub dataset"] = None,
    test: Annotated[TestPart, "name of the test part, or share of the rows to hold out if there is no test part"] = 0.2,
) -> Task:
    """Text classification. If the label column holds lists, the task is multi-label.

    Labels are class labels with names, texts or integers. Longer texts are truncated to `max_length` tokens.
    """
    source = load_dataset(path, key, config, test)
    texts = [part.texts(text) for part in (source.train, source.test)]
    source.train.need(label)
    multi = is_list(source.train, label)
    classes, *targets = (many_labels if multi else one_label)(source, label)
    encode = text_encoder(tokenizer, max_length)
    train, held_out = (
        ragged(encode.texts(rows), max_length, of_rows) for rows, of_rows in zip(texts, targets, strict=True)
    )
    columns = source.train.columns(text, label)
    words = max(train.words(), held_out.words())
    return Task(source.name, train, held_out, classes, columns, kind=MULTI_LABEL_TEXT if multi else TEXT, words=words)
