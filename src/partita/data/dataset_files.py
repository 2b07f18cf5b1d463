"""Find and open the parts of a dataset: tables, image folders, folders of `save_to_disk`, and the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from partita.core.given import given, is_given
from partita.core.hub import offline_reason
from partita.core.options import closest_match
from partita.data.arrow_table import ArrowTable, is_plain, plain
from partita.data.cache import cached, identity_of_file
from partita.data.errors import DataError, first_line, need, reading

TABLES = ("parquet", "csv", "json", "jsonl")
MAPPED_FROM = 2**28  # Parquet files with more bytes are copied to an Arrow file, which is not read into memory
ARROW_FILE = "table.arrow"
ROWS_TOGETHER = 1024  # rows read together
JSON_BLOCK = 2**24  # bytes that pyarrow reads together; a line must be shorter to be read fast
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
REMEDY = (
    "give a file (parquet, csv, json, jsonl), a folder with train and test files of these types, a folder of images in "
    "train/CLASS/, a folder written by save_to_disk, or a Hub id, 'owner/name'"
)

Opener = Callable[[], Any]  # returns a datasets.Dataset


def find_parts(path: str | Path, config: str | None) -> dict[str, Opener]:
    """Find the parts of a dataset by name, without opening them.

    Args:
        path: A file, a folder, or the id of a dataset on the Hugging Face Hub.
        config: The configuration of a Hub dataset.

    Raises:
        DataError: If there is no dataset that can be read.
    """
    if is_given(path):
        return _in_memory(given(path).value)
    place = Path(path)
    if not place.exists():
        return _from_hub(str(path), config)
    if config is not None:
        raise DataError(f"config = '{config}' is for Hub datasets, but '{path}' is local; remove config")
    if place.is_file():
        return {"train": lambda: _table(place)}
    datasets = need("datasets", "data")
    if (place / "dataset_dict.json").is_file():
        with reading(f"the dataset in '{path}'"):
            return _in_memory(datasets.load_from_disk(place))
    if (place / "state.json").is_file():
        return {"train": lambda: datasets.load_from_disk(place)}
    openers = _tables_in(place) or _tables_in(place / "data") or _images_in(place)
    if not openers:
        raise DataError(f"the folder '{path}' holds no dataset that partita can read; {REMEDY}")
    return openers


def check_place(path: str) -> None:
    """Raise a DataError if a path is neither here nor the id of a dataset on the Hub."""
    if is_given(path):
        given(path)
    elif not Path(path).exists() and not HUB_ID.fullmatch(path):
        raise DataError(f"there is no file or folder '{path}'; {REMEDY}")


def _in_memory(parts: Mapping[str, Any]) -> dict[str, Opener]:
    return {name: lambda data=data: data for name, data in parts.items()}  # type: ignore[misc]


def _from_hub(name: str, config: str | None) -> dict[str, Opener]:
    check_place(name)
    datasets, offline = need("datasets", "data"), offline_reason()
    online, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, offline is not None
    try:
        dataset = datasets.load_dataset(name, config)
    except ConnectionError as error:
        reason = offline or "the Hub cannot be reached"
        raise DataError(f"there is no folder '{name}' here, and {reason}; give a local file or folder") from error
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise DataError(f"there is no folder '{name}', and the Hub failed with: {reason}; {REMEDY}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = online
    return _in_memory(dataset)


def _tables_in(folder: Path) -> dict[str, Opener]:
    """Map part names to table files: train.csv, or shards with Hub names such as train-00000-of-00002.csv."""
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*")):
        if file.suffix.lstrip(".") in TABLES and file.is_file():
            files.setdefault(re.sub(r"-\d+-of-\d+$", "", file.stem), []).append(file)
    for name, shards in files.items():
        if len(kinds := {file.suffix for file in shards}) > 1:
            raise DataError(f"'{folder}' has the part '{name}' as {' and '.join(sorted(kinds))}; keep one of them")
    return {name: lambda shards=shards: _concatenate(shards) for name, shards in files.items()}  # type: ignore[misc]


def _concatenate(files: list[Path]) -> Any:
    tables = [_table(file) for file in files]
    if len(tables) == 1:
        return tables[0]
    parts = [table.to_dataset() if isinstance(table, ArrowTable) else table for table in tables]
    return need("datasets", "data").concatenate_datasets(parts)


def _table(file: Path) -> Any:
    """Read a table directly from its file: the readers of `datasets` would copy every dataset to the user's cache."""
    kind = file.suffix.lstrip(".")
    if kind not in TABLES:
        raise DataError(f"{str(file)!r} is not one of {', '.join(TABLES)}; {REMEDY}")
    with reading(f"the {kind} file {str(file)!r}"):
        if kind == "parquet":
            if file.stat().st_size > MAPPED_FROM:
                return need("datasets", "data").Dataset.from_file(str(_arrow_copy(file)))
            table = need("pyarrow.parquet", "data").read_table(file)
            return plain(table) if is_plain(table) else need("datasets", "data").Dataset(table)
        if kind == "csv":
            csv = need("pyarrow.csv", "data")
            return plain(csv.read_csv(file, parse_options=csv.ParseOptions(newlines_in_values=True)))
        return _json_table(file)


def _arrow_copy(file: Path) -> Path:
    """Copy a Parquet file to an Arrow file in the cache, from which rows can be read one by one."""
    parquet, pyarrow = need("pyarrow.parquet", "data"), need("pyarrow", "data")

    def build(folder: Path) -> None:
        with (
            parquet.ParquetFile(file) as source,
            pyarrow.OSFile(str(folder / ARROW_FILE), "wb") as target,
            pyarrow.ipc.new_stream(target, source.schema_arrow) as writer,
        ):
            for batch in source.iter_batches(batch_size=ROWS_TOGETHER):
                writer.write_batch(batch)

    with parquet.ParquetFile(file) as source:
        size = sum(source.metadata.row_group(group).total_byte_size for group in range(source.num_row_groups))
    key = hashlib.blake2b(identity_of_file(file).encode(), digest_size=16).hexdigest()
    return cached("tables", key, build, size) / ARROW_FILE


def _json_table(file: Path) -> Any:
    """Read a JSON list of objects, or JSON lines."""
    pyarrow = need("pyarrow", "data")
    if not _is_json_list(file) and _holds_objects(file):
        # Below, Python's reader names the line, or accepts what pyarrow does not, such as NaN.
        with suppress(pyarrow.ArrowException, UnicodeDecodeError):
            return plain(_json_lines(file))
    rows = _records(file)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return plain(need("datasets", "data").Dataset.from_dict(columns).data.table)  # it finds the types


def _is_json_list(file: Path) -> bool:
    with file.open("rb") as stream:
        while block := stream.read(JSON_BLOCK):
            if start := block.lstrip():
                return start.startswith(b"[")
    return False


def _holds_objects(file: Path) -> bool:
    """Return whether every line that is not empty starts an object. pyarrow crashes if the first one is `null`."""
    with file.open("rb") as stream:
        return all(line.startswith(b"{") for raw in stream if (line := raw.removeprefix(BOM_UTF8).lstrip()))


def _json_lines(file: Path) -> Any:
    """Read JSON lines with pyarrow. Dates stay texts, as in every other format of JSON."""
    json, pyarrow = need("pyarrow.json", "data"), need("pyarrow", "data")
    options = json.ReadOptions(block_size=JSON_BLOCK)
    table = json.read_json(file, read_options=options)
    schema = pyarrow.schema([field.with_type(_dates_as_text(field.type)) for field in table.schema])
    if schema != table.schema:
        table = json.read_json(file, options, json.ParseOptions(explicit_schema=schema))
    table.validate(full=True)  # texts may not be UTF-8
    return table


def _dates_as_text(kind: Any) -> Any:
    pyarrow = need("pyarrow", "data")
    if pyarrow.types.is_timestamp(kind):
        return pyarrow.string()
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(_dates_as_text(kind.value_type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_dates_as_text(field.type)) for field in kind])
    return kind


def _records(file: Path) -> list[dict[str, Any]]:
    """Read JSON with Python's reader: slower, but it names the line."""
    text = file.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                raise DataError(f"line {number} of {str(file)!r} is not JSON: {error}; fix or remove it") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"row {number} of {str(file)!r} is not an object with named columns; write it as {{...}}")
    return rows


def _images_in(folder: Path) -> dict[str, Opener]:
    """Find class folders below train/, test/ and so on. Class folders without a part folder are all train."""
    parts = {part.name: part for part in _folders(folder)} if (folder / "train").is_dir() else {"train": folder}
    classes = [child.name for child in _folders(parts["train"])]
    if not any(_is_image(file) for child in _folders(parts["train"]) for file in child.iterdir()):
        return {}
    return {name: lambda part=part: _image_folder(part, classes) for name, part in parts.items()}  # type: ignore[misc]


def _image_folder(folder: Path, classes: list[str]) -> Any:
    datasets = need("datasets", "data")
    pairs: list[tuple[str, str]] = []
    for child in _folders(folder):
        if child.name not in classes:
            raise DataError(f"{str(child)!r} is a class that train lacks; {closest_match(child.name, classes)}")
        for file in sorted(file for file in child.iterdir() if not file.name.startswith(".")):
            if not _is_image(file):
                raise DataError(
                    f"{str(file)!r} is not an image ({', '.join(IMAGE_SUFFIXES)}); move other files elsewhere"
                )
            pairs.append((str(file), child.name))
    if stray := sorted(file for file in folder.iterdir() if _is_image(file)):
        raise DataError(f"{str(stray[0])!r} is not in a class folder; move it into one")
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=classes))
    columns = {"image": [file for file, _ in pairs], "label": [label for _, label in pairs]}
    return datasets.Dataset.from_dict(columns, features=features)


def _folders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES
