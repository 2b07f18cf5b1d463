"""Load run folders."""

from __future__ import annotations

import json
import os
import re
import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from partita.record import file_names, forms
from partita.record.check import Check, ShapeError
from partita.record.metric import ACCURACY, Metric, metric_named, metrics_in
from partita.record.row import Row, check_row
from partita.storage import atomic_files
from partita.storage.safe_text import printable

MAX_NUMBER = 1e100  # sums of squares up to this size stay finite
COMPUTING = ("engine.", "checkpoint.", "track.")  # settings that say how a run is computed and watched
CODE = "code"  # table of a config with the user's own files, and folder with copies of them
MAX_DEPTH = 20  # maximum nesting of tables in a config


class ReportError(ValueError):
    """A run cannot be reported."""


@dataclass(frozen=True)
class RunRecord:
    """One run: its config, and one row for each finished round."""

    label: str  # name of the setting; runs that differ only in the seed share it
    seed: int  # seed of the run
    config: Mapping[str, Any]
    rows: tuple[Row, ...]
    plan: tuple[Mapping[str, Any], ...]  # the stages, in order
    environment: Mapping[str, str]  # versions and hardware that were recorded
    finished: bool
    folder: Path
    metrics: tuple[Metric, ...] = (ACCURACY,)  # first the one that judges the run
    code: Mapping[str, str] = field(default_factory=dict)  # text of the user's own files by their path in the folder
    privacy: Mapping[str, Any] = field(default_factory=dict)  # the guarantee; empty if there is none
    audit: Mapping[str, Any] = field(default_factory=dict)  # results of attacks; empty if there were none
    split: Mapping[str, Any] = field(default_factory=dict)  # what clients hold; empty if it was not recorded
    samples: tuple[Mapping[str, str], ...] = ()  # test examples with answers; empty if none were recorded
    config_text: str = ""  # the config as it was written
    best: int | None = None  # completed rounds at the best score on validation; None if there is none
    stopped: str = ""  # why and when the run stopped before its last round; empty if it did not

    @property
    def metric(self) -> Metric:
        """The metric that judges the run."""
        return self.metrics[0]


def find(folder: Path | str) -> list[Path]:
    """Return all run folders at or below a folder, sorted by path. Symbolic links are not followed.

    The runs of a trial of `partita tune` are left out: they were scored on validation, not on the test set.

    Raises:
        ReportError: If there is no run folder.
    """
    folders = []
    for parent, below, names in os.walk(folder):
        if file_names.TRIAL in names:
            below.clear()
        elif {file_names.ROWS, file_names.CONFIG} <= {*names}:
            folders.append(Path(parent))
    folders.sort()
    if not folders:
        raise ReportError(
            f"no run at or below '{folder}'; a run folder holds {file_names.CONFIG} and {file_names.ROWS}"
        )
    return folders


def load_run(folder: Path | str) -> RunRecord:
    """Load a run. Only files in the folder are read, not those that its config names.

    Raises:
        ReportError: If it is not a run folder, or if a file in it does not have the expected content.
    """
    folder = Path(folder)
    for needed in (file_names.CONFIG, file_names.ROWS):
        if not os.path.lexists(folder / needed):
            raise ReportError(f"'{folder}' is not a run folder: it has no {needed}; give the folder of one run")
    config, config_text = read_config(folder / file_names.CONFIG)
    plan = _json(folder / file_names.PLAN, forms.PLAN)
    return RunRecord(
        label=str(config["label"]),
        seed=int(config["seed"]),
        config=config,
        rows=_rows(folder / file_names.ROWS),
        plan=tuple(plan.get("stages", ())),
        environment={key: str(value) for key, value in _json(folder / file_names.ENVIRONMENT).items()},
        finished=os.path.lexists(folder / file_names.RESULT),
        folder=folder,
        metrics=metrics_in(plan),
        code={f"{CODE}/{name}": _code(folder / CODE / name) for name in config.get(CODE, {}) if _is_file_name(name)},
        privacy=_json(folder / file_names.PRIVACY, forms.PRIVACY),
        audit=_json(folder / file_names.AUDIT, forms.AUDIT),
        split=_json(folder / file_names.SPLIT, forms.split),
        samples=tuple(_json(folder / file_names.SAMPLES, forms.SAMPLES).get("samples", ())),
        config_text=config_text,
        best=(_json(folder / file_names.RESULT, forms.RESULT).get("best") or {}).get("after"),
        stopped=_stopped(folder / file_names.RESULT),
    )


def _stopped(path: Path) -> str:
    early = _json(path, forms.RESULT).get("stopped")
    return f"stopped after round {early['after']}: {early['reason']}" if early else ""


def load_runs(folders: Iterable[Path | str]) -> list[RunRecord]:
    """Load all runs at or below some folders, with labels that tell runs with different settings apart.

    A run that is found twice counts once. If two folders hold the same run and one of them is finished, the finished
    one is used, and a warning names the other.

    Raises:
        ReportError: If there is no run at or below a folder, or a run cannot be loaded.
    """
    paths = {path.resolve(): path for folder in folders for path in find(folder)}
    return tell_apart([load_run(path) for path in paths.values()])


def tell_apart(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Give runs with the same label and seed but different settings different labels: 'fedavg, training.lr=0.1'.

    All runs of such a label get the settings that differ among them. Of equal runs, the finished one is kept.
    """
    by_name: dict[str, list[RunRecord]] = {}
    for record in records:
        by_name.setdefault(record.label, []).append(record)
    labels: dict[Path, str] = {}
    for label, runs in by_name.items():
        if len({run.seed for run in runs}) == len(runs):
            continue
        kept = _without_unfinished_copies(runs)
        keys = _distinguishing(kept) if len({run.seed for run in kept}) < len(kept) else []
        for run in kept:
            texts = [f"{key}={value}" for key, value in settings(run).items() if key in keys]
            labels[run.folder] = ", ".join([label, *texts])
        dropped = {run.folder for run in runs} - {run.folder for run in kept}
        records = [record for record in records if record.folder not in dropped]
    return [replace(record, label=labels.get(record.folder, record.label)) for record in records]


def _without_unfinished_copies(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Leave out each unfinished run of which a finished one exists, and say so."""
    finished = {(run.seed, *_identity(run)): run.folder for run in runs if run.finished}
    kept = []
    for run in runs:
        copy = finished.get((run.seed, *_identity(run)))
        if run.finished or copy is None:
            kept.append(run)
        else:
            warnings.warn(
                f"left out '{run.folder}', which is unfinished: '{copy}' is the same run, finished", stacklevel=2
            )
    return kept


def _identity(run: RunRecord) -> tuple[tuple[str, str], ...]:
    """Return the settings that make a run what it is, without those that only say how it is computed."""
    return tuple((key, value) for key, value in settings(run).items() if not key.startswith(COMPUTING))


def _distinguishing(runs: Sequence[RunRecord]) -> list[str]:
    """Return the settings that differ among runs: as few as tell the runs of each seed apart."""
    known = [settings(run) for run in runs]
    keys = dict.fromkeys(chain(*known))
    differing = [key for key in keys if any(values.get(key) != known[0].get(key) for values in known)]
    own = [key for key in differing if not key.startswith(COMPUTING)]
    # Another dataset has other options too, but its name says enough.
    named = tuple(key.removesuffix("name") for key in own if key.endswith(".name"))
    short = [key for key in own if key.endswith(".name") or not key.startswith(named)]

    def separates(keys: Sequence[str]) -> bool:
        seen = {(run.seed, *(values.get(key) for key in keys)) for run, values in zip(runs, known, strict=True)}
        return len(seen) == len(runs)

    return next((keys for keys in (short, own, differing) if separates(keys)), differing)


def read_metric(folder: Path | str) -> Metric:
    """Return the metric of a run, even if it has no finished round yet."""
    return metrics_in(_json(Path(folder) / file_names.PLAN, forms.PLAN))[0]


def metric_of(records: Iterable[RunRecord], name: str | None = None) -> Metric:
    """Return the common metric of all runs, or the named one.

    Raises:
        ReportError: If the runs have different metrics and `name` is None.
    """
    records = list(records)
    known = {record.metric: record.label for record in records}
    if name is not None:
        return metric_named(name, chain.from_iterable(record.metrics for record in records))
    if len(known) > 1:
        used = ", ".join(f"'{label}' by {metric.name}" for metric, label in known.items())
        raise ReportError(f"these runs use different metrics: {used}; report them separately, or name one metric")
    return next(iter(known), ACCURACY)


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """Return the recorded config of a run and its text; ReportError if it is not in the expected form."""
    try:
        text = atomic_files.read(path).decode()
        config = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"'{path}' is not valid TOML ({error}); restore it as it was written") from error
    for key in ("label", "seed"):
        if key not in config:
            raise ReportError(f"'{path}' has no '{key}'; it must be the resolved config of a run")
    _fit(config, forms.CONFIG, path)
    for name in forms.TABLES:
        _fit(config.get(name, {}), forms.TABLE, path, name)
    tables: list[tuple[int, Any]] = [(0, config)]
    for depth, table in tables:
        if depth > MAX_DEPTH:
            raise ReportError(f"'{path}' nests tables more than {MAX_DEPTH} deep; restore it as it was written")
        tables += [(depth + 1, value) for value in table.values() if isinstance(value, dict)]
    return config, text


def _is_file_name(name: str) -> bool:
    return name.endswith(".py") and "/" not in name and name == printable(name)


def _code(path: Path) -> str:
    """Return the text of a copy of a user's own file, which is shown and never run."""
    if not os.path.lexists(path):
        raise ReportError(f"'{path}' is missing, but {file_names.CONFIG} names it; restore it as it was written")
    return atomic_files.read(path).decode(errors="replace")


def _fit(value: Any, form: Check, path: Path, where: str = "it") -> Any:
    try:
        return form(value, where)
    except ShapeError as error:
        raise ReportError(f"'{path}': {error}; restore it as it was written") from error


def _rows(path: Path) -> tuple[Row, ...]:
    rows: list[Row] = []
    for number, line in enumerate(atomic_files.lines(path), 1):
        place = f"'{path}', line {number}"
        try:
            row = check_row(json.loads(line))
        except (ValueError, RecursionError) as error:
            # A run that was stopped while writing leaves an incomplete last line.
            if not line.endswith(b"\n"):
                break
            reason = f" ({error})" if isinstance(error, ShapeError) else ""
            raise ReportError(f"{place} is not a row with a round{reason}; remove or repair the line") from error
        last = rows[-1]["round"] if rows else -1
        if row["round"] <= last:
            raise ReportError(f"{place}: round {row['round']} comes after round {last}; keep one of them")
        rows.append(row)
    if not rows:
        raise ReportError(f"'{path}' has no finished round yet; wait for the first one")
    return tuple(rows)


def _json(path: Path, form: Check = forms.TABLE) -> Mapping[str, Any]:
    """Read a JSON object. A missing file is empty, so that runs of older versions can be reported."""
    if not os.path.lexists(path):
        return {}
    content = atomic_files.read_json(path)
    if not isinstance(content, dict):
        raise ReportError(f"'{path}' holds no JSON object; restore it as it was written")
    return _fit(content, form, path)


def by_label(records: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group runs by label and return them, labels in order of first appearance and runs sorted by seed.

    Raises:
        ReportError: If there are no runs, or if two runs have the same label and seed.
    """
    groups: dict[str, dict[int, RunRecord]] = {}
    for record in records:
        repeats = groups.setdefault(record.label, {})
        if record.seed in repeats:
            raise ReportError(
                f"two runs are called '{record.label}' with seed {record.seed}: '{repeats[record.seed].folder}' and "
                f"'{record.folder}'; leave one of them out, delete it, or give it another label"
            )
        repeats[record.seed] = record
    if not groups:
        raise ReportError("there is no run to report; give at least one run folder")
    return {label: [repeats[seed] for seed in sorted(repeats)] for label, repeats in groups.items()}


def by_number(name: str) -> list[tuple[int, str]]:
    """Sort c2 before c10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,15})", name)]


def settings(record: RunRecord) -> dict[str, str]:
    """Return all settings by dotted name, without the seed and the label."""
    flat: dict[str, str] = {}
    tables: list[tuple[str, Mapping[str, Any]]] = [("", record.config)]
    for path, table in tables:
        for key, value in table.items():
            if isinstance(value, Mapping):
                tables.append((f"{path}{key}.", value))
            elif path or key not in ("seed", "label"):
                flat[path + key] = (
                    value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
                )
    return flat


def number(value: Any) -> float | None:
    """Return a float, or None for a value that is missing, NaN, infinite or too large to square."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and -MAX_NUMBER < value < MAX_NUMBER
    return float(value) if usable else None


def tested(record: RunRecord, metric: str) -> list[tuple[int, float | None]]:
    """Return (round, value) for the rounds with a test. Non-finite values are None."""
    return [(row["round"], number(scores.get(metric))) for row in record.rows if (scores := row.get("test"))]


def personal(record: RunRecord, metric: str) -> dict[str, float | None]:
    """Return the values of the last personal evaluation by client. Non-finite values are None."""
    for row in reversed(record.rows):
        if by_client := (row.get("personal") or {}).get(metric):
            return {client: number(value) for client, value in by_client.items()}
    return {}


def clients(row: Row) -> int:
    """Count the clients that were sampled in a round, including lost ones."""
    return len(set(row.get("cohort") or ()) | set(row.get("lost") or ()))


def sent(record: RunRecord, direction: str) -> list[float] | None:
    """Return the bytes of each round for one direction, or None if they were not recorded."""
    values = [number((row.get("bytes") or {}).get(direction)) for row in record.rows]
    return None if None in values else present(values)


def present(values: Iterable[float | None]) -> list[float]:
    """Drop None."""
    return [value for value in values if value is not None]
