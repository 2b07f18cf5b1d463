"""Turn recorded rows into scalars and tables. All trackers use these names, and nothing else is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from partita.record.metric import Metric
from partita.record.row import QUANTITIES, is_finite, numbers
from partita.track import Table


def without_clients(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without all that names or counts single clients."""
    return {key: value for key, value in row.items() if key not in QUANTITIES or not QUANTITIES[key].clients}


class Totals:
    """The bytes of all rounds so far."""

    def __init__(self) -> None:
        self.bytes = {"up": 0.0, "down": 0.0}

    def add(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Add a round and return the totals as scalars."""
        for way, count in (row.get("bytes") or {}).items():
            if way in self.bytes and is_finite(count):
                self.bytes[way] += count
        return {f"bytes/{way}_total": count for way, count in self.bytes.items()}


def scalars(row: Mapping[str, Any], metrics: Sequence[Metric] = ()) -> dict[str, float]:
    """Return the finite numbers of a row by name, such as "test/accuracy" or "personal/accuracy/worst_tenth".

    Args:
        row: A recorded row.
        metrics: The metrics of the run; the worst tenth of clients depends on their direction.
    """
    found = numbers(row, metrics)
    return {"/".join(map(clean, path)): value for path, value in found if is_finite(value)}


def tables(row: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of a row: "clients" if it says something about single clients, and "alarms" if there are any.

    A client's line says whether it was sampled, why it was lost or refused, and has its scores, loss and norm.
    """
    found: dict[str, Table] = {}
    columns: dict[str, Mapping[str, Any]] = {key: row.get(key) or {} for key in ("lost", "refused")}
    columns |= {"loss": row.get("losses") or {}, "norm": row.get("bounded") or {}}
    columns["layers"] = {client: " ".join(layers) for client, layers in (row.get("chosen") or {}).items()}
    for key in ("personal", "unseen"):
        columns |= {f"{key}/{metric}": by_client or {} for metric, by_client in (row.get(key) or {}).items()}
    columns = {name: values for name, values in columns.items() if values}
    if columns:
        cohort = set(row.get("cohort") or ())
        clients = sorted(cohort.union(*columns.values()))
        found["clients"] = [
            {
                "client": client,
                "sampled": client in cohort,
                **{name: _cell(by_client.get(client)) for name, by_client in columns.items()},
            }
            for client in clients
        ]
    if row.get("alarms"):
        found["alarms"] = [{"alarm": kind, "text": text} for kind, text in row["alarms"].items()]
    return found


def clean(name: str) -> str:
    """Return a name that all libraries accept. Different names stay different."""
    return re.sub(r"[^A-Za-z0-9_.: -]", lambda found: f"_{ord(found[0]):x}_", name)


def _cell(value: Any) -> Any:
    return value if isinstance(value, str) or is_finite(value) else None
