"""The runs of a study that are still to be played, and what its tuning chose."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partita.record.metric import Metric, metric_named
from playing.lines import Line, read_lines
from playing.study import Arm, Kind, Planned, Point, Settings, Study, StudyError, edges, grid_points, key_of, plan_run

Found = dict[str, Line]  # lines by the key of their run


@dataclass(frozen=True)
class Asked:
    """What one call asks of its studies.

    Attributes:
        overrides: Texts such as "data.path=trec".
        arms: The arms to play; all if empty.
        seeds: The seeds to play; all of the study if empty.
    """

    overrides: tuple[str, ...] = ()
    arms: Collection[str] = field(default_factory=tuple)
    seeds: Collection[int] = field(default_factory=tuple)


def plan(study: Study, kind: Kind, asked: Asked, tuned: Sequence[Line]) -> list[Planned]:
    """Return all runs of a study that can be planned now, seed by seed, so that a part of them can be compared.

    An arm that takes the choice of another arm and tunes more on top of it can be planned once the other is tuned.

    Args:
        study: The study.
        kind: "tune" or "run".
        asked: What to play of it.
        tuned: The lines of its tuning so far.

    Raises:
        StudyError: If an arm or a seed is unknown, or if tuning is needed and not complete.
    """
    if unknown := [name for name in asked.arms if name not in study.arms]:
        raise StudyError(f"{study.file} has no arm '{unknown[0]}'; there are {', '.join(study.arms)}")
    arms = [arm for arm in study.arms.values() if not asked.arms or arm.name in asked.arms]
    if kind == "tune":
        if study.tuning is None:
            raise StudyError(f"{study.file} has no table [tune], so there is nothing to tune")
        needed = {arm.tuned_as for arm in arms}
        arms = [arm for arm in study.arms.values() if arm in arms or arm.name in needed]
        return [
            plan_run(study, "tune", arm, point, seed, {**before, **tried}, asked.overrides)
            for seed in study.tuning.seeds
            for point in study.tuning_points()
            for arm in arms
            if (before := _before(study, arm, point, asked, tuned)) is not None
            for tried in grid_points(arm)
        ]
    seeds = [seed for seed in study.seeds if not asked.seeds or seed in asked.seeds]
    if unknown_seeds := [seed for seed in asked.seeds if seed not in study.seeds]:
        raise StudyError(f"{study.file} has no seed {unknown_seeds[0]}; its seeds are {list(study.seeds)}")
    choices = {
        (arm.name, key): choose(study, arm, point, asked, tuned)
        for point in study.tuning_points()
        for key in [repr(sorted(point.items()))]
        for arm in arms
    }
    planned = []
    for seed in seeds:
        for point in study.points():
            for arm in arms:
                key = arm.name, repr(sorted(study.tuned_at(point).items()))
                chosen = choices[key] if study.tuning else {}
                edge = edges(study, arm, chosen)
                planned.append(plan_run(study, "run", arm, point, seed, chosen, asked.overrides, edge))
    return planned


def choose(study: Study, arm: Arm, point: Point, asked: Asked, tuned: Sequence[Line]) -> dict[str, Any]:
    """Return the settings with the best mean score on validation, the first of equal ones; none without a grid.

    Raises:
        StudyError: If a setting of the grid has not been tried, or none has a score.
    """
    before = choose(study, study.arms[arm.tuned_as], point, asked, tuned) if arm.tuned_as else {}
    if not arm.grid:
        return before
    assert study.tuning is not None
    by_key = {key_of(line): line for line in tuned}
    scored: list[tuple[float, dict[str, Any]]] = []
    for tried in grid_points(arm):
        settings = {**before, **tried}
        runs = [plan_run(study, "tune", arm, point, seed, settings, asked.overrides) for seed in study.tuning.seeds]
        missing = [run for run in runs if run.key not in by_key]
        if missing:
            raise StudyError(
                f"the tuning of '{arm.name}' is not complete: {missing[0].title} is missing in "
                f"{study.output('tune')}; play it first: play.py tune {study.file}"
            )
        for run in runs:
            check_digest(study, run, by_key[run.key])
        values = [tail_mean(by_key[run.key], study.score, "validation", study.tuning.last) for run in runs]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            scored.append((statistics.fmean(known), settings))
    if not scored:
        raise StudyError(f"no setting of the grid of '{arm.name}' has a score on validation; change its grid")
    sign = 1 if higher_is_better(study.score) else -1
    return max(scored, key=lambda each: sign * each[0])[1]


def tail_mean(line: Mapping[str, Any], metric: str, part: str, last: int) -> float | None:
    """Return the mean over the last tested rounds; None if a score is missing there or the run diverged."""
    values = tail(line, metric, part, last)
    return statistics.fmean(values) if values else None


def tail(line: Mapping[str, Any], metric: str, part: str, last: int) -> list[float]:
    """Return the scores of the last tested rounds; none if one is missing there or the run diverged."""
    values = (line.get(part) or {}).get(metric) or []
    values = values[-last:]
    return [] if "diverged" in line or None in values else values


def higher_is_better(metric: str) -> bool:
    """Return the direction of a metric."""
    return built_in(metric).higher_is_better


def built_in(metric: str) -> Metric:
    """Return a metric of partita by its name."""
    from partita.evaluation import METRICS

    return metric_named(metric, METRICS)


def check_digest(study: Study, run: Planned, line: Mapping[str, Any]) -> None:
    """Check that a line is of this very config. Lines of old studies have no digest.

    Raises:
        StudyError: If it is not.
    """
    if line.get("digest") not in (None, run.digest):
        raise StudyError(
            f"{study.output(run.kind)} has a line of another config for {run.title}; restore the config, or move the "
            "file away to play its runs again"
        )


def left_to_play(study: Study, planned: Sequence[Planned], done: Sequence[Line]) -> list[Planned]:
    """Return the runs that have no line yet.

    Raises:
        StudyError: If a line is of another config.
    """
    by_key = {key_of(line): line for line in done}
    for run in planned:
        if run.key in by_key:
            check_digest(study, run, by_key[run.key])
    return [run for run in planned if run.key not in by_key]


def read_runs(study: Study, kind: Kind) -> list[Line]:
    """Return the lines of a study's runs."""
    return read_lines(study.output(kind))


def _before(study: Study, arm: Arm, point: Point, asked: Asked, tuned: Sequence[Line]) -> Settings | None:
    """Return the choice that an arm takes from another; None if that is not known yet."""
    if arm.tuned_as is None:
        return {}
    try:
        return choose(study, study.arms[arm.tuned_as], point, asked, tuned)
    except StudyError:
        return None
