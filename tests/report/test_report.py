"""Reports on generated run folders, against numpy and scipy."""

from __future__ import annotations

import ast
import html
import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import ROUNDS, WARMUP, write_run
from scipy import stats

from partita import report
from partita.record.metric import ACCURACY, Metric
from partita.report import ReportError, RunRecord, compare, find, load_run, page, picture
from partita.report.chart_data import curve_of
from partita.report.draw import FIGURES
from partita.report.draw import figures as paper_figures
from partita.report.layer_selection import alarms_raised
from partita.report.load import metric_of
from partita.report.plan import COLOR, changes, plans, status_of
from partita.report.plot_style import styles
from partita.report.render import columns, score_columns
from partita.report.tables import holm, worst_tenth
from partita.report.templating import breakable

LABELS = ("fedavg", "fedprox", "fedfrozen")
PERPLEXITY = Metric("perplexity", higher_is_better=False, fraction=False)


def accuracies(values: list[float | None]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Rows with these test accuracies; None for a round without a test."""

    def edit(row: dict[str, Any]) -> dict[str, Any]:
        value = values[row["round"]]
        return {**row, "test": None if value is None else {"accuracy": value}}

    return edit


def make_record(root: Path, label: str, seed: int, values: list[float | None], **more: Any) -> RunRecord:
    return load_run(write_run(root, label, seed, rounds=len(values), planned=16, edit=accuracies(values), **more))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    root = tmp_path_factory.mktemp("runs")
    return [load_run(write_run(root, label, seed)) for label in LABELS for seed in range(3)]


def column_cells(comparison: report.Comparison, heading: str) -> tuple[str, ...]:
    return next(column.cells for column in columns(comparison) if column.heading.startswith(heading))


# Reading


def test_run_folder_is_read_back(tmp_path: Path) -> None:
    record = load_run(write_run(tmp_path, "fedfrozen", 2))
    assert (record.label, record.seed, record.finished) == ("fedfrozen", 2, True)
    assert [row["round"] for row in record.rows] == list(range(ROUNDS))
    assert [(stage["first"], stage["last"]) for stage in record.plan] == [(0, WARMUP - 1), (WARMUP, ROUNDS - 1)]
    assert record.config["method"]["warm_up"] == WARMUP
    assert record.environment["torch"] == "2.13.0"


def test_find_returns_runs_in_order_with_their_status(tmp_path: Path) -> None:
    second = write_run(tmp_path / "b", "fedavg", 1, finished=False)
    first = write_run(tmp_path / "a" / "deep", "fedavg", 0)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run" / "rows.jsonl").write_text("")
    assert find(tmp_path) == [first, second]
    assert find(first) == [first]
    assert [load_run(folder).finished for folder in find(tmp_path)] == [True, False]


def test_partial_last_line_is_dropped_and_other_faults_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0)
    rows = folder / "rows.jsonl"
    whole = rows.read_text()
    lines = whole.splitlines(keepends=True)
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 2):
        rows.write_text("".join(lines[:-1]) + lines[-1][:cut])
        assert len(load_run(folder).rows) == ROUNDS - 1
    rows.write_text(whole.rstrip("\n"))
    assert len(load_run(folder).rows) == ROUNDS
    for faulty, message in (
        ("".join(lines[:4]) + lines[4][:50] + "\n" + "".join(lines[5:]), "line 5 is not a row"),
        ("".join(lines[:4]) + lines[2], "line 5: round 2 comes after round 3"),
        ("", "no finished round yet"),
        (lines[0][:40], "no finished round yet"),
        ("[1]\n", "line 1 is not a row"),
    ):
        rows.write_text(faulty)
        with pytest.raises(ReportError, match=message):
            load_run(folder)


def test_invalid_run_folders_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no run at or below .*a run folder holds config\.toml and rows\.jsonl"):
        find(tmp_path)
    with pytest.raises(ReportError, match=r"is not a run folder: it has no config\.toml"):
        load_run(tmp_path)
    folder = write_run(tmp_path, "fedavg", 0)
    (folder / "config.toml").write_text("seed = 0")
    with pytest.raises(ReportError, match="has no 'label'"):
        load_run(folder)
    (folder / "config.toml").write_text("seed = ")
    with pytest.raises(ReportError, match="not valid TOML"):
        load_run(folder)


def test_runs_without_plan_and_environment_can_be_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, edit=lambda row: {"round": row["round"], "test": row["test"]})
    (folder / "plan.json").unlink()
    (folder / "environment.json").unlink()
    record = load_run(folder)
    line = compare([record]).lines[0]
    assert line.final is not None
    assert (line.up, line.down, line.total_mb, line.seconds, line.personal) == (None,) * 5
    assert "fedavg" in page([record], tmp_path / "page.html").read_text()
    assert draw("bytes", [record]) is draw("drift", [record]) is draw("plan", [record]) is None


# The comparison


def test_comparison_matches_numpy_and_scipy(records: list[RunRecord]) -> None:
    comparison = compare(records)
    assert [line.label for line in comparison.lines] == list(LABELS)
    curves = {
        label: np.array([[row["test"]["accuracy"] for row in run.rows] for run in records if run.label == label])
        for label in LABELS
    }  # label -> (seed, round)
    own = {
        label: np.array([list(run.rows[-1]["personal"]["accuracy"].values()) for run in records if run.label == label])
        for label in LABELS
    }  # label -> (seed, client)
    assert comparison.target == pytest.approx(0.95 * curves["fedavg"][:, -1].mean())
    raw = []
    for line in comparison.lines:
        final = curves[line.label][:, -1]
        assert line.seeds == (0, 1, 2)
        assert line.final == pytest.approx(final.mean())
        assert line.final_sd == pytest.approx(final.std(ddof=1))
        assert line.stability == pytest.approx(curves[line.label][:, -4:].std(axis=1, ddof=1).mean())
        assert line.personal == pytest.approx(own[line.label].mean())
        assert line.personal_sd == pytest.approx(own[line.label].std(axis=1, ddof=1).mean())
        assert line.personal_worst == pytest.approx(own[line.label].min(axis=1).mean())  # one of ten clients
        first_round = [1 + np.argmax(seed >= comparison.target) for seed in curves[line.label]]
        assert line.reach is not None
        assert line.reach.rounds == np.median(first_round)
        assert line.reach.reached == 3
        runs = [run for run in records if run.label == line.label]
        assert line.seconds == pytest.approx(np.mean([[row["seconds"] for row in run.rows] for run in runs]))
        sizes = {way: np.array([[row["bytes"][way] for row in run.rows] for run in runs]) for way in ("up", "down")}
        assert line.up == pytest.approx(sizes["up"].sum() / (3 * ROUNDS * 5))
        assert line.down == pytest.approx(sizes["down"].sum() / (3 * ROUNDS * 5))
        assert line.total_mb == pytest.approx((sizes["up"].sum() + sizes["down"].sum()) / 3e6)
        if line.label == "fedavg":
            assert line.difference is None
            continue
        each, gaps = line.difference, final - curves["fedavg"][:, -1]
        assert each is not None
        assert each.n == 3
        assert each.low is not None
        assert each.p is not None
        half = stats.t.ppf(0.975, 2) * gaps.std(ddof=1) / math.sqrt(3)
        assert (each.mean, each.low, each.high) == pytest.approx((gaps.mean(), gaps.mean() - half, gaps.mean() + half))
        assert each.p == pytest.approx(stats.ttest_rel(final, curves["fedavg"][:, -1]).pvalue)
        raw.append((each.p, each.p_holm))
    (low, low_holm), (high, high_holm) = sorted(raw)
    assert low_holm == pytest.approx(min(1, 2 * low))
    assert high_holm == pytest.approx(max(min(1, 2 * low), high))
    assert any("Holm for 2 comparisons" in comment for comment in comparison.comments)
    assert any("(n = 3)" in comment for comment in comparison.comments)


def test_two_labels_need_no_multiple_comparison_correction(records: list[RunRecord]) -> None:
    comparison = compare([record for record in records if record.label != "fedprox"])
    each = comparison.lines[1].difference
    assert each is not None
    assert each.p is not None
    assert each.p_holm is None
    assert "p: not corrected for multiple comparisons." in comparison.comments
    assert column_cells(comparison, "p")[0] == "–"


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.999))
def test_holm_matches_the_step_down_procedure(p_values: list[float], level: float) -> None:
    corrected = holm(p_values)
    going, rejected = True, set()
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        going = going and (len(p_values) - rank) * p_values[index] <= level
        if going:
            rejected.add(index)
    assert {index for index, value in enumerate(corrected) if value <= level} == rejected
    assert all(before <= after <= 1 for before, after in zip(p_values, corrected, strict=True))


def test_holm_matches_hand_computed_values() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.3]) == [0.3]


def test_one_seed_has_no_spread_and_no_test(tmp_path: Path) -> None:
    runs = [
        make_record(tmp_path, "a", 0, [0.1, 0.5]),
        make_record(tmp_path, "b", 0, [0.2, 0.6]),
        make_record(tmp_path, "b", 1, [0.2, 0.7]),
    ]
    comparison = compare(runs)
    first, second = comparison.lines
    assert (first.final, first.final_sd) == (0.5, None)
    assert second.difference is not None
    assert (second.difference.n, second.difference.mean) == (1, None)
    assert column_cells(comparison, "difference") == column_cells(comparison, "p") == ("–", "–")
    assert "a: one seed, so no spread over seeds." in comparison.comments
    assert any(
        comment.startswith("b: no paired difference to a") and "n = 1" in comment for comment in comparison.comments
    )


def test_runs_are_paired_by_seed(tmp_path: Path) -> None:
    runs = [make_record(tmp_path, "a", seed, [0.5 + 0.1 * seed]) for seed in (0, 1, 2)]
    runs += [make_record(tmp_path, "b", seed, [0.52 + 0.11 * seed]) for seed in (3, 2, 1)]
    each = compare(runs).lines[1].difference
    expected = stats.ttest_rel([0.63, 0.74], [0.6, 0.7])
    assert each is not None
    assert each.n == 2
    assert (each.mean, each.p) == pytest.approx((0.035, expected.pvalue))


@pytest.mark.parametrize("gap", [0.0, 0.03])
def test_equal_differences_are_not_tested(tmp_path: Path, gap: float) -> None:
    runs = [make_record(tmp_path, "a", seed, [0.5 + 0.1 * seed]) for seed in (0, 1, 2)]
    runs += [make_record(tmp_path, "b", seed, [0.5 + 0.1 * seed + gap]) for seed in (0, 1, 2)]
    comparison = compare(runs)
    each = comparison.lines[1].difference
    assert each is not None
    assert each.mean == pytest.approx(gap)
    assert each.p is None
    assert each.low is None
    assert any("nothing to test" in comment for comment in comparison.comments)


def test_untested_rounds_and_nan_values_are_handled(tmp_path: Path) -> None:
    gaps = make_record(tmp_path, "gaps", 0, [None, 0.2, None, 0.4, None, 0.6, 0.8, None])
    line = compare([gaps], target=0.5).lines[0]
    assert line.final == 0.8
    assert line.stability is None  # one test among the last two rounds
    assert line.reach is not None
    assert line.reach.rounds == 6
    nan = make_record(tmp_path, "gaps", 1, [0.1, 0.2, 0.3, math.nan])
    comparison = compare([gaps, nan])
    assert comparison.lines[0].final == 0.8  # not 0.3, the last number of the other seed
    assert any("no final accuracy for seed 1" in comment for comment in comparison.comments)
    never = make_record(tmp_path, "never", 0, [None, None])
    comparison = compare([never])
    assert (comparison.target, comparison.lines[0].final) == (None, None)
    assert column_cells(comparison, "accuracy") == ("–",)
    with pytest.raises(ReportError, match="no run was ever tested"):
        picture([never], tmp_path / "none.png")


@pytest.mark.parametrize("value", [0.5, -0.5])
def test_r2_is_no_percentage_and_its_default_target_is_a_little_worse(value: float, tmp_path: Path) -> None:
    scores = {"r2": value, "mse": abs(value)}
    run = load_run(write_run(tmp_path, "fedavg", 0, edit=lambda row: {**row, "test": scores, "personal": None}))
    comparison = compare([run], metric="r2")
    assert comparison.target == pytest.approx(value - 0.025)
    assert ("95%" if value > 0 else "105%") in "".join(comparison.comments)
    [final] = [column for column in columns(comparison) if column.heading == "r2"]
    assert final.cells == (("0.50" if value > 0 else "−0.50"),)
    assert compare([run], metric="mse").target == pytest.approx(0.525)


def test_seeds_that_never_reach_the_target_count_in_the_median(tmp_path: Path) -> None:
    slow, fast, late = [0.1, 0.2, 0.3], [0.6, 0.7, 0.8], [0.1, 0.2, 0.9]

    def line(*curves: list[float]) -> tuple[float | None, str]:
        runs = [
            make_record(tmp_path / str(len(list(tmp_path.iterdir()))), "a", seed, list(values))
            for seed, values in enumerate(curves)
        ]
        comparison = compare(runs, target=0.5)
        reach = comparison.lines[0].reach
        assert reach is not None
        return reach.rounds, column_cells(comparison, "rounds to 50.0%")[0]

    assert line(fast, late) == (2, "2")
    assert line(fast, late, slow) == (3, "3 (2 of 3)")
    assert line(fast, slow) == (None, "not reached (1 of 2)")
    assert line(slow, slow) == (None, "not reached (0 of 2)")


@pytest.mark.parametrize(
    ("every", "said"), [(1, None), (2, "up to 2 rounds apart, so up to 1 too late"), (5, "up to 5"), (10, "up to 10")]
)
def test_rounds_to_a_target_say_that_they_are_read_at_tested_rounds(
    every: int, said: str | None, tmp_path: Path
) -> None:
    """Round 9, the last, is tested in any case, as in a run."""

    def edit(row: dict[str, Any]) -> dict[str, Any]:
        number = row["round"]
        return row if (number + 1) % every == 0 else {**row, "test": None}

    runs = [load_run(write_run(tmp_path, "fedavg", seed, 10, 10, edit=edit)) for seed in range(2)]
    [comment] = [comment for comment in compare(runs).comments if comment.startswith("rounds to")]
    assert ("tested rounds only" in comment) == (every > 1)
    assert said is None or said in comment


def test_unfinished_runs_are_noted_and_not_paired_with_longer_runs(tmp_path: Path) -> None:
    runs = [make_record(tmp_path, "a", seed, [0.1, 0.2, 0.5 + seed / 100]) for seed in range(3)]
    runs += [make_record(tmp_path, "b", seed, [0.1, 0.2, 0.6 + seed / 50]) for seed in range(2)]
    runs.append(make_record(tmp_path, "b", 2, [0.1, 0.2], finished=False))
    comparison = compare(runs)
    each = comparison.lines[1].difference
    assert each is not None
    assert each.n == 2
    assert "b, seed 2: unfinished (2 of 16 rounds); its last tested round is used." in comparison.comments
    assert any(comment.startswith("b: 1 of 3 common seeds left out") for comment in comparison.comments)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=45))
def test_worst_tenth_is_the_mean_of_the_worst_ten_percent(values: list[float]) -> None:
    count = max(1, math.ceil(len(values) / 10))
    assert worst_tenth(values, ACCURACY) == pytest.approx(np.sort(values)[:count].mean())
    assert worst_tenth(values, PERPLEXITY) == pytest.approx(np.sort(values)[::-1][:count].mean())


def test_missing_personal_values_are_left_out_with_a_comment(tmp_path: Path) -> None:
    def edit(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "personal": {"accuracy": {"c0": 0.5, "c1": 0.7, "c2": None, "c3": math.nan}}}

    comparison = compare([load_run(write_run(tmp_path, "a", 0, edit=edit))])
    assert comparison.lines[0].personal == pytest.approx(0.6)
    assert "a: 2 of 4 personal values are missing and left out." in comparison.comments


def test_duplicate_seeds_are_refused_and_different_configs_noted(tmp_path: Path) -> None:
    one = load_run(write_run(tmp_path / "x", "fedavg", 0))
    with pytest.raises(ReportError, match="two runs are called 'fedavg' with seed 0"):
        compare([one, load_run(write_run(tmp_path / "y", "fedavg", 0))])
    with pytest.raises(ReportError, match="no run to report"):
        compare([])
    folder = write_run(tmp_path, "fedavg", 1)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.001", "lr = 0.1"))
    comments = compare([one, load_run(folder)]).comments
    assert any("differ in more than the seed (training.lr)" in comment for comment in comments)


def as_local_only(record: RunRecord) -> RunRecord:
    return replace(record, config={**record.config, "method": {"name": "local-only"}})


def test_gain_over_local_only_is_computed_per_client(tmp_path: Path) -> None:
    def own(values: dict[str, float | None]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda row: {**row, "personal": {"accuracy": values}}

    alone = [
        as_local_only(
            load_run(write_run(tmp_path, "alone", seed, edit=own({"c0": 0.5, "c1": 0.6, "c2": 0.7, "c3": None})))
        )
        for seed in (0, 1)
    ]
    shared = [
        load_run(write_run(tmp_path, "shared", seed, edit=own(values)))
        for seed, values in (
            (0, {"c0": 0.7, "c1": 0.5, "c2": 0.7, "c3": 0.9}),  # gains 0.2, -0.1, 0; c3 has no local-only value
            (1, {"c2": 0.9, "c0": 0.6}),  # gains 0.2, 0.1, in any client order
            (2, {"c0": 0.0}),  # a seed without a local-only run
        )
    ]
    comparison = compare([*shared, *alone])
    with_others, by_itself = comparison.lines
    assert by_itself.gain is None
    assert with_others.gain is not None
    assert with_others.gain.mean == pytest.approx((0.2 - 0.1 + 0 + 0.2 + 0.1) / 5)
    assert with_others.gain.better == pytest.approx(3 / 5)
    assert column_cells(comparison, "gain") == ("+8.0", "–")
    assert column_cells(comparison, "better off") == ("60%", "–")
    assert any("under alone, where it trains alone" in comment for comment in comparison.comments)
    figure = draw("gain", [*shared, *alone])
    assert figure is not None
    [(dots, *_)] = figure.axes[0].containers  # of "shared": each seed from low to high, averaged
    np.testing.assert_allclose(np.asarray(dots.get_ydata(), float), [(-10 + 10) / 2, (0 + 20) / 2, 20], atol=1e-9)


def test_gain_is_positive_when_a_lower_metric_improves(tmp_path: Path) -> None:
    alone = as_local_only(perplexities(tmp_path, "alone", 0, [50.0]))
    better = perplexities(tmp_path, "better", 0, [40.0])
    line = compare([better, alone]).lines[0]
    assert line.gain is not None
    assert (line.gain.mean, line.gain.better) == (pytest.approx(10.0), 1.0)


def test_gain_is_not_shown_without_a_local_only_run(records: list[RunRecord]) -> None:
    comparison = compare(records)
    assert all(line.gain is None for line in comparison.lines)
    assert not any(column.heading == "gain" for column in columns(comparison))
    assert not any(comment.startswith("gain") for comment in comparison.comments)
    assert draw("gain", records) is None


def test_comparison_can_use_another_metric(tmp_path: Path) -> None:
    record = load_run(write_run(tmp_path, "a", 0, edit=lambda row: {**row, "test": {"accuracy": 0.1, "f1": 0.7}}))
    comparison = compare([record], metric="f1")
    assert comparison.lines[0].final == 0.7
    assert column_cells(comparison, "f1, %") == ("70.0",)


def perplexities(root: Path, label: str, seed: int, values: list[float]) -> RunRecord:
    """A language model run; the personal values are 1 to 20 above the test value."""

    def edit(row: dict[str, Any]) -> dict[str, Any]:
        value = values[row["round"]]
        own = {f"c{number}": value + number for number in range(1, 21)}
        return {**row, "test": {"loss": math.log(value), "perplexity": value}, "personal": {"perplexity": own}}

    folder = write_run(root, label, seed, rounds=len(values), edit=edit)
    plan = json.loads((folder / "plan.json").read_text())
    metric = {"name": "perplexity", "higher_is_better": False}
    (folder / "plan.json").write_text(json.dumps({"metric": metric, **plan}))
    return load_run(folder)


def test_comparison_supports_metrics_where_lower_is_better(tmp_path: Path) -> None:
    curves = {"a": [[90.0, 44.0, 40.0, 41.0], [80.0, 43.5, 39.0, 39.0]], "b": [[60.0, 41.5, 30.0, 31.0]] * 2}
    runs = [perplexities(tmp_path, label, seed, each) for label, two in curves.items() for seed, each in enumerate(two)]
    assert {run.metric for run in runs} == {PERPLEXITY}
    comparison = compare(runs)
    first, second = comparison.lines
    assert (comparison.metric, comparison.higher_is_better) == ("perplexity", False)
    assert first.final == 40.0
    assert comparison.target == pytest.approx(1.05 * 40.0)
    assert (first.reach.rounds, second.reach.rounds) == (3, 2)  # type: ignore[union-attr]
    assert first.personal == pytest.approx(40.0 + 10.5)
    assert first.personal_worst == pytest.approx(40.0 + 19.5)  # the highest two of twenty
    assert second.difference is not None
    assert second.difference.mean == pytest.approx(-9.0)
    assert column_cells(comparison, "perplexity") == ("40.0 ± 1.41", "31.0 ± 0.00")
    assert column_cells(comparison, "difference")[1].startswith("−9.00 [")
    assert column_cells(comparison, "rounds to 42.0") == ("3", "2")
    assert any("lower is better" in comment for comment in comparison.comments)
    assert any("105% of the final mean of a" in comment for comment in comparison.comments)
    text = report.to_text(comparison) + page(runs, tmp_path / "page.html").read_text()
    assert "test perplexity" in text
    assert not re.search(r"percentage|perplexity, %|accuracy", text)
    figure = draw("rounds", runs)
    assert figure is not None
    assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx([85.0, 43.75, 39.5, 40.0])
    strips = draw("personal", runs)
    assert strips is not None
    worst_first = [list(dots.get_ydata()) for dots, *_ in strips.axes[0].containers]
    assert [np.mean(values) for values in worst_first] == pytest.approx([50.5, 41.5])
    assert [values[0] for values in worst_first] == pytest.approx([60.0, 51.0])
    by_loss = compare(runs, metric="loss")
    assert not by_loss.higher_is_better
    assert column_cells(by_loss, "loss")[1].startswith("3.43")


def test_runs_with_different_metrics_are_refused(tmp_path: Path) -> None:
    runs = [make_record(tmp_path, "old", 0, [0.5]), perplexities(tmp_path, "new", 0, [40.0])]
    assert runs[0].metric == ACCURACY  # the default, since its folder names no metric
    for make in (
        compare,
        lambda records: draw("rounds", records),
        lambda records: page(records, tmp_path / "page.html"),
    ):
        with pytest.raises(ReportError, match="'old' by accuracy, 'new' by perplexity; report them separately"):
            make(runs)


@pytest.mark.parametrize(
    ("metric", "value", "shown"),
    [
        (ACCURACY, 0.7134, "71.3%"),
        (ACCURACY, None, "–"),
        (PERPLEXITY, 1234.5, "1 234"),
        (PERPLEXITY, 12.34, "12.3"),
        (PERPLEXITY, 1.234, "1.23"),
        (PERPLEXITY, None, "–"),
    ],
)
def test_metric_values_are_formatted(metric: Metric, value: float | None, shown: str) -> None:
    assert metric.show(value) == shown


def test_every_output_format_has_every_number(records: list[RunRecord]) -> None:
    comparison = compare(records)
    plain = json.loads(report.to_json(comparison), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert [line["label"] for line in plain["lines"]] == list(LABELS)
    assert plain["lines"][1]["difference"]["p"] == comparison.lines[1].difference.p  # type: ignore[union-attr]
    text, markdown = report.to_text(comparison), report.to_markdown(comparison)
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(table) == 2 * (2 + len(LABELS)), "the comparison and all scores"
    for part in (table[: len(table) // 2], table[len(table) // 2 :]):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in part}) == 1
    for column in columns(comparison):
        for cell in column.cells:
            assert cell in text
            assert cell.replace("[", "\\[") in markdown


def test_table_cells_match_hand_computed_values(tmp_path: Path) -> None:
    runs = [make_record(tmp_path, "a", 0, [0.5]), make_record(tmp_path, "a", 1, [0.6])]
    runs += [make_record(tmp_path, "b", 0, [0.4]), make_record(tmp_path, "b", 1, [0.52])]
    comparison = compare(runs)
    assert column_cells(comparison, "accuracy, %") == ("55.0 ± 7.1", "46.0 ± 8.5")
    assert column_cells(comparison, "difference") == ("–", "−9.0 [−21.7, 3.7]")
    assert column_cells(comparison, "p") == ("–", "0.070")


def test_labels_with_markup_are_escaped_in_text_and_markdown(tmp_path: Path) -> None:
    label = "a|b [bold]_x_ $y$ <i>"
    comparison = compare([make_record(tmp_path, label, 0, [0.5, 0.6])])
    lines = [line for line in report.to_text(comparison).splitlines() if line.strip().startswith(label + " ")]
    assert len(lines) == 3  # one line per table; comments start with a dot
    assert r"a\|b \[bold]\_x\_ $y$ \<i>" in report.to_markdown(comparison)


# Figures


def draw(name: str, records: list[RunRecord], metric: str | None = None) -> Any:
    return FIGURES[name](records, metric_of(records, metric))


def test_curves_are_mean_and_sample_standard_deviation(records: list[RunRecord]) -> None:
    runs = [record for record in records if record.label == "fedprox"]
    values = 100 * np.array([[row["test"]["accuracy"] for row in run.rows] for run in runs])  # (seed, round)
    sent = np.array([[row["bytes"]["up"] for row in run.rows] for run in runs]) / 1e6
    found = curve_of(runs, ACCURACY)
    assert found.rounds == list(range(1, ROUNDS + 1))
    assert found.mean == pytest.approx(values.mean(axis=0))
    assert found.sd == pytest.approx(values.std(axis=0, ddof=1))
    assert found.megabytes == pytest.approx(sent.cumsum(axis=1).mean(axis=0))


def test_plan_changes_are_marked_and_drift_of_frozen_roles_ends(records: list[RunRecord]) -> None:
    figure = draw("rounds", records)
    assert figure is not None
    verticals = [line for line in figure.axes[0].lines if list(line.get_xdata()) == [WARMUP + 0.5] * 2]
    assert [line.get_color() for line in verticals] == [styles(LABELS)["fedfrozen"].color]
    early = [RunRecord(**{**vars(record), "rows": record.rows[:WARMUP], "finished": False}) for record in records]
    assert changes(early) == []  # the plan lists stages that an unfinished run has not reached
    drift = draw("drift", records)
    assert drift is not None
    lengths = {panel.get_title(loc="left"): [len(line.get_xdata()) for line in panel.lines] for panel in drift.axes}
    assert lengths["query"] == lengths["key"] == [ROUNDS, ROUNDS, WARMUP]
    assert lengths["value"] == [ROUNDS, ROUNDS, ROUNDS]
    assert "layer.0" not in lengths


@pytest.mark.slow
def test_equal_plans_are_drawn_once(records: list[RunRecord]) -> None:
    assert [each.labels for each in plans(records)] == [["fedavg", "fedprox"], ["fedfrozen"]]
    figure = draw("plan", records)
    assert figure is not None
    panels = figure.axes
    assert [panel.get_title(loc="left") for panel in panels] == ["fedavg, fedprox", "fedfrozen"]
    assert [tick.get_text() for tick in panels[1].get_xticklabels()] == ["1–6", "7–16"]
    [unchanged], [later] = panels[0].images, panels[1].images
    assert unchanged.get_array().shape == (8, 1, 4)
    down_only = matplotlib.colors.to_rgba(COLOR["comes"])
    assert [int((image.get_array() == down_only).all(-1).sum()) for image in (unchanged, later)] == [0, 2]


def test_what_happens_to_a_parameter_is_told_apart(tmp_path: Path) -> None:
    record = load_run(write_run(tmp_path, "fedper", 0))
    assert {status_of(row) for row in record.plan[0]["rows"] if row["role"] == "head"} == {"stays"}
    assert status_of({"trains": False, "up": False, "down": False, "keep": False}) == "frozen"


def test_as_many_styles_as_methods_in_a_large_study_are_distinct() -> None:
    found = styles(f"method {number}" for number in range(28)).values()
    assert len({(style.color, str(style.dash)) for style in found}) == 28


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("count", [1, 15])
def test_legends_cover_no_data_and_styles_are_distinct(tmp_path: Path, count: int) -> None:
    labels = ["fedavg", "_hidden", "fedfrozen", "a label that is far too long to be shown as it is"]
    labels = [*labels, *(f"method {number}" for number in range(count))][:count]
    assert len({(style.color, str(style.dash)) for style in styles(labels).values()}) == count
    runs = [load_run(write_run(tmp_path, label, 0, rounds=8)) for label in labels]
    for name in ("rounds", "drift"):
        figure = draw(name, runs)
        assert figure is not None
        figure.draw_without_rendering()
        legend = figure.legends[0]
        assert len([text for text in legend.get_texts() if text.get_text() != " plan changes"]) == count
        box = legend.get_window_extent()
        assert box.x1 <= figure.bbox.x1
        assert not any(box.overlaps(panel.get_window_extent()) for panel in figure.axes if panel.get_visible())
    strips = draw("personal", runs)
    assert strips is not None
    assert len(strips.axes[0].containers) == count


@pytest.mark.slow
def test_picture_is_a_wide_png_and_leaves_matplotlib_settings_unchanged(
    records: list[RunRecord], tmp_path: Path
) -> None:
    before = dict(matplotlib.rcParams)
    data = picture(records, tmp_path / "deep" / "out.png").read_bytes()
    [drawing, *_] = paper_figures(records, tmp_path / "paper")
    assert "<text" in drawing.read_text()  # text instead of outlines, by a temporary setting
    assert dict(matplotlib.rcParams) == before
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert width > 2 * height
    assert len(data) > 20_000


def test_figures_name_the_extra_when_matplotlib_is_missing(
    records: list[RunRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ReportError, match=re.escape("pip install 'partita[report]'")):
        draw("rounds", records)


# The page


class Reader(HTMLParser):
    """Collects ids, links and text, and fails on mismatched tags."""

    VOID = frozenset({"meta", "br", "use", "path", "image", "circle", "wbr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.scripts: list[str] = []  # texts of the script elements

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"]:
            self.text += data

    @property
    def data(self) -> dict[str, Any]:
        """The values for the page's script."""
        return json.loads(self.scripts[0], parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def parse_page(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_page_is_self_contained_and_complete(records: list[RunRecord], tmp_path: Path) -> None:
    text = page(records, tmp_path / "page.html", title="Kernel & drift").read_text()
    reader = parse_page(text)
    # The home of uPlot in its comment, and the name of SVG. The policy keeps the page from loading anything at all.
    known = ["https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"]
    assert list(dict.fromkeys(re.findall(r"https?:[\w./]+", text))) == known
    [policy] = [value for name, value in reader.attributes if name == "content" and "default-src" in value]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "url(" not in text
    assert "@import" not in text
    assert not {"link", "iframe", "img", "image"} & set(reader.tags)
    assert reader.tags.count("script") == 2
    assert not [name for name, _ in reader.attributes if name in ("src", "style") or name.startswith("on")]
    ids = [value for name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = {value for name, value in reader.attributes if name == "href"}
    assert links
    assert links <= {f"#{name}" for name in ids}
    named = {value for name, value in reader.attributes if name in ("aria-labelledby", "for")}
    assert named <= set(ids)
    charts = [value for name, value in reader.attributes if name == "data-chart"]
    assert charts == list(reader.data["charts"]) == ["curves", "drift", "personal"]
    for wanted in (
        *LABELS, "Kernel & drift", "cifar10", "vit-tiny", "loss is nan after 12 steps", "c", "alpha = 0.3", "warm_up",
        "torch", "partita run", "sample standard deviation", "Holm",
    ):  # fmt: skip
        assert wanted in reader.text
    for column in columns(compare(records)):
        assert all(cell in reader.text for cell in column.cells)


def test_page_escapes_labels_and_reasons(tmp_path: Path) -> None:
    label, reason = "<script>alert('a')</script> & \"b\"", "<img src=x>"
    record = load_run(
        write_run(
            tmp_path,
            label,
            0,
            rounds=3,
            edit=lambda row: {**row, "drift": {}, "personal": None, "lost": {"<c>": reason}},
        )
    )
    reader = parse_page(page([record], tmp_path / "page.html", title="<b>").read_text())
    assert not {"img", "c"} & set(reader.tags)
    assert reader.tags.count("script") == 2
    assert reader.data["labels"][0]["name"] == label
    assert label in reader.text
    assert reason in reader.text
    assert "<c> (seed 0, round 1)" in reader.text


def test_clients_are_named_in_figures_and_tables(tmp_path: Path) -> None:
    name = '<script>alert(1)</script> & "b"'

    def edit(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "drift": {}, "personal": {"accuracy": {name: 0.25, "c10": 0.75, "c9": 0.5}}}

    local = as_local_only(load_run(write_run(tmp_path, "alone", 0, rounds=2, edit=edit)))
    record = load_run(write_run(tmp_path, "a", 0, rounds=2, edit=edit))
    text = page([local, record], tmp_path / "page.html").read_text()
    reader = parse_page(text)
    assert reader.tags.count("script") == 2
    by_client, by_rank, gain, gain_by_rank = reader.data["charts"]["personal"]["views"]
    assert by_client["names"] == gain["names"] == [name, "c9", "c10"]
    assert [line["y"] for line in by_client["lines"]] == [[25, 50, 75]] * 2
    assert [line["y"] for line in by_rank["lines"]] == [[25, 50, 75]] * 2
    assert [line["y"] for view in (gain, gain_by_rank) for line in view["lines"]] == [[0, 0, 0]] * 2
    table = text[text.index("of each client on its own test set</h3>") :]
    rows = re.findall(r'<th scope="row">(.*?)</th>', table)
    assert [html.unescape(row) for row in rows[:3]] == [name, "c9", "c10"]
    assert re.findall(r"<td>([^<]*)</td>", table)[:6] == ["25.0", "25.0", "50.0", "50.0", "75.0", "75.0"]


@pytest.mark.parametrize(("count", "collapsed"), [(12, False), (13, True)])
def test_long_tables_of_clients_are_collapsed(count: int, collapsed: bool, tmp_path: Path) -> None:
    own = {f"c{number}": number / count for number in range(count)}
    run = write_run(tmp_path, "a", 0, rounds=2, edit=lambda row: {**row, "personal": {"accuracy": own}})
    text = page([load_run(run)], tmp_path / "page.html").read_text()
    assert ("<summary>Accuracy, % of each client" in text) == collapsed


def test_all_recorded_scores_are_shown_in_every_format(tmp_path: Path) -> None:
    runs = []
    for label, lift in (("a", 0.0), ("b", 0.1)):
        for seed in range(2):
            scores = {"accuracy": 0.5 + lift, "macro_f1": 0.2 + lift + 0.1 * seed, "loss": 2.0 - seed}
            edit = lambda row, scores=scores: {**row, "test": scores, "personal": None}  # noqa: E731
            runs.append(load_run(write_run(tmp_path, label, seed, rounds=2, edit=edit)))
    comparison = compare(runs)
    expected = [("50.0 ± 0.0", "25.0 ± 7.1", "1.50 ± 0.71"), ("60.0 ± 0.0", "35.0 ± 7.1", "1.50 ± 0.71")]
    shown = score_columns(comparison)
    assert [column.heading for column in shown] == ["accuracy, %", "macro_f1, %", "loss"]
    assert list(zip(*(column.cells for column in shown), strict=True)) == expected
    assert any("lower is better for loss" in comment for comment in comparison.comments)
    reader = parse_page(page(runs, tmp_path / "page.html").read_text())
    for text in (report.to_text(comparison), report.to_markdown(comparison), reader.text):
        assert all(cell in text for line in expected for cell in line)
    [first, _] = json.loads(report.to_json(comparison))["lines"]
    assert first["scores"]["macro_f1"] == pytest.approx({"mean": 0.25, "sd": 0.1 / math.sqrt(2)})
    for metric in ("accuracy", "macro_f1", "loss"):
        other = compare(runs, metric=metric)
        assert other.higher_is_better == (metric != "loss")
        text = page(runs, tmp_path / "page.html", metric=metric).read_text()
        assert f"<h3>{metric.capitalize()} by round</h3>" in text
        figure = draw("rounds", runs, metric)
        assert figure is not None
        assert figure.axes[0].get_ylabel().startswith(f"test {metric}")


def test_many_scores_are_shown_below_each_other(tmp_path: Path) -> None:
    scores = {"accuracy": 0.5, **{f"a_rather_long_name_{place}": place / 10 for place in range(7)}}
    run = write_run(tmp_path, "fedavg", 0, rounds=2, edit=lambda row: {**row, "test": scores, "personal": None})
    text = report.to_text(compare([load_run(run)]), width=160)
    assert all(f"{name}, %" in text for name in scores)
    assert "All scores, from a_rather_long_name_5, %" in text
    assert max(map(len, text.splitlines())) <= 160


def test_one_metric_needs_no_table_of_all_scores(tmp_path: Path) -> None:
    comparison = compare([make_record(tmp_path, "a", 0, [0.1, 0.5])])
    assert score_columns(comparison) == []
    assert "All scores" not in report.to_text(comparison)


def test_one_class_models_are_named_below_the_comparison(tmp_path: Path) -> None:
    def edit(last: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def tested(row: dict[str, Any]) -> dict[str, Any]:
            raised = {"alarms": {"one predicted class": "the model predicts 'x'"}} if last or row["round"] < 2 else {}
            return {**row, **raised} if row["round"] % 2 else {**row, "test": None}

        return tested

    runs = [
        load_run(write_run(tmp_path, "a", seed, rounds=6, edit=edit(last)))
        for seed, last in enumerate((True, False, True))
    ]
    comments = compare(runs).comments
    assert [text for text in comments if "predicts one class in 2 of 3 runs: " in text and text.startswith("a: ")]
    assert alarms_raised(runs) == [
        "a, one predicted class, seed 0 in rounds 2 to 6; seed 1 in round 2; seed 2 in rounds 2 to 6: "
        "the model predicts 'x'."
    ]
    assert not [text for text in compare(runs[1:2]).comments if "one class" in text], "it learned later"


@pytest.mark.slow
def test_labels_whose_clients_choose_layers_have_their_own_panel(tmp_path: Path) -> None:
    def choose(row: dict[str, Any]) -> dict[str, Any]:
        sent = {name: size for name, size in row["up"].items() if name != "embed.weight"}
        first = ["layer.0"] if row["round"] == 0 else ["layer.1"]
        return {**row, "up": sent, "chosen": {"c0": first, "c1": ["layer.1"]}, "scores": {}}

    runs = [load_run(write_run(tmp_path, "fedavg", 0, rounds=2))]
    runs += [load_run(write_run(tmp_path, "safl", seed, rounds=2, edit=choose)) for seed in range(2)]
    assert [(each.labels, bool(each.choosing)) for each in plans(runs)] == [(["fedavg"], False), (["safl"], True)]
    figure = draw("plan", runs)
    assert figure is not None
    panel = figure.axes[1]
    assert panel.get_title(loc="left") == "safl"
    sent = dict(zip((tick.get_text() for tick in panel.get_yticklabels()), panel.texts, strict=False))
    assert {name: text.get_text() for name, text in sent.items() if name.startswith("layer.0")} == {
        name: "25%" for name in sent if name.startswith("layer.0")
    }
    assert {text.get_text() for text in panel.texts} == {"7%", "25%", "75%", "0%"}, "outside: the head always"
    reader = parse_page(page(runs, tmp_path / "page.html").read_text())
    assert "share of their rounds: 0 (25%), 1 (75%), 2 (0%), 3 (0%)" in reader.text
    assert "at most " in reader.text


def test_long_labels_may_break_at_punctuation_only() -> None:
    assert breakable("fedfrozen(warmup=3)") == "fedfrozen(<wbr>warmup=3)"
    assert breakable("method.max_warmup") == "method.<wbr>max_<wbr>warmup"
    assert breakable("5 018.5 <b>") == "5 018.5 &lt;b&gt;"


def test_page_of_one_run_with_one_round_is_made(tmp_path: Path) -> None:
    record = load_run(write_run(tmp_path, "fedavg", 0, rounds=1, finished=False))
    text = page([record], tmp_path / "page.html").read_text()
    assert "unfinished (1 of 16 rounds)" in text
    assert "there is one seed, so no spread" in text
    assert "Lost clients" not in text
    assert "1 (0 finished)" in text


def test_failed_page_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page.html"
    out.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        page([RunRecord("a", 0, {}, ({"round": 0},), (), {}, True, tmp_path)], out)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert out.read_text() == "old"


# The package


@pytest.mark.slow
def test_report_package_imports_no_torch_or_pyplot() -> None:
    """At import only the standard library; never torch, pyplot, or more of core than safe file reading."""
    folder = Path(report.__file__).parent
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                first = name.split(".")[0]
                assert first not in ("torch", "transformers"), (path.name, name)
                assert "pyplot" not in name, (path.name, name)
                own = (
                    "partita.report",
                    "partita.record",
                    "partita.storage.safe_text",
                    "partita.storage.atomic_files",
                    "partita.storage.png",
                )
                assert first != "partita" or name.startswith(own) or name == "partita.storage", (path.name, name)
                if node in tree.body:
                    assert first in {"partita", *sys.stdlib_module_names}, (path.name, name)
