"""The server reads files that it does not trust, and names what disagrees between sites."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from partita.site.description.compare import compare, largest_class
from partita.site.description.record import MAX_BYTES, Description, DescriptionError, read_description, to_json

NORTH: Description = {
    "format": 2,
    "site": "north",
    "data": "text",
    "kind": "text",
    "facts": {"data.max_length": 256},
    "classes": ["no", "yes"],
    "protection": {"least": 10, "unit": "row", "epsilon": 0.0},
    "counts": {
        "rows": {"all": 100},
        "classes": {"no": 60, "yes": None},
    },
    "typical": {"10%": "1 to 16", "50%": "1 to 16", "90%": "17 to 32"},
}


def south(**changes: Any) -> Description:
    return {**NORTH, "site": "south", **changes}  # type: ignore[typeddict-item]


# ---- comparing


def test_equal_sites_agree() -> None:
    assert compare([NORTH, south(), {**NORTH, "site": "west"}]) == []


def test_class_that_a_site_lacks_is_named() -> None:
    [sentence] = compare([NORTH, south(classes=["no", "yes", "maybe"])])
    assert "'maybe' at south and not at north" in sentence


def test_other_spelling_is_named_once() -> None:
    [sentence] = compare([{**NORTH, "classes": ["Pneumonia", "no"]}, south(classes=["no", "pneumonia "])])
    assert "'Pneumonia' at north, 'pneumonia ' at south" in sentence


def test_other_order_is_named() -> None:
    [sentence] = compare([NORTH, south(classes=["yes", "no"])])
    assert "south has the classes in another order than north" in sentence


@pytest.mark.parametrize("change", [{"facts": {"data.max_length": 128}}, {"kind": "tokens"}, {"data": "tokens"}])
def test_other_task_is_named(change: dict[str, object]) -> None:
    assert len(compare([NORTH, south(**change)])) == 1


def test_largest_class_is_one_whose_count_is_shown() -> None:
    assert largest_class(NORTH) == ("no", 0.6)
    assert largest_class(south(counts={"classes": {"no": None}})) == ("", 0.0)


def test_same_site_twice_is_refused() -> None:
    with pytest.raises(DescriptionError, match="two descriptions are of the site 'north'"):
        compare([NORTH, NORTH])


# ---- reading


def written(folder: Path, **changes: object) -> Path:
    path = folder / "north.json"
    path.write_text(json.dumps({**json.loads(to_json(NORTH)), **changes}))
    return path


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_description(written(tmp_path)) == NORTH


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 1},
        {"format": True},
        {"site": ""},
        {"site": 7},
        {"site": "x" * 101},
        {"site": "\x1b[2Jnorth"},
        {"site": "no\u202erth"},
        {"classes": "no"},
        {"classes": ["a", "a"]},
        {"classes": ["a\nb"]},
        {"classes": [["a"]]},
        {"classes": [f"c{number}" for number in range(1001)]},
        {"facts": {"size": -1}},
        {"facts": {"size": 1.5}},
        {"counts": []},
        {"counts": {"rows": {"train": True}}},
        {"counts": {"rows": {"train": 10**13}}},
        {"counts": {"rows": {"train": float("nan")}}},
        {"counts": {"rows": {"train": {"deeper": {}}}}},
        {"typical": {"50%": 3}},
        {"typical": {"50%": "\x07"}},
        {"protection": {}},
        {"protection": {"least": 10, "unit": "row", "epsilon": float("inf")}},
    ],
)
def test_hostile_fields_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(DescriptionError) as caught:
        read_description(written(tmp_path, **changes))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 100_000,
        b" " * (MAX_BYTES + 1),
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "north.json"
    path.write_bytes(content)
    with pytest.raises(DescriptionError):
        read_description(path)


def test_pipes_and_links_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(written(tmp_path))
    for name in ("pipe", "link", "missing"):
        with pytest.raises(DescriptionError):
            read_description(tmp_path / name)
