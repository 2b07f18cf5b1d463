"""The metrics that a run records, and those of runs that recorded less."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from partita.evaluation import EVALUATORS, METRICS
from partita.record.metric import ACCURACY, Metric, metric_named, metrics_in

F1, LOSS, R2 = Metric("f1"), Metric("loss", higher_is_better=False, fraction=False), Metric("r2", fraction=False)
OWN = Metric("wrong", higher_is_better=False, fraction=True)


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_recorded_metrics_are_read_as_they_were(evaluator: Any) -> None:
    plan = json.loads(json.dumps({"metrics": [asdict(metric) for metric in evaluator.metrics], "stages": []}))
    assert metrics_in(plan) == evaluator.metrics


@pytest.mark.parametrize(
    ("plan", "judged"),
    [
        ({}, ACCURACY),
        ({"metrics": []}, ACCURACY),
        ({"metric": {}}, ACCURACY),
        ({"metric": {"name": "f1", "higher_is_better": True}}, F1),
        ({"metric": {"name": "loss", "higher_is_better": False}}, LOSS),
        ({"metric": {"name": "r2", "higher_is_better": True}}, R2),
        ({"metric": {"name": "cost", "higher_is_better": False}}, Metric("cost", False, fraction=False)),
    ],
)
def test_metric_that_judges_an_older_run(plan: dict[str, Any], judged: Metric) -> None:
    assert metrics_in(plan)[0] == judged


@pytest.mark.parametrize("metric", METRICS)
def test_older_runs_know_direction_and_unit_of_every_metric(metric: Metric) -> None:
    older = {"metric": {"name": metric.name, "higher_is_better": metric.higher_is_better}, "own_metrics": [asdict(OWN)]}
    for plan in ({}, older):
        assert metric_named(metric.name, metrics_in(plan)) == metric
    assert metric_named("wrong", metrics_in(older)) == OWN


def test_a_metric_has_one_direction_and_unit() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
