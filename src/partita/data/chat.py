"""Chat tasks: conversations whose answers a model learns to give."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch

from partita.core.data import IGNORE_INDEX
from partita.core.rng import Key
from partita.data.chat_template import ChatTemplate, Encoded, chat_template
from partita.data.choice_examples import ChoiceExamples
from partita.data.conversations import ANSWER, ChatColumns, find_columns, read_conversations
from partita.data.errors import DataError
from partita.data.loading import DataPath, Dataset, DatasetPart, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.ragged import RaggedExamples, from_rows
from partita.data.task import Task, text_task
from partita.data.text import MAPPED, MaxLength, Tokenizer
from partita.data.token_rows import Chunk, CutCounter, TextMemory, TokenRows, collect, digest, flat, keep_on_disk
from partita.data.tokenization import TextEncoder, text_encoder
from partita.tasks import CHAT, CHOICE

Answers = Literal["all", "last"]


def chat(
    path: DataPath,
    key: Key,
    messages: Annotated[
        str | None,
        "column with lists of messages, each with `role` and `content` (or `from` and `value`, as ShareGPT has it); "
        "left out: `messages` or `conversations`, if there is one",
    ] = None,
    instruction: Annotated[
        str | None, "column with what the user says; left out: `instruction`, `prompt` or `question`"
    ] = None,
    input: Annotated[
        str | None, "column with a text that follows the instruction; may be empty; left out: `input`, if there is one"
    ] = None,
    output: Annotated[str | None, "column with the answer; left out: `output`, `completion` or `response`"] = None,
    choices: Annotated[
        str | None, "multiple choice: column with the list of possible answers; left out: answers are free texts"
    ] = None,
    answer: Annotated[str, "multiple choice: column with the place of the right choice, from 0"] = ANSWER,
    answers: Annotated[Answers, "which answers of a conversation the loss is on"] = "all",
    template: Annotated[
        Literal["tokenizer", "plain"],
        "chat template: the tokenizer's own, or a simple one, `role: content` on a line, with the tokenizer's end "
        "token after an answer",
    ] = "tokenizer",
    tokenizer: Tokenizer = None,
    max_length: MaxLength = 512,
    long_texts: Annotated[
        Literal["cut", "error"],
        "conversations of more than `max_length` tokens: `cut` drops the rest, with a warning; `error` stops",
    ] = "cut",
    pack: Annotated[
        bool,
        "train on rows of up to `max_length` tokens that hold several examples of a client, without attention from one "
        "to another; `training.batch_size` then counts rows",
    ] = False,
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
    memory: TextMemory = "auto",
) -> Task:
    """Chat: give the answers of conversations, with a model that predicts the next token, such as a LLaMA.

    A row is a list of messages, or an instruction with its answer. The chat template turns it into tokens. The loss is
    on the tokens of the answers only, each with the token that ends the turn. A conversation of which no answer is
    within `max_length` is left out, and a warning says how many. With `choices`, the answer is one of several; a model
    is scored by whether the right one is the most likely.
    """
    source, _ = limit_rows(load_dataset(path, key, config, test), limit, key)
    encode = text_encoder(tokenizer, max_length)
    chosen = chat_template(encode.tokenizer, template)
    given = ChatColumns(messages, instruction, input, output, choices, answer if choices else None)
    columns = find_columns(source.train, given)
    scanned = [_scan(part, columns) for part in (source.train, source.test)]
    on_disk = keep_on_disk(sum(size for _, size in scanned), memory)
    which: Answers = "last" if choices else answers
    tables, kept = list[RaggedExamples | ChoiceExamples](), list[DatasetPart]()
    total = CutCounter()
    for part, (content, _) in zip((source.train, source.test), scanned, strict=True):
        settings = ("chat", chosen.source, str(max_length), long_texts, which, repr(columns), content)
        made = partial(_chunks, part, columns, chosen, encode, which, long_texts)
        rows = collect(made, digest(encode.digest, *settings) if on_disk else "")
        sources = np.empty(0, np.int64) if rows.documents is None else rows.documents.unique_consecutive().numpy()
        if not len(sources) and len(part.rows):
            raise DataError(
                f"no conversation of {part.where} has a token of an answer among its first {max_length} tokens; raise "
                f"data.max_length (up to {encode.longest:,} with this model)"
            )
        total += rows.cut
        kept.append(part.select(sources))
        tables.append(_table(rows, part, columns, max_length))
    notes = _notes(source, total, kept, encode, bool(choices)) + ((MAPPED,) if on_disk and encode.digest else ())
    train, held_out = tables
    train_columns, test_columns = (part.columns(*columns.names()) for part in kept)
    kind = CHOICE if choices else CHAT
    task = text_task(source.name, train, held_out, (), train_columns, kind, encode.tokenizer, notes, test_columns)
    return replace(task, packed=pack)


def _scan(part: DatasetPart, columns: ChatColumns) -> tuple[str, int]:
    """Check the conversations of a part, and return their digest and their size in bytes."""
    found, size = hashlib.blake2b(digest_size=16), 0
    for conversations in read_conversations(part, columns):
        for each in conversations:
            content = json.dumps([each.messages, each.choices, each.right]).encode()
            found.update(len(content).to_bytes(8, "big"))
            found.update(content)
            size += len(content)
    return found.hexdigest(), size


def _chunks(
    part: DatasetPart,
    columns: ChatColumns,
    template: ChatTemplate,
    encode: TextEncoder,
    answers: Answers,
    long_texts: str,
    cut: CutCounter,
) -> Iterator[Chunk]:
    """Yield the token rows of conversations: one of each, or one of each choice. Those without answers are left out."""
    done = 0
    for conversations in read_conversations(part, columns):
        versions = [
            [each.with_answer(choice) for choice in range(len(each.choices))] or [each.messages]
            for each in conversations
        ]
        of_version = [place for place, rows in enumerate(versions) for _ in rows]
        encoded = template.encode(
            [row for rows in versions for row in rows],
            lambda version, done=done, of_version=of_version: part.row(done + of_version[version]),  # type: ignore[misc]
        )
        examples = iter([_example(each, answers) for each in encoded])
        ids, targets, documents = list[list[int]](), list[list[int]](), list[int]()
        for place, rows in enumerate(versions, done):
            made = [next(examples) for _ in rows]
            longest = max(len(row) for row, _ in made)
            cut.add([(place, longest)], encode.limit)
            made = [(row[: encode.limit], wanted[: encode.limit]) for row, wanted in made]
            # A choice that is cut cannot be compared with the others.
            whole = len(made) == 1 or longest <= encode.limit
            if whole and all(any(target != IGNORE_INDEX for target in wanted) for _, wanted in made):
                ids += [row for row, _ in made]
                targets += [wanted for _, wanted in made]
                documents += [place] * len(made)
        done += len(conversations)
        yield Chunk(*flat(ids), documents=np.array(documents, np.int64), targets=flat(targets)[0])
    if cut.texts and long_texts == "error":
        assert cut.first is not None
        raise DataError(
            f"{cut.texts:,} of {done:,} conversations are longer than max_length = {encode.limit} tokens, the first is "
            f"{part.row(cut.first)} with {cut.length:,}; raise data.max_length (up to {encode.longest:,} with this "
            "model), or set data.long_texts to 'cut'"
        )


def _example(encoded: Encoded, answers: Answers) -> tuple[list[int], list[int]]:
    """Return the tokens that a model reads, and the next token of each if it belongs to an answer.

    The last token of the last answer is a target only, and what follows it is not read.
    """
    spans = encoded.answers[-1:] if answers == "last" else encoded.answers
    end = spans[-1][1] if spans else 1
    targets = [IGNORE_INDEX] * (end - 1)
    for start, stop in spans:
        for place in range(max(start, 1), stop):
            targets[place - 1] = encoded.ids[place]
    return encoded.ids[: end - 1], targets


def answer_example(encoded: Encoded) -> tuple[list[int], list[int]]:
    """Return the tokens that a model reads, and as targets those of the last answer."""
    return _example(encoded, "last")


def _table(rows: TokenRows, part: DatasetPart, columns: ChatColumns, limit: int) -> RaggedExamples | ChoiceExamples:
    examples = from_rows(rows, limit)
    if columns.choices is None:
        return examples
    assert columns.answer is not None
    documents = torch.empty(0, dtype=torch.long) if rows.documents is None else rows.documents
    kept, counts = documents.unique_consecutive(return_counts=True)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return ChoiceExamples(examples, first, torch.tensor(part.values(columns.answer), dtype=torch.long)[kept])


def _notes(
    source: Dataset, cut: CutCounter, kept: list[DatasetPart], encode: TextEncoder, choices: bool
) -> tuple[str, ...]:
    """Warn about conversations that were cut or left out, and return what to record."""
    count = len(source.train.rows) + len(source.test.rows)
    dropped = count - sum(len(part.rows) for part in kept)
    of_all = f"of {count:,} conversations of '{source.path}'"
    remedy = f"; to read them, raise data.max_length (up to {encode.longest:,} with this model)"
    notes = []
    if cut.texts and not choices:
        notes.append(
            f"{cut.texts:,} {of_all} are longer than {encode.limit} tokens, and their last {cut.tokens:,} tokens are "
            "not read"
        )
    if dropped:
        why = "they are longer than" if choices else "no token of an answer is among their first"
        notes.append(f"{dropped:,} {of_all} are left out, because {why} {encode.limit} tokens")
    for note in notes:
        warnings.warn(f"{note}{remedy}", stacklevel=3)
    return tuple(notes)
