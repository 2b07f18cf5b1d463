"""The record of a split, and its picture in the report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from report_fixtures import write_run
from test_report import parse_page

from partita import tasks
from partita.core.rng import Key
from partita.data import Federation, Table, Task, split
from partita.data.client_ids import NumberedClients
from partita.data.partition import ClientSplit, Partition
from partita.experiment.split_record import MAX_CLIENTS, describe_split
from partita.report import RunRecord, load_run, page
from partita.report.draw import split_figure
from partita.report.split import splits


def task_of(
    targets: torch.Tensor, classes: Sequence[str] = ("a", "b", "c"), kind: tasks.TaskKind = tasks.IMAGE
) -> Task:
    table = Table({"pixel_values": torch.zeros(len(targets), 1)}, targets)
    return Task("task", table, table, tuple(classes), kind=kind)


def test_record_counts_the_examples_and_labels_of_each_client() -> None:
    federation = split(task_of(torch.arange(90) % 3), "dirichlet", clients=4, alpha=0.3, min_examples=5, key=Key(0))
    held = describe_split(federation)
    assert held is not None
    assert held["population"] == 4
    assert held["classes"] == ["a", "b", "c"]
    for client in held["clients"]:
        data = federation[client["name"]]
        assert [client[part] for part in ("train", "validation", "test")] == [
            len(data.train), len(data.validation), len(data.test)
        ]  # fmt: skip
        targets = data.train.take(torch.arange(len(data.train))).targets
        assert client["labels"] == [int((targets == label).sum()) for label in range(3)]


def test_record_counts_each_of_several_labels_and_no_numbers() -> None:
    several = task_of((torch.arange(60).reshape(20, 3) % 4 == 0).float(), kind=tasks.MULTI_LABEL_IMAGE)
    held = describe_split(split(several, "iid", clients=2, validation=0, test=0, key=Key(0)))
    assert held is not None
    counts = [client["labels"] for client in held["clients"]]
    assert np.sum(counts, axis=0).tolist() == several.train.targets.sum(0).tolist()
    numbers = task_of(torch.rand(20, 1), ("price",), tasks.IMAGE_REGRESSION)
    held = describe_split(split(numbers, "iid", clients=2, key=Key(0)))
    assert held is not None
    assert "classes" not in held
    assert "labels" not in held["clients"][0]


def test_record_of_remote_data_does_not_exist() -> None:
    assert describe_split(split(task_of(torch.arange(9) % 3), "site", sites=("north", "south"), key=Key(0))) is None


@pytest.mark.slow
def test_record_of_a_million_clients_holds_the_first_ones() -> None:
    count = 1_000_000
    partition = Partition(np.arange(2 * count), np.arange(0, 2 * count + 1, 2), NumberedClients(count))
    task = task_of(torch.arange(2 * count) % 3)
    started = time.process_time()
    held = describe_split(Federation(task, partition.clients, ClientSplit(partition, Key(0), Fraction(0), Fraction(0))))
    assert held is not None
    assert (held["population"], len(held["clients"])) == (count, MAX_CLIENTS)
    assert len(json.dumps(held)) < 100 * MAX_CLIENTS
    assert time.process_time() - started < 1


def with_split(root: Path, label: str, clients: int, classes: int, seed: int = 0) -> RunRecord:
    folder = write_run(root, label, seed, rounds=2)
    held = {
        "population": 3 * clients,
        "clients": [
            {"name": f"site-{place}", "train": 10 + place, "validation": 1, "test": 2}
            | ({"labels": [place % (label + 1) for label in range(classes)]} if classes else {})
            for place in range(clients)
        ],
    }
    held |= {"classes": [f"kind {label}" for label in range(classes)]} if classes else {}
    (folder / "split.json").write_text(json.dumps(held))
    return load_run(folder)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("clients", "classes"), [(10, 10), (100, 10), (200, 100), (10, 0), (1, 3)])
def test_split_is_drawn_for_few_and_many_clients(clients: int, classes: int, tmp_path: Path) -> None:
    record = with_split(tmp_path, "fedavg", clients, classes)
    figure = split_figure(splits([record]))
    assert figure is not None
    figure.draw_without_rendering()
    bars = figure.axes[0]
    assert [bar.get_height() for bar in bars.patches] == [10 + place for place in range(clients)]
    if classes:
        [image] = figure.axes[1].images
        assert image.get_array().shape == (classes, clients, 4)  # type: ignore[union-attr]
    names = [tick.get_text() for tick in figure.axes[1 if classes else 0].get_xticklabels() if tick.get_text()]
    assert names == ([f"site-{place}" for place in range(clients)] if clients <= 40 else [])
    reader = parse_page(page([record], tmp_path / "page.html").read_text())
    assert f"site-{clients - 1}" in reader.text
    assert ("kind 2 (" in reader.text) == bool(classes and clients > 1)
    assert f"the first {clients} of {3 * clients}" in reader.text


def test_labels_with_equal_splits_share_a_panel(tmp_path: Path) -> None:
    records = [with_split(tmp_path, label, 5, 3) for label in ("fedavg", "fedprox")]
    records.append(with_split(tmp_path, "centralized", 1, 3))
    assert [each.labels for each in splits(records)] == [["fedavg", "fedprox"], ["centralized"]]
    assert [each.labels for each in splits([replace(records[0], split={}), records[1]])] == [["fedprox"]]
    old = load_run(write_run(tmp_path, "old", 0, rounds=2))
    assert split_figure(splits([old])) is None
    assert 'id="split"' not in page([old], tmp_path / "page.html").read_text()
