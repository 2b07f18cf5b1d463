"""Break the core, the privacy code and every method on purpose, one small mutant at a time: does a test notice?

A mutant that all tests pass is a survivor: either a test is missing, or the mutant computes the same. survivors.py says
which, and why. Exit status 1 if there is a survivor without a reason, or a reason without a survivor.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from coverage_by_test import Trace, tests_for
from kept import keep, key_of, recall
from mutants import Mutant, Spot, mutants
from mutation_tests import known, tests_of
from survivors import ANY, EQUIVALENT, UNCOVERED
from trials import PACKAGE, ROOT, Outcome, Trial, module_of, outcomes, preload


@dataclass(frozen=True)
class Row:
    file: str
    mutants: int
    killed: int
    equivalent: int
    uncovered: int  # survived, and survivors.py says why no test notices
    survived: int  # without a reason


@dataclass(frozen=True)
class Verdict:
    """`whole`: every mutant of these files was tried, so a reason that fits none of them is out of date."""

    files: Sequence[str]
    tried: Sequence[Mutant]
    passed: Sequence[Mutant]
    equivalent: Mapping[Spot, str]
    uncovered: Mapping[Spot, str]
    whole: bool = True

    def survivors(self) -> list[Mutant]:
        """Those without a reason."""
        return [each for each in self.passed if not explained(each, {**self.equivalent, **self.uncovered})]

    def rows(self) -> list[Row]:
        excused = [each for each in self.passed if explained(each, self.equivalent)]
        parts = (self.tried, self.passed, self.survivors(), excused)
        made, passed, survived, equal = (Counter(each.file for each in part) for part in parts)
        return [
            Row(
                file,
                made[file],
                made[file] - passed[file],
                equal[file],
                passed[file] - equal[file] - survived[file],
                survived[file],
            )
            for file in self.files
        ]

    def total(self) -> Row:
        rows = self.rows()
        return Row("all", *(sum(getattr(row, each.name) for row in rows) for each in fields(Row)[1:]))

    def empty(self) -> list[str]:
        return [row.file for row in self.rows() if not row.mutants]

    def problems(self) -> list[str]:
        found = [describe(each) for each in self.survivors()]
        if self.whole:
            for row in self.rows():
                if row.mutants and not row.killed:
                    found.append(f"{row.file}: not one of its mutants was killed; is it tested at all?")
        alive, tried = ({spot for each in some for spot in spots(each)} for some in (self.passed, self.tried))
        for spot in (*self.equivalent, *self.uncovered):
            file, text, change = spot
            if spot not in alive and (spot in tried or (self.whole and file in self.files)):
                found.append(f"{file}: survivors.py explains {change}   in: {text}   but no such mutant survives")
        return found


def spots(mutant: Mutant) -> tuple[Spot, Spot]:
    """What a reason may name: the mutant, or whatever is changed in its line."""
    return mutant.spot, (mutant.file, mutant.text, ANY)


def explained(mutant: Mutant, reasons: Mapping[Spot, str]) -> bool:
    return any(spot in reasons for spot in spots(mutant))


def describe(mutant: Mutant) -> str:
    return f"{mutant.file}:{mutant.line}: {mutant.change}   in: {mutant.text}"


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
        number = each.name != "file"
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


def trace(files: Sequence[str], jobs: int) -> dict[str, dict[str, Trace]]:
    """By file, the tests that hold it, with their times and lines. All must pass as long as nothing is broken."""
    held = {file: tests_of(file) for file in files}
    for file, tests in held.items():
        if not tests:
            sys.exit(f"no test holds {file}; write one, and name it in scripts/mutation_tests.py")
    found: dict[str, Mapping[str, Trace]] = {}
    missing = []
    for test in dict.fromkeys(test for file in files for test in held[file]):
        if (kept := recall(key_of("trace", [test]))) is not None:
            found[test] = {name: Trace(*each) for name, each in kept.items()}
        else:
            missing.append(Trial((test,), traced=tuple(known())))
    for each in follow(outcomes(missing, jobs), len(missing), "unbroken"):
        [test] = each.trial.tests
        if not each.passed:
            sys.exit(f"{each.said}\n{test} fails without any mutation; mend that first")
        found[test] = each.traces
        keep(key_of("trace", [test]), each.traces)
    return {file: {name: one for test in held[file] for name, one in found[test].items()} for file in files}


def outlast(tried: Sequence[Mutant], traces: Mapping[str, Trace], jobs: int) -> list[Mutant]:
    """The survivors. Those that pass a few tests are put to the others; what no test runs survives at once."""
    chosen = {mutant: tests_for(mutant, traces) for mutant in tried}
    left = list(tried)
    for stage, what in enumerate(("mutants", "those left")):
        trials = []
        for mutant in left:
            if tests := chosen[mutant][stage]:
                limits = {test: 5 + 5 * traces[test].seconds for test in tests}
                trials.append(Trial(tuple(tests), mutant.file, mutant.source, limits, mutant))
        killed = {trial.mutant for trial, passed in judge(trials, jobs, what) if not passed}
        left = [mutant for mutant in left if mutant not in killed]
    return left


def judge(trials: Sequence[Trial], jobs: int, what: str) -> Iterator[tuple[Trial, bool]]:
    """Whether each passes. What is known from before is not tried again."""
    new = []
    for trial in trials:
        passed = recall(key_of(trial.source, trial.tests))
        if passed is None:
            new.append(trial)
        else:
            yield trial, passed
    for each in follow(outcomes(new, jobs), len(new), what):
        keep(key_of(each.trial.source, each.trial.tests), each.passed)
        yield each.trial, each.passed


def choose(made: Sequence[Mutant], like: str, sample: int | None, seed: int) -> list[Mutant]:
    fitting = [mutant for mutant in made if like in mutant.text]
    if sample is None or sample >= len(fitting):
        return fitting
    places = sorted(random.Random(seed).sample(range(len(fitting)), sample))
    return [fitting[place] for place in places]


def main() -> None:
    parser = argparse.ArgumentParser(description="Break the code on purpose and see whether a test notices.")
    parser.add_argument(
        "--files", default="", help="as in training/local_training.py,methods/scaffold.py; core for all in it"
    )
    parser.add_argument("--like", default="", help="only mutants of lines that hold this text")
    parser.add_argument("--sample", type=int, help="so many mutants of all, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--markdown", action="store_true", help="write plain markdown")
    asked = parser.parse_args()

    files: list[str] = []
    for name in filter(None, (name.strip() for name in asked.files.split(","))):
        matching = [file for file in known() if file == name or file.partition("/")[0] == name]
        if not matching:
            sys.exit(f"there is no file '{name}' to mutate; there are: {', '.join(known())}")
        files += matching
    files = list(dict.fromkeys(files or known()))
    os.chdir(ROOT)
    preload()

    made: list[Mutant] = []
    for file in files:
        scope = vars(importlib.import_module(module_of(file)))
        made += mutants(file, (PACKAGE / file).read_text(encoding="utf-8"), scope)
    tried = choose(made, asked.like, asked.sample, asked.seed)
    files = [file for file in files if not asked.like or any(mutant.file == file for mutant in tried)]
    traces = trace(files, asked.jobs)
    passed: list[Mutant] = []
    for file in files:
        left = outlast([mutant for mutant in tried if mutant.file == file], traces[file], asked.jobs)
        print(f"{file}: {len(left)} left", *map(describe, left), sep="\n  ", file=sys.stderr, flush=True)
        passed += left
    whole = len(tried) == len(made)
    verdict = Verdict(files, tried, passed, EQUIVALENT, UNCOVERED, whole)
    if asked.markdown:
        print(markdown(verdict))
    else:
        show(verdict)
    sys.exit(bool(verdict.problems()))


if __name__ == "__main__":
    main()
