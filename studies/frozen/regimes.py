"""Where freezing was tried: difference to never freezing by setting and warm-up, as a map and as Markdown tables.

PYTHONPATH=src:studies python studies/frozen/regimes.py    draws studies/frozen/regimes.svg
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playing.choice import read_runs
from playing.plots import MAP_LEGEND, draw_map
from playing.study import Study, read_study
from playing.tables import MISSING, Row, interval, p_text, paired_by_seed, summarize

from partita.record.metric import ACCURACY
from partita.report.comparison import Difference
from partita.report.plot_style import INK, MUTED, new_figure
from partita.report.tables import paired_difference

FOLDER = Path(__file__).parent
WARMUPS = ("0.1", "0.3", "0.5")


@dataclass(frozen=True)
class Setting:
    """One row of the map.

    Attributes:
        title: What it is.
        study: Name of the study.
        point: The value of the study's only axis; None if it has no axis.
    """

    title: str
    study: str
    point: Any = None

    def rows(self) -> dict[str, Row]:
        """Return the results by arm."""
        study = read_study(FOLDER / f"{self.study}.toml")
        return {row.arm: row for row in summarize(study, read_runs(study, "run"), self._at(study))}

    def _at(self, study: Study) -> Mapping[str, Any]:
        [point] = [
            each for each in study.points() if list(each.values()) == ([] if self.point is None else [self.point])
        ]
        return point


SETTINGS = (
    Setting("CIFAR-100, disjoint, 3 of 12 clients, 5 epochs", "cifar100", "disjoint"),
    Setting("the same, 100 rounds", "cifar100-long", "disjoint"),
    Setting("the same, a tenth of the rate at the end", "falling", "a tenth from round 40"),
    Setting("the same, 1 epoch", "epochs1", "disjoint"),
    Setting("the same, 20 epochs", "epochs20", "disjoint"),
    Setting("the same, 2 of 12 clients", "cohorts", 2),
    Setting("the same, 6 of 12 clients", "cohorts", 6),
    Setting("the same, all 12 clients", "cohorts12", "12"),
    Setting("CIFAR-100, Dirichlet 0.05, 5 epochs", "cifar100", "alpha 0.05"),
    Setting("the same, 1 epoch", "epochs1", "alpha 0.05"),
    Setting("CIFAR-100, Dirichlet 0.3, 5 epochs", "mild", "alpha 0.3"),
    Setting("CIFAR-100, equal clients, 5 epochs", "mild", "iid"),
    Setting("CIFAR-100, own orders, 5 epochs", "orders", "own order"),
    Setting("CIFAR-100, CLIP's image tower, disjoint, 5 epochs", "clip"),
    Setting("Tiny-ImageNet, disjoint, 5 epochs", "tinyimagenet"),
    Setting("text, labels at short and long range, 5 epochs", "ranges"),
    Setting("text, skewed labels, 5 epochs", "ohsumed", "labels"),
    Setting("text, half of the clients read backwards, 5 epochs", "ohsumed", "half reversed"),
    Setting("digits, labels, 3 clients", "digits-seeds", "labels, 3 clients"),
    Setting("digits, own orders, 3 clients", "digits-seeds", "orders, 3 clients"),
    Setting("digits, labels, moments kept", "digits-seeds", "labels, 3 clients, moments kept"),
    Setting("digits, labels, 10 clients", "digits-seeds", "labels, 10 clients"),
)
# Differences of a warm-up of 0.3 to never freezing, compared between two settings.
BETWEEN = (
    ("1 epoch", Setting("", "epochs1", "disjoint"), "5", Setting("", "cifar100", "disjoint")),
    ("20 epochs", Setting("", "epochs20", "disjoint"), "5", Setting("", "cifar100", "disjoint")),
    ("20 epochs", Setting("", "epochs20", "disjoint"), "1", Setting("", "epochs1", "disjoint")),
    ("2 clients", Setting("", "cohorts", 2), "6", Setting("", "cohorts", 6)),
    ("2 clients", Setting("", "cohorts", 2), "12", Setting("", "cohorts12", "12")),
)
DIGITS = ("digits", "digits-seeds", "digits-scope", "digits-value")  # the same config, and no seed twice


def differences(setting: Setting) -> list[Difference | None]:
    """Return the difference of each warm-up to never freezing; None if it has no two runs."""
    rows = setting.rows()
    found = [rows[arm].difference if arm in rows else None for arm in WARMUPS]
    return [each if each is not None and each.low is not None else None for each in found]


def overview() -> str:
    """Return a table of all settings by all warm-ups."""
    lines = [f"| less never freezing, points | seeds | {' | '.join(WARMUPS)} |", "|---|--:|--:|--:|--:|"]
    for setting in SETTINGS:
        found = differences(setting)
        seeds = max(each.n for each in found if each is not None)
        cells = [MISSING if each is None else interval(each, ACCURACY) for each in found]
        lines.append(f"| {setting.title} | {seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gaps(setting: Setting, arm: str = "0.3") -> dict[int, float]:
    """Return by seed how far a warm-up is above never freezing; empty if the study does not have it."""
    rows = setting.rows()
    if arm not in rows:
        return {}
    frozen, never = rows[arm].means, rows["never"].means
    return {seed: frozen[seed] - never[seed] for seed in sorted(frozen.keys() & never.keys())}


def all_digits() -> str:
    """Return a table of the differences on digits over the seeds of all studies together."""
    lines = ["| three clients, warm-up | points, paired [95%] | p | seeds |", "|---|--:|--:|--:|"]
    for point in ("labels, 3 clients", "orders, 3 clients"):
        for arm in ("0.3", "0.5"):
            studies = [gaps(Setting("", study, point), arm) for study in DIGITS]
            own = {seed: gap for found in studies for seed, gap in found.items()}
            assert len(own) == sum(map(len, studies)), "two studies share a seed"
            found = paired_difference([(0.0, gap) for gap in own.values()])
            cells = [f"{point.partition(',')[0]}, {arm}", interval(found, ACCURACY), p_text(found.p), str(found.n)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def between() -> str:
    """Return a table of how the difference of a warm-up of 0.3 changes from one setting to another."""
    lines = ["| 0.3 less never, in one setting less another | points, paired [95%] | p | seeds |", "|---|--:|--:|--:|"]
    for title, one, other_title, other in BETWEEN:
        found = paired_by_seed(gaps(one), gaps(other))
        cells = [f"{title} less {other_title}", interval(found, ACCURACY), p_text(found.p), str(found.n)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(file: Path) -> None:
    """Draw the map of all settings."""
    from matplotlib import rc_context

    grid = [differences(setting) for setting in SETTINGS]
    figure = new_figure(7.4, 0.3 * len(SETTINGS) + 1.2)
    axes = figure.subplots()
    largest = 3.0  # points; a digits run with ten clients loses 8, and would leave the others without color
    image = draw_map(axes, grid, ACCURACY, largest)
    axes.set_xticks(range(len(WARMUPS)), WARMUPS, fontsize=8.5)
    axes.set_yticks(range(len(SETTINGS)), [setting.title for setting in SETTINGS], fontsize=8.5)
    axes.set_xlabel("warm-up, as a part of the rounds", fontsize=9, color=INK)
    bar = figure.colorbar(image, ax=axes, shrink=0.9, extend="both")
    bar.set_label("accuracy, points above never freezing", fontsize=8.5, color=INK)
    bar.ax.tick_params(labelsize=8)
    figure.supxlabel(MAP_LEGEND, fontsize=8, color=MUTED)
    with rc_context({"svg.hashsalt": "regimes"}):
        figure.savefig(file, metadata={"Date": None})


def main() -> None:
    print(f"{overview()}\n\n{all_digits()}\n\n{between()}")
    draw(FOLDER / "regimes.svg")


if __name__ == "__main__":
    main()
