"""Populations whose examples belong to groups, such as patients."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from partita.core.data import Batch, ClientData
from partita.core.rng import Key
from partita.experiment.config import Config, parse
from partita.testing.toy import ToyExamples

SCANS = """
rounds = 2
[method]
name = "fedavg"
[data]
name = "images"
channels = 1
[split]
name = "groups"
column = "patient_id"
clients = 2
[model]
name = "vit"
layers = 1
width = 8
heads = 2
patch = 2
[training]
optimizer = "sgd"
batch_size = 4
[evaluate]
personal_every = 0
[privacy]
unit = "group"
group = "patient_id"
noise = 1.1
"""


@dataclass(frozen=True)
class Patients(ToyExamples):
    """Examples in memory, each with the number of its patient."""

    groups: Tensor  # (example,)


def patients(name: str, counts: Sequence[int], seed: int = 3) -> Patients:
    """Patients with these numbers of examples. Their rows are mixed, and their numbers have gaps."""
    draw = (Key(seed) / name).generator()
    groups = torch.repeat_interleave(7 * torch.arange(len(counts)) + 5, torch.tensor(counts))
    groups = groups[torch.randperm(len(groups), generator=draw)]
    x = torch.randn(len(groups), 4, 4, generator=draw)
    return Patients(x, (x.sum((1, 2)) > 0).long() + (x[:, 0, 0] > 0.5).long(), groups)


class Hospitals:
    """Clients by name, each with patients that have the given numbers of examples."""

    def __init__(self, seed: int = 3, **counts: Sequence[int]) -> None:
        self.clients = tuple(counts)
        self.parts = {client: patients(client, own, seed) for client, own in counts.items()}

    def __getitem__(self, client: str) -> ClientData:
        part = self.parts[client]
        return ClientData(part, part, part)


def write_scans(path: Path, counts: Sequence[int], missing: int = 0, seed: int = 0, size: int = 4) -> Path:
    """A table of small images, `counts[i]` of them of patient i; images of a class are similar."""
    datasets = pytest.importorskip("datasets")
    draw = np.random.default_rng(seed)
    prototypes = draw.integers(0, 200, (2, size, size))
    rows: dict[str, list[object]] = {"image": [], "label": [], "patient_id": []}
    owners = [f"p{patient:03}" for patient, count in enumerate(counts) for _ in range(count)] + [""] * missing
    for place in draw.permutation(len(owners)):
        label = int(draw.integers(0, 2))
        pixels = np.clip(prototypes[label] + draw.integers(0, 56, (size, size)), 0, 255).astype(np.uint8)
        rows["image"].append(Image.fromarray(pixels))
        rows["label"].append(label)
        rows["patient_id"].append(owners[place])
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["no", "yes"]), patient_id=datasets.Value("string")
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(path)
    return path


def take_one(examples: ToyExamples, place: int) -> Batch:
    """A batch of one example."""
    return examples.take(torch.tensor([place]))


def scans_config(path: Path, **changes: Any) -> Config:
    """The config on the table in `path`, with changes such as `privacy__noise=2.0`; None removes a key."""
    raw = tomllib.loads(SCANS)
    raw["data"]["path"] = str(path)
    for key, value in changes.items():
        table, option = key.split("__")
        raw[table][option] = value
        if value is None:
            del raw[table][option]
    return parse(raw)
