"""Data for a trained model is read as its own test part was, and must fit the model's columns and label names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from chat_fixtures import write_decoder
from example_fixtures import WORDS, write_encoder
from PIL import Image
from seq2seq_fixtures import write_t5

from partita import data
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.other_data import read_other
from partita.data.row_stream import stream_rows

Rows = list[dict[str, Any]]


def write(folder: Path, rows: Rows, part: str = "test") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def texts() -> Rows:
    return [{"text": " ".join(WORDS[: 1 + place % 5]), "label": "ab"[place % 2], "sex": "fm"[place % 3 % 2]}
            for place in range(9)]  # fmt: skip


def tagged() -> Rows:
    return [{"tokens": WORDS[:4], "tags": ["B-SIGN", "O", "O", tag]} for tag in ("B-PLACE", "O", "B-SIGN")]


def asked() -> Rows:
    return [{"instruction": "pain in", "output": "the left arm"}, {"instruction": "arm", "output": "pain"}]


def picked() -> Rows:
    return [{"question": "pain in", "choices": ["arm", "the left"], "answer": place} for place in (0, 1, 1)]


CASES: dict[str, tuple[Callable[[], Rows], Mapping[str, Any]]] = {
    "text": (texts, {"name": "text"}),
    "windows": (texts, {"name": "text", "max_length": 5, "long_texts": "windows", "overlap": 1}),
    "pairs": (texts, {"name": "text", "pair": "sex"}),
    "multi-label": (lambda: [{**row, "label": ["a", "b"][: 1 + place % 2]} for place, row in enumerate(texts())],
                    {"name": "text"}),
    "text regression": (lambda: [{**row, "target": place / 3} for place, row in enumerate(texts())],
                        {"name": "text_regression"}),
    "tokens": (tagged, {"name": "tokens"}),
    "tokens in windows": (tagged, {"name": "tokens", "max_length": 5, "long_texts": "windows", "overlap": 1}),
    "lm": (texts, {"name": "lm", "block_size": 8}),
    "lm by group": (texts, {"name": "lm", "block_size": 8, "group": "sex"}),
    "chat": (asked, {"name": "chat", "template": "plain", "max_length": 64}),
    "choice": (picked, {"name": "chat", "template": "plain", "max_length": 64, "choices": "choices"}),
    "seq2seq": (lambda: [{"source": row["text"], "target": "arm left"} for row in texts()],
                {"name": "seq2seq", "max_length": 64}),
}  # fmt: skip


def tokenizer_of(case: str, folder: Path) -> str:
    if case == "seq2seq":
        write_t5(folder)
    elif case.startswith(("lm", "ch")):
        write_decoder(folder)
    else:
        write_encoder(folder)
    return str(folder)


def same(one: data.Task, other: data.Task) -> None:
    assert len(one.test) == len(other.test)
    batches = [task.test.take(torch.arange(len(task.test))) for task in (one, other)]
    assert torch.equal(batches[0].targets, batches[1].targets)
    assert batches[0].inputs.keys() == batches[1].inputs.keys()
    for name, value in batches[0].inputs.items():
        assert torch.equal(value, batches[1].inputs[name])
    assert one.classes == other.classes
    assert {name: list(values) for name, values in one.test_columns.items()} == {
        name: list(values) for name, values in other.test_columns.items()
    }


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("case", CASES)
def test_rows_are_read_as_in_training(case: str, tmp_path: Path) -> None:
    rows, reading = CASES[case][0](), CASES[case][1]
    tokenizer = tokenizer_of(case, tmp_path / "model")
    folder = write(write(tmp_path / "both", rows, "train"), rows[1:])
    options = {key: value for key, value in reading.items() if key != "name"}
    own = data.load(reading["name"], Key(0), path=str(folder), tokenizer=tokenizer, **options)
    alone = write(tmp_path / "alone", rows[1:]) / "test.jsonl"
    for path in (folder, alone):
        other = read_other(str(path), reading, own.kind, own.classes, tokenizer)
        same(own, other.task)
        assert not len(other.task.train)
        assert other.left_out == {}


def write_images(folder: Path, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    for place, name in enumerate(classes):
        for number in range(2):
            file = folder / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4), (90 * place, 70 * number, 9)).save(file)
    return folder


def test_images_and_masks_are_read_as_in_training(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_images(tmp_path / "pictures" / part)
    own = data.load("images", Key(0), path=str(tmp_path / "pictures"), size=8)
    other = read_other(str(tmp_path / "pictures" / "test"), {"name": "images", "size": 8}, own.kind, own.classes)
    same(own, other.task)
    for part in ("train", "test"):
        for kind in ("images", "masks"):
            (tmp_path / "scenes" / part / kind).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (4, 4), (9, number, 9)).save(tmp_path / "scenes" / part / "images" / f"{number}.png")
            mask = Image.new("L", (4, 4), number % 2)
            mask.putpixel((0, 0), 1)
            mask.save(tmp_path / "scenes" / part / "masks" / f"{number}.png")
    own = data.load("segmentation", Key(0), path=str(tmp_path / "scenes"))
    other = read_other(str(tmp_path / "scenes"), {"name": "segmentation"}, own.kind, own.classes)
    same(own, other.task)
    rows = [{"image": f"test/{name}/0.png", "target": 1.5, "site": name} for name in ("cat", "dog")]
    table = write(write(tmp_path / "pictures", rows, "train"), rows)
    own = data.load("image_regression", Key(0), path=str(table), size=4)
    other = read_other(str(table), {"name": "image_regression", "size": 4}, own.kind, own.classes)
    same(own, other.task)


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    return str(write_encoder(tmp_path / "encoder"))


def test_labels_are_found_by_name_not_by_place(tmp_path: Path, encoder: str) -> None:
    kind = data.load(
        "text", Key(0), path=str(write(write(tmp_path / "own", texts(), "train"), texts())), tokenizer=encoder
    ).kind
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["c", "b", "a"]))
    rows = {"text": ["pain", "arm", "left"], "label": [2, 1, 2]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "turned")
    found = read_other(str(tmp_path / "turned"), {"name": "text"}, kind, ("a", "b"), encoder)
    assert found.task.test.targets.tolist() == [0, 1, 0]
    only = write(tmp_path / "only", [{"text": "arm", "label": "b"}])
    assert read_other(str(only), {"name": "text"}, kind, ("a", "b"), encoder).task.test.targets.tolist() == [1]
    numbers = write(tmp_path / "numbers", [{"text": "arm", "label": 7}, {"text": "arm", "label": 3}])
    assert read_other(str(numbers), {"name": "text"}, kind, ("3", "7"), encoder).task.test.targets.tolist() == [1, 0]


def test_unknown_and_missing_labels(tmp_path: Path, encoder: str) -> None:
    from partita.tasks import MULTI_LABEL_TEXT, TEXT

    rows: Rows = [*texts(), {"text": "arm", "label": "z", "sex": "f"}, {"text": "arm", "label": "z", "sex": "f"}]
    path = str(write(tmp_path / "more", rows))
    with pytest.raises(DataError, match=r"1 labels that the model does not know: 'z' \(2\); its labels are a, b"):
        read_other(path, {"name": "text"}, TEXT, ("a", "b"), encoder)
    path = str(write(tmp_path / "more", [*rows, {"text": "arm", "label": None, "sex": "f"}]))
    found = read_other(path, {"name": "text"}, TEXT, ("a", "b"), encoder, unknown="drop")
    assert len(found.task.test) == 9
    assert found.left_out == {"without a label": 1, "with an unknown label": 2}
    with pytest.raises(DataError, match=r"row 9 of .* has no label in 'label', and 0 more"):
        read_other(
            str(write(tmp_path / "none", [*texts(), rows[-1] | {"label": None}])),
            {"name": "text"},
            TEXT,
            ("a", "b"),
            encoder,
        )
    with pytest.raises(DataError, match=r"no row of .* has a label of the model"):
        read_other(path, {"name": "text"}, TEXT, ("x", "y"), encoder, unknown="drop")
    with pytest.raises(DataError, match="holds single labels, but the model predicts lists"):
        read_other(path, {"name": "text"}, MULTI_LABEL_TEXT, ("a", "b"), encoder)
    with pytest.raises(DataError, match="has no column 'diagnosis'"):
        read_other(path, {"name": "text", "label": "diagnosis"}, TEXT, ("a", "b"), encoder)
    with pytest.raises(DataError, match="leave --data out"):
        read_other(path, {"name": "digits"}, TEXT, ("a", "b"), encoder)


def test_the_part_is_chosen_by_name(tmp_path: Path, encoder: str) -> None:
    from partita.tasks import TEXT

    folder = write(write(tmp_path / "two", texts()[:4], "train"), texts()[:3], "later")
    with pytest.raises(DataError, match="has the parts later, train, but none called 'test'; choose one with --split"):
        read_other(str(folder), {"name": "text"}, TEXT, ("a", "b"), encoder)
    found = read_other(str(folder), {"name": "text"}, TEXT, ("a", "b"), encoder, split="later")
    assert (len(found.task.test), found.part) == (3, "later")
    with pytest.raises(DataError, match="has no part 'nothing'"):
        read_other(str(folder), {"name": "text"}, TEXT, ("a", "b"), encoder, split="nothing")


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet", "txt"])
def test_rows_are_streamed_from_each_kind_of_file(kind: str, tmp_path: Path) -> None:
    file, wanted = tmp_path / f"rows.{kind}", [f"line {place}" for place in range(5)]
    table = datasets.Dataset.from_dict({"text": wanted})
    if kind == "csv":
        table.to_csv(file)
    elif kind == "parquet":
        table.to_parquet(file)
    elif kind == "txt":
        file.write_text("\n\n".join(wanted) + "\n")
    elif kind == "json":
        file.write_text(" \n" + json.dumps([{"text": text} for text in wanted]))
    else:
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in wanted))
    chunks = list(stream_rows(file, "text", 2))
    assert [len(chunk) for chunk in chunks] == [2, 2, 1]
    assert [row["text"] for chunk in chunks for row in chunk] == wanted


def test_a_stream_reads_no_further_than_it_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\nbroken\n')
    rows = stream_rows(file, "text", 2)
    assert len(next(rows)) == 2
    with pytest.raises(DataError, match=r"line 3 of .* is not JSON"):
        next(rows)
    with pytest.raises(DataError, match="there is no file"):
        next(stream_rows(tmp_path / "none.csv", "text", 1))
    (tmp_path / "x.docx").write_text("")
    with pytest.raises(DataError, match="is not one of csv"):
        next(stream_rows(tmp_path / "x.docx", "text", 1))
