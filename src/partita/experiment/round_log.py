"""Records of an experiment: the plan before the first round, and one row per round."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from partita.core.client import Job
from partita.core.client_rule import overrides
from partita.core.data import Examples, NewClasses
from partita.core.model import Model, layer_tag, layer_tags, logits_and_losses, role_tag
from partita.core.plan import Plan, RoundInfo, plan_for
from partita.core.rounds import Engine, RoundResult, make_job
from partita.core.server_rule import Server
from partita.core.settings import Run, RunError
from partita.data import Task
from partita.evaluation import evaluate
from partita.evaluation.evaluator import by_type, without_types
from partita.experiment import early_stopping, run_folder
from partita.experiment.alarms import LONG_WINDOW, RoundSummary, check_round, check_test, check_window, summarize
from partita.experiment.experiment import Experiment
from partita.experiment.subgroups import SMALL, score_groups
from partita.methods.layer_votes import LayerVote
from partita.privacy.disclosure import withhold
from partita.record.row import Row, SecureSum

HARMONIC_MEAN = "harmonic_mean"
MAX_CONFUSED = 50  # with more classes, no confusion matrix is recorded


@dataclass
class History:
    """What the rounds so far leave for later ones. `restore_history` rebuilds it from the rows.

    Attributes:
        summaries: Summaries of the last rounds, if clients choose layers.
        losses: By client, the training loss that it reported last, if the sampling rule uses it.
        scores: (completed rounds, score) of each evaluation on validation.
        stopped: Why the run stops after its last round; None if it goes on.
    """

    summaries: deque[RoundSummary] = field(default_factory=lambda: deque(maxlen=LONG_WINDOW))
    losses: dict[str, float] = field(default_factory=dict)
    scores: list[tuple[int, float]] = field(default_factory=list)
    stopped: str | None = None

    def add(self, experiment: Experiment, done: int, row: Mapping[str, Any]) -> None:
        """Add the losses and the score on validation that a row has."""
        self.losses |= row.get("losses", {})
        if "validation" in row:
            name = early_stopping.validation_metric(experiment.config, experiment.evaluator).name
            # A score that is undefined counts as an evaluation without an improvement.
            self.scores.append((done, row["validation"].get(name, math.nan)))

    def best(self, experiment: Experiment) -> int | None:
        """Return the number of completed rounds at the best score on validation; None if there is none."""
        metric = early_stopping.validation_metric(experiment.config, experiment.evaluator)
        return early_stopping.best_round(metric, self.scores)


def log_round(
    experiment: Experiment,
    engine: Engine,
    result: RoundResult,
    seconds: float,
    signal: Mapping[str, float],
    history: History,
) -> Row:
    """Evaluate the model as configured and return the round's row.

    Args:
        experiment: The experiment.
        engine: The engine that ran the round.
        result: The round's result.
        seconds: Duration of the round.
        signal: The server's signal to the clients at the start of the round.
        history: The previous rounds. This round is added.

    Returns:
        The row, without the values that the privacy guarantee forbids to disclose.
    """
    done, spending = result.number + 1, _spending(experiment, result, signal)
    known: Row = {**_losses(experiment, result), **validate_round(experiment, engine, result)}
    history.add(experiment, done, known)
    history.stopped = why_stop(experiment, engine, result.server, history, done)
    best = history.best(experiment) == done
    tested = evaluate_round(experiment, engine, result, history.stopped is not None, best)
    events, choices = _rejections(experiment, result), _choices(experiment, result, history.summaries)
    row: Row = {**_outcome(experiment, result, seconds), **tested, **known, **spending, **events, **choices}
    raised = [part["alarms"] for part in (tested, events, choices) if "alarms" in part]
    if raised:
        row["alarms"] = {kind: text for alarms in raised for kind, text in alarms.items()}
    if experiment.guard is None:
        return row
    private = experiment.guard.privacy
    return withhold(row, private.unit, private.disclose_validation)


def why_stop(experiment: Experiment, engine: Engine, server: Server, history: History, done: int) -> str | None:
    """Say why the run stops after `done` rounds; None if it goes on.

    Args:
        experiment: The experiment.
        engine: The engine.
        server: The server after these rounds.
        history: The rounds.
        done: The number of completed rounds.
    """
    stop, guard, run = experiment.config.stop, experiment.guard, experiment.run
    if stop is None or not done:
        return None
    metric = early_stopping.validation_metric(experiment.config, experiment.evaluator)
    # Only the newest evaluation decides; the run went on after all others.
    due = history.scores and history.scores[-1][0] == done
    if stop.reads_scores and due and (reason := early_stopping.why_stop(stop, metric, history.scores)):
        return reason
    if stop.epsilon is None or guard is None or done >= run.rounds:
        return None
    cost = guard.epsilon_after(done, engine.clients(), run.method.server_rule.signal(server))
    return f"one more round would raise epsilon to {cost:.4g}, above {stop.epsilon:g}" if cost > stop.epsilon else None


def validate_round(experiment: Experiment, engine: Engine, result: RoundResult) -> Row:
    """Evaluate the clients' models on their own validation parts, if due.

    Returns:
        "validation": by metric, the mean over the clients that have it, weighted by their numbers of validation
        examples. All clients count alike if the server does not know the numbers.

    Raises:
        RunError: If no client has a score.
    """
    every = experiment.config.validation_every
    if not every or (result.number + 1) % every:
        return {}
    clients = early_stopping.evaluated_clients(experiment.config, engine.clients())
    scored = dict(engine.evaluate(_jobs(experiment, result, clients), "validation"))
    scored = {client: without_types(scores) for client, scores in scored.items() if scores}
    if not scored:
        raise RunError(
            f"none of {len(clients)} clients has a score on validation examples in round {result.number}; raise "
            "split.validation, or leave out evaluate.validation_every and [stop]"
        )
    sizes = {client: len(experiment.federation[client].validation) for client in scored}
    weights = sizes if all(sizes.values()) else dict.fromkeys(sizes, 1)
    means: dict[str, float] = {}
    for metric in dict.fromkeys(name for scores in scored.values() for name in scores):
        having = [client for client in scored if metric in scored[client]]
        total = sum(weights[client] for client in having)
        means[metric] = sum(weights[client] * scored[client][metric] for client in having) / total
    return {"validation": means}


def _jobs(experiment: Experiment, result: RoundResult, clients: list[str]) -> Iterator[Job]:
    """Return the evaluation jobs of these clients after a round."""
    run, model = experiment.run, experiment.model
    return (make_job(run, model, result.server, result.number, client)[0] for client in clients)


def evaluate_round(
    experiment: Experiment, engine: Engine, result: RoundResult, last: bool = False, best: bool = False
) -> Row:
    """Evaluate the model on the central test set and the clients' models on their own test sets, if due.

    Args:
        experiment: The experiment.
        engine: The engine that ran the round.
        result: The round's result.
        last: Whether the run stops after this round.
        best: Whether this round is the best so far on validation.

    Returns:
        "test" and "personal", "unseen" if there are unseen clients, "by_type" and "subgroups" if the test has such
        scores, "confusion" in the last round and the best ones so far if each example has one of a few classes, and
        "alarms" if the tested model raises one. There is none for clients' own models: a client with few classes may
        well predict only one. Scores by entity type, by subgroup and by class are of the central test set only, because
        they say much about single examples.
    """
    due, run = experiment.config.evaluate, experiment.run
    last = last or result.number + 1 == run.rounds
    federation, model = experiment.federation, experiment.model
    clients = early_stopping.evaluated_clients(experiment.config, engine.clients())

    forward = experiment.pace.graphs.forward if experiment.pace.graphs else logits_and_losses

    def jobs() -> Iterator[Job]:
        return _jobs(experiment, result, clients)

    def score_own(examples: Examples | NewClasses) -> dict[str, float]:
        # There is no single model: average the scores of the clients' own models on the central test set.
        # Remote clients do not hold that set, so then there are no scores.
        scored = [scores for _, scores in engine.evaluate(jobs(), examples)] if _may_report(experiment) else []
        return _mean(scored) if scored else {}

    def score_shared(examples: Examples | NewClasses) -> dict[str, float]:
        tested_model = model
        if isinstance(examples, NewClasses):
            tested_model, examples = model.for_classes(examples.classes), examples.examples
        return evaluate(tested_model, result.server.params, examples, experiment.evaluator, forward=forward).scores

    test: dict[str, float] | None = None
    more: Row = {}
    if due.every and (last or (result.number + 1) % due.every == 0):
        if has_own_models(run, *make_job(run, model, result.server, result.number, clients[0]), result.server):
            scores, score = score_own(federation.test), score_own
        elif experiment.make_engine is not None:
            tester = experiment.tester or engine
            [(_, scores)] = tester.evaluate(_jobs(experiment, result, clients[:1]), federation.test)
        else:
            confused = _confused_classes(federation.task) if last or best else 0
            tested = evaluate(model, result.server.params, federation.test, experiment.evaluator, confused, forward)
            if tested.confusion:
                more["confusion"] = {"classes": list(federation.task.classes), "counts": tested.confusion}
            scores, score = tested.scores, score_shared
            if raised := check_test(result.number, tested, federation.task.classes):
                more["alarms"] = {alarm.kind: alarm.text for alarm in raised}
        test = without_types(scores) or None
        if federation.task.new and test:
            test |= base_to_new(experiment.evaluator.primary.name, test, score(federation.task.new))
        if types := by_type(scores):
            more["by_type"] = types
        if experiment.subgroups and test:
            more["subgroups"] = score_groups(
                experiment.subgroups, federation.test, experiment.evaluator.primary, due.subgroup_min or SMALL, score
            )
    personal: dict[str, dict[str, float]] | None = None
    if due.personal_every and _may_report(experiment) and (last or (result.number + 1) % due.personal_every == 0):
        personal = _by_metric(engine.evaluate(jobs()))
        if federation.unseen:
            more["unseen"] = _by_metric(_unseen_scores(experiment, engine, result))
    return {"test": test, "personal": personal, **more}


def _unseen_scores(
    experiment: Experiment, engine: Engine, result: RoundResult
) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield `(client, scores)` of clients that take no part, on their own test sets."""
    federation, epochs = experiment.federation, experiment.config.evaluate.unseen_epochs
    unseen = early_stopping.evaluated_clients(experiment.config, federation.unseen)
    if experiment.run.method.pool:
        # There is one model, and the client with the pooled data holds it.
        for client in unseen:
            scored = engine.evaluate(_jobs(experiment, result, list(engine.clients())), federation[client].test)
            yield from ((client, scores) for _, scores in scored)
        return
    # They have no state, so personal parameters have their initial values before the epochs of their own.
    yield from engine.evaluate(replace(job, personal_epochs=epochs) for job in _jobs(experiment, result, unseen))


def _confused_classes(task: Task) -> int:
    """Return the number of classes of a confusion matrix; 0 if examples have other targets, or it would be large."""
    return len(task.classes) if task.kind.one_class and len(task.classes) <= MAX_CONFUSED else 0


def _by_metric(scored: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return clients' scores by metric and client, without those of single entity types."""
    found: dict[str, dict[str, float]] = {}
    for client, scores in scored:
        for metric, value in without_types(scores).items():
            found.setdefault(metric, {})[client] = value
    return found


def base_to_new(metric: str, base: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    """Return the score on classes that no client trained on, and its harmonic mean with the one on the others.

    Args:
        metric: The metric.
        base: The scores on the classes of training.
        new: The scores on the new classes.
    """
    if metric not in base or metric not in new:
        return {}
    total = base[metric] + new[metric]
    mean = 2 * base[metric] * new[metric] / total if total else 0.0
    return {f"new_{metric}": new[metric], HARMONIC_MEAN: mean}


def _may_report(experiment: Experiment) -> bool:
    """Return whether clients may report the scores of their own models.

    They may not if the privacy guarantee covers those models or the clients' test sets.
    """
    return experiment.guard is None or not experiment.guard.withholds_own_scores


def has_own_models(run: Run, job: Job, plan: Plan, server: Server) -> bool:
    """Return whether clients have models of their own: private parameters, adaptation, or a personalized download."""
    personalized = any(value is not server.params[name] for name, value in job.params.items())
    return bool(plan.keep) or run.method.adapt is not None or personalized


def _mean(scores: list[dict[str, float]]) -> dict[str, float]:
    """Average the metrics that all clients have. A client lacks a metric if its model's output is not finite."""
    shared = [metric for metric in scores[0] if all(metric in client_scores for client_scores in scores)]
    return {metric: sum(client_scores[metric] for client_scores in scores) / len(scores) for metric in shared}


def _outcome(experiment: Experiment, result: RoundResult, seconds: float) -> Row:
    return {
        "round": result.number,
        "seconds": round(seconds, 4),
        "lr": experiment.run.lr(result.number),
        "cohort": list(result.cohort),
        "population": result.population,
        "lost": {lost.client: lost.reason for lost in result.lost},
        "train_loss": result.loss,
        "bytes": {"up": sum(result.traffic.up.values()), "down": sum(result.traffic.down.values())},
        "up": dict(result.traffic.up),
        "down": dict(result.traffic.down),
        "drift": result.drift,
        **({} if result.padding is None else {"padding": round(result.padding, 4)}),
        **({"secure": cast(SecureSum, dict(result.secure))} if result.secure else {}),
    }


def _losses(experiment: Experiment, result: RoundResult) -> Row:
    """Report the clients' training losses if the sampling rule uses them, so that a resumed run draws the same."""
    return {"losses": dict(result.losses)} if experiment.run.sampling.uses_losses else {}


def _spending(experiment: Experiment, result: RoundResult, signal: Mapping[str, float]) -> Row:
    """Charge the round and report the privacy spent so far. The plan depends on `signal`, so it is recorded too."""
    guard = experiment.guard
    if guard is None:
        return {}
    guard.charge(result.number, result.cohort, signal, result.population)
    spent = guard.spent()
    finite = spent is not None and math.isfinite(spent)
    return {"privacy": {"epsilon": spent if finite else None, "delta": guard.privacy.delta, "signal": dict(signal)}}


def _rejections(experiment: Experiment, result: RoundResult) -> Row:
    """Report refused, clipped and skipped updates and alarms. Most rounds have none."""
    wanted = experiment.run.cohort_size(result.population)
    events: Row = {
        "refused": {lost.client: lost.reason for lost in result.refused},
        "bounded": {client: result.norms[client] for client in sorted(result.bounded)},
        "skipped": result.skipped is not None,
        "alarms": {alarm.kind: alarm.text for alarm in check_round(result, wanted)},
    }
    return cast(Row, {key: value for key, value in events.items() if value})


def _choices(experiment: Experiment, result: RoundResult, summaries: deque[RoundSummary]) -> Row:
    """If clients choose their layers or agree on them: report the choices, the scores behind them, and alarms."""
    rules = experiment.run.method.client_rules
    if not any(overrides(rule, "narrow") or isinstance(rule, LayerVote) for rule in rules):
        return {}
    summary = summarize(result, experiment.model)
    summaries.append(summary)
    return {
        "chosen": {client: sorted(layers) for client, layers in summary.sent.items()},
        "scores": {client: dict(scores) for client, scores in summary.scores.items()},
        "alarms": {alarm.kind: alarm.text for alarm in check_window(list(summaries), layer_tags(experiment.model))},
    }


def restore_history(experiment: Experiment, folder: Path) -> History:
    """Rebuild the history from the rows, so that a resumed run raises the same alarms and makes the same decisions."""
    history = History()
    for row in run_folder.read_rows(folder):
        history.add(experiment, row["round"] + 1, row)
        if "chosen" in row:
            sent = {client: frozenset(layers) for client, layers in row["chosen"].items()}
            history.summaries.append(RoundSummary(row["round"], sent, row["scores"]))
    return history


def stages(experiment: Experiment) -> list[dict[str, Any]]:
    """Return the first client's plan over the run. Consecutive rounds with the same plan form one stage."""
    run, model, client = experiment.run, experiment.model, experiment.federation.clients[0]
    stage_plans: list[tuple[Plan, dict[str, Any]]] = []
    for number in range(run.rounds):
        plan = plan_for(run.method.plan, model, RoundInfo(number, run.rounds, client))
        if stage_plans and stage_plans[-1][0] == plan:
            stage_plans[-1][1]["last"] = number
        else:
            stage_plans.append(
                (plan, {"first": number, "last": number, "client": client, "rows": plan_rows(model, plan)})
            )
    return [row for _, row in stage_plans]


def plan_rows(model: Model, plan: Plan) -> list[dict[str, Any]]:
    """Return one row per parameter: name, layer, role, size, and whether it trains, goes up or down, or is kept."""
    rows = []
    for name, value in model.initial.items():
        layer, role = layer_tag(model.tags[name]), role_tag(model.tags[name])
        does = {"trains": plan.train, "up": plan.up, "down": plan.down, "keep": plan.keep}
        size = {"parameters": value.numel(), "bytes": value.numel() * value.element_size()}
        rows.append({"name": name, "layer": layer, "role": role, **size, **{k: name in v for k, v in does.items()}})
    return rows
