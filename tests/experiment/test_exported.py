"""`partita.json` of exported folders: what it says, and that a reader refuses anything else."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from helpers import SMALL_TASK, SMALL_VIT

from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.experiment.exported import (
    Base,
    Export,
    ExportError,
    Images,
    base_of,
    describe_export,
    read_export,
    write_export,
)
from partita.record import file_names

EXPORT = Export(
    form="model",
    kind="text",
    labels=("calm", "</script>"),
    metrics=("accuracy", "loss"),
    primary="accuracy",
    data={"name": "text", "text": "note", "label": "label", "max_length": 32},
    model={"name": "pretrained", "dtype": "float32"},
    base=Base("org/bert", on_hub=True, digest="ab" * 32),
    method="fedavg",
    round=3,
    run="cd" * 16,
    client="../c\ud800",
)


def written(folder: Path, **changes: Any) -> Path:
    write_export(folder, EXPORT)
    raw = json.loads((folder / file_names.EXPORTED).read_text())
    for key, value in changes.items():
        raw[key] = value
    (folder / file_names.EXPORTED).write_text(
        json.dumps({key: value for key, value in raw.items() if value is not ...})
    )
    return folder


def test_reader_returns_what_was_written(tmp_path: Path) -> None:
    write_export(tmp_path, EXPORT)
    assert read_export(tmp_path) == EXPORT


def test_description_of_a_run_names_kind_labels_and_images(tmp_path: Path) -> None:
    config = parse({**tomllib.loads(SMALL_VIT + SMALL_TASK), "method": {"name": "fedavg"}})
    found = describe_export(build(config), "model", 2, "id")
    write_export(tmp_path, found)
    assert read_export(tmp_path) == found
    assert (found.kind, found.primary, found.method, found.round) == ("image", "accuracy", "fedavg", 2)
    assert found.images is not None
    assert (found.images.size, found.images.channels) == (config.data["size"], config.data["channels"])
    assert found.base == Base()
    assert found.data["name"] == "synthetic"


def test_base_is_a_hub_id_or_the_last_part_of_a_path(tmp_path: Path) -> None:
    (tmp_path / "secret" / "bert").mkdir(parents=True)
    assert base_of({"path": str(tmp_path / "secret" / "bert")}, "d") == Base("bert", False, "d")
    assert base_of({"path": "org/bert"}) == Base("org/bert", True)
    assert base_of({}) == Base()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"format": 2}, "has format 2, and this version of partita reads 1"),
        ({"format": True}, "has no format number"),
        ({"kind": "poem"}, "names the unknown kind 'poem'"),
        ({"kind": ...}, "has no 'kind'"),
        ({"labels": [1]}, "has a wrong value of 'labels'"),
        ({"labels": ["a", "a"]}, "names a label twice"),
        ({"round": -1}, "has a wrong value of 'round'"),
        ({"round": True}, "has a wrong value of 'round'"),
        ({"form": "pickle"}, "has the unknown form 'pickle'"),
        ({"primary": "f1"}, "primary metric that is not among"),
        ({"data": {"name": "evil.py:read"}}, "unknown reader of data"),
        ({"privacy_unit": "none"}, "unknown unit"),
        ({"base": {"name": "x"}}, "has wrong keys in 'base'"),
        ({"images": {"size": 8, "channels": "3", "mean": [], "std": []}}, "wrong value of 'images.channels'"),
        ({"extra": 1}, "has the unknown key 'extra'"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ExportError, match=fault):
        read_export(written(tmp_path, **changes))


def test_folder_without_the_file_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"has no partita\.json; give a folder that 'partita export' wrote"):
        read_export(tmp_path)
    for text in ("", "[]", "nul", '{"format": 1'):
        (tmp_path / file_names.EXPORTED).write_text(text)
        with pytest.raises(ExportError):
            read_export(tmp_path)


def test_images_are_read_back(tmp_path: Path) -> None:
    images = {"size": 8, "channels": 3, "mean": [0.5], "std": [0.25, 1, 1]}
    assert read_export(written(tmp_path, images=images)).images == Images(8, 3, (0.5,), (0.25, 1, 1))
