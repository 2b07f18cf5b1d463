"""Everything else that leaves a client or is recorded in a private run, with its privacy status, as `Row` has its."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from partita.record import file_names
from partita.record.row import QUANTITIES, Quantity, Row, Unit

LOST = "gave no usable answer"  # replaces a reason that may quote a client's values
VALIDATION = "validation"  # withheld, unless the config discloses it
TEST_ALARMS = ("one predicted class",)  # alarms that follow from the noised model and the central test set, as `test`


OUTSIDE_ROWS: Mapping[str, Quantity] = {
    "updates": Quantity(
        "charged",
        "charged",
        "noised by the client, alone or as a part of the noise on a secure sum, or clipped by the client with noise "
        "added to the sum by the server",
    ),
    "examples at a client": Quantity(
        "public",
        "withheld",
        "the number sets a client's weight and sampling rate; under group-level privacy it is the number of groups, "
        "and the number of examples is not sent; under client-level privacy all weights are 1",
    ),
    file_names.SPLIT: Quantity(
        "withheld",
        "withheld",
        "clients' numbers of examples and of labels are exact; a private run does not record them",
    ),
    "steps": Quantity(
        "public",
        "named",
        "computed from the number of examples or groups; only the trusted server sees them, and nobody with secure "
        "aggregation",
    ),
    "single updates": Quantity(
        "charged",
        "named",
        "under client-level privacy the trusted server sees them; with secure aggregation nobody sees them",
    ),
    "numbers told by rules": Quantity("charged", "withheld", "a rule that uses data must declare its release"),
    "errors": Quantity(
        "named", "named", "an error that ends the run may quote values, and everyone can see that the run ended"
    ),
    "checkpoints": Quantity(
        "noised",
        "named",
        "the server's values are noised; under client-level privacy its list of which client holds what is not",
    ),
    "clients' states": Quantity(
        "noised",
        "named",
        "the clients' own parameters are noised under example-level privacy and raw under client-level privacy; they "
        "stay on the clients, and in a simulation they are in the folder 'clients'",
    ),
    "early stop": Quantity(
        "public", "public", "a private run stops early by its epsilon only, which follows from public numbers"
    ),
    "digest": Quantity("noised", "named", "a checksum of the server's tensors and the clients' own"),
    file_names.AUDIT: Quantity(
        "named",
        "named",
        "attacks are measured on raw examples: do not publish it with the run; a model card shows its bound on "
        "epsilon, and says that it is not covered",
    ),
    file_names.SAMPLES: Quantity(
        "withheld",
        "withheld",
        "examples of the central test set in full; a private run refuses evaluate.samples",
    ),
    file_names.PROGRESS: Quantity(
        "public",
        "public",
        "the round and its phase, while the run goes on; in a private run it does not say which clients take part, "
        "reply or are lost, and names an error by its type alone",
    ),
    "site logs": Quantity("named", "named", "the contents of a site's own logs"),
    "frozen features": Quantity(
        "public", "public", "a cache of frozen layers stays with the examples that it was computed from"
    ),
}


def disclosed(unit: Unit, validation: bool = False) -> dict[str, list[str]]:
    """Return, for the run's record, what the guarantee does not cover and what is withheld.

    Args:
        unit: The privacy unit.
        validation: Whether the run discloses scores on validation examples.

    Returns:
        Texts "quantity: reason" under the keys "not_covered" and "withheld".
    """
    lists: dict[str, list[str]] = {"not_covered": [], "withheld": []}
    for what, quantity in {**QUANTITIES, **OUTSIDE_ROWS}.items():
        status = "named" if validation and what == VALIDATION else quantity.under(unit)
        if status in ("named", "withheld"):
            lists["not_covered" if status == "named" else "withheld"].append(f"{what}: {quantity.why}")
    return lists


def withhold(row: Row, unit: Unit, validation: bool = False) -> Row:
    """Return a row without the values that are withheld.

    Args:
        row: The row.
        unit: The privacy unit.
        validation: Whether scores on validation examples are disclosed.
    """
    withheld = {key for key in row.keys() & QUANTITIES.keys() if QUANTITIES[key].under(unit) == "withheld"}
    withheld -= {VALIDATION} if validation else set()
    kept = {key: _replacement(key, value) if key in withheld else value for key, value in row.items()}
    return cast(Row, kept)


def _replacement(key: str, value: Any) -> Any:
    """Return what a withheld value is replaced by. It keeps its type: readers expect a table in place of a table."""
    if key == "lost":
        return dict.fromkeys(value, LOST)
    if not isinstance(value, Mapping):
        return None
    return {kind: text for kind, text in value.items() if key == "alarms" and kind in TEST_ALARMS}
