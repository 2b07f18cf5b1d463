"""Scores against scikit-learn, seqeval, and counting by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from partita.core.data import IGNORE_INDEX
from partita.evaluation.entities import TagScheme
from partita.evaluation.evaluator import Predictions, by_type, without_types
from partita.evaluation.metrics import Accuracy, Entities, MultiLabel, SingleLabel

TAGS = ("O", "B-Drug", "I-Drug", "B-Sign", "I-Sign")
Spans = list[tuple[int, int, str]]
sentences = st.lists(st.sampled_from(TAGS), max_size=8)
pairs_of_sentences = st.lists(
    st.integers(0, 8).flatmap(
        lambda size: st.tuples(*[st.lists(st.sampled_from(TAGS), min_size=size, max_size=size)] * 2)
    ),
    max_size=5,
)


def batches(logits: Tensor, targets: Tensor, size: int = 7) -> Iterator[Predictions]:
    for rows in torch.arange(len(targets)).split(size):
        yield Predictions(logits[rows], targets[rows], torch.zeros(len(rows)))


def entity_scores(truths: list[list[str]], guesses: list[list[str]], size: int = 2) -> dict[str, float]:
    """Score sentences that are padded to one length."""
    width = max(map(len, truths), default=0) + 1
    targets = torch.full((len(truths), width), IGNORE_INDEX)
    told = torch.ones(len(truths), width, dtype=torch.long)  # what is predicted for padding does not count
    for row, (truth, guess) in enumerate(zip(truths, guesses, strict=True)):
        targets[row, : len(truth)] = torch.tensor([TAGS.index(tag) for tag in truth], dtype=torch.long)
        told[row, : len(guess)] = torch.tensor([TAGS.index(tag) for tag in guess], dtype=torch.long)
    return Entities(TAGS)(batches(functional.one_hot(told, len(TAGS)).float(), targets, size))


def spans_by_hand(tags: list[str]) -> Spans:
    found: Spans = []
    for start, tag in enumerate(tags):
        if tag.startswith("B-"):
            end = start + 1
            while end < len(tags) and tags[end] == f"I-{tag[2:]}":
                end += 1
            found.append((start, end, tag[2:]))
    return found


RECORDED = json.loads((Path(__file__).parent / "seqeval_scores.json").read_text())["cases"]


def test_strict_scores_are_those_of_seqeval() -> None:
    """The values are those of `scripts/write_entity_scores.py`."""
    assert len(RECORDED) >= 100
    for case in RECORDED:
        found = entity_scores(*([row.split() for row in case[side]] for side in ("true", "predicted")))
        assert [found["precision"], found["recall"], found["f1"]] == case["micro"]
        types = by_type(found)
        assert types.keys() == case["by_type"].keys()
        for kind, expected in case["by_type"].items():
            assert [types[kind][name] for name in ("precision", "recall", "f1", "entities")] == expected


@pytest.mark.slow
@given(pairs_of_sentences)
def test_strict_scores_count_equal_spans(pairs: list[tuple[list[str], list[str]]]) -> None:
    true, told = (
        {(row, *span) for row, pair in enumerate(pairs) for span in spans_by_hand(pair[side])} for side in (0, 1)
    )
    found = entity_scores([truth for truth, _ in pairs], [guess for _, guess in pairs])
    if not true | told:
        assert "f1" not in found
        return
    for kind in (None, *{span[3] for span in true | told}):
        counted, guessed = ({span for span in spans if kind in (None, span[3])} for spans in (true, told))
        right, scores = len(counted & guessed), by_type(found)[kind] if kind else found
        assert scores["precision"] == (right / len(guessed) if guessed else 0)
        assert scores["recall"] == (right / len(counted) if counted else 0)
        assert scores["f1"] == pytest.approx(2 * right / (len(counted) + len(guessed)))


def most_pairs(true: Spans, told: Spans) -> int:
    """Try every assignment of predicted entities to true ones."""
    few, many = sorted((true, told), key=len)

    def fits(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
        return one[2] == other[2] and one[0] < other[1] and other[0] < one[1]

    return max(sum(map(fits, few, chosen)) for chosen in permutations(many, len(few)))


@pytest.mark.slow
@given(pairs_of_sentences)
def test_relaxed_scores_count_the_most_pairs_that_overlap(pairs: list[tuple[list[str], list[str]]]) -> None:
    spans = [(spans_by_hand(truth), spans_by_hand(guess)) for truth, guess in pairs]
    right = sum(most_pairs(true, told) for true, told in spans)
    true, told = (sum(len(pair[side]) for pair in spans) for side in (0, 1))
    found = entity_scores([truth for truth, _ in pairs], [guess for _, guess in pairs])
    if true or told:
        assert found["relaxed_precision"] == (right / told if told else 0)
        assert found["relaxed_recall"] == (right / true if true else 0)
        assert found["relaxed_f1"] == pytest.approx(2 * right / (true + told))
        assert found["relaxed_f1"] >= found["f1"]


def test_two_halves_of_an_entity_are_one_match_and_one_error() -> None:
    found = entity_scores([["B-Drug", "I-Drug", "O"]], [["B-Drug", "B-Drug", "O"]])
    assert (found["precision"], found["recall"]) == (0, 0)
    assert (found["relaxed_precision"], found["relaxed_recall"]) == (1 / 2, 1)
    other_type = entity_scores([["B-Drug", "I-Drug"]], [["B-Sign", "I-Sign"]])
    assert other_type["relaxed_f1"] == 0


def test_scores_by_type_are_separate_from_the_others() -> None:
    found = entity_scores([["B-Drug", "I-Drug", "B-Sign"]], [["B-Drug", "I-Drug", "O"]])
    assert by_type(found) == {
        "Drug": {"entities": 1, "precision": 1, "recall": 1, "f1": 1, "relaxed_f1": 1},
        "Sign": {"entities": 1, "precision": 0, "recall": 0, "f1": 0, "relaxed_f1": 0},
    }
    assert without_types(found).keys() == {metric.name for metric in Entities.metrics}


@pytest.mark.slow
@given(pairs_of_sentences, st.integers(1, 4))
def test_entity_scores_do_not_depend_on_batches(pairs: list[tuple[list[str], list[str]]], size: int) -> None:
    truths, guesses = [truth for truth, _ in pairs], [guess for _, guess in pairs]
    assert entity_scores(truths, guesses, size) == entity_scores(truths, guesses, size=100)


@given(sentences)
def test_spans_are_found_as_by_hand(tags: list[str]) -> None:
    scheme, first = TagScheme(TAGS), np.arange(len(tags)) == 0
    spans = scheme.spans(np.array([TAGS.index(tag) for tag in tags], np.int64), first)
    named = [scheme.types[number] for number in spans.types]
    assert list(zip(spans.starts, spans.ends, named, strict=True)) == spans_by_hand(tags)


def test_sentences_without_entities_have_no_scores_of_entities() -> None:
    silent = entity_scores([["O", "O"]], [["O", "I-Sign"]])
    assert silent == {"accuracy": 0.5, "loss": 0.0}  # a tag without its beginning is no entity


def test_accuracy_and_loss_of_tags_are_means_over_words() -> None:
    targets = torch.tensor([[0, 1, 2, IGNORE_INDEX], [0, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]])
    logits = functional.one_hot(torch.tensor([[0, 1, 0, 1], [0, 1, 1, 1]]), len(TAGS)).float()
    found = Entities(TAGS)(iter([Predictions(logits, targets, torch.tensor([1.0, 5.0]))]))
    assert (found["accuracy"], found["loss"]) == (3 / 4, (3 * 1.0 + 1 * 5.0) / 4)


def calibration_by_hand(logits: Tensor, targets: Tensor) -> float:
    sure, guesses = (logits - logits.logsumexp(1, keepdim=True)).exp().double().max(1)
    error = 0.0
    for place in range(15):
        inside = (sure > place / 15) & (sure <= (place + 1) / 15)
        if inside.any():
            gap = (guesses[inside] == targets[inside]).double().mean() - sure[inside].mean()
            error += float(inside.double().mean() * gap.abs())
    return error


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(1, 200), st.sampled_from([0.1, 1.0, 5.0]))
def test_calibration_error_as_defined(seed: int, count: int, scale: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(count, 4, generator=draws)
    targets = torch.randint(4, (count,), generator=draws)
    expected = calibration_by_hand(logits, targets)
    for evaluator in (Accuracy(), SingleLabel()):
        assert evaluator(batches(logits, targets))["ece"] == pytest.approx(expected, abs=1e-12)


def test_calibration_error_of_known_cases() -> None:
    targets = torch.tensor([0, 0, 0, 1])
    sure = torch.tensor([[100.0, 0.0]] * 4)
    assert Accuracy()(batches(sure, targets))["ece"] == pytest.approx(0.25)  # says 100%, is right in 75%
    calibrated = torch.tensor([[math.log(3), 0.0]] * 4)
    assert Accuracy()(batches(calibrated, targets))["ece"] == pytest.approx(0, abs=1e-7)
    broken = Accuracy()(batches(sure * math.nan, targets))
    assert "ece" not in broken
    assert "accuracy" in broken


@pytest.mark.slow
@given(st.integers(0, 10_000))
def test_multi_label_auprc_is_that_of_scikit_learn(seed: int) -> None:
    from sklearn.metrics import average_precision_score

    draws = torch.Generator().manual_seed(seed)
    truth = (torch.randn(30, 4, generator=draws) > 0.8).float()
    logits = torch.randn(30, 4, generator=draws) + truth
    found = MultiLabel()(batches(logits, truth))
    occurring = [place for place in range(4) if truth[:, place].any()]
    if not occurring:
        assert "macro_auprc" not in found
        return
    macro = average_precision_score(truth[:, occurring], logits[:, occurring], average="macro")
    micro = average_precision_score(truth, logits, average="micro")
    assert (found["macro_auprc"], found["micro_auprc"]) == (pytest.approx(macro), pytest.approx(micro))
