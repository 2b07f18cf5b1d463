"""The three sentences at the top of a report, on made-up comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import write_run

from partita.record.metric import Metric
from partita.report import RunRecord, compare, load_run
from partita.report.findings import findings


def runs(root: Path, finals: Mapping[str, Sequence[float]], **tests: Mapping[str, Sequence[float]]) -> list[RunRecord]:
    """Runs of two rounds: by label, the accuracy of each seed at the end, and by other metrics likewise."""

    def edit(label: str, seed: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        scores = {"accuracy": finals[label][seed], **{name: by[label][seed] for name, by in tests.items()}}
        return lambda row: {**row, "test": scores, "seconds": 2.0, "bytes": {"up": 1_000_000, "down": 500_000}}

    made = [
        load_run(write_run(root, label, seed, rounds=2, planned=2, edit=edit(label, seed)))
        for label, values in finals.items()
        for seed in range(len(values))
    ]
    plain = {"mu": None, "warm_up": None, "name": None}
    return [
        replace(record, config={**record.config, "method": {**record.config["method"], **plain}}) for record in made
    ]


def told(records: Sequence[RunRecord], metric: str | None = None) -> tuple[str, str, str]:
    return findings(records, compare(records, metric=metric))


def test_significant_difference_is_told_with_interval_and_p(tmp_path: Path) -> None:
    records = runs(tmp_path, {"fedavg": (0.70, 0.71, 0.69, 0.70), "fedprox": (0.75, 0.765, 0.735, 0.75)})
    result, certainty, cost = told(records)
    difference = compare(records).lines[1].difference
    assert difference is not None
    assert difference.low is not None
    assert difference.high is not None
    interval = f"+{100 * difference.low:.1f} to +{100 * difference.high:.1f}"
    assert result == (
        f"fedprox has the best mean accuracy, 75.0%: 5.0 points better than fedavg (95% interval {interval})."
    )
    assert certainty.startswith("The difference is unlikely to be chance (p < 0.001, paired t test over n = 4 seeds)")
    assert cost.startswith("A run of fedprox sends 3.00 MB and takes 2.00 s per round, as many bytes as fedavg; ")
    assert "the worst tenth of" in cost


def test_order_that_could_be_chance_is_called_so(tmp_path: Path) -> None:
    records = runs(tmp_path, {"fedavg": (0.70, 0.72, 0.68), "fedprox": (0.73, 0.69, 0.70)})
    result, certainty, _ = told(records)
    assert "0.7 points better than fedavg (95% interval −" in result
    assert certainty.startswith("The order could be chance (p = 0.7")
    assert "more seeds are needed to tell fedprox from fedavg" in certainty


def test_baseline_that_is_best_is_compared_with_the_next(tmp_path: Path) -> None:
    finals = {"fedavg": (0.80, 0.81, 0.79), "a": (0.70, 0.72, 0.68), "b": (0.74, 0.76, 0.74)}
    result, certainty, _ = told(runs(tmp_path, finals))
    assert result.startswith("No label has a better mean accuracy than fedavg, 80.0%; the next best is b, 5.3 points")
    assert "worse (95% interval −" in result
    assert "after Holm's correction, paired t test over n = 3 seeds)" in certainty
    assert certainty.endswith("only differences to fedavg are tested.")


def test_tie_is_told_as_one(tmp_path: Path) -> None:
    result, certainty, _ = told(runs(tmp_path, {"fedavg": (0.7, 0.8), "fedprox": (0.7, 0.8)}))
    assert result == "fedavg and fedprox share the best mean accuracy, 75.0%."
    assert certainty == "The values of fedprox and fedavg are the same for every seed (n = 2 seeds)."


def test_equal_difference_for_every_seed_is_not_tested(tmp_path: Path) -> None:
    _, certainty, _ = told(runs(tmp_path, {"fedavg": (0.25, 0.5), "fedprox": (0.5, 0.75)}))
    assert certainty == "The difference is the same for each of 2 seeds, so there is no spread to test it against."


def test_two_seeds_are_few(tmp_path: Path) -> None:
    _, certainty, _ = told(runs(tmp_path, {"fedavg": (0.70, 0.71), "fedprox": (0.80, 0.8101)}))
    assert certainty.endswith("but 2 seeds are few.")


def test_one_seed_says_nothing_about_chance(tmp_path: Path) -> None:
    result, certainty, _ = told(runs(tmp_path, {"fedavg": (0.70,), "fedprox": (0.75,)}))
    assert result == "fedprox has the best mean accuracy, 75.0%: 5.0 points better than fedavg."
    assert certainty.startswith("There is one seed for each label, so nothing can be said about chance")
    _, certainty, _ = told(runs(tmp_path / "more", {"fedavg": (0.70, 0.71), "fedprox": (0.75,)}))
    assert certainty == (
        "Nothing can be said about chance, because only one pair of runs of fedprox and fedavg can be compared, seed "
        "by seed."
    )


def test_single_run_and_single_label_are_compared_with_nothing(tmp_path: Path) -> None:
    result, certainty, _ = told(runs(tmp_path, {"fedavg": (0.70,)}))
    assert result == "fedavg reaches an accuracy of 70.0% on the central test set."
    assert certainty.startswith("This is one run with one seed, so nothing can be said about chance")
    result, certainty, _ = told(runs(tmp_path / "more", {"fedavg": (0.70, 0.72)}))
    assert "71.0 ± 1.4%" in result
    assert certainty.startswith("The spread is over 2 seeds; it is compared with no other label")


def test_metrics_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    losses = {"fedavg": (0.5, 0.6, 0.5), "fedprox": (0.9, 0.8, 0.9)}
    records = runs(tmp_path, {"fedavg": (0.70, 0.71, 0.69), "fedprox": (0.75, 0.76, 0.73)}, loss=losses)
    _, _, cost = told(records)
    assert cost.startswith("Not all scores agree: best is fedavg by loss; a run of fedprox sends")
    result, _, cost = told(records, "loss")
    assert result.startswith("No label has a better mean loss than fedavg, 0.53; the next best is fedprox, 0.33 worse")
    assert cost.startswith("Not all scores agree: best is fedprox by accuracy;")


def test_lower_is_better_turns_the_interval_round(tmp_path: Path) -> None:
    perplexity = {"fedavg": (9.0, 9.5, 9.0), "fedprox": (8.0, 8.3, 7.9)}
    records = runs(tmp_path, {"fedavg": (0.7,) * 3, "fedprox": (0.7,) * 3}, perplexity=perplexity)
    metric = Metric("perplexity", higher_is_better=False, fraction=False)
    result, _, _ = told([replace(record, metrics=(metric,)) for record in records])
    assert result.startswith("fedprox has the best mean perplexity, 8.07: 1.10 better than fedavg (95% interval +0.")


def test_values_that_are_no_numbers_are_said_to_be_missing(tmp_path: Path) -> None:
    nan = math.nan
    result, certainty, _ = told(runs(tmp_path, {"fedavg": (0.70, 0.71), "fedprox": (nan, nan)}))
    assert result == (
        "fedavg reaches an accuracy of 70.5 ± 0.7% on the central test set; fedprox has none: the value is missing or "
        "not a number."
    )
    assert certainty.startswith("The spread is over 2 seeds")
    result, certainty, _ = told(runs(tmp_path / "first", {"fedavg": (nan, nan), "a": (0.7, 0.7), "b": (0.8, 0.9)}))
    assert "but there is nothing to compare it with: differences are to fedavg; fedavg has none" in result
    assert certainty.startswith("No difference was tested, because fedavg has no value")
    result, certainty, _ = told(runs(tmp_path / "all", {"fedavg": (nan,), "fedprox": (nan,)}))
    assert result == "No run has an accuracy in its last test: the value is missing or not a number."
    assert certainty.startswith("So nothing can be said")


def test_unfinished_runs_and_constant_models_are_named(tmp_path: Path) -> None:
    records = runs(tmp_path, {"fedavg": (0.70, 0.71), "fedprox": (0.75, 0.77)})
    records[1] = replace(records[1], finished=False)
    last = {**records[0].rows[-1], "alarms": {"one predicted class": "the model predicts '1'"}}
    records[0] = replace(records[0], rows=(*records[0].rows[:-1], last))
    _, certainty, _ = told(records)
    assert (
        "; 1 of 4 runs is unfinished, so this is preliminary; the last model of fedavg predicts one class" in certainty
    )
    _, certainty, _ = told([replace(records[2], finished=False)])
    assert certainty.endswith("; the run is unfinished, so this is preliminary.")


@pytest.mark.parametrize(
    ("table", "changed", "words"),
    [
        ("data", {"name": "cifar100"}, "The labels use different data (data.name), so their scores say nothing"),
        ("split", {"name": "iid"}, "The labels differ in more than the method (split.name), so the comparison may"),
    ],
)
def test_labels_of_different_tasks_are_not_compared(
    table: str, changed: Mapping[str, Any], words: str, tmp_path: Path
) -> None:
    records = runs(tmp_path, {"fedavg": (0.70, 0.71, 0.7), "fedprox": (0.75, 0.77, 0.75)})
    records[3:] = [
        replace(record, config={**record.config, table: {**record.config[table], **changed}}) for record in records[3:]
    ]
    _, certainty, _ = told(records)
    assert certainty.startswith(words)
    assert "unlikely to be chance" not in certainty


def test_runs_without_costs_say_so(tmp_path: Path) -> None:
    [record] = runs(tmp_path, {"fedavg": (0.70,)})
    rows = tuple({"round": row["round"], "test": row["test"]} for row in record.rows)
    assert told([replace(record, rows=rows)])[2] == "The cost was not recorded."
