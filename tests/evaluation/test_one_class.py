"""A model that predicts the same for all test examples is noticed by the evaluation that scores it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from partita.core.model import Model, Output
from partita.data import Table
from partita.evaluation import Evaluator, evaluate, score
from partita.evaluation.metrics import (
    Accuracy,
    Entities,
    MultiLabel,
    NextToken,
    Regression,
    SingleLabel,
)

ONE, OTHER = [0.0, 2.0, 1.0], [3.0, 2.0, 1.0]
PARAMS = {"w": torch.zeros(1)}


@dataclass
class Echo:
    """A model whose logits are its inputs."""

    calls: list[int] = field(default_factory=list)  # sizes of the batches

    def __call__(self, params: Any, inputs: Any) -> Any:
        self.calls.append(len(inputs["logits"]))
        return Output(logits=inputs["logits"])

    def losses(self, out: Any, targets: Tensor) -> Tensor:
        return torch.zeros(len(targets))


def constant(logits: list[Any], targets: list[Any], evaluator: Evaluator) -> tuple[int, ...] | None:
    table = Table({"logits": torch.tensor(logits)}, torch.tensor(targets))
    return evaluate(cast(Model, Echo()), PARAMS, table, evaluator).constant


@pytest.mark.parametrize("evaluator", [Accuracy(), SingleLabel()])
def test_one_predicted_class_is_noticed(evaluator: Evaluator) -> None:
    assert constant([ONE, ONE, ONE], [0, 1, 2], evaluator) == (1,)
    assert constant([ONE, OTHER, ONE], [0, 1, 2], evaluator) is None
    assert constant([ONE, ONE], [1, 1], evaluator) is None, "right, because the test set has one class"
    late = [ONE] * evaluator.batch
    assert constant([*late, OTHER], [*([1] * evaluator.batch), 0], evaluator) is None, "it differs in the second batch"
    assert constant([*late, ONE], [*([1] * evaluator.batch), 0], evaluator) == (1,)


def test_labels_and_tags_that_never_differ_are_noticed() -> None:
    none, two = [-1.0, -1.0, -1.0], [1.0, -1.0, 1.0]
    truth = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    assert constant([none, none], truth, MultiLabel()) == ()
    assert constant([two, two], truth, MultiLabel()) == (0, 2)
    assert constant([none, two], truth, MultiLabel()) is None
    tags = Entities(("B-x", "O", "I-x"))
    assert constant([[ONE, ONE, OTHER]], [[1, 0, -100]], tags) == (1,), "a prediction for padding does not count"
    assert constant([[ONE, OTHER, ONE]], [[1, 0, -100]], tags) is None
    assert constant([[ONE, OTHER]], [[-100, -100]], tags) is None


def test_numbers_and_next_tokens_are_no_classes() -> None:
    assert constant([[1.0], [1.0]], [[0.0], [1.0]], Regression()) is None
    assert constant([[ONE, ONE]], [[1, 0]], NextToken()) is None


def test_the_check_takes_no_second_forward_pass() -> None:
    model, table = Echo(), Table({"logits": torch.tensor([ONE] * 600)}, torch.arange(600) % 3)
    found = evaluate(cast(Model, model), PARAMS, table)
    assert model.calls == [512, 88]
    assert found.scores == score(cast(Model, Echo()), PARAMS, table)
