"""Early stopping and the best round. Both are decided from what the rows record, so a resumed run decides the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

from partita.core.options import OptionError, closest_match
from partita.core.rng import Key
from partita.evaluation import Evaluator
from partita.experiment.config_tables import Config, StopConfig
from partita.record.metric import Metric

Scores = Sequence[tuple[int, float]]  # (completed rounds, score on validation) for each evaluation, in order


def validation_metric(config: Config, evaluator: Evaluator) -> Metric:
    """Return the metric that early stopping and the best checkpoint go by.

    Raises:
        OptionError: If the task does not have the metric of the config.
    """
    wanted, known = config.evaluate.validation_metric, {metric.name: metric for metric in evaluator.metrics}
    if wanted is None:
        return evaluator.primary
    if wanted not in known:
        raise OptionError(
            f"evaluate.validation_metric is '{wanted}', which this task does not have; {closest_match(wanted, known)}"
        )
    return known[wanted]


def evaluated_clients(config: Config, present: Sequence[str]) -> list[str]:
    """Return the clients that are evaluated, drawn once per run."""
    count = min(config.evaluate.max_clients, len(present))
    return sorted((Key(config.seed) / "evaluate").sample(present, count))


def best_round(metric: Metric, scores: Scores) -> int | None:
    """Return the completed rounds at the best score, the first of equal ones; None without a finite score."""
    finite = [(-_gain(metric, score), done) for done, score in scores if math.isfinite(score)]
    return min(finite)[1] if finite else None


def why_stop(stop: StopConfig, metric: Metric, scores: Scores) -> str | None:
    """Say why the run stops after its last evaluation; None if it goes on.

    Args:
        stop: The conditions.
        metric: The metric.
        scores: All evaluations so far.
    """
    if not scores:
        return None
    gains = [_gain(metric, score) for _, score in scores]
    if stop.target is not None and gains[-1] >= _gain(metric, stop.target):
        return f"{metric.name} on validation has reached {stop.target:g}"
    if stop.patience is None:
        return None
    best, since = -math.inf, 0
    for gain in gains:
        # A score that is not finite is no improvement.
        best, since = (gain, 0) if math.isfinite(gain) and gain > best + stop.min_delta else (best, since + 1)
    if since < stop.patience:
        return None
    by = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
    times = "1 evaluation" if since == 1 else f"{since} evaluations"
    return f"{metric.name} on validation has not improved{by} for {times}"


def _gain(metric: Metric, score: float) -> float:
    return score if metric.higher_is_better else -score
