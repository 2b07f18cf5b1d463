"""Tiny decoders that chat, and conversations for them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from partita.core.rng import Key
from partita.models.tiny_decoder import write_tiny_decoder

VOCABULARY = ("zero", "one", "two", "three", "four", "five", "after", "before", "comes", "what", "next", "?", ".")
NUMBERS = VOCABULARY[:6]


def message(role: str, content: str) -> dict[str, str]:
    """Return a message."""
    return {"role": role, "content": content}


def conversation(number: int, turns: int = 1) -> list[dict[str, str]]:
    """Return a conversation of some questions and answers."""
    messages = []
    for turn in range(turns):
        messages.append(message("user", f"what comes after {NUMBERS[(number + turn) % 6]} ?"))
        messages.append(message("assistant", f"{NUMBERS[(number + turn + 1) % 6]} ."))
    return messages


ROWS: list[dict[str, Any]] = [
    {"messages": conversation(number, 1 + number % 3), "site": f"s{number % 3}"} for number in range(30)
]
QUESTIONS: list[dict[str, Any]] = [
    {
        "question": f"what comes after {NUMBERS[number % 6]} ?",
        "choices": [*[NUMBERS[(number + step) % 6] for step in range(1, 4)][:: (-1) ** number], f"{NUMBERS[0]} ."],
        "answer": 0 if number % 2 == 0 else 2,
        "site": f"s{number % 3}",
    }
    for number in range(24)
]


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_decoder(folder: Path, kind: Literal["llama", "gpt2"] = "llama") -> Path:
    """Write a tiny decoder."""
    write_tiny_decoder(folder, VOCABULARY, Key(0), layers=2, width=16, kind=kind)
    return folder
