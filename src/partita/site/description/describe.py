"""Describe the data of a site: counts that are protected before they leave this module."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from partita.core.rng import Key
from partita.data import Federation
from partita.experiment.builder import build_data, build_method
from partita.experiment.config import Config
from partita.site.description.noise import discrete_laplace
from partita.site.description.record import MAX_CLASSES, Description, DescriptionError, Protection, check_name
from partita.site.description.suppression import suppress_independent, suppress_partition
from partita.site.description.tables import (
    CLASSES,
    CountTable,
    part_sizes,
    tables_of,
    token_lengths,
    token_limit,
    typical_cells,
)
from partita.storage import atomic_files

PARTS = "rows"  # table of the sizes of the parts
CHARGES = "descriptions.jsonl"  # what descriptions with noise have cost, in the site's state folder
PER_ROW = 3  # one row more can move another one: two parts are rounded down, and the training part is the rest
GRAIN = 1000  # epsilon is rounded down to a multiple of 1 / GRAIN, so that the noise is exact
DRAWN = ("limit", "shots", "new_classes")  # options of data that draw rows, so that one row more changes many counts


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
    if config.split["name"] != "site":
        raise DescriptionError(
            f"split.name is '{config.split['name']}'; a site can describe its data with the split 'site'"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning has exact counts; the description has them protected
        federation = build_data(config, build_method(config.method), Key(config.seed))
    if site not in federation.clients:
        raise DescriptionError(f"the experiment has no client '{site}'; compare 'name' in site.toml with split.sites")
    _check_classes(federation.task.classes)
    tables, parts = tables_of(federation, config.data, groups), part_sizes(federation, site)
    typical: Mapping[str, Mapping[str, str]]
    if epsilon is None:
        protection = Protection(least, groups or "row")
        counts, typical = _suppressed(tables, parts, least, groups or "row")
    else:
        counts, protection = _noisy(tables, parts, epsilon)
        typical = {table.name: typical_cells(counts[table.name]) for table in tables if table.name != CLASSES}
    task, name = federation.task, config.data["name"]
    return Description(site, name, task.kind.name, _facts(federation), task.classes, protection, counts, typical)


def charge(state: Path, epsilon: float) -> float:
    """Record the cost of a description with noise, before anyone sees it.

    Returns:
        The epsilon of all descriptions of this site so far, this one included.
    """
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic_files.append(state / CHARGES, (json.dumps({"unit": "row", "epsilon": epsilon}) + "\n").encode())
    return math.fsum(atomic_files.parse_json(line, str(state / CHARGES))["epsilon"] for line in _lines(state))


def _lines(state: Path) -> list[bytes]:
    return list(atomic_files.lines(state / CHARGES))


def _check_classes(classes: Sequence[str]) -> None:
    if len(classes) > MAX_CLASSES:
        raise DescriptionError(
            f"the label column has {len(classes):,} distinct values, too many for classes; name the right column in "
            "data.label, because class names leave the site"
        )
    for number, name in enumerate(classes):
        check_name(name, f"the name of class {number}")


def _facts(federation: Federation) -> dict[str, int]:
    """Return what must be the same at all sites, by the key that sets it."""
    task = federation.task
    facts = {"data.channels": task.channels, "data.size": task.size, "data.max_length": 0}
    if token_lengths(task.train) is not None:
        facts["data.max_length"] = token_limit(task.train)
    return {name: value for name, value in facts.items() if value}


def _suppressed(
    tables: Sequence[CountTable], parts: Mapping[str, int], least: int, unit: str
) -> tuple[dict[str, dict[str, int | None]], dict[str, dict[str, str]]]:
    """Return counts of classes without small ones, and typical cells of the other tables, whose counts stay here.

    Most cells of these are empty, and hiding all that would hide the rest too.
    """
    shown: dict[str, dict[str, int | None]] = {PARTS: dict(parts)}
    typical: dict[str, dict[str, str]] = {}
    for table in tables:
        total = table.unit_count()
        if total < 2 * least:
            what = "rows" if unit == "row" else f"values of '{unit}'"
            raise DescriptionError(
                f"the site has {total} {what}, too few to hide counts below {least} among them; use a lower --least"
            )
        counts, units = table.counts(), table.unit_counts()
        if table.name != CLASSES:
            typical[table.name] = typical_cells(dict(zip(table.cells, units, strict=True)), least)
            continue
        if table.per_row == 1:
            cells = suppress_partition(counts, units, least)
        else:
            cells = suppress_independent(counts, units, total, least)
        shown[table.name] = dict(zip(table.cells, cells, strict=True))
    return shown, typical


def _noisy(
    tables: Sequence[CountTable], parts: Mapping[str, int], epsilon: float
) -> tuple[dict[str, dict[str, int | None]], Protection]:
    """Add noise to every count. Each table gets an equal share of epsilon."""
    exact = Fraction(math.floor(epsilon * GRAIN), GRAIN)
    if exact <= 0:
        raise DescriptionError(f"--epsilon is {epsilon:g}; it must be at least {1 / GRAIN:g}")
    share = exact / (1 + len(tables))
    scales = {PARTS: PER_ROW / share, **{table.name: table.per_row / share for table in tables}}
    true = {PARTS: dict(parts), **{table.name: dict(zip(table.cells, table.counts(), strict=True)) for table in tables}}
    shown: dict[str, dict[str, int | None]] = {
        name: {cell: max(0, count + discrete_laplace(scales[name])) for cell, count in cells.items()}
        for name, cells in true.items()
    }
    return shown, Protection(0, "row", float(exact), {name: float(scale) for name, scale in scales.items()})
