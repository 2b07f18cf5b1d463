"""Regression tasks: one or more numbers for each text or image. Targets are used as they are, without scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch

from partita.core.options import format_value
from partita.core.rng import Key
from partita.data.errors import DataError, need
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
from partita.data.task import Task, text_task
from partita.data.text import LongTexts, MaxLength, Overlap, Pair, TextOptions, Tokenizer, read_texts
from partita.data.token_rows import TextMemory
from partita.tasks import IMAGE_REGRESSION, TEXT_REGRESSION

Target = Annotated[str | tuple[str, ...], "column with the number to predict, or a list of columns"]


def text_regression(
    path: DataPath,
    key: Key,
    text: Annotated[str, "text column"] = "text",
    target: Target = "target",
    pair: Pair = None,
    tokenizer: Tokenizer = None,
    max_length: MaxLength = 256,
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
    long_texts: LongTexts = "cut",
    overlap: Overlap = None,
    memory: TextMemory = "auto",
) -> Task:
    """Regression on texts: one number per text, or several if `target` is a list of columns.

    Targets are not scaled. With `long_texts = "windows"`, a longer text becomes several training examples with its
    target, all at one client and in one part. Its prediction is the mean of theirs. `pair` is as in the task `text`.
    """
    source, names = load_dataset(path, key, config, test), _names(target)
    source, targets = limit_rows(source, limit, key, read_targets(source, names))
    options = TextOptions(long_texts, overlap, memory)
    train, held_out, used, notes = read_texts(source, text, targets, tokenizer, max_length, options, pair)
    columns, test_columns = (part.columns(text, *names, pair or text) for part in (source.train, source.test))
    return text_task(source.name, train, held_out, names, columns, TEXT_REGRESSION, used, notes, test_columns)


def image_regression(
    path: DataPath,
    key: Key,
    image: Annotated[str, "column with images, or with paths of image files relative to the folder of the data"] = (
        "image"
    ),
    target: Target = "target",
    size: Size = None,
    channels: Channels = 3,
    mean: PixelMean = (0.5,),
    std: PixelStd = (0.5,),
    config: HubConfig = None,
    test: TestPart = 0.2,
    limit: Limit = None,
    memory: Memory = "auto",
) -> Task:
    """Regression on images: one number per image, or several if `target` is a list of columns.

    Targets are not scaled; `mean` and `std` are those of the pixels. Images are treated as by the task `images`.
    """
    normalize = normalization(mean, std, channels)
    source, names = load_dataset(path, key, config, test), _names(target)
    source, targets = limit_rows(source, limit, key, read_targets(source, names))
    columns, test_columns = (part.columns(image, *names) for part in (source.train, source.test))
    opened = replace(
        source, train=open_images(source, source.train, image), test=open_images(source, source.test, image)
    )
    train, held_out = read_images(opened, image, targets, size, channels, normalize, memory)
    return Task(
        source.name,
        train,
        held_out,
        names,
        columns,
        channels,
        side_of(train),
        IMAGE_REGRESSION,
        normalization=(mean, std),
        notes=storage_notes(held_out),
        test_columns=test_columns,
    )


def _names(target: str | tuple[str, ...]) -> tuple[str, ...]:
    names = (target,) if isinstance(target, str) else target
    if not names:
        raise DataError("data.target is an empty list; name at least one column")
    if repeated := [name for place, name in enumerate(names) if name in names[:place]]:
        raise DataError(f"data.target names the column '{repeated[0]}' twice; name each column once")
    return names


def read_targets(source: Dataset, columns: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the train rows and of the test rows, each (row, column).

    Args:
        source: The dataset.
        columns: The columns of numbers.

    Raises:
        DataError: If a value is missing, not a number, NaN, infinite, or too large for float32.
    """
    train, test = (
        torch.stack([_numbers(part, column) for column in columns], 1) for part in (source.train, source.test)
    )
    return train, test


def _numbers(part: DatasetPart, column: str) -> torch.Tensor:
    part.need(column)
    values = part.values(column)
    for place, value in enumerate(values):
        if value is None:
            raise DataError(f"{part.row(place)} has no number in '{column}'; fill it in or remove the row")
        if not _is_number(value):
            raise DataError(
                f"{part.row(place)} has {format_value(value)} in '{column}', which is not a number; correct it, remove "
                "the row, or name another column"
            )
    if values and isinstance(values[0], str):  # one value that is not a number makes a whole column of a CSV file text
        raise DataError(f"column '{column}' of {part.where} holds numbers as text; convert the column to numbers")
    numbers = torch.tensor(values, dtype=torch.float32)
    for place in (~numbers.isfinite()).nonzero().flatten()[:1].tolist():
        raise DataError(
            f"{part.row(place)} has {values[place]} in '{column}'; a target must be a finite number of 32 bits"
        )
    return numbers


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float) and not isinstance(value, bool)


def open_images(source: Dataset, part: DatasetPart, column: str) -> DatasetPart:
    """Return a part with only a column of images. A column of texts holds the paths of image files.

    Args:
        source: The dataset, to whose folder paths are relative.
        part: Its train or test part.
        column: The column of images or of paths.

    Raises:
        DataError: If the column holds neither, or a file does not exist.
    """
    datasets = need("datasets", "data")
    part.need(column)
    feature = part.data.features[column]
    if isinstance(feature, datasets.Image):
        return part
    if "string" not in getattr(feature, "dtype", ""):
        raise DataError(
            f"column '{column}' of {part.where} holds neither images nor paths of image files; name a column that does"
        )
    folder = Path(source.path) if Path(source.path).is_dir() else Path(source.path).parent
    files = [folder / name for name in part.texts(column)]
    for place, file in enumerate(files):
        if not file.is_file():
            raise DataError(
                f"{part.row(place)} names the image {format_value(str(file))}, which does not exist; paths are "
                f"relative to {format_value(str(folder))}"
            )
    features = datasets.Features({column: datasets.Image()})
    data = datasets.Dataset.from_dict({column: [str(file) for file in files]}, features=features)
    return replace(part, data=data)
