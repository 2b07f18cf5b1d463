"""What differed between the settings compared, and what was equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partita.report.elements import Table
from partita.report.load import COMPUTING, RunRecord, by_label, settings

ABSENT = "–"


def compared_data(records: Sequence[RunRecord]) -> Mapping[str, Any] | None:
    """Return the settings that differ between labels, those that only say how runs are computed, and the shared ones.

    None if there is one label only.
    """
    groups = by_label(records)
    if len(groups) < 2:
        return None
    flat = {label: settings(runs[0]) for label, runs in groups.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    unequal = [key for key in keys if len({values.get(key) for values in flat.values()}) > 1]
    differing = [key for key in unequal if not key.startswith(COMPUTING)]
    computing = [key for key in unequal if key.startswith(COMPUTING)]
    shared = [(key, next(iter(flat.values()))[key]) for key in keys if key not in unequal]
    return {
        "differing": _table("Settings that differ between the labels, for the first seed of each.", flat, differing),
        "computing": _table("How the runs were computed and watched, where that differs", flat, computing),
        "shared": Table("Settings that all labels share", ("setting", "value"), shared),
        "equal": _equal(len(shared), bool(differing)),
    }


def _table(caption: str, flat: Mapping[str, Mapping[str, str]], keys: Sequence[str]) -> Table | None:
    rows = [(key, *(values.get(key, ABSENT) for values in flat.values())) for key in keys]
    return Table(caption, ("setting", *flat), rows, labels=True) if rows else None


def _equal(count: int, differing: bool) -> str:
    settings = "setting is" if count == 1 else "settings are"
    return f"All else is equal: {count} {settings} shared." if differing else f"All {count} {settings} equal."
