"""Small data sets as files, for the examples. All is synthetic, except the strokes of the digits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partita.core.rng import Key
from partita.data.digits import read_digits
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

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(sentences):
            hospital = HOSPITALS[number % len(HOSPITALS)]
            words, tags = _sentence(draws, habits[hospital])
            yield {"tokens": words, "tags": tags, "hospital": hospital}

    _write_rows(folder, rows())


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


MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
YEARS = tuple(str(year) for year in range(2010, 2030))
# How each country writes the 7th of March 2024. The registries of dates are the clients.
COUNTRIES = {"germany": "{day}.{month}.{year}", "sweden": "{year}-{month}-{day}", "usa": "{month}/{day}/{year}"}
DATE_WORDS = (*MONTHS, *YEARS, *(str(day) for day in range(1, 32)), *(f"{day:02}" for day in range(1, 10)), *"-./")


def write_dates(folder: Path, key: Key, dates: int = 1200) -> None:
    """Write train.jsonl: dates as a country writes them, the same in words ("march 7 2024"), and the country.

    Args:
        folder: Folder to create.
        key: Key for all random draws.
        dates: Number of dates.
    """
    draws = np.random.default_rng(key.seed())

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(dates):
            country = tuple(COUNTRIES)[number % len(COUNTRIES)]
            month, day, year = int(draws.integers(12)), int(draws.integers(1, 29)), str(draws.choice(YEARS))
            source = COUNTRIES[country].format(day=f"{day:02}", month=f"{month + 1:02}", year=year)
            row = {"source": source, "target": f"{MONTHS[month]} {day} {year}", "country": country}
            yield row

    _write_rows(folder, rows())


ANSWERS = ("contradicts", "entails", "says nothing of it")
STATEMENT_WORDS = ("free", "has", "is")  # beside `WORDS`


def write_statements(folder: Path, key: Key, pairs: int = 600) -> None:
    """Write train.jsonl: a note, a statement about a sign or a drug, what the note says of it, and the hospital.

    Nothing is taken from real notes.

    Args:
        folder: Folder to create.
        key: Key for all random draws.
        pairs: Number of notes with a statement.
    """
    draws = np.random.default_rng(key.seed())

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(pairs):
            sign, drug = str(draws.choice(SIGNS)), str(draws.choice(DRUGS))
            place = " ".join(PLACES[draws.integers(len(PLACES))])
            present, claimed, of_drug = (int(draws.integers(count)) for count in (2, 2, 3))
            note = (f"no {sign} today .", f"patient reports {sign} in the {place} .")[present]
            statement = (f"patient is free of {sign} .", f"patient has {sign} .")[claimed]
            row = {"note": note, "statement": statement, "label": ANSWERS[int(present == claimed)]}
            if of_drug == 0:
                row |= {"statement": f"{drug} was given .", "label": ANSWERS[2]}
            yield {**row, "hospital": HOSPITALS[number % len(HOSPITALS)]}

    _write_rows(folder, rows())


SCANNERS = {"bright": (90.0, 10.0), "dark": (20.0, 10.0), "noisy": (50.0, 40.0)}  # ground and noise of the pixels
SCENE_CLASSES = ("ground", "zero", "one")


def write_scenes(folder: Path, key: Key, scenes: int = 180, size: int = 32) -> None:
    """Write images/N.png, masks/N.png and train.csv: handwritten zeros and ones at random places, and the scanner.

    The strokes are those of real digits. A mask holds 0 for the ground, 1 for a zero and 2 for a one.

    Args:
        folder: Folder to create.
        key: Key for all random draws.
        scenes: Number of images.
        size: Side of an image in pixels.
    """
    image = need("PIL.Image", "data")
    draws = np.random.default_rng(key.seed())
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    lines = ["image,mask,scanner"]
    pixels, labels = (values.squeeze().numpy() for values in read_digits())
    for number in range(scenes):
        scanner = tuple(SCANNERS)[number % len(SCANNERS)]
        ground, noise = SCANNERS[scanner]
        canvas, mask = np.full((size, size), ground), np.zeros((size, size), np.uint8)
        for top, left in _places(draws, size):
            digit = int(draws.integers(2))
            strokes = pixels[draws.choice(np.flatnonzero(labels == digit))].repeat(2, 0).repeat(2, 1)
            inside = (slice(top, top + 16), slice(left, left + 16))
            canvas[inside] += strokes * 9
            mask[inside][strokes > 7] = 1 + digit
        canvas = (canvas + draws.normal(0, noise, canvas.shape)).clip(0, 255).astype(np.uint8)
        image.fromarray(canvas).convert("RGB").save(folder / "images" / f"{number}.png")
        image.fromarray(mask).save(folder / "masks" / f"{number}.png")
        lines.append(f"images/{number}.png,masks/{number}.png,{scanner}")
    (folder / "train.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _places(draws: np.random.Generator, size: int) -> list[tuple[int, int]]:
    """Draw the corners of two digits that do not touch, one in each half of the canvas."""
    half = size // 2
    return [(int(draws.integers(0, size - 16 + 1)), left) for left in (0, half)]


NUMBERS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen",
)  # fmt: skip
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
SCHOOLS = {"days": DAYS, "months": MONTHS, "numbers": NUMBERS}  # what the pupils of each school mostly ask about
CONVERSATION_WORDS = (*DAYS, *MONTHS, *NUMBERS, "after", "and", "before", "comes", "that", "what", "?", ".")


def write_conversations(folder: Path, key: Key, conversations: int = 600) -> None:
    """Write train.jsonl: conversations about what comes before or after a day, a month or a number, and the school.

    Half of the conversations go on with a second question that only the first answer explains.

    Args:
        folder: Folder to create.
        key: Key for all random draws.
        conversations: Number of conversations.
    """
    draws = np.random.default_rng(key.seed())

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(conversations):
            school = tuple(SCHOOLS)[number % len(SCHOOLS)]
            topic = school if draws.random() < 0.8 else str(draws.choice(tuple(SCHOOLS)))
            step = int(draws.choice((-1, 1)))
            side, words = ("before", "after")[step > 0], SCHOOLS[topic]
            place = int(draws.integers(len(words)))
            first, second, third = (words[(place + each * step) % len(words)] for each in range(3))
            turns = [f"what comes {side} {first} ?", f"{second} comes {side} {first} ."]
            if draws.integers(2):
                turns += [f"and {side} that ?", f"{third} comes {side} {second} ."]
            messages = [
                {"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(turns)
            ]
            yield {"messages": messages, "school": school}

    _write_rows(folder, rows())


def _write_rows(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write train.jsonl into a new folder."""
    folder.mkdir(parents=True)
    with (folder / "train.jsonl").open("x", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
