"""Turn recorded rows into scalars and tables. All trackers use these names, and nothing else is sent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from partita.track import Table

Row = Mapping[str, Any]
# Lists of clients. Under client-level privacy the guarantee holds only against those who do not see them.
NAMES_CLIENTS = ("cohort", "lost", "refused", "bounded", "chosen", "personal", "unseen", "losses", "population")


def without_clients(row: Row) -> Row:
    """Return a row without all that names or counts single clients."""
    return {key: value for key, value in row.items() if key not in NAMES_CLIENTS}


class Totals:
    """The bytes of all rounds so far."""

    def __init__(self) -> None:
        self.bytes = {"up": 0.0, "down": 0.0}

    def add(self, row: Row) -> dict[str, float]:
        """Add a round and return the totals as scalars."""
        for way, count in (row.get("bytes") or {}).items():
            if way in self.bytes and _finite(count):
                self.bytes[way] += count
        return {f"bytes/{way}_total": count for way, count in self.bytes.items()}


def scalars(row: Row, lower_is_better: Iterable[str] = ()) -> dict[str, float]:
    """Return the finite numbers of a row by name, such as "test/accuracy" or "personal/accuracy/worst_tenth".

    Args:
        row: A recorded row.
        lower_is_better: The metrics of which lower values are better; the worst tenth depends on it.
    """
    return {name: value for name, value in _scalars(row, set(lower_is_better)) if _finite(value)}


def _scalars(row: Row, lower: set[str]) -> Iterator[tuple[str, Any]]:
    for key in ("round", "seconds", "padding", "lr", "train_loss"):
        yield key, row.get(key)
    for key in ("test", "validation", "bytes"):
        for name, value in (row.get(key) or {}).items():
            yield f"{key}/{clean(name)}", value
    for key in ("personal", "unseen"):
        for metric, by_client in (row.get(key) or {}).items():
            values = sorted((value for value in (by_client or {}).values() if _finite(value)), reverse=metric in lower)
            if values:
                worst = values[: math.ceil(len(values) / 10)]
                yield f"{key}/{clean(metric)}/mean", sum(values) / len(values)
                yield f"{key}/{clean(metric)}/worst_tenth", sum(worst) / len(worst)
    for key in ("drift", "by_type"):
        for group, measures in (row.get(key) or {}).items():
            for name, value in (measures or {}).items():
                yield f"{key}/{clean(group)}/{clean(name)}", value
    subgroups = row.get("subgroups") or {}
    yield "subgroups/gap", subgroups.get("gap")
    for group, measures in (subgroups.get("groups") or {}).items():
        for name, value in measures.items():
            yield f"subgroups/{clean(group)}/{clean(name)}", value
    privacy = row.get("privacy") or {}
    for key in ("epsilon", "delta"):
        yield f"privacy/{key}", privacy.get(key)
    if "cohort" in row:
        yield "clients/sampled", len(row["cohort"] or ())
    for key in ("lost", "refused", "bounded"):
        if key in row:
            yield f"clients/{key}", len(row[key] or ())
    if "alarms" in row:
        yield "alarm_count", len(row["alarms"])
    if "skipped" in row:
        yield "skipped", int(row["skipped"])


def tables(row: Row) -> dict[str, Table]:
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
    return value if isinstance(value, str) or _finite(value) else None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
