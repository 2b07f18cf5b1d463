"""Sizes and modes of images as they are on disk, before they are resized and converted."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partita.data.errors import need, reading
from partita.data.image_source import image_source
from partita.data.loading import DatasetPart


def image_shapes(part: DatasetPart, column: str) -> tuple[NDArray[np.int64], list[str]]:
    """Read the headers of the images of a column.

    Returns:
        The longer side of each image in pixels, (row,), and the mode of each, such as "RGB".

    Raises:
        DataError: If the column is missing, or an image cannot be opened.
    """
    part.need(column)
    shapes = list(_headers(part, column))
    return np.array([max(size) for size, _ in shapes], np.int64), [mode for _, mode in shapes]


def _headers(part: DatasetPart, column: str) -> Iterator[tuple[tuple[int, int], str]]:
    images, source = need("PIL.Image", "data"), image_source(part, column)
    for place in range(len(part.rows)):
        kept = source[place] or {}
        with reading(f"the image in {part.row(place)}", "replace or remove it"):
            content = kept.get("bytes")
            with images.open(io.BytesIO(content) if content is not None else Path(kept["path"])) as picture:
                yield picture.size, picture.mode
