"""Encoded images of a part of a dataset, read one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from partita.data.cache import identity_of_file
from partita.data.errors import need
from partita.data.loading import DatasetPart

ROWS_TOGETHER = 256  # rows read together to hash their images


class ImageSource(Protocol):
    """Encoded images by row. Threads may read at the same time."""

    def __getitem__(self, place: int, /) -> Mapping[str, Any] | None:
        """Return "bytes" and "path" of an image, either of which may be None; None if there is no image."""
        ...

    def fingerprint(self) -> str:
        """Return a text that changes when an image does."""
        ...


@dataclass(frozen=True, eq=False)
class RowImages:
    """Images in the rows of a dataset, or in the files that the rows name."""

    data: Any  # datasets.Dataset with one column, which is not decoded
    column: str

    def __getitem__(self, place: int, /) -> Mapping[str, Any] | None:
        row: Mapping[str, Any] | None = self.data[place][self.column]
        return row

    def fingerprint(self) -> str:
        found = hashlib.blake2b(digest_size=16)
        for start in range(0, len(self.data), ROWS_TOGETHER):
            for row in self.data[start : start + ROWS_TOGETHER][self.column]:
                kept = row or {"bytes": None, "path": None}
                file = Path(kept["path"] or "")
                text = identity_of_file(file) if kept["bytes"] is None and file.is_file() else str(file)
                found.update(f"{text}:{len(kept['bytes'] or b'')}:".encode())
                found.update(kept["bytes"] or b"")
        return found.hexdigest()


@dataclass(frozen=True, eq=False)
class MappedImages:
    """Images in Arrow files, by their position in the file.

    Reading them through the memory map of the Arrow table would make every page that was ever read count as memory of
    this process.
    """

    files: tuple[Path, ...]
    opened: tuple[Any, ...]  # pyarrow.OSFile of each file
    file: NDArray[np.int32]  # (row,)
    start: NDArray[np.int64]  # (row,), in bytes
    length: NDArray[np.int64]  # (row,), in bytes

    def __getitem__(self, place: int, /) -> Mapping[str, Any] | None:
        stored = self.opened[self.file[place]].read_at(int(self.length[place]), int(self.start[place]))
        return {"bytes": stored, "path": None}

    def fingerprint(self) -> str:
        found = hashlib.blake2b("\n".join(map(identity_of_file, self.files)).encode(), digest_size=16)
        for positions in (self.file, self.start, self.length):
            found.update(positions.tobytes())
        return found.hexdigest()


def image_source(part: DatasetPart, column: str) -> ImageSource:
    """Return the encoded images of a column."""
    undecoded = part.data.select_columns([column]).cast_column(column, need("datasets", "data").Image(decode=False))
    rows = RowImages(undecoded, column)
    mapped = _mapped(part, column)
    # The files must hold the rows that the dataset shows, which is not so if it was derived from them.
    sample = {0, len(undecoded) // 2, len(undecoded) - 1}
    if mapped and all((rows[place] or {}).get("bytes") == (mapped[place] or {})["bytes"] for place in sample):
        return mapped
    return rows


def _mapped(part: DatasetPart, column: str) -> MappedImages | None:
    """Find the images in the Arrow files of a part; None if there are none, or a row has no image in them."""
    pyarrow = need("pyarrow", "data")
    files = [Path(entry["filename"]) for entry in part.data.cache_files]
    found: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
    for number, file in enumerate(files):
        mapped = pyarrow.memory_map(str(file))
        base = mapped.read_buffer(1).address
        mapped.seek(0)
        try:
            table = pyarrow.ipc.open_stream(mapped).read_all()
        except pyarrow.ArrowInvalid:
            return None
        if column not in table.column_names or not pyarrow.types.is_struct(table.schema.field(column).type):
            return None
        for chunk in table.column(column).chunks:
            stored = chunk.field("bytes")
            if chunk.null_count or stored.null_count or pyarrow.types.is_null(stored.type):
                return None
            wide = pyarrow.types.is_large_binary(stored.type)
            _, offsets, data = stored.buffers()
            ends = np.frombuffer(offsets, np.int64 if wide else np.int32)[stored.offset :][: len(stored) + 1]
            starts = ends[:-1].astype(np.int64) + (data.address - base)
            found.append((np.full(len(stored), number, np.int32), starts, np.diff(ends).astype(np.int64)))
    if not found:
        return None
    file_of, start, length = (np.concatenate(each) for each in zip(*found, strict=True))
    if part.rows.max() >= len(file_of):
        return None
    opened = tuple(pyarrow.OSFile(str(file)) for file in files)
    return MappedImages(tuple(files), opened, file_of[part.rows], start[part.rows], length[part.rows])
