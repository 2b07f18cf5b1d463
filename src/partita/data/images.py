"""Image classification tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core import memory
from partita.core.options import MAX_NUMBER, Positive, Range
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.data.errors import DataError, need, reading
from partita.data.labels import one_label
from partita.data.loading import DataPath, Dataset, DatasetPart, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.task import Side, Table, Task

MODES = {1: "L", 3: "RGB"}

Size = Annotated[Side | None, "resize images to this side length in pixels"]
Channels = Annotated[Literal[1, 3], "1: grayscale, 3: RGB"]
PixelMean = Annotated[
    tuple[Annotated[float, Range(low=-MAX_NUMBER, high=MAX_NUMBER)], ...], "mean to subtract, per channel"
]
PixelStd = Annotated[tuple[Positive, ...], "standard deviation to divide by, per channel"]


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
    train, held_out = read_images(source, image, targets, size, channels, normalize)
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
    source: Dataset, column: str, targets: Iterable[Tensor], size: int | None, channels: int, normalize: Normalize
) -> tuple[Table, Table]:
    """Decode an image column.

    Args:
        source: The dataset.
        column: The image column.
        targets: The targets of the train rows and of the test rows, each (row, ...).
        size: Side to resize images to; None to keep their size.
        channels: Number of channels to convert images to.
        normalize: Applied to the pixels of each batch.

    Returns:
        The train and test examples.

    Raises:
        DataError: If train and test images differ in size.
    """
    pixels = [_pixels(part, column, size, channels) for part in (source.train, source.test)]
    if pixels[0].shape[1:] != pixels[1].shape[1:]:
        raise DataError(f"images of '{source.path}' differ in size between train and test; set size to resize them")
    train, test = (
        Table({"pixel_values": part}, of_rows, normalize) for part, of_rows in zip(pixels, targets, strict=True)
    )
    return train, test


def side_of(table: Table) -> int:
    """Return the side of the images in pixels."""
    return table.inputs["pixel_values"].shape[-1]


def _check(part: DatasetPart, image: str, label: str) -> None:
    datasets = need("datasets", "data")
    part.need(image, label)
    if not isinstance(part.data.features[image], datasets.Image):
        raise DataError(f"column '{image}' of {part.where} holds no images; set image = '...' to a column that does")
    if not isinstance(part.data.features[label], datasets.ClassLabel):
        raise DataError(
            f"column '{label}' of {part.where} has no class names; cast it with datasets' class_encode_column"
        )


def _pixels(part: DatasetPart, column: str, size: int | None, channels: int) -> Tensor:
    """Decode the images to uint8, (row, channel, height, width)."""
    filled: NDArray[np.uint8] | None = None
    for place, (named, picture) in enumerate(_decoded(part, column)):
        with reading(named, "replace or remove it"):
            picture = picture.convert(MODES[channels])
            if size is not None and picture.size != (size, size):
                picture = picture.resize((size, size))
        if filled is None:
            if picture.width != picture.height:
                raise DataError(f"{named} is {picture.width} by {picture.height}; set size to make the images square")
            shape = (len(part.data), channels, picture.height, picture.width)
            memory.require(math.prod(shape), f"the images of {part.where}", "set data.size to make them smaller")
            filled = np.empty(shape, np.uint8)
        if picture.size != filled.shape[:1:-1]:
            raise DataError(
                f"{named} is {picture.width} by {picture.height}, the first is "
                f"{filled.shape[3]} by {filled.shape[2]}; set size to resize them"
            )
        filled[place] = np.asarray(picture).reshape(*filled.shape[2:], channels).transpose(2, 0, 1)
    assert filled is not None, "no part is empty"
    return torch.from_numpy(filled)


def _decoded(part: DatasetPart, column: str) -> Iterator[tuple[str, Any]]:
    """Yield each image with its name for error messages."""
    feature = part.data.features[column]
    for place, kept in enumerate(part.data.cast_column(column, need("datasets", "data").Image(decode=False))[column]):
        file = Path(kept["path"]) if kept and kept["path"] else None
        named = f"the image in {part.row(place)}" + (f" ({str(file)!r})" if file else "")
        if kept and kept["bytes"] is None and file and file.is_file():
            kept = {**kept, "bytes": file.read_bytes()}
        if not kept or kept["bytes"] == b"":
            raise DataError(f"{named} is empty; replace or remove it")
        with reading(named, "replace or remove it"):
            picture = feature.decode_example(kept)
        yield named, picture
