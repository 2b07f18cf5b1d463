"""What `partita watch` knows of all runs: the folders that it finds, and what has changed in them since a look."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from partita.record import forms
from partita.record.check import Check, ShapeError
from partita.record.file_names import AUDIT, CHECKSUMS, COMPARISON, CONFIG, PLAN, PRIVACY, PROGRESS, RESULT, ROWS, SPLIT
from partita.report.load import ReportError, RunRecord, by_number, load_run, number, read_config, tell_apart, tested
from partita.report.page import document
from partita.storage import atomic_files
from partita.storage.atomic_files import DamageError
from partita.storage.processes import is_gone
from partita.storage.safe_text import printable

FILES = (CONFIG, ROWS, PLAN, PRIVACY, RESULT, SPLIT, AUDIT, PROGRESS)
REFRESH = 1.0  # seconds between two looks at the folders
SEARCH = 3.0  # seconds between two searches for new folders
SILENT = 30.0  # seconds without a sign of life after which a run counts as stopped
MAX_RUNS, MAX_FOLDERS = 500, 20_000
MAX_JSON = 2**26  # bytes of a file that is read at once
MAX_LISTED, MAX_TEXT = 30, 400  # lost clients; characters

Signature = tuple[int, ...] | None


@dataclass
class WatchedRun:
    """One run folder, or a run of a comparison that has not started.

    Attributes:
        folder: The folder; it may not exist yet.
        name: What to call it: its path below the watched folder.
        planned: Label, seed and rounds of a run that has not started; nothing in its folder is read.
    """

    folder: Path
    name: str
    planned: Mapping[str, Any] | None = None
    record: RunRecord | None = None
    scores: Sequence[tuple[int, float]] = ()  # (round, score) on the test set
    problem: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    seen: dict[str, Signature] = field(default_factory=dict)

    def look(self) -> bool:
        """Read what has changed. Return whether the report is another one."""
        if self.planned is not None:
            return False
        now = {name: _signature(self.folder / name) for name in FILES}
        changed = {name for name in FILES if name not in self.seen or now[name] != self.seen[name]}
        self.seen = now
        if not changed:
            return False
        try:
            self.progress = _read_json(self.folder / PROGRESS, forms.PROGRESS)
            if changed - {PROGRESS} or self.problem:
                self.config, _ = read_config(self.folder / CONFIG)
                self.result = _read_json(self.folder / RESULT, forms.RESULT) if now[RESULT] else None
                self.record = load_run(self.folder) if self._has_rows() else None
                self.scores = _scores(self.record) if self.record else ()
            self.problem = ""
        except (OSError, ValueError, RecursionError) as error:
            self.problem, self.record, self.scores = short_text(error), None, ()
        return bool(changed - {PROGRESS})

    def _has_rows(self) -> bool:
        try:
            return next(atomic_files.lines(self.folder / ROWS), b"").endswith(b"\n")
        except FileNotFoundError:
            return False

    def summary(self, now: float) -> dict[str, Any]:
        """Return what the page says of the run."""
        state, note = ("unreadable", self.problem) if self.problem else self._state(now)
        known, rows = self.planned or self.config, self.record.rows if self.record else ()
        progress = self.progress if state in ("running", "waiting") else {}
        paces = [number(progress.get("pace")), *(number(row.get("seconds")) for row in rows[-5:])]
        past = [pace for pace in paces[1:] if pace is not None]
        metric = self.record.metric if self.record else None
        sign = 1 if metric and metric.higher_is_better else -1
        lost = (
            [*progress.get("lost", {}).items()] or [*(rows[-1].get("lost") or {}).items()] if rows or progress else []
        )
        alarms = [*(rows[-1].get("alarms") or {})] if rows else []
        return {
            "name": self.name,
            "label": short_text(known.get("label", self.name), 120),
            "seed": known.get("seed"),
            "state": state,
            "note": note,
            "rounds": known.get("rounds", 0),
            "done": rows[-1]["round"] + 1 if rows else 0,
            "pace": paces[0] if paces[0] is not None and paces[0] >= 0 else fmean(past) if past else None,
            "metric": {"name": short_text(metric.name, 60), "percent": metric.fraction} if metric else None,
            "score": self.scores[-1] if self.scores else None,
            "best": max(self.scores, key=lambda each: sign * each[1], default=None),
            "round": {
                "phase": short_text(progress.get("phase", ""), 20),
                **{key: progress.get(key) for key in ("round", "cohort", "asked", "replied", "online")},
                "started": number(progress.get("started")),
            },
            "lost": [f"{short_text(client, 60)}: {short_text(reason)}" for client, reason in lost[:MAX_LISTED]],
            "alarms": [short_text(kind, 60) for kind in alarms[:MAX_LISTED]],
            "epsilon": number((rows[-1].get("privacy") or {}).get("epsilon")) if rows else None,
        }

    def _state(self, now: float) -> tuple[str, str]:
        """Return the state of the run, and a sentence about it."""
        progress = self.progress
        if self.planned is not None:
            return "waiting", "has not started"
        if self.result is not None:
            early = self.result.get("stopped")
            return "finished", short_text(f"stopped after round {early['after']}: {early['reason']}") if early else ""
        if progress.get("state") == "failed":
            return "failed", short_text(progress.get("error", ""))
        if progress.get("state") == "stopped":
            return "stopped", "it can be resumed"
        if progress:
            if is_gone(progress.get("process", {})):
                return "stale", "its process is gone; it can be resumed"
            if now - (number(progress.get("updated")) or 0.0) > SILENT:
                return "stale", "it has given no sign of life for a while"
            return ("waiting", "for clients") if progress.get("phase") == "waiting" else ("running", "")
        # Before its first round, and if it was recorded by an older version, a run has no file of progress.
        changed = max((seen[3] / 1e9 for name in (CONFIG, ROWS) if (seen := self.seen.get(name))), default=0.0)
        if now - changed > SILENT:
            return "stopped", "it is not finished and nothing writes to it; it can be resumed"
        return ("running", "") if self.record else ("waiting", "for the first round")


class Watcher:
    """All runs at or below some folders.

    Args:
        roots: Run folders, and folders of runs. They may be created later.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(root) for root in roots]
        self.runs: dict[Path, WatchedRun] = {}
        self.version = 0  # of the report
        self.too_many = False
        self.looked = self.searched = -1e9
        self._report: tuple[int, str] = (-1, "")

    def look(self) -> None:
        """Look for changes, unless the last look was a moment ago."""
        clock = time.monotonic()
        if clock - self.looked < REFRESH:
            return
        self.looked = clock
        before = set(self.runs)
        if clock - self.searched >= SEARCH:
            self.searched = clock
            self._search()
        changed = [run.look() for run in self.runs.values()]
        self.version += any(changed) or before != set(self.runs)

    def _search(self) -> None:
        found: dict[Path, WatchedRun] = {}
        self.too_many = False
        for root in self.roots:
            prefix = f"{root.name}/" if len(self.roots) > 1 else ""
            folders, comparisons = self._folders(root)
            planned = [each for folder in comparisons for each in _planned(folder)]
            for folder, plan in [*((folder, None) for folder in folders), *planned]:
                if folder in found:
                    continue
                if len(found) >= MAX_RUNS:
                    self.too_many = True
                    break
                below = folder.relative_to(root).as_posix()
                name = prefix.rstrip("/") or root.resolve().name if below == "." else prefix + below
                known = self.runs.get(folder)
                same = known is not None and (known.planned is None) == (plan is None)
                found[folder] = known if known and same else WatchedRun(folder, short_text(name), plan)
        self.runs = dict(sorted(found.items(), key=lambda item: by_number(str(item[0]))))

    def _folders(self, root: Path) -> tuple[list[Path], list[Path]]:
        """Return the run folders and the comparisons at or below a folder. Symbolic links are not followed."""
        found: list[Path] = []
        comparisons: list[Path] = []
        for count, (parent, folders, files) in enumerate(os.walk(root)):
            if count >= MAX_FOLDERS:
                self.too_many = True
                break
            if CONFIG in files and {ROWS, PROGRESS, CHECKSUMS} & {*files}:
                found.append(Path(parent))
                folders.clear()
            elif COMPARISON in files:
                comparisons.append(Path(parent))
            folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        return sorted(found, key=lambda folder: by_number(str(folder))), comparisons

    def state(self) -> dict[str, Any]:
        """Return what the page shows above the report."""
        now = time.time()
        return {
            "version": self.version,
            "now": now,
            "too_many": self.too_many,
            "runs": [run.summary(now) for run in self.runs.values()],
        }

    def report(self) -> str:
        """Return the report of all runs with a finished round; "" if there is none."""
        if self._report[0] != self.version:
            records = [run.record for run in self.runs.values() if run.record is not None]
            try:
                text = document(tell_apart(records), "Runs so far") if records else ""
            except ReportError as error:
                text = f"<!doctype html><title>report</title><p>{escape(short_text(error))}</p>"
            self._report = self.version, text
        return self._report[1]


def _planned(comparison: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return the runs of a comparison that goes on. Their folders are only names here."""
    try:
        message = _read_json(comparison / COMPARISON, forms.COMPARISON)
    except (OSError, ValueError, RecursionError):
        return []  # it says nothing that the runs do not say once they start
    if is_gone(message.get("process", {})):
        return []
    runs = [(comparison / each["folder"], each) for each in message.get("runs", ())]
    return [(folder, each) for folder, each in runs if comparison in folder.parents and ".." not in folder.parts]


def _scores(record: RunRecord) -> list[tuple[int, float]]:
    return [(at, score) for at, score in tested(record, record.metric.name) if score is not None]


def _signature(path: Path) -> Signature:
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def short_text(text: object, limit: int = MAX_TEXT) -> str:
    """Return a text from a folder for the page: without invisible characters, and not too long."""
    shown = printable(str(text)[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def _read_json(path: Path, form: Check) -> dict[str, Any]:
    """Read a JSON object. A missing file is empty."""
    try:
        data = atomic_files.read(path, MAX_JSON)
    except FileNotFoundError:
        return {}
    try:
        found: dict[str, Any] = form(atomic_files.parse_json(data, str(path)), "it")
    except ShapeError as error:
        raise DamageError(f"'{path}': {error}; restore it as it was written") from error
    return found
