"""Play studies and make their tables and pictures.

    python studies/play.py tune STUDY.toml...     choose settings on validation; lines go to STUDY.tune.jsonl
    python studies/play.py run STUDY.toml...      play the runs; lines go to STUDY.jsonl
    python studies/play.py table STUDY.toml...    print Markdown tables
    python studies/play.py plot STUDY.toml...     draw SVG pictures beside the study
    python studies/play.py layers STUDY.toml...   print how often clients chose each layer

Docs: studies/README.md. The exit code is 0 if all runs have a line, 1 if some failed, and 3 if the time was up and some
are left.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType

from playing.choice import Asked, higher_is_better, left_to_play, plan, read_runs
from playing.lines import LinesError, append_line, only_writer, read_lines
from playing.queue import TRIES, Ended, Lengths, play_all
from playing.study import Kind, Planned, Study, StudyError, key_of, read_study
from playing.work import configured

FAILED, LEFT, INTERRUPTED = 1, 3, 130
ARCHIVED = 20.0  # seconds between two versions of the archive


class Interrupt(Exception):
    """The user or the machine ends the call."""


def main() -> int:
    asked = _arguments()
    try:
        studies = [replace(read_study(file), folder=asked.lines) for file in asked.studies]
        if asked.command == "table":
            from playing.tables import matrix, tables, tried

            if asked.tuning:
                for study in studies:
                    print(tried(study, read_runs(study, "tune")))
                return 0
            shown = matrix if asked.matrix else tables
            for study in studies:
                study = study if asked.to is None else study.compared_to(asked.to)
                print(shown(study, read_runs(study, "run"), asked.score, asked.on))
            return 0
        if asked.command == "layers":
            from playing.tables import layers

            for study in studies:
                print(layers(study, read_runs(study, "run")))
            return 0
        if asked.command == "plot":
            from playing.plots import plot

            for study in studies:
                for file in plot(study, read_runs(study, "run"), asked.score, asked.on):
                    print(file)
            return 0
        return _play(studies, asked)
    except (StudyError, LinesError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("tune", "run", "table", "plot", "layers"):
        command = commands.add_parser(name)
        command.add_argument("studies", nargs="+", type=Path, metavar="STUDY.toml")
        command.set_defaults(lines=None)
        if name != "tune":
            command.add_argument(
                "--lines", type=Path, metavar="FOLDER", help="where the lines of runs are; default: beside the study"
            )
        if name == "layers":
            continue
        if name in ("table", "plot"):
            command.add_argument("--score", help="another metric than the study's")
            command.add_argument("--on", choices=("test", "personal", "unseen"), help="another part than the study's")
            if name == "table":
                command.add_argument("--to", metavar="ARM", help="differences to another arm than the study's baseline")
                command.add_argument("--matrix", action="store_true", help="one table: arms by points of the axes")
                command.add_argument("--tuning", action="store_true", help="all settings tried, scored on validation")
            continue
        command.add_argument("--jobs", type=int, default=1, help="runs at a time")
        command.add_argument("--minutes", type=float, help="stop after this time; finished runs are kept")
        command.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
        command.add_argument(
            "--arms",
            action="append",
            default=[],
            help="comma-separated names, or one name; can be repeated; default: all",
        )
        if name == "run":
            command.add_argument("--seeds", default="", help="comma-separated; all if left out")
        command.add_argument("--retry", action="store_true", help=f"also play runs that have failed {TRIES} times")
        command.add_argument("--dry-run", action="store_true", help="list what would be played")
        command.add_argument("--archive", type=Path, metavar="FILE.tar.gz", help="all lines and logs in one file")
        command.add_argument("--commit", help="the commit of the source, where git does not say it")
        command.add_argument(
            "--work", type=Path, default=Path("runs/studies"), help="folder for the folders of runs while they run"
        )
    asked = parser.parse_args()
    if asked.command in ("tune", "run"):
        if asked.jobs < 1:
            parser.error(f"--jobs is {asked.jobs}; it must be at least 1")
        if asked.jobs > (cores := os.cpu_count() or 1):
            print(
                f"warning: --jobs is {asked.jobs}, but there are {cores} cores; more runs are slower", file=sys.stderr
            )
        if asked.minutes is not None and asked.minutes <= 0:
            parser.error(f"--minutes is {asked.minutes}; it must be above 0")
    return asked


def _play(studies: Sequence[Study], asked: argparse.Namespace) -> int:
    kind: Kind = asked.command
    deadline = time.monotonic() + 60 * asked.minutes if asked.minutes else None
    seeds = [int(seed) for seed in getattr(asked, "seeds", "").split(",") if seed]
    names = _arm_names(asked.arms, studies)
    if names:
        studies = [study for study in studies if names & study.arms.keys()]
    wanted = {study.file: Asked(tuple(asked.overrides), names & study.arms.keys(), seeds) for study in studies}
    by_file = {study.file: study for study in studies}
    with ExitStack() as locks:
        for study in [] if asked.dry_run else studies:
            locks.enter_context(only_writer(study.file))
            study.beside.parent.mkdir(parents=True, exist_ok=True)
        planned = [run for study in studies for run in _left(study, kind, wanted[study.file])]
        for run in planned:
            _check(run, by_file[run.file])
        if asked.dry_run:
            _print_list(planned, studies, kind)
            return 0
        player = _Player(by_file, kind, asked.jobs, asked.work.resolve(), deadline, asked)
        player.play(planned)
        # Arms that take the choice of another arm and tune more on top of it can be planned only now.
        while kind == "tune" and not player.stopped:
            left = [run for study in studies for run in _left(study, kind, wanted[study.file])]
            more = [run for run in left if run.name not in player.seen]
            if not more:
                break
            player.play(more)
        if kind == "tune" and not player.stopped and not player.failed:
            _print_choices(studies, wanted)
    return player.exit_code()


def _arm_names(asked: Sequence[str], studies: Sequence[Study]) -> set[str]:
    """Return the arms that are asked for. Each text is the name of an arm, or several separated by commas.

    Raises:
        StudyError: If no study has such an arm.
    """
    known = {name for study in studies for name in study.arms}
    names = {name.strip() for text in asked for name in ([text] if text in known else text.split(",")) if name.strip()}
    if unknown := sorted(names - known):
        raise StudyError(f"--arms: there is no arm '{unknown[0]}'; there are {', '.join(sorted(known))}")
    return names


def _left(study: Study, kind: Kind, asked: Asked) -> list[Planned]:
    return left_to_play(study, plan(study, kind, asked, read_runs(study, "tune")), read_runs(study, kind))


def _check(run: Planned, study: Study) -> None:
    """Check a config before the first run starts."""
    try:
        configured(run)
    except ValueError as error:
        raise StudyError(f"{study.file}, arm '{run.arm}': {error}") from error


class _Player:
    """Plays runs, writes their lines, and counts."""

    def __init__(
        self,
        studies: dict[Path, Study],
        kind: Kind,
        jobs: int,
        work: Path,
        deadline: float | None,
        asked: argparse.Namespace,
    ) -> None:
        self.studies, self.kind, self.jobs, self.work = studies, kind, jobs, work
        self.deadline, self.archive = deadline, asked.archive
        self.began, self.archived = time.monotonic(), 0.0
        self.commit, self.lengths = asked.commit or _commit(), Lengths()
        self.seen: set[str] = set()
        self.done = self.failed = self.left = self.code = 0
        self.stopped = False
        failures = ((file, line) for file, study in studies.items() for line in read_lines(study.output("failed")))
        tried = Counter(f"{file} {key_of(line)} {line['digest']}" for file, line in failures)
        self.tried = {} if asked.retry else dict(tried)
        for file, study in studies.items():
            for line in read_runs(study, kind):
                if _ran_here(line):
                    self.lengths.add(file, line["arm"], line["seconds"], earlier=True)

    def play(self, planned: Sequence[Planned]) -> None:
        """Play these runs. Stop at the deadline, or if the call is interrupted."""
        self.seen |= {run.name for run in planned}
        tries = {run.name: self.tried.get(run.name, 0) for run in planned}
        given_up = [run for run in planned if tries[run.name] >= TRIES]
        for run in given_up:
            self.failed += 1
            self._say(run.file, f"has failed {TRIES} times, so it is left out (--retry plays it): {run.title}")
        waiting = [run for run in planned if tries[run.name] < TRIES]
        before, total = self.done + self.failed, len(waiting)
        handler = signal.signal(signal.SIGTERM, _interrupt)
        try:
            runs = play_all(waiting, self.jobs, self.work, self.commit, self.deadline, self.lengths, tries)
            for ended in runs:
                self._write(ended)
                place = self.done + self.failed - before
                self._say(ended.planned.file, f"{place}/{total} {_outcome(ended)}: {ended.planned.title}")
                self._archive(time.monotonic() - self.archived > ARCHIVED)
        except (KeyboardInterrupt, Interrupt):
            self.code, self.stopped = INTERRUPTED, True
        finally:
            signal.signal(signal.SIGTERM, handler)
            self.left = total - (self.done + self.failed - before)
            self.stopped = self.stopped or self.left > 0
            if self.left:
                why = "interrupted" if self.code else "the time is up"
                print(f"{why}; {self.left} of {total} runs are left; the same command plays them", flush=True)
            self._archive(True)

    def exit_code(self) -> int:
        """Return the exit code of the call."""
        return self.code or (FAILED if self.failed else LEFT if self.left else 0)

    def _write(self, ended: Ended) -> None:
        study = self.studies[ended.planned.file]
        if ended.line is not None:
            append_line(study.output(self.kind), ended.line)
            self.done += 1
            return
        run = ended.planned
        line = {**run.identity, "digest": run.digest, "commit": self.commit, "error": ended.error, "trace": ended.trace}
        append_line(study.output("failed"), line)
        self.failed += ended.last

    def _say(self, study: Path, text: str) -> None:
        print(text, flush=True)
        with self.studies[study].beside.with_suffix(".log").open("a") as log:
            log.write(f"{time.monotonic() - self.began:.0f} s: {text}\n")

    def _archive(self, due: bool) -> None:
        if self.archive is None or not due:
            return
        self.archived = time.monotonic()
        part = self.archive.with_name(self.archive.name + ".part")
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(part, "w:gz") as archive:
            for file in _outputs(self.studies.values()):
                archive.add(file, os.path.relpath(file))
        part.replace(self.archive)


def _outputs(studies: Iterable[Study]) -> list[Path]:
    files = [
        file
        for study in studies
        for file in (*map(study.output, ("run", "tune", "failed")), study.beside.with_suffix(".log"))
    ]
    return [file for file in files if file.exists()]


def _ran_here(line: dict[str, object]) -> bool:
    """Return whether a line may be of this kind of machine: with a GPU or without."""
    import platform

    import torch

    return torch.cuda.is_available() == (line["device"] != platform.machine())


def _commit() -> str | None:
    """Return the commit of the source, marked if there are changes; None if it is not known."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupt


def _outcome(ended: Ended) -> str:
    if ended.line is None:
        return f"failed ({ended.error})" + ("" if ended.last else ", is tried once more")
    part = "validation" if ended.planned.kind == "tune" else ended.planned.on
    if "diverged" in ended.line:
        return f"diverged after {len(ended.line['train_loss'])} rounds"
    last = ended.line[part][ended.planned.score][-1]
    return f"{'–' if last is None else f'{last:.4f}'} in {ended.line['seconds']} s"


def _print_list(planned: Sequence[Planned], studies: Sequence[Study], kind: Kind) -> None:
    for run in planned:
        print(run.title)
    for study in studies:
        own = [run for run in planned if run.file == study.file]
        done = read_runs(study, kind)
        seconds = sum(line["seconds"] for line in done) / len(done) if done else None
        expected = f", about {seconds * len(own) / 60:.1f} minutes of one process" if seconds else ""
        print(f"{study.name}: {len(own)} runs to play, {len(done)} done{expected}")


def _print_choices(studies: Sequence[Study], wanted: Mapping[Path, Asked]) -> None:
    """Print what was chosen, with a warning where it is at the edge of its grid."""
    for study in studies:
        seen, asked = set(), wanted[study.file]
        for run in plan(study, "run", Asked(asked.overrides, asked.arms), read_runs(study, "tune")):
            at = dict(study.tuned_at(run.point))
            if (run.arm, str(at)) in seen or not run.chosen:
                continue
            seen.add((run.arm, str(at)))
            best = "highest" if higher_is_better(study.score) else "lowest"
            print(f"{study.name}, {run.arm} {at or ''}: {dict(run.chosen)} ({best} {study.score} on validation)")
            for key in run.edge:
                print(f"warning: {key} = {run.chosen[key]} of '{run.arm}' is at the edge of its grid; widen the grid")


if __name__ == "__main__":
    sys.exit(main())
