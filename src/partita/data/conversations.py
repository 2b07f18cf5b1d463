"""Conversations in the columns of a dataset: lists of messages, or an instruction with its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.core.options import closest_match, format_value
from partita.data.dataset_files import ROWS_TOGETHER
from partita.data.errors import DataError, reading
from partita.data.loading import DatasetPart

Messages = list[dict[str, str]]  # each with "role" and "content"

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")
SHARE_GPT = {"human": "user", "gpt": ASSISTANT, "function_response": "tool", "observation": "tool"}  # its other roles
MESSAGES = ("messages", "conversations")  # names that these columns usually have
INSTRUCTIONS = ("instruction", "prompt", "question")
INPUT = "input"
OUTPUTS = ("output", "completion", "response")
CHOICES, ANSWER = "choices", "answer"


@dataclass(frozen=True)
class ChatColumns:
    """The columns that hold conversations: `messages`, or `instruction` and `output`.

    Attributes:
        messages: Column with lists of messages; None if the others are used.
        instruction: Column with what the user says.
        input: Column with a text that follows the instruction, in the same message; None if there is none.
        output: Column with the answer; None if the answers are choices.
        choices: Column with the list of possible answers to the conversation; None if the answer is in it.
        answer: Column with the place of the right choice, from 0.
    """

    messages: str | None = None
    instruction: str | None = None
    input: str | None = None
    output: str | None = None
    choices: str | None = None
    answer: str | None = None

    def names(self) -> list[str]:
        """Return the columns in use."""
        return [name for name in vars(self).values() if name is not None]


@dataclass(frozen=True)
class Conversation:
    """A conversation of a row.

    Attributes:
        messages: The messages. The last one is an answer, unless there are choices.
        choices: The possible answers; empty if the answers are among the messages.
        right: The place of the right choice.
    """

    messages: Messages
    choices: tuple[str, ...] = ()
    right: int = 0

    def with_answer(self, choice: int) -> Messages:
        """Return the messages with one of the choices as the answer."""
        return [*self.messages, {"role": ASSISTANT, "content": self.choices[choice]}]


def find_columns(part: DatasetPart, given: ChatColumns) -> ChatColumns:
    """Return the columns to read. Those that are not given are found by their usual names.

    Raises:
        DataError: If a column is missing, or both ways to write a conversation are given.
    """
    part.need(*given.names())
    known = part.data.column_names

    def usual(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in known), None)

    parts = (given.instruction, given.input, given.output)
    if given.messages is not None and any(parts):
        raise DataError(
            "data.messages is given, and so is one of data.instruction, data.input and data.output; a conversation is "
            "in one column of messages or in these columns, so remove the others"
        )
    messages = given.messages or (None if any(parts) else usual(MESSAGES))
    choices = {"choices": given.choices, "answer": given.answer} if given.choices else {}
    if messages is not None:
        return ChatColumns(messages=messages, **choices)
    instruction = given.instruction or usual(INSTRUCTIONS)
    output = None if given.choices else given.output or usual(OUTPUTS)
    if instruction is None or (output is None and not given.choices):
        lacking = "data.instruction" if instruction is None else "data.output"
        raise DataError(
            f"{part.where} has no column of messages ({', '.join(MESSAGES)}) and none for {lacking} "
            f"({', '.join(INSTRUCTIONS if instruction is None else OUTPUTS)}); name it, or data.messages; its columns "
            f"are {', '.join(known)}"
        )
    return ChatColumns(None, instruction, given.input or usual([INPUT]), output, **choices)


def read_conversations(part: DatasetPart, columns: ChatColumns) -> Iterator[list[Conversation]]:
    """Yield the conversations of a part, some rows at a time. Messages after the last answer are left out.

    Raises:
        DataError: If a row has no conversation, or one that cannot be read; the message names the row.
    """
    names = columns.names()
    part.need(*names)
    only = part.data.select_columns(list(dict.fromkeys(names)))
    for start in range(0, len(part.rows), ROWS_TOGETHER):
        with reading(f"the columns {', '.join(names)} of {part.where}"):
            rows: Mapping[str, list[Any]] = only[start : start + ROWS_TOGETHER]
        yield [
            _conversation(part.row(start + place), {name: rows[name][place] for name in names}, columns)
            for place in range(len(rows[names[0]]))
        ]


def read_prompt(row: str, values: Mapping[str, Any], columns: ChatColumns) -> Conversation:
    """Return what a model answers: the messages of a row without an answer at their end, and its choices if it has any.

    Args:
        row: Names the row in an error message.
        values: The values of the row by column.
        columns: The columns; `output` and `answer` are not read.

    Raises:
        DataError: If a column is missing, or the row cannot be read.
    """
    for name in columns.names():
        if name not in values and name != columns.input:
            raise DataError(f"{row} has no column '{name}'; {closest_match(name, values)}")
    if columns.messages is not None:
        messages = _messages(row, columns.messages, values[columns.messages])
    else:
        messages = _from_texts(row, {**values, **({columns.input: values.get(columns.input)} if columns.input else {})},
                               columns)  # fmt: skip
    while messages and messages[-1]["role"] == ASSISTANT:
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{row} has no message to answer; add one")
    choices = () if columns.choices is None else _choices(row, columns.choices, values[columns.choices])
    return Conversation(messages, choices)


def _conversation(row: str, values: Mapping[str, Any], columns: ChatColumns) -> Conversation:
    if columns.messages is not None:
        messages = _messages(row, columns.messages, values[columns.messages])
    else:
        messages = _from_texts(row, values, columns)
    if columns.choices is None:
        last = max((place for place, each in enumerate(messages) if each["role"] == ASSISTANT), default=None)
        if last is None:
            raise DataError(f"{row} has no answer, which is a message with the role '{ASSISTANT}'; remove the row")
        return Conversation(messages[: last + 1])
    if messages[-1]["role"] == ASSISTANT:
        raise DataError(
            f"{row} ends with an answer in '{columns.messages}', but the answers are in '{columns.choices}'; remove "
            "that message, or data.choices"
        )
    assert columns.answer is not None
    choices = _choices(row, columns.choices, values[columns.choices])
    right = values[columns.answer]
    if isinstance(right, bool) or not isinstance(right, int) or not 0 <= right < len(choices):
        raise DataError(
            f"{row} has {format_value(right)} in '{columns.answer}', but it has {len(choices)} choices; give the place "
            f"of the right one, 0 to {len(choices) - 1}"
        )
    return Conversation(messages, choices, right)


def _from_texts(row: str, values: Mapping[str, Any], columns: ChatColumns) -> Messages:
    assert columns.instruction is not None
    said = _text(row, columns.instruction, values[columns.instruction])
    more = None if columns.input is None else values[columns.input]
    if more is not None and not isinstance(more, str):
        raise DataError(f"{row} has {format_value(more)} in '{columns.input}', which is not text; convert it to text")
    messages = [{"role": "user", "content": f"{said}\n\n{more}" if more and more.strip() else said}]
    if columns.output is not None:
        messages.append({"role": ASSISTANT, "content": _text(row, columns.output, values[columns.output])})
    return messages


def _text(row: str, column: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise DataError(f"{row} has {format_value(value)} in '{column}', which is not text; convert it to text")
    if not value or not value.strip():
        raise DataError(f"{row} has no text in '{column}'; fill it in or remove the row")
    return value


def _messages(row: str, column: str, value: Any) -> Messages:
    """Check and convert the messages of a row. ShareGPT calls role and content `from` and `value`."""
    found = _parsed(row, column, value)
    if isinstance(found, Mapping):  # older versions of datasets return lists of fields
        found = [dict(zip(found, fields, strict=True)) for fields in zip(*found.values(), strict=True)]
    if not isinstance(found, list):
        raise DataError(f"{row} has no list of messages in '{column}'; name another column in data.messages")
    if not found:
        raise DataError(f"{row} has no messages in '{column}'; remove the row")
    return [_message(f"message {number} of {row}", each) for number, each in enumerate(found)]


def _message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {format_value(message)}; a message has the fields role and content")
    role, content = (message.get(name, message.get(other)) for name, other in (("role", "from"), ("content", "value")))
    for name, other, value in (("role", "from", role), ("content", "value", content)):
        if name not in message and other not in message:
            raise DataError(f"{where} has no field '{name}'; its fields are {', '.join(map(str, message))}")
        if not isinstance(value, str):
            raise DataError(f"{where} has {format_value(value)} as {name}, which is not text; convert it to text")
    role = SHARE_GPT.get(role, role)
    if role not in ROLES:
        raise DataError(f"{where} has the role '{role}'; {closest_match(role, ROLES)}")
    return {"role": role, "content": content}


def _choices(row: str, column: str, value: Any) -> tuple[str, ...]:
    found = _parsed(row, column, value)
    if not isinstance(found, list) or not all(isinstance(choice, str) and choice.strip() for choice in found):
        raise DataError(f"{row} has {format_value(value)} in '{column}', which is not a list of texts; give at least 2")
    if len(found) < 2:
        raise DataError(f"{row} has fewer than 2 choices in '{column}'; add some, or remove the row")
    return tuple(found)


def _parsed(row: str, column: str, value: Any) -> Any:
    """Return a value, parsed if it is JSON in a text column, as in a CSV file."""
    if not isinstance(value, str):
        return value
    with reading(f"'{column}' in {row}, which must be a list or a list as JSON,"):
        return json.loads(value)
