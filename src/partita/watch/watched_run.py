"""One run as `partita watch` shows it: read from its folder in increments, and never written there."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from partita.record import forms
from partita.record.check import Check, ShapeError
from partita.record.file_names import CONFIG, PLAN, PRIVACY, PROGRESS, RESULT, ROWS
from partita.record.metric import Metric, metric_named, metrics_in
from partita.record.row import Row, check_row, numbers
from partita.report.load import number, read_config
from partita.storage import atomic_files
from partita.storage.atomic_files import MAX_LINE_BYTES, DamageError
from partita.storage.processes import is_gone
from partita.storage.safe_text import printable

FILES = (CONFIG, ROWS, PLAN, PRIVACY, RESULT, PROGRESS)

SILENT = 30.0  # seconds without a sign of life after which a run counts as stopped
TAIL = 256  # bytes before the last row end that show whether the file is still the same
MAX_JSON = 2**26  # bytes of a file that is read at once
MAX_POINTS = 4000  # points of a curve; longer ones are thinned
MAX_CURVES, MAX_LISTED, MAX_TEXT = 60, 30, 400  # curves of a run; lost clients, alarms and roles; characters


# Names of numbers, or their first or last part.
WITHOUT_CURVE = {
    *("round", "bytes", "by_type", "subgroups", "skipped", "alarm_count"),
    *("delta", "cosine", "distance", "sampled"),
}
SCORES = ("test", "validation", "personal", "unseen")


@dataclass
class Curve:
    """Values by round. `versions` says at which look each point was found, so that a page asks for new ones only."""

    title: str
    percent: bool = False
    rounds: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, round: int, value: float, version: int) -> bool:
        """Add a point. Return whether older points were dropped to make room."""
        self.rounds.append(round)
        self.values.append(value)
        self.versions.append(version)
        if len(self.rounds) <= MAX_POINTS:
            return False
        for points in (self.rounds, self.values, self.versions):
            del points[1:-1:2]
        return True

    def since(self, version: int) -> dict[str, Any]:
        """Return the points that were found after this version."""
        first = bisect_right(self.versions, version)
        return {
            "title": self.title,
            "percent": self.percent,
            "rounds": self.rounds[first:],
            "values": self.values[first:],
        }


class WatchedRun:
    """One run folder.

    Args:
        folder: The folder.
        name: What to call it: its path below the watched folder.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, short_text(name)
        self.id = hashlib.blake2b(os.fsencode(folder), digest_size=6).hexdigest()
        self.version = self.reset_version = 0
        self.summary: dict[str, Any] = {}
        self.signatures: dict[str, tuple[int, ...] | None] = {}
        self.broken: list[tuple[int, ...] | None] = []  # the files as they were when they could not be read
        self._forget()

    def _forget(self) -> None:
        """Forget everything that was read."""
        self.signatures.clear()
        self.config: Mapping[str, Any] = {}
        self.plan: Mapping[str, Any] = {}
        self.privacy: Mapping[str, Any] = {}
        self.result: Mapping[str, Any] | None = None
        self.progress: Mapping[str, Any] = {}
        self._forget_rows()

    def _forget_rows(self) -> None:
        self.offset, self.tail = 0, b""
        self.curves: dict[str, Curve] = {}
        self.last: Row = {}
        self.done = 0
        self.seconds: list[float] = []
        self.up = self.down = 0.0
        self.lost_count = 0
        self.lost: dict[str, dict[str, Any]] = {}
        self.alarms: dict[str, dict[str, Any]] = {}
        self.scores: list[tuple[int, float]] = []
        self.complete = True

    def refresh(self, version: int, budget: int, now: float) -> int:
        """Look for changes.

        Args:
            version: The number of this look.
            budget: Bytes of rows that may be read.
            now: The time.

        Returns:
            The bytes that were read.
        """
        read = 0
        files = [self._signature(name) for name in FILES]
        if files == self.broken:
            return 0
        self.broken = []
        try:
            if self._changed(CONFIG):
                self._forget()
                self.reset_version = version
                self._changed(CONFIG)
                self.config, _ = read_config(self.folder / CONFIG)
            self._read_files()
            read = self._read_rows(version, budget)
            summary = self._summarize(now)
        except (OSError, ValueError, RecursionError) as error:
            summary = {**self._names(), "state": "unreadable", "note": short_text(error)}
            self._forget()
            self.reset_version, self.broken = version, files
        if summary != self.summary or self.reset_version == version:
            self.summary, self.version = summary, version
        return read

    def _signature(self, name: str) -> tuple[int, ...] | None:
        try:
            found = os.lstat(self.folder / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _changed(self, name: str) -> bool:
        """Return whether a file is another one than at the last call."""
        signature = self._signature(name)
        before = self.signatures.get(name, ())
        self.signatures[name] = signature
        return signature != before

    def _read_files(self) -> None:
        if self._changed(PLAN):
            plan = read_json(self.folder / PLAN, forms.PLAN)
            self.plan = {**plan, "stages": [_by_role(stage) for stage in plan.get("stages", ())]}
        if self._changed(PRIVACY):
            self.privacy = read_json(self.folder / PRIVACY, forms.PRIVACY)
        if self._changed(RESULT):
            found = self.signatures[RESULT] is not None
            self.result = read_json(self.folder / RESULT, forms.RESULT) if found else None
        if self._changed(PROGRESS):
            self.progress = read_json(self.folder / PROGRESS, forms.PROGRESS)

    def _read_rows(self, version: int, budget: int) -> int:
        """Read the rows that were appended. If the file was replaced or cut, read it from the start."""
        path = self.folder / ROWS
        if not self._changed(ROWS) and self.complete:
            return 0
        if self.signatures[ROWS] is None:
            if self.offset:
                self._forget_rows()
                self.reset_version = version
            return 0
        with atomic_files.open_regular_file(path) as file:
            start = self.offset - len(self.tail)
            file.seek(start)
            if file.read(len(self.tail)) != self.tail:
                self._forget_rows()
                self.reset_version = version
                file.seek(0)
            data = file.read(max(0, budget))
            while data and b"\n" not in data and len(data) <= MAX_LINE_BYTES:
                more = file.read(2**20)
                if not more:
                    break
                data += more
            size = os.fstat(file.fileno()).st_size
        if len(data) > MAX_LINE_BYTES and b"\n" not in data:
            raise DamageError(f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes; restore the file from a copy")
        end = data.rfind(b"\n") + 1
        for line in data[:end].split(b"\n")[:-1]:
            self._add(line, path, version)
        read = self.offset + len(data)
        self.offset += end
        self.tail = (self.tail + data[max(0, end - TAIL) : end])[-TAIL:]
        self.complete = read >= size
        return len(data)

    def _add(self, line: bytes, path: Path, version: int) -> None:
        try:
            row = check_row(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DamageError(f"{path} has a line that is not a row ({error}); repair the line") from error
        if row["round"] < self.done:
            raise DamageError(f"{path}: round {row['round']} comes after round {self.done - 1}; keep one of them")
        self.last = row
        self.done = row["round"] + 1
        self._count(row)
        for key, title, value, percent in self._values(row):
            if key not in self.curves and len(self.curves) < MAX_CURVES:
                self.curves[key] = Curve(title, percent)
            if key in self.curves and self.curves[key].add(row["round"], value, version):
                self.reset_version = version

    def _count(self, row: Row) -> None:
        """Count what the summary needs of all rows."""
        round, traffic = row["round"], row.get("bytes") or {}
        self.up += number(traffic.get("up")) or 0.0
        self.down += number(traffic.get("down")) or 0.0
        if (seconds := number(row.get("seconds"))) is not None:
            self.seconds = [*self.seconds[-4:], seconds]
        if (score := number((row.get("test") or {}).get(self.metric.name))) is not None:
            self.scores = _last_and_best(self.scores, (round, score), self.metric)
        for client, reason in (row.get("lost") or {}).items():
            self.lost_count += 1
            known = self.lost.pop(client, {"times": 0})
            self.lost[client] = {"times": known["times"] + 1, "round": round, "reason": short_text(reason)}
            if len(self.lost) > MAX_LISTED:
                del self.lost[next(iter(self.lost))]
        for kind, told in (row.get("alarms") or {}).items():
            if kind in self.alarms or len(self.alarms) < MAX_LISTED:
                known = self.alarms.setdefault(kind, {"times": 0, "first": round})
                known |= {"times": known["times"] + 1, "last": round, "text": short_text(told)}

    @property
    def metric(self) -> Metric:
        """The metric by which the run is judged."""
        return metrics_in(self.plan)[0]

    def _values(self, row: Row) -> Iterator[tuple[str, str, float, bool]]:
        """Yield (key, title, value, whether it is a fraction) of each curve that a row has a point of."""
        known = metrics_in(self.plan)
        for path, value in numbers(row, known):
            found = number(value)
            if found is not None and not {path[0], "/".join(path), path[-1]} & WITHOUT_CURVE:
                fraction = path[0] in SCORES and metric_named(path[1], known).fraction
                yield "/".join(path), short_text(" ".join(path).replace("_", " "), 60), found, fraction
        if row.get("bytes"):
            yield "sent", "MB sent so far", (self.up + self.down) / 1e6, False

    def _names(self) -> dict[str, Any]:
        label = self.config.get("label")
        return {
            "name": self.name,
            "label": short_text(label, 120) if label else self.name,
            "seed": self.config.get("seed"),
        }

    def _summarize(self, now: float) -> dict[str, Any]:
        progress, state, note = self.progress, *self._state(now)
        rounds = self.config.get("rounds", 0)
        live, stages = state in ("running", "waiting"), self.plan.get("stages", ())
        current = progress.get("round", self.done) if live else max(0, self.done - 1)
        paces = [pace for pace in (number(progress.get("pace")),) if pace is not None and pace >= 0]
        summary = {
            **self._names(),
            "state": state,
            "note": note,
            "rounds": rounds,
            "done": self.done,
            "complete": self.complete,
            "pace": paces[0] if paces else fmean(self.seconds) if self.seconds else None,
            "metric": {"name": short_text(self.metric.name, 60), "percent": self.metric.fraction},
            "score": self.scores[-1] if self.scores else None,
            "best": self.scores[0] if self.scores else None,
            "up": self.up,
            "down": self.down,
            "online": self.last.get("population"),
            "cohort": len(self.last.get("cohort") or ()) if self.last else None,
            "lost_count": self.lost_count,
            "lost": [{"client": short_text(client, 60), **told} for client, told in reversed(self.lost.items())],
            "alarms": [
                {"kind": short_text(kind, 60), **told, "active": told["last"] == self.done - 1}
                for kind, told in sorted(self.alarms.items(), key=lambda item: -item[1]["last"])
            ],
            "privacy": self._privacy(),
            "plan": next((stage for stage in stages if stage["last"] >= current), stages[-1] if stages else None),
        }
        if live and progress:
            summary |= {"current": self._current(), "online": progress.get("online", summary["online"])}
        return summary

    def _current(self) -> dict[str, Any]:
        """Return what is known of the current round."""
        told = self.progress
        clients = [
            (short_text(client, 60), short_text(status, 10)) for client, status in told.get("clients", {}).items()
        ]
        return {
            "phase": short_text(told.get("phase", ""), 20),
            "round": told.get("round"),
            "started": number(told.get("started")),
            "cohort": told.get("cohort"),
            "asked": told.get("asked"),
            "replied": told.get("replied"),
            "clients": clients[: 10 * MAX_LISTED],
            "lost": {
                short_text(client, 60): short_text(reason)
                for client, reason in list(told.get("lost", {}).items())[:MAX_LISTED]
            },
            "present": [short_text(client, 60) for client in told.get("present", ())[: 10 * MAX_LISTED]],
        }

    def _privacy(self) -> dict[str, Any] | None:
        if not self.privacy:
            return None
        told = {key: number(self.privacy.get(key)) for key in ("budget", "planned", "delta")}
        spent = number((self.last.get("privacy") or {}).get("epsilon"))
        limit = told["budget"] if told["budget"] is not None else told["planned"]
        return {
            **told,
            "unit": short_text(self.privacy.get("unit", ""), 20),
            "repeatable": bool(self.privacy.get("repeatable")),
            "spent": spent,
            "limit": limit,
            "left": max(0.0, limit - (spent or 0.0)) if limit is not None else None,
        }

    def _state(self, now: float) -> tuple[str, str]:
        """Return the state of the run, and a sentence about it."""
        progress = self.progress
        if self.result is not None:
            early = self.result.get("stopped")
            return "finished", short_text(f"stopped after round {early['after']}: {early['reason']}") if early else ""
        if progress.get("state") == "failed":
            return "failed", short_text(progress.get("error", ""))
        if progress.get("state") == "stopped":
            return "stopped", "it can be resumed"
        if progress:
            silent = now - (number(progress.get("updated")) or 0.0)
            if is_gone(progress.get("process", {})):
                return "stale", "its process is gone; it can be resumed"
            if silent > SILENT:
                return "stale", "it has given no sign of life for a while"
            return ("waiting", "for clients") if progress.get("phase") == "waiting" else ("running", "")
        # Before its first round, and if it was recorded by an older version, a run has no file of progress.
        changed = max(
            (signature[3] / 1e9 for name in (CONFIG, ROWS) if (signature := self.signatures.get(name))), default=0.0
        )
        if now - changed > SILENT:
            return "stopped", "it is not finished and nothing writes to it; it can be resumed"
        return ("running", "") if self.done else ("waiting", "for the first round")


class PlannedRun(WatchedRun):
    """A run of a comparison that has not started. Its folder may not exist, and nothing in it is read."""

    def __init__(self, folder: Path, name: str, label: str, seed: int, rounds: int) -> None:
        super().__init__(folder, name)
        self.config = {"label": label, "seed": seed, "rounds": rounds}

    def refresh(self, version: int, budget: int, now: float) -> int:
        if not self.summary:
            self.summary = {**self._summarize(now), "state": "waiting", "note": "has not started"}
            self.version = version
        return 0


def short_text(text: object, limit: int = MAX_TEXT) -> str:
    """Return a text from a folder for the page: without invisible characters, and not too long."""
    shown = printable(str(text)[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def read_json(path: Path, form: Check) -> dict[str, Any]:
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


def _by_role(stage: Mapping[str, Any]) -> dict[str, Any]:
    """Sum up a stage of the plan by role: how many parameters there are, train, go up, come down and stay."""
    roles: dict[str, dict[str, int]] = {}
    for row in stage["rows"]:
        role = short_text(row.get("role") or "other", 40)
        if role not in roles and len(roles) >= MAX_LISTED:
            role = "other"
        counts = roles.setdefault(role, dict.fromkeys(("all", "trains", "up", "down", "keep"), 0))
        size = row.get("parameters", 0)
        counts["all"] += size
        for key in ("trains", "up", "down", "keep"):
            counts[key] += size if row.get(key) else 0
    return {
        "first": stage["first"],
        "last": stage["last"],
        "client": short_text(stage.get("client") or "", 60),
        "roles": [{"role": role, **counts} for role, counts in roles.items()],
    }


def _last_and_best(
    scores: Sequence[tuple[int, float]], new: tuple[int, float], metric: Metric
) -> list[tuple[int, float]]:
    """Return [best, newest] of the scores so far."""
    sign = 1 if metric.higher_is_better else -1
    best = scores[0] if scores and sign * scores[0][1] >= sign * new[1] else new
    return [best, new]
