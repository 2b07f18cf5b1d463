"""`partita check`: test a method, or an own task, split or model, and print every promise."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from partita.cli.options import Json
from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from partita.core.rng import Key
    from partita.data.task import Federation, Task
    from partita.testing.promises import Outcome

Kind = Literal["method", "data", "split", "model"]
# For each kind, the tables whose keys --set may set. The task of a model or split is that of [data].
TABLES: dict[str, tuple[str, ...]] = {
    "method": ("method",),
    "data": ("data",),
    "split": ("split", "data"),
    "model": ("model", "data"),
}
SMALL_TASK = {"name": "synthetic", "examples": 60, "test_examples": 12, "classes": 3, "size": 8, "domains": 3}
CLIENTS = 3  # of a split that must be told
VERDICTS = ("yes", "no", "not applicable", "not tested")
WIDTH = max(map(len, VERDICTS))


def check(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A method, a composition such as 'fedper+moon', or own code such as 'mine.py:fedmine'. "
            "Default: all built-in methods, one line each."
        ),
    ] = None,
    kind: Annotated[Kind, typer.Option(help="What the name refers to.")] = "method",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Set an option, e.g. --set method.mu=0.1. Repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Test the promises that a method must keep, by short runs on a small federation. Exits with 1 if one is broken.

    For own tasks, splits and models (--kind), it tests what the rest of partita relies on.

    This runs the code that the name refers to.
    """
    tables = _options(kind, changes or [])
    if name is None:
        _check_all(kind, changes, as_json)
        return
    from partita.experiment.config_code import anchored, custom_code_in
    from partita.experiment.trusted_code import trust

    trust(custom_code_in(anchored({kind: {"name": name}}, Path())))
    begun = time.perf_counter()
    about, outcomes = _method(name, tables["method"]) if kind == "method" else _own_code(kind, name, tables)
    seconds = time.perf_counter() - begun
    if as_json:
        shown = {"name": name, "kind": kind, "on": about, "seconds": round(seconds, 1)}
        print(json.dumps({**shown, "promises": [asdict(outcome) for outcome in outcomes]}, indent=1))
    else:
        for line in (f"{name}{f', on {about}' if about else ''}", *_lines(outcomes)):
            print(printable(line))
        print(printable(f"{name} {_summary(outcomes)} ({seconds:.1f} s)"))
    raise typer.Exit(int(_broken(outcomes)))


def _check_all(kind: Kind, changes: list[str] | None, as_json: bool) -> None:
    """Check all built-in methods with their default options, and print one line for each."""
    from partita.core.options import OptionError
    from partita.methods import INDEX

    if kind != "method" or changes:
        raise OptionError("--kind and --set are for one NAME; add it, or leave them out to check all built-in methods")
    rows: list[dict[str, Any]] = []
    for name in INDEX:
        begun = time.perf_counter()
        about, outcomes = _method(name, {})
        seconds = time.perf_counter() - begun
        counts = {verdict: sum(outcome.verdict == verdict for outcome in outcomes) for verdict in VERDICTS}
        broken = [outcome.name for outcome in outcomes if outcome.verdict == "no"]
        rows.append({"name": name, "on": about, "seconds": round(seconds, 1), **counts, "broken": broken})
        if not as_json:
            kept = f"{counts['yes']} kept, {counts['not applicable']} not applicable"
            found = f"BROKEN: {', '.join(broken)}" if broken else kept
            print(f"{name:<17} {found:<28} {seconds:5.1f} s  on {about}", flush=True)
    if as_json:
        print(json.dumps(rows, indent=1))
    raise typer.Exit(int(any(row["broken"] for row in rows)))


def _options(kind: Kind, changes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each table that the kind reads."""
    from partita.core.options import OptionError, format_value
    from partita.experiment.config import apply_override

    raw: dict[str, Any] = {}
    for change in changes:
        apply_override(raw, change)
    for table, values in raw.items():
        if table not in TABLES[kind] or not isinstance(values, dict):
            known = " or ".join(f"{each}.KEY=VALUE" for each in TABLES[kind])
            raise OptionError(f"--set sets {format_value(table)}, which this check does not read; write {known}")
    return {table: raw.get(table, {}) for table in TABLES[kind]}


def _method(name: str, options: dict[str, Any]) -> tuple[str, list[Outcome]]:
    from partita.methods import build
    from partita.testing.conformance import check_promises
    from partita.testing.federations import federation_for

    method = build(name, options)
    federation = federation_for(method)
    return federation.about, check_promises(method, federation.model, federation.population)


def _own_code(kind: Kind, name: str, tables: dict[str, dict[str, Any]]) -> tuple[str, list[Outcome]]:
    from partita import data, models
    from partita.testing.own_code import (
        MODEL_PROMISES,
        SPLIT_PROMISES,
        TASK_PROMISES,
        ModelTrial,
        SplitTrial,
        TaskTrial,
    )
    from partita.testing.promises import check_all

    if kind == "data":
        return "", list(check_all(TASK_PROMISES, TaskTrial(lambda key: data.load(name, key, **tables["data"]))))
    task = _task(tables["data"])
    if kind == "model":
        trial = ModelTrial(task, lambda key: models.build(name, task, key, **tables["model"]))
        return f"the task {task.name}", list(check_all(MODEL_PROMISES, trial))

    def split(key: Key) -> Federation:
        return data.split(task, name, key=key, validation=0.0, test=0.0, **_split_options(name, tables["split"]))

    return f"the task {task.name}", list(check_all(SPLIT_PROMISES, SplitTrial(split)))


def _task(table: dict[str, Any]) -> Task:
    from partita import data
    from partita.core.rng import Key

    table = table if "name" in table else {**SMALL_TASK, **table}
    return data.load(table["name"], Key(0), **{key: value for key, value in table.items() if key != "name"})


def _split_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a split. One that must be told the number of clients gets a few."""
    from partita.core.options import MISSING
    from partita.core.registry import options_by_name

    known = options_by_name("split", name)
    told = {"clients": CLIENTS} if "clients" in known and known["clients"].default is MISSING else {}
    return {**told, **given}


def _lines(outcomes: list[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        yield f"{outcome.verdict:<{WIDTH}}  {outcome.name}: {outcome.text}"
        if outcome.reason:
            yield f"{'':<{WIDTH}}  {'because ' if outcome.verdict != 'no' else '-> '}{outcome.reason}"


def _summary(outcomes: list[Outcome]) -> str:
    broken = [outcome.name for outcome in outcomes if outcome.verdict == "no"]
    return f"breaks {len(broken)} of {len(outcomes)} promises: {', '.join(broken)}" if broken else "keeps all promises"


def _broken(outcomes: list[Outcome]) -> bool:
    return any(outcome.verdict == "no" for outcome in outcomes)
