"""Rows of a file, some at a time, so that it need not fit into memory. No column is interpreted."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partita.data.dataset_files import IMAGE_SUFFIXES
from partita.data.errors import DataError, need, reading
from partita.data.image_reader import MODES

Row = Mapping[str, Any]
KINDS = ("csv", "json", "jsonl", "parquet", "txt")
NUMBER = "row"  # the number of a row in its file, from 0


def stream_rows(path: Path, column: str, together: int) -> Iterator[list[Row]]:
    """Yield the rows of a file or of a folder of images. A JSON list is read at once; everything else as a stream.

    Args:
        path: A file, an image, or a folder of images.
        column: Name of the column of a line in a text file, or of an image.
        together: Rows to yield at once.

    Raises:
        DataError: If the file cannot be read.
    """
    rows = _rows(path, column)
    while chunk := list(islice(rows, together)):
        yield chunk


def check_file(path: Path) -> None:
    """Raise a DataError if there is no such file or folder."""
    if not path.exists():
        raise DataError(f"there is no file or folder '{path}'; name a file ({', '.join(KINDS)}) or images")


def _rows(path: Path, column: str) -> Iterator[Row]:
    check_file(path)
    kind = path.suffix.lstrip(".").lower()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
        if not files:
            raise DataError(f"the folder '{path}' holds no images; name a file ({', '.join(KINDS)})")
        yield from ({"id": str(file.relative_to(path)), column: str(file)} for file in files)
    elif path.suffix.lower() in IMAGE_SUFFIXES:
        yield {"id": path.name, column: str(path)}
    elif kind == "parquet":
        with reading(f"'{path}'"), need("pyarrow.parquet", "data").ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    elif kind == "csv":
        csv.field_size_limit(2**31 - 1)
        with reading(f"'{path}'"), path.open(encoding="utf-8-sig", newline="") as stream:
            yield from csv.DictReader(stream, strict=True)
    elif kind == "txt":
        with reading(f"'{path}'"), path.open(encoding="utf-8-sig") as stream:
            yield from ({column: line.rstrip("\n")} for line in stream if line.strip())
    elif kind in ("json", "jsonl"):
        yield from _objects(path)
    else:
        raise DataError(f"'{path}' is not one of {', '.join(KINDS)} and no image; convert it to one of them")


def _objects(path: Path) -> Iterator[Row]:
    with reading(f"'{path}'"), path.open(encoding="utf-8-sig") as stream:
        start = stream.read(1)
        while start.isspace():
            start = stream.read(1)
        stream.seek(0)
        lines = enumerate(json.load(stream) if start == "[" else stream, 1)
        for number, line in lines:
            if isinstance(line, str):
                if not line.strip():
                    continue
                try:
                    line = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"line {number} of '{path}' is not JSON: {error}; fix or remove it") from error
            if not isinstance(line, dict):
                raise DataError(f"row {number} of '{path}' is not an object with named columns; write it as {{...}}")
            yield line


def decode_image(
    value: Any, named: str, folder: Path, size: int, channels: int
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Decode an image to uint8 pixels, (channel, size, size), as the image tasks do.

    Args:
        value: Path of a file, or a mapping with "bytes" or "path", as datasets store images.
        named: Names the image in an error message.
        folder: Folder to which paths are relative.
        size: Side to resize the image to.
        channels: 1 for grayscale, 3 for RGB.

    Returns:
        The pixels, and the width and height before resizing.

    Raises:
        DataError: If it cannot be decoded.
    """
    datasets, pillow = need("datasets", "data"), need("PIL.Image", "data")
    with reading(named, "replace or remove it"):
        content = value.get("bytes") if isinstance(value, Mapping) else None
        if content is None:
            name = value.get("path") if isinstance(value, Mapping) else value
            if not isinstance(name, str):
                raise DataError(f"{named} is neither an image nor the path of one; correct it")
            content = (Path(name) if Path(name).is_file() else folder / name).read_bytes()
        picture = datasets.Image().decode_example({"bytes": content, "path": None})
        assert isinstance(picture, pillow.Image)
        shape = picture.size
        picture = picture.convert(MODES[channels])
        if shape != (size, size):
            picture = picture.resize((size, size))
    pixels = np.asarray(picture).reshape(size, size, channels).transpose(2, 0, 1)
    return torch.from_numpy(pixels.copy()), shape


def save_mask(classes: torch.Tensor, shape: tuple[int, int], file: Path) -> None:
    """Write class numbers, (height, width), as a grayscale PNG of the given width and height."""
    pillow = need("PIL.Image", "data")
    picture = pillow.fromarray(classes.to(torch.uint8).cpu().numpy())
    content = io.BytesIO()
    picture.resize(shape, pillow.Resampling.NEAREST).save(content, "PNG")
    file.write_bytes(content.getvalue())
