"""Break the code on purpose, one small mutant at a time: does a test notice?

The tests that could notice are run once, to see which lines each runs. A mutant is put to those that run its statement,
in a process that is forked from one that has loaded torch. One that passes them all is a survivor: a test is missing,
or it computes the same. Exit status 1 if fewer than FLOOR of a folder's mutants are killed.
"""

import argparse
import ast
import importlib.machinery
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "partita"
FOLDERS = ("core", "training", "storage", "compression", "methods", "privacy", "secure_aggregation")
# Two compute on a GPU only, and two are held by the tests of all methods.
LEFT_OUT = ("training/cuda_graphs.py", "training/compilation.py", "methods/cards.py", "methods/__init__.py")
FLOOR = 0.85  # of the mutants of a folder; about one in ten computes the same, or is in what no test can reach
MOST_TRACED, ENOUGH = 60.0, 30.0  # seconds of tests: of one file, while lines are recorded; and for a mutant
CONFORMANCE = "tests/testing/test_conformance.py::test_every_method_and_supported_composition_conforms"
HEAVY = ("torch", "opacus", "dp_accounting.pld", "sklearn", "sympy", "transformers.models.vit.modeling_vit")

SWAPPED: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
RIGHT_ALONE = (ast.Add, ast.Mult, ast.BitOr, ast.BitAnd)
OTHERS = "Lt GtE LtE; LtE Gt Lt; Gt LtE GtE; GtE Lt Gt; Eq NotEq; NotEq Eq; In NotIn; NotIn In; Is IsNot; IsNot Is; "
OTHERS += "min max; max min; any all; all any; floor ceil; ceil floor; minimum maximum; maximum minimum"
NAMESAKES = {words[0]: words[1:] for words in map(str.split, OTHERS.split(";"))}
# zip(strict=True) guards against what does not happen, and on a CPU the others change nothing.
WITHOUT_EFFECT = ("strict", "non_blocking", "device")
BODIES = {ast.FunctionDef: "body", ast.ClassDef: "body", ast.Lambda: "body", ast.AnnAssign: "value"}  # all that counts
PLAIN = ("-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "slow or not slow")


class Mutant(NamedTuple):
    """A copy of a file with one thing computed otherwise."""

    file: str  # below src/partita
    line: int
    change: str
    source: str  # of the whole file
    lines: range  # of the statement, up to the change


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Return all mutants of a source."""
    tree = ast.parse(source)
    statements = [each for each in ast.walk(tree) if isinstance(each, ast.stmt)]
    for old, new in (pair for node in computing(tree) for pair in changes(node)):
        line, change = old.lineno, f"{ast.unparse(old)} -> {ast.unparse(new)}"
        start = max(each.lineno for each in statements if each.lineno <= line <= (each.end_lineno or 0))
        yield Mutant(file, line, change, splice(source, old, new), range(start, line + 1))


def splice(source: str, old: Any, new: ast.AST) -> str:
    """Return the source with one node written anew; columns are counted in bytes."""
    lines, written = source.encode().splitlines(keepends=True), ast.unparse(new)
    before = b"".join(lines[: old.lineno - 1]) + lines[old.lineno - 1][: old.col_offset]
    after = lines[old.end_lineno - 1][old.end_col_offset :] + b"".join(lines[old.end_lineno :])
    return (before + (written if isinstance(new, ast.stmt) else f"({written})").encode() + after).decode()


def computing(node: Any) -> Iterator[ast.AST]:
    """Yield what results rest on: not annotations, defaults, decorators and constants, nor what raises an error."""
    named = isinstance(node, ast.Assign) and all(isinstance(to, ast.Name) and to.id.isupper() for to in node.targets)
    if named or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or getattr(node, "arg", "") in WITHOUT_EFFECT:
        return
    parts = getattr(node, BODIES[type(node)]) if type(node) in BODIES else list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
        parts = node.orelse
    else:
        yield node
    for part in parts if isinstance(parts, list) else [parts]:
        if part and not (isinstance(node, ast.ClassDef) and isinstance(part, ast.AnnAssign)):
            yield from computing(part)


def changes(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of a part as it is and as it is not."""
    for test in getattr(node, "ifs", [getattr(node, "test", None)]):
        if isinstance(test, ast.expr) and not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            yield test, ast.UnaryOp(ast.Not(), test)  # those have mutants of their own
    match node:
        case ast.Expr(ast.Call() as call):
            yield call, ast.Constant(None)
        case ast.BinOp(op=ast.Div(), right=ast.Constant(value=str()) | ast.JoinedStr()):
            pass  # a step of a key's path: any other word names a stream of draws as good
        case ast.BinOp(left, op, right):
            if type(op) in SWAPPED:
                yield node, ast.BinOp(left, SWAPPED[type(op)](), right)
            if isinstance(op, (*RIGHT_ALONE, ast.Sub, ast.Div)):
                yield node, left
            if isinstance(op, RIGHT_ALONE) and ast.dump(left) != ast.dump(right):
                yield node, right
        case ast.AugAssign(target, op, value) if type(op) in SWAPPED:
            yield node, ast.AugAssign(target, SWAPPED[type(op)](), value)
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert(), operand):
            yield node, operand
        case ast.BoolOp(op, values):
            for index in range(len(values)):
                rest = values[:index] + values[index + 1 :]
                yield node, (ast.BoolOp(op, rest) if len(rest) > 1 else rest[0])
        case ast.Compare(left, ops, comparators):
            for index, old in enumerate(ops):
                for new in NAMESAKES[type(old).__name__]:
                    yield node, ast.Compare(left, [*ops[:index], getattr(ast, new)(), *ops[index + 1 :]], comparators)
        case ast.Call(func, positional, keywords):
            before, dot, name = ast.unparse(func).rpartition(".")
            for other in NAMESAKES.get(name, ()):
                yield node, ast.Call(ast.Name(before + dot + other), positional, keywords)
            for index, keyword in enumerate(keywords):
                if keyword.arg not in (None, *WITHOUT_EFFECT):
                    yield node, ast.Call(func, positional, keywords[:index] + keywords[index + 1 :])
        case ast.Constant(value=bool() | int() | float() as value):
            yield node, ast.Constant(not value if isinstance(value, bool) else value + 1)


def tests_of(file: str) -> list[str]:
    """Return a few tests that use a module, or its users: of its name, in its folder, or that use few others first."""
    part, name = file.removesuffix(".py").split("/")
    uses = re.compile(rf"partita\.{part}\.{name}\b|from partita\.{part} import [^\n]*\b{name}\b")
    users = [path.stem for path in PACKAGE.rglob("*.py") if uses.search(path.read_text(encoding="utf-8"))]
    through = re.compile(rf"from partita\.\w+\.({'|'.join([name, *users])}) import")
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    rank = {p: (p.stem != f"test_{name}", p.parent.name != part, texts[p].count("from partita"), p) for p in texts}
    direct = [path for path in sorted(texts, key=rank.__getitem__) if uses.search(texts[path])]
    others = [path for path in sorted({*texts} - {*direct}, key=rank.__getitem__) if through.search(texts[path])]
    methods = re.findall(rf'"([\w-]+)": "partita\.{part}\.{name}:', (PACKAGE / "methods/__init__.py").read_text())
    return [str(path.relative_to(ROOT)) for path in direct[:5] + others[:3]] + [
        f"{CONFORMANCE}[{each}]" for each in methods
    ]


class Recorder:
    """A plugin for pytest: the seconds of each test, and the lines of a file that run with it or while it is found."""

    def __init__(self, path: str) -> None:
        self.now, self.lines, self.found = "", defaultdict[str, set[int]](set), dict[str, tuple[float, list[int]]]()
        sys.settrace(lambda frame, event, arg: self.note if frame.f_code.co_filename == path else None)

    def note(self, frame: Any, event: str, arg: object) -> Any:
        self.lines[self.now].add(frame.f_lineno)
        return self.note

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.now, self.since = nodeid, time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.found[nodeid] = time.process_time() - self.since, sorted(self.lines[nodeid] | self.lines[""])
        if time.process_time() > MOST_TRACED:
            pytest.exit("it takes long", returncode=0)


def trace(file: str, tests: str, folder: Path) -> bool:
    """Record the lines of the file that each test runs. Return whether all pass, as long as nothing is broken."""
    recorder = Recorder(str(PACKAGE / file))
    passed = not pytest.main([*PLAIN, tests], plugins=[recorder])
    (folder / "found").write_text(json.dumps(recorder.found if passed else {}))
    return passed


def survives(mutant: Mutant, traces: Mapping[str, Any], _: Path) -> bool:
    """Put the mutant to the tests that run its statement, the fastest first, one file of tests after the other."""
    path, usual = str(PACKAGE / mutant.file), importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, name: str) -> Any:
        return compile(mutant.source, path, "exec") if self.path == path else usual(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]
    resource.setrlimit(resource.RLIMIT_DATA, (8 * 2**30, resource.RLIM_INFINITY))  # some ask for all there is
    by_file, spent = defaultdict[str, dict[str, float]](dict), 0.0
    for test, (seconds, lines) in sorted(traces.items(), key=lambda item: item[1][0]):
        if spent < ENOUGH and not {*mutant.lines}.isdisjoint(lines):
            by_file[test.partition("::")[0]][test] = seconds
            spent += seconds
    for tests in by_file.values():
        signal.alarm(int(60 + 10 * sum(tests.values())))  # a mutant may never end
        if pytest.main([*PLAIN, *tests]):
            return False
    return True


def in_processes(tasks: Mapping[Any, Callable[[Path], bool]], jobs: int) -> Iterator[tuple[Any, Path, bool]]:
    """Do each task in a process and a folder of its own. Yield its name, the folder and its answer, as it ends."""
    waiting, running = list(tasks)[::-1], dict[int, tuple[Any, Path]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name, folder = waiting.pop(), Path(tempfile.mkdtemp())
            if not (process := os.fork()):
                try:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(1, 2)
                    os._exit(0 if tasks[name](folder) else 1)
                finally:
                    os._exit(1)
            running[process] = name, folder
        process, status = os.wait()
        yield *running.pop(process), not status


def judge(file: str, tried: Sequence[Mutant], jobs: int) -> list[Mutant]:
    """Return the survivors among the mutants of a file."""
    traces: dict[str, Any] = {}
    for name, folder, passed in in_processes({name: partial(trace, file, name) for name in tests_of(file)}, jobs):
        traces |= json.loads((folder / "found").read_text())
        if not passed:
            print(f"{name} fails here without any mutant, and is left out")
    found = in_processes({mutant: partial(survives, mutant, traces) for mutant in tried}, jobs)
    return [mutant for mutant, _, survived in found if survived]


def prepare(work: str) -> None:
    """Import once what takes long, and let everything be written into one folder.

    Nothing may compute here, as torch's autograd does not survive a fork, and nothing of partita is imported: whatever
    imports a mutant must be imported after it.
    """
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "src"))
    sys.dont_write_bytecode, sys.pycache_prefix, tempfile.tempdir = False, f"{work}/compiled", work
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    os.environ |= {"HYPOTHESIS_STORAGE_DIRECTORY": f"{work}/examples", "PYTEST_DEBUG_TEMPROOT": work}
    [*map(importlib.import_module, HEAVY)]


def main() -> None:
    """Print the survivors, and how many mutants of each folder were killed."""
    known = sorted({f"{part}/{path.name}" for part in FOLDERS for path in (PACKAGE / part).glob("*.py")} - {*LEFT_OUT})
    parser = argparse.ArgumentParser(description="Break the code on purpose and see whether a test notices.")
    parser.add_argument("--files", nargs="+", default=FOLDERS, choices=[*FOLDERS, *known], metavar="FILE_OR_FOLDER")
    parser.add_argument("--sample", type=int, default=10**9, help="so many mutants of all, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    files = [file for file in known if file in options.files or file.partition("/")[0] in options.files]
    made = [each for file in files for each in mutants(file, (PACKAGE / file).read_text(encoding="utf-8"))]
    tried = random.Random(options.seed).sample(made, min(options.sample, len(made)))
    with tempfile.TemporaryDirectory(prefix="partita-mutate-") as work:
        prepare(work)
        counts, left = Counter(mutant.file.partition("/")[0] for mutant in tried), Counter[str]()
        for file in sorted({mutant.file for mutant in tried}):
            for mutant in judge(file, [mutant for mutant in tried if mutant.file == file], options.jobs):
                print(f"{file}:{mutant.line}: {mutant.change}", flush=True)
                left[file.partition("/")[0]] += 1
    for part, count in sorted(counts.items()):
        print(f"{part}: {count - left[part]} of {count} mutants killed, {1 - left[part] / count:.0%}")
    sys.exit(any(left[part] > (1 - FLOOR) * count for part, count in counts.items()))


if __name__ == "__main__":
    main()
