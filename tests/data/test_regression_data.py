"""Numbers to predict from tables of texts and images, their errors, and runs from end to end."""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_fixtures import WORDS, write_encoder
from PIL import Image

from partita.core.dp_settings import PrivacyError
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.data import DataError, load, split
from partita.experiment.audit import audit
from partita.experiment.builder import build
from partita.experiment.config import Config, parse
from partita.experiment.runner import start
from partita.report import compare, load_run
from partita.report.render import columns
from partita.tasks import IMAGE_REGRESSION, TEXT_REGRESSION

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_encoder(tmp_path_factory.mktemp("bert") / "model"))


def reviews(count: int = 30) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS, 4)) for _ in range(count)]
    return [
        {"text": text, "stars": text.count("pain") + 0.25, "words": len(set(text.split())), "shop": "ab"[row % 2]}
        for row, text in enumerate(texts)
    ]


def table(file: Path, rows: list[dict[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return file


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_targets_are_the_numbers_of_their_columns(suffix: str, tmp_path: Path, bert: str) -> None:
    rows = reviews()
    for part in ("train", "test"):
        table(tmp_path / f"{part}.{suffix}", rows)
    task = load("text_regression", Key(0), path=tmp_path, target=["words", "stars"], tokenizer=bert, max_length=8)
    assert (task.kind, task.classes, task.vocabulary_size) == (
        TEXT_REGRESSION,
        ("words", "stars"),
        task.vocabulary_size,
    )
    for part in (task.train, task.test):
        assert part.targets.dtype == torch.float32
        assert part.targets.tolist() == [[row["words"], row["stars"]] for row in rows]
    assert set(task.columns) == {"shop"}, "a target is not for splitting"
    assert list(split(task, "by_column", key=Key(0), column="shop").clients) == ["a", "b"]
    one = load("text_regression", Key(0), path=tmp_path, target="stars", tokenizer=bert, max_length=8)
    assert one.train.targets.tolist() == [[row["stars"]] for row in rows]


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("csv", "", "row 4 of the train part of .* has no number in 'stars'; fill it in or remove the row"),
        ("csv", "many", "row 4 of the train part of .* has 'many' in 'stars', which is not a number; correct it"),
        ("csv", "inf", "row 4 of the train part of .* has inf in 'stars'; a target must be a finite number"),
        ("csv", "1e39", "row 4 of the train part of .* has 1e.39 in 'stars'; a target must be a finite number of 32"),
        ("parquet", float("nan"), "row 4 of the train part of .* has nan in 'stars'; a target must be a finite"),
        ("parquet", None, "row 4 of the train part of .* has no number in 'stars'"),
    ],
)
def test_a_bad_target_is_named_by_row_and_column(
    suffix: str, value: Any, message: str, tmp_path: Path, bert: str
) -> None:
    rows = reviews(8)
    table(tmp_path / f"test.{suffix}", rows)
    rows[4]["stars"] = value
    table(tmp_path / f"train.{suffix}", rows)
    with pytest.raises(DataError, match=message):
        load("text_regression", Key(0), path=tmp_path, target=["words", "stars"], tokenizer=bert, max_length=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no column 'target'"),
        ({"target": "star"}, "has no column 'star'; did you mean 'stars'"),
        ({"target": "shop"}, r"row \d of the train part of .* has '[ab]' in 'shop', which is not a number"),
        ({"target": "good"}, r"row \d of the train part of .* has True in 'good', which is not a number"),
        ({"target": "told"}, "column 'told' of the train part of .* holds numbers as text; convert the column"),
        ({"target": []}, "data.target is an empty list; name at least one column"),
        ({"target": ["stars", "words", "stars"]}, "data.target names the column 'stars' twice"),
        ({"target": 3}, "target is 3; it must be"),
        ({"label": "stars"}, "unknown key 'data.label'"),
    ],
)
def test_columns_that_are_no_targets(options: dict[str, Any], message: str, tmp_path: Path, bert: str) -> None:
    rows = [{**row, "good": True, "told": "1.5"} for row in reviews(10)]
    path = table(tmp_path / "reviews.parquet", rows)
    with pytest.raises((DataError, OptionError), match=message):
        load("text_regression", Key(0), **{"path": path, "tokenizer": bert, "max_length": 8, **options})


# ---- images


def faces(folder: Path, count: int = 24) -> list[dict[str, Any]]:
    (folder / "pictures").mkdir()
    rows = []
    for number in range(count):
        grey = 255 * number // count
        Image.new("L", (4, 4), grey).save(folder / "pictures" / f"{number}.png")
        rows.append({"image": f"pictures/{number}.png", "age": grey / 64, "grey": grey, "site": "ab"[number % 2]})
    return rows


def test_images_come_from_paths_in_a_table_or_from_the_table_itself(tmp_path: Path) -> None:
    rows = faces(tmp_path)
    path = table(tmp_path / "faces.csv", rows)
    task = load("image_regression", Key(0), path=path, target=["age", "grey"], channels=1)
    assert (task.kind, task.classes, task.channels, task.size) == (IMAGE_REGRESSION, ("age", "grey"), 1, 4)
    pixels = task.train.inputs["pixel_values"][:, 0, 0, 0].double()
    torch.testing.assert_close(task.train.targets[:, 0].double(), pixels / 64)
    assert set(task.columns) == {"site"}
    for part in ("train", "test"):
        table(tmp_path / f"{part}.csv", rows)
    parts = load("image_regression", Key(0), path=tmp_path, target=["age", "grey"], channels=1)
    assert len(parts.train) == len(parts.test) == len(rows), "the paths of each part are relative to the folder"
    whole = [{**row, "image": str(tmp_path / row["image"])} for row in rows]
    types = {"age": "float64", "grey": "int64", "site": "string"}
    features = datasets.Features(image=datasets.Image(), **{name: datasets.Value(each) for name, each in types.items()})
    datasets.DatasetDict(train=datasets.Dataset.from_list(whole, features)).save_to_disk(tmp_path / "saved")
    same = load("image_regression", Key(0), path=tmp_path / "saved", target=["age", "grey"], channels=1)
    assert torch.equal(same.train.inputs["pixel_values"], task.train.inputs["pixel_values"])
    assert torch.equal(same.test.targets, task.test.targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "age"}, "column 'age' of the train part of .* holds neither images nor paths of image files"),
        (
            {"image": "site"},
            r"row \d of the train part of .* names the image '.*/[ab]', which does not exist; paths are rel",
        ),
        ({"image": "picture"}, "has no column 'picture'"),
        ({"mean": [0.1, 0.2]}, "mean has 2 values for 1 channels"),
    ],
)
def test_images_that_cannot_be_found(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = table(tmp_path / "faces.csv", faces(tmp_path))
    with pytest.raises(DataError, match=message):
        load("image_regression", Key(0), **{"path": path, "target": "age", "channels": 1, **options})


# ---- runs

CONFIG = """
rounds = 2
[split]
name = "by_column"
column = "site"
[model]
name = "vit"
layers = 2
width = 8
heads = 2
[training]
optimizer = "sgd"
lr = 0.05
batch_size = 4
[method]
name = "fedavg"
[data]
name = "image_regression"
channels = 1
target = "age"
"""


def config_of(folder: Path, **tables: dict[str, Any]) -> Config:
    raw = tomllib.loads(CONFIG)
    raw["data"]["path"] = str(table(folder / "faces.csv", faces(folder)))
    return parse({**raw, **{name: {**raw.get(name, {}), **values} for name, values in tables.items()}})


@pytest.mark.slow
def test_a_run_is_recorded_reported_and_audited(tmp_path: Path) -> None:
    rows = list(start(config_of(tmp_path), tmp_path / "run"))
    assert rows[-1]["test"].keys() == {"mse", "mae", "r2", "loss"}
    assert rows[-1]["test"]["mse"] == pytest.approx(rows[-1]["test"]["loss"], rel=1e-5)
    assert rows[-1]["personal"]["mse"].keys() == {"a", "b"}
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["metrics"][0] == {"name": "mse", "higher_is_better": False, "fraction": False}
    record = load_run(tmp_path / "run")
    for metric in (None, "r2"):
        comparison = compare([record], metric=metric)
        assert "%" not in "".join(column.heading for column in columns(comparison))
    assert audit(tmp_path / "run", canaries=4)["attacks"].keys() >= {"loss of the final model", "canaries"}
    with pytest.raises(PrivacyError, match="is a regression, and --shadows compares the probabilities of answers"):
        audit(tmp_path / "run", canaries=4, shadows=2)


def test_cached_features_train_the_same_model(tmp_path: Path) -> None:
    found = []
    for cached in (False, True):
        (tmp_path / str(cached)).mkdir()
        config = config_of(
            tmp_path / str(cached),
            model={"frozen": ["embedding", "layer.0"]},
            engine={"cache_frozen": cached},
        )
        found.append(list(start(config, tmp_path / str(cached) / "run"))[-1]["test"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_a_site_reads_its_own_targets(tmp_path: Path) -> None:
    sites = {"name": "site", "sites": ["north", "south"], "client": "north"}
    raw = config_of(tmp_path)
    experiment = build(parse({**tomllib.loads(CONFIG), "data": dict(raw.data), "split": sites}))
    assert len(experiment.federation["north"].train) > 0
    assert len(experiment.federation["south"].train) == 0
    assert experiment.evaluator.primary.name == "mse"
