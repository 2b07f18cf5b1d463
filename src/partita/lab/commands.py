"""The command `partita lab`: write figures to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from partita.lab import figures
from partita.lab.experiments import STEPS

STAGES = {"fig1": 1, "fig2": len(STEPS) + 2}  # progress updates of each figure


def make(what: Literal["fig1", "fig2", "all"], out: Path, seeds: int = 12) -> list[Path]:
    """Draw one figure or all as PNG and SVG. With "all", also write an HTML page.

    Args:
        what: The figure to draw.
        out: Output folder.
        seeds: Number of seeds.

    Returns:
        The files written.
    """
    names = list(STAGES) if what == "all" else [what]
    written: list[Path] = []
    drawn = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("laboratory", total=sum(STAGES[name] for name in names))
        for name in names:
            draw = figures.fig1 if name == "fig1" else figures.fig2
            drawn.append(draw(seeds, lambda: progress.advance(task)))
            written += figures.save(drawn[-1], out)
    if what == "all":
        written.append(figures.page(drawn, out / "laboratory.html"))
    return written
