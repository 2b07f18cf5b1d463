"""Run every command and snippet of the documentation as it is written, and report those that fail.

The package is built as a wheel and installed elsewhere, so nothing works only because a file lies in the repository.
A page is one scenario. Its blocks run in order, in one shell, in a folder of their own. The folder is empty, except
that a page that speaks of `examples/` or `studies/`, which are part of a clone, gets a copy of them.

| block | what happens |
|---|---|
| `sh`, `bash`, or indented | each command must exit with 0 |
| `python` | it must run as a script |
| any language with `title="FILE"` | it is written to FILE |
| `toml` without a title | it must be valid as a part of a config |
| `text` | nothing |
| in prose, `partita ... --config FILE` | runs like a block |

What cannot run here is in `SKIPPED`, and what would take too long is in `SHORTENED`, each with its reason. An entry
that matches no command is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

import check_wheel
from changed import changed, concerned
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "src/partita/methods/*.md", "src/partita/compression/*.md")
DOORS = ("README.md", "docs/guide/getting-started.md", "docs/index.md")  # a newcomer's way in, run with every change
CLONED = ("examples", "studies")
LONGEST = 1200.0  # seconds for one command
PAGE_FOLDER = "PARTITA_DOCS_PAGE"  # an environment variable by which a page's processes are found
LAST_LINES = 25  # of a failed command's output
KILLING = 10.0  # seconds for killed processes to end
EXITING = 20.0  # seconds for background processes to end after the last command


@dataclass(frozen=True)
class NotAsWritten:
    """Commands that are not run as written."""

    pages: str  # pattern of page names
    start: str  # how the commands begin
    reason: str
    words: str = ""  # if given, the commands run with these words appended

    def matches(self, step: Step) -> bool:
        return fnmatch(step.page, self.pages) and step.text.startswith(self.start)


INSTALLS = "installs a release; the wheel is installed already"
ACTIVE = "the environment of the wheel is active already"
NETWORK = "needs a network; the slow tests of tests/site run the scripts without one"
CLONE = "works in a clone; CI runs it, or what it calls, by itself"
SKIPPED = (
    NotAsWritten("README.md", "make ", CLONE),
    NotAsWritten("docs/guide/getting-started.md", "python3 -m venv .venv", ACTIVE),
    NotAsWritten("docs/guide/getting-started.md", ". .venv/bin/activate", ACTIVE),
    NotAsWritten("CONTRIBUTING.md", "", CLONE),
    NotAsWritten("docs/index.md", "pip install ", INSTALLS),
    NotAsWritten("docs/guide/*.md", "pip install ", INSTALLS),
    *(
        NotAsWritten("docs/guide/offline.md", start, NETWORK)
        for start in ("pip download ", "image/wheelhouse.sh ", "sha256sum ", "image/install.sh ")
    ),
    NotAsWritten("docs/guide/flower.md", "flwr run trial simulation", "needs ray, which the tests do not install"),
    NotAsWritten(
        "src/partita/methods/*.md", "partita compare --config studies/prompts/", "needs images and encoders of the Hub"
    ),
    NotAsWritten(
        "src/partita/methods/fedadamw.md", "partita compare --config studies/adamw/", "needs data and a model"
    ),
    NotAsWritten(
        "src/partita/methods/*.md", "partita compare --config studies/safl/", "needs notes and a model of the Hub"
    ),
)
SHORTENED = (
    NotAsWritten("README.md", "partita compare ", "nine runs of 30 rounds take minutes", "--seeds 1 --rounds 3"),
    NotAsWritten(
        "src/partita/*/*.md", "partita compare ", "the evidence of a card takes minutes", "--seeds 1 --set rounds=2"
    ),
)

STOPPED = threading.Event()  # the script was told to stop

CHECK_TOML = """
import sys, tomllib
from partita.experiment.config import parse
parse({"method": {"name": "fedavg"}, **tomllib.load(open(sys.argv[1], "rb"))})
"""


class DocsError(ValueError):
    """A page that cannot be run."""


@dataclass(frozen=True)
class Step:
    """Something that a page tells its reader to do."""

    page: str
    line: int
    kind: str  # "sh", "python", "toml" or "file"
    text: str
    title: str = ""  # the file to write

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.strip().splitlines()[0]}"


@dataclass
class Outcome:
    """What became of a page."""

    page: str
    ran: list[Step] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0


# ---- what a page says


def steps(page: str, text: str) -> list[Step]:
    """Return what the page tells its reader to do, in order.

    Raises:
        DocsError: If a block has an unknown language.
    """
    found, line = [], 0
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline":
            spans = [span.content for span in token.children or () if span.type == "code_inline"]
            found += [
                Step(page, line, "sh", " ".join(span.split()))
                for span in spans
                if span.startswith("partita ") and "--config " in span and "..." not in span
            ]
        elif token.type in ("fence", "code_block"):
            found += _block(page, line, token.type == "fence", token.info, token.content)
    return found


def _block(page: str, line: int, fenced: bool, info: str, text: str) -> Iterator[Step]:
    language, first = info.split()[0] if info else "", line + fenced
    if title := re.search(r'title="([^"]+)"', info):
        yield Step(page, first, "file", text, title[1])
    elif language in ("sh", "bash") or not fenced:
        for offset, command in commands(text):
            if not _complete(command):
                raise DocsError(
                    f"{page}:{first + offset}: this is not a complete command: {command.splitlines()[0]!r}; fence what "
                    "is not shell as ```text"
                )
            yield Step(page, first + offset, "sh", command)
    elif language in ("python", "toml"):
        yield Step(page, first, language, text)
    elif language != "text":
        raise DocsError(
            f'{page}:{line}: the block has the language "{language}"; use sh, python, toml or text, or give it '
            'title="FILE" to write it to a file'
        )


def commands(block: str) -> Iterator[tuple[int, str]]:
    """Split a block of shell into its commands, each with its line in the block, from 0. The last may be incomplete."""
    lines, start = block.splitlines(), 0
    for end in range(1, len(lines) + 1):
        command = "\n".join(lines[start:end])
        if not command.strip() or re.fullmatch(r"\s*#.*", command):
            start = end
        elif _complete(command) or end == len(lines):
            yield start, command
            start = end


def _complete(command: str) -> bool:
    # Bash only warns about a here-document without an end.
    read = subprocess.run(["bash", "-n"], input=command + "\n", text=True, capture_output=True)
    return not read.returncode and not read.stderr and not command.endswith("\\")


def arrange(
    found: Sequence[Step], skipped: Sequence[NotAsWritten] = SKIPPED, shortened: Sequence[NotAsWritten] = SHORTENED
) -> tuple[list[Step], list[tuple[Step, NotAsWritten]], list[tuple[Step, NotAsWritten]]]:
    """Apply the exceptions.

    Returns:
        `(steps to run, steps to skip, steps that run shortened)`. The last are also among the first.

    Raises:
        DocsError: If an exception matches nothing.
    """
    run: list[Step] = []
    skips: list[tuple[Step, NotAsWritten]] = []
    shorter: list[tuple[Step, NotAsWritten]] = []
    for step in found:
        runs_here = step.kind != "sh" or not (why := next((each for each in skipped if each.matches(step)), None))
        if not runs_here:
            assert why is not None
            skips.append((step, why))
            continue
        if step.kind == "sh" and (why := next((each for each in shortened if each.matches(step)), None)):
            step = replace(step, text=f"{step.text} {why.words}")
            shorter.append((step, why))
        run.append(step)
    used = [why for _, why in (*skips, *shorter)]
    for each in (*skipped, *shortened):
        if each not in used:
            raise DocsError(f"no command of {each.pages} begins with '{each.start}'; delete its entry in {__file__}")
    return run, skips, shorter


# ---- running it


class Shell:
    """A bash that stays open, so that a page's variables and background jobs last as they do for its reader."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.mark = f"{PAGE_FOLDER}={folder}"
        self.answers, told = os.pipe()
        self.bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={**environment, PAGE_FOLDER: str(folder)},
            pass_fds=[told],
            start_new_session=True,  # Ctrl-C ends this script, which then ends the shell
        )
        self.told = told
        self._say("set -m")  # jobs can be interrupted, as in the shell of a reader

    def run(self, script: Path, log: Path, seconds: float) -> str:
        """Run a script in the shell. Return why it failed, or nothing."""
        self._say(f". '{script}' > '{log}' 2>&1 < /dev/null {self.told}>&-; echo $? >&{self.told}")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.answers], [], [], 0.2)[0]:
                status = os.read(self.answers, 100).decode().strip()
                return "" if status == "0" else f"exit code {status}"
            if self.bash.poll() is not None:
                return "it ended the shell"
            if STOPPED.is_set():
                return "stopped"
        return f"not finished after {seconds:.0f} seconds"

    def running(self) -> list[str]:
        """Return the programs that the page started and that have not ended."""
        return [command for pid, command in self._members().items() if pid != self.bash.pid]

    def close(self) -> None:
        """End the shell and everything it started."""
        end = time.monotonic() + KILLING
        while (members := self._members()) and time.monotonic() < end:  # a killed program takes a moment to end
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        assert self.bash.stdin is not None
        with suppress(BrokenPipeError):
            self.bash.stdin.close()
        self.bash.wait()
        os.close(self.answers)
        os.close(self.told)

    def _say(self, line: str) -> None:
        assert self.bash.stdin is not None
        with suppress(BrokenPipeError):
            self.bash.stdin.write(line.encode() + b"\n")
            self.bash.stdin.flush()

    def _members(self) -> dict[int, str]:
        """Return the shell and all programs that inherited its environment, also those in sessions of their own."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to someone else
                if self.mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = (
                        (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
        return found


def run_page(page: str, planned: Sequence[Step], folder: Path, environment: Mapping[str, str]) -> Outcome:
    """Run the steps of a page in a new folder, until one fails."""
    started, outcome = time.monotonic(), Outcome(page)
    place, logs = folder / "page", folder / "logs"
    for path in (place, logs):
        path.mkdir(parents=True)
    for name in CLONED:
        if any(f"{name}/" in step.text for step in planned):
            shutil.copytree(ROOT / name, place / name)
    shell = Shell(place, environment)
    try:
        for number, step in enumerate(planned):
            if failure := _run_step(step, shell, place, logs / str(number)):
                outcome.failure = failure
                break
            outcome.ran.append(step)
        else:
            outcome.failure = _still_running(page, shell)
    finally:
        shell.close()
    outcome.seconds = time.monotonic() - started
    return outcome


def _run_step(step: Step, shell: Shell, place: Path, stem: Path) -> str:
    """Run one step. Return a description of its failure, or nothing."""
    source, log, script = stem.with_suffix(".txt"), stem.with_suffix(".log"), stem.with_suffix(".sh")
    source.write_text(step.text)
    match step.kind:
        case "file":
            (place / step.title).parent.mkdir(parents=True, exist_ok=True)
            (place / step.title).write_text(step.text)
            return ""
        case "python":
            script.write_text(f"python '{source}'\n")
        case "toml":
            check = stem.with_suffix(".py")
            check.write_text(CHECK_TOML)
            script.write_text(f"python '{check}' '{source}'\n")
        case _:
            script.write_text(step.text + "\n")
    failure = shell.run(script, log, LONGEST)
    if not failure:
        return ""
    said = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
    return "\n".join(
        [f"{step.page}:{step.line}: {failure}", *_indented(step.text.splitlines()), *_indented(said, "| ")]
    )


def _indented(lines: Sequence[str], mark: str = "$ ") -> list[str]:
    return [f"    {mark}{line}" for line in lines]


def _still_running(page: str, shell: Shell) -> str:
    """Wait for the programs in the background to end. Return which of them do not, or nothing."""
    end, quiet = time.monotonic() + EXITING, 0
    while quiet < 3:  # a program that is just starting another one may be missed once
        left = shell.running()
        quiet = 0 if left else quiet + 1
        if left and time.monotonic() > end:
            return f"{page}: after its last command these still run:\n" + "\n".join(_indented(left, "| "))
        time.sleep(0.1)
    return ""


def install(folder: Path) -> dict[str, str]:
    """Build the wheel and install it into an environment of its own, with the dependencies of this one.

    Returns:
        The environment variables of a reader who has activated it.
    """
    (folder / "wheel").mkdir()
    wheel = check_wheel.build(folder / "wheel")
    home = folder / "environment"
    venv.create(home, symlinks=True)
    python, here = home / "bin" / "python", Path(sys.executable).parent
    check_wheel.install(wheel, python, "--no-deps")
    [packages] = home.glob("lib/python*/site-packages")
    # A plain path comes after the environment's own packages and does not bring the editable installation along.
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    for script in here.iterdir():  # the commands of the dependencies, such as flwr
        if script.is_file() and not (home / "bin" / script.name).exists():
            head, _, rest = script.read_bytes().partition(b"\n")
            if head.startswith(b"#!") and b"python" in head:
                (home / "bin" / script.name).write_bytes(f"#!{python}\n".encode() + rest)
                (home / "bin" / script.name).chmod(0o755)
    where = check_wheel.run(python, "-c", "import partita; print(partita.__file__)", cwd=folder).strip()
    if not Path(where).is_relative_to(home):
        sys.exit(f"partita was imported from {where}, not from the environment of the wheel")
    others = [path for path in os.environ["PATH"].split(os.pathsep) if Path(path) != here]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FLWR_"))}
    return {
        **kept,
        "VIRTUAL_ENV": str(home),
        "PATH": os.pathsep.join([str(home / "bin"), *others]),
        "HF_HUB_OFFLINE": "1",  # a command that downloads something belongs in SKIPPED
    }


def all_steps(root: Path = ROOT) -> list[Step]:
    """Return the steps of all pages."""
    notebooks = set(root.glob("docs/tutorials/*.md"))  # scripts/tutorials.py runs them
    paths = sorted({path for pattern in PAGES for path in root.glob(pattern)} - notebooks)
    return [step for path in paths for step in steps(str(path.relative_to(root)), path.read_text())]


def main() -> None:
    """Run the pages and exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description="Run every command of the documentation.")
    parser.add_argument("pages", nargs="*", help="patterns of page names; default: all pages")
    parser.add_argument("--jobs", type=int, default=2, help="pages that run at the same time")
    parser.add_argument(
        "--since", metavar="COMMIT", help="only pages that changed since then, and a newcomer's; '': the last commit"
    )
    parser.add_argument("--list", action="store_true", help="only list what would run")
    options = parser.parse_args()
    try:
        planned, skips, shorter = arrange(all_steps())
    except DocsError as error:
        sys.exit(f"error: {error}")
    patterns = options.pages or ["*"]
    if options.since is not None:
        pages = {step.page: None for step in planned}
        patterns = [*DOORS, *concerned(pages, changed(options.since))]
        print(f"of {len(pages)} pages, those that changed and a newcomer's: {len({*patterns} & {*pages})}")
    wanted = [step for step in planned if any(fnmatch(step.page, each) for each in patterns)]
    skips, shorter = (
        [(step, why) for step, why in some if any(fnmatch(step.page, each) for each in patterns)]
        for some in (skips, shorter)
    )
    if not wanted:
        sys.exit(f"error: no page matches {' '.join(options.pages)}")
    if options.list:
        print(*wanted, sep="\n")
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as on Ctrl-C
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="partita-docs-") as name, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(name).resolve()
        print("Building and installing the wheel", flush=True)
        environment = install(folder)
        threads = max(1, (os.cpu_count() or 1) // options.jobs)
        environment = {"OMP_NUM_THREADS": str(threads), **environment}
        by_page: dict[str, list[Step]] = {}
        for step in wanted:
            by_page.setdefault(step.page, []).append(step)
        running = [
            pool.submit(run_page, page, planned, folder / str(number), environment)
            # Long pages first, so that none runs alone at the end.
            for number, (page, planned) in enumerate(sorted(by_page.items(), key=lambda item: -len(item[1])))
        ]
        outcomes = []
        try:
            for future in as_completed(running):
                outcome = future.result()
                outcomes.append(outcome)
                mark = "FAILED" if outcome.failure else "ok    "
                print(f"{mark} {outcome.page}: {len(outcome.ran)} steps, {outcome.seconds:.0f} s", flush=True)
                if outcome.failure:
                    print(outcome.failure, flush=True)
        except KeyboardInterrupt:
            STOPPED.set()
            pool.shutdown(cancel_futures=True)
            sys.exit("stopped")
    for step, why in skips:
        print(f"skipped   {step} ({why.reason})")
    for step, why in shorter:
        print(f"shortened {step} ({why.reason})")
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    ran, seconds = sum(len(outcome.ran) for outcome in outcomes), time.monotonic() - started
    print(
        f"{ran} of {len(wanted)} commands and snippets ran, {len(shorter)} of them shortened; {len(skips)} skipped; "
        f"{seconds:.0f} s"
    )
    if failures:
        sys.exit("\n".join([f"{len(failures)} pages failed:", *failures]))


if __name__ == "__main__":
    main()
