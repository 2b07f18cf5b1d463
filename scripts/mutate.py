"""Break every method on purpose, one small mutant at a time, and see whether the tests that hold it notice.

A mutant that all tests pass is a survivor: either a test is missing, or the mutant computes the same, and then
EQUIVALENT says why. Exit status 1 if there is a survivor without a reason, or a reason without a survivor.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from mutants import Mutant, Spot, mutants
from trials import METHODS, ROOT, Outcome, Trial, outcomes, preload, tests_of

# Why no test could notice.
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
