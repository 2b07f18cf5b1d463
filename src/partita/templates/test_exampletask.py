"""Tests of exampletask. Run them with: python -m pytest test_exampletask.py"""

from __future__ import annotations

import torch
from exampletask import exampletask

from partita import Key, data


def test_targets_are_classes() -> None:
    task = exampletask(Key(0))
    for part in (task.train, task.test):
        assert len(part) > 0
        batch = part.take(torch.arange(len(part)))
        assert batch.inputs["pixel_values"].shape == (len(part), task.channels, task.size, task.size)
        assert set(batch.targets.tolist()) == set(range(len(task.classes)))


def test_same_key_gives_the_same_rows() -> None:
    one, two = (exampletask(Key(3)).train.take(torch.arange(10)) for _ in range(2))
    assert torch.equal(one.inputs["pixel_values"], two.inputs["pixel_values"])
    assert torch.equal(one.targets, two.targets)


def test_splits_by_site_and_by_label() -> None:
    task = exampletask(Key(0))
    sites = data.split(task, "by_column", column="site", key=Key(1))
    assert list(sites.clients) == ["site0", "site1", "site2", "site3", "site4"]
    skewed = data.split(task, "dirichlet", clients=4, alpha=0.5, key=Key(1))
    assert all(len(skewed[client].train) for client in skewed.clients)
