"""Scores of segmentation against scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sklearn import metrics
from torch import Tensor

from partita.evaluation.evaluator import Predictions
from partita.evaluation.segmentation import Segmentation


def batches(logits: Tensor, targets: Tensor, size: int = 3) -> Iterator[Predictions]:
    losses = torch.arange(len(targets)).double()
    yield from map(Predictions, logits.split(size), targets.split(size), losses.split(size))


def drawn(classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, classes, 4, 5, generator=generator)
    targets = torch.randint(0, classes, (7, 4, 5), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    return logits, targets


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_scores_match_scikit_learn_over_all_labeled_pixels(dtype: torch.dtype) -> None:
    logits, targets = drawn(4)
    logits[:, 3] = -9.0  # never predicted, and not in a mask either
    targets[targets == 3] = -100
    targets[targets == 2] = 1  # predicted, but in no mask: it counts with an overlap of zero
    found = Segmentation()(batches(logits, targets.to(dtype)))
    labeled = targets != -100
    truth, guesses = targets[labeled].numpy(), logits.argmax(1)[labeled].numpy()
    assert set(truth) == {0, 1}
    assert set(guesses) == {0, 1, 2}
    assert found == pytest.approx(
        {
            "mean_iou": metrics.jaccard_score(truth, guesses, average="macro"),
            "dice": metrics.f1_score(truth, guesses, average="macro", zero_division=0),
            "accuracy": metrics.accuracy_score(truth, guesses),
            "loss": 3.0,
        }
    )


def test_one_matrix_for_all_examples_not_a_mean_of_examples() -> None:
    """A class that is rare in one image and common in another counts by pixels."""
    targets = torch.zeros(2, 2, 2, dtype=torch.long)
    targets[1] = 1
    logits = torch.zeros(2, 2, 2, 2)
    logits[:, 0] = 1.0  # class 0 everywhere
    found = Segmentation()(batches(logits, targets, size=1))
    assert found["mean_iou"] == pytest.approx((0.5 + 0.0) / 2)
    assert found["dice"] == pytest.approx((2 / 3 + 0.0) / 2)


def test_perfect_masks_score_one() -> None:
    logits, targets = drawn(3)
    logits = torch.nn.functional.one_hot(targets.clamp(min=0), 3).movedim(-1, 1).float()
    found = Segmentation()(batches(logits, targets))
    assert (found["mean_iou"], found["dice"], found["accuracy"]) == (1.0, 1.0, 1.0)


def test_examples_without_labels_have_only_a_loss() -> None:
    logits, targets = drawn(3)
    assert Segmentation()(batches(logits, torch.full_like(targets, -100))).keys() == {"loss"}


def test_decisions_are_the_labeled_pixels() -> None:
    logits, targets = drawn(3)
    [batch] = batches(logits, targets, size=7)
    decisions = Segmentation().decisions(batch)
    assert decisions is not None
    predicted, truth = decisions
    assert torch.equal(truth, targets[targets != -100])
    assert torch.equal(predicted, logits.argmax(1)[targets != -100])
