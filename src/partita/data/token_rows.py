"""Token rows as flat arrays, in memory or in memory-mapped files of the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core.options import NotNegative
from partita.data.cache import cached

FORMAT = "1"  # change it if the same texts would give other rows
IN_MEMORY_UP_TO = 2**24  # bytes of text; larger sets take so long to tokenize that later runs should reuse the tokens
IDS, TAGS, OFFSETS, DOCUMENTS, ABOUT = "ids", "tags", "offsets.npy", "documents.npy", "about.json"

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
        tags: Target of each token, (token,); None if tokens have none.
        documents: Document of each row, (row,), counted from the first of the part; None if rows are documents.
    """

    ids: Int32s
    lengths: NDArray[np.int64]
    tags: Int32s | None = None
    documents: NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class TokenRows:
    """All token rows of a part: the chunks, joined."""

    ids: Tensor  # (token,)
    offsets: Tensor  # (row + 1,)
    tags: Tensor | None  # (token,)
    documents: Tensor | None  # (row,)
    vocabulary_size: int
    on_disk: bool = False


@dataclass
class CutCounter:
    """Counts the texts that are longer than the limit, and their tokens beyond it."""

    texts: int = 0
    tokens: int = 0
    first: int | None = None  # the first such text of a part
    longest: int = 0  # tokens of that text

    def add(self, lengths: Iterable[tuple[int, int]], limit: int) -> None:
        """Add texts, given as (place, tokens)."""
        for place, length in lengths:
            if length > limit:
                self.texts, self.tokens = self.texts + 1, self.tokens + length - limit
                if self.first is None:
                    self.first, self.longest = place, length


@dataclass(frozen=True)
class Work:
    """What makes the rows of a part: a function that yields them, and a digest of everything they depend on.

    Attributes:
        chunks: Yields the rows. It may count what it cuts.
        key: The digest; empty if it is not known, so that the rows stay in memory.
        cut: Filled by `chunks`.
    """

    chunks: Callable[[CutCounter], Iterator[Chunk]]
    key: str
    cut: CutCounter = field(default_factory=CutCounter)


def flat(rows: Sequence[Sequence[int]]) -> tuple[Int32s, NDArray[np.int64]]:
    """Return the numbers of all rows in one array, and the length of each row."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths


def keep_on_disk(size: int, limit: float | Literal["auto"]) -> bool:
    """Return whether the tokens of `size` bytes of text are kept on disk."""
    return size > (IN_MEMORY_UP_TO if limit == "auto" else limit * 2**30)


def digest(*parts: str) -> str:
    """Return the key of rows that depend on `parts`."""
    return hashlib.blake2b("\n".join([FORMAT, *parts]).encode(), digest_size=16).hexdigest()


def collect(work: Work, on_disk: bool) -> TokenRows:
    """Make the rows of a part, or find those of an earlier run in the cache.

    Args:
        work: What makes the rows.
        on_disk: Keep them in the cache and map them into memory.
    """
    if on_disk and work.key:
        folder = cached("tokens", work.key, lambda folder: _write(folder, work))
        about = json.loads((folder / ABOUT).read_text())
        vars(work.cut).update(about["cut"])
        return TokenRows(
            _map(folder / IDS),
            torch.from_numpy(np.load(folder / OFFSETS)),
            _map(folder / TAGS) if about["tags"] else None,
            torch.from_numpy(np.load(folder / DOCUMENTS)) if about["documents"] else None,
            about["vocabulary_size"],
            True,
        )
    chunks = list(work.chunks(work.cut))
    ids = _join([chunk.ids for chunk in chunks], np.int32)
    return TokenRows(
        torch.from_numpy(ids),
        torch.from_numpy(_offsets(chunks)),
        _joined(chunk.tags for chunk in chunks),
        _joined(chunk.documents for chunk in chunks),
        int(ids.max()) + 1 if len(ids) else 0,
    )


def _write(folder: Path, work: Work) -> None:
    kept, largest, with_tags = list[Chunk](), -1, False
    none = np.empty(0, np.int32)
    with (folder / IDS).open("wb") as ids, (folder / TAGS).open("wb") as tags:
        for chunk in work.chunks(work.cut):
            chunk.ids.tofile(ids)
            if chunk.tags is not None:
                chunk.tags.tofile(tags)
                with_tags = True
            largest = max(largest, int(chunk.ids.max(initial=-1)))
            kept.append(Chunk(none, chunk.lengths, None, chunk.documents))
    np.save(folder / OFFSETS, _offsets(kept))
    documents = _joined(chunk.documents for chunk in kept)
    if documents is not None:
        np.save(folder / DOCUMENTS, documents.numpy())
    about: dict[str, Any] = {
        "tags": with_tags,
        "documents": documents is not None,
        "vocabulary_size": largest + 1,
        "cut": vars(work.cut),
    }
    (folder / ABOUT).write_text(json.dumps(about))


def _map(file: Path) -> Tensor:
    # Copy on write: torch warns about arrays that cannot be written. Nothing writes to them.
    return (
        torch.from_numpy(np.memmap(file, np.int32, "c")) if file.stat().st_size else torch.empty(0, dtype=torch.int32)
    )


def _offsets(chunks: Sequence[Chunk]) -> NDArray[np.int64]:
    lengths = _join([chunk.lengths for chunk in chunks], np.int64)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _joined(parts: Iterable[NDArray[Any] | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.from_numpy(np.concatenate(present)) if present else None


def _join(parts: Sequence[NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *parts])
