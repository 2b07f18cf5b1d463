"""Split the rows of a task among clients. Every split gives each row to one client and each client at least one row."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.options import Count, PartialShare, Positive, Range, closest_match, format_value
from partita.core.own_code import short_name
from partita.core.registry import make
from partita.core.rng import Key
from partita.data.client_ids import NamedClients, NumberedClients
from partita.data.errors import DataError
from partita.data.groups import by_example, check_test_groups, row_groups
from partita.data.partition import (
    ClientSplit,
    Ints,
    Partition,
    PartsByPosition,
    ShotParts,
    WindowParts,
    group_by_client,
)
from partita.data.reorder import Reorder
from partita.data.reorder import reorder as reorder_content
from partita.data.task import Federation, Task

ATTEMPTS = 50
UNNAMED = "unnamed"  # name of the client whose value is missing

Clients = Annotated[Count, "number of clients"]
MinExamples = Annotated[Count, "minimum number of examples per client"]
Concentration = Annotated[Positive, "concentration of the Dirichlet distribution; smaller values are more skewed"]
Column = Annotated[str, "column whose values decide which client gets a row"]

SPLITS = {
    "iid": "partita.data.split:iid",
    "dirichlet": "partita.data.split:dirichlet",
    "quantity": "partita.data.split:quantity",
    "pathological": "partita.data.split:pathological",
    "disjoint": "partita.data.split:disjoint",
    "by_column": "partita.data.split:by_column",
    "groups": "partita.data.split:groups",
    "flwr": "partita.data.flwr_partitioners:flwr",
    "site": "partita.data.site:site",
}


def split(
    task: Task,
    name: str,
    clients: Count | None = None,
    *,
    key: Key,
    validation: Annotated[PartialShare, "share of each client's rows for its validation part"] = 0.1,
    test: Annotated[PartialShare, "share of each client's rows for its test part"] = 0.2,
    unseen: Annotated[
        Count | Annotated[float, Range(above=0, below=1)] | None,
        "clients that take no part, on whose test parts the model is tested: a number, or a fraction with a decimal "
        "point",
    ] = None,
    shots: Annotated[
        Count | None, "train rows of each class at each client, drawn from its train part; left out: all"
    ] = None,
    reorder: Annotated[
        Reorder | None,
        "give clients different orders of the same content: `patches` of images, tokens of texts within `windows`, or "
        "`reverse` the tokens for every second client; left out: unchanged",
    ] = None,
    reorder_size: Annotated[
        Count | None, "`patches`: side of a patch in pixels; `windows`: consecutive tokens of a window"
    ] = None,
    orders: Annotated[
        Count | None, "`patches`, `windows`: number of orders, dealt out to clients in turn; left out: one per client"
    ] = None,
    together: str | None = None,
    **options: Any,
) -> Federation:
    """Split the train rows among clients, and each client's rows into train, validation and test parts.

    Args:
        task: Task whose train rows are split.
        name: Name of the split: a key of `SPLITS`, or the user's own function.
        clients: Number of clients, for splits that take it.
        key: Key for all random draws.
        validation: Share of each client's rows for its validation part.
        test: Share of each client's rows for its test part.
        unseen: Number or share of the clients that take no part.
        shots: Train rows of each class at each client. A client that has fewer keeps all of them.
        reorder: What is reordered by client; None for nothing.
        reorder_size: Size of a patch or a window.
        orders: Number of orders.
        together: Column with the group of a row, such as its patient. A group is in one part of a client only, and the
            shares are shares of its groups. Default: rows have no groups.
        **options: Options of the split.

    Raises:
        DataError: If the split is impossible, or the column of groups is missing or has rows without a value.
    """
    groups = None
    if together is not None:
        groups = row_groups(task, together)
        check_test_groups(task, together)
    own = options if clients is None else {"clients": clients, **options}
    made = make("split", name, own, task=task, key=key / short_name(name))
    partition: Partition = _partition_of(made, task.row_count, name) if isinstance(made, Mapping) else made
    unseen_clients: Sequence[str] = ()
    clients_in: Sequence[str] = partition.clients
    if unseen is not None:
        partition, count = _hold_out_clients(partition, unseen, key / "unseen")
        clients_in, unseen_clients = (
            NamedClients(names) for names in (partition.clients[:-count], partition.clients[-count:])
        )
    # Use exact decimals: a share of 0.29 of 100 rows is 29 rows, but in binary floating point it rounds down to 28.
    cut = ClientSplit(partition, key / "parts", Fraction(str(validation)), Fraction(str(test)), groups)
    parts: PartsByPosition = cut if task.first_windows is None else WindowParts(cut, task.first_windows)
    if shots is not None:
        parts = ShotParts(cut, _classes(task), shots)
    by_group = None if groups is None else by_example(task, groups)
    federation = Federation(task, clients_in, parts, unseen_clients, by_group)
    if reorder is None:
        if reorder_size is not None or orders is not None:
            option = "reorder_size" if reorder_size is not None else "orders"
            raise DataError(f"split.{option} has no effect without split.reorder; set it, or leave split.{option} out")
        return federation
    return reorder_content(federation, reorder, reorder_size, orders, key / "reorder")


def _classes(task: Task) -> torch.Tensor:
    """Return the class of each train row, for `split.shots`.

    Raises:
        DataError: If rows do not have one class each, or texts are cut into windows.
    """
    if not task.kind.one_class:
        raise DataError(f"split.shots needs one class per example, which {task.name} does not have; leave it out")
    if task.first_windows is not None:
        raise DataError("split.shots does not work with data.long_texts = 'windows'; set it to 'cut' or 'error'")
    return torch.from_numpy(task.labels())


def _hold_out_clients(partition: Partition, unseen: float, key: Key) -> tuple[Partition, int]:
    """Draw the clients that take no part.

    Returns:
        The partition with these clients at the end, and their number.

    Raises:
        DataError: If no client would be left on either side, or if clients have their rows elsewhere.
    """
    total, sizes = len(partition.clients), partition.sizes()
    if not sizes.all():
        raise DataError(
            "split.unseen needs the rows of all clients on this machine; leave it out, and test the model at the "
            "other sites yourself"
        )
    count = math.floor(total * Fraction(str(unseen))) if isinstance(unseen, float) else unseen
    if not 0 < count < total:
        raise DataError(
            f"split.unseen = {unseen} would hold out {count} of {total} clients; at least one must be held out, and "
            "one must take part"
        )
    drawn = set(key.sample(range(total), count))
    order = [*(place for place in range(total) if place not in drawn), *sorted(drawn)]
    starts = partition.offsets[:-1]
    rows = np.concatenate([partition.rows[starts[place] : starts[place] + sizes[place]] for place in order])
    names = NamedClients([partition.clients[place] for place in order])
    return Partition(rows, np.concatenate([[0], np.cumsum(sizes[order])]), names), count


def _partition_of(rows: Mapping[str, Any], count: int, name: str) -> Partition:
    """Return the partition in which each client has the given rows, as a user's own split may return it.

    Raises:
        DataError: If a row does not exist or has two clients, or if a client has no rows.
    """
    owner = np.full(count, -1, np.int64)
    for place, (client, given) in enumerate(rows.items()):
        own = np.asarray(given, np.int64)
        if not own.size:
            raise DataError(f"the split '{name}' gives the client {format_value(client)} no rows; leave the client out")
        if own.min() < 0 or own.max() >= count:
            raise DataError(f"the split '{name}' gives {format_value(client)} a row outside of the {count} train rows")
        if (owner[own] >= 0).any() or len(np.unique(own)) < len(own):
            raise DataError(
                f"the split '{name}' gives a row of {format_value(client)} twice; give each row to one client"
            )
        owner[own] = place
    clients = _names([str(client) for client in rows], "the own split")
    used = np.flatnonzero(owner >= 0)
    grouped = used[np.argsort(owner[used], kind="stable")]
    sizes = np.bincount(owner[used], minlength=len(clients))
    return Partition(grouped, np.concatenate([[0], np.cumsum(sizes)]), NamedClients(clients))


def iid(task: Task, clients: Clients, key: Key) -> Partition:
    """Uniform split: rows are shuffled and divided evenly. Client sizes differ by at most one."""
    count = _check_counts(task, clients)
    owner = np.empty(count, np.int64)
    owner[_draws(key).permutation(count)] = np.arange(count) * clients // count
    return group_by_client(owner, NumberedClients(clients))


def dirichlet(
    task: Task, clients: Clients, key: Key, alpha: Concentration, min_examples: MinExamples = 10
) -> Partition:
    """Label skew: the rows of each class are divided in proportions drawn from a symmetric Dirichlet distribution."""
    _check_counts(task, clients, min_examples)
    return _proportions(task.labels(), clients, key, alpha, min_examples)


def quantity(task: Task, clients: Clients, key: Key, alpha: Concentration, min_examples: MinExamples = 10) -> Partition:
    """Size skew: all rows are divided in proportions drawn from a symmetric Dirichlet distribution."""
    count = _check_counts(task, clients, min_examples)
    return _proportions(np.zeros(count, np.int64), clients, key, alpha, min_examples)


def pathological(
    task: Task, clients: Clients, key: Key, classes_per_client: Annotated[Count, "number of classes per client"]
) -> Partition:
    """Label skew: each client has exactly `classes_per_client` classes. Clients of the same class divide it evenly.

    Raises:
        DataError: If the clients and classes cannot be matched, or if there are too few train rows.
    """
    count = _check_counts(task, clients)
    classes, codes = np.unique(task.labels(), return_inverse=True)
    if classes_per_client > len(classes):
        raise DataError(
            f"classes_per_client = {classes_per_client}, but the train rows of {task.name} have "
            f"{len(classes)} classes; use at most {len(classes)}"
        )
    if clients * classes_per_client < len(classes):
        raise DataError(
            f"{clients} clients of {classes_per_client} classes do not cover all {len(classes)} classes; "
            f"use at least {math.ceil(len(classes) / classes_per_client)} clients or more classes_per_client"
        )
    draws = _draws(key)
    clients_of_class = _clients_per_class(np.minimum(np.bincount(codes), clients), clients * classes_per_client, draws)
    chosen = _assign_classes(clients_of_class, clients, classes_per_client, draws)  # (client, choice)
    owner = np.empty(count, np.int64)
    for code in range(len(classes)):
        members = np.flatnonzero(codes == code)
        owners = np.flatnonzero((chosen == code).any(axis=1))
        # Shuffle the clients: otherwise the first client would always get the extra row of an uneven division.
        owner[draws.permutation(members)] = draws.permutation(owners)[np.arange(len(members)) % len(owners)]
    return group_by_client(owner, NumberedClients(clients))


def disjoint(task: Task, clients: Clients, key: Key) -> Partition:
    """Label skew: no class is at two clients. Classes are dealt out at random; their numbers differ by at most one.

    Raises:
        DataError: If there are fewer classes than clients.
    """
    _check_counts(task, clients)
    classes, codes = np.unique(task.labels(), return_inverse=True)
    if len(classes) < clients:
        raise DataError(
            f"the train rows of {task.name} have {len(classes)} classes, too few for {clients} clients without a class "
            f"in common; use at most {len(classes)} clients, or the split 'pathological'"
        )
    owner = np.empty(len(classes), np.int64)
    owner[_draws(key).permutation(len(classes))] = np.arange(len(classes)) % clients
    return group_by_client(owner[codes], NumberedClients(clients))


def by_column(
    task: Task, key: Key, column: Column, per_value: Annotated[Count, "number of clients per value"] = 1
) -> Partition:
    """Natural split: one or more clients for each value of a column, named after the value.

    Raises:
        DataError: If the column does not exist, or if a value has fewer than `per_value` rows.
    """
    values, codes, sizes = np.unique(
        _column(task, column, f"they become the client '{UNNAMED}'"), return_inverse=True, return_counts=True
    )
    if sizes.min() < per_value:
        few = int(sizes.argmin())
        raise DataError(
            f"per_value = {per_value}, but the value {format_value(str(values[few]))} of column '{column}' has "
            f"{sizes[few]} examples; use at most {sizes[few]}"
        )
    shuffled = _draws(key).permutation(len(codes))
    rows = shuffled[np.argsort(codes[shuffled], kind="stable")]
    within = np.arange(len(codes)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # index within the rows of one value
    owner = np.empty(len(codes), np.int64)
    owner[rows] = codes[rows] * per_value + within % per_value
    names = _names([str(value) for value in values], column)
    several = [f"{name}-{place}" for name in names for place in range(per_value)]
    return group_by_client(owner, NamedClients(several if per_value > 1 else names))


def groups(task: Task, clients: Clients, key: Key, column: Column) -> Partition:
    """Group split: rows with the same value of a column, such as a patient, stay together. Values are dealt evenly.

    Raises:
        DataError: If the column does not exist, or if it has fewer values than there are clients.
    """
    values, codes = np.unique(_column(task, column, "they stay together as one group"), return_inverse=True)
    if len(values) < clients:
        raise DataError(f"column '{column}' has {len(values)} values, too few for {clients} clients; use fewer clients")
    owner = np.empty(len(values), np.int64)
    owner[_draws(key).permutation(len(values))] = np.arange(len(values)) * clients // len(values)
    return group_by_client(owner[codes], NumberedClients(clients))


def _column(task: Task, column: str, becomes: str) -> NDArray[Any]:
    """Return the values of a column. Warn if some are missing; `becomes` says what happens to those rows."""
    if column not in task.columns:
        hint = closest_match(column, task.columns) if task.columns else "it has no columns; use another split"
        raise DataError(f"{task.name} has no column '{column}'; {hint}")
    values = task.columns[column]
    missing = sum(not str(value).strip() for value in values)
    if missing:
        warnings.warn(
            f"{missing:,} of {len(values):,} train rows of {task.name} have no value in column '{column}'; {becomes}; "
            "fill them in or remove the rows",
            stacklevel=2,
        )
    return values


def _proportions(groups: Ints, clients: int, key: Key, alpha: float, min_examples: int) -> Partition:
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    owner, best, smallest = np.empty_like(groups), -1, ""
    for attempt in range(ATTEMPTS):
        draws = _draws(key / "attempt" / attempt)
        for rows in members:
            owner[draws.permutation(rows)] = np.repeat(np.arange(clients), _shares(len(rows), clients, alpha, draws))
        sizes = np.bincount(owner, minlength=clients)
        if sizes.min() >= min_examples:
            return group_by_client(owner, NumberedClients(clients))
        if sizes.min() > best:
            best, smallest = int(sizes.min()), f"c{sizes.argmin()}"
    remedy = " or a lower min_examples" if min_examples > 1 else ""
    raise DataError(
        f"every client needs at least {min_examples} examples, but in the best of {ATTEMPTS} draws '{smallest}' got "
        f"{best}; use fewer clients than {clients}, a larger alpha than {alpha:g}{remedy}"
    )


def _shares(count: int, clients: int, alpha: float, draws: np.random.Generator) -> Ints:
    ends = np.cumsum(draws.dirichlet(np.full(clients, float(alpha)))) * count
    # A random offset rounds each share without bias. Plain rounding would favor the same clients in every class
    # when a class has fewer rows than there are clients.
    ends = np.floor(ends + draws.random()).astype(np.int64)
    ends[-1] = count
    return np.diff(np.minimum(ends, count), prepend=0)


def _clients_per_class(most: Ints, places: int, draws: np.random.Generator) -> Ints:
    """Return the number of clients per class, (class,), as equal as the maximum per class allows."""
    if most.sum() < places:
        raise DataError(
            f"the clients need {places} class shares, but the classes have enough examples for {most.sum()}; "
            "use fewer clients or fewer classes_per_client"
        )
    clients_of_class = np.zeros_like(most)
    while left := places - int(clients_of_class.sum()):
        unfilled = np.flatnonzero(clients_of_class < most)
        if left < len(unfilled):
            clients_of_class[draws.choice(unfilled, left, replace=False)] += 1
        else:
            clients_of_class[unfilled] += np.minimum(left // len(unfilled), most[unfilled] - clients_of_class[unfilled])
    return clients_of_class


def _assign_classes(clients_of_class: Ints, clients: int, per_client: int, draws: np.random.Generator) -> Ints:
    """Choose `per_client` random classes for every client. Class c is chosen by exactly clients_of_class[c] clients."""
    left = clients_of_class.astype(float)
    chosen = np.empty((clients, per_client), np.int64)
    for client in range(clients):
        # The smallest of exponentials with rates `left` are a draw without replacement with weights `left`.
        arrival = draws.standard_exponential(len(left)) / np.maximum(left, 1e-300)
        # A class with as many places left as there are clients left must be chosen by every remaining client.
        arrival[left == clients - client] = 0.0
        chosen[client] = np.argpartition(arrival, per_client - 1)[:per_client]
        left[chosen[client]] -= 1
    return chosen[draws.permutation(clients)]  # forced choices accumulate at the end


def _names(values: list[str], column: str) -> list[str]:
    """Turn values into names that are valid in file names and key paths. Number duplicates, and warn of them."""
    taken: dict[str, str] = {}
    for value in values:
        plain = re.sub(r"[^\w.-]+", "_", value).strip("_.") or UNNAMED  # never ".." or a hidden file
        name, again = plain, 2
        while name in taken:
            name, again = f"{plain}_{again}", again + 1
        taken[name] = value
        if name != plain:
            first, second = format_value(taken[plain]), format_value(value)
            warnings.warn(
                f"the values {first} and {second} of column '{column}' become the clients '{plain}' and '{name}'; if "
                "they are one client, write them alike",
                stacklevel=2,
            )
    return list(taken)


def _check_counts(task: Task, clients: int, min_examples: int = 1) -> int:
    """Return the number of train rows. Raise a DataError if there are too few."""
    if clients * min_examples > task.row_count:
        raise DataError(
            f"{clients} clients with at least {min_examples} examples need {clients * min_examples}, but "
            f"{task.name} has {task.row_count}; use at most {task.row_count // min_examples} clients"
        )
    return task.row_count


def _draws(key: Key) -> np.random.Generator:
    return np.random.default_rng(key.seed())
