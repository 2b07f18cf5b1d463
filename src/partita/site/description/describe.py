"""Describe the data of a site: counts that are protected before they leave this module."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from partita.core.rng import Key
from partita.data import Task
from partita.experiment.builder import build_data, build_method
from partita.experiment.config import Config
from partita.site.description.noise import discrete_laplace
from partita.site.description.record import FORMAT, Description, DescriptionError, Protection, check_classes
from partita.site.description.suppression import suppress_independent, suppress_partition
from partita.site.description.tables import TOKENS, CountTable, tables_of, token_limit, typical_cells, units_of
from partita.storage import atomic_files

CHARGES = "descriptions.jsonl"  # what descriptions with noise have cost, in the site's state folder
GRAIN = 1000  # epsilon is rounded down to a multiple of 1 / GRAIN, so that the noise is exact
DRAWN = ("limit", "shots", "new_classes")  # options of data that draw rows, so that one row more changes many counts

Counts = dict[str, Mapping[str, int | None]]


def describe(
    config: Config, site: str, least: int = 10, epsilon: float | None = None, groups: str | None = None
) -> Description:
    """Describe the data of a site.

    Args:
        config: The experiment with this site's settings.
        site: Name of the site.
        least: Smallest count that is shown, if no noise is added.
        epsilon: Privacy budget of one row for all counts together; None to hide small counts instead.
        groups: Column with the unit of each row, such as a patient. `least` then counts units.

    Raises:
        DescriptionError: If the data cannot be described with this protection.
        DataError: If the data cannot be loaded.
    """
    if epsilon is not None and groups is not None:
        raise DescriptionError(
            "--epsilon hides one row, but --groups says that several rows belong together; use --least with --groups"
        )
    drawn = [f"data.{option}" for option in DRAWN if config.data.get(option) is not None]
    drawn += ["split.shots"] if config.split.get("shots") is not None else []
    if drawn:
        raise DescriptionError(f"{drawn[0]} leaves rows out, so the counts would not be of the site's data; unset it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning has exact counts; the description has them protected
        federation = build_data(config, build_method(config.method), Key(config.seed))
    if site not in federation.clients:
        raise DescriptionError(f"the experiment has no client '{site}'; compare 'name' in site.toml with split.sites")
    task, unit = federation.task, groups or "row"
    classes = check_classes(task.classes)
    tables = tables_of(task)
    if epsilon is None:
        protection = Protection(least=least, unit=unit, epsilon=0.0)
        counts, typical = _suppressed(tables, task, least, groups)
    else:
        exact = Fraction(math.floor(epsilon * GRAIN), GRAIN)
        protection = Protection(least=0, unit=unit, epsilon=float(exact))
        counts = _noisy(tables, exact)
        typical = typical_cells(counts[TOKENS]) if TOKENS in counts else {}
    facts = {"data.channels": task.channels, "data.size": task.size, "data.max_length": token_limit(task)}
    return {
        "format": FORMAT, "site": site, "data": config.data["name"], "kind": task.kind.name,
        "facts": {name: value for name, value in facts.items() if value},
        "classes": classes, "protection": protection, "counts": counts, "typical": typical,
    }  # fmt: skip


def charge(state: Path, epsilon: float) -> float:
    """Record the cost of a description with noise, before anyone sees it.

    Returns:
        The epsilon of all descriptions of this site so far, this one included.
    """
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = state / CHARGES
    atomic_files.append(file, (json.dumps({"unit": "row", "epsilon": epsilon}) + "\n").encode())
    return math.fsum(atomic_files.parse_json(line, str(file))["epsilon"] for line in atomic_files.lines(file))


def _suppressed(
    tables: Sequence[CountTable], task: Task, least: int, groups: str | None
) -> tuple[Counts, dict[str, str]]:
    """Return counts of classes without small ones, and typical lengths, whose counts stay here.

    Most cells of lengths are empty, and hiding all that would hide the rest too.
    """
    shown, typical, units = Counts(), dict[str, str](), units_of(task, groups)
    total = int(units.max(initial=-1)) + 1
    if total < 2 * least:
        what = "rows" if groups is None else f"values of '{groups}'"
        raise DescriptionError(
            f"the site has {total} {what}, too few to hide counts below {least} among them; use a lower --least"
        )
    for table in tables:
        counts, in_cell = table.counts(), table.unit_counts(units)
        if table.name == TOKENS:
            typical = typical_cells(dict(zip(table.cells, in_cell, strict=True)), least)
        elif table.per_row == 1:
            shown[table.name] = dict(zip(table.cells, suppress_partition(counts, in_cell, least), strict=True))
        else:
            cells = suppress_independent(counts, in_cell, total, least)
            shown[table.name] = dict(zip(table.cells, cells, strict=True))
    return shown, typical


def _noisy(tables: Sequence[CountTable], epsilon: Fraction) -> Counts:
    """Add noise to every count. Each table gets an equal share of epsilon."""
    if epsilon <= 0:
        raise DescriptionError(f"--epsilon is too small; it must be at least {1 / GRAIN:g}")
    share = epsilon / len(tables)
    return {
        table.name: {
            cell: max(0, count + discrete_laplace(table.per_row / share))
            for cell, count in zip(table.cells, table.counts(), strict=True)
        }
        for table in tables
    }
