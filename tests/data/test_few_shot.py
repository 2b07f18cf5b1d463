"""Tasks of k examples per class, and classes that no client trains on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.core.rng import Key
from partita.data import DataError, Task, load, split
from partita.data.few_shot import draw_shots, hold_out_classes, select_rows
from partita.data.ragged import RaggedExamples, ragged
from partita.data.task import Table
from partita.tasks import MULTI_LABEL_IMAGE


def small(classes: int = 5, examples: int = 60) -> Task:
    return load("synthetic", Key(0), examples=examples, test_examples=20, classes=classes, size=2, domains=2)


def pixels(task: Task) -> torch.Tensor:
    assert isinstance(task.train, Table)
    return task.train.inputs["pixel_values"]


@given(st.integers(1, 12), st.integers(0, 99))
def test_every_class_has_so_many_rows_of_its_own(shots: int, seed: int) -> None:
    task = small()
    drawn = draw_shots(task, shots, Key(seed))
    assert Counter(drawn.labels().tolist()) == dict.fromkeys(range(5), shots)
    # Each drawn row is a row of the task, with its label and its columns.
    places = [int((pixels(task) == row).flatten(1).all(1).nonzero()) for row in pixels(drawn)]
    assert len(set(places)) == len(places)
    assert np.array_equal(task.labels()[places], drawn.labels())
    assert list(task.columns["domain"][places]) == list(drawn.columns["domain"])


def test_fewer_shots_are_a_part_of_more_and_the_test_rows_stay() -> None:
    few, more = (load("synthetic", Key(3), examples=60, classes=5, size=2, shots=shots) for shots in (2, 4))
    rows = {tuple(row.flatten().tolist()) for row in pixels(few)}
    assert rows < {tuple(row.flatten().tolist()) for row in pixels(more)}
    assert len(few.test) == 500
    other = draw_shots(small(), 2, Key(9))
    assert not torch.equal(pixels(other), pixels(draw_shots(small(), 2, Key(8))))


def test_a_class_of_fewer_rows_keeps_all_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="5 of 5 classes of synthetic have fewer than data.shots = 13 train rows"):
        assert len(draw_shots(small(), 13, Key(0)).train) == 60


def test_rows_of_texts_are_selected() -> None:
    rows = [[1, 2, 3], [4], [5, 6]]
    texts, tagged = ragged(rows, 4, torch.tensor([0, 1, 2])), ragged(rows, 4, tags=[[7, 8, 9], [10], [11, 12]])
    chosen = select_rows(texts, torch.tensor([2, 0]))
    assert isinstance(chosen, RaggedExamples)
    assert chosen.take(torch.tensor([0])).inputs["input_ids"][0, :2].tolist() == [5, 6]
    assert chosen.take(torch.tensor([1])).inputs["input_ids"][0, :3].tolist() == [1, 2, 3]
    assert chosen.targets.tolist() == [2, 0]
    assert select_rows(tagged, torch.tensor([2, 1])).targets.tolist() == [11, 12, 10]


def test_new_classes_are_the_last_and_have_no_train_rows() -> None:
    task = small()
    split = hold_out_classes(task, 0.5)
    assert split.new is not None
    assert (split.classes, split.new.classes) == (("class0", "class1", "class2"), ("class3", "class4"))
    assert set(split.labels()) == {0, 1, 2}
    assert len(split.train) == 36
    assert (len(split.test), len(split.new.examples)) == (12, 8)
    batch = split.new.examples.take(torch.arange(8))
    assert isinstance(task.test, Table)
    rows = task.test.targets >= 3
    assert torch.equal(batch.inputs["pixel_values"], task.test.inputs["pixel_values"][rows])
    assert torch.equal(batch.targets, task.test.targets[rows] - 3)
    assert len(split.test_columns["domain"]) == 12
    assert hold_out_classes(task, 2).classes == split.classes


@pytest.mark.parametrize("new", [0.9, 1, 4, 5, 0.1])
def test_both_kinds_need_two_classes(new: float) -> None:
    with pytest.raises(DataError, match="both need at least 2"):
        hold_out_classes(small(), new)


def test_tasks_without_one_class_per_example_are_refused() -> None:
    from dataclasses import replace

    task = replace(small(), kind=MULTI_LABEL_IMAGE)
    with pytest.raises(DataError, match=r"data\.shots needs one class per example"):
        draw_shots(task, 1, Key(0))
    with pytest.raises(DataError, match=r"data\.new_classes needs one class per example"):
        hold_out_classes(task, 2)


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(0, 99))
def test_split_shots_limit_each_class_of_each_client(shots: int, seed: int) -> None:
    task = small(examples=120)
    options = {"alpha": 0.5, "min_examples": 1, "validation": 0.1, "test": 0.2}
    whole = split(task, "dirichlet", 4, key=Key(seed), **options)
    few = split(task, "dirichlet", 4, key=Key(seed), shots=shots, **options)
    more = split(task, "dirichlet", 4, key=Key(seed), shots=shots + 1, **options)
    labels = torch.from_numpy(task.labels())
    for place in range(4):
        train, validation, test = whole.parts[place]
        drawn, *rest = few.parts[place]
        assert torch.equal(rest[0], validation), "validation parts stay whole"
        assert torch.equal(rest[1], test), "so do test parts"
        counts = Counter(labels[train].tolist())
        assert Counter(labels[drawn].tolist()) == {label: min(count, shots) for label, count in counts.items()}
        assert [row for row in train.tolist() if row in set(drawn.tolist())] == drawn.tolist(), "in their order"
        assert set(drawn.tolist()) <= set(more.parts[place][0].tolist()), "fewer are a part of more"


def test_split_shots_above_all_rows_change_nothing() -> None:
    whole, same = (split(small(), "iid", 3, key=Key(0), shots=shots) for shots in (None, 60))
    assert all(torch.equal(whole.parts[place][0], same.parts[place][0]) for place in range(3))


def test_split_shots_need_one_class_per_example() -> None:
    tags = replace(small(), kind=MULTI_LABEL_IMAGE)
    with pytest.raises(DataError, match=r"split.shots needs one class per example.*leave it out"):
        split(tags, "iid", 3, key=Key(0), shots=2)
    texts = replace(ragged([[1], [2], [3]], 4, torch.tensor([0, 0, 1])), documents=torch.tensor([0, 0, 1]))
    windows = replace(small(), train=texts, columns={})
    with pytest.raises(DataError, match=r"split.shots does not work with data.long_texts = 'windows'"):
        split(windows, "iid", 1, key=Key(0), shots=2)
