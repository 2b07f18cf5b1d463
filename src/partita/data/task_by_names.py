"""Tasks that the names and types of a data set's columns tell: chat, sequence to sequence, segmentation, and pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partita.data.conversations import ANSWER, CHOICES, INPUT, INSTRUCTIONS, MESSAGES, OUTPUTS
from partita.data.dataset_files import IMAGE_SUFFIXES

LIST_OF_MESSAGES, LIST_OF_TEXTS = "list of messages", "list of texts"  # kinds of columns
SOURCES = ("source", "article", "document", "dialogue")
TARGETS = ("target", "summary", "highlights", "translation")
PICTURES, MASKS = ("image", "pixel_values"), ("mask", "annotation", "label")
# Names of two texts that are judged together.
PAIRS = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("text1", "text2"), ("question1", "question2"),
    ("note", "statement"),
)  # fmt: skip

Roles = dict[str, str]


def task_by_names(kinds: Mapping[str, str], values: Mapping[str, list[Any]]) -> tuple[str, Roles] | None:
    """Return a task and the columns that it reads; None if no names tell one.

    Args:
        kinds: What each column holds.
        values: The values of each column, except of images.
    """

    def first(names: Sequence[str], *wanted: str) -> str | None:
        return next((name for name in names if kinds.get(name) in wanted), None)

    messages = first([*MESSAGES, *kinds], LIST_OF_MESSAGES)
    question, output = first(INSTRUCTIONS, "text"), first(OUTPUTS, "text")
    picture, mask = first(PICTURES, "image"), first(MASKS, "image")
    if messages:
        return "chat", {"messages": messages}
    if question and kinds.get(CHOICES) == LIST_OF_TEXTS and kinds.get(ANSWER) in ("integer", "class"):
        return "chat", {"instruction": question, "choices": CHOICES, "answer": ANSWER}
    if question and output:
        more = {"input": INPUT} if kinds.get(INPUT) == "text" else {}
        return "chat", {"instruction": question, **more, "output": output}
    if picture is None and mask is None:
        picture, mask = (
            next((name for name in names if _are_files(values.get(name))), None) for names in (PICTURES, MASKS)
        )
    if picture and mask:
        return "segmentation", {"image": picture, "mask": mask}
    source, target = first(SOURCES, "text"), first(TARGETS, "text")
    if source and target and _are_free(values[source]) and _are_free(values[target]):
        return "seq2seq", {"source": source, "target": target}
    return None


def pair_by_names(kinds: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the columns of two texts that are judged together; None if no names tell them."""
    return next((pair for pair in PAIRS if all(kinds.get(name) == "text" for name in pair)), None)


def _are_files(values: list[Any] | None) -> bool:
    return bool(values) and all(
        isinstance(value, str) and value.lower().endswith(IMAGE_SUFFIXES) for value in values or ()
    )


def _are_free(values: list[Any]) -> bool:
    """Return whether texts are written freely, and not chosen from few: most occur once."""
    return len(set(values)) > len(values) / 2
