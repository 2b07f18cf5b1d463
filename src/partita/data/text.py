"""Texts of one class each, or of any number of classes."""

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


def text(
    path: Annotated[str | Path, "file, folder, or id of the Hugging Face Hub"],
    key: Key,
    text: Annotated[str, "column of the texts"] = "text",
    label: Annotated[str, "column of the classes, or of lists of classes"] = "label",
    tokenizer: Annotated[str | None, "folder or id of the Hub; the model's own if left out"] = None,
    max_length: Annotated[Count, "tokens to which a text is cut"] = 256,
    config: Annotated[str | None, "configuration of a data set of the Hub"] = None,
    test: Annotated[TestPart, "part to test on, or share of the rows to hold out where there is no test part"] = 0.2,
) -> Task:
    """Text classification; where the label column holds lists, a text may have any number of classes.

    Labels are classes with names, texts or whole numbers. A longer text is cut to `max_length` tokens.
    """
    source = load_dataset(path, key, config, test)
    texts = [part.texts(text) for part in (source.train, source.test)]
    source.train.need(label)
    multi = is_list(source.train, label)
    classes, *targets = (many_labels if multi else one_label)(source, label)
    encode = text_encoder(tokenizer, max_length)
    train, held_out = (
        ragged(encode.texts(each), max_length, of_row) for each, of_row in zip(texts, targets, strict=True)
    )
    columns = source.train.columns(text, label)
    words = max(train.words(), held_out.words())
    return Task(source.name, train, held_out, classes, columns, kind="text", multi_label=multi, words=words)
