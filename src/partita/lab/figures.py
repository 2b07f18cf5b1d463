"""The laboratory's figures and page. Lines are medians over seeds, bands go from the first to the third quarter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from partita.lab import experiments as lab
from partita.report.plot_style import COLORS, INK, MUTED, new_figure, style_axes, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAYS = {"never": "never frozen", "fixed": f"warm-up {lab.FIXED}", "auto": "automatic", "best": "best, by trying all"}
LOCAL = 40  # gradient steps of a client in a round, where they are not what is varied


@dataclass(frozen=True)
class CaptionedFigure:
    name: str
    figure: Figure
    caption: str


def fig1(seeds: int, done: Callable[[], None]) -> CaptionedFigure:
    """Stage 1 as descent on the profile objective."""
    figure = new_figure(7.2, 4.0)
    axes = figure.add_subplot()
    gaps = lab.profile_descent(lab.LEVELS, seeds, steps=20)  # (round + 1, level, seed)
    for place, level in enumerate(lab.LEVELS):
        _line(axes, range(lab.ROUNDS + 1), gaps[:, place], COLORS[place], f"level {level:g}")
    axes.set_yscale("log")
    axes.tick_params(axis="y", which="both", labelsize=8.5)
    style_axes(axes, "rounds of warm-up", "profile objective above the least found")
    _legend(axes, "heterogeneity")
    done()
    caption = (
        "Warm-up descends on the profile objective, the loss that is left when the value weights are at their best for "
        f"the kernel. Twenty local steps a round. {_setting(seeds)}"
    )
    return CaptionedFigure("fig1", figure, caption)


def fig2(seeds: int, done: Callable[[], None]) -> CaptionedFigure:
    """Local steps, warm-up, heterogeneity, and the two parts of the loss."""
    figure = new_figure(10.4, 7.4)
    panels = figure.subplots(2, 2).flatten()
    titles = ("Sensitivity to local steps", "Choice of the warm-up", "Robustness to heterogeneity", "Bias and drift")
    for letter, title, axes in zip("abcd", titles, panels, strict=True):
        axes.set_title(f"{letter}  {title}", loc="left", fontsize=10.5, color=INK, fontweight="bold")
    _local_steps(panels[0], seeds, done)
    batch = lab.run(lab.LEVELS, seeds, LOCAL)
    done()
    found, losses, auto = lab.choices(batch)
    _warmups(panels[1], losses, auto)
    _levels(panels[2], found)
    bias, excess = lab.bias_and_drift(batch)
    _parts(panels[3], bias, excess)
    done()
    caption = (
        "(a) Final loss by local steps at heterogeneity 1. (b) Final loss of every fixed warm-up against never "
        "freezing; a dot is a seed for which the automatic rule froze, and what it reached. (c) Final loss by "
        "heterogeneity. (d) What an imperfect kernel costs (bias, solid) and what FedAvg's fixed point under it adds "
        "(drift, dashed), in closed form. "
        f"(b) to (d) with {LOCAL} local steps. {_setting(seeds)}"
    )
    return CaptionedFigure("fig2", figure, caption)


def _setting(seeds: int) -> str:
    return (
        f"Identity feature map, {lab.ROUNDS} rounds, full batches, eight clients, step size {lab.RATE} of the steepest "
        f"client's, ridge {lab.RIDGE}; median and middle half of {seeds} seeds."
    )


def _local_steps(axes: Axes, seeds: int, done: Callable[[], None]) -> None:
    rows = []
    for steps in lab.STEPS:
        found, _, _ = lab.choices(lab.run((1.0,), seeds, steps))
        rows.append(found)
        done()
    for place, (way, label) in enumerate(WAYS.items()):
        _line(axes, lab.STEPS, torch.stack([getattr(row, way) for row in rows]), COLORS[place], label, DASHES[way])
    axes.set_xscale("log")
    axes.set_xticks(lab.STEPS, [str(steps) for steps in lab.STEPS])
    axes.minorticks_off()
    style_axes(axes, "local steps a round", "final loss")
    _legend(axes)


# What often coincides is drawn so that both can be seen.
DASHES = {"never": "solid", "fixed": "solid", "auto": (0, (4, 2)), "best": (0, (1, 1.5))}


def _warmups(axes: Axes, losses: Tensor, auto: Tensor) -> None:
    against = lab.by_level(losses / losses[-1], lab.LEVELS)  # (warm-up, level, seed)
    chosen = lab.by_level(auto, lab.LEVELS)
    for place, level in enumerate(lab.LEVELS):
        _line(axes, range(lab.ROUNDS + 1), against[:, place], COLORS[place], f"level {level:g}")
        [froze] = torch.nonzero(chosen[place] < lab.ROUNDS, as_tuple=True)  # (seed,)
        when = chosen[place][froze]
        axes.plot(
            when,
            against[when, place, froze],
            "o",
            color=COLORS[place],
            markersize=5,
            markeredgecolor="white",
            zorder=4,
        )
    axes.axhline(1.0, color=MUTED, linewidth=0.8)
    axes.set_ylim(0.9, 1.6)
    style_axes(axes, "rounds of warm-up", "final loss against never freezing")
    _legend(axes, "heterogeneity")


def _levels(axes: Axes, found: lab.Choices) -> None:
    for place, (way, label) in enumerate(WAYS.items()):
        values = lab.by_level(getattr(found, way), lab.LEVELS)  # (level, seed)
        _line(axes, lab.LEVELS, values, COLORS[place], label, DASHES[way])
    style_axes(axes, "heterogeneity", "final loss")
    _legend(axes)


def _parts(axes: Axes, bias: Tensor, excess: Tensor) -> None:
    for place, level in enumerate(lab.LEVELS):
        if level == 0:  # nothing drifts where clients differ by sampling alone
            continue
        for part, dash, label in ((bias, "solid", f"level {level:g}"), (excess, (0, (4, 2)), None)):
            values = lab.by_level(part, lab.LEVELS)[:, place]
            _line(axes, range(lab.ROUNDS + 1), values, COLORS[place], label, dash)
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-3)
    style_axes(axes, "rounds of warm-up before freezing", "loss: bias (solid), drift (dashed)")
    _legend(axes, "heterogeneity")


def _line(
    axes: Axes, across: Sequence[float], values: Tensor, colour: str, label: str | None, dash: Any = "solid"
) -> None:
    """values: (place, seed)."""
    low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype), dim=-1)
    axes.plot(across, middle, color=colour, linewidth=1.8, linestyle=dash, label=label, zorder=3)
    axes.fill_between(across, low, high, color=colour, alpha=0.13, linewidth=0, zorder=2)


def _legend(axes: Axes, title: str | None = None) -> None:
    axes.legend(title=title, frameon=False, fontsize=8.5, title_fontsize=8.5, labelcolor=INK)


def save(drawn: CaptionedFigure, folder: Path) -> list[Path]:
    """PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{drawn.name}.png", folder / f"{drawn.name}.svg"]
    drawn.figure.savefig(paths[0], dpi=170, facecolor="white")
    drawn.figure.savefig(paths[1], facecolor="white", metadata={"Date": None})
    return paths


def page(drawn: Sequence[CaptionedFigure], path: Path) -> Path:
    """One HTML file that loads nothing from elsewhere."""
    css = (files("partita.report") / "page.css").read_text(encoding="utf-8")
    title = "Attention kernels, frozen: the linear-attention laboratory"
    figures = "".join(
        f"<figure>{svg(each.figure, each.name)}<figcaption>{escape(each.caption)}</figcaption></figure>\n"
        for each in drawn
    )
    path.write_text(
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{css}</style>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n{figures}</main>\n</body>\n</html>\n",
        encoding="utf-8",
    )
    return path
