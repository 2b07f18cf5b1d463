"""The values of the page's charts."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from report_fixtures import ROUNDS, WARMUP, write_run

from partita.record.metric import ACCURACY
from partita.report import RunRecord, load_run
from partita.report.chart_data import attacks_chart, clients_chart, curves_chart, drift_chart, epsilon_chart
from partita.report.charts import POINTS_KEPT, Line, View, chart, thinned
from partita.report.sections import by_number
from partita.report.templating import json_block

LABELS = ("fedavg", "fedfrozen")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    root = tmp_path_factory.mktemp("runs")
    return [load_run(write_run(root, label, seed)) for label in LABELS for seed in range(3)]


def test_curves_have_mean_spread_and_three_axes(records: list[RunRecord]) -> None:
    found = curves_chart(records, ACCURACY)
    assert found is not None
    content = found.content
    assert [view["name"] for view in content["views"]] == [
        "test accuracy", "test loss", "personal accuracy", "train loss",
    ]  # fmt: skip
    assert [axis["name"] for axis in content["axes"]] == ["rounds", "bytes", "seconds"]
    first, second = content["views"][0]["lines"]
    runs = records[:3]
    for place in (0, ROUNDS - 1):
        values = [100 * run.rows[place]["test"]["accuracy"] for run in runs]
        assert first["y"][place] == pytest.approx(fmean(values))
        assert first["sd"][place] == pytest.approx(stdev(values))
    rounds, megabytes, seconds = (content["x"][place] for place in first["x"])
    assert list(rounds) == list(range(1, ROUNDS + 1))
    assert megabytes[-1] == pytest.approx(fmean(sum(row["bytes"]["up"] for row in run.rows) for run in runs) / 1e6)
    assert seconds[-1] == pytest.approx(fmean(sum(row["seconds"] for row in run.rows) for run in runs))
    assert second["x"][0] == first["x"][0], "equal lists are written once"
    assert content["views"][0]["marks"] == [[WARMUP + 0.5, 1]]
    assert content["views"][0]["limits"] == (0.0, 100.0)
    assert content["views"][1]["limits"] is None
    assert f"fedavg from {first['y'][0]:.1f}" in found.summary
    assert found.table is not None
    assert found.table.rows[-1][0] == str(ROUNDS)


def test_an_axis_that_a_label_has_no_values_for_is_not_offered(records: list[RunRecord], tmp_path: Path) -> None:
    other = load_run(write_run(tmp_path, "old", 0, edit=lambda row: {**row, "bytes": None, "seconds": None}))
    found = curves_chart([*records, other], ACCURACY)
    assert found is not None
    assert [axis["name"] for axis in found.content["axes"]] == ["rounds"]


def test_drift_has_a_view_for_each_role_and_ends_when_it_is_frozen(records: list[RunRecord]) -> None:
    found = drift_chart(records)
    assert found is not None
    lengths = {view["name"]: [len(line["y"]) for line in view["lines"]] for view in found.content["views"]}
    assert lengths == {"query": [ROUNDS, WARMUP], "key": [ROUNDS, WARMUP], "value": [ROUNDS] * 2, "mlp": [ROUNDS] * 2}


def test_ranks_average_the_sorted_clients_of_each_seed(tmp_path: Path) -> None:
    own = ({"a": 0.1, "b": 0.9}, {"a": 0.7, "b": 0.3, "c": 0.5})
    runs = [
        load_run(
            write_run(
                tmp_path, "x", seed, rounds=1, edit=lambda row, seed=seed: {**row, "personal": {"accuracy": own[seed]}}
            )
        )
        for seed in range(2)
    ]
    found = clients_chart(runs, ACCURACY, by_number)
    assert found is not None
    by_client, by_rank = found.content["views"]
    assert by_client["names"] == ["a", "b", "c"]
    assert by_client["lines"][0]["y"] == pytest.approx([40, 60, 50])
    assert by_rank["lines"][0]["y"] == pytest.approx([20, 70, 70])
    assert by_rank["lines"][0]["sd"] == pytest.approx([stdev([10, 30]), stdev([90, 50]), None])


def test_charts_without_values_are_left_out(tmp_path: Path) -> None:
    def edit(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "test": None, "personal": None, "drift": {}, "train_loss": None}

    runs = [load_run(write_run(tmp_path, "x", 0, rounds=2, edit=edit))]
    assert curves_chart(runs, ACCURACY) is None
    assert drift_chart(runs) is None
    assert clients_chart(runs, ACCURACY, by_number) is None
    assert epsilon_chart(runs) is None
    assert attacks_chart(runs) is None


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("lines", "kept"), [(2, POINTS_KEPT[1]), (2500, POINTS_KEPT[0])])
def test_long_lines_are_thinned_and_keep_their_ends(lines: int, kept: int) -> None:
    x = list(range(5000))
    view = View("v", "v", [Line("a", (x,), x)] * lines)
    found = chart("c", "t", "c", [view], ["a"])
    assert found is not None
    [points] = found.content["x"]
    assert len(points) == kept
    assert (points[0], points[-1]) == (0, 4999)
    steps = {later - earlier for earlier, later in pairwise(points)}
    assert max(steps) - min(steps) <= 1
    assert thinned(3, 5) == [0, 1, 2]


def test_json_block_is_short_finite_and_cannot_end_its_element() -> None:
    hostile = "</script><!--\u2028\x1b"
    text = str(json_block({"a": [1 / 3, 2.0, math.nan, math.inf, None], hostile: hostile}))
    assert not {"<", ">", "&", "\u2028", "\x1b"} & set(text)
    assert json.loads(text) == {
        "a": [0.33333, 2, None, None, None],
        "</script><!--\\u2028\\x1b": "</script><!--\\u2028\\x1b",
    }
