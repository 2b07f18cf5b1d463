"""Everything that leaves a client or is recorded in a private run, with its privacy status.

A test fails for a row key that is not listed here, so that every new key gets a decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from partita.record import file_names

Unit = Literal["example", "group", "client"]
# public: does not depend on private data, or is declared public.
# charged: a release with its own noise, recorded in the ledger.
# noised: computed from values that are already noised (post-processing).
# withheld: not sent or not recorded.
# named: not covered by the guarantee.
Status = Literal["public", "charged", "noised", "withheld", "named"]
LOST = "gave no usable answer"  # replaces a reason that may quote a client's values
VALIDATION = "validation"  # withheld, unless the config discloses it
TEST_ALARMS = ("one predicted class",)  # alarms that follow from the noised model and the central test set, as `test`


@dataclass(frozen=True)
class Quantity:
    """Status of a quantity under example-level and client-level privacy, and the reason.

    Group-level privacy is example-level privacy with groups as units, so the statuses are the same.
    """

    example: Status
    client: Status
    why: str  # the reason, as a sentence for the record

    def under(self, unit: Unit) -> Status:
        """Return the status for a privacy unit."""
        return self.client if unit == "client" else self.example


ROW: Mapping[str, Quantity] = {
    "round": Quantity("public", "public", "the schedule is fixed in advance"),
    "lr": Quantity("public", "public", "the schedule is fixed in advance"),
    "seconds": Quantity(
        "named", "named", "wall time and file times depend on the amount of work and are not protected"
    ),
    "padding": Quantity(
        "withheld",
        "withheld",
        "the share of padding in the clients' batches follows from how many examples they have, and how long these are",
    ),
    "cohort": Quantity(
        "public",
        "named",
        "the clients sampled in a round: a client-level epsilon with amplification by sampling holds only against "
        "those who do not know them, so keep the rows private",
    ),
    "lost": Quantity(
        "named",
        "withheld",
        "why a client was lost: the error can reveal unreadable data; under client-level privacy the reason is "
        "replaced, and which clients were lost is named",
    ),
    "refused": Quantity("named", "withheld", "unsolicited replies and why they were refused"),
    "bounded": Quantity("noised", "withheld", "clients with an update norm above federation.max_norm, and the norm"),
    "skipped": Quantity("named", "named", "whether a round was skipped: it depends on client failures"),
    "population": Quantity("public", "named", "number of clients available in a round"),
    "train_loss": Quantity("withheld", "withheld", "computed from raw examples"),
    "losses": Quantity("withheld", "withheld", "the clients' training losses, computed from raw examples"),
    "validation": Quantity(
        "withheld",
        "withheld",
        "scores on the clients' own validation examples; a private run is not evaluated on them, unless "
        "privacy.disclose_validation is set: then the guarantee does not cover them",
    ),
    "bytes": Quantity("public", "public", "follows from the plan and from layer choices that were charged"),
    "up": Quantity("public", "public", "follows from the plan and from layer choices that were charged"),
    "down": Quantity("public", "public", "follows from the plan and from layer choices that were charged"),
    "drift": Quantity(
        "noised", "withheld", "measured on individual updates, which are noised at the client or not at all"
    ),
    "secure": Quantity(
        "named",
        "named",
        "with secure aggregation, how many clients are in the sum, and the bytes and the time of the protocol; which "
        "clients dropped out is in `lost`",
    ),
    "test": Quantity(
        "noised",
        "noised",
        "scores of a noised model on the central test set; withheld if models trained on raw data would be tested: "
        "clients' own models under client-level privacy, and heads fitted for the test unless method.finetune is 0",
    ),
    "by_type": Quantity(
        "noised",
        "noised",
        "scores of `test` by entity type, and how many entities of each type the central test set has; clients never "
        "send such scores of their own examples",
    ),
    "subgroups": Quantity(
        "noised",
        "noised",
        "scores of `test` by a column of the central test set, and how many examples each group has; clients never "
        "send such scores of their own examples",
    ),
    "confusion": Quantity(
        "noised",
        "noised",
        "how often the noised model takes which class of the central test set for which, in the last test; clients "
        "never send such counts of their own examples",
    ),
    "personal": Quantity(
        "named",
        "withheld",
        "scores of noised models on clients' own test sets: test examples are not covered, and "
        "evaluate.personal_every = 0 disables these tests; withheld if heads are fitted for the test, unless "
        "method.finetune is 0",
    ),
    "unseen": Quantity(
        "named",
        "withheld",
        "scores of noised models on the test sets of clients that take no part: their examples are not covered, and "
        "evaluate.unseen_epochs trains on them without noise; leave split.unseen out to disable these tests",
    ),
    "privacy": Quantity(
        "public", "public", "epsilon is computed from public numbers, and the signal from noised values"
    ),
    "chosen": Quantity(
        "charged", "public", "a data-dependent choice is a release; a random or cyclic choice does not use data"
    ),
    "scores": Quantity("charged", "withheld", "noised layer scores are a separate release"),
    "alarms": Quantity(
        "noised",
        "withheld",
        "computed from layer choices, norms and the reasons why clients were lost; the alarm on a model that predicts "
        "one class follows from `test` and is never withheld",
    ),
}

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
    for what, quantity in {**ROW, **OUTSIDE_ROWS}.items():
        status = "named" if validation and what == VALIDATION else quantity.under(unit)
        if status in ("named", "withheld"):
            lists["not_covered" if status == "named" else "withheld"].append(f"{what}: {quantity.why}")
    return lists


def withhold(row: Mapping[str, Any], unit: Unit, validation: bool = False) -> dict[str, Any]:
    """Return a row without the values that are withheld.

    Args:
        row: The row.
        unit: The privacy unit.
        validation: Whether scores on validation examples are disclosed.
    """
    withheld = {key for key in row.keys() & ROW.keys() if ROW[key].under(unit) == "withheld"}
    withheld -= {VALIDATION} if validation else set()
    return {key: _replacement(key, value) if key in withheld else value for key, value in row.items()}


def _replacement(key: str, value: Any) -> Any:
    """Return what a withheld value is replaced by. It keeps its type: readers expect a table in place of a table."""
    if key == "lost":
        return dict.fromkeys(value, LOST)
    if not isinstance(value, Mapping):
        return None
    return {kind: text for kind, text in value.items() if key == "alarms" and kind in TEST_ALARMS}
