"""Extend a run to more rounds. The result is that of a run planned for all of them, or the extension is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from partita.core.method import Method
from partita.core.plan import RoundInfo, plan_for
from partita.core.rng import Key
from partita.core.server_rule import ServerRule
from partita.core.settings import Run
from partita.experiment import run_folder
from partita.experiment.builder import build_method, build_run
from partita.experiment.experiment import Experiment
from partita.record import file_names


class ExtensionError(ValueError):
    """With more rounds, the rounds that are done would have been different."""


def check(experiment: Experiment, planned: int, folder: Path) -> None:
    """Check that the rounds that are done are also the first rounds of the longer run.

    Args:
        experiment: The longer run.
        planned: The number of rounds so far.
        folder: The run folder.

    Raises:
        ExtensionError: If they are not. Nothing has been changed.
    """
    config, after = experiment.config, experiment.run
    shorter = replace(config, rounds=planned)
    before, guard = build_run(
        shorter, build_method(config.method), experiment.model, experiment.federation, Key(config.seed), after.secret
    )
    noises = [each.privacy.noise if each else None for each in (guard, experiment.guard)]
    with run_folder.expect_format(folder / file_names.ROWS):
        rows = list(islice(run_folder.read_rows(folder), run_folder.saved_rounds(folder)))
        reason = (
            _other_noise(noises, before, after)
            or _other_rates(before, after, len(rows))
            or (_other_rules(after.method) if rows else None)
            or _other_plans(before, after, experiment, rows)
        )
    if reason:
        raise ExtensionError(
            f"{folder} cannot be extended from {planned} to {after.rounds} rounds: {reason}; start a new run: "
            f"partita run --config {folder / file_names.CONFIG} --set rounds={after.rounds} --out NEW_FOLDER"
        )


def _other_noise(noises: Sequence[float | None], before: Run, after: Run) -> str | None:
    if noises[0] != noises[1]:
        return (
            f"privacy.epsilon needs noise {noises[1]:g} for {after.rounds} rounds, and the run has drawn noise "
            f"{noises[0]:g} for {before.rounds}"
        )
    return None


def _other_rates(before: Run, after: Run, done: int) -> str | None:
    for number in range(done):
        if before.lr(number) != after.lr(number):
            return (
                f"with training.schedule '{before.training.rates.kind}', the learning rate of round {number} was "
                f"{before.lr(number):g} and would have been {after.lr(number):g}"
            )
    return None


def _other_rules(method: Method) -> str | None:
    """Rules run at the clients and cannot be compared afterwards, so their code must not read the number of rounds."""
    hooks: list[tuple[str, Any]] = [("Method.shape", method.shape)]
    for rule in method.client_rules:
        hooks += [
            (f"{type(rule).__name__}.{name}", getattr(type(rule), name)) for name in ("narrow", "start", "finish")
        ]
    for name, hook in hooks:
        if reads_total(hook):
            return f"{method.name}: {name} reads RoundInfo.rounds"
    return None


def _other_plans(before: Run, after: Run, experiment: Experiment, rows: Sequence[Mapping[str, Any]]) -> str | None:
    plan = after.method.plan
    signals = type(after.method.server_rule).signal is not ServerRule.signal
    if rows and signals and "privacy" not in rows[0] and reads_total(plan):
        return f"{after.method.name}: its plan depends on RoundInfo.rounds and on signals that were not recorded"
    for row in rows:
        signal = row["privacy"]["signal"] if "privacy" in row else {}
        for client in row["cohort"]:
            infos = [RoundInfo(row["round"], run.rounds, client, signal) for run in (before, after)]
            if plan_for(plan, experiment.model, infos[0]) != plan_for(plan, experiment.model, infos[1]):
                return f"{after.method.name}: the plan of round {row['round']} depends on the number of rounds"
    return None


def reads_total(function: Any) -> bool:
    """Return whether a function, or a function of the same package that it uses, reads an attribute `rounds`."""
    seen = set[int]()
    waiting = [function]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, partial):
            waiting += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, MethodType):
            waiting.append(each.__func__)
        elif isinstance(each, FunctionType):
            if "rounds" in _names_in(each.__code__):
                return True
            waiting += _used_by(each)
        elif isinstance(each, tuple | list):
            waiting += each
        elif not isinstance(each, type) and isinstance(getattr(type(each), "__call__", None), FunctionType):  # noqa: B004
            waiting.append(type(each).__call__)
    return False


def _used_by(function: FunctionType) -> Iterator[Any]:
    """Yield what a function has in its closure, and the functions of its own package that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is not bound yet
            continue
    package = function.__module__.partition(".")[0]
    for name in _names_in(function.__code__):
        other = function.__globals__.get(name)
        if isinstance(other, FunctionType) and other.__module__.partition(".")[0] == package:
            yield other


def _names_in(code: CodeType) -> set[str]:
    """Return the global names and attributes that code uses, including the code of functions inside it."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)
