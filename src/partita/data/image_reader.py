"""Decode images on demand, in threads and ahead of their use. Pillow decodes without holding Python's global lock."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.data import Batch
from partita.core.tensors import Tensors
from partita.data.cache import cached
from partita.data.errors import DataError, reading
from partita.data.image_source import ImageSource
from partita.data.loading import DatasetPart

MODES = {1: "L", 3: "RGB"}
MAX_THREADS = 16
READ_AHEAD_BYTES = 2**28  # pixels that may be decoded ahead of their use
REMEDY = "replace or remove it"


Pixels = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class ImageReader:
    """Decodes the images of a part to uint8 pixels, (channel, side, side)."""

    part: DatasetPart
    source: ImageSource
    feature: Any  # datasets.Image
    channels: int
    size: int | None  # side to resize images to; None to keep their size
    side: int = 0  # side of all images; 0 until it is known

    def __len__(self) -> int:
        return len(self.part.rows)

    def decode(self, place: int) -> Pixels:
        """Decode an image.

        Raises:
            DataError: If the image cannot be decoded, is not square, or has another size than the others.
        """
        kept = self.source[place]
        file = Path(kept["path"]) if kept and kept["path"] else None
        named = f"the image in {self.part.row(place)}" + (f" ({str(file)!r})" if file else "")
        with reading(named, REMEDY):
            if kept and kept["bytes"] is None and file and file.is_file():
                kept = {**kept, "bytes": file.read_bytes()}
            if not kept or kept["bytes"] == b"":
                raise DataError(f"{named} is empty; {REMEDY}")
            picture = self.feature.decode_example(kept).convert(MODES[self.channels])
            if self.size is not None and picture.size != (self.size, self.size):
                picture = picture.resize((self.size, self.size))
        width, height = picture.size
        if not self.side and width != height:
            raise DataError(f"{named} is {width} by {height}; set size to make the images square")
        if self.side and (width, height) != (self.side, self.side):
            raise DataError(
                f"{named} is {width} by {height}, the first is {self.side} by {self.side}; set size to resize them"
            )
        return np.asarray(picture).reshape(height, width, self.channels).transpose(2, 0, 1)

    def decode_all(self) -> Iterator[Pixels]:
        """Decode all images in order, in threads."""
        pool, places = _threads(os.getpid()), iter(range(len(self)))
        ahead = [pool.submit(self.decode, place) for place in islice(places, 4 * MAX_THREADS)]
        try:
            while ahead:
                yield ahead.pop(0).result()
                ahead += [pool.submit(self.decode, place) for place in islice(places, 1)]
        finally:
            for future in ahead:
                future.cancel()

    def check(self) -> None:
        """Decode all images once, so that no image stops a run later. The cache records that they are readable.

        Raises:
            DataError: If an image cannot be decoded or has another size.
        """
        options = f"{self.channels}:{self.size}:{self.side}:{self.source.fingerprint()}"

        def build(folder: Path) -> None:
            count = sum(1 for _ in self.decode_all())
            (folder / "readable").write_text(str(count))

        cached("images", hashlib.blake2b(options.encode(), digest_size=16).hexdigest(), build)


class ReadAhead:
    """Images that are decoded, or being decoded, before they are used. Not copied to other processes."""

    def __init__(self) -> None:
        self.process, self.rows = os.getpid(), dict[int, Future[Pixels]]()

    def start(self, reader: ImageReader, rows: list[int]) -> None:
        """Start to decode rows. If too many wait, the oldest are dropped: no one has taken them."""
        most = max(1, READ_AHEAD_BYTES // (reader.channels * reader.side**2))
        for row in rows:
            if row not in self._current():
                self.rows[row] = _threads(self.process).submit(reader.decode, row)
        while len(self.rows) > most:
            self.rows.pop(next(iter(self.rows))).cancel()

    def take(self, reader: ImageReader, rows: list[int]) -> dict[int, Pixels]:
        """Return the pixels of the rows, and forget them."""
        waiting = self._current()
        futures = {
            row: waiting.pop(row) if row in waiting else _threads(self.process).submit(reader.decode, row)
            for row in dict.fromkeys(rows)
        }
        return {row: future.result() for row, future in futures.items()}

    def _current(self) -> dict[int, Future[Pixels]]:
        if self.process != os.getpid():  # a fork has no threads that would finish the work
            self.process, self.rows = os.getpid(), {}
        return self.rows

    def __reduce__(self) -> tuple[type[ReadAhead], tuple[()]]:
        return ReadAhead, ()


@dataclass(frozen=True, eq=False)
class ImagesOnDisk:
    """Image examples that are decoded when they are taken. Batches equal those of a `Table` with the same images.

    Attributes:
        reader: Decodes the images.
        targets: Targets, (row, ...).
        transform: Applied to the inputs of each batch.
        device: Where batches are made. Pixels travel there as bytes.
    """

    reader: ImageReader
    targets: torch.Tensor
    transform: Callable[[Tensors], Tensors]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    images: torch.Tensor | None = None  # (row,): the image of each row; None for all images in order
    ahead: ReadAhead = field(default_factory=ReadAhead, repr=False)

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: torch.Tensor) -> Batch:
        indices = indices.to(self.targets.device)
        rows = self._images(indices)
        decoded = self.ahead.take(self.reader, rows)
        pixels = np.empty((len(rows), self.reader.channels, self.reader.side, self.reader.side), np.uint8)
        for place, row in enumerate(rows):
            pixels[place] = decoded[row]
        inputs = {"pixel_values": torch.from_numpy(pixels).to(self.device)}
        return Batch(self.transform(inputs), self.targets.index_select(0, indices).to(self.device))

    def prefetch(self, indices: torch.Tensor) -> None:
        """Start to decode rows that will be taken next."""
        self.ahead.start(self.reader, self._images(indices))

    def _images(self, indices: torch.Tensor) -> list[int]:
        chosen: list[int] = (indices if self.images is None else self.images[indices]).tolist()
        return chosen

    def to(self, device: torch.device) -> ImagesOnDisk:
        """Return the examples with batches on `device`."""
        return replace(self, device=device)


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads that decode images in this process."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(MAX_THREADS, usable), "images")
