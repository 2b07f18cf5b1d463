"""What a run records after each round: every quantity once, with its type, its privacy status and its numbers.

To add a quantity, add a field to `Row` and give it a `Quantity`. The reader's checks, the privacy statement, the
numbers that trackers get, the columns of data frames and the curves of `partita watch` follow from it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from partita.record.check import Count, Number, Numbers, ShapeError, check_of, like
from partita.record.metric import Metric, metric_named

Unit = Literal["example", "group", "client"]
# public: does not depend on private data, or is declared public.
# charged: a release with its own noise, recorded in the ledger.
# noised: computed from values that are already noised (post-processing).
# withheld: not sent or not recorded.
# named: not covered by the guarantee.
Status = Literal["public", "charged", "noised", "withheld", "named"]
Path = tuple[str, ...]  # the name of a number, such as ("test", "accuracy")
Metrics = Sequence[Metric]  # of the run; the worst tenth of clients depends on the direction
ToNumbers = Callable[[str, Any, Metrics], Iterator[tuple[Path, Any]]]  # of a quantity's key and value


def _none(key: str, value: Any, metrics: Metrics) -> Iterator[tuple[Path, Any]]:
    yield from ()


def _one(key: str, value: Any, metrics: Metrics) -> Iterator[tuple[Path, Any]]:
    yield (key,), int(value) if isinstance(value, bool) else value


def _each(key: str, value: Mapping[str, Any], metrics: Metrics) -> Iterator[tuple[Path, Any]]:
    for name, item in value.items():
        yield (key, name), item


def _each_of_groups(key: str, value: Mapping[str, Any], metrics: Metrics) -> Iterator[tuple[Path, Any]]:
    for group, measures in value.items():
        for name, item in (measures or {}).items():
            yield (key, group, name), item


def _over_clients(key: str, value: Mapping[str, Any], metrics: Metrics) -> Iterator[tuple[Path, Any]]:
    for metric, by_client in value.items():
        known = [item for item in (by_client or {}).values() if is_finite(item)]
        if known:
            worst = metric_named(metric, metrics).worst_tenth(known)
            yield (key, metric, "mean"), sum(known) / len(known)
            yield (key, metric, "worst_tenth"), sum(worst) / len(worst)


def _count(name: str) -> ToNumbers:
    def count(key: str, value: Any, metrics: Metrics) -> Iterator[tuple[Path, Any]]:
        yield tuple(name.split("/")), len(value)

    return count


def _of_subgroups(key: str, value: "Subgroups", metrics: Metrics) -> Iterator[tuple[Path, Any]]:
    yield (key, "gap"), value.get("gap")
    yield from _each_of_groups(key, value["groups"], metrics)


def _of_privacy(key: str, value: "Spending", metrics: Metrics) -> Iterator[tuple[Path, Any]]:
    yield (key, "epsilon"), value.get("epsilon")
    yield (key, "delta"), value.get("delta")


@dataclass(frozen=True)
class Quantity:
    """What the privacy guarantee says about a quantity, and how it becomes numbers.

    Group-level privacy is example-level privacy with groups as units, so the statuses are the same.

    Attributes:
        example: Status under example-level privacy.
        client: Status under client-level privacy.
        why: The reason, as a sentence for the record.
        to_numbers: The numbers that trackers, data frames and curves show.
        clients: Whether it names or counts single clients. Under client-level privacy the guarantee holds only against
            those who do not see such quantities.
    """

    example: Status
    client: Status
    why: str
    to_numbers: ToNumbers = _none
    clients: bool = False

    def under(self, unit: Unit) -> Status:
        """Return the status for a privacy unit."""
        return self.client if unit == "client" else self.example


Layer = Annotated[str, like(r"layer\.\d{1,4}", "a layer such as 'layer.0'")]
ByGroup = Mapping[str, Numbers | None]  # group or metric -> name or client -> number


class _Groups(TypedDict):
    groups: Mapping[str, Numbers]


class Subgroups(_Groups, total=False):
    """Scores of the test set by a column."""

    gap: Number
    minimum: Number


class Spending(TypedDict, total=False):
    """What the rounds so far have cost, and the server's signal, on which the plan may depend."""

    epsilon: Number
    delta: Number
    signal: Mapping[str, float]


class _Sum(TypedDict):
    clients: Count
    recovered: Count
    bits: Count


class SecureSum(_Sum, total=False):
    """What secure aggregation did in a round."""

    threshold: Count
    neighbors: Count
    resolution: Number
    bytes: Mapping[str, Mapping[str, Count]]
    seconds: Numbers
    off: list[str]


class ConfusionCounts(TypedDict):
    """How often each class (row) is taken for which (column)."""

    classes: list[str]
    counts: list[list[Count]]


def _square(value: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    size = len(value["classes"])
    if [len(row) for row in value["counts"]] != [size] * size:
        raise ShapeError(f"{where}.counts does not have a row and a column for each of the classes")
    return value


_TRAFFIC = "follows from the plan and from layer choices that were charged"


class Row(TypedDict, total=False):
    """The record of a round. A quantity that a run does not have is left out or None."""

    round: Annotated[Count, Quantity("public", "public", "the schedule is fixed in advance", _one)]
    lr: Annotated[Number, Quantity("public", "public", "the schedule is fixed in advance", _one)]
    seconds: Annotated[
        Number,
        Quantity("named", "named", "wall time and file times depend on the amount of work and are not protected", _one),
    ]
    padding: Annotated[
        Number,
        Quantity(
            "withheld",
            "withheld",
            "the share of padding in the clients' batches follows from how many examples they have, and how long these "
            "are",
            _one,
        ),
    ]
    cohort: Annotated[
        list[str],
        Quantity(
            "public",
            "named",
            "the clients sampled in a round: a client-level epsilon with amplification by sampling holds only against "
            "those who do not know them, so keep the rows private",
            _count("clients/sampled"),
            clients=True,
        ),
    ]
    lost: Annotated[
        Mapping[str, str],
        Quantity(
            "named",
            "withheld",
            "why a client was lost: the error can reveal unreadable data; under client-level privacy the reason is "
            "replaced, and which clients were lost is named",
            _count("clients/lost"),
            clients=True,
        ),
    ]
    refused: Annotated[
        Mapping[str, str],
        Quantity(
            "named",
            "withheld",
            "unsolicited replies and why they were refused",
            _count("clients/refused"),
            clients=True,
        ),
    ]
    bounded: Annotated[
        Numbers | None,
        Quantity(
            "noised",
            "withheld",
            "clients with an update norm above federation.max_norm, and the norm",
            _count("clients/bounded"),
            clients=True,
        ),
    ]
    skipped: Annotated[
        bool, Quantity("named", "named", "whether a round was skipped: it depends on client failures", _one)
    ]
    population: Annotated[Count, Quantity("public", "named", "number of clients available in a round", clients=True)]
    train_loss: Annotated[Number, Quantity("withheld", "withheld", "computed from raw examples", _one)]
    losses: Annotated[
        Numbers | None,
        Quantity("withheld", "withheld", "the clients' training losses, computed from raw examples", clients=True),
    ]
    validation: Annotated[
        Numbers | None,
        Quantity(
            "withheld",
            "withheld",
            "scores on the clients' own validation examples; a private run is not evaluated on them, unless "
            "privacy.disclose_validation is set: then the guarantee does not cover them",
            _each,
        ),
    ]
    bytes: Annotated[Mapping[str, float] | None, Quantity("public", "public", _TRAFFIC, _each)]
    up: Annotated[Numbers | None, Quantity("public", "public", _TRAFFIC)]
    down: Annotated[Numbers | None, Quantity("public", "public", _TRAFFIC)]
    drift: Annotated[
        ByGroup | None,
        Quantity(
            "noised",
            "withheld",
            "measured on individual updates, which are noised at the client or not at all",
            _each_of_groups,
        ),
    ]
    secure: Annotated[
        SecureSum | None,
        Quantity(
            "named",
            "named",
            "with secure aggregation, how many clients are in the sum, and the bytes and the time of the protocol; "
            "which clients dropped out is in `lost`",
        ),
    ]
    test: Annotated[
        Numbers | None,
        Quantity(
            "noised",
            "noised",
            "scores of a noised model on the central test set; withheld if models trained on raw data would be tested: "
            "clients' own models under client-level privacy, and heads fitted for the test unless method.finetune is 0",
            _each,
        ),
    ]
    by_type: Annotated[
        ByGroup | None,
        Quantity(
            "noised",
            "noised",
            "scores of `test` by entity type, and how many entities of each type the central test set has; clients "
            "never send such scores of their own examples",
            _each_of_groups,
        ),
    ]
    subgroups: Annotated[
        Subgroups | None,
        Quantity(
            "noised",
            "noised",
            "scores of `test` by a column of the central test set, and how many examples each group has; clients never "
            "send such scores of their own examples",
            _of_subgroups,
        ),
    ]
    confusion: Annotated[
        Annotated[ConfusionCounts, _square] | None,
        Quantity(
            "noised",
            "noised",
            "how often the noised model takes which class of the central test set for which, in the last test; clients "
            "never send such counts of their own examples",
        ),
    ]
    personal: Annotated[
        ByGroup | None,
        Quantity(
            "named",
            "withheld",
            "scores of noised models on clients' own test sets: test examples are not covered, and "
            "evaluate.personal_every = 0 disables these tests; withheld if heads are fitted for the test, unless "
            "method.finetune is 0",
            _over_clients,
            clients=True,
        ),
    ]
    unseen: Annotated[
        ByGroup | None,
        Quantity(
            "named",
            "withheld",
            "scores of noised models on the test sets of clients that take no part: their examples are not covered, "
            "and evaluate.unseen_epochs trains on them without noise; leave split.unseen out to disable these tests",
            _over_clients,
            clients=True,
        ),
    ]
    privacy: Annotated[
        Spending,
        Quantity(
            "public",
            "public",
            "epsilon is computed from public numbers, and the signal from noised values",
            _of_privacy,
        ),
    ]
    chosen: Annotated[
        Mapping[str, list[Layer]],
        Quantity(
            "charged",
            "public",
            "a data-dependent choice is a release; a random or cyclic choice does not use data",
            clients=True,
        ),
    ]
    scores: Annotated[
        Mapping[str, Mapping[Layer, float]],
        Quantity("charged", "withheld", "noised layer scores are a separate release"),
    ]
    alarms: Annotated[
        Mapping[str, str],
        Quantity(
            "noised",
            "withheld",
            "computed from layer choices, norms and the reasons why clients were lost; the alarm on a model that "
            "predicts one class follows from `test` and is never withheld",
            _count("alarm_count"),
        ),
    ]


def _quantities() -> dict[str, Quantity]:
    found: dict[str, Quantity] = {}
    for name, form in get_type_hints(Row, include_extras=True).items():
        told = [each for each in get_args(form)[1:] if isinstance(each, Quantity)]
        if len(told) != 1:
            raise TypeError(f"Row.{name} has {len(told)} quantities; give it exactly one, with its privacy status")
        found[name] = told[0]
    return found


QUANTITIES: Mapping[str, Quantity] = _quantities()


def check_row(value: Any) -> Row:
    """Return a row that was read from a file, without unknown keys.

    Raises:
        ShapeError: If a value does not have the type of its quantity.
    """
    row: Row = check_of(Row)(value, "the row")
    if "round" not in row:
        raise ShapeError("the row has no 'round'")
    return row


def numbers(row: Mapping[str, Any], metrics: Metrics) -> Iterator[tuple[Path, Any]]:
    """Yield the name and value of each number in a row. Values may be None or not finite.

    Args:
        row: The row.
        metrics: The metrics of the run; the worst tenth of clients depends on their direction.
    """
    for key, quantity in QUANTITIES.items():
        if row.get(key) is not None:
            yield from quantity.to_numbers(key, row[key], metrics)


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and isfinite(value)
