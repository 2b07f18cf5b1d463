"""Early stopping and the best round. Both are decided from what the rows record, so a resumed run decides the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

from partita.core.options import OptionError, closest_match
from partita.core.rng import Key
from partita.core.settings import RunError
from partita.data import Federation
from partita.evaluation import Evaluator
from partita.experiment.config import Config
from partita.experiment.config_tables import StopConfig
from partita.privacy.guard import PrivacyGuard
from partita.record.metric import Metric

Scores = Sequence[tuple[int, float]]  # (completed rounds, score on validation) for each evaluation, in order


def check(config: Config, evaluator: Evaluator, federation: Federation, guard: PrivacyGuard | None) -> None:
    """Check before the first round that the run can be validated and stopped as configured.

    Args:
        config: The experiment.
        evaluator: The metrics of the task.
        federation: The clients.
        guard: The privacy guard, if the run is private.

    Raises:
        OptionError: If a setting is unknown or has no effect.
        RunError: If the settings contradict each other.
    """
    reads_scores = config.stop is not None and config.stop.reads_scores
    # Adapted models are trained on raw examples, and a stop that follows from scores would disclose them to everyone.
    may_validate = guard and guard.privacy_config.disclose_validation and guard.run.method.adapt is None
    if guard and config.validation_every and (reads_scores or not may_validate):
        asked = "evaluate.validation_every" if config.evaluate.validation_every else "[stop] patience or target"
        raise RunError(
            f"{asked} reads scores on the clients' validation examples, which a private run does not disclose; leave "
            "it out, or stop by stop.epsilon"
        )
    if guard and guard.privacy_config.disclose_validation and not config.validation_every:
        raise OptionError("privacy.disclose_validation has no effect without evaluate.validation_every; leave it out")
    validation_metric(config, evaluator)
    if config.evaluate.validation_metric is not None and not config.validation_every:
        raise OptionError("evaluate.validation_metric has no effect without evaluate.validation_every or [stop]")
    if config.validation_every:
        _check_examples(config, federation)
    if config.stop is not None and config.stop.epsilon is not None:
        _check_epsilon(config.stop.epsilon, guard)


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


def _check_examples(config: Config, federation: Federation) -> None:
    """Raise RunError if no client has validation examples. If some data is elsewhere, only the share is known."""
    held = [federation[client] for client in evaluated_clients(config, federation.clients)]
    none = all(len(data.train) for data in held) and not any(len(data.validation) for data in held)
    if not config.split["validation"] or none:
        raise RunError(
            f"split.validation is {config.split['validation']:g}, so no client has validation examples; raise it, or "
            "leave out evaluate.validation_every and [stop] patience and target"
        )


def _check_epsilon(limit: float, guard: PrivacyGuard | None) -> None:
    if guard is None:
        raise RunError("stop.epsilon needs a private run; add a table [privacy], or leave it out")
    if not all(guard.sizes.values()) and not guard.account.of_clients:
        raise RunError(
            "stop.epsilon needs the number of examples of every client, which is not known here; leave it out"
        )
    if (first := guard.forecast(1).epsilon()) > limit:
        raise RunError(
            f"stop.epsilon is {limit:g}, but the first round alone costs epsilon {first:.4g}; raise stop.epsilon, or "
            "privacy.noise"
        )
