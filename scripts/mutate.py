"""Break every method on purpose, one small mutant at a time, and see whether the tests that hold it notice.

A mutant that all tests pass is a survivor: either a test is missing, or the mutant computes the same, and then
EQUIVALENT says why. Exit status 1 if there is a survivor without a reason, or a reason without a survivor.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from inspect import Parameter, signature
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHODS = ROOT / "src" / "partita" / "methods"

# Every method is held by tests/methods/test_<file>.py and by its line of the conformance test; some by more than that.
CONFORMANCE = "tests/test_conformance.py::test_every_method_and_supported_composition_conforms"
LAWS = ("tests/test_theorems.py", "tests/test_reductions.py")
MORE_TESTS: dict[str, tuple[str, ...]] = {
    "centralized": LAWS,
    "fedavg": LAWS,
    "fedfrozen": (*LAWS, "tests/methods/test_disagreement.py"),
    "fedprox": LAWS,
    "local_only": LAWS,
}

# Why no test could notice. Lines are named by what they say, because their numbers change.
Spot = tuple[str, str, str]  # (file, line, change)
EQUIVALENT: dict[Spot, str] = {
    (
        "fedfrozen",
        "for shape in sorted(shapes, key=tuple):",
        "sorted(...) without key=tuple",
    ): "a torch.Size is a tuple and sorts as one",
    (
        "fedprox",
        "held = sorted(ctx.plan.train & ctx.plan.down)",
        "ctx.plan.train & ctx.plan.down -> ctx.plan.down",
    ): "what came down and does not train is still at its anchor, so its square is zero",
    ("scaffold", "delta.add(update.delta, 1.0)", "1.0 -> 2.0"): "a mean with equal weights, whatever they are",
    (
        "fedtp",
        "total = sum(pulled.weight.values()) or 1.0",
        "1.0 -> 2.0",
    ): "only where all weights are zero, and then zero is divided by it",
}


# ---- making mutants


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    text: str  # the line that it changes
    change: str  # "before -> after"
    source: str  # of the whole file

    @property
    def spot(self) -> Spot:
        return self.file, self.text, self.change


SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
LEFT_ALONE = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitOr, ast.BitAnd)
RIGHT_ALONE = (ast.Add, ast.Mult, ast.BitOr, ast.BitAnd)
COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.GtE, ast.LtE),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}


def mutants(file: str, source: str, scope: Mapping[str, object]) -> Iterator[Mutant]:
    """All mutants of a source; the scope is what its names mean."""
    for node in _computing(ast.parse(source)):
        for other in _instead(node, scope):
            text = source.splitlines()[node.lineno - 1].strip()
            yield Mutant(file, node.lineno, text, _change(node, other), _spliced(source, node, other))


def _change(node: ast.AST, other: ast.AST) -> str:
    if isinstance(node, ast.Call) and isinstance(other, ast.Call):
        [gone] = [keyword for keyword in node.keywords if keyword not in other.keywords]
        return f"{ast.unparse(node.func)}(...) without {ast.unparse(gone)}"
    return f"{ast.unparse(node)} -> {ast.unparse(other)}"


def _computing(node: ast.AST) -> Iterator[ast.expr | ast.AugAssign]:
    """What a result rests on: not annotations, defaults and decorators, nor what is there to raise an error."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
        parts = node.orelse
    elif isinstance(node, ast.FunctionDef):
        parts = node.body
    elif isinstance(node, ast.ClassDef):
        parts = [part for part in node.body if not isinstance(part, ast.AnnAssign)]
    elif isinstance(node, ast.AnnAssign):
        parts = [node.value] if node.value else []
    elif isinstance(node, ast.Lambda):
        parts = [node.body]
    if isinstance(node, ast.expr | ast.AugAssign):
        yield node
    for part in parts:
        yield from _computing(part)


def _instead(node: ast.expr | ast.AugAssign, scope: Mapping[str, object]) -> Iterator[ast.expr | ast.AugAssign]:
    match node:
        case ast.BinOp(op=ast.Div(), right=ast.Constant(value=str()) | ast.JoinedStr()):
            pass  # a step of a key's path: any other word names a stream of draws as good
        case ast.BinOp(left, op, right):
            if swapped := SWAPPED.get(type(op)):
                yield ast.BinOp(left, swapped(), right)
            if isinstance(op, LEFT_ALONE):
                yield left
            if isinstance(op, RIGHT_ALONE) and ast.dump(left) != ast.dump(right):
                yield right
        case ast.AugAssign(target, op, value) if swapped := SWAPPED.get(type(op)):
            yield ast.AugAssign(target, swapped(), value)
        case ast.UnaryOp(ast.USub() | ast.Not(), operand):
            yield operand
        case ast.BoolOp(op, values):
            for index in range(len(values)):
                rest = values[:index] + values[index + 1 :]
                yield ast.BoolOp(op, rest) if len(rest) > 1 else rest[0]
        case ast.Compare(left, ops, comparators):
            for index, old in enumerate(ops):
                for new in COMPARED.get(type(old), ()):
                    yield ast.Compare(left, [*ops[:index], new(), *ops[index + 1 :]], comparators)
        case ast.Call(func, positional, keywords):
            for index, keyword in enumerate(keywords):
                if _may_go(func, keyword, scope):
                    yield ast.Call(func, positional, keywords[:index] + keywords[index + 1 :])
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            yield ast.Constant(number + 1)


def _may_go(func: ast.expr, keyword: ast.keyword, scope: Mapping[str, object]) -> bool:
    """Whether the function can do without the keyword: a call that only raises would prove nothing."""
    if keyword.arg in (None, "strict"):  # zip(strict=True) guards against what does not happen
        return False
    try:
        parameters = signature(_meaning(func, scope)).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # not known before it runs, or written in C
        return True
    return keyword.arg not in parameters or parameters[keyword.arg].default is not Parameter.empty


def _meaning(func: ast.expr, scope: Mapping[str, object]) -> object:
    if isinstance(func, ast.Name):
        return scope.get(func.id, getattr(builtins, func.id, None))
    return getattr(_meaning(func.value, scope), func.attr, None) if isinstance(func, ast.Attribute) else None


def _spliced(source: str, node: ast.expr | ast.AugAssign, other: ast.expr | ast.AugAssign) -> str:
    """The source with one node written anew; columns are counted in bytes."""
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    new = ast.unparse(other) if isinstance(other, ast.AugAssign) else f"({ast.unparse(other)})"
    parts = [*lines[:first], lines[first][: node.col_offset], new.encode(), lines[last][node.end_col_offset :]]
    return b"".join([*parts, *lines[last + 1 :]]).decode()


# ---- trying them


@dataclass(frozen=True)
class Trial:
    """One run of the tests of a file, with this as its source."""

    file: str
    source: str
    tests: tuple[str, ...]
    limit: float = float("inf")  # seconds
    mutant: Mutant | None = None


@dataclass(frozen=True)
class Outcome:
    trial: Trial
    passed: bool
    seconds: float
    said: str


def preload() -> None:
    """Import once what every trial needs. Nothing may compute here: torch's autograd does not survive a fork."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch

    import partita.conformance  # noqa: F401

    importlib.import_module("sympy")  # torch would load it in the first vmap, which takes half a second
    torch.set_num_threads(1)


def attempt(trial: Trial, folder: Path) -> None:
    """In a process of its own, which ends with pytest's exit status."""
    import pytest

    log = os.open(folder / "log", os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Failing examples of a mutant must not be kept for the real thing.
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    install(trial.file, trial.source)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no test here needs one, and each takes time to load
    plain = ("-x", "-q", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}")
    sys.exit(pytest.main([*plain, *trial.tests]))


def install(file: str, source: str) -> None:
    """Let `partita.methods.<file>` be this source, for all who import it from now on."""
    import partita.methods as package

    for name in [name for name in sys.modules if name.startswith("partita.methods.")]:
        delattr(package, name.removeprefix("partita.methods."))
        del sys.modules[name]
    path = METHODS / f"{file}.py"
    spec = importlib.util.spec_from_file_location(f"partita.methods.{file}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    setattr(package, file, module)
    exec(compile(source, path, "exec"), module.__dict__)


def outcomes(trials: Sequence[Trial], jobs: int) -> Iterator[Outcome]:
    """Each as it ends. One that runs past its limit is stopped and has not passed."""
    fork = multiprocessing.get_context("fork")
    waiting, running = deque(enumerate(trials)), dict[int, tuple[ForkProcess, Trial, float, Path]]()
    with tempfile.TemporaryDirectory(prefix="partita-mutate-") as name:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, trial = waiting.popleft()
                folder = Path(name) / str(number)
                folder.mkdir()
                (folder / "log").touch()
                process = fork.Process(target=attempt, args=(trial, folder), daemon=True)
                process.start()
                running[process.sentinel] = process, trial, time.monotonic(), folder
            wait(running, timeout=0.5)
            for sentinel, (process, trial, since, folder) in list(running.items()):
                seconds = time.monotonic() - since
                if process.exitcode is None and seconds < trial.limit:
                    continue
                stopped = process.exitcode is None
                process.kill()
                process.join()
                del running[sentinel]
                said = (folder / "log").read_text(errors="replace")
                if not stopped and (process.exitcode or 0) < 0:
                    sys.exit(f"{said}\nthe tests of {trial.file} died by signal {-(process.exitcode or 0)}")
                yield Outcome(trial, process.exitcode == 0, seconds, said)


# ---- what came out


@dataclass(frozen=True)
class Row:
    method: str
    mutants: int
    killed: int
    equivalent: int
    survived: int


@dataclass(frozen=True)
class Verdict:
    made: Mapping[str, int]  # by file, the number of its mutants
    passed: Sequence[Mutant]
    reasons: Mapping[Spot, str]

    def survivors(self) -> list[Mutant]:
        return [mutant for mutant in self.passed if mutant.spot not in self.reasons]

    def rows(self) -> list[Row]:
        passed = Counter(mutant.file for mutant in self.passed)
        survived = Counter(mutant.file for mutant in self.survivors())
        return [
            Row(file, made, made - passed[file], passed[file] - survived[file], survived[file])
            for file, made in self.made.items()
        ]

    def total(self) -> Row:
        rows = self.rows()
        return Row("all", *(sum(getattr(row, each.name) for row in rows) for each in fields(Row)[1:]))

    def empty(self) -> list[str]:
        return [file for file, made in self.made.items() if not made]

    def problems(self) -> list[str]:
        found = [f"{one.file}.py:{one.line}: {one.change}   in: {one.text}" for one in self.survivors()]
        for row in self.rows():
            if row.mutants and not row.killed:
                found.append(f"{row.method}.py: not one of its mutants was killed; is it tested at all?")
        alive = {mutant.spot for mutant in self.passed}
        for file, text, change in self.reasons:
            if file in self.made and (file, text, change) not in alive:
                found.append(f"{file}.py: EQUIVALENT explains {change}   in: {text}   but no such mutant survives")
        return found


def markdown(verdict: Verdict) -> str:
    names = [each.name for each in fields(Row)]
    lines = [names, ["---", *["--:"] * (len(names) - 1)]]
    lines += [[str(value) for value in astuple(row)] for row in (*verdict.rows(), verdict.total())]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    if verdict.empty():
        text += f"\n\nNothing to mutate in: {', '.join(verdict.empty())}."
    if problems := verdict.problems():
        text += "\n\n" + "\n".join(f"- `{problem}`" for problem in problems)
    return text


def show(verdict: Verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_footer=True)
    for each in fields(Row):
        number = each.name != "method"
        table.add_column(each.name, str(getattr(verdict.total(), each.name)), justify="right" if number else "left")
    for row in verdict.rows():
        table.add_row(*map(str, astuple(row)))
    Console().print(table)
    if verdict.empty():
        print(f"Nothing to mutate in: {', '.join(verdict.empty())}.")
    for problem in verdict.problems():
        print(problem)


# ---- the whole


def tests_of(file: str) -> tuple[str, ...]:
    from partita.methods import INDEX

    own = f"tests/methods/test_{file}.py"
    names = [name for name, place in INDEX.items() if place.startswith(f"partita.methods.{file}:")]
    conform = [f"{CONFORMANCE}[{name}]" for name in names]
    return (*([own] if (ROOT / own).exists() else []), *MORE_TESTS.get(file, ()), *conform)


def follow(found: Iterable[Outcome], count: int, what: str) -> Iterator[Outcome]:
    """With a progress bar if someone is looking. It has no thread of its own, which a fork would lose."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=count)
        for each in found:
            progress.update(bar, advance=1, refresh=True)
            yield each


def main() -> None:
    parser = argparse.ArgumentParser(description="Break every method on purpose and see whether its tests notice.")
    parser.add_argument("--only", default="", help="files to look at, as in scaffold,fedprox; without it, all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--markdown", action="store_true", help="write plain markdown")
    asked = parser.parse_args()

    known = sorted(path.stem for path in METHODS.glob("*.py") if path.stem != "__init__")
    files = [name.strip() for name in asked.only.split(",")] if asked.only else known
    if unknown := sorted(set(files) - set(known)):
        sys.exit(f"there is no method file '{unknown[0]}'; there are: {', '.join(known)}")
    os.chdir(ROOT)
    preload()

    sources = {file: (METHODS / f"{file}.py").read_text(encoding="utf-8") for file in files}
    scopes = {file: vars(importlib.import_module(f"partita.methods.{file}")) for file in files}
    made = {file: list(mutants(file, sources[file], scopes[file])) for file in files}
    tests = {file: tests_of(file) for file in files}
    for file in files:
        if not tests[file]:
            sys.exit(f"no test holds {file}.py; write tests/methods/test_{file}.py")

    plain = [Trial(file, sources[file], tests[file]) for file in files if made[file]]
    limits = {}
    for each in follow(outcomes(plain, asked.jobs), len(plain), "unbroken"):
        if not each.passed:
            sys.exit(f"{each.said}\nthe tests of {each.trial.file} fail without any mutation; mend that first")
        limits[each.trial.file] = 10 + 5 * each.seconds

    trials = [Trial(file, mutant.source, tests[file], limits[file], mutant) for file in files for mutant in made[file]]
    tried = follow(outcomes(trials, asked.jobs), len(trials), "mutants")
    passed = [each.trial.mutant for each in tried if each.passed and each.trial.mutant]
    verdict = Verdict({file: len(made[file]) for file in files}, passed, EQUIVALENT)
    if asked.markdown:
        print(markdown(verdict))
    else:
        show(verdict)
    sys.exit(bool(verdict.problems()))


if __name__ == "__main__":
    main()
