"""FedFrozen's theory on linear attention: bias, drift and the choice of warm-up, as figures and a page.

    python studies/laboratory/figures.py                both figures and the page laboratory.html, in runs/lab
    python studies/laboratory/figures.py fig1           one figure; likewise fig2
    python studies/laboratory/figures.py --out FOLDER --seeds 12

Lines are medians over seeds, bands the range between the quartiles.
"""

from __future__ import annotations

import argparse
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from linear_attention import experiments as lab
from rich.console import Console
from rich.progress import Progress

from partita.report.plot_style import COLORS, INK, MUTED, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHOICE_LABELS = {
    "never": "never frozen",
    "fixed": f"warm-up {lab.FIXED}",
    "auto": "automatic",
    "best": "best, by trying all",
}
STAGES = {"fig1": 1, "fig2": len(lab.STEPS) + 2}  # progress updates of each figure
LOCAL = 40  # a client's gradient steps per round, in panels that do not vary them


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure with its file name and caption."""

    name: str
    figure: Figure
    caption: str


def fig1(seeds: int, done: Callable[[], None]) -> CaptionedFigure:
    """Draw the warm-up as descent on the profile objective.

    Args:
        seeds: Number of seeds.
        done: Called after each part, to report progress.
    """
    figure = new_figure(7.2, 4.0)
    axes = figure.add_subplot()
    gaps = lab.profile_descent(lab.LEVELS, seeds, steps=20)  # (round + 1, level, seed)
    for place, level in enumerate(lab.LEVELS):
        _line(axes, range(lab.ROUNDS + 1), gaps[:, place], COLORS[place], f"level {level:g}")
    axes.set_yscale("log")
    axes.tick_params(axis="y", which="both", labelsize=8.5)
    style_axes(axes, "rounds of warm-up", "profile objective above the minimum found")
    _legend(axes, "heterogeneity")
    done()
    caption = (
        "The warm-up descends on the profile objective, the loss with optimal value weights for the kernel. Twenty "
        f"local steps per round. {_setting(seeds)}"
    )
    return CaptionedFigure("fig1", figure, caption)


def fig2(seeds: int, done: Callable[[], None]) -> CaptionedFigure:
    """Draw the effect of local steps, warm-up and heterogeneity, and the two parts of the loss.

    Args:
        seeds: Number of seeds.
        done: Called after each part, to report progress.
    """
    figure = new_figure(10.4, 7.4)
    panels = figure.subplots(2, 2).flatten()
    titles = ("Sensitivity to local steps", "Choice of the warm-up", "Robustness to heterogeneity", "Bias and drift")
    for letter, title, axes in zip("abcd", titles, panels, strict=True):
        axes.set_title(f"{letter}  {title}", loc="left", fontsize=10.5, color=INK, fontweight="bold")
    _local_steps(panels[0], seeds, done)
    batch = lab.run(lab.LEVELS, seeds, LOCAL)
    done()
    final, losses, auto = lab.choices(batch)
    _warmups(panels[1], losses, auto)
    _levels(panels[2], final)
    bias, excess = lab.bias_and_drift(batch)
    _parts(panels[3], bias, excess)
    done()
    caption = (
        "(a) Final loss by local steps at heterogeneity 1. (b) Final loss of every fixed warm-up, relative to never "
        "freezing; a dot is a seed for which the automatic rule froze, at the loss it reached. (c) Final loss by "
        "heterogeneity. (d) Loss due to an imperfect kernel (bias, solid) and excess loss of FedAvg's fixed point "
        "under that kernel (drift, dashed), in closed form. "
        f"(b) to (d) with {LOCAL} local steps. {_setting(seeds)}"
    )
    return CaptionedFigure("fig2", figure, caption)


def _setting(seeds: int) -> str:
    return (
        f"Identity feature map, {lab.ROUNDS} rounds, full batches, eight clients, learning rate {lab.RATE} relative to "
        f"the steepest client's curvature, ridge {lab.RIDGE}; median and interquartile range of {seeds} seeds."
    )


def _local_steps(axes: Axes, seeds: int, done: Callable[[], None]) -> None:
    rows = []
    for steps in lab.STEPS:
        final, _, _ = lab.choices(lab.run((1.0,), seeds, steps))
        rows.append(final)
        done()
    for place, (choice, label) in enumerate(CHOICE_LABELS.items()):
        _line(
            axes, lab.STEPS, torch.stack([getattr(row, choice) for row in rows]), COLORS[place], label, DASHES[choice]
        )
    axes.set_xscale("log")
    axes.set_xticks(lab.STEPS, [str(steps) for steps in lab.STEPS])
    axes.minorticks_off()
    style_axes(axes, "local steps per round", "final loss")
    _legend(axes)


# Lines that often coincide get different dashes, so that both are visible.
DASHES = {"never": "solid", "fixed": "solid", "auto": (0, (4, 2)), "best": (0, (1, 1.5))}


def _warmups(axes: Axes, losses: torch.Tensor, auto: torch.Tensor) -> None:
    relative = lab.by_level(losses / losses[-1], lab.LEVELS)  # (warm-up, level, seed)
    chosen = lab.by_level(auto, lab.LEVELS)
    for place, level in enumerate(lab.LEVELS):
        _line(axes, range(lab.ROUNDS + 1), relative[:, place], COLORS[place], f"level {level:g}")
        [frozen_seeds] = torch.nonzero(chosen[place] < lab.ROUNDS, as_tuple=True)  # (seed,)
        when = chosen[place][frozen_seeds]
        axes.plot(
            when,
            relative[when, place, frozen_seeds],
            "o",
            color=COLORS[place],
            markersize=5,
            markeredgecolor="white",
            zorder=4,
        )
    axes.axhline(1.0, color=MUTED, linewidth=0.8)
    axes.set_ylim(0.9, 1.6)
    style_axes(axes, "rounds of warm-up", "final loss relative to never freezing")
    _legend(axes, "heterogeneity")


def _levels(axes: Axes, final: lab.Choices) -> None:
    for place, (choice, label) in enumerate(CHOICE_LABELS.items()):
        values = lab.by_level(getattr(final, choice), lab.LEVELS)  # (level, seed)
        _line(axes, lab.LEVELS, values, COLORS[place], label, DASHES[choice])
    style_axes(axes, "heterogeneity", "final loss")
    _legend(axes)


def _parts(axes: Axes, bias: torch.Tensor, excess: torch.Tensor) -> None:
    for place, level in enumerate(lab.LEVELS):
        if level == 0:  # no drift if clients differ only by sampling
            continue
        for part, dash, label in ((bias, "solid", f"level {level:g}"), (excess, (0, (4, 2)), None)):
            values = lab.by_level(part, lab.LEVELS)[:, place]
            _line(axes, range(lab.ROUNDS + 1), values, COLORS[place], label, dash)
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-3)
    style_axes(axes, "rounds of warm-up before freezing", "loss: bias (solid), drift (dashed)")
    _legend(axes, "heterogeneity")


def _line(
    axes: Axes, across: Sequence[float], values: torch.Tensor, color: str, label: str | None, dash: Any = "solid"
) -> None:
    """Draw a median with its quartile band. `values` has shape (x, seed)."""
    low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype), dim=-1)
    axes.plot(across, middle, color=color, linewidth=1.8, linestyle=dash, label=label, zorder=3)
    axes.fill_between(across, low, high, color=color, alpha=0.13, linewidth=0, zorder=2)


def _legend(axes: Axes, title: str | None = None) -> None:
    axes.legend(title=title, frameon=False, fontsize=8.5, title_fontsize=8.5, labelcolor=INK)


def save(drawn: CaptionedFigure, folder: Path) -> list[Path]:
    """Save a figure as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{drawn.name}.png", folder / f"{drawn.name}.svg"]
    drawn.figure.savefig(paths[0], dpi=170, facecolor="white")
    drawn.figure.savefig(paths[1], facecolor="white", metadata={"Date": None})
    return paths


def page(drawn: Sequence[CaptionedFigure], folder: Path) -> Path:
    """Write the saved figures to one self-contained HTML file."""
    title = "Attention kernels, frozen: the linear-attention laboratory"
    shown = ""
    for item in drawn:
        source = b64encode((folder / f"{item.name}.svg").read_bytes()).decode()
        shown += f'<figure><img alt="{item.name}" src="data:image/svg+xml;base64,{source}">'
        shown += f"<figcaption>{escape(item.caption)}</figcaption></figure>\n"
    path = folder / "laboratory.html"
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
    path.write_text(f"{head}<h1>{title}</h1>\n{shown}</html>\n", encoding="utf-8")
    return path


def draw(what: str, out: Path, seeds: int) -> list[Path]:
    """Draw one figure, or with "all" both and the page. Return the files written."""
    names = list(STAGES) if what == "all" else [what]
    written: list[Path] = []
    drawn = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("laboratory", total=sum(STAGES[name] for name in names))
        for name in names:
            figure = fig1 if name == "fig1" else fig2
            drawn.append(figure(seeds, lambda: progress.advance(task)))
            written += save(drawn[-1], out)
    return [*written, page(drawn, out)] if what == "all" else written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=[*STAGES, "all"], default="all")
    parser.add_argument("--out", type=Path, default=Path("runs/lab"), help="folder to write to")
    parser.add_argument("--seeds", type=int, default=12, help="random federations per setting")
    asked = parser.parse_args()
    print(*draw(asked.what, asked.out, asked.seeds), sep="\n")


if __name__ == "__main__":
    main()
