"""Everything that leaves a client or is written down in a private run, and what became of it.

A key of a row that is not listed here fails a test, so that nobody adds one without a decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["example", "client"]
# public: depends on no one's data, or is declared public. charged: a release with noise of its own in the ledger.
# noised: computed from what was already noised. withheld: not sent or not written. named: outside the promise.
Status = Literal["public", "charged", "noised", "withheld", "named"]
LOST = "gave no usable answer"  # in the place of a reason that may quote a client's numbers


@dataclass(frozen=True)
class Quantity:
    example: Status
    client: Status
    why: str

    def under(self, unit: Unit) -> Status:
        return self.example if unit == "example" else self.client


ROW: Mapping[str, Quantity] = {
    "round": Quantity("public", "public", "the schedule is fixed beforehand"),
    "lr": Quantity("public", "public", "the schedule is fixed beforehand"),
    "seconds": Quantity(
        "named", "named", "wall time and file times: they follow the amount of work, and are not protected"
    ),
    "cohort": Quantity(
        "public",
        "named",
        "who was asked in a round: a client-level epsilon that counts on chance holds for those who do not know it, so "
        "keep the rows private",
    ),
    "lost": Quantity(
        "named",
        "withheld",
        "why a client was lost: data that no model can read shows by its fault; under client-level privacy the reason "
        "is replaced, and who was lost is named",
    ),
    "refused": Quantity("named", "withheld", "replies that nobody asked for, and why they were refused"),
    "bounded": Quantity("noised", "withheld", "whose update was longer than federation.max_norm, and how long it was"),
    "skipped": Quantity("named", "named", "that a round did not count: it follows from the faults of clients"),
    "population": Quantity("public", "named", "how many clients were there in a round"),
    "train_loss": Quantity("withheld", "withheld", "computed from raw examples"),
    "bytes": Quantity("public", "public", "follows from the plan and from layer choices that were charged"),
    "up": Quantity("public", "public", "follows from the plan and from layer choices that were charged"),
    "down": Quantity("public", "public", "follows from the plan and from layer choices that were charged"),
    "drift": Quantity("noised", "withheld", "measured on single updates, which are noised at the client or not at all"),
    "test": Quantity(
        "noised",
        "noised",
        "scores of a noised model on the central test set; withheld where models that saw raw data would be tested: "
        "clients' own models under client-level privacy, and heads fitted for the test unless method.finetune is 0",
    ),
    "personal": Quantity(
        "named",
        "withheld",
        "scores of noised models on clients' own test parts: test examples are not covered, and "
        "evaluate.personal_every = 0 leaves them out; withheld where heads are fitted for the test, unless "
        "method.finetune is 0",
    ),
    "privacy": Quantity("public", "public", "epsilon follows from public numbers, and the signal from noised values"),
    "chosen": Quantity(
        "charged", "public", "a choice by data is a release; a choice by chance or by turns looks at none"
    ),
    "scores": Quantity("charged", "withheld", "noised scores of layers are a release of their own"),
    "alarms": Quantity("noised", "withheld", "computed from layer choices, norms and reasons why clients were lost"),
}

BESIDE: Mapping[str, Quantity] = {
    "updates": Quantity(
        "charged", "charged", "noised by the client, or clipped there and noised in the sum by the server"
    ),
    "examples at a client": Quantity(
        "public", "withheld", "the number weighs a client and sets its sampling rate; under client-level all weigh 1"
    ),
    "steps": Quantity(
        "public", "named", "they follow from the number of examples, and only the trusted server sees them"
    ),
    "single updates": Quantity("charged", "named", "under client-level privacy the server sees them and is trusted"),
    "numbers told by rules": Quantity("charged", "withheld", "a rule that looks at data must state its release"),
    "errors": Quantity(
        "named", "named", "an error that ends the run may quote what was wrong, and that it ended is seen by all"
    ),
    "checkpoints": Quantity(
        "noised",
        "named",
        "the server's values are noised; under client-level privacy its list of who holds what is not",
    ),
    "clients' states": Quantity(
        "noised",
        "named",
        "what clients keep is noised under example-level privacy and raw under client-level; it stays with them, and "
        "in a simulation it is in the folder 'clients'",
    ),
    "digest": Quantity("noised", "named", "a checksum of the server's tensors and of the clients' own"),
    "audit.json": Quantity("named", "named", "attacks are measured on raw examples: do not publish them with the run"),
    "site logs": Quantity("named", "named", "what a site's own logs hold"),
    "frozen features": Quantity(
        "public", "public", "a cache of frozen layers stays with the examples that it was made of"
    ),
}


def disclosed(unit: Unit) -> dict[str, list[str]]:
    """For the record: what the promise leaves out, and what was left out of the record to keep it."""
    found: dict[str, list[str]] = {"not_covered": [], "withheld": []}
    for what, quantity in {**ROW, **BESIDE}.items():
        status = quantity.under(unit)
        if status in ("named", "withheld"):
            found["not_covered" if status == "named" else "withheld"].append(f"{what}: {quantity.why}")
    return found


def withhold(row: Mapping[str, Any], unit: Unit) -> dict[str, Any]:
    """A row without what the promise does not allow."""
    kept = dict(row)
    for key in row.keys() & ROW.keys():
        if ROW[key].under(unit) == "withheld":
            # Readers of rows expect a table where there was one.
            kept[key] = (
                ({} if isinstance(row[key], Mapping) else None) if key != "lost" else dict.fromkeys(row[key], LOST)
            )
    return kept
