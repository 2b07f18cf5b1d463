"""All benchmarks in one table of ratios, from the results that are there; --run plays those of the CPU afresh first."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
# What --run plays: the script, what it is told, and the results it writes.
RUNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("run.py", ("--device", "cpu", "--repeats", "5"), "cpu.json"),
    ("workers.py", (), "workers.json"),
    ("scale.py", (), "scale.json"),
    ("cache.py", ("--device", "cpu", "--repeats", "3"), "cache.json"),
    ("parts.py", ("--device", "cpu"), "parts.json"),
    ("peers/install.py", (), ""),
    ("peers/drive.py", (), "peers.json"),
    ("peers/drive.py", ("--threads", "1"), "peers.json"),
    ("peers/startup.py", (), "startup.json"),
    ("peers/growth.py", (), "growth.json"),
)
PEAK = 790e12  # floating-point operations a second that a large product of matrices in bfloat16 reaches on an H200
MLP_RATIO = 2  # of the models in run.py
NO_TIME = re.compile(r"difference|rounding|floor|ratio|byte|[GM]i?B|memory|peak|parameters|layers|width|tokens|load")


@dataclass(frozen=True)
class Line:
    group: str
    setting: str
    side: str
    amount: str
    ratio: float | None = None
    against: str = ""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--run", action="store_true", help="takes an hour and a half on two cores")
    chosen = options.parse_args()
    if chosen.run:
        play()
    lines = [line for part in PARTS for line in part()]
    widths = [max((len(text) for text in column), default=0) for column in zip(*map(cells, lines), strict=True)]
    group = ""
    for line in lines:
        if line.group != group:
            group = line.group
            print(f"\n{group}")
        padded = [f"{text:>{width}}" if place in (2, 3) else f"{text:{width}}"
                  for place, (text, width) in enumerate(zip(cells(line), widths, strict=True))]  # fmt: skip
        print("  " + "  ".join(padded).rstrip())
    print(f"\nA ratio above 1 is better than what it is taken to.\n{FLOOR}")


def cells(line: Line) -> tuple[str, str, str, str, str]:
    ratio = "" if line.ratio is None else f"{line.ratio:.2f}x"
    return line.setting, line.side, line.amount, ratio, line.against


def play() -> None:
    for script, more, result in RUNS:
        out = ("--out", str(RESULTS / result)) if result else ()
        print(f"{script} {' '.join(more)}", flush=True)
        subprocess.run([sys.executable, str(HERE / script), *more, *out], check=True)


def read(name: str) -> dict[str, Any]:
    """Nothing where there is no such result: the table shows what there is."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else {}


def peers() -> Iterator[Line]:
    for row in read("peers.json").get("results", []):
        # One thread was measured for the sake of processor time, which does not depend on who else is there.
        alone = row["threads"] == 1
        group = "CPU, one thread a process, processor time" if alone else "CPU, wall clock"
        clock, ratio = ("processor seconds", "processor ratio to bare") if alone else ("seconds", "ratio to bare")
        for side, told in row["sides"].items():
            against = "" if side == "bare" else "bare loop"
            yield Line(group, row["model"], side, span(told[clock]), None if not against else 1 / told[ratio], against)
        for side, reason in row["not run"].items():
            yield Line(group, row["model"], side, "not run", None, reason)


def startup() -> Iterator[Line]:
    group = "Command to result: ten rounds and a test, cold"
    for row in read("startup.json").get("results", []):
        ours = [told["seconds"] for side, told in row["sides"].items() if side.startswith("partita")]
        for side, told in row["sides"].items():
            flower = side.startswith("Flower") and ours
            ratio = told["seconds"] / min(ours) if flower else None
            yield Line(
                group, row["model"], side, span(told["seconds"]), ratio, "partita is so much faster" if flower else ""
            )
        for side, reason in row["not run"].items():
            yield Line(group, row["model"], side, "not run", None, reason)


def blocks() -> Iterator[Line]:
    yield from against_bare("CPU, clients side by side", read("cpu.json"))
    yield from against_bare("CPU, processes", read("workers.json"))
    yield from against_bare("CPU with AMX, two cores, processes", read("workers-amx.json"))


def gpu() -> Iterator[Line]:
    found = read("gpu.json")
    group = f"GPU, {found['environment']['device']}" if found else ""
    for row in found.get("results", []):
        yield from against_bare(group, {"results": [row]})
        if floor := arithmetic_floor(row["model"], found["environment"]["work"]):
            best = min(row[side] for side in ("bare", *sides_of(row)))
            told = f"the best side takes {best / floor:,.0f} times as long"
            yield Line(group, row["model"], "arithmetic alone", span(floor), None, told)
        runs = [run for run in found.get("hosts", []) if run["model"] == row["model"]]
        for side in sides_of(runs[0]) if runs else ():
            speeds, times = [run["bare"] / run[side] for run in runs], [run[side] for run in runs]
            told = f"bare loop: {min(speeds):.0f} to {max(speeds):.0f} times on {len(runs)} hosts"
            yield Line(group, row["model"], side, f"{span(min(times))} to {span(max(times))}", None, told)


def against_bare(group: str, found: dict[str, Any]) -> Iterator[Line]:
    for row in found.get("results", []):
        for side in ("bare", *sides_of(row)):
            against = "" if side == "bare" else "bare loop"
            ratio = row["bare"] / row[side] if against else None
            yield Line(group, row["model"], side, span(row[side]), ratio, against)


def sides_of(row: dict[str, Any]) -> list[str]:
    """Whatever was timed beside the bare loop."""
    numbers = [name for name, value in row.items() if isinstance(value, float)]
    return [name for name in numbers if name != "bare" and not NO_TIME.search(name)]


FLOOR = f"""Arithmetic alone: 6 x examples x tokens x layers x ((4 + 2 x MLP ratio) x width^2 + 2 x tokens x width)
operations, with an MLP ratio of {MLP_RATIO}, at {PEAK / 1e12:.0f} TFLOP/s: a multiply and an add, forward once and
backward twice, for the products inside the layers; embedding and head are left out."""


def dimensions(model: str) -> list[int]:
    """Layers, width and tokens, of which a model's name tells."""
    return [int(number) for number in re.findall(r"\d+", model.partition("(")[2])]


def arithmetic_floor(model: str, work: str) -> float | None:
    """Seconds of a round, for a model named by its layers, width and tokens and work told as clients, steps, batch."""
    shape = dimensions(model)
    counts = re.match(r"(\d+) clients x (\d+) \w+ steps x batch (\d+)", work)
    if len(shape) != 3 or not counts:
        return None
    layers, width, tokens = shape
    examples = prod(int(count) for count in counts.groups())
    return 6 * examples * tokens * layers * ((4 + 2 * MLP_RATIO) * width**2 + 2 * tokens * width) / PEAK


def cache() -> Iterator[Line]:
    for row in read("cache.json").get("results", []):
        setting = f"lowest {row['frozen']} of 6 layers frozen"
        ratio = row["without"] / row["with"]
        yield Line("Frozen layers computed once", setting, "cache_frozen", span(row["with"]), ratio, "without it")


def parts() -> Iterator[Line]:
    for name, where in (("parts.json", "CPU"), ("parts-gpu.json", "GPU")):
        found = {row["side"]: row["seconds"] for row in read(name).get("results", [])}
        for side, seconds in found.items():
            against = "" if side == "fedavg" else "fedavg"
            ratio = found["fedavg"] / seconds if against else None
            yield Line(
                "Training fewer parts", f"{where}, 6 layers of 192, 65 tokens", side, span(seconds), ratio, against
            )


def prompts() -> Iterator[Line]:
    found = read("prompts.json")
    rows = {(row["method"], row["block"]): row for row in found.get("results", [])}
    for (method, block), row in rows.items():
        group = f"Prompts beside ViT-B/16, {found['environment']['device']}"
        seconds = row["milliseconds a client's step"] / 1000
        ratio = rows[method, 1]["milliseconds a client's step"] / 1000 / seconds if block > 1 else None
        told = f"one by one; {row['peak GiB on the GPU']} GiB" if ratio else f"{row['peak GiB on the GPU']} GiB"
        yield Line(group, f"{method}, {block} clients side by side", "a client's step", span(seconds), ratio, told)


def precision() -> Iterator[Line]:
    for name, where in (("precision-gpu.json", "GPU"), ("precision-amx.json", "CPU with AMX")):
        found = read(name)
        for kind in ("float32", "bfloat16") if found else ():
            last = [row["losses"][-1] for row in found["results"] if row["precision"] == kind]
            told = f"± {stdev(last):.4f} over {len(last)} seeds"
            setting = f"{where}, 6 layers of 192"
            yield Line("Precision, last loss of 20 rounds on digits", setting, kind, f"{mean(last):.4f}", None, told)


def growth() -> Iterator[Line]:
    found = read("growth.json")
    group = "Growth, processor time of one thread"
    for row in found.get("cohort", []):
        for side, told in row["sides"].items():
            against = "" if side == "bare" else "bare loop"
            ratio = 1 / told["processor ratio to bare"] if against else None
            setting = f"{row['clients']} clients, {row['model']}"
            yield Line(group, setting, side, span(told["processor seconds"]), ratio, against)
    few = found["population"][0]["processor seconds"] if found else 0.0
    for row in found.get("population", []):
        seconds = row["processor seconds"]
        yield Line(
            group, f"{row['population']:,} registered", "partita", span(seconds), few / seconds, "1,000 registered"
        )


def memory() -> Iterator[Line]:
    group = "Memory"
    # Of each model the last row: threads change little in it.
    for row in {row["model"]: row for row in read("peers.json").get("results", [])}.values():
        for side, told in row["sides"].items():
            ratio = None if side == "bare" else row["sides"]["bare"]["megabytes"] / told["megabytes"]
            yield Line(
                group, row["model"], side, f"{told['megabytes']} MB", ratio, "" if side == "bare" else "bare loop"
            )
    for row in read("scale.json").get("results", []):
        amount = f"{row['late']:.0f} MB"
        yield Line(
            group, "1,000,000 registered", row["method"], amount, row["early"] / row["late"], "a tenth of the run"
        )
    for name in ("large.json", "large-gpu.json"):
        found = read(name)
        for row in found.get("results", []):
            peak = row.get("peak GiB on the GPU", row["peak GiB after the round"])
            yield Line(group, f"{row['parameters'] / 1e9:.2f} billion", found["environment"]["device"], f"{peak} GiB")


PARTS = (peers, startup, gpu, precision, prompts, blocks, parts, cache, growth, memory)


def span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


if __name__ == "__main__":
    main()
