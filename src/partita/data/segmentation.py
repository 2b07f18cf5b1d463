"""Semantic segmentation tasks: an image and a mask with a class number for each pixel."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core import memory
from partita.core.data import IGNORE_INDEX
from partita.core.options import Range
from partita.core.rng import Key
from partita.data.dataset_files import IMAGE_SUFFIXES, TABLES, Opener
from partita.data.errors import DataError, need, reading
from partita.data.images import (
    Channels,
    Memory,
    PixelMean,
    PixelStd,
    Size,
    normalization,
    read_images,
    side_of,
    storage_notes,
)
from partita.data.loading import DataPath, Dataset, DatasetPart, HubConfig, Limit, TestPart, limit_rows, load_dataset
from partita.data.regression import open_images
from partita.data.task import Task
from partita.tasks import SEGMENTATION

FOLDERS = ("images", "masks")
ORIENTATION = 0x0112  # the EXIF tag; from 5 on, it exchanges width and height
MASK_MODES = ("L", "P", "1")  # of Pillow: one number for each pixel
NEAREST = 0  # of Pillow: a resized mask must hold no numbers between two classes
NO_NUMBER = 256  # no pixel has it


def segmentation(
    path: DataPath,
    key: Key,
    image: Annotated[str, "column with images, or with paths of image files relative to the folder of the data"] = (
        "image"
    ),
    mask: Annotated[str, "column with masks, or with paths of them: images of one channel with class numbers"] = "mask",
    classes: Annotated[tuple[str, ...], "names of classes 0, 1, ...; left out: the numbers in the train masks"] = (),
    ignore: Annotated[Annotated[int, Range(low=0, high=255)] | None, "number in masks of pixels without a label"] = 255,
    size: Size = None,
    channels: Channels = 3,
    mean: PixelMean = (0.5,),
    std: PixelStd = (0.5,),
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
    memory: Memory = "auto",
) -> Task:
    """Semantic segmentation. A mask has the size of its image and one channel that holds class numbers.

    A folder may have the images in images/ and the masks in masks/, with the same names up to the suffix; both may be
    in train/ and test/. Images are treated as by the task `images`; masks are resized to the nearest pixel.
    """
    normalize = normalization(mean, std, channels)
    folders = None if isinstance(path, Dataset) else mask_folders(Path(path), image, mask)
    source = load_dataset(path, key, config, test, folders)
    source, _ = limit_rows(source, limit, key)
    columns, test_columns = (part.columns(image, mask) for part in (source.train, source.test))
    pictures, masks = (
        replace(source, train=open_images(source, source.train, name), test=open_images(source, source.test, name))
        for name in (image, mask)
    )
    numbers = [_numbers(*parts, image, mask, size) for parts in _each_part(pictures, masks)]
    names = classes or _names(masks.train, numbers[0], ignore)
    targets = [
        _targets(part, part_numbers, names, ignore)
        for part, part_numbers in zip((masks.train, masks.test), numbers, strict=True)
    ]
    train, held_out = read_images(pictures, image, targets, size, channels, normalize, memory)
    return Task(
        source.name,
        train,
        held_out,
        names,
        columns,
        channels,
        side_of(train),
        SEGMENTATION,
        normalization=(mean, std),
        notes=storage_notes(held_out),
        test_columns=test_columns,
    )


def _each_part(pictures: Dataset, masks: Dataset) -> list[tuple[DatasetPart, DatasetPart]]:
    return [(pictures.train, masks.train), (pictures.test, masks.test)]


def mask_folders(path: Path, image: str = "image", mask: str = "mask") -> dict[str, Opener] | None:
    """Find images/ and masks/, below train/ and test/ or not; None if the path has another layout, such as a table."""
    if any(file.suffix.lstrip(".") in TABLES for file in path.glob("*")):
        return None
    parts = {part.name: part for part in sorted(path.glob("*")) if _has_folders(part)}
    if _has_folders(path):
        parts = {"train": path}
    return {name: _FolderOpener(part, image, mask) for name, part in parts.items()} or None


def _has_folders(path: Path) -> bool:
    return all((path / name).is_dir() for name in FOLDERS)


@dataclass(frozen=True)
class _FolderOpener:
    """Opens the images and masks in a folder as a table."""

    folder: Path
    image: str
    mask: str

    def __call__(self) -> Any:
        datasets = need("datasets", "data")
        images, masks = (_by_name(self.folder / name) for name in FOLDERS)
        for name, others, missing in ((FOLDERS[0], images, masks), (FOLDERS[1], masks, images)):
            if lonely := sorted(others.keys() - missing.keys()):
                other = FOLDERS[1] if name == FOLDERS[0] else FOLDERS[0]
                raise DataError(
                    f"{str(others[lonely[0]])!r} has no file of the same name in '{self.folder / other}'; add it, or "
                    "remove the file"
                )
        features = datasets.Features({self.image: datasets.Image(), self.mask: datasets.Image()})
        table = {self.image: [str(images[name]) for name in sorted(images)]}
        table[self.mask] = [str(masks[name]) for name in sorted(images)]
        return datasets.Dataset.from_dict(table, features=features)


def _by_name(folder: Path) -> dict[str, Path]:
    """Return the image files of a folder by name without suffix."""
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.name.startswith("."):
            continue
        if file.suffix.lower() not in IMAGE_SUFFIXES or not file.is_file():
            raise DataError(f"{str(file)!r} is not an image ({', '.join(IMAGE_SUFFIXES)}); move other files elsewhere")
        if file.stem in files:
            raise DataError(f"{str(files[file.stem])!r} and {str(file)!r} have the same name; keep one of them")
        files[file.stem] = file
    return files


def _numbers(
    pictures: DatasetPart, masks: DatasetPart, image: str, mask: str, size: int | None
) -> Sequence[NDArray[np.uint8]]:
    """Read the class numbers of the masks, each (height, width)."""
    found: list[NDArray[np.uint8]] = []
    pairs = zip(_files(pictures, image, "image"), _files(masks, mask, "mask"), strict=True)
    for (_, picture), (named, opened) in pairs:
        shape, right = opened.size, _size(picture)
        if opened.mode not in MASK_MODES:
            raise DataError(
                f"{named} is an image of mode {opened.mode}; save it with one channel of 8 bits that holds the class "
                "numbers (mode L or P)"
            )
        if shape != right:
            raise DataError(
                f"{named} is {shape[0]} by {shape[1]}, but its image is {right[0]} by {right[1]}; make the mask as "
                "large as the image"
            )
        with reading(named, "replace or remove it"):
            resized = opened if size is None or shape == (size, size) else opened.resize((size, size), NEAREST)
            values = np.asarray(resized)
        if not found:
            count = len(masks.rows) * values.size * torch.int16.itemsize
            memory.require(count, f"the masks of {masks.where}", "set data.size to make them smaller")
        found.append(values.astype(np.uint8))
    return found


def _files(part: DatasetPart, column: str, what: str) -> Iterator[tuple[str, Any]]:
    """Open each image without decoding it, with its name for error messages."""
    pillow, datasets = need("PIL.Image", "data"), need("datasets", "data")
    for place, kept in enumerate(part.data.cast_column(column, datasets.Image(decode=False))[column]):
        file = kept["path"] if kept and kept["path"] else None
        named = f"the {what} in {part.row(place)}" + (f" ({file!r})" if file else "")
        if not kept or not (kept["bytes"] or file):
            raise DataError(f"{named} is empty; replace or remove it")
        with reading(named, "replace or remove it"):
            data = Path(str(file)).read_bytes() if kept["bytes"] is None else kept["bytes"]
            picture = pillow.open(io.BytesIO(data))
        yield named, picture


def _size(picture: Any) -> tuple[int, int]:
    """Return width and height of an image as it is shown: a camera may have been turned."""
    width, height = picture.size
    return (height, width) if picture.getexif().get(ORIENTATION, 1) >= 5 else (width, height)


def _names(part: DatasetPart, numbers: Sequence[NDArray[np.uint8]], ignore: int | None) -> tuple[str, ...]:
    """Return the numbers up to the largest in the masks, as names."""
    used = {int(value) for values in numbers for value in np.unique(values)} - {ignore}
    if len(used) < 2:
        raise DataError(
            f"the masks of {part.where} have the classes {sorted(used)}, so there is nothing to tell apart; check that "
            "they hold class numbers 0, 1, ..., or name the classes in data.classes"
        )
    return tuple(str(number) for number in range(max(used) + 1))


def _targets(
    part: DatasetPart, numbers: Sequence[NDArray[np.uint8]], classes: Sequence[str], ignore: int | None
) -> torch.Tensor:
    """Return the targets, (row, height, width), in 16 bits to save memory: there is one for each pixel."""
    for place, values in enumerate(numbers):
        if values.shape != numbers[0].shape:
            raise DataError(
                f"the mask in {part.row(place)} is {values.shape[1]} by {values.shape[0]}, the first is "
                f"{numbers[0].shape[1]} by {numbers[0].shape[0]}; set size to resize them"
            )
        wrong = values[(values >= len(classes)) & (values != (NO_NUMBER if ignore is None else ignore))]
        if wrong.size:
            raise DataError(
                f"the mask in {part.row(place)} has the class {wrong[0]}, but there are {len(classes)} classes, 0 to "
                f"{len(classes) - 1}; correct the mask, name more classes in data.classes, or set data.ignore to the "
                "number of pixels without a label"
            )
    targets = torch.from_numpy(np.stack(numbers) if numbers else np.empty(0, np.uint8)).to(torch.int16)
    return targets if ignore is None else targets.masked_fill_(targets == ignore, IGNORE_INDEX)
