"""Data sets wherever they are: files, image folders, folders that `save_to_disk` has written, and the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from partita.core.options import Range, closest_match
from partita.core.rng import Key
from partita.data.errors import DataError, first_line, need, reading

TABLES = ("parquet", "csv", "json", "jsonl")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
REMEDY = (
    "give a file (parquet, csv, json, jsonl), a folder with train and test of one of these, a folder of images in "
    "train/CLASS/, a folder that save_to_disk has written, or an id of the Hub, 'owner/name'"
)

Opener = Callable[[], Any]  # gives a datasets.Dataset
TestPart = Annotated[float, Range(above=0, below=1)] | str


@dataclass(frozen=True, eq=False)
class DatasetPart:
    """The train or the test part, with the words and numbers that its faults are told by."""

    data: Any  # datasets.Dataset
    where: str
    rows: NDArray[np.int64] = field(repr=False)  # as the source counts them, from 0

    def row(self, place: int) -> str:
        return f"row {self.rows[place]} of {self.where}"

    def need(self, *columns: str) -> None:
        for column in columns:
            if column not in self.data.column_names:
                raise DataError(
                    f"{self.where} has no column '{column}'; {closest_match(column, self.data.column_names)}"
                )

    def values(self, column: str) -> list[Any]:
        with reading(f"column '{column}' of {self.where}"):
            values: list[Any] = self.data[column][:]
        return values

    def texts(self, column: str) -> list[str]:
        """A column of text, of which none is missing or blank."""
        self.need(column)
        if "string" not in getattr(self.data.features[column], "dtype", ""):
            raise DataError(f"column '{column}' of {self.where} holds no text; name the one that does")
        texts = self.values(column)
        for place, text in enumerate(texts):
            if text is None or not text.strip():
                raise DataError(f"{self.row(place)} has no text in '{column}'; fill it in, or leave the row out")
        return texts

    def columns(self, *others: str) -> dict[str, NDArray[Any]]:
        """Columns of text, whole numbers or classes but for these, which splits may follow."""
        return {name: self._column(name) for name in self.data.column_names if name not in others and self._plain(name)}

    def _plain(self, name: str) -> bool:
        feature = self.data.features[name]
        kind = getattr(feature, "dtype", "")
        return type(feature).__name__ in ("Value", "ClassLabel") and ("string" in kind or "int" in kind)

    def _column(self, name: str) -> NDArray[Any]:
        feature, values = self.data.features[name], self.values(name)
        if hasattr(feature, "int2str"):
            values = [None if value is None or value < 0 else feature.int2str(value) for value in values]
        return np.array(["" if value is None else str(value) for value in values])


@dataclass(frozen=True, eq=False)
class Dataset:
    name: str
    train: DatasetPart
    test: DatasetPart
    cut: bool  # whether the test part was cut from the train part


def load_dataset(path: str | Path, key: Key, config: str | None = None, test: float | str = 0.2) -> Dataset:
    """The train and the test part.

    `test` is the name of another part to test on; or, where there is no part "test", the share of the rows to cut off.
    """
    need("datasets", "data")
    parts = _parts(path, config)
    place = Path(path).resolve()
    name = str(path) if not place.exists() else place.stem if place.is_file() else place.name
    if "train" not in parts:
        raise DataError(f"'{path}' has no part 'train', but: {', '.join(parts)}; rename one")
    train = _whole(parts, "train", path)
    if isinstance(test, str) and test not in parts:
        raise DataError(f"'{path}' has no part '{test}' to test on; {closest_match(test, parts)}")
    if isinstance(test, str) or "test" in parts:
        return Dataset(name, train, _whole(parts, test if isinstance(test, str) else "test", path), cut=False)
    return Dataset(name, *_cut(train, test, key), cut=True)


def _whole(parts: Mapping[str, Opener], name: str, path: str | Path) -> DatasetPart:
    where = f"the {name} part of '{path}'"
    with reading(where):
        data = parts[name]()
    if not len(data):
        raise DataError(f"{where} is empty; give it some rows")
    return DatasetPart(data, where, np.arange(len(data)))


def _cut(part: DatasetPart, share: float, key: Key) -> tuple[DatasetPart, DatasetPart]:
    count = floor(len(part.rows) * Fraction(str(share)))
    if not 0 < count < len(part.rows):
        raise DataError(
            f"{part.where} has no test part beside it, and of {len(part.rows)} rows test = {share} cuts off {count}; "
            "give a test part, or a share between 0 and 1 that leaves rows on both sides"
        )
    order = (key / "test").permutation(len(part.rows)).numpy()
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    return DatasetPart(part.data.select(kept), part.where, kept), DatasetPart(part.data.select(held), part.where, held)


def _parts(path: str | Path, config: str | None) -> dict[str, Opener]:
    place = Path(path)
    if not place.exists():
        return _from_hub(str(path), config)
    if config is not None:
        raise DataError(f"config = '{config}' is for data sets of the Hub, but '{path}' is here; leave it out")
    if place.is_file():
        return {"train": lambda: _table(place)}
    datasets = need("datasets", "data")
    if (place / "dataset_dict.json").is_file():
        with reading(f"the data set in '{path}'"):
            return _openers(datasets.load_from_disk(place))
    if (place / "state.json").is_file():
        return {"train": lambda: datasets.load_from_disk(place)}
    found = _tables_in(place) or _tables_in(place / "data") or _images_in(place)
    if not found:
        raise DataError(f"the folder '{path}' holds no data set that partita can read; {REMEDY}")
    return found


def _openers(parts: Mapping[str, Any]) -> dict[str, Opener]:
    return {name: lambda data=data: data for name, data in parts.items()}  # type: ignore[misc]


def _from_hub(name: str, config: str | None) -> dict[str, Opener]:
    if not HUB_ID.fullmatch(name):
        raise DataError(f"there is no file or folder '{name}'; {REMEDY}")
    try:
        found = need("datasets", "data").load_dataset(name, config)
    except ConnectionError as error:
        raise DataError(f"there is no folder '{name}', and the Hub cannot be reached; give a local folder") from error
    except (OSError, ValueError) as error:
        said = first_line(error)
        raise DataError(f"there is no folder '{name}', and the Hub says: {said}; {REMEDY}") from error
    return _openers(found)


def _tables_in(folder: Path) -> dict[str, Opener]:
    """Parts by name: train.csv, or its shards as the Hub names them, train-00000-of-00002.csv."""
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*")):
        if file.suffix.lstrip(".") in TABLES and file.is_file():
            files.setdefault(re.sub(r"-\d+-of-\d+$", "", file.stem), []).append(file)
    for name, found in files.items():
        if len(kinds := {file.suffix for file in found}) > 1:
            raise DataError(f"'{folder}' has the part '{name}' as {' and '.join(sorted(kinds))}; keep one of them")
    return {name: lambda found=found: _joined(found) for name, found in files.items()}  # type: ignore[misc]


def _joined(files: list[Path]) -> Any:
    tables = [_table(file) for file in files]
    return tables[0] if len(tables) == 1 else need("datasets", "data").concatenate_datasets(tables)


def _table(file: Path) -> Any:
    """Straight from the file: the library's own readers would leave a copy of every data set in the user's cache."""
    datasets, kind = need("datasets", "data"), file.suffix.lstrip(".")
    if kind not in TABLES:
        raise DataError(f"{str(file)!r} is none of {', '.join(TABLES)}; {REMEDY}")
    with reading(f"the {kind} file {str(file)!r}"):
        if kind == "parquet":
            return datasets.Dataset(need("pyarrow.parquet", "data").read_table(file))
        if kind == "csv":
            csv = need("pyarrow.csv", "data")
            return datasets.Dataset(csv.read_csv(file, parse_options=csv.ParseOptions(newlines_in_values=True)))
        return datasets.Dataset.from_list(_records(file))


def _records(file: Path) -> list[dict[str, Any]]:
    """A list of objects, or one object a line."""
    text = file.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                raise DataError(f"line {number} of {str(file)!r} is not JSON: {error}; mend or remove it") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"row {number} of {str(file)!r} is no object with named columns; write it as {{...}}")
    return rows


def _images_in(folder: Path) -> dict[str, Opener]:
    """Parts of class folders below train/, test/ and so on; or class folders alone, which are then all of train."""
    parts = {each.name: each for each in _folders(folder)} if (folder / "train").is_dir() else {"train": folder}
    classes = [each.name for each in _folders(parts["train"])]
    if not any(_is_picture(file) for each in _folders(parts["train"]) for file in each.iterdir()):
        return {}
    return {name: lambda each=each: _album(each, classes) for name, each in parts.items()}  # type: ignore[misc]


def _album(folder: Path, classes: list[str]) -> Any:
    datasets = need("datasets", "data")
    pairs: list[tuple[str, str]] = []
    for each in _folders(folder):
        if each.name not in classes:
            raise DataError(f"{str(each)!r} holds a class that train has not; {closest_match(each.name, classes)}")
        for file in sorted(file for file in each.iterdir() if not file.name.startswith(".")):
            if not _is_picture(file):
                raise DataError(f"{str(file)!r} is no image ({', '.join(PICTURES)}); keep other files elsewhere")
            pairs.append((str(file), each.name))
    if loose := sorted(file for file in folder.iterdir() if _is_picture(file)):
        raise DataError(f"{str(loose[0])!r} is in no folder of a class; move it into one")
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=classes))
    columns = {"image": [file for file, _ in pairs], "label": [label for _, label in pairs]}
    return datasets.Dataset.from_dict(columns, features=features)


def _folders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def _is_picture(file: Path) -> bool:
    return file.suffix.lower() in PICTURES
