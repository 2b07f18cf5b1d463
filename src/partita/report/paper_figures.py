"""Figures for papers: one file of each figure as SVG and as PDF, the same bytes for the same runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partita.report import layer_selection, plan_stages, plots, privacy, split_figure
from partita.report.load import RunRecord, metric_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: Mapping[str, Callable[[Sequence[RunRecord], str], Figure | None]] = {
    "rounds": plots.metric_by_round,
    "bytes": plots.metric_by_bytes,
    "drift": lambda records, metric: plots.drift_by_role(records),
    "personal": plots.personal_by_client,
    "gain": plots.gain_by_client,
    "split": lambda records, metric: split_figure.split_grid(records),
    "layers": lambda records, metric: layer_selection.layers_by_round(records),
    "epsilon": lambda records, metric: privacy.epsilon_by_round(records),
    "attacks": lambda records, metric: privacy.attack_curves(records),
    "plan": lambda records, metric: plan_stages.plan_grid(records),
}


def figures(records: Sequence[RunRecord], folder: Path | str, metric: str | None = None) -> list[Path]:
    """Write each figure that the runs have values for, as SVG and PDF.

    Args:
        records: The runs.
        folder: Where to write; it is created. Files of the same names are replaced.
        metric: Metric to draw. Default: the runs' own.

    Returns:
        The files written.

    Raises:
        ReportError: If matplotlib is not installed, or the runs have different metrics.
    """
    name = metric_of(records, metric).name
    folder = Path(folder)
    drawn = {file: figure for file, draw in FIGURES.items() if (figure := draw(records, name)) is not None}
    folder.mkdir(parents=True, exist_ok=True)
    return [path for file, figure in drawn.items() for path in _save(figure, folder / file)]


def _save(figure: Figure, stem: Path) -> list[Path]:
    from matplotlib import rc_context

    paths = [stem.with_suffix(".svg"), stem.with_suffix(".pdf")]
    # Without these, a file holds random ids and the time. Text stays text, which a paper's editor can change.
    with rc_context({"svg.hashsalt": stem.name, "svg.fonttype": "none", "pdf.fonttype": 42}):
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], metadata={"CreationDate": None})
    return paths
