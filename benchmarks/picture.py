"""Draws what the results say of speed, for the README: docs/speed.png."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from table import dimensions, read, sides_of

OURS, THEIRS, BARE = "#1f6f8b", "#c9a227", "#8a8f98"
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # behind numbers, where a line passes
SHADES = ("#cfe3f0", "#9ecae1", "#4a9dbd", "#1f6f8b", "#124559", "#0b2b3a")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "speed.png")
    chosen = options.parse_args()
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10})
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15)
    figure, ((real, private), (cpu, command), (gpu, growth)) = plt.subplots(3, 2, figsize=(11, 10.2), layout=layout)
    draw_models(real)
    draw_private(private)
    draw_peers(cpu)
    draw_command(command)
    draw_gpu(gpu)
    draw_growth(growth)
    figure.savefig(chosen.out, dpi=130)
    print(chosen.out)


MODELS = {"llama": "LLaMA of 135M", "bert": "BERT, 6 x 384", "vit": "ViT-B/16"}
SIDES = {"bare": "bare loop", "compiled": "partita, compiled"}


def draw_models(axes: Axes) -> None:
    """Medians of whole rounds in bfloat16."""
    axes.set_title("GPU (NVIDIA H200): a round of real models, all parameters", loc="left")
    rows = read("models-gpu.json").get("results", [])
    found = [
        (label, {SIDES[row["side"]]: row["ms"] for row in rows if row["work"] == work and row["side"] in SIDES})
        for work, label in MODELS.items()
    ]
    bars(axes, found, "{:,.0f} ms")
    axes.set_xlabel("milliseconds of a round, bfloat16 (less is better)")


def draw_private(axes: Axes) -> None:
    """LoRA was measured before the noise had kernels of its own, so its bars are upper bounds."""
    axes.set_title("GPU (NVIDIA H200): DP-SGD against plain training", loc="left")
    found = []
    for name, work, label in (
        ("private-gpu-before-kernels.json", "lora", "LoRA on a LLaMA of 135M"),
        ("private-gpu.json", "bert", "BERT, 6 x 384"),
    ):
        times = {row["side"]: row["median"] for row in read(name)["results"] if row["work"] == work and "median" in row}
        plain = next(seconds for side, seconds in times.items() if side.startswith("plain") and "graphs" in side)
        shown = {
            f"partita, {'Poisson' if 'Poisson' in side else 'shuffled'}": seconds / plain
            for side, seconds in times.items()
            if side.startswith("ghost") and "together, graphs" in side
        }
        found.append((label, {**shown, "Opacus, ghost": times["Opacus, ghost, one by one"] / plain}))
    bars(axes, found, "{:.1f}x")
    axes.axvline(1, color="black", linewidth=0.8, zorder=0)
    axes.set_xlabel("times as long as partita's plain training (less is better)")


def short(model: str) -> str:
    return model.partition(" (")[0]


def color_of(side: str) -> str:
    return OURS if side.startswith("partita") else BARE if side.startswith("bare") else THEIRS


def draw_peers(axes: Axes) -> None:
    """By the processors' time: it hardly depends on what else a machine does. To share clients out changes nothing in
    it, so those sides are left to the table.
    """
    rows = [row for row in read("peers.json").get("results", []) if row["threads"] == 1]
    axes.set_title("CPU: speed of a round, by the processors' time", loc="left")
    shared = ("bare", "bare, 2 processes", "partita, 2 workers")
    found = [
        (row["model"], {s: 1 / told["processor ratio to bare"] for s, told in row["sides"].items() if s not in shared})
        for row in rows
    ]
    bars(axes, found, "{:.2f}")
    axes.axvline(1, color="black", linewidth=0.8, zorder=0)
    axes.set_xlabel("times as fast as a bare PyTorch loop (more is better)")


def draw_command(axes: Axes) -> None:
    axes.set_title("CPU: from the command to its result, 10 rounds", loc="left")
    rows = read("startup.json").get("results", [])
    bars(
        axes,
        [(row["model"], {side: told["seconds"] for side, told in row["sides"].items()}) for row in rows],
        "{:.0f} s",
    )
    axes.set_xlabel("seconds, from a cold start (less is better)")


def bars(axes: Axes, rows: list[tuple[str, dict[str, float]]], shown: str) -> None:
    """One group for each side, and in it one bar for each model."""
    if not rows:
        axes.text(0.5, 0.5, "no results", ha="center", transform=axes.transAxes)
        return
    names = list(dict.fromkeys(side for _, sides in rows for side in sides))
    step = min(0.4, 0.84 / len(rows))
    for place, (model, sides) in enumerate(rows):
        for line, side in enumerate(names):
            if side in sides:
                y = line + (place - (len(rows) - 1) / 2) * step
                axes.barh(y, sides[side], step * 0.88, color=color_of(side), alpha=0.4 + 0.6 * (place + 1) / len(rows))
                text = f" {shown.format(sides[side])}  {short(model)}"
                axes.text(sides[side], y, text, va="center", fontsize=6.5, bbox=WHITE)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(value for _, sides in rows for value in sides.values()))


def draw_gpu(axes: Axes) -> None:
    found = read("gpu.json")
    rows: list[dict[str, Any]] = found.get("results", [])
    axes.set_title(f"GPU ({found['environment']['device']}): speed of a round" if found else "GPU", loc="left")
    names = list(dict.fromkeys(side for row in rows for side in sides_of(row)))
    step = 0.84 / max(1, len(names))
    for line, side in enumerate(names):
        places = [place for place, row in enumerate(rows) if side in row]
        speeds = [rows[place]["bare"] / rows[place][side] for place in places]
        xs = [place + (line - (len(names) - 1) / 2) * step for place in places]
        axes.bar(xs, speeds, step * 0.9, color=SHADES[line % len(SHADES)], label=f"partita, {side}")
        for x, speed in zip(xs, speeds, strict=True):
            axes.text(x, speed, f"{speed:.2g}", ha="center", va="bottom", fontsize=6.5, bbox=WHITE)
    axes.axhline(1, color="black", linewidth=0.8, zorder=0)
    axes.set_xticks(range(len(rows)), [f"{short(row['model'])}\n{tuple(dimensions(row['model']))}" for row in rows])
    axes.set_ylabel("times as fast as a bare PyTorch loop")
    axes.margins(y=0.4)  # room for the legend
    if names:
        axes.legend(frameon=False, fontsize=7.5, ncols=2, loc="upper left")


def draw_growth(axes: Axes) -> None:
    """Everything against its own smallest setting, so that they fit one picture."""
    found = read("growth.json")
    axes.set_title("CPU: what a round costs as the federation grows", loc="left")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("times as many clients")
    axes.set_ylabel("times as long")
    for side, mark in (("bare", "s--"), ("partita", "o-")):
        rows = [row for row in found.get("cohort", []) if side in row["sides"]]
        line(axes, [(row["clients"], row["sides"][side]["processor seconds"]) for row in rows], mark, color_of(side),
             f"{side}: cohorts of 10 to 40")  # fmt: skip
    people = [(row["population"], row["processor seconds"]) for row in found.get("population", [])]
    line(axes, people, "D-", SHADES[2], "partita: 1,000 to 1,000,000 registered, cohorts of 100")
    axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.set_yticks([1, 2, 4], ["1", "2", "4"])
    axes.minorticks_off()
    axes.set_ylim(0.7, 7)
    if found:
        axes.legend(frameon=False, fontsize=7.5, loc="upper right")


def line(axes: Axes, points: list[tuple[int, float]], mark: str, shade: str, label: str) -> None:
    if points:
        first = points[0]
        xs, ys = zip(*((count / first[0], seconds / first[1]) for count, seconds in points), strict=True)
        axes.plot(xs, ys, mark, color=shade, label=label, markersize=4)


if __name__ == "__main__":
    main()
