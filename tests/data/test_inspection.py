"""What `inspect_data` finds in data sets of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.inspection import inspect_data
from partita.data.synthetic_files import (
    write_conversations,
    write_dates,
    write_notes,
    write_pictures,
    write_scenes,
    write_statements,
)
from partita.experiment.config import parse
from partita.experiment.starter import config_for


def rows(count: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "id": place,
            "note": f"patient {place} reports a cough and some fever",
            "diagnosis": ("flu", "cold")[place % 2],
            "hospital": ("north", "south", "west")[place % 3],
            "age": 20.5 + place,
        }
        for place in range(count)
    ]


def write_json(file: Path, table: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in table))
    return file


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "saved"])
def test_columns_and_task_are_found_in_every_format(kind: str, tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(rows())
    path = tmp_path / f"data.{kind}"
    {"csv": table.to_csv, "parquet": table.to_parquet, "jsonl": table.to_json, "saved": table.save_to_disk}[kind](path)
    found = inspect_data(path)
    assert found.parts == {"train": 40}
    assert (found.task, found.roles, found.site) == ("text", {"text": "note", "label": "diagnosis"}, "hospital")
    assert found.classes == {"flu": 20, "cold": 20}
    assert found.sites == {"north": 14, "south": 13, "west": 13}
    kinds = {column.name: column.kind for column in found.columns}
    assert kinds == {"id": "integer", "note": "text", "diagnosis": "text", "hospital": "text", "age": "number"}
    assert found.characters == (41, 41)
    assert found.problems == ()


def test_user_can_name_the_columns(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", rows())
    found = inspect_data(path, label="age", site="diagnosis")
    assert (found.task, found.roles) == ("text_regression", {"text": "note", "target": "age"})
    assert found.site == "diagnosis"
    assert inspect_data(path, label="hospital").site is None
    with pytest.raises(DataError, match="has no column 'diagnosi'; did you mean 'diagnosis'"):
        inspect_data(path, label="diagnosi")


def test_problems_are_named_with_counts(tmp_path: Path) -> None:
    table = rows()
    for place in (3, 4):
        table[place]["note"] = " "
    table[5]["diagnosis"] = None
    table[6]["diagnosis"] = "Flu "
    table[7]["hospital"] = None
    table[8]["note"] = table[9]["note"]
    found = inspect_data(write_json(tmp_path / "a.jsonl", table))
    assert list(found.problems) == [
        "2 of 40 rows have no text in 'note'; fill them in or remove the rows",
        "1 of 40 rows repeat a text of 'note'; copies may be in train and test",
        "1 of 40 rows have no label in 'diagnosis'; remove unlabeled rows",
        "class names in 'diagnosis' differ only in case or spaces: 'flu' and 'Flu '",
        "1 of 3 classes have fewer than 5 rows",
        "1 of 40 rows have no value in 'hospital'; they would be a client 'unnamed'",
    ]
    one = [{**row, "diagnosis": "flu"} for row in rows()]
    told = inspect_data(write_json(tmp_path / "b.jsonl", one), label="diagnosis").problems
    assert told == ("all rows have the same label in 'diagnosis'; any model would score 100%",)


def test_tagged_words_pictures_and_plain_texts_are_recognized(tmp_path: Path) -> None:
    write_notes(tmp_path / "notes", Key(0))
    found = inspect_data(tmp_path / "notes")
    assert (found.task, found.roles, found.site) == ("tokens", {"tokens": "tokens", "tags": "tags"}, "hospital")
    assert found.classes.keys() == {"O", "B-SIGN", "B-PLACE", "B-DRUG"}
    write_pictures(tmp_path / "pictures", Key(0), each=2)
    found = inspect_data(tmp_path / "pictures")
    assert (found.task, found.roles, found.size) == ("images", {"image": "image", "label": "label"}, (32, 32))
    assert found.classes == {"blue": 2, "green": 2, "red": 2, "yellow": 2}
    path = write_json(tmp_path / "c.jsonl", [{"text": f"once upon a time {place}"} for place in range(20)])
    assert inspect_data(path).task == "lm"
    path = write_json(tmp_path / "d.jsonl", [{"text": f"a {n}", "label": ["x"] * (n % 2) + ["y"]} for n in range(20)])
    assert inspect_data(path).classes == {"y": 20, "x": 10}


def test_data_without_a_task_is_told(tmp_path: Path) -> None:
    found = inspect_data(write_json(tmp_path / "a.jsonl", [{"x": 1.5, "y": 2.5}] * 5))
    assert found.task is None
    assert found.problems[0].startswith("no task fits")


def test_unreadable_first_image_does_not_stop_the_look(tmp_path: Path) -> None:
    for place in range(3):
        (tmp_path / "p" / "cat").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "p" / "cat" / f"{place}.png")
    (tmp_path / "p" / "cat" / "0.png").write_bytes(b"not an image")
    assert inspect_data(tmp_path / "p").size is None


MESSAGES = [{"role": "user", "content": "what is it ?"}, {"role": "assistant", "content": "a cough ."}]
BY_NAMES: list[tuple[dict[str, Any], str, dict[str, str]]] = [
    ({"messages": MESSAGES}, "chat", {"messages": "messages"}),
    ({"talk": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "chat", {"messages": "talk"}),
    (
        {"instruction": "Say it.", "input": "", "output": "It."},
        "chat",
        {"instruction": "instruction", "input": "input", "output": "output"},
    ),
    ({"prompt": "Say it.", "completion": "It."}, "chat", {"instruction": "prompt", "output": "completion"}),
    (
        {"question": "Which one?", "choices": ["a", "b"], "answer": 1},
        "chat",
        {"instruction": "question", "choices": "choices", "answer": "answer"},
    ),
    ({"article": "long text", "summary": "short text"}, "seq2seq", {"source": "article", "target": "summary"}),
    ({"image": "images/1.png", "mask": "masks/1.png"}, "segmentation", {"image": "image", "mask": "mask"}),
]


@pytest.mark.parametrize(("row", "task", "roles"), BY_NAMES)
def test_tasks_that_column_names_tell(row: dict[str, Any], task: str, roles: dict[str, str], tmp_path: Path) -> None:
    def numbered(value: Any, place: int) -> Any:
        # Free texts differ from row to row.
        return f"{place} {value}" if isinstance(value, str) and value else value

    table = [
        {**{name: numbered(value, place) for name, value in row.items()}, "school": ("east", "west")[place % 2]}
        for place in range(20)
    ]
    path = write_json(tmp_path / "a.jsonl", table)
    found = inspect_data(path)
    assert (found.task, found.roles, found.site, found.problems) == (task, roles, "school", ())
    suggested = config_for(found)
    assert suggested["data"] | roles == suggested["data"]
    parse(suggested)


def test_few_targets_are_classes_and_no_texts_to_write(tmp_path: Path) -> None:
    table = [{"article": f"text number {place} of all", "target": ("flu", "cold")[place % 2]} for place in range(20)]
    found = inspect_data(write_json(tmp_path / "a.jsonl", table))
    assert (found.task, found.roles) == ("text", {"text": "article", "label": "target"})
    table = [{"article": f"text {place}", "summary": f"{place}", "kind": "ab"[place % 2]} for place in range(20)]
    named = inspect_data(write_json(tmp_path / "b.jsonl", table), text="article", label="kind")
    assert named.task == "text"


def test_examples_are_recognized(tmp_path: Path) -> None:
    key = Key(0)
    write_conversations(tmp_path / "chat", key, 30)
    write_dates(tmp_path / "dates", key, 60)
    write_statements(tmp_path / "pairs", key, 60)
    write_scenes(tmp_path / "scenes", key, 6)
    found = {name: inspect_data(tmp_path / name) for name in ("chat", "dates", "pairs", "scenes")}
    told = {name: (each.task, dict(each.roles), each.site) for name, each in found.items()}
    assert told == {
        "chat": ("chat", {"messages": "messages"}, "school"),
        "dates": ("seq2seq", {"source": "source", "target": "target"}, "country"),
        "pairs": ("text", {"text": "note", "pair": "statement", "label": "label"}, "hospital"),
        "scenes": ("segmentation", {"image": "image", "mask": "mask"}, "scanner"),
    }
    (tmp_path / "scenes" / "train.csv").unlink()  # then the two folders tell
    assert inspect_data(tmp_path / "scenes").task == "segmentation"
