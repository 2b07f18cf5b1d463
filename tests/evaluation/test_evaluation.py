"""Evaluation of a model on a set of examples."""

from __future__ import annotations

import warnings

import pytest
import torch

from partita.core.model import Model, logits_and_losses
from partita.core.tensors import Tensors
from partita.evaluation import evaluate
from partita.testing.toy import ToyPopulation, ToyTransformer

MODEL, EXAMPLES = ToyTransformer(), ToyPopulation()["c5"].test


def test_a_batch_that_does_not_fit_is_halved() -> None:
    sizes: list[int] = []

    def small(
        model: Model, params: Tensors, inputs: Tensors, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(targets))
        if len(targets) > 5:
            raise torch.OutOfMemoryError("none left")
        return logits_and_losses(model, params, inputs, targets)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = evaluate(MODEL, MODEL.initial, EXAMPLES, forward=small)
    assert [str(each.message).partition("; ")[2] for each in told] == ["from now on it is 9", "from now on it is 4"]
    assert sizes == [19, 9, 4, 4, 4, 4, 3]
    expected = evaluate(MODEL, MODEL.initial, EXAMPLES)
    assert found.scores == pytest.approx(expected.scores)


def test_one_example_that_does_not_fit_is_an_error() -> None:
    def full(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise torch.OutOfMemoryError("none left")

    with pytest.warns(UserWarning, match="from now on"), pytest.raises(torch.OutOfMemoryError):
        evaluate(MODEL, MODEL.initial, EXAMPLES, forward=full)
