"""Play one run of a study and return its line."""

from __future__ import annotations

import hashlib
import math
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playing.lines import Line
from playing.study import Planned, StudyError

if TYPE_CHECKING:
    from partita.experiment.config import Config

Row = Mapping[str, Any]

DIVERGED = ("finite", "implausible")  # words of errors about numbers that are not finite, and updates that are too long
TESTED_BY = {"test": "every", "personal": "personal_every", "validation": "validation_every"}  # options of [evaluate]


def configured(planned: Planned, threads: int | None = None) -> Config:
    """Return the validated config of a run. A run that tunes is scored on validation and never reads a test set.

    Args:
        planned: The run.
        threads: Number of torch threads, if the config does not set it.

    Raises:
        ValueError: If the config is invalid, or holds out no validation examples to tune on.
    """
    from dataclasses import replace

    from partita.experiment.config import parse
    from partita.experiment.config_code import anchored

    raw = dict(planned.raw)
    scored = raw.get("evaluate", {}).get("validation_every")
    if planned.kind == "tune" and planned.disclose_validation and "privacy" in raw and scored:
        raw["privacy"] = {**raw["privacy"], "disclose_validation": True}
    config = parse(anchored(raw, planned.folder))
    if planned.kind == "tune":
        config = _without_test(config, planned)
    elif not getattr(config.evaluate, TESTED_BY[planned.on]):
        raise StudyError(f"on is '{planned.on}', but evaluate.{TESTED_BY[planned.on]} is 0; set it in the config")
    return replace(config, engine=replace(config.engine, threads=config.engine.threads or threads))


def _without_test(config: Config, planned: Planned) -> Config:
    from partita.experiment.tuning import validation_only

    if not config.split["validation"]:
        raise StudyError("split.validation is 0, so no client has validation examples to tune on; set it in the config")
    if config.privacy and not planned.disclose_validation:
        raise StudyError(
            "tuning reads exact scores on the clients' validation examples, which the guarantee of [privacy] does not "
            "cover; tune on public data of the same kind, or accept that with disclose_validation = true in [tune]"
        )
    if config.validation_every > config.rounds:
        raise StudyError(
            f"evaluate.validation_every is {config.validation_every}, but arm '{planned.arm}' has only {config.rounds} "
            "rounds, so no round would be scored; lower it, or leave it out to score every round"
        )
    return validation_only(config, planned.score, disclose=True)


def play(planned: Planned, work: Path, threads: int, commit: str | None, again: bool = False) -> Line:
    """Play a run, or what is left of it if it was interrupted after a checkpoint, and return its line.

    Without a table [checkpoint] in the config there are no checkpoints: tuning would write one after every round that
    is the best so far, with all that clients keep.

    Args:
        planned: The run.
        work: Folder for the folders of runs. That of this run is deleted at the end.
        threads: Number of torch threads, if the config does not set it.
        commit: The commit of the source, if known.
        again: Start from the beginning, whatever an earlier try has left.
    """
    from partita.experiment import run_folder
    from partita.experiment.runner import start, start_or_resume
    from partita.storage.atomic_files import read_json

    folder = work / hashlib.blake2b(planned.name.encode(), digest_size=8).hexdigest()
    resumable = "checkpoint" in planned.raw
    if again or not resumable:
        shutil.rmtree(folder, ignore_errors=True)
    config = configured(planned, threads)
    began, diverged = time.perf_counter(), None
    try:
        for _ in start_or_resume(config, folder) if resumable else start(config, folder, checkpoints=False):
            pass
    except (RuntimeError, ValueError) as error:
        if not any(word in str(error) for word in DIVERGED):
            raise
        diverged = str(error)  # a result: this setting does not train
    rows = list(run_folder.read_rows(folder))
    environment = read_json(folder / run_folder.ENVIRONMENT)
    if diverged is None:
        check_score(planned, rows)
    line = {
        **planned.identity,
        "chosen": dict(planned.chosen),
        "digest": planned.digest,
        "commit": commit,
        "device": environment["processor"],
        "torch": environment["torch"],
        "score": planned.score,
        **({"diverged": diverged} if diverged else {}),
        **recorded(rows, planned.record),
        "seconds": round(time.perf_counter() - began, 1),
    }
    shutil.rmtree(folder, ignore_errors=True)
    return finite(line)


def recorded(rows: Sequence[Row], more: Iterable[str] = ()) -> Line:
    """Return what tables need of a run's rows.

    Args:
        rows: One row per round.
        more: More keys of the rows to keep by round; `drift.query` is the key `query` inside `drift`.

    Returns:
        "test" and "validation": the tested rounds, counted from 1, and by metric the scores there. "personal": the
        same as means over clients, and by metric and client the last scores. "bytes" by round, both directions.
        "train_loss" by round. "epsilon" if the run is private, "layers" by round and client if clients choose them,
        "lost" if clients were lost in a round.
    """
    line: Line = {}
    for part in ("test", "validation"):
        if tested := [row for row in rows if row.get(part)]:
            line[part] = {"rounds": _rounds(tested), **_by_metric([row[part] for row in tested])}
    for part in ("personal", "unseen"):
        if tested := [row for row in rows if row.get(part)]:
            means = [
                {metric: statistics.fmean(by_client.values()) for metric, by_client in row[part].items()}
                for row in tested
            ]
            line[part] = {"rounds": _rounds(tested), **_by_metric(means), "clients": tested[-1][part]}
    line["bytes"] = {side: [row["bytes"][side] for row in rows] for side in ("up", "down")}
    line["train_loss"] = [row["train_loss"] for row in rows]
    line["round_seconds"] = [row["seconds"] for row in rows]
    if rows and "privacy" in rows[-1]:
        line["epsilon"], line["delta"] = rows[-1]["privacy"]["epsilon"], rows[-1]["privacy"]["delta"]
    if any("chosen" in row for row in rows):
        line["layers"] = [row.get("chosen") for row in rows]
    if any(row.get("lost") for row in rows):
        line["lost"] = [len(row.get("lost") or ()) for row in rows]
    for key in more:
        line[key] = [_lookup(row, key) for row in rows]
    return line


def _lookup(row: Row, path: str) -> Any:
    """Return what a row has at a path of keys with dots; None if a part of the path is missing."""
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def finite(value: Any) -> Any:
    """Return a value of JSON with None in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_score(planned: Planned, rows: Sequence[Row]) -> None:
    """Check that a run has the study's metric on the part that its tables need.

    Raises:
        StudyError: If not. A metric that some round lacks, because its model is not finite, is no reason.
    """
    part = "validation" if planned.kind == "tune" else planned.on
    tested = [row[part] for row in rows if row.get(part)]
    if not tested:
        raise StudyError(f"no round has scores on '{part}'; set evaluate.{TESTED_BY[part]} in the config")
    known = dict.fromkeys(metric for scores in tested for metric in scores)
    if planned.score not in known:
        raise StudyError(f"score is '{planned.score}', which the runs do not have; there are {', '.join(known)}")


def _rounds(rows: Iterable[Row]) -> list[int]:
    return [row["round"] + 1 for row in rows]


def _by_metric(scores: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """Return the scores by metric; None in a round that lacks the metric."""
    metrics = dict.fromkeys(metric for each in scores for metric in each)
    return {metric: [each.get(metric) for each in scores] for metric in metrics}
