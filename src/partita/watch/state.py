"""What `partita watch` knows of all runs: the folders that it finds, and what has changed in them since a look."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partita.record import forms
from partita.record.file_names import CHECKSUMS, COMPARISON, CONFIG, PROGRESS, ROWS
from partita.report.load import by_number
from partita.storage.processes import is_gone
from partita.watch.watched_run import PlannedRun, WatchedRun, read_json, short_text

REFRESH = 1.0  # seconds between two looks at the folders
SEARCH = 3.0  # seconds between two searches for new folders
READ_BYTES = 2**25  # bytes of rows that one look reads; the next one reads on
MAX_RUNS, MAX_FOLDERS = 500, 20_000


class Watcher:
    """All runs at or below some folders.

    Args:
        roots: Run folders, and folders of runs. They may be created later.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(root) for root in roots]
        self.runs: dict[Path, WatchedRun] = {}
        self.version = 1
        self.too_many = False
        self.looked = self.searched = -1e9
        self.comparisons: list[Path] = []  # folders with the list of a comparison

    def look(self) -> None:
        """Look for changes, unless the last look was a moment ago."""
        clock, now = time.monotonic(), time.time()
        if clock - self.looked < REFRESH:
            return
        self.looked = clock
        self.version += 1
        if clock - self.searched >= SEARCH:
            self.searched = clock
            self._search()
        budget = READ_BYTES
        for run in self.runs.values():
            budget -= run.refresh(self.version, budget, now)

    def _search(self) -> None:
        found: dict[Path, WatchedRun] = {}
        self.comparisons.clear()
        self.too_many = False
        for root in self.roots:
            prefix = f"{root.name}/" if len(self.roots) > 1 else ""
            for folder in self._folders(root):
                if len(found) >= MAX_RUNS:
                    self.too_many = True
                    break
                below = folder.relative_to(root).as_posix()
                name = prefix.rstrip("/") or root.resolve().name if below == "." else prefix + below
                known = self.runs.get(folder)
                found[folder] = known if known and not isinstance(known, PlannedRun) else WatchedRun(folder, name)
            for comparison in self.comparisons:
                self._add_planned(comparison, root, prefix, found)
            self.comparisons.clear()
        self.runs = dict(sorted(found.items(), key=lambda item: by_number(str(item[0]))))

    def _add_planned(self, comparison: Path, root: Path, prefix: str, found: dict[Path, WatchedRun]) -> None:
        """Add the runs of a comparison that have not started. Their folders are only names here."""
        try:
            told = read_json(comparison / COMPARISON, forms.COMPARISON)
        except (OSError, ValueError, RecursionError):
            return  # it says nothing that the runs do not say once they start
        if is_gone(told.get("process", {})):
            return
        for each in told.get("runs", ()):
            folder = comparison / each["folder"]
            if comparison not in folder.parents or ".." in folder.parts:
                continue
            if len(found) >= MAX_RUNS:
                self.too_many = True
            elif folder not in found:
                known, name = self.runs.get(folder), prefix + folder.relative_to(root).as_posix()
                new = PlannedRun(folder, name, each["label"], each["seed"], each["rounds"])
                found[folder] = known if isinstance(known, PlannedRun) else new

    def _folders(self, root: Path) -> list[Path]:
        """Return the run folders at or below a folder. Symbolic links are not followed, and runs not searched."""
        found: list[Path] = []
        for count, (parent, folders, files) in enumerate(os.walk(root)):
            if count >= MAX_FOLDERS:
                self.too_many = True
                break
            if CONFIG in files and {ROWS, PROGRESS, CHECKSUMS} & {*files}:
                found.append(Path(parent))
                folders.clear()
            elif COMPARISON in files:
                self.comparisons.append(Path(parent))
            folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        return sorted(found, key=lambda folder: by_number(str(folder)))

    def state(self, since: int) -> dict[str, Any]:
        """Return what has changed since a version.

        Args:
            since: The version that the page has; 0 for none.
        """
        since = since if since <= self.version else 0
        return {
            "version": self.version,
            "now": time.time(),
            "roots": [short_text(root) for root in self.roots],
            "too_many": self.too_many,
            "reading": any(not run.complete for run in self.runs.values()),
            "ids": [run.id for run in self.runs.values()],
            "runs": [_answer(run, since) for run in self.runs.values() if run.version > since],
        }


def _answer(run: WatchedRun, since: int) -> dict[str, Any]:
    reset = run.reset_version > since or not since
    curves = {short_text(key, 80): curve.since(0 if reset else since) for key, curve in run.curves.items()}
    new = {key: curve for key, curve in curves.items() if curve["rounds"]}
    return {"id": run.id, "reset": reset, **run.summary, "curves": new}
