"""Image folders in Hugging Face's parquet layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core.options import nearest
from partita.core.tree import Tensors
from partita.data.errors import DataError, need
from partita.data.task import Table, Task

MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Normalise:
    """From bytes to numbers: ((x / 255) - mean) / std for each channel; one value serves all channels."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, inputs: Tensors) -> Tensors:
        pixels = inputs["pixel_values"].float()  # (example, channel, height, width)
        mean, std = (torch.tensor(value, device=pixels.device).view(-1, 1, 1) for value in (self.mean, self.std))
        return {**inputs, "pixel_values": pixels.div_(255).sub_(mean).div_(std)}


def images(
    path: str | Path,
    image: str = "image",
    label: str = "label",
    size: int | None = None,
    channels: int = 3,
    mean: tuple[float, ...] = (0.5,),
    std: tuple[float, ...] = (0.5,),
) -> Task:
    """A folder with train.parquet and test.parquet; a client cuts its own validation part, so no other file is read.

    Images are squeezed to `size` by `size`; without it they must be square and alike. Mean and std of 0.5 put pixels
    in [-1, 1]; a pretrained model wants its own. Columns of text, whole numbers or classes become the task's columns.
    """
    if channels not in MODES:
        raise DataError(f"channels = {channels}, but images have 1 (grey) or 3 (colour)")
    for name, values in ("mean", mean), ("std", std):
        if len(values) not in (1, channels):
            raise DataError(f"{name} has {len(values)} values for {channels} channels; give 1 or {channels}")
    folder = Path(path)
    train, test = (_read(folder / f"{part}.parquet", image, label) for part in ("train", "test"))
    classes = train.features[label].names
    if test.features[label].names != classes:
        raise DataError(
            f"train.parquet and test.parquet of '{folder}' name other classes in '{label}'; write them alike"
        )
    pixels, held_out = (_pixels(data, image, size, channels) for data in (train, test))
    if held_out.shape[1:] != pixels.shape[1:]:
        raise DataError(f"images of '{folder}' differ in size between train and test; set size to make them alike")
    side, normalise = pixels.shape[-1], Normalise(mean, std)
    return Task(
        folder.name,
        Table({"pixel_values": pixels}, _targets(train, label), normalise),
        Table({"pixel_values": held_out}, _targets(test, label), normalise),
        classes=tuple(classes),
        columns={name: _column(train, name) for name in train.column_names if _splits_by(train, name, label)},
        channels=channels,
        size=side,
    )


def _read(file: Path, image: str, label: str) -> Any:
    datasets = need("datasets", "data")
    if not file.is_file():
        raise DataError(f"there is no file '{file}'; give the folder that has train.parquet and test.parquet")
    # Straight from the file: the library's own reader would leave a copy of every data set in the user's cache.
    data = datasets.Dataset(need("pyarrow.parquet", "data").read_table(file))
    for column in (image, label):
        if column not in data.column_names:
            raise DataError(f"'{file}' has no column '{column}'; {nearest(column, data.column_names)}")
    if not isinstance(data.features[image], datasets.Image):
        raise DataError(f"column '{image}' of '{file}' holds no images; name the one that does with image = '...'")
    if not isinstance(data.features[label], datasets.ClassLabel):
        raise DataError(f"column '{label}' of '{file}' has no class names; cast it with datasets' class_encode_column")
    return data


def _pixels(data: Any, column: str, size: int | None, channels: int) -> Tensor:
    """Bytes, (row, channel, height, width)."""
    filled: NDArray[np.uint8] | None = None
    for row, picture in enumerate(data[column]):
        picture = picture.convert(MODES[channels])
        if size is not None and picture.size != (size, size):
            picture = picture.resize((size, size))
        if filled is None:
            if picture.width != picture.height:
                raise DataError(f"images are {picture.width} by {picture.height}; set size to make them square")
            filled = np.empty((len(data), channels, picture.height, picture.width), np.uint8)
        if picture.size != filled.shape[:1:-1]:
            raise DataError(
                f"image {row} is {picture.width} by {picture.height}, the first is {filled.shape[3]} by "
                f"{filled.shape[2]}; set size to make them alike"
            )
        filled[row] = np.asarray(picture).reshape(*filled.shape[2:], channels).transpose(2, 0, 1)
    if filled is None:
        raise DataError("a part has no images; both train.parquet and test.parquet need some")
    return torch.from_numpy(filled)


def _targets(data: Any, label: str) -> Tensor:
    labels = torch.tensor(data.with_format("numpy")[label][:], dtype=torch.int64)
    if (labels < 0).any():
        raise DataError(f"row {int((labels < 0).nonzero()[0])} has no label; leave unlabelled rows out of the file")
    return labels


def _splits_by(data: Any, name: str, label: str) -> bool:
    feature = data.features[name]
    kind = getattr(feature, "dtype", "")
    return name != label and type(feature).__name__ in ("Value", "ClassLabel") and ("string" in kind or "int" in kind)


def _column(data: Any, name: str) -> NDArray[Any]:
    feature, values = data.features[name], data[name][:]
    if hasattr(feature, "int2str"):
        values = feature.int2str(values)
    return np.array(["" if value is None else str(value) for value in values])
