"""Sequence-to-sequence tasks: a text and the text that answers it, such as a summary or a translation."""

from __future__ import annotations

import warnings
from typing import Annotated

import torch

from partita.core.options import Count
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.loading import DataPath, DatasetPart, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.ragged import RaggedExamples, ragged
from partita.data.seq2seq_examples import Seq2SeqExamples
from partita.data.task import Task, text_task
from partita.data.text import MaxLength, Tokenizer
from partita.data.tokenization import decoder_tokens, text_encoder
from partita.tasks import SEQ2SEQ


def seq2seq(
    path: DataPath,
    key: Key,
    source: Annotated[str, "column with the text to read"] = "source",
    target: Annotated[str, "column with the text to write"] = "target",
    prefix: Annotated[str | None, "put before every source text, such as `summarize: ` for T5"] = None,
    tokenizer: Tokenizer = None,
    max_length: MaxLength = 256,
    max_target_length: Annotated[Count, "longer target texts are truncated to this number of tokens"] = 64,
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
) -> Task:
    """Sequence to sequence: write a text for a text, such as a summary or a translation, with a model like T5 or BART.

    The decoder's start token is the one in the config of the model in the tokenizer's folder. Longer texts are
    truncated, and a warning says how many.
    """
    data, _ = limit_rows(load_dataset(path, key, config, test), limit, key)
    sources, targets = text_encoder(tokenizer, max_length), text_encoder(tokenizer, max_target_length, option=TARGET)
    start, end = decoder_tokens(str(tokenizer))
    cut = {"source": 0, "target": 0}

    def read(part: DatasetPart) -> Seq2SeqExamples:
        texts, answers = [(prefix or "") + text for text in part.texts(source)], part.texts(target)
        read, written = sources.texts(texts), targets.target_texts(answers)
        if any(row[-1] != end for row in written):
            raise DataError(
                f"the tokenizer '{tokenizer}' does not end a text with the token {end}, which ends a text of its "
                "model, so generated texts would not end; use the model's own tokenizer"
            )
        cut["source"] += sum(length > max_length for length in sources.lengths(texts, read))
        cut["target"] += sum(length > max_target_length for length in targets.target_lengths(answers, written))
        return Seq2SeqExamples(_rows(read, max_length), _rows(written, max_target_length), start)

    train, held_out = read(data.train), read(data.test)
    notes = []
    for name, option, most in (("source", "max_length", max_length), ("target", TARGET, max_target_length)):
        if cut[name]:
            count = f"{cut[name]:,} of {len(train) + len(held_out):,}"
            what = f"{count} {name} texts of '{data.path}'"
            notes.append(f"{what} are longer than {most} tokens, and their rest is not read")
            warnings.warn(f"{notes[-1]}; to read more, raise data.{option}", stacklevel=2)
    columns, test_columns = (part.columns(source, target) for part in (data.train, data.test))
    return text_task(data.name, train, held_out, (), columns, SEQ2SEQ, sources.tokenizer, tuple(notes), test_columns)


TARGET = "max_target_length"


def _rows(rows: list[list[int]], limit: int) -> RaggedExamples:
    return ragged(rows, limit, torch.zeros(len(rows), dtype=torch.long))
