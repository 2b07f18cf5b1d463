"""A study in one TOML file: its arms, axes, seeds and grids, and the runs that follow from them."""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

Kind = Literal["tune", "run"]
Settings = Mapping[str, Any]  # values by dotted key of the config
Point = Mapping[str, Any]  # by axis, the value or the name of the point
PLACES = ("data.path", "model.path")  # where things are on this machine: not part of what was run
MACHINE = ("engine", "track", "checkpoint")  # tables that do not change results
LAST = 10  # tested rounds whose mean counts, since single rounds jump


class StudyError(ValueError):
    """A study cannot be read, or cannot be played yet."""


@dataclass(frozen=True)
class Change:
    """Changes of a config.

    Attributes:
        settings: Values by dotted key. A `method.name` replaces the whole method.
        remove: Dotted keys to remove first.
    """

    settings: Settings = field(default_factory=dict)
    remove: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arm:
    """One of the things that a study compares.

    Attributes:
        name: Its name in tables.
        change: How its config differs.
        grid: The values to choose from, by key; empty if there is nothing to choose.
        tuned_as: The arm whose choice it takes. With a grid of its own, it tunes that on top.
    """

    name: str
    change: Change
    grid: Mapping[str, tuple[Any, ...]]
    tuned_as: str | None = None


@dataclass(frozen=True)
class Tuning:
    """How the study chooses settings, on the clients' validation parts.

    Attributes:
        seeds: Seeds that the study itself does not use.
        last: The score is the mean over this many last tested rounds.
        by_axis: Whether every point of the axes has its own choice.
        at: The point at which one choice for all is made.
        change: How tuning differs from the study, such as fewer rounds.
        unequal_budgets: Whether arms may have grids of different sizes.
        disclose_validation: Whether private runs may report exact scores on validation parts.
    """

    seeds: tuple[int, ...]
    last: int
    by_axis: bool
    at: Point
    change: Change
    unequal_budgets: bool = False
    disclose_validation: bool = False


@dataclass(frozen=True)
class Study:
    """A study as its file describes it.

    Attributes:
        file: The file.
        config: The config that all runs start from.
        score: The metric to choose and to report by.
        on: The part that tables report: the central "test" set, or the clients' own test sets ("personal").
        seeds: The seeds.
        baseline: The arm that differences are to.
        arms: The arms by name.
        axes: By axis, the change at each of its points.
        tuning: How settings are chosen; None if nothing is.
        last: Tables report the mean over this many last tested rounds.
        record: More keys of a run's rows to keep in its line, by round.
        folder: Where the lines of runs are, if not beside the file. Those of tuning are always beside it.
    """

    file: Path
    config: Path
    score: str
    on: str
    seeds: tuple[int, ...]
    baseline: str
    arms: Mapping[str, Arm]
    axes: Mapping[str, Mapping[Any, Change]]
    tuning: Tuning | None
    last: int = LAST
    record: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def name(self) -> str:
        """The name of the file without its ending."""
        return self.file.stem

    def output(self, kind: str) -> Path:
        """Return the file of the lines: "run", "tune" or "failed"."""
        beside = self.file if kind == "tune" else self.beside
        return beside.with_suffix(".jsonl" if kind == "run" else f".{kind}.jsonl")

    @property
    def beside(self) -> Path:
        """The path beside which runs leave their lines, logs and pictures, with another ending each."""
        return self.file if self.folder is None else self.folder / self.file.name

    def points(self) -> list[dict[str, Any]]:
        """Return all points of the axes; one empty point if there is no axis."""
        return [dict(zip(self.axes, values, strict=True)) for values in product(*self.axes.values())]

    def compared_to(self, arm: str) -> Study:
        """Return the study with another baseline.

        Raises:
            StudyError: If there is no such arm.
        """
        if arm not in self.arms:
            raise StudyError(f"{self.file}: there is no arm '{arm}'; there are {', '.join(self.arms)}")
        return replace(self, baseline=arm)

    def tuning_points(self) -> list[dict[str, Any]]:
        """Return the points at which settings are chosen."""
        if self.tuning is None:
            return []
        return self.points() if self.tuning.by_axis else [dict(self.tuning.at)]

    def tuned_at(self, point: Point) -> Point:
        """Return the point whose choice holds at a point."""
        return point if self.tuning is None or self.tuning.by_axis else self.tuning.at


@dataclass(frozen=True)
class Planned:
    """One run of a study.

    Attributes:
        study: Name of the study.
        file: File of the study. Two studies in different folders may have the same name.
        kind: "tune" or "run".
        arm: Name of the arm.
        point: The point of the axes.
        seed: The seed.
        chosen: What the grid contributes: the values tried, or those that tuning chose.
        raw: The whole config as nested dicts, not validated.
        folder: The folder that own code in the config is relative to.
        digest: Hash of the config without what only concerns the machine.
        score: The metric of the study.
        on: The part that its tables report.
        record: More keys of a run's rows to keep.
        disclose_validation: Whether a private run may report exact scores on validation parts.
        edge: The keys whose chosen value is at the edge of its grid.
    """

    study: str
    file: Path
    kind: Kind
    arm: str
    point: Point
    seed: int
    chosen: Settings
    raw: Mapping[str, Any]
    folder: Path
    digest: str
    score: str
    on: str
    record: tuple[str, ...] = ()
    disclose_validation: bool = False
    edge: tuple[str, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this run from the others of its study."""
        return {
            "study": self.study,
            "kind": self.kind,
            "arm": self.arm,
            "point": dict(self.point),
            "seed": self.seed,
            **({"chosen": dict(self.chosen)} if self.kind == "tune" else {}),
        }

    @property
    def key(self) -> str:
        """What tells this run from the others of its study, as a text."""
        return key_of(self.identity)

    @property
    def name(self) -> str:
        """What tells this run from all others, also those of other studies."""
        return f"{self.file} {self.key} {self.digest}"

    @property
    def title(self) -> str:
        """The run in one short text."""
        values = {**self.point, **self.chosen}
        shown = "".join(f", {key} {value}" for key, value in values.items())
        return f"{self.study} {self.kind}: {self.arm}{shown}, seed {self.seed}"


def key_of(line: Mapping[str, Any]) -> str:
    """Return the text that identifies the run of a line within its study."""
    names = ["kind", "arm", "point", "seed", *(["chosen"] if line["kind"] == "tune" else [])]
    return json.dumps({name: line[name] for name in names}, sort_keys=True)


def read_study(file: Path) -> Study:
    """Read a study.

    Raises:
        StudyError: If the file cannot be read, or a key is unknown, missing or wrong.
    """
    try:
        table = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise StudyError(f"cannot read the study {file}: {error}") from error
    reader = _Reader(file, table)
    score, on = reader.take("score", str), reader.take("on", str, "test")
    if on not in ("test", "personal"):
        reader.fail(f"on is '{on}'; it must be 'test' or 'personal'")
    config = file.parent / reader.take("config", str)
    if not config.is_file():
        reader.fail(f"config is '{config}', which is not a file; give its path relative to the study")
    seeds = tuple(reader.take("seeds", list))
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int for seed in seeds):
        reader.fail(f"seeds is {list(seeds)}; it must list different whole numbers")
    last, record = reader.take("last", int, LAST), tuple(reader.take("record", list, []))
    if last < 1:
        reader.fail(f"last is {last}; it must be at least 1")
    axes = dict(reader.axes(reader.take("axes", dict, {})))
    asked = reader.take("tune", dict, None)
    shared = reader.grid("tune.grid", asked.pop("grid", {})) if asked is not None else {}
    arms = {name: reader.arm(name, own, shared) for name, own in reader.take("arms", dict).items()}
    if not arms:
        reader.fail("[arms] is empty; give at least one arm")
    baseline = reader.take("baseline", str)
    if baseline not in arms:
        reader.fail(f"baseline is '{baseline}', which is not an arm; there are {', '.join(arms)}")
    tuning = reader.tuning(asked, axes, seeds) if asked is not None else None
    reader.done(table, "")
    _check_arms(arms, tuning, reader)
    return Study(file, config, score, on, seeds, baseline, arms, axes, tuning, last, record)


class _Reader:
    """Takes keys out of a table and says what is wrong with them."""

    def __init__(self, file: Path, table: dict[str, Any]) -> None:
        self.file, self.table = file, table

    def fail(self, reason: str) -> None:
        raise StudyError(f"{self.file}: {reason}")

    def take(self, key: str, kind: type, default: Any = StudyError, table: dict[str, Any] | None = None) -> Any:
        """Return a value of the table and remove it there; `StudyError` as default means that it must be there."""
        value = (self.table if table is None else table).pop(key, default)
        if value is StudyError:
            self.fail(f"{key} is missing")
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            self.fail(f"{key} is {value!r}; it must be a {kind.__name__}")
        return value

    def done(self, table: Mapping[str, Any], where: str) -> None:
        for key in table:
            self.fail(f"unknown key '{key}'{where}")

    def axes(self, table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[Any, Change]]]:
        """Yield (axis, change by point). An axis lists the values of a key, or names points with several settings."""
        for name, values in table.items():
            if isinstance(values, list):
                if len(values) < 1 or len({json.dumps(value) for value in values}) < len(values):
                    self.fail(f"the axis {prefix}{name} is {values}; it must list different values")
                if any(isinstance(value, list | dict) for value in values):
                    self.fail(f"the axis {prefix}{name} lists tables; name its points: [axes.NAME] POINT = {{...}}")
                yield f"{prefix}{name}", {value: Change({f"{prefix}{name}": value}) for value in values}
            elif isinstance(values, dict) and any(isinstance(value, list) for value in values.values()):
                yield from self.axes(values, f"{prefix}{name}.")  # a dotted key without quotation marks
            elif isinstance(values, dict) and values and all(isinstance(value, dict) for value in values.values()):
                yield f"{prefix}{name}", {point: self.change(change) for point, change in values.items()}
            else:
                self.fail(f"the axis {prefix}{name} is {values!r}; list values, or name points with their settings")

    def change(self, table: Mapping[str, Any]) -> Change:
        rest = dict(table)
        remove = tuple(self.take("remove", list, [], rest))
        return Change(dict(_flat(rest)), remove)

    def grid(self, where: str, table: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        found = dict(_flat(table))
        for key, values in found.items():
            if not isinstance(values, list) or not values or len({json.dumps(each) for each in values}) < len(values):
                self.fail(f"[{where}] '{key}' is {values!r}; it must list different values")
        return {key: tuple(values) for key, values in found.items()}

    def arm(self, name: str, table: Any, shared: Mapping[str, tuple[Any, ...]]) -> Arm:
        if not isinstance(table, dict):
            self.fail(f"[arms] '{name}' is {table!r}; it must be a table of settings")
        rest = dict(table)
        own, tuned_as = self.take("grid", dict, None, rest), self.take("tuned_as", str, None, rest)
        grid = {} if tuned_as else shared
        grid = self.grid(f"arms.{name}.grid", own) if own is not None else grid
        return Arm(name, self.change(rest), grid, tuned_as)

    def tuning(self, table: dict[str, Any], axes: Mapping[str, Mapping[Any, Change]], used: Sequence[int]) -> Tuning:
        if "seed" in table and "seeds" in table:
            self.fail("[tune] has both seed and seeds; give one of them")
        seeds = tuple(table.pop("seeds", ())) or (self.take("seed", int, StudyError, table),)
        if both := [seed for seed in seeds if seed in used]:
            self.fail(f"[tune] uses the seed {both[0]}, which is a seed of the study; choose another")
        by_axis = self.take("by_axis", bool, False, table)
        at = {**{axis: next(iter(points)) for axis, points in axes.items()}, **self.take("at", dict, {}, table)}
        for axis, value in at.items():
            if axis not in axes or value not in axes[axis]:
                self.fail(f"[tune] at has {axis} = {value!r}, which is no point of [axes]")
        tuning = Tuning(
            seeds,
            self.take("last", int, LAST, table),
            by_axis,
            at,
            self.change(self.take("set", dict, {}, table)),
            self.take("unequal_budgets", bool, False, table),
            self.take("disclose_validation", bool, False, table),
        )
        self.done(table, " in [tune]")
        return tuning


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted key, so that quotation marks around such keys are optional."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_arms(arms: Mapping[str, Arm], tuning: Tuning | None, reader: _Reader) -> None:
    for arm in arms.values():
        if arm.tuned_as is not None and (arm.tuned_as not in arms or arms[arm.tuned_as].tuned_as):
            reader.fail(f"[arms] '{arm.name}' is tuned_as '{arm.tuned_as}', which is not an arm with its own choice")
        if (arm.grid or arm.tuned_as) and tuning is None:
            reader.fail(f"[arms] '{arm.name}' has something to choose, but there is no table [tune]; give its seed")
    sizes = {arm.name: budget(arm) for arm in arms.values() if arm.grid}
    if tuning and len(set(sizes.values())) > 1 and not tuning.unequal_budgets:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        reader.fail(
            f"arms have grids of different sizes ({listed}), so some would be tuned better than others; make them "
            "equal, or set unequal_budgets = true in [tune]"
        )


def budget(arm: Arm) -> int:
    """Return the number of settings that an arm tries."""
    return len(grid_points(arm))


def grid_points(arm: Arm) -> list[dict[str, Any]]:
    """Return all settings of an arm's grid; none if it has no grid."""
    return [dict(zip(arm.grid, values, strict=True)) for values in product(*arm.grid.values())] if arm.grid else []


def edges(study: Study, arm: Arm, chosen: Settings) -> tuple[str, ...]:
    """Return the keys whose chosen number is the smallest or the largest of its grid.

    An arm that takes the choice of another has the grid of that arm, too.
    """
    other = study.arms[arm.tuned_as].grid if arm.tuned_as else {}
    return tuple(
        key
        for key, values in {**other, **arm.grid}.items()
        if len(values) > 1
        and all(_is_number(value) for value in values)
        and chosen.get(key) in (min(values), max(values))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plan_run(
    study: Study,
    kind: Kind,
    arm: Arm,
    point: Point,
    seed: int,
    chosen: Settings,
    overrides: Iterable[str] = (),
    edge: tuple[str, ...] = (),
) -> Planned:
    """Return one run with its whole config: the file, then axes, arm, tuning, choice, seed and overrides.

    Args:
        study: The study.
        kind: "tune" or "run".
        arm: The arm.
        point: The point of the axes.
        seed: The seed.
        chosen: Values from the grid.
        overrides: Texts such as "data.path=trec". Those of places do not hold for an arm that names its own place.
        edge: The keys whose chosen value is at the edge of its grid.
    """
    from partita.experiment.config import apply_override, read_toml

    raw = copy.deepcopy(read_toml(study.config))
    changes = [*(study.axes[axis][value] for axis, value in point.items()), arm.change]
    if kind == "tune" and study.tuning:
        changes.append(study.tuning.change)
    if any("method.name" in change.settings for change in changes):
        raw["method"] = {}
    for key in (key for change in changes for key in change.remove):
        _remove(raw, key, study)
    for key, value in (item for change in [*changes, Change(chosen)] for item in change.settings.items()):
        _put(raw, key, value, study)
    raw["seed"] = seed
    for text in overrides:
        apply_override(raw, text)
    for key in PLACES:  # an arm with another model or other data than the rest keeps its own
        if key in arm.change.settings:
            _put(raw, key, arm.change.settings[key], study)
    disclosed = bool(study.tuning and study.tuning.disclose_validation)
    folder = study.config.parent.resolve()
    score, on, record = study.score, study.on, study.record
    return Planned(
        study.name,
        study.file,
        kind,
        arm.name,
        point,
        seed,
        chosen,
        raw,
        folder,
        digest(raw),
        score,
        on,
        record,
        disclosed,
        edge,
    )


def digest(raw: Mapping[str, Any]) -> str:
    """Hash a config without what only concerns the machine: it is the same where data and models are elsewhere."""
    kept = copy.deepcopy({table: value for table, value in raw.items() if table not in MACHINE})
    for key in PLACES:
        table, _, name = key.partition(".")
        if isinstance(kept.get(table), dict):
            kept[table].pop(name, None)
    return hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _put(raw: dict[str, Any], key: str, value: Any, study: Study) -> None:
    *tables, last = key.split(".")
    for name in tables:
        raw = raw.setdefault(name, {})
        if not isinstance(raw, dict):
            raise StudyError(f"{study.file}: cannot set {key}: {name} is not a table in {study.config}")
    raw[last] = copy.deepcopy(value)


def _remove(raw: dict[str, Any], key: str, study: Study) -> None:
    *tables, last = key.split(".")
    for name in tables:
        raw = raw.get(name, {})
    if last not in raw:
        raise StudyError(f"{study.file}: remove names {key}, which {study.config} does not have; leave it out")
    del raw[last]
