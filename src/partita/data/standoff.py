"""Documents with annotations in files of their own: BRAT standoff, as in n2c2 2018.

A reader turns each document into rows of words with BIO tags, and hands them to the task `tokens`.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import floor
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from partita.core.options import closest_match, format_value
from partita.core.rng import Key
from partita.data.errors import DataError, need, reading
from partita.data.loading import Dataset, DatasetPart, Limit, TestPart
from partita.data.task import Task
from partita.data.text import Overlap
from partita.data.tokens import LongSentences, MaxTokens, WordTokenizer, tagged_words

# A word is a run of letters, a run of digits ("10mg" is two words), or a single mark.
WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_")
BREAKS = {"line": re.compile(r"\n"), "sentence": re.compile(r"(?<=[.!?])\s+(?=[A-Z])|\n[^\S\n]*\n")}
TEXT = ".txt"
KIND_FOLDERS = ("txt", "text", "ann", "con", "concept", "concepts")  # folders for one kind of file
FORMATS = {".ann": "brat", ".con": "i2b2"}  # suffix of the annotations -> name of the task

StandoffPath = Annotated[str | Path, "folder of the documents, or folder with the folders train and test"]


@dataclass(frozen=True)
class Entity:
    """An entity: the words from `start` to before `end`, counted from the first word of the document."""

    start: int
    end: int
    type: str


@dataclass(frozen=True)
class Document:
    """The words of a document.

    Attributes:
        words: All words.
        row_starts: Positions of the words that start a line or sentence, in order.
        entities: Its entities, in the order of the file.
        notes: How often something in its annotations was not used as it is written, by what it is.
    """

    words: Sequence[str]
    row_starts: Sequence[int]
    entities: Sequence[Entity]
    notes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class DocumentFiles:
    """The two files of a document, and its name: their common path below the folder of the part."""

    name: str
    folder: str  # first folder in the name; "" if there is none
    text: Path
    annotations: Path


Reader = Callable[[DocumentFiles], Document]


def brat(
    path: StandoffPath,
    key: Key,
    types: Annotated[tuple[str, ...], "entity types to read; left out: all"] = (),
    rows: Annotated[Literal["line", "sentence"], "what becomes a row: a line, or a sentence"] = "line",
    discontinuous: Annotated[
        Literal["cover", "first", "refuse"],
        "entities of several fragments: all from the first to the last word, the first fragment only, or an error",
    ] = "cover",
    tokenizer: WordTokenizer = None,
    max_length: MaxTokens = 256,
    test: TestPart = 0.2,
    limit: Limit = None,
    long_texts: LongSentences = "error",
    overlap: Overlap = None,
) -> Task:
    """Entities from BRAT standoff files: NAME.txt with a text and NAME.ann with its annotations.

    Rows have the columns `document` and `folder`. Without a folder "test", whole documents are held out. Of entities
    that overlap, the longest is kept. Relations, events, attributes and notes are ignored. Warnings count what is not
    used as it is written.
    """

    def read(files: DocumentFiles) -> Document:
        return read_brat(files, types, rows, discontinuous)

    source = standoff_dataset(path, key, ".ann", read, test)
    _check_types(source, types)
    return tagged_words(source, key, "tokens", "tags", tokenizer, max_length, limit, long_texts, overlap)


def standoff_format(path: str | Path) -> str | None:
    """Return the task that reads a folder of documents: "brat" or "i2b2"; None if it holds no annotations."""
    place = Path(path)
    found = {file.suffix for file in place.rglob("*") if file.suffix in FORMATS} if place.is_dir() else set()
    return FORMATS[min(found)] if found else None


def standoff_dataset(path: str | Path, key: Key, suffix: str, read: Reader, test: float | str = 0.2) -> Dataset:
    """Read all documents.

    Args:
        path: Folder of the documents, or folder with the folders train and test.
        key: Key for the draw of the held-out documents.
        suffix: Suffix of the annotations' files.
        read: Reads a document.
        test: Name of the folder to test on. A number is the share of the documents to hold out without a folder "test".

    Raises:
        DataError: If a file is missing or wrong. It names the file, and the line where it can.
    """
    place = Path(path)
    named = test if isinstance(test, str) else "test"
    documents = _parts(place, suffix, named)
    if len(documents) == 1 and isinstance(test, str):
        raise DataError(f"'{path}' has no folders 'train' and '{test}'; create them, or set data.test to a share")
    cut = len(documents) == 1
    if cut:
        documents = dict(zip(("train", "test"), _hold_out(documents["train"], float(test), key, place), strict=True))
    notes: Counter[str] = Counter()
    train, held_out = (_part(name, files, read, path, notes) for name, files in documents.items())
    for what, count in notes.items():
        warnings.warn(f"{count:,} {what} in '{path}'", stacklevel=3)
    return Dataset(place.resolve().name, path, train, held_out, cut)


def standoff_parts(path: str | Path, suffix: str, read: Reader) -> dict[str, DatasetPart]:
    """Read all parts, by name. The arguments are as in `standoff_dataset`."""
    notes: Counter[str] = Counter()
    return {name: _part(name, files, read, path, notes) for name, files in _parts(Path(path), suffix, "test").items()}


def _parts(place: Path, suffix: str, test: str) -> dict[str, list[DocumentFiles]]:
    """Find the documents of the folders "train" and `test`; if one is missing, all are the train part."""
    folders = {name: place / name for name in ("train", test)}
    if all(folder.is_dir() for folder in folders.values()):
        return {name: find_documents(folder, suffix) for name, folder in folders.items()}
    return {"train": find_documents(place, suffix)}


def find_documents(folder: Path, suffix: str) -> list[DocumentFiles]:
    """Find the documents below a folder, sorted by name.

    Files of a document have the same path below the folder, apart from the suffix and from folders such as "txt" and
    "concept" that hold one kind of file.

    Raises:
        DataError: If the folder has no documents, or if a document lacks one of its files.
    """
    found: dict[str, dict[str, Path]] = {}
    for file in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if file.suffix in (TEXT, suffix) and file.is_file():
            within = file.relative_to(folder)
            parents = [part for part in within.parts[:-1] if part.lower() not in KIND_FOLDERS]
            known = found.setdefault("/".join([*parents, within.stem]), {})
            if file.suffix in known:
                raise DataError(f"'{known[file.suffix]}' and '{file}' have the same name; rename one of them")
            known[file.suffix] = file
    if not any(suffix in files for files in found.values()):
        raise DataError(f"'{folder}' holds no documents: NAME{TEXT} with NAME{suffix}; name their folder")
    documents = []
    for name, files in sorted(found.items()):
        for one, other in ((TEXT, suffix), (suffix, TEXT)):
            if other not in files:
                raise DataError(f"'{files[one]}' has no file '{Path(name).name}{other}'; add it, or remove the file")
        top, slash, _ = name.partition("/")
        documents.append(DocumentFiles(name, top if slash else "", files[TEXT], files[suffix]))
    return documents


def _hold_out(
    documents: list[DocumentFiles], share: float, key: Key, folder: Path
) -> tuple[list[DocumentFiles], list[DocumentFiles]]:
    count = floor(len(documents) * Fraction(str(share)))
    if not 0 < count < len(documents):
        raise DataError(
            f"there is no folder 'test', and test = {share} would hold out {count} of the {len(documents)} documents "
            f"in '{folder}'; add the folders train and test, or set a share that leaves documents in both parts"
        )
    order = (key / "test").permutation(len(documents)).tolist()
    held, kept = sorted(order[:count]), sorted(order[count:])
    return [documents[place] for place in kept], [documents[place] for place in held]


def _part(
    name: str, documents: list[DocumentFiles], read: Reader, path: str | Path, notes: Counter[str]
) -> DatasetPart:
    columns: dict[str, list[object]] = {"tokens": [], "tags": [], "document": [], "folder": []}
    for files in documents:
        document = read(files)
        tags, overlapping = tag_words(document)
        notes.update(document.notes)
        if overlapping:
            notes["entities overlap a longer one and are left out"] += overlapping
        for start, end in _rows(document):
            for column, value in zip(
                columns, (document.words[start:end], tags[start:end], files.name, files.folder), strict=True
            ):
                columns[column].append(value)
    if not columns["tokens"]:
        raise DataError(f"no document of the {name} part of '{path}' has a word; name another folder")
    data = need("datasets", "text").Dataset.from_dict(columns)
    return DatasetPart(data, f"the {name} part of '{path}'", np.arange(len(data)))


def tag_words(document: Document) -> tuple[list[str], int]:
    """Return the BIO tag of each word, and the number of entities that were left out.

    Of entities that overlap, the longest is kept, and of equally long ones the first in the file.
    """
    tags, left_out = ["O"] * len(document.words), 0
    for entity in sorted(document.entities, key=lambda entity: entity.start - entity.end):  # sorting is stable
        if any(tag != "O" for tag in tags[entity.start : entity.end]):
            left_out += 1
            continue
        tags[entity.start : entity.end] = [f"I-{entity.type}"] * (entity.end - entity.start)
        tags[entity.start] = f"B-{entity.type}"
    return tags, left_out


def _rows(document: Document) -> Iterator[tuple[int, int]]:
    """Yield the first word of each row and the one after its last. A row does not end within an entity."""
    inside = {word for entity in document.entities for word in range(entity.start + 1, entity.end)}
    starts = [start for start in dict.fromkeys([0, *document.row_starts]) if start not in inside]
    for start, end in zip(starts, [*starts[1:], len(document.words)], strict=True):
        if start < end:
            yield start, end


def read_brat(
    files: DocumentFiles,
    types: Sequence[str] = (),
    rows: Literal["line", "sentence"] = "line",
    discontinuous: Literal["cover", "first", "refuse"] = "cover",
) -> Document:
    """Read a document. The arguments are as in `brat`.

    Raises:
        DataError: If an annotation does not fit the text. It names the file and the line.
    """
    text = read_text(files.text)
    words = list(WORD.finditer(text))
    starts, ends = [word.start() for word in words], [word.end() for word in words]
    row_starts = [bisect_left(starts, found.end()) for found in BREAKS[rows].finditer(text)]
    entities: list[Entity] = []
    notes: Counter[str] = Counter()
    for number, line in enumerate(read_text(files.annotations).split("\n"), 1):
        line = line.rstrip("\r")
        where = f"line {number} of '{files.annotations}'"
        if not line.strip() or line[0] in "REAMN#*":
            if line.strip():
                notes["relations, events, attributes and notes are ignored"] += 1
            continue
        kind, fragments, quoted = _parse(line, where)
        if types and kind not in types:
            notes["entities have a type that is not in data.types and are left out"] += 1
            continue
        _check_fragments(fragments, quoted, text, where)
        start, end = fragments[0][0], fragments[-1][1]
        if any(text[before[1] : after[0]].strip() for before, after in pairwise(fragments)):
            if discontinuous == "refuse":
                raise DataError(f"{where} is an entity of several fragments; set data.discontinuous to cover or first")
            notes["entities have several fragments"] += 1
            end = fragments[0][1] if discontinuous == "first" else end
        first, after = bisect_right(ends, start), bisect_left(starts, end)
        if first == after:
            raise DataError(f"{where} is an entity without a word, {format_value(text[start:end])}; remove the line")
        if starts[first] < start or ends[after - 1] > end:
            notes["entities start or end within a word and get the whole word"] += 1
        entities.append(Entity(first, after, kind))
    return Document([word.group() for word in words], row_starts, entities, notes)


def read_text(file: Path) -> str:
    """Read a file as it is: annotations count characters, so line ends must not change."""
    with reading(f"'{file}'", "convert it to UTF-8"), file.open(encoding="utf-8", newline="") as stream:
        return stream.read()


def _parse(line: str, where: str) -> tuple[str, list[tuple[int, int]], str]:
    """Return the type, the fragments and the text of a line such as "T1<tab>Drug 0 7;9 12<tab>aspirin 100"."""
    match = re.fullmatch(r"T\d+\t(\S+) (\d+ \d+(?:;\d+ \d+)*)\t(.*)", line)
    if match is None:
        raise DataError(f"{where} is no annotation of BRAT: {format_value(line)}; correct or remove it")
    pairs = [pair.split() for pair in match[2].split(";")]
    return match[1], sorted((int(start), int(end)) for start, end in pairs), match[3]


def _check_fragments(fragments: Iterable[tuple[int, int]], quoted: str, text: str, where: str) -> None:
    pieces = []
    for start, end in fragments:
        if not start < end <= len(text):
            raise DataError(f"{where} is for the characters {start} to {end}, but the text has {len(text)}; correct it")
        pieces.append(text[start:end])
    if (found := " ".join(" ".join(pieces).split())) != " ".join(quoted.split()):
        raise DataError(
            f"{where} says {format_value(quoted)}, but the text has {format_value(found)} there; do the files belong "
            "together, and are their line ends unchanged?"
        )


def _check_types(source: Dataset, types: Sequence[str]) -> None:
    """Raise a DataError if a type that was asked for never occurs."""
    known = {
        tag[2:] for part in (source.train, source.test) for row in part.values("tags") for tag in row if tag != "O"
    }
    for kind in types:
        if kind not in known:
            hint = closest_match(kind, sorted(known)) if known else "leave data.types out"
            raise DataError(f"no entity of '{source.path}' has the type {format_value(kind)} of data.types; {hint}")
