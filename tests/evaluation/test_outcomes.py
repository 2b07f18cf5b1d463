"""Scores from outcomes of single examples equal those of the evaluators, for any subset and any weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as reference
from torch.nn import functional

from partita.core.data import IGNORE_INDEX
from partita.core.rng import Key
from partita.evaluation.answers import Answers, Choices
from partita.evaluation.bootstrap import intervals
from partita.evaluation.by_example import ByExample
from partita.evaluation.entities import TagScheme
from partita.evaluation.evaluator import Evaluator, Predictions, without_types
from partita.evaluation.generation import GeneratedText, ModelPredictions, ScoredChoices
from partita.evaluation.metrics import Accuracy, Entities, MultiLabel, NextToken, Regression, SingleLabel
from partita.evaluation.outcomes import outcomes
from partita.evaluation.own_metrics import OwnMetrics
from partita.evaluation.segmentation import Segmentation
from partita.record.metric import Metric

CLASSES = ("cat", "dog", "a/b", "owl")
TAGS = ("O", "B-drug", "I-drug", "B-site", "I-site")
TEXTS = ["a b c", "b c", "", "é", "a", "c b a", "b", "a b"]
TRUTHS = ["a b c", "c b", "a", "ü", "a ", "a b c", "c", "é"]


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def single(rows: slice | list[int] = slice(None)) -> Predictions:
    logits = torch.randn(40, 4, generator=draw()).mul(2).round(decimals=1)  # with ties
    targets = torch.randint(0, 4, (40,), generator=draw(1))
    return Predictions(logits[rows], targets[rows], functional.cross_entropy(logits, targets, reduction="none")[rows])


def several(rows: slice | list[int] = slice(None)) -> Predictions:
    logits = torch.randn(30, 4, generator=draw()).round(decimals=1)
    targets = (torch.rand(30, 4, generator=draw(2)) < 0.3).float()
    losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
    return Predictions(logits[rows], targets[rows], losses[rows])


def tagged(rows: slice | list[int] = slice(None)) -> Predictions:
    logits = torch.randn(12, 6, 5, generator=draw())
    targets = torch.randint(0, 5, (12, 6), generator=draw(3))
    targets[:, 4:] = IGNORE_INDEX
    targets[3, 2:] = IGNORE_INDEX
    losses = torch.rand(12, generator=draw(4))
    return Predictions(logits[rows], targets[rows], losses[rows])


def numbers(rows: slice | list[int] = slice(None)) -> Predictions:
    targets = 100 + torch.randn(25, 2, generator=draw())
    logits = targets + torch.randn(25, 2, generator=draw(1))
    return Predictions(logits[rows], targets[rows], (logits - targets).square().mean(1)[rows])


def pixels(rows: slice | list[int] = slice(None)) -> Predictions:
    logits = torch.randn(6, 4, 5, 5, generator=draw())
    targets = torch.randint(0, 3, (6, 5, 5), generator=draw(1)).to(torch.int16)
    targets[:, 0] = IGNORE_INDEX
    return Predictions(logits[rows], targets[rows], torch.rand(6, generator=draw(2))[rows])


def written(rows: slice | list[int] = slice(None)) -> Predictions:
    targets = torch.randint(0, 5, (8, 7), generator=draw())
    targets[:, 5:] = IGNORE_INDEX
    targets[2, 3:] = IGNORE_INDEX
    logits = functional.one_hot(targets.clamp(min=0), 5).float()
    logits[3] = 0
    likelihoods = torch.randn(8, 3, generator=draw(1))
    chosen = ScoredChoices(
        likelihoods[rows],
        torch.randint(1, 4, (8, 3), generator=draw(2))[rows],
        torch.randint(0, 3, (8,), generator=draw(3))[rows],
    )
    texts, truths = ([each[row] for row in range(8)[rows]] if isinstance(rows, slice) else [each[row] for row in rows]
                     for each in (TEXTS, TRUTHS))  # fmt: skip
    return ModelPredictions(
        logits[rows],
        targets[rows],
        torch.rand(8, generator=draw(4))[rows],
        lambda count, most: (texts[:count], truths[:count]),
        lambda: chosen,
    )


def largest(logits: torch.Tensor, targets: torch.Tensor) -> float:
    return float(logits.amax(1).mean()) if len(targets) > 2 else float("nan")


CASES: dict[str, tuple[Evaluator, Callable[..., Predictions], tuple[str, ...]]] = {
    "accuracy": (Accuracy(), single, CLASSES),
    "single": (SingleLabel(), single, CLASSES),
    "own": (OwnMetrics(SingleLabel(), {Metric("largest"): largest}), single, CLASSES),
    "multi": (MultiLabel(), several, CLASSES),
    "entities": (Entities(TAGS), tagged, TAGS),
    "lm": (NextToken(), written, ()),
    "chat": (Answers(), written, ()),
    "choice": (Choices(), written, ()),
    "seq2seq": (GeneratedText(), written, ()),
    "some texts": (GeneratedText(examples=5), written, ()),
    "regression": (Regression(), numbers, ("height", "width")),
    "segmentation": (Segmentation(), pixels, CLASSES),
}


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-7, abs=1e-7)


def agree(found: dict[str, Any], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert found[name][0] == near(value), name
    for name, values in found.items():  # a score that the evaluator omits is undefined here too
        if "/" not in name and name not in expected:
            assert name in ("brier", "ece", "macro_f1", "micro_f1", "auroc") or np.isnan(values[0]), name


def batches(make: Callable[..., Predictions], rows: list[int], size: int) -> Iterator[Predictions]:
    return (make(rows[start : start + size]) for start in range(0, len(rows), size))


def scored(case: str, size: int = 4) -> dict[str, float]:
    evaluator, make, _ = CASES[case]
    return evaluator(batches(make, list(range(len(make().targets))), size))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 4, 100])
def test_scores_of_a_round_are_the_formula_with_weights_of_one(case: str, size: int) -> None:
    evaluator, make, classes = CASES[case]
    made = outcomes(evaluator, batches(make, list(range(len(make().targets))), size), classes)
    found = scored(case, size)
    agree(made(np.ones((1, len(made)))), found)
    assert found == pytest.approx(scored(case, 3), rel=1e-12), "whatever the batches"
    assert without_types(found).keys() <= {metric.name for metric in evaluator.metrics}
    assert list(without_types(found)) == [metric.name for metric in evaluator.metrics if metric.name in found]


@pytest.mark.parametrize("case", [case for case in CASES if case != "some texts"])
@settings(max_examples=5)
@given(drawn=st.lists(st.integers(0, 1000), min_size=1, max_size=9), size=st.integers(1, 4))
@example(drawn=[0, 0, 3, 5, 1, 1], size=4)
def test_weights_stand_for_repeated_examples(case: str, drawn: list[int], size: int) -> None:
    evaluator, make, classes = CASES[case]
    made = outcomes(evaluator, iter([make()]), classes)
    rows = sorted(place % len(made) for place in drawn)
    weights = np.bincount(rows, minlength=len(made)).astype(np.float64)
    expected = evaluator(batches(make, rows, size))
    agree(made(weights[None]), expected)
    kept = np.unique(rows)
    picked = made.select(kept)
    assert len(picked) == len(kept)
    agree(picked(weights[kept][None]), expected)


@pytest.mark.parametrize("case", CASES)
def test_sums_of_some_batches_at_a_time_are_those_of_all(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, evaluator = scored(case), CASES[case][0]
    held = list[int]()
    if isinstance(evaluator, ByExample):
        columns = type(evaluator).columns

        def watched(self: ByExample, kept: Any) -> Any:
            held.append(len(kept["losses"]))
            return columns(self, kept)

        monkeypatch.setattr(type(evaluator), "columns", watched)
    monkeypatch.setattr("partita.evaluation.by_example.NUMBERS_KEPT", 1)
    assert scored(case) == pytest.approx(expected, rel=1e-12)
    if isinstance(evaluator, ByExample) and not evaluator.whole:
        assert max(held) == 4, "one batch at a time"


@pytest.mark.parametrize("case", CASES)
def test_a_diverged_model_keeps_the_names_of_its_scores(case: str) -> None:
    """A loss that is no number is recorded; a score that is undefined is not."""
    evaluator, make, _ = CASES[case]
    batch = make()
    found = evaluator(iter([replace(batch, losses=torch.full_like(batch.losses, math.nan))]))
    assert found.keys() == evaluator(iter([batch])).keys()
    assert math.isnan(found["loss"])
    assert found.get("perplexity", math.inf) == math.inf


def test_scores_by_class_equal_scikit_learn() -> None:
    batch = single()
    made = outcomes(SingleLabel(), iter([batch]), CLASSES)
    found = made(np.ones((1, 40)))
    guesses = batch.logits.argmax(1)
    values = reference.precision_recall_fscore_support(batch.targets, guesses, zero_division=0)
    for metric, own in zip(("precision", "recall", "f1", "examples"), values, strict=True):
        for name, value in zip(CLASSES, own, strict=True):
            assert found[f"{metric}/{name}"][0] == near(value)
    probabilities = batch.logits.double().softmax(1)
    truth = functional.one_hot(batch.targets, 4)
    for place, name in enumerate(CLASSES):
        area = reference.roc_auc_score(truth[:, place], probabilities[:, place])
        assert found[f"auroc/{name}"][0] == near(area)
    assert made.confusion is not None
    assert made.confusion.counts.tolist() == reference.confusion_matrix(batch.targets, guesses).tolist()
    assert found["brier"][0] == near(float((probabilities - truth).square().sum(1).mean()))


def test_multi_label_scores_equal_scikit_learn() -> None:
    batch = several()
    found = outcomes(MultiLabel(), iter([batch]), CLASSES)(np.ones((1, 30)))
    truth, scores = batch.targets.numpy(), batch.logits.numpy()
    for place, name in enumerate(CLASSES):
        expected = reference.average_precision_score(truth[:, place], scores[:, place])
        assert found[f"auprc/{name}"][0] == near(expected)
    chances = batch.logits.double().sigmoid().numpy()
    assert found["brier"][0] == near(reference.brier_score_loss(truth.ravel(), chances.ravel()))


def test_confusion_of_words_is_by_type() -> None:
    batch = tagged()
    confusion = outcomes(Entities(TAGS), iter([batch]), TAGS).confusion
    assert confusion is not None
    valid = batch.targets != IGNORE_INDEX
    types = TagScheme(TAGS).type_of + 1
    expected = reference.confusion_matrix(types[batch.targets[valid]], types[batch.logits.argmax(-1)[valid]])
    assert confusion.classes == ("O", "drug", "site")
    assert confusion.counts.tolist() == expected.tolist()


def test_reliability_bins_hold_all_predictions() -> None:
    for evaluator, make, classes in (CASES["single"], CASES["multi"], CASES["entities"], CASES["segmentation"]):
        made = outcomes(evaluator, iter([make()]), classes)
        reliability = made.reliability()
        assert reliability is not None
        table = reliability.table()
        total = sum(row["count"] for row in table)
        assert float(reliability.error()) == near(
            sum(row["count"] * abs(row["confidence"] - row["accuracy"]) for row in table) / total
        )
        assert made(np.ones((1, len(made))))["ece"][0] == near(float(reliability.error()))
        assert all(row["from"] <= row["confidence"] <= row["to"] + 1e-12 for row in table)


@pytest.mark.slow
def test_intervals_equal_scipy() -> None:
    """With the same draws, the percentile interval is the one of scipy.stats.bootstrap."""
    batch, key = single(), Key(3) / "x"
    made = outcomes(SingleLabel(), iter([batch]), CLASSES)
    found = intervals(made, 200, key)
    guesses, targets = batch.logits.argmax(1).numpy(), batch.targets.numpy()
    scores: dict[str, Callable[..., float]] = {
        "accuracy": reference.accuracy_score,
        "macro_f1": partial(reference.f1_score, average="macro"),
    }
    for name, function in scores.items():
        expected = stats.bootstrap(
            (targets, guesses),
            function,
            paired=True,
            vectorized=False,
            n_resamples=200,
            method="percentile",
            rng=np.random.default_rng(key.seed()),
        ).confidence_interval
        assert (found[name].low, found[name].high) == (near(expected.low), near(expected.high))


def test_groups_are_drawn_together() -> None:
    """Copies of an example in one group add no certainty; as examples of their own they would."""
    rows = list(range(20))
    once = outcomes(SingleLabel(), iter([single(rows)]), CLASSES)
    copies = outcomes(SingleLabel(), iter([single(rows * 9)]), CLASSES)
    alone = intervals(once, 100, Key(0))
    together = intervals(copies, 100, Key(0), groups=[f"patient {row}" for row in sorted(rows, key=str)] * 9)
    in_order = intervals(copies, 100, Key(0), groups=[f"{row:03}" for row in rows] * 9)
    apart = intervals(copies, 100, Key(0))
    assert (in_order["accuracy"].low, in_order["accuracy"].high) == (
        near(alone["accuracy"].low or 0),
        near(alone["accuracy"].high or 0),
    )
    width = {name: each["accuracy"].high - each["accuracy"].low  # type: ignore[operator]
             for name, each in (("together", together), ("apart", apart))}  # fmt: skip
    assert width["apart"] < width["together"] / 2


def test_draws_repeat_and_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = outcomes(SingleLabel(), iter([single()]), CLASSES)
    first = intervals(made, 60, Key(1))
    assert intervals(made, 60, Key(1)) == first
    assert intervals(made, 60, Key(2)) != first
    monkeypatch.setattr("partita.evaluation.bootstrap.NUMBERS_TOGETHER", 40 * 7)
    again = intervals(made, 60, Key(1))
    assert again.keys() == first.keys()
    for name, interval in first.items():
        assert again[name].low == near(interval.low or 0)


def test_no_interval_without_two_groups_or_resamples() -> None:
    made = outcomes(SingleLabel(), iter([single()]), CLASSES)
    for found in (intervals(made, 0, Key(0)), intervals(made, 50, Key(0), groups=["one"] * 40)):
        assert found["accuracy"].low is None
        assert "low" not in found["accuracy"].to_json()


def test_an_infinite_score_has_no_interval() -> None:
    batch = written()
    found = intervals(outcomes(NextToken(), iter([replace(batch, losses=10_000 * batch.losses)]), ()), 20, Key(0))
    assert found["perplexity"].to_json() == {"value": math.inf}
    assert found["loss"].low is not None


def test_undefined_scores_are_left_out() -> None:
    batch = single([0])
    found = intervals(outcomes(SingleLabel(), iter([batch]), CLASSES), 20, Key(0))
    assert "auroc" not in found
    assert "accuracy" in found


def test_an_evaluator_of_the_user_is_computed_again_for_each_resample() -> None:
    class Own:
        primary = Metric("mean")
        metrics = (Metric("mean"),)
        batch = 8

        def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
            return {"mean": float(torch.cat([batch.losses for batch in batches]).double().mean())}

        def decisions(self, batch: Predictions) -> None:
            return None

    made = outcomes(Own(), iter([single(slice(0, 25)), single(slice(25, 40))]), CLASSES)
    losses = single().losses.double().numpy()
    found = intervals(made, 100, Key(5))["mean"]
    means = stats.bootstrap(
        (losses,), np.mean, n_resamples=100, method="percentile", rng=np.random.default_rng(Key(5).seed())
    ).confidence_interval
    assert found.value == near(float(losses.mean()))
    assert (found.low, found.high) == (near(means.low), near(means.high))
