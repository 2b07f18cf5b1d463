"""Tables and pictures of a study, recomputed from its lines by other means."""

from __future__ import annotations

import random
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import same_color, to_rgb
from matplotlib.figure import Figure
from playing.plots import curves, differences, draw_map, megabytes, plot
from playing.study import Study, read_study
from playing.tables import layer_shares, layers, summarize, tables, tried
from scipy import stats
from study_fixtures import STUDY, write_study

from partita.record.metric import ACCURACY
from partita.report.comparison import Difference

ARMS = ("fedavg", "broken", "fedprox 0.1")
ROUNDS = 6


def a_line(arm: str, seed: int, point: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    scores = [draw.uniform(0.3, 0.9) for _ in range(ROUNDS)]
    return {
        "study": "small",
        "kind": "run",
        "arm": arm,
        "point": point,
        "seed": seed,
        "chosen": {"training.lr": 0.01},
        "test": {"rounds": list(range(1, ROUNDS + 1)), "accuracy": scores, "f1": [each / 2 for each in scores]},
        "personal": {
            "rounds": [ROUNDS],
            "accuracy": [0.5],
            "clients": {"accuracy": {f"c{client}": draw.uniform(0.1, 0.9) for client in range(4)}},
        },
        "bytes": {"up": [10**6] * ROUNDS, "down": [2 * 10**6] * ROUNDS},
        "seconds": 2.0,
    }


@pytest.fixture
def study(tmp_path: Path) -> Study:
    text = STUDY.replace("seeds = [0, 1, 2]", "seeds = [0, 1, 2, 3, 4]").replace("last = 2", "last = 4")
    return read_study(write_study(tmp_path, text + '[axes]\n"split.alpha" = [0.1, 1.0]\n'))


@pytest.fixture
def lines(study: Study) -> list[dict[str, Any]]:
    draw = random.Random(1)
    found = [a_line(arm, seed, point, draw) for seed in study.seeds for point in study.points() for arm in ARMS]
    draw.shuffle(found)
    return found


def by_hand(lines: list[dict[str, Any]], arm: str, alpha: float, metric: str = "accuracy") -> np.ndarray:
    """(seed, round) the last four rounds, in percent."""
    own = [line for line in lines if line["arm"] == arm and line["point"]["split.alpha"] == alpha]
    return np.array([line["test"][metric][-4:] for line in sorted(own, key=lambda line: line["seed"])]) * 100


def cells(text: str, alpha: float, arm: str) -> list[str]:
    part = text.split(f"**split.alpha = {alpha}**")[1]
    row = next(line for line in part.splitlines() if line.startswith(f"| `{arm}`"))
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def test_every_cell_follows_from_the_lines(study: Study, lines: list[dict[str, Any]]) -> None:
    text = tables(study, lines)
    for alpha in (0.1, 1.0):
        values = {arm: by_hand(lines, arm, alpha) for arm in ARMS}
        raw = []
        for arm in ARMS[1:]:
            gaps = values[arm].mean(1) - values["fedavg"].mean(1)
            raw.append(2 * stats.t.sf(abs(gaps.mean()) / (gaps.std(ddof=1) / 5**0.5), 4))
        order = np.argsort(raw)
        holm = [0.0, 0.0]
        holm[order[0]] = min(1.0, 2 * raw[order[0]])
        holm[order[1]] = max(holm[order[0]], raw[order[1]])
        for place, arm in enumerate(ARMS):
            row, own = cells(text, alpha, arm), values[arm]
            means = own.mean(1)
            assert row[1] == f"{means.mean():.1f} ± {means.std(ddof=1):.1f}"
            assert row[2] == f"{own[:, -1].mean():.1f} ± {own[:, -1].std(ddof=1):.1f}"
            assert row[3] == f"{own.std(1, ddof=1).mean():.1f}"
            worst = [
                100 * min(line["personal"]["clients"]["accuracy"].values())
                for line in lines
                if line["arm"] == arm and line["point"]["split.alpha"] == alpha
            ]
            assert row[4] == f"{np.mean(worst):.1f} ± {np.std(worst, ddof=1):.1f}"
            assert row[8:10] == ["18.0", "2.0"]
            if arm == "fedavg":
                assert row[5:8] == ["–", "–", "–"]
                continue
            gaps = means - values["fedavg"].mean(1)
            half = stats.t.ppf(0.975, 4) * gaps.std(ddof=1) / 5**0.5
            shown = f"{gaps.mean():+.1f} [{gaps.mean() - half:.1f}, {gaps.mean() + half:.1f}]".replace("-", "−")
            assert row[5] == shown
            assert row[6:8] == [f"{raw[place - 1]:.3f}", f"{holm[place - 1]:.3f}"]


def test_a_choice_at_the_edge_of_the_grid_as_it_is_now_has_a_footnote(
    study: Study, lines: list[dict[str, Any]]
) -> None:
    grids = {"broken": (0.01, 0.1), "fedavg": (0.001, 0.01, 0.1)}
    arms = {name: replace(arm, grid={"training.lr": grids.get(name, ())}) for name, arm in study.arms.items()}
    text = tables(replace(study, arms=arms), lines)
    assert text.count("| `broken`\\* |") == 2
    assert "- \\* of `broken`: training.lr = 0.01 is at the edge of its grid." in text
    assert "\\* of `fedavg`" not in text


def test_runs_that_are_not_finite_are_counted_and_in_no_mean(study: Study, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["arm"] == "broken" and line["seed"] == 3:
            line["test"]["accuracy"][-1] = None
        if line["arm"] == "broken" and line["seed"] == 4:
            line["diverged"] = "not finite"
    rows = {row.arm: row for row in summarize(study, lines, {"split.alpha": 0.1})}
    assert list(rows["broken"].means) == [0, 1, 2]
    assert rows["broken"].lost == (3, 4)
    assert rows["broken"].difference is not None
    assert rows["broken"].difference.n == 3
    text = tables(study, lines)
    assert "- `broken`: 2 of 5 runs were not finite." in text


def test_only_common_seeds_are_compared(study: Study, lines: list[dict[str, Any]]) -> None:
    kept = [line for line in lines if (line["arm"], line["seed"]) not in {("fedavg", 0), ("broken", 4)}]
    rows = {row.arm: row for row in summarize(study, kept, {"split.alpha": 1.0})}
    difference = rows["broken"].difference
    gaps = (by_hand(lines, "broken", 1.0).mean(1) - by_hand(lines, "fedavg", 1.0).mean(1))[1:4]
    assert difference is not None
    assert (difference.n, difference.mean) == (3, pytest.approx(gaps.mean() / 100))
    text = tables(study, kept)
    assert "- `broken`: 4 of 5 seeds." in text
    assert "- `broken`: the difference is over 3 seeds." in text


def test_another_metric_can_be_asked_for(study: Study, lines: list[dict[str, Any]]) -> None:
    means = by_hand(lines, "fedavg", 0.1, "f1").mean(1)
    assert cells(tables(study, lines, "f1"), 0.1, "fedavg")[1] == f"{means.mean():.1f} ± {means.std(ddof=1):.1f}"


def test_clients_that_take_no_part_have_their_own_table(study: Study, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        line["unseen"] = {"rounds": [20], "accuracy": [0.25], "clients": {"accuracy": {"a": 0.125, "b": 0.375}}}
    text = tables(study, lines, on="unseen")
    assert "on the own test sets of clients that took no part, mean over them" in text
    rows = summarize(study, lines, study.points()[0], on="unseen")
    assert {value for row in rows for value in row.means.values()} == {0.25}
    assert {value for row in rows for value in row.worst.values()} == {0.125}


def test_a_study_without_runs_says_so(study: Study) -> None:
    assert tables(study, []) == "small: no runs yet"


def test_settings_that_tuning_tried_are_listed_with_their_scores(tmp_path: Path) -> None:
    text = STUDY + '[tune]\nseeds = [8, 9]\nlast = 2\n[tune.grid]\n"training.lr" = [0.1, 0.01]\n'
    study = read_study(write_study(tmp_path, text))
    scores = {
        (0.1, 8): [0.9, 0.2, 0.3],
        (0.1, 9): [0.1, 0.4, 0.5],
        (0.01, 8): [0.5, 0.6, 0.7],
        (0.01, 9): [0.1, None, 0.1],
    }
    lines = [
        {"arm": "fedavg", "point": {}, "chosen": {"training.lr": lr}, "validation": {"accuracy": values}}
        for (lr, _), values in scores.items()
    ]
    row = tried(study, lines).splitlines()[2]
    assert row == "| `fedavg` | training.lr 0.1: 35.0; training.lr 0.01: – | 35.0 |"
    assert tried(study, []) == "small: no tuning yet"


def test_curves_are_means_over_seeds_at_each_tested_round(study: Study, lines: list[dict[str, Any]]) -> None:
    rounds, means, spreads = curves(study, lines, {"split.alpha": 0.1}, "accuracy", "test")["broken"]
    own = [line for line in lines if line["arm"] == "broken" and line["point"]["split.alpha"] == 0.1]
    third = [line["test"]["accuracy"][2] for line in own]
    assert rounds == [1, 2, 3, 4, 5, 6]
    assert (means[2], spreads[2]) == (pytest.approx(statistics.fmean(third)), pytest.approx(statistics.stdev(third)))


@pytest.mark.slow
def test_a_map_hatches_what_is_not_sure(study: Study, lines: list[dict[str, Any]]) -> None:
    for line in lines:  # sure for one arm at one point
        if line["arm"] == "broken" and line["point"]["split.alpha"] == 0.1:
            line["test"]["accuracy"] = [0.99] * ROUNDS
    files = plot(study, lines)
    assert [file.name for file in files] == ["small.svg", "small-bytes.svg", "small-map.svg"]
    known = differences(study, lines, "accuracy", "test")
    assert len(known) == 4
    unsure = sum((each.low or 0) <= 0 <= (each.high or 0) for each in known.values())
    drawn = files[2].read_text()
    assert 0 < unsure < 4
    assert len(re.findall(r'style="fill: url\(#', drawn)) == unsure


def test_hatches_have_the_ink_of_their_cell() -> None:
    axes = Figure().subplots()
    cells = [Difference(3, mean, mean - 1, mean + 1) for mean in (0.01, -0.09, 0.09)]
    draw_map(axes, [cells], ACCURACY, 10.0)
    inks = [text.get_color() for text in axes.texts]
    assert len(set(inks)) == 2
    assert inks[1] == inks[2] == "white"
    hatched = [
        same_color(patch.get_edgecolor()[:3], to_rgb(ink)) for patch, ink in zip(axes.patches, inks, strict=True)
    ]
    assert hatched == [True] * 3


@pytest.mark.slow
def test_two_axes_make_a_map_for_each_arm(tmp_path: Path) -> None:
    axes = '[axes]\n"split.alpha" = [0.1, 1.0]\n"training.epochs" = [1, 2, 3]\n'
    study = read_study(write_study(tmp_path, STUDY + axes))
    draw = random.Random(2)
    lines = [a_line(arm, seed, point, draw) for seed in study.seeds for point in study.points() for arm in ARMS]
    assert len(differences(study, lines, "accuracy", "test")) == 2 * 2 * 3
    assert len(plot(study, lines)) == 3


def test_bytes_add_up_over_rounds_and_directions() -> None:
    assert megabytes({"bytes": {"up": [10**6, 0], "down": [2 * 10**6, 10**6]}}) == [3.0, 4.0]
    assert megabytes({"bytes": {"both": [0, 0]}}) == []
    assert megabytes({}) == []


def test_layers_are_counted_over_clients_rounds_and_seeds(study: Study, lines: list[dict[str, Any]]) -> None:
    own = [line for line in lines if line["arm"] == "fedavg"]
    for line in own:
        line["layers"] = [{"c0": ["layer.0", "layer.3"], "c1": ["layer.3"]}, None]
    own[0]["layers"][1] = {"c0": ["layer.10"], "c1": ["layer.3"]}
    assert layer_shares(own[:2]) == pytest.approx({0: 2 / 6, 3: 5 / 6, 10: 1 / 6})
    assert "| `fedavg` | 2.0 | 50 | 0 | 0 | 100 |" in layers(study, own[1:])
    assert "no runs" in layers(study, [line for line in lines if line["arm"] != "fedavg"])
