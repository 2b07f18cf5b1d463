"""Tasks and federations: a task holds train and test examples, a federation assigns the train rows to clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.data import Batch, ClientData, Examples, NewClasses, text_lengths
from partita.core.options import Range
from partita.core.tensors import Tensors
from partita.data.choice_examples import ChoiceExamples
from partita.data.client_ids import NamedClients
from partita.data.errors import DataError
from partita.data.image_reader import ImagesOnDisk
from partita.data.loading import Columns
from partita.data.packing import pack
from partita.data.partition import Ints, PartsByPosition
from partita.data.ragged import RaggedExamples
from partita.data.seq2seq_examples import Seq2SeqExamples
from partita.tasks import IMAGE, Normalization, TaskKind

Side = Annotated[int, Range(low=1, high=2**16)]  # side of an image in pixels


@dataclass(frozen=True, eq=False)
class Table:
    """Examples in memory.

    Attributes:
        inputs: Input tensors by name, each (row, ...).
        targets: Targets, (row, ...).
        transform: Applied to the inputs of each batch in `take`. It lets images be stored as uint8.

    Raises:
        DataError: If inputs and targets differ in their number of rows.
    """

    inputs: Tensors
    targets: torch.Tensor
    transform: Callable[[Tensors], Tensors] | None = None

    def __post_init__(self) -> None:
        for name, value in self.inputs.items():
            if len(value) != len(self.targets):
                raise DataError(f"input '{name}' has {len(value)} rows, but there are {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: torch.Tensor) -> Batch:
        indices = indices.to(self.targets.device, non_blocking=True)
        inputs = {name: value.index_select(0, indices) for name, value in self.inputs.items()}
        if self.transform is not None:
            inputs = self.transform(inputs)
        return Batch(inputs, self.targets.index_select(0, indices))

    def to(self, device: torch.device) -> Table:
        """Move the table to `device`.

        Returns:
            The table on `device`, or the table unchanged if it needs more than half of the free CUDA memory.
        """
        if self.targets.device == device:
            return self
        tensors = (*self.inputs.values(), self.targets)
        size = sum(value.numel() * value.element_size() for value in tensors)
        if device.type == "cuda" and size > torch.cuda.mem_get_info(device)[0] // 2:
            return self
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        return Table(inputs, self.targets.to(device), self.transform)


Rows = Table | ImagesOnDisk | RaggedExamples | Seq2SeqExamples | ChoiceExamples


@dataclass(frozen=True, eq=False)
class Subset:
    """A view of some rows of a table. It stores only the row indices."""

    table: Rows
    indices: torch.Tensor  # (row,)
    groups: torch.Tensor | None = None  # the group of each example, such as its patient, (row,); None if there are none

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: torch.Tensor) -> Batch:
        return self.table.take(self.indices[indices])

    @property
    def limits(self) -> tuple[int, int] | None:
        """The longest padded rows of tokens, of the inputs and of the targets; None for a table without texts."""
        return getattr(self.table, "limits", None)

    def lengths(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return the number of tokens of each example, (example,); None for a table without texts."""
        return text_lengths(self.table, self.indices[indices])

    @property
    def documents(self) -> torch.Tensor | None:
        """The document of each example, (example,); None if examples are documents."""
        documents = getattr(self.table, "documents", None)
        return None if documents is None else documents[self.indices]

    def take_choices(self, indices: torch.Tensor) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        """Return questions with all their choices, as `ChoiceExamples` does."""
        assert isinstance(self.table, ChoiceExamples)
        return self.table.take_choices(self.indices[indices])

    def prefetch(self, indices: torch.Tensor) -> None:
        """Start to read the examples if the table reads ahead."""
        if isinstance(self.table, ImagesOnDisk):
            self.table.prefetch(self.indices[indices])


@dataclass(frozen=True, eq=False)
class Task:
    """Train and test examples of a learning task.

    Attributes:
        name: Name of the task, used in error messages.
        train: Train examples, which a split assigns to clients.
        test: Central test examples, which no client holds.
        classes: Names of the classes or of the regression targets. Empty for language modeling.
        columns: For each column, one value per train row. Splits such as `by_column` read them.
        channels: Channels of the images; 0 for other inputs.
        size: Side of the square images in pixels; 0 for other inputs.
        kind: Kind of the task: what a model takes and predicts, its loss and its metrics.
        vocabulary_size: Smallest vocabulary size that holds every token; 0 for inputs that are not text.
        tokenizer: Tokenizer of the texts; None for other inputs.
        normalization: Mean and standard deviation of pixels from 0 to 255, divided by 255; None for other inputs.
        notes: What a user should know about the data, recorded with the run: what was cut, what is read from disk.
        test_columns: For each column, one value per test row. Scores by subgroup read them.
        new: Test examples of classes that are not in `classes`; None if there are none.
        packed: Whether each client trains on rows that hold several of its examples.

    Raises:
        DataError: If a column does not have one value per row.
    """

    name: str
    train: Rows
    test: Rows
    classes: tuple[str, ...]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    channels: int = 0
    size: int = 0
    kind: TaskKind = IMAGE
    vocabulary_size: int = 0
    tokenizer: Any = None
    normalization: Normalization | None = None
    notes: tuple[str, ...] = ()
    test_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    new: NewClasses | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        for part, rows, columns in (
            ("train", self.row_count, self.columns),
            ("test", _row_count(self.test), self.test_columns),
        ):
            for name in columns:
                count = columns.rows if isinstance(columns, Columns) else len(columns[name])
                if count != rows:
                    raise DataError(f"column '{name}' has {count} values for {rows} {part} rows")

    @property
    def row_count(self) -> int:
        """Number of train rows that a split assigns: documents if texts are cut into windows, else examples."""
        return len(self.train) if self.first_windows is None else len(self.first_windows) - 1

    @cached_property
    def first_windows(self) -> torch.Tensor | None:
        """The first window of each train row and the number of windows, (row + 1,); None if rows are examples."""
        documents: torch.Tensor | None = getattr(self.train, "documents", None)
        if documents is None:
            return None
        return torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(documents).cumsum(0)])

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest padded batch; 0 for inputs that are not text."""
        tables = [table for table in (self.train, self.test) if isinstance(table, RaggedExamples | ChoiceExamples)]
        widths = [table.limit if self.packed and table is self.train else table.width() for table in tables]
        return max(widths, default=0)

    def labels(self) -> Ints:
        """Return the class of each train row that a split assigns, (row,).

        Raises:
            DataError: If the task does not have exactly one class per example.
        """
        targets = self.train.targets
        if targets.ndim != 1 or targets.is_floating_point() or not self.kind.one_class:
            raise DataError(
                f"{self.name} has targets of shape {tuple(targets.shape)} and type {targets.dtype}, but this split "
                "needs exactly one class per example; use 'iid', 'quantity' or 'by_column'"
            )
        if self.first_windows is not None:
            targets = targets[self.first_windows[:-1]]
        return targets.numpy().astype(np.int64)


def text_task(
    name: str,
    train: RaggedExamples | Seq2SeqExamples | ChoiceExamples,
    test: RaggedExamples | Seq2SeqExamples | ChoiceExamples,
    classes: tuple[str, ...],
    columns: Mapping[str, NDArray[Any]],
    kind: TaskKind,
    tokenizer: Any,
    notes: tuple[str, ...] = (),
    test_columns: Mapping[str, NDArray[Any]] | None = None,
) -> Task:
    """Build a task on tokenized texts, with a vocabulary that holds every token of both parts."""
    size = max(train.vocabulary_size(), test.vocabulary_size())
    return Task(
        name,
        train,
        test,
        classes,
        columns,
        kind=kind,
        vocabulary_size=size,
        tokenizer=tokenizer,
        notes=notes,
        test_columns=test_columns or {},
    )


def _row_count(table: Rows) -> int:
    """Return the number of rows of a table: documents if texts are cut into windows, else examples."""
    documents: torch.Tensor | None = getattr(table, "documents", None)
    return len(table) if documents is None else int(documents[-1]) + 1 if len(documents) else 0


@dataclass(frozen=True, eq=False)
class Federation:
    """A task split among clients. Each client's train, validation and test parts are built on access.

    Attributes:
        task: The task.
        clients: Names of the clients that take part.
        parts: Rows of each client, those of `clients` before those of `unseen`.
        unseen: Names of clients that take no part. The model is tested on their data.
        groups: The group of each train example, (example,); None if examples have no groups.
    """

    task: Task
    clients: Sequence[str]
    parts: PartsByPosition
    unseen: Sequence[str] = ()
    groups: torch.Tensor | None = None

    def __getitem__(self, client: str) -> ClientData:
        if client in self.unseen:
            position = len(self.clients) + self.unseen.index(client)
        else:
            position = self.clients.index(client)
        train, validation, test = (
            Subset(self.task.train, rows, None if self.groups is None else self.groups[rows])
            for rows in self.parts[position]
        )
        return ClientData(pack(train) if self.task.packed else train, validation, test)

    @property
    def test(self) -> Examples:
        """The central test set, which no client holds."""
        return self.task.test

    @property
    def classes(self) -> tuple[str, ...]:
        return self.task.classes

    def to(self, device: torch.device) -> Federation:
        """Move images to `device` once for all rounds.

        Token data is small and stays on the CPU, where batches are padded.
        """
        moved = {
            name: table.to(device)
            for name, table in (("train", self.task.train), ("test", self.task.test))
            if isinstance(table, Table | ImagesOnDisk)
        }
        new = self.task.new
        if new is not None and isinstance(new.examples, Table):
            new = replace(new, examples=new.examples.to(device))
        return replace(self, task=replace(self.task, new=new, **moved))  # type: ignore[arg-type]

    def with_flipped_labels(self, clients: Iterable[str]) -> Federation:
        """Return a federation in which these clients train with class C - 1 - y in place of class y of C.

        Raises:
            DataError: If the task does not have exactly one class per example.
        """
        self.task.labels()
        targets = self.task.train.targets.clone()
        for client in clients:
            rows, _, _ = self.parts[self.clients.index(client)]
            targets[rows] = len(self.classes) - 1 - targets[rows]
        train: Any = self.task.train  # with one class per example, which only a table and ragged rows can have
        return replace(self, task=replace(self.task, train=replace(train, targets=targets)))

    def pooled(self) -> Federation:
        """Return a federation with a single client whose parts are the concatenated parts of all clients."""
        train, validation, test = zip(*(self.parts[position] for position in range(len(self.clients))), strict=True)
        unseen = [self.parts[len(self.clients) + place] for place in range(len(self.unseen))]
        pool = (torch.cat(train), torch.cat(validation), torch.cat(test))
        return Federation(self.task, NamedClients(["pooled"]), [pool, *unseen], self.unseen, self.groups)
