"""Attack a recorded run, compare what is found with its privacy claim, and write the findings to its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from partita.core.client import client_params
from partita.core.data import Examples
from partita.core.dp_settings import PrivacyError
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job, rounds
from partita.core.server_rule import Server
from partita.core.update import Update
from partita.data.groups import by_example, row_groups
from partita.engines.secure import SecureEngine
from partita.engines.simulation import SimulationEngine
from partita.experiment import run_folder
from partita.experiment.base_digest import check_base
from partita.experiment.builder import build
from partita.experiment.config import load_recorded
from partita.experiment.experiment import Experiment
from partita.privacy.canaries import (
    CanaryPopulation,
    Eavesdropper,
    canary_losses,
    choose_canaries,
    first,
    gradient_cosines,
    losses_of,
)
from partita.privacy.membership import Array, best_guesses, confidence_of, likelihood_ratios, roc
from partita.record import file_names
from partita.storage import checkpoint
from partita.storage.client_store import DiskStore, MemoryStore

CLIENTS, EXAMPLES = 50, 500  # limits for the attacks on the finished run: clients, and examples per data set of each
DELTA = 1e-5  # delta of the bound on epsilon, if the run makes no privacy claim

Findings = dict[str, Any]


def audit(
    folder: Path, canaries: int = 0, shadows: int = 0, trust_code: bool = False, group: str | None = None
) -> Findings:
    """Attack the final model and an update of a run, and optionally its training.

    Args:
        folder: Folder of a finished run.
        canaries: Number of canaries. If not 0, training is repeated with them, which bounds epsilon from below.
        shadows: Number of additional training runs for likelihood ratios (LiRA). Needs canaries.
        trust_code: Run the user's own code that the folder holds, even if this user has not run it before.
        group: Column with the group of each row, such as a patient. Canaries are then whole groups. Default: as the
            run's own privacy unit.

    Returns:
        The findings, as written to `audit.json`.

    Raises:
        PrivacyError: If the run is not finished, or there is nothing to attack.
    """
    if run_folder.finished(folder) is None:
        raise PrivacyError(f"{folder} holds no finished run; finish it with 'partita resume {folder}'")
    if not canaries and (shadows or group):
        option = "--shadows" if shadows else "--group"
        raise PrivacyError(f"{option} needs canaries; set their number with --canaries")
    identity = run_folder.verify(folder)
    experiment = _with_groups(build(load_recorded(folder, trust_code)), group)
    if experiment.run.client_noise is None:
        # Attacks are on updates in clear. With secure aggregation, an attacker sees less.
        experiment = replace(experiment, run=replace(experiment.run, secure_aggregation=None))
    check_base(experiment, folder)
    experiment.model.to(experiment.device)
    guard, task = experiment.guard, experiment.federation.task
    if shadows and task.kind.outputs == "numbers":
        raise PrivacyError(
            f"{task.name} is a regression, and --shadows compares the probabilities of answers; leave out --shadows"
        )
    saved = checkpoint.newest(
        folder / file_names.CHECKPOINTS,
        identity,
        initial_server(experiment.run, experiment.model),
        experiment.device,
        experiment.initial_values,
    )
    if not saved.done:
        raise PrivacyError(f"{folder / file_names.CHECKPOINTS} holds no checkpoint, so there is no model to attack")
    attacks = _on_result(experiment, folder, saved)
    findings: Findings = {"claim": guard.about() if guard else None, "attacks": attacks, "bound": None}
    if group is not None:
        findings["group"] = group
    if canaries:
        findings |= _on_training(experiment, canaries, shadows, findings["attacks"])
    run_folder.write_json(folder / file_names.AUDIT, findings)
    return findings


def failures(findings: Findings) -> list[str]:
    """Return the findings that contradict the privacy claim, one sentence each."""
    claim, bound = findings["claim"] or {}, findings["bound"]
    planned = claim.get("planned")
    if findings.get("group") != claim.get("group") and "group" in findings:
        return []  # canaries were groups, and nothing was claimed about groups
    if not bound or planned is None or bound["epsilon"] <= planned:
        return []
    return [f"epsilon is at least {bound['epsilon']:.3g}, and {planned:.3g} was claimed"]


def _with_groups(experiment: Experiment, column: str | None) -> Experiment:
    """Return the experiment with the groups of a column. Nothing else changes, so the run is the same."""
    federation, guard = experiment.federation, experiment.guard
    if column is None or (guard is not None and guard.privacy.group == column):
        return experiment
    if federation.groups is not None:
        raise PrivacyError(f"the run has the groups of another column; leave --group {column} out")
    groups = by_example(federation.task, row_groups(federation.task, column))
    return replace(experiment, federation=replace(federation, groups=groups))


def _on_result(experiment: Experiment, folder: Path, saved: checkpoint.Checkpoint) -> Findings:
    """Membership inference: members are clients' training examples, non-members their validation and test examples."""
    run, model, federation = experiment.run, experiment.model, experiment.federation
    done, server = saved.done, saved.server
    store = MemoryStore(DiskStore(folder / file_names.CLIENTS, experiment.device, saved.states))
    engine = SimulationEngine(run, model, federation, device=experiment.device, store=store)
    clients = sorted((Key(0) / "audit").sample(federation.clients, min(CLIENTS, len(federation.clients))))
    by_loss: list[tuple[Array, Array]] = []
    by_update: list[tuple[Array, Array]] = []
    for client in clients:
        data = federation[client]
        job, _ = make_job(run, model, server, done - 1, client)
        outside: list[Examples] = [part for part in (data.validation, data.test) if len(part)]
        if not len(data.train) or not outside:
            continue
        _, params = client_params(run, model, job, store.load(client, done))
        by_loss.append(
            (
                -losses_of(model, params, data.train, EXAMPLES),
                np.concatenate([-losses_of(model, params, part, EXAMPLES) for part in outside]),
            )
        )
        for reply in engine.train([job]):
            if isinstance(reply, Update) and reply.delta:
                score = [
                    gradient_cosines(model, params, reply.delta, first(part, EXAMPLES))
                    for part in (data.train, *outside)
                ]
                by_update.append(
                    (score[0].double().numpy(), np.concatenate([part.double().numpy() for part in score[1:]]))
                )
    if not by_loss:
        raise PrivacyError(
            "no client has both training and held-out examples, so a membership attack has nothing to compare"
        )
    attacks = {"loss of the final model": _roc_over(by_loss)}
    if by_update and not _trusts_server(experiment):
        attacks["one more update"] = _roc_over(by_update)
    return attacks


def _roc_over(parts: list[tuple[Array, Array]]) -> Findings:
    inside, outside = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    return roc(inside, outside).about()


def _on_training(experiment: Experiment, count: int, shadows: int, attacks: Findings) -> Findings:
    """Retrain with canaries in the same rounds and cohorts as the run, so that its guarantee applies here too."""
    key, task, guard = experiment.run.key / "audit", experiment.federation.task, experiment.guard
    classes = len(task.classes) if task.kind.one_class else 0
    canaries = choose_canaries(
        experiment.federation, count, key, classes, by_group=experiment.federation.groups is not None
    )
    update_scores, losses = _train_with_canaries(
        experiment, CanaryPopulation(experiment.federation, canaries), not _trusts_server(experiment)
    )
    included = canaries.included
    delta = DELTA if guard is None else guard.privacy.delta
    assert delta is not None
    scores, bound = best_guesses(-losses[np.newaxis] if _trusts_server(experiment) else update_scores, included, delta)
    attacks = {**attacks, "canaries": roc(scores[included], scores[~included]).about()}
    if shadows:
        runs = []
        for number in range(shadows):
            redrawn = canaries.redraw(key / "shadow" / number)
            shadow = replace(experiment, run=replace(experiment.run, key=key / "shadow" / number))
            _, final = _train_with_canaries(shadow, CanaryPopulation(experiment.federation, redrawn), observe=False)
            runs.append((confidence_of(final), redrawn.included))
        ratios = likelihood_ratios(confidence_of(losses), *(np.stack(part) for part in zip(*runs, strict=True)))
        known = np.isfinite(ratios)
        attacks["shadow runs (LiRA)"] = roc(ratios[known & included], ratios[known & ~included]).about()
    return {"attacks": attacks, "bound": bound.about()}


def _train_with_canaries(
    experiment: Experiment, canary_population: CanaryPopulation, observe: bool = True
) -> tuple[Array, Array]:
    """Train with canaries. Returns the eavesdropper's scores and the final loss, both per canary."""
    run, model = experiment.run, experiment.model
    engine = SimulationEngine(
        run, model, canary_population, experiment.pace.block, experiment.device, availability=experiment.availability
    )
    eavesdropper = Eavesdropper(run, model, canary_population)
    server: Server | None = None
    carrier = SecureEngine(engine, run, model) if run.secure_aggregation else engine
    listeners = [eavesdropper] if observe else []
    for result in rounds(replace(run, drift=False), model, engine if observe else carrier, listeners=listeners):
        server = result.server
    assert server is not None
    return eavesdropper.scores(), canary_losses(model, {**model.initial, **server.params}, canary_population)


def _trusts_server(experiment: Experiment) -> bool:
    """Return whether the guarantee trusts the server: client-level privacy covers its output, not single updates."""
    return experiment.guard is not None and experiment.guard.privacy.unit == "client"
