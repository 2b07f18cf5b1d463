"""Token rows as flat arrays, in memory or in memory-mapped files of the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.options import NotNegative
from partita.data.cache import cached

FORMAT = "1"  # change it if the same texts would give other rows
IN_MEMORY_UP_TO = 2**24  # bytes of text; larger sets take so long to tokenize that later runs should reuse the tokens
IDS, TARGETS, OFFSETS, DOCUMENTS, ABOUT = "ids", "targets", "offsets.npy", "documents.npy", "about.json"

TextMemory = Annotated[
    NotNegative | Literal["auto"],
    "keep the tokens in memory if the texts take at most this many GiB; else tokenize once into files in the cache, "
    "which later runs use; `auto`: 16 MiB",
]
Int32s = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some token rows.

    Attributes:
        ids: Tokens of all rows, (token,).
        lengths: Tokens of each row, (row,).
        documents: Document of each row, (row,), counted from the first of the part; None if rows are documents.
        targets: Target of each token, (token,); None if the tokens have none.
    """

    ids: Int32s
    lengths: NDArray[np.int64]
    documents: NDArray[np.int64] | None = None
    targets: Int32s | None = None


@dataclass(frozen=True, eq=False)
class TokenRows:
    """All token rows of a part: the chunks, joined."""

    ids: torch.Tensor  # (token,)
    offsets: torch.Tensor  # (row + 1,)
    documents: torch.Tensor | None  # (row,)
    vocabulary_size: int
    cut: CutCounter
    targets: torch.Tensor | None = None  # (token,)


@dataclass
class CutCounter:
    """Counts the texts that are longer than the limit, and their tokens beyond it."""

    texts: int = 0
    tokens: int = 0
    first: int | None = None  # the first such text of a part
    length: int = 0  # tokens of that text

    def add(self, lengths: Iterable[tuple[int, int]], limit: int) -> None:
        """Add texts, given as (place, tokens)."""
        for place, length in lengths:
            if length > limit:
                self.texts, self.tokens = self.texts + 1, self.tokens + length - limit
                if self.first is None:
                    self.first, self.length = place, length

    def __add__(self, other: CutCounter) -> CutCounter:
        """Return the counts of two parts."""
        return CutCounter(self.texts + other.texts, self.tokens + other.tokens)


def flat(rows: Sequence[Sequence[int]]) -> tuple[Int32s, NDArray[np.int64]]:
    """Return the numbers of all rows in one array, and the length of each row."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths


def keep_on_disk(size: int, limit: float | Literal["auto"]) -> bool:
    """Return whether the tokens of `size` bytes of text are kept on disk."""
    return size > (IN_MEMORY_UP_TO if limit == "auto" else limit * 2**30)


def digest(tokenizer: str, *parts: str) -> str:
    """Return the key of rows that depend on `parts` and a tokenizer; empty if its digest is not known."""
    if not tokenizer:
        return ""
    return hashlib.blake2b("\n".join([FORMAT, tokenizer, *parts]).encode(), digest_size=16).hexdigest()


def collect(chunks: Callable[[CutCounter], Iterator[Chunk]], key: str) -> TokenRows:
    """Make the rows of a part, or find those of an earlier run in the cache.

    Args:
        chunks: Yields the rows, and counts what it cuts.
        key: Digest of everything that the rows depend on, to keep them in the cache and map them into memory. Empty to
            keep them in memory only.
    """
    if key:
        folder = cached("tokens", key, lambda folder: _write(folder, chunks))
        about = json.loads((folder / ABOUT).read_text())
        return TokenRows(
            _map(folder / IDS),
            torch.from_numpy(np.load(folder / OFFSETS, allow_pickle=False)),
            torch.from_numpy(np.load(folder / DOCUMENTS, allow_pickle=False)) if about["documents"] else None,
            about["vocabulary_size"],
            CutCounter(**about["cut"]),
            _map(folder / TARGETS) if (folder / TARGETS).is_file() else None,
        )
    cut = CutCounter()
    made = list(chunks(cut))
    ids = _join([chunk.ids for chunk in made], np.int32)
    return TokenRows(
        torch.from_numpy(ids),
        torch.from_numpy(_offsets(made)),
        _joined(chunk.documents for chunk in made),
        int(ids.max(initial=-1)) + 1,
        cut,
        _joined(chunk.targets for chunk in made),
    )


def _write(folder: Path, chunks: Callable[[CutCounter], Iterator[Chunk]]) -> None:
    kept, largest, cut = list[Chunk](), -1, CutCounter()
    none = np.empty(0, np.int32)
    with ExitStack() as files:
        ids, targets = files.enter_context((folder / IDS).open("wb")), None
        for chunk in chunks(cut):
            chunk.ids.tofile(ids)
            if chunk.targets is not None:
                targets = targets or files.enter_context((folder / TARGETS).open("wb"))
                chunk.targets.tofile(targets)
            largest = max(largest, int(chunk.ids.max(initial=-1)))
            kept.append(Chunk(none, chunk.lengths, chunk.documents))
    np.save(folder / OFFSETS, _offsets(kept))
    documents = _joined(chunk.documents for chunk in kept)
    if documents is not None:
        np.save(folder / DOCUMENTS, documents.numpy())
    about: dict[str, Any] = {
        "documents": documents is not None,
        "vocabulary_size": largest + 1,
        "cut": asdict(cut),
    }
    (folder / ABOUT).write_text(json.dumps(about))


def _map(file: Path) -> torch.Tensor:
    # Copy on write: torch warns about arrays that cannot be written. Nothing writes to them.
    return (
        torch.from_numpy(np.memmap(file, np.int32, "c")) if file.stat().st_size else torch.empty(0, dtype=torch.int32)
    )


def _offsets(chunks: Sequence[Chunk]) -> NDArray[np.int64]:
    lengths = _join([chunk.lengths for chunk in chunks], np.int64)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _joined(parts: Iterable[NDArray[Any] | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.from_numpy(np.concatenate(present)) if present else None


def _join(parts: Sequence[NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *parts])
