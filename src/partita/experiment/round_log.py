"""What is written down of an experiment: its plan beforehand, and a row of each round."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from partita.core.client import Job
from partita.core.method import ClientRule, Server
from partita.core.model import Model, layer_tag, layer_tags, role_tag
from partita.core.plan import Plan, RoundInfo, plan_for
from partita.core.rounds import Engine, RoundResult, make_job
from partita.core.settings import Run
from partita.evaluation import score
from partita.experiment import run_folder
from partita.experiment.alarms import LONG_WINDOW, RoundSummary, check_round, check_window, summarize
from partita.experiment.builder import Experiment
from partita.privacy.disclosure import withhold

Row = dict[str, Any]


def log_round(
    experiment: Experiment,
    engine: Engine,
    each: RoundResult,
    seconds: float,
    signal: Mapping[str, float],
    sights: deque[RoundSummary],
) -> Row:
    """A round's row. `signal` is what the server said before it, and `sights` are of the rounds before it."""
    row = {
        **_happened(experiment, each, seconds),
        **evaluate_round(experiment, engine, each),
        **_spending(experiment, each, signal),
        **_distrusted(each),
        **_choices(experiment, each, sights),
    }
    return withhold(row, experiment.guard.privacy_config.unit) if experiment.guard else row


def evaluate_round(experiment: Experiment, engine: Engine, each: RoundResult) -> Row:
    """The model on the central test set, and clients' models on their own test parts, when they are due."""
    due, run, last = experiment.config.evaluate, experiment.run, each.number + 1 == experiment.run.rounds
    federation, model = experiment.federation, experiment.model
    present = engine.clients()
    clients = sorted((run.key / "evaluate").sample(present, min(due.max_clients, len(present))))

    def jobs() -> Iterator[Job]:
        return (make_job(run, model, each.server, each.number, client)[0] for client in clients)

    test: dict[str, float] | None = None
    if last or (each.number + 1) % due.every == 0:
        if _personal(run, *make_job(run, model, each.server, each.number, clients[0]), each.server):
            # No single model exists: the mean over clients of how each one's own model does.
            # There is no such mean where clients are elsewhere, since none holds the central test set.
            found = (
                [scores for _, scores in engine.evaluate(jobs(), federation.test)] if _may_report(experiment) else []
            )
            test = _mean(found) if found else None
        else:
            test = score(model, each.server.params, federation.test, experiment.evaluator)
    personal: dict[str, dict[str, float]] | None = None
    if due.personal_every and _may_report(experiment) and (last or (each.number + 1) % due.personal_every == 0):
        personal = {}
        for client, scores in engine.evaluate(jobs()):
            for metric, value in scores.items():
                personal.setdefault(metric, {})[client] = value
    return {"test": test, "personal": personal}


def _may_report(experiment: Experiment) -> bool:
    """Whether clients may tell how their own models do: not if those, or their test parts, are to stay hidden."""
    guard = experiment.guard
    return guard is None or (guard.privacy_config.unit == "example" and experiment.run.method.adapt is None)


def _personal(run: Run, job: Job, plan: Plan, server: Server) -> bool:
    """Whether a client keeps something, adapts before it is tested, or is sent what was made for it alone."""
    made = any(value is not server.params[name] for name, value in job.params.items())
    return bool(plan.keep) or run.method.adapt is not None or made


def _mean(scores: list[dict[str, float]]) -> dict[str, float]:
    """Of the metrics that all have: one may be left out where a model's answers are no numbers."""
    shared = [metric for metric in scores[0] if all(metric in each for each in scores)]
    return {metric: sum(each[metric] for each in scores) / len(scores) for metric in shared}


def _happened(experiment: Experiment, each: RoundResult, seconds: float) -> Row:
    return {
        "round": each.number,
        "seconds": round(seconds, 4),
        "lr": experiment.run.rate(each.number),
        "cohort": list(each.cohort),
        "population": each.population,
        "lost": {lost.client: lost.reason for lost in each.lost},
        "train_loss": each.loss,
        "bytes": {"up": sum(each.traffic.up.values()), "down": sum(each.traffic.down.values())},
        "up": dict(each.traffic.up),
        "down": dict(each.traffic.down),
        "drift": each.drift,
    }


def _spending(experiment: Experiment, each: RoundResult, signal: Mapping[str, float]) -> Row:
    """What the run has cost in privacy up to this round; the signal is kept since the plan depended on it."""
    guard = experiment.guard
    if guard is None:
        return {}
    guard.charge(each.number, each.cohort, signal, each.population)
    spent = guard.spent()
    finite = spent is not None and math.isfinite(spent)
    return {
        "privacy": {"epsilon": spent if finite else None, "delta": guard.privacy_config.delta, "signal": dict(signal)}
    }


def _distrusted(each: RoundResult) -> Row:
    """What the server did not take as it came; most rounds have nothing of it."""
    found: Row = {
        "refused": {lost.client: lost.reason for lost in each.refused},
        "bounded": {client: each.norms[client] for client in sorted(each.bounded)},
        "skipped": each.skipped is not None,
        "alarms": {alarm.kind: alarm.text for alarm in check_round(each)},
    }
    return {key: value for key, value in found.items() if value}


def _choices(experiment: Experiment, each: RoundResult, sights: deque[RoundSummary]) -> Row:
    """Where clients choose their layers: which, by what scores, and the signs that this has lost its point."""
    if all(type(rule).narrow is ClientRule.narrow for rule in experiment.run.method.client_rules):
        return {}
    now = summarize(each, experiment.model)
    sights.append(now)
    return {
        "chosen": {client: sorted(layers) for client, layers in now.sent.items()},
        "scores": {client: dict(scores) for client, scores in now.scores.items()},
        "alarms": {
            alarm.kind: alarm.text
            for alarm in (*check_window(list(sights), layer_tags(experiment.model)), *check_round(each))
        },
    }


def restore_summaries(folder: Path) -> deque[RoundSummary]:
    """Those of the last rounds recorded, so that a run that was stopped raises the alarms it would have raised."""
    found = deque[RoundSummary](maxlen=LONG_WINDOW)
    for row in run_folder.read_rows(folder):
        if "chosen" in row:
            sent = {client: frozenset(layers) for client, layers in row["chosen"].items()}
            found.append(RoundSummary(row["round"], sent, row["scores"]))
    return found


def stages(experiment: Experiment) -> list[Row]:
    """The first client's plan; rounds with the same plan are one stage."""
    run, model, client = experiment.run, experiment.model, experiment.federation.clients[0]
    found: list[tuple[Plan, Row]] = []
    for number in range(run.rounds):
        plan = plan_for(run.method.plan, model, RoundInfo(number, run.rounds, client))
        if found and found[-1][0] == plan:
            found[-1][1]["last"] = number
        else:
            found.append((plan, {"first": number, "last": number, "client": client, "rows": plan_rows(model, plan)}))
    return [row for _, row in found]


def plan_rows(model: Model, plan: Plan) -> list[Row]:
    """A plan by parameter."""
    rows = []
    for name, value in model.initial.items():
        layer, role = layer_tag(model.tags[name]), role_tag(model.tags[name])
        does = {"trains": plan.train, "up": plan.up, "down": plan.down, "keep": plan.keep}
        size = {"parameters": value.numel(), "bytes": value.numel() * value.element_size()}
        rows.append({"name": name, "layer": layer, "role": role, **size, **{k: name in v for k, v in does.items()}})
    return rows
