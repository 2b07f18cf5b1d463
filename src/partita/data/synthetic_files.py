"""Small synthetic data sets as files, for the examples: tagged notes by hospital, and pictures by class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from partita.core.rng import Key
from partita.data.errors import need

HOSPITALS = ("east", "north", "south", "west")
SIGNS = ("cough", "fever", "nausea", "pain", "rash", "swelling")
PLACES = (("left", "arm"), ("right", "arm"), ("left", "knee"), ("right", "knee"), ("chest",), ("back",))
DRUGS = ("aspirin", "ibuprofen", "morphine", "paracetamol")
# Words with their tags. A slot in capitals is filled with an entity of that kind.
SENTENCES = (
    ("patient", "reports", "SIGN", "in", "the", "PLACE", "."),
    ("no", "SIGN", "today", "."),
    ("DRUG", "was", "given", "for", "SIGN", "."),
    ("the", "PLACE", "shows", "SIGN", "since", "monday", "."),
    ("continue", "DRUG", "and", "return", "in", "a", "week", "."),
    ("seen", "for", "SIGN", "and", "SIGN", "of", "the", "PLACE", "."),
)
WORDS = sorted(
    {word for sentence in SENTENCES for word in sentence if not word.isupper()}
    | {*SIGNS, *DRUGS, *(word for place in PLACES for word in place)}
)
COLORS = {"blue": (40, 80, 220), "green": (40, 180, 70), "red": (220, 50, 40), "yellow": (230, 210, 50)}


def write_notes(folder: Path, key: Key, sentences: int = 240) -> None:
    """Write train.jsonl: sentences as words, their BIO tags, and the hospital that holds them.

    Nothing is taken from real notes. Each hospital uses some signs and sentences more often than others.

    Args:
        folder: Folder to create.
        key: Key for all random draws.
        sentences: Number of sentences.
    """
    draws = np.random.default_rng(key.seed())
    habits = {
        hospital: {name: draws.dirichlet(np.full(count, 2.0)) for name, count in _CHOICES.items()}
        for hospital in HOSPITALS
    }
    folder.mkdir(parents=True)
    with (folder / "train.jsonl").open("x", encoding="utf-8") as file:
        for number in range(sentences):
            hospital = HOSPITALS[number % len(HOSPITALS)]
            words, tags = _sentence(draws, habits[hospital])
            file.write(json.dumps({"tokens": words, "tags": tags, "hospital": hospital}) + "\n")


_CHOICES = {"SENTENCE": len(SENTENCES), "SIGN": len(SIGNS), "PLACE": len(PLACES), "DRUG": len(DRUGS)}
_ENTITIES: dict[str, Sequence[tuple[str, ...]]] = {
    "SIGN": [(sign,) for sign in SIGNS],
    "PLACE": PLACES,
    "DRUG": [(drug,) for drug in DRUGS],
}


def _sentence(draws: np.random.Generator, habits: dict[str, np.ndarray]) -> tuple[list[str], list[str]]:
    words, tags = [], []
    for slot in SENTENCES[draws.choice(_CHOICES["SENTENCE"], p=habits["SENTENCE"])]:
        if slot not in _ENTITIES:
            words.append(slot)
            tags.append("O")
            continue
        entity = _ENTITIES[slot][draws.choice(_CHOICES[slot], p=habits[slot])]
        words += entity
        tags += [f"B-{slot}", *[f"I-{slot}"] * (len(entity) - 1)]
    return words, tags


def write_pictures(folder: Path, key: Key, each: int = 40, size: int = 32) -> None:
    """Write train/COLOR/N.png: a noisy square of that color at a random place on a gray ground.

    Args:
        folder: Folder to create.
        key: Key for all random draws.
        each: Number of pictures of each color.
        size: Side of a picture in pixels.
    """
    image = need("PIL.Image", "data")
    draws = np.random.default_rng(key.seed())
    for name, color in COLORS.items():
        (folder / "train" / name).mkdir(parents=True)
        for number in range(each):
            pixels = draws.normal(128, 20, (size, size, 3))
            top, left = draws.integers(0, size // 2, 2)
            pixels[top : top + size // 2, left : left + size // 2] += np.array(color) - 128
            picture = image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            picture.save(folder / "train" / name / f"{number}.png")
