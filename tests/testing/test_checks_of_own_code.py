"""Own tasks, splits and models: a correct one keeps all promises, and a wrong one is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from partita import data
from partita.core.model import Model, Output
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.data.partition import Partition
from partita.data.task import Federation, Table, Task
from partita.tasks import SEGMENTATION, SEQ2SEQ
from partita.testing.own_code import (
    MODEL_PROMISES,
    SPLIT_PROMISES,
    TASK_PROMISES,
    ModelTrial,
    SplitTrial,
    TaskTrial,
)
from partita.testing.promises import Promise, check_all


def synthetic(key: Key, **options: Any) -> Task:
    return data.load("synthetic", key, **{"examples": 30, "test_examples": 6, "classes": 3, "size": 2, **options})


def broken(promises: Sequence[Promise[Any]], trial: object) -> dict[str, str]:
    return {outcome.name: outcome.reason for outcome in check_all(promises, trial) if outcome.verdict == "no"}


# ---- tasks


def change_train(task: Task, **parts: Any) -> Task:
    table = task.train
    assert isinstance(table, Table)
    return replace(task, train=replace(table, **parts))


def with_pixels(change: Callable[[Tensor], Tensor]) -> Callable[[Key], Task]:
    def load(key: Key) -> Task:
        task = synthetic(key)
        return change_train(task, inputs={"pixel_values": change(task.train.inputs["pixel_values"])})  # type: ignore[union-attr]

    return load


def empty_test(key: Key) -> Task:
    task = synthetic(key)
    return replace(
        task, test=Table({"pixel_values": torch.zeros(0, 1, 2, 2)}, torch.zeros(0, dtype=torch.int64)), test_columns={}
    )


def masked(key: Key, targets: Tensor) -> Task:
    """A segmentation task with these train masks."""
    task = change_train(synthetic(key), targets=targets)
    test = Table(task.test.inputs, torch.zeros(6, 2, 2, dtype=torch.int16))  # type: ignore[union-attr]
    return replace(task, test=test, kind=SEGMENTATION)


WRONG_TASKS: dict[str, tuple[Callable[[Key], Task], str, str]] = {
    "no test rows": (empty_test, "a task", "its test part has no rows"),
    "fails": (lambda key: 1 / 0, "a task", "ZeroDivisionError: division by zero (test_checks_of_own_code.py, line "),  # type: ignore[dict-item,return-value]
    "not finite": (
        with_pixels(lambda pixels: pixels / 0),
        "inputs",
        "'pixel_values' of its train part has values that",
    ),
    "another size": (
        lambda key: replace(synthetic(key), size=3),
        "inputs",
        "its images are (1, 2, 2), but channels and size say (1, 3, 3)",
    ),
    "another input": (
        lambda key: change_train(synthetic(key), inputs={"x": torch.zeros(30, 1, 2, 2)}),
        "inputs",
        "the inputs of its train part are 'x'; a task of kind 'image' needs 'pixel_values'",
    ),
    "a class too few": (
        lambda key: replace(synthetic(key), classes=("a", "b")),
        "targets",
        "its train targets go from 0 to 2, but the number of classes is 2",
    ),
    "targets as floats": (
        lambda key: change_train(synthetic(key), targets=torch.zeros(30)),
        "targets",
        "its train targets are torch.float32; they must be torch.int64",
    ),
    "masks of another size": (
        lambda key: masked(key, torch.zeros(30, 1, 2, dtype=torch.int16)),
        "targets",
        "its train targets are torch.int16 of shape (row, 1, 2); they must be integers of shape (row, 2, 2), a class",
    ),
    "no start of the answer": (
        lambda key: replace(synthetic(key), kind=SEQ2SEQ),
        "inputs",
        "the inputs of its train part are 'pixel_values'; a task of kind 'seq2seq' needs 'attention_mask', 'decoder_i",
    ),
    "global noise": (with_pixels(torch.rand_like), "same key, same task", "it gives two results for the same key"),
}


def test_correct_task_keeps_all_promises() -> None:
    assert broken(TASK_PROMISES, TaskTrial(synthetic)) == {}


@pytest.mark.parametrize("kind", WRONG_TASKS)
def test_wrong_task_is_named(kind: str) -> None:
    load, promise, reason = WRONG_TASKS[kind]
    assert broken(TASK_PROMISES, TaskTrial(load)).get(promise, "").startswith(reason)


def test_masks_may_be_small_integers() -> None:
    assert broken(TASK_PROMISES, TaskTrial(lambda key: masked(key, torch.ones(30, 2, 2, dtype=torch.int16)))) == {}


def test_task_too_small_to_split_is_not_applicable() -> None:
    outcomes = {each.name: each for each in check_all(TASK_PROMISES, TaskTrial(lambda key: synthetic(key, examples=2)))}
    assert (outcomes["splits"].verdict, outcomes["splits"].reason[:22]) == ("not applicable", "it has 2 train rows, t")


# ---- splits


def federation(rows: list[int], sizes: list[int], names: list[str] | None = None) -> Federation:
    partition = Partition(np.array(rows), np.cumsum([0, *sizes]), names or [f"c{n}" for n in range(len(sizes))])
    parts = [
        (torch.from_numpy(partition.rows[start:stop]), torch.zeros(0), torch.zeros(0))
        for start, stop in zip(partition.offsets[:-1], partition.offsets[1:], strict=True)
    ]
    return Federation(synthetic(Key(0)), partition.clients, parts)


WRONG_SPLITS: dict[str, tuple[Callable[[Key], Federation], str, str]] = {
    "a row twice": (lambda key: federation([0, 1, 1, 2], [2, 2]), "rows", "it assigns a row to two clients"),
    "a row outside": (lambda key: federation([0, 1, 2, 30], [2, 2]), "rows", "it assigns rows that do not exist"),
    "an empty client": (lambda key: federation([0, 1], [2, 0]), "clients", "client 'c1' has no rows"),
    "a name twice": (lambda key: federation([0, 1], [1, 1], ["a", "a"]), "clients", "two clients have the same name"),
    "global noise": (
        lambda key: federation(torch.randperm(30).tolist(), [15, 15]),
        "same key, same split",
        "it gives two results for the same key",
    ),
}


def test_correct_split_keeps_all_promises() -> None:
    assert broken(SPLIT_PROMISES, SplitTrial(lambda key: federation(list(range(30)), [10, 20]))) == {}


@pytest.mark.parametrize("kind", WRONG_SPLITS)
def test_wrong_split_is_named(kind: str) -> None:
    split, promise, reason = WRONG_SPLITS[kind]
    assert broken(SPLIT_PROMISES, SplitTrial(split)).get(promise, "").startswith(reason)


# ---- models


class Linear(Model):
    """One linear layer on the pixels."""

    name = "linear"

    def __init__(self, key: Key) -> None:
        self.initial = {"head.weight": 0.1 * torch.randn(3, 4, generator=key.generator())}
        self.tags = {"head.weight": frozenset({"head"})}

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(inputs["pixel_values"].flatten(1) @ params["head.weight"].T)

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(out.logits, targets, reduction="none")


class Untagged(Linear):
    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.initial["head.bias"] = torch.zeros(3)


class NotFinite(Linear):
    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.initial["head.weight"][0, 0] = torch.nan


class Unseeded(Linear):
    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.initial = {"head.weight": torch.randn(3, 4)}


class MeanLoss(Linear):
    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return super().losses(out, targets).mean()


class InPlace(Linear):
    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        inputs["pixel_values"].mul_(0.5)
        return super().__call__(params, inputs)


class Dropout(Linear):
    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(torch.nn.functional.dropout(super().__call__(params, inputs).logits))


class Branches(Linear):
    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        if params["head.weight"].sum() > 100:
            raise ValueError("too large")
        return super().__call__(params, inputs)


class Constant(Linear):
    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(super().__call__(params, inputs).logits.detach().requires_grad_())


WRONG_MODELS: dict[type[Linear], tuple[str, str]] = {
    Untagged: ("names and tags", "'head.bias' is in initial but not in tags"),
    NotFinite: ("initial values", "'head.weight' has values that are not finite"),
    Unseeded: ("same key, same model", "it gives two results for the same key"),
    MeanLoss: ("losses", "losses has the shape () for 4 examples"),
    InPlace: ("pure forward pass", "it changes its inputs in place"),
    Dropout: ("pure forward pass", "it draws from torch's global random state"),
    Branches: ("vmap", "RuntimeError: vmap: It looks like you're attempting to use a Tensor in some"),
    Constant: ("gradients", "the loss depends on none of its parameters"),
}


def test_correct_model_keeps_all_promises() -> None:
    assert broken(MODEL_PROMISES, ModelTrial(synthetic(Key(0)), Linear)) == {}


@pytest.mark.parametrize("kind", WRONG_MODELS)
def test_wrong_model_is_named(kind: type[Linear]) -> None:
    promise, reason = WRONG_MODELS[kind]
    assert broken(MODEL_PROMISES, ModelTrial(synthetic(Key(0)), kind)).get(promise, "").startswith(reason)
