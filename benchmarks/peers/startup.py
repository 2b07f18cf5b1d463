"""From a command to its result: ten rounds and one test, in processes that start cold, partita and Flower in turn.

Both sides train on the same examples from the same start, and must end with the same accuracy, or the comparison is
void.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from deals import BATCH, EXAMPLES, STEPS, lay_out
from drive import CLIENTS, HERE, QUIET, SIZES
from install import HOME, python_of
from work import LR, WEIGHT_DECAY, Shape, save

from partita.experiment.builder import build
from partita.experiment.config import load

CONFIG = """rounds = {rounds}
method = {{name = "fedavg"}}
[data]
name = "synthetic"
examples = {examples}
size = {pixels}
channels = 3
noise = {noise}
[split]
name = "iid"
clients = {clients}
[model]
name = "vit"
layers = {layers}
width = {width}
patch = {patch}
[training]
lr = {lr}
weight_decay = {decay}
batch_size = {batch}
steps = {steps}
[evaluate]
every = {rounds}
max_clients = 1
drift = false
[checkpoint]
every = {rounds}
"""
APP = """[project]
name = "peer"
version = "1.0.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "peer"
[tool.flwr.app.components]
serverapp = "flower_app:server_app"
clientapp = "flower_app:client_app"
[tool.flwr.app.config]
work = ""
"""
SUPERLINK = """[superlink]
default = "here"
[superlink.here]
address = ":local-in-memory:"
"""
SIDES = ("partita run", "partita run, 2 workers", "Flower, run_simulation", "Flower, flwr run")
LONGEST = 300  # seconds for one command
NOISE = 2.0  # so much that nobody gets all of the test right, which would hide a difference


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--sizes", nargs="*", default=["tiny", "small"])
    options.add_argument("--sides", nargs="*", default=list(SIDES))
    options.add_argument("--home", type=Path, default=HOME, help="where install.py put the environments")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    results = []
    for short in chosen.sizes:
        size = next(full for full in SIZES if full.split()[0] == short)
        row = measure(size, chosen.rounds, chosen.repeats, chosen.sides, chosen.home)
        results.append(row)
        show(row)
    if chosen.out:
        about = {
            "device": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "machine": "shared with other work; sides in turn",
            "work": f"{chosen.rounds} rounds of {CLIENTS} clients x {STEPS} AdamW steps x batch {BATCH}, and one test; "
            f"from the start of the command to its end, each time anew; median of {chosen.repeats}",
        }
        chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def measure(size: str, rounds: int, repeats: int, names: list[str], home: Path) -> dict[str, Any]:
    shape = SIZES[size]
    row: dict[str, Any] = {"model": size, "load before": round(os.getloadavg()[0], 2)}
    times: dict[str, list[float]] = {name: [] for name in names}
    reached: dict[str, float] = {}
    availability: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        prepare(folder, shape, rounds)
        for repeat in range(repeats):
            print(f"{size}: {repeat} of {repeats} repeats done", file=sys.stderr, flush=True)
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                if name not in availability:
                    try:
                        seconds, reached[name] = play(name, folder, home)
                        times[name].append(seconds)
                    except (OSError, ValueError) as error:
                        availability[name] = str(error)[-400:]
    ours = [reached[name] for name in reached if name.startswith("partita")]
    for name in list(reached):
        if ours and abs(reached[name] - ours[0]) > 0.01:
            availability[name] = f"void: it ends with an accuracy of {reached[name]}, and partita with {ours[0]}"
    row["sides"] = {
        name: {"seconds": statistics.median(kept), "each": kept, "accuracy": reached[name]}
        for name, kept in times.items()
        if name not in availability
    }
    row["not run"] = availability
    return row


def prepare(folder: Path, shape: Shape, rounds: int) -> None:
    text = CONFIG.format(
        rounds=rounds, clients=CLIENTS, examples=CLIENTS * EXAMPLES, lr=LR, decay=WEIGHT_DECAY, batch=BATCH,
        steps=STEPS, noise=NOISE, **vars(shape),
    )  # fmt: skip
    (folder / "experiment.toml").write_text(text)
    experiment = build(load(folder / "experiment.toml"))
    work = lay_out(shape, experiment.run, experiment.model, experiment.federation)
    save(work, folder / "work.safetensors")
    app = folder / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    for name in ("flower_app.py", "work.py"):
        shutil.copy(HERE / name, app / name)
    (folder / "flwr").mkdir()
    (folder / "flwr" / "config.toml").write_text(SUPERLINK)


def play(name: str, folder: Path, home: Path) -> tuple[float, float]:
    """(seconds, accuracy) of one command."""
    flower = python_of(home, "flower")
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    partita = [str(Path(sys.executable).with_name("partita")), "run", "--config", "experiment.toml", "--out", "run"]
    commands = {
        "partita run": partita,
        "partita run, 2 workers": [*partita, "--set", "engine.workers=2"],
        "Flower, run_simulation": [
            str(flower), str(HERE / "play_flower.py"), str(folder / "work.safetensors"), "final.safetensors", "test",
        ],
        "Flower, flwr run": [
            str(flower.with_name("flwr")), "run", "app", "--stream", "-c", f'work="{folder / "work.safetensors"}"',
            "--federation-config", f"num-supernodes={CLIENTS} client-resources-num-cpus=1",
        ],
    }  # fmt: skip
    path = f"{flower.parent}{os.pathsep}{os.environ['PATH']}" if name.startswith("Flower") else os.environ["PATH"]
    log = folder / "log"
    started = time.perf_counter()
    try:
        with log.open("w") as output:
            subprocess.run(
                commands[name], cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=True,
                timeout=LONGEST, env={**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(folder / "flwr")},
            )  # fmt: skip
        seconds = time.perf_counter() - started
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"took longer than {LONGEST} s") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"ended with {error.returncode}: {log.read_text(errors='replace')[-300:]}") from error
    finally:
        stop_what_stayed(folder / "flwr")
    if name.startswith("partita"):
        return seconds, json.loads((out / "result.json").read_text())["test"]["accuracy"]
    found = re.findall(r"accuracy (\d\.\d+)", log.read_text(errors="replace"))
    if not found:
        raise ValueError(f"told no accuracy: {log.read_text(errors='replace')[-300:]}")
    return seconds, float(found[-1])


def stop_what_stayed(flower_home: Path) -> None:
    """`flwr run` leaves a SuperLink behind. Ours is known by its FLWR_HOME, a folder made for this run."""
    mark = f"FLWR_HOME={flower_home}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGTERM)
    time.sleep(2)


def show(row: dict[str, Any]) -> None:
    print(f"{row['model']}; load before {row['load before']}")
    for name, side in row["sides"].items():
        print(f"  {name:24} {side['seconds']:7.1f} s   accuracy {side['accuracy']:.3f}")
    for name, reason in row["not run"].items():
        print(f"  {name:24} not run: {reason}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
