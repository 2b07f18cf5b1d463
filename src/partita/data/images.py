"""Image classification tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch

from partita.core.memory import available, require
from partita.core.options import MAX_NUMBER, NotNegative, Positive, Range
from partita.core.rng import Key
from partita.core.sharing import shared
from partita.core.tensors import Tensors
from partita.data.errors import DataError, need
from partita.data.image_reader import ImageReader, ImagesOnDisk
from partita.data.image_source import image_source
from partita.data.labels import one_label
from partita.data.loading import DataPath, Dataset, DatasetPart, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.task import Side, Table, Task

ImageTable = Table | ImagesOnDisk
Size = Annotated[Side | None, "resize images to this side length in pixels"]
Channels = Annotated[Literal[1, 3], "1: grayscale, 3: RGB"]
PixelMean = Annotated[
    tuple[Annotated[float, Range(low=-MAX_NUMBER, high=MAX_NUMBER)], ...], "mean to subtract, per channel"
]
PixelStd = Annotated[tuple[Positive, ...], "standard deviation to divide by, per channel"]
Memory = Annotated[
    NotNegative | Literal["auto"],
    "keep the decoded images in memory if they take at most this many GiB, else decode them on demand; `auto`: a "
    "quarter of the free memory",
]


@dataclass(frozen=True)
class Normalize:
    """Converts uint8 pixels to ((x / 255) - mean) / std per channel. A single value applies to all channels."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, inputs: Tensors) -> Tensors:
        pixels = inputs["pixel_values"].float()  # (example, channel, height, width)
        mean, std = (torch.tensor(value, device=pixels.device).view(-1, 1, 1) for value in (self.mean, self.std))
        return {**inputs, "pixel_values": pixels.div_(255).sub_(mean).div_(std)}


def images(
    path: DataPath,
    key: Key,
    image: Annotated[str, "image column"] = "image",
    label: Annotated[str, "label column"] = "label",
    size: Size = None,
    channels: Channels = 3,
    mean: PixelMean = (0.5,),
    std: PixelStd = (0.5,),
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
    memory: Memory = "auto",
) -> Task:
    """Image classification. Only the parts train and test are read: each client splits off its own validation part.

    Images are resized to `size` by `size` without keeping the aspect ratio. Without `size` they must be square and of
    equal size. A mean and std of 0.5 put pixels in [-1, 1]; for a pretrained model, set the values it was trained with.
    Columns of type text, integer or class become the task's columns.
    """
    normalize = normalization(mean, std, channels)
    source = load_dataset(path, key, config, test)
    for part in (source.train, source.test):
        _check(part, image, label)
    classes, *labels = one_label(source, label)
    source, targets = limit_rows(source, limit, key, labels)
    train, held_out = read_images(source, image, targets, size, channels, normalize, memory)
    columns, test_columns = source.train.columns(label), source.test.columns(label)
    return Task(
        source.name,
        train,
        held_out,
        classes,
        columns,
        channels,
        size=side_of(train),
        normalization=(mean, std),
        notes=storage_notes(held_out),
        test_columns=test_columns,
    )


def normalization(mean: tuple[float, ...], std: tuple[float, ...], channels: int) -> Normalize:
    """Return the normalization.

    Args:
        mean: Mean of each channel, or one for all.
        std: Standard deviation of each channel, or one for all.
        channels: Number of channels.

    Raises:
        DataError: If a number of values does not fit the channels.
    """
    for name, values in ("mean", mean), ("std", std):
        if len(values) not in (1, channels):
            raise DataError(f"{name} has {len(values)} values for {channels} channels; give 1 or {channels}")
    return Normalize(mean, std)


def read_images(
    source: Dataset,
    column: str,
    targets: Iterable[torch.Tensor],
    size: int | None,
    channels: int,
    normalize: Normalize,
    limit: Memory,
) -> tuple[ImageTable, ImageTable]:
    """Decode an image column, or check that it can be decoded on demand.

    Args:
        source: The dataset.
        column: The image column.
        targets: The targets of the train rows and of the test rows, each (row, ...).
        size: Side to resize images to; None to keep their size.
        channels: Number of channels to convert images to.
        normalize: Applied to the pixels of each batch.
        limit: Memory that the decoded images may take.

    Returns:
        The train and test examples, in memory if they fit the limit.

    Raises:
        DataError: If an image cannot be decoded, or images differ in size.
    """
    parts = [part for part in (source.train, source.test) if len(part.rows)]
    readers = [_reader(part, column, size, channels) for part in parts]
    if readers[0].side != readers[-1].side:
        raise DataError(f"images of '{source.path}' differ in size between train and test; set size to resize them")
    total = sum(len(reader) * channels * reader.side**2 for reader in readers)
    in_memory = fits_memory(total, limit)
    tables: list[ImageTable] = []
    of_parts = list(targets)
    if len(readers) == 1:  # nothing is trained
        shape = (0, channels, readers[0].side, readers[0].side)
        tables.append(Table({"pixel_values": torch.empty(shape, dtype=torch.uint8)}, of_parts.pop(0), normalize))
    for reader, of_rows in zip(readers, of_parts, strict=True):
        if in_memory:
            tables.append(Table({"pixel_values": _pixels(reader)}, of_rows, normalize))
        else:
            reader.check()
            tables.append(ImagesOnDisk(reader, of_rows, normalize))
    train, test = tables
    return train, test


def fits_memory(size: int, limit: Memory) -> bool:
    """Return whether data of `size` bytes is kept in memory.

    Args:
        size: The bytes of the data.
        limit: The limit in GiB; "auto" for a quarter of the memory that is free.
    """
    return size <= (available() / 4 if limit == "auto" else limit * 2**30)


def side_of(table: ImageTable) -> int:
    """Return the side of the images in pixels."""
    return table.reader.side if isinstance(table, ImagesOnDisk) else table.inputs["pixel_values"].shape[-1]


def storage_notes(table: ImageTable) -> tuple[str, ...]:
    """Say where the images are if they are not in memory."""
    return ("images are decoded on demand",) if isinstance(table, ImagesOnDisk) else ()


def _check(part: DatasetPart, image: str, label: str) -> None:
    datasets = need("datasets", "data")
    part.need(image, label)
    if not isinstance(part.data.features[image], datasets.Image):
        raise DataError(f"column '{image}' of {part.where} holds no images; set image = '...' to a column that does")
    if not isinstance(part.data.features[label], datasets.ClassLabel):
        raise DataError(
            f"column '{label}' of {part.where} has no class names; cast it with datasets' class_encode_column"
        )


def _reader(part: DatasetPart, column: str, size: int | None, channels: int) -> ImageReader:
    """Return a reader that knows the size of the images from the first one."""
    reader = ImageReader(part, image_source(part, column), part.data.features[column], channels, size)
    return replace(reader, side=reader.decode(0).shape[-1])


def _pixels(reader: ImageReader) -> torch.Tensor:
    """Decode the images to uint8, (row, channel, height, width)."""
    shape = (len(reader), reader.channels, reader.side, reader.side)
    remedy = "set data.size to make them smaller, or data.memory to decode them on demand"
    require(math.prod(shape), f"the images of {reader.part.where}", remedy)

    def decode() -> torch.Tensor:
        filled = np.empty(shape, np.uint8)
        for place, pixels in enumerate(reader.decode_all()):
            filled[place] = pixels
        return torch.from_numpy(filled)

    return shared(lambda: f"pixels {shape} {reader.source.fingerprint()}", decode, lambda pixels: pixels.nbytes)
