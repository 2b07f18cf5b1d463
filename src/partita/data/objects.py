"""Data from objects: what a program holds in memory, and how it is read and split."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from partita.core.given import Given, hand_over, is_given, unchanged
from partita.core.options import closest_match
from partita.core.registry import options_by_name
from partita.core.rng import Key
from partita.data import INDEX, load
from partita.data.dataset_files import ROWS_TOGETHER
from partita.data.digest import examples_digest
from partita.data.errors import DataError, need
from partita.data.task import Table, Task
from partita.data.tokenization import load_tokenizer
from partita.tasks import IMAGE, IMAGE_REGRESSION, TEXT, TEXT_REGRESSION

CLIENT = "client"  # column with the client of a row, if the data is a dict of clients
LENGTHS = ("max_length", "block_size", "max_target_length")
HOLD_OUT = 0.2  # share of rows of tensors that are held out if there is no test part
# The columns that are named -> the reader.
READERS = {
    "text label": "text",
    "text pair label": "text",
    "text target": "text_regression",
    "text pair target": "text_regression",
    "text": "lm",
    "text group": "lm",
    "image label": "images",
    "image target": "image_regression",
    "image mask": "segmentation",
    "tokens tags": "tokens",
    "source target": "seq2seq",
    "messages": "chat",
    "instruction output": "chat",
    "instruction input output": "chat",
    "instruction choices answer": "chat",
    "ids": "tokenized",
    "ids label": "tokenized",
}
COLUMNS = tuple(dict.fromkeys(column for columns in READERS for column in columns.split()))


@dataclass(frozen=True)
class DataSource:
    """Data that a program holds, with how it is read and split. It is read when a run starts.

    Attributes:
        reading: The table `[data]` of the run.
        splitting: The table `[split]`; None if nothing was said.
        held: The objects.
    """

    reading: Mapping[str, Any]
    splitting: Mapping[str, Any] | None = None
    held: tuple[Given, ...] = field(default=(), repr=False)

    def by(self, column: str, **options: Any) -> DataSource:
        """Return the data with one client for each value of a column.

        Args:
            column: The column.
            **options: Further keys of `[split]`, such as `validation` or `test`.
        """
        return self.split("by_column", column=column, **options)

    def split(self, name: str, **options: Any) -> DataSource:
        """Return the data with another split, such as `split("dirichlet", clients=10, alpha=0.3)`.

        Args:
            name: The name of the split, or your own function.
            **options: Its options, and the other keys of `[split]`.
        """
        return replace(self, splitting={"name": name, **options})

    def task(self, seed: int = 0) -> Task:
        """Read the data, as a run with this seed does."""
        reading = as_long_as_taken(self.reading)
        return load(reading.pop("name"), Key(seed) / "data", **reading)


def from_dataset(data: Any, *, tokenizer: Any = None, kind: str | None = None, **options: Any) -> DataSource:
    """Take data that a program holds, and say what its columns hold.

    Args:
        data: A `datasets.Dataset` or `DatasetDict`, a pandas DataFrame, a table of pyarrow, a list of dicts, a dict of
            columns, or a torch `Dataset` or `DataLoader` (which is read in its own order). Of tuples, the first is the
            input and the second the target. A dict with the key "train" holds parts; any other dict of data sets holds
            one for each client.
        tokenizer: The tokenizer of texts. Default: none, for data that needs none.
        kind: The reader of the data, a name of `[data]`. Default: what the named columns tell, such as "text" for
            `text=..., label=...`, or "chat" for `messages=...`; "tokenized" for data with a column `input_ids`.
        **options: The columns by what they hold, such as `text="review", label="stars"`, and other options of the
            reader, such as `max_length=256`.

    Raises:
        DataError: If the data has another type, a column is missing, or the columns do not tell a reader.
        OptionError: If the reader does not have an option.
    """
    parts, by_client = _parts(data)
    splitting = {"name": "by_column", "column": CLIENT} if by_client else None
    if isinstance(next(iter(parts.values())), Table):
        if options or tokenizer is not None or kind is not None:
            name = next(iter(options), "tokenizer" if tokenizer is not None else "kind")
            raise DataError(f"rows of tensors have no columns, so '{name}' has no meaning; leave it out, or give dicts")
        return from_task(_tensor_task(parts))
    if not options.keys() & {*COLUMNS} and kind is None and "input_ids" in _column_names(parts):
        kind = "tokenized"
    kind = _reader({name for name in options if name in COLUMNS}, _column_names(parts)) if kind is None else kind
    if kind not in INDEX:
        raise DataError(f"kind is '{kind}'; {closest_match(kind, INDEX)}")
    for option, column in options.items():
        if option in COLUMNS and isinstance(column, str) and column not in _column_names(parts):
            raise DataError(f"the data has no column '{column}'; {closest_match(column, _column_names(parts))}")
    rows = hand_over(parts, _digest_of)
    held: tuple[Given, ...] = (rows,)
    reading = {"name": kind, "path": rows.name, **options}
    if tokenizer is not None:
        if not hasattr(tokenizer, "all_special_ids"):
            raise DataError(
                f"the tokenizer is of type {type(tokenizer).__name__}; give one of transformers: "
                "AutoTokenizer.from_pretrained(FOLDER OR ID)"
            )
        used = hand_over(tokenizer, tokenizer_digest)
        held, reading = (rows, used), {**reading, "tokenizer": used.name}
    return DataSource(reading, splitting, held)


def hand_over_rows(data: Any) -> Given:
    """Hand over rows to evaluate on, with the columns of a run's own data."""
    parts, _ = _parts(data)
    if isinstance(next(iter(parts.values())), Table):
        raise DataError("rows of tensors have no columns; give dicts with the columns of the run's data")
    return hand_over(parts, _digest_of)


def from_task(task: Task) -> DataSource:
    """Return a task that a program built as data of a run."""
    held = hand_over(task, _task_digest, changes=True)
    return DataSource({"name": "object", "path": held.name}, held=(held,))


def _task_digest(task: Task) -> str:
    digest = hashlib.blake2b(repr((task.kind.name, task.classes)).encode(), digest_size=16)
    for part in (task.train, task.test):
        digest.update(examples_digest(part).encode() if len(part) else b"")
    for name, values in sorted(task.columns.items()):
        digest.update(repr((name, values.tolist())).encode())
    return digest.hexdigest()


def given_task(path: str) -> Task:
    """A task that a program has handed over. It cannot be read from a file."""
    task: Task = unchanged(path)
    return task


def as_long_as_taken(reading: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table `[data]` with the length that its tokenizer takes, if none is set and the default is longer."""
    tokenizer = str(reading.get("tokenizer"))
    if not is_given(tokenizer):
        return dict(reading)
    known = options_by_name("data", reading["name"])
    longest = load_tokenizer(tokenizer)[2]
    lengths = {name: known[name].default for name in LENGTHS if name in known}
    return {**{name: longest for name, length in lengths.items() if length > longest}, **reading}


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of what decides how texts become tokens."""
    state = hashlib.blake2b(digest_size=16)
    text = tokenizer.backend_tokenizer.to_str() if getattr(tokenizer, "is_fast", False) else repr(tokenizer)
    state.update(text.encode())
    state.update(str(getattr(tokenizer, "chat_template", None)).encode())
    return state.hexdigest()


def _reader(named: set[str], columns: Sequence[str]) -> str:
    """Return the reader of the named columns."""
    for wanted, reader in READERS.items():
        if named == {*wanted.split()}:
            return reader
    what = f"the columns {', '.join(sorted(named))} do not tell a task" if named else "no column is named"
    known = ", ".join(f"{' + '.join(each.split())} ({reader})" for each, reader in READERS.items())
    raise DataError(
        f"{what}; the data has {', '.join(columns)}: say what they hold, as in partita.from_dataset(data, "
        f"text='review', label='stars'). These are known: {known}"
    )


def _column_names(parts: Mapping[str, Any]) -> list[str]:
    return list(next(iter(parts.values())).column_names)


def _parts(data: Any) -> tuple[dict[str, Any], bool]:
    """Return the parts of the data by name, and whether the data came by client."""
    if not isinstance(data, Mapping) or _is_columns(data):
        return {"train": _rows(data)}, False
    if not data:
        raise DataError("the dict of data sets is empty; give one for each client, or one with the key 'train'")
    if "train" in data:
        return {str(name): _rows(each) for name, each in data.items()}, False
    datasets = need("datasets", "data")
    parts: dict[str, list[Any]] = {}
    for client, of_client in data.items():
        found, _ = _parts(of_client)
        for name, rows in found.items():
            if isinstance(rows, Table):
                raise DataError("a dict of clients needs rows with columns, not tuples of tensors; give dicts")
            if CLIENT in rows.column_names:
                rows = rows.remove_columns(CLIENT)
            parts.setdefault(name, []).append(rows.add_column(CLIENT, [str(client)] * len(rows)))
    try:
        return {name: datasets.concatenate_datasets(each) for name, each in parts.items()}, True
    except ValueError as error:
        raise DataError(f"the clients' data sets have different columns: {str(error).splitlines()[0]}") from error


def _is_columns(data: Mapping[Any, Any]) -> bool:
    """Whether a dict holds columns, lists of plain values, and not data sets."""
    return not hasattr(data, "column_names") and all(
        isinstance(values, list | tuple) and not (len(values) and isinstance(values[0], Mapping | tuple))
        for values in data.values()
    )


def _rows(data: Any) -> Any:
    """Return one data set as a `datasets.Dataset`, or as a table of tensors."""
    datasets = need("datasets", "data")
    kind = type(data).__module__.partition(".")[0]
    if isinstance(data, datasets.IterableDataset):
        raise DataError("a stream of rows has no length; load the data set without streaming=True")
    if isinstance(data, datasets.Dataset):
        return data.with_format(None)
    if kind == "pandas":
        return datasets.Dataset.from_pandas(data, preserve_index=False)
    if kind == "pyarrow":
        return datasets.Dataset(data)
    if isinstance(data, Mapping):
        return datasets.Dataset.from_dict({str(name): list(values) for name, values in data.items()})
    if isinstance(data, torch.utils.data.DataLoader):
        data = data.dataset
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, str | bytes):
        raise DataError(
            f"data is of type {type(data).__name__}; give a datasets.Dataset, a pandas DataFrame, a list of dicts, or "
            "a torch Dataset with a length"
        )
    rows = [data[place] for place in range(len(data))]
    if not rows:
        raise DataError("the data has no rows; add some")
    if all(isinstance(row, Mapping) for row in rows):
        return datasets.Dataset.from_list([{name: _plain(value) for name, value in row.items()} for row in rows])
    if all(isinstance(row, tuple | list) and len(row) == 2 for row in rows):
        return _pairs(rows, datasets)
    raise DataError(f"rows are of type {type(rows[0]).__name__}; give dicts, or tuples of an input and its target")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _pairs(rows: Sequence[Any], datasets: Any) -> Any:
    """Return rows of inputs and targets: images with labels, texts with labels, or tensors."""
    first = rows[0][0]
    if isinstance(first, str):
        return datasets.Dataset.from_list([{"text": text, "label": _plain(label)} for text, label in rows])
    if not isinstance(first, torch.Tensor):
        if not type(first).__module__.startswith("PIL."):
            raise DataError(f"inputs are of type {type(first).__name__}; give tensors, images of PIL, or texts")
        features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
        columns = {"image": [image for image, _ in rows], "label": [int(label) for _, label in rows]}
        return datasets.Dataset.from_dict(columns, features=features)
    shapes = {tuple(value.shape) for value, _ in rows}
    if len(shapes) > 1:
        raise DataError(
            f"inputs have different shapes, such as {' and '.join(map(str, sorted(shapes)[:2]))}; give tensors of one "
            "shape, or token rows as dicts with 'input_ids', which are padded by batch"
        )
    targets = torch.stack([torch.as_tensor(target) for _, target in rows])
    name = "pixel_values" if first.ndim == 3 else "inputs"
    return Table({name: torch.stack([value for value, _ in rows])}, targets)


def _tensor_task(parts: Mapping[str, Table]) -> Task:
    """Return a task on tensors. Without a test part, a share of the rows is held out, the same for all seeds."""
    train = parts["train"]
    test = parts.get("test")
    if test is None:
        order = Key(0).permutation(len(train))
        count = max(1, int(len(train) * HOLD_OUT))
        train, test = (_select(parts["train"], rows.sort().values) for rows in (order[count:], order[:count]))
    numbers = train.targets.is_floating_point()
    pixels = train.inputs.get("pixel_values")
    # Without images, the scores of texts, which are those of any numbers and classes.
    kinds = (IMAGE_REGRESSION, IMAGE) if pixels is not None else (TEXT_REGRESSION, TEXT)
    kind = kinds[0] if numbers else kinds[1]
    targets = train.targets
    if numbers:
        width = 1 if targets.ndim == 1 else targets.shape[1]
        train, test = (replace(part, targets=part.targets.float().view(len(part), width)) for part in (train, test))
        names = tuple(f"target {place}" for place in range(width)) if width > 1 else ("target",)
    else:
        if targets.ndim != 1:
            raise DataError(f"targets have shape {tuple(targets.shape[1:])} each; give one class or numbers for a row")
        if int(targets.min()) < 0:
            raise DataError(f"a row has the class {int(targets.min())}; classes are 0, 1, ...: remove rows without one")
        names = tuple(map(str, range(int(max(targets.max(), test.targets.max())) + 1)))
        train, test = (replace(part, targets=part.targets.long()) for part in (train, test))
    square = pixels is not None and pixels.shape[2] == pixels.shape[3]
    channels, size = (pixels.shape[1], pixels.shape[2]) if pixels is not None and square else (0, 0)
    return Task("tensors", train, test, names, kind=kind, channels=channels, size=size)


def _select(table: Table, rows: torch.Tensor) -> Table:
    return Table({name: value[rows] for name, value in table.inputs.items()}, table.targets[rows])


def _digest_of(parts: Mapping[str, Any]) -> str:
    """Return a digest of all rows of all parts: of their columns, types and values."""
    pyarrow = need("pyarrow", "data")
    state = hashlib.blake2b(digest_size=16)
    for name, part in parts.items():
        arrow = part.with_format("arrow")
        state.update(f"{name}|{part.features}|{len(part)}".encode())
        for start in range(0, len(part), ROWS_TOGETHER):
            table = arrow[start : start + ROWS_TOGETHER].combine_chunks()
            sink = io.BytesIO()
            with pyarrow.ipc.new_stream(sink, table.schema.remove_metadata()) as writer:
                writer.write_table(table.replace_schema_metadata())
            state.update(sink.getbuffer())
    return state.hexdigest()
