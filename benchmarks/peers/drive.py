"""The same rounds played by partita, by a bare PyTorch loop and by other tools, all in turn, round by round.

Each side is a process of its own, in its own environment (made by install.py), on the same start weights and batches.
A side whose final tensors differ from the bare loop's is void. A side that cannot run is named with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deals import BATCH, STEPS, lay_out, setting
from install import HOME, python_of
from safetensors.torch import load_file
from work import Shape, save

from partita.core.tensors import Tensors
from partita.engines.autotune import configure_backends

HERE = Path(__file__).parent
CLIENTS = 10
SIZES = {
    "tiny (1 layer, width 16, 5 tokens)": Shape(1, 16, 8, 4),
    "small (2, 64, 65)": Shape(2, 64, 32, 4),
    "medium (6, 192, 65)": Shape(6, 192, 32, 4),
}
# By side: the environment, the script, and what more it is told.
SIDES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "bare": ("", "play_bare.py", ()),
    "bare, 2 processes": ("", "play_bare.py", ("2",)),
    "partita": ("", "play_partita.py", ()),
    "partita, 2 workers": ("", "play_partita.py", ("2",)),
    "PFLlib's manner": ("", "play_pfllib_style.py", ()),
    "FedLab": ("fedlab", "play_fedlab.py", ()),
    "pfl": ("pfl", "play_pfl.py", ()),
    "Flower": ("flower", "play_flower.py", ()),
}
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "HF_HUB_OFFLINE": "1",
}
TOLERANCE = 1e-3
LONGEST = 900  # seconds for a round, or until it is ready


@dataclass
class Side:
    """A process that plays a round at our word."""

    process: subprocess.Popen[bytes]
    log: Path
    about: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def hear(self, what: str) -> Any:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], LONGEST)[0]:
            raise SideError(f"said nothing for {LONGEST} s")
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            last = [each.strip() for each in self.log.read_text(errors="replace").splitlines() if each.strip()]
            raise SideError(f"ended with {code}: {last[-1][:300] if last else 'without a word'}")
        return json.loads(line)[what]

    def say(self) -> None:
        assert self.process.stdin
        self.process.stdin.write(b"\n")

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()


class SideError(RuntimeError):
    """A side that could not play."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=4, help="the first is told apart: it warms up")
    options.add_argument("--clients", type=int, default=CLIENTS)
    options.add_argument("--sizes", nargs="*", default=list(SIZES))
    options.add_argument("--threads", type=int, help="for every process, in place of each side's own choice")
    options.add_argument("--sides", nargs="*", default=list(SIDES))
    options.add_argument("--home", type=Path, default=HOME, help="where install.py put the environments")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    if chosen.rounds < 2:
        options.error("--rounds must be at least 2")
    sizes = [next((full for full in SIZES if full.split()[0] == size), size) for size in chosen.sizes]
    if chosen.threads:
        os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    for size in sizes:
        row = measure(size, chosen.clients, chosen.rounds, ["bare", *chosen.sides], chosen.home)
        row["threads"] = chosen.threads or "each side's own choice"
        show(row)
        if chosen.out:
            write(chosen.out, row)


def measure(size: str, clients: int, rounds: int, names: list[str], home: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"model": size, "clients": clients, "load before": round(os.getloadavg()[0], 2)}
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        shape = SIZES[size]
        save(lay_out(shape, *setting(shape, clients, rounds)), folder / "work.safetensors")
        faults: dict[str, str] = {}
        sides: dict[str, Side] = {}
        try:
            for name in dict.fromkeys(names):
                with noted(faults, name):
                    sides[name] = launch(name, folder, home)
            for number in range(rounds):
                order = list(sides)
                round_info = number % len(order)
                for name in order[round_info:] + order[:round_info]:  # nobody always comes after the same one
                    with noted(faults, name):
                        play(sides[name])
            finals: dict[str, Tensors] = {}
            for name, side in sides.items():
                with noted(faults, name):
                    finals[name] = finish(side)
        finally:
            for side in sides.values():
                side.close()
        if "bare" not in finals:
            raise SystemExit(f"{size}: the bare loop failed: {faults['bare']}")
        row["sides"] = {}
        for name in sides:
            if name in faults:
                continue
            difference = apart(finals["bare"], finals[name])
            if not difference <= TOLERANCE:
                faults[name] = f"void: its tensors differ from the bare loop's by {difference:.1e}"
                continue
            row["sides"][name] = tell(sides[name], sides["bare"], difference)
        row["not run"] = faults
    return row


@contextmanager
def noted(faults: dict[str, str], name: str) -> Iterator[None]:
    """One side's fault is written down, and the others play on. Of several, the first tells why."""
    try:
        yield
    except (SideError, OSError) as error:
        faults.setdefault(name, str(error))


def launch(name: str, folder: Path, home: Path) -> Side:
    place, script, more = SIDES[name]
    python = python_of(home, place) if place else Path(sys.executable)
    if not python.exists():
        raise SideError(f"{place} is not installed; run: python benchmarks/peers/install.py --home {home}")
    log = folder / f"{name}.log"
    command = [str(python), str(HERE / script), str(folder / "work.safetensors"), str(folder / f"{name}.safetensors")]
    started = time.perf_counter()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            bufsize=0,  # or select would not see a second line
            env={**os.environ, **QUIET, "FLWR_HOME": str(folder / "flwr")},
        )  # fmt: skip
    side = Side(process, log)
    side.about = side.hear("ready")
    side.about["seconds until ready"] = round(time.perf_counter() - started, 2)
    return side


def play(side: Side) -> None:
    before = processor(side.process.pid)
    side.say()
    side.seconds.append(side.hear("seconds"))
    side.busy.append(processor(side.process.pid) - before)


def finish(side: Side) -> Tensors:
    tensors = load_file(side.hear("done"))
    side.about["megabytes"] = round(resident(side.process.pid) / 1e6)
    return tensors


def resident(pid: int) -> int:
    """Bytes that a process and all below it hold; what they share is counted once."""
    kept = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            kept = int(line.split()[1]) * 1024
    return kept + sum(resident(child) for child in children(pid))


def processor(pid: int) -> float:
    """Seconds of processors that a process and all below it have used: other people's work weighs little in them."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]  # own and of those that ended
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") + sum(processor(child) for child in children(pid))


def children(pid: int) -> list[int]:
    listed = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for each in listed for child in each]


def apart(bare: Tensors, other: Tensors) -> float:
    """The length of the largest difference of a tensor, against the tensor's own.

    Without the key biases: softmax cannot feel them, so AdamW moves them by rounding alone.
    """
    felt = [name for name in bare if "k_proj.bias" not in name]
    return max(float((bare[name] - other[name]).norm() / bare[name].norm()) for name in felt)


def tell(side: Side, bare: Side, difference: float) -> dict[str, Any]:
    first, *later = side.seconds
    return {
        **side.about,
        "first round": first,
        "later rounds": later,
        "seconds": statistics.median(later),
        "processor seconds": statistics.median(side.busy[1:]),
        "ratio to bare": over(later, bare.seconds[1:]),
        "processor ratio to bare": over(side.busy[1:], bare.busy[1:]),
        "difference": difference,
    }


def over(mine: list[float], its: list[float]) -> float:
    """Of the same round each: a machine's load comes and goes."""
    return statistics.median(one / other for one, other in zip(mine, its, strict=True))


def show(row: dict[str, Any]) -> None:
    print(f"{row['model']}, {row['clients']} clients; load before {row['load before']}")
    for name, side in row["sides"].items():
        print(
            f"  {name:20} {side['seconds']:8.3f} s a round  {side['ratio to bare']:5.2f} of bare  processor "
            f"{side['processor seconds']:7.2f} s {side['processor ratio to bare']:5.2f} of bare  first "
            f"{side['first round']:7.2f} s  ready in {side['seconds until ready']:5.1f} s  {side['megabytes']:5} MB  "
            f"threads {side['threads']}  difference {side['difference']:.0e}"
        )
    for name, reason in row["not run"].items():
        print(f"  {name:20} not run: {reason}")
    sys.stdout.flush()


def write(path: Path, row: dict[str, Any]) -> None:
    """A row takes the place of one of the same model, clients and threads; the others stay."""
    kept = json.loads(path.read_text())["results"] if path.exists() else []
    named = ("model", "clients", "threads")
    kept = [each for each in kept if any(each[key] != row[key] for key in named)]
    order = list(SIZES)
    results = sorted([*kept, row], key=lambda each: (str(each["threads"]), each["clients"], order.index(each["model"])))
    about = {
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "onednn": str(configure_backends("auto")),
        "machine": "shared with other work; sides in turn, round by round; 'load before' says how much there was",
        "work": f"{STEPS} AdamW steps x batch {BATCH} a client; medians of the rounds after the first",
        "memory": "megabytes of a side's processes at the end of its last round, shared pages once",
    }
    path.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
