"""The page of one evaluation: scores with intervals, groups, confusion and calibration. It has no script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.report import templating
from partita.report.confusion import Matrix
from partita.storage import atomic_files

SIDE, MARGIN = 260, 36  # of the reliability diagram, in pixels
COUNTS = ("examples", "entities", "pixels")
RATES = ("precision", "recall", "f1", "iou", "dice", "auprc", "auroc", "relaxed_f1")


def write_page(result: Mapping[str, Any], path: Path) -> Path:
    """Write the page of a result of `partita evaluate`, with None for numbers that are not finite.

    Returns:
        The path of the page.
    """
    atomic_files.write(path, render(result).encode())
    return path


def render(result: Mapping[str, Any]) -> str:
    """Return the page as HTML. All names in it are escaped."""
    confusion = result.get("confusion")
    return templating.render(
        "evaluation",
        title=f"Evaluation of {result['model']['method']}",
        result=result,
        show_score=_score,
        show_interval=_interval,
        fractions={*result["fractions"], *RATES},
        tables=[_table(column, groups) for column, groups in result["by"].items() if groups],
        confusion=Matrix("Confusion", confusion["classes"], confusion["counts"]) if confusion else None,
        unit=confusion["unit"] if confusion else "",
        calibration=_diagram(result["calibration"]) if "calibration" in result else None,
    )


def _score(score: Mapping[str, Any] | None, fraction: bool) -> str:
    value = None if score is None else score["value"]
    return "–" if value is None else f"{100 * value:.1f}%" if fraction else f"{value:.4g}"


def _interval(score: Mapping[str, Any] | None, fraction: bool) -> str:
    ends = [None if score is None else score.get(end) for end in ("low", "high")]
    if None in ends:
        return ""
    low, high = (f"{100 * end:.1f}" if fraction else f"{end:.4g}" for end in ends if end is not None)
    return f"{low} to {high}"


def _table(column: str, groups: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "column": column,
        "counts": [key for key in COUNTS if any(key in row for row in groups.values())],
        "metrics": list(dict.fromkeys(name for row in groups.values() for name in row["scores"])),
        "groups": groups,
        "small": any(row.get("small") for row in groups.values()),
    }


def _diagram(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bars of the reliability diagram, in pixels."""
    bars = [
        {
            "x": MARGIN + SIDE * row["from"],
            "width": SIDE * (row["to"] - row["from"]) - 1,
            "y": MARGIN + SIDE * (1 - row["accuracy"]),
            "height": SIDE * row["accuracy"],
            "mark": MARGIN + SIDE * (1 - row["confidence"]),
            "row": row,
        }
        for row in calibration["bins"]
    ]
    return {
        "ece": calibration["ece"],
        "brier": calibration.get("brier"),
        "bars": bars,
        "side": SIDE,
        "margin": MARGIN,
        "total": SIDE + 2 * MARGIN,
    }
