"""The server reads files that it does not trust, and names what disagrees between sites."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from partita.site.description.compare import compare
from partita.site.description.record import MAX_BYTES, Description, DescriptionError, Protection, read_description
from partita.site.description.tables import CLASSES, MODE, TOKENS

NORTH = Description(
    site="north",
    data="text",
    kind="text",
    facts={"data.max_length": 256},
    classes=("no", "yes"),
    protection=Protection(least=10),
    counts={
        "rows": {"train": 70, "validation": 10, "test": 20, "held out": 0},
        CLASSES: {"no": 60, "yes": 40},
    },
    typical={TOKENS: {"10%": "1 to 16", "50%": "1 to 16", "90%": "17 to 32", "largest": "1 to 16"}},
)
SOUTH = replace(NORTH, site="south")


def sentences(*sites: Description, must_mend: bool) -> list[str]:
    return [each.sentence for each in compare(sites) if each.must_mend == must_mend]


# ---- comparing


def test_equal_sites_agree() -> None:
    assert compare([NORTH, SOUTH, replace(NORTH, site="west")]) == []


def test_class_that_a_site_lacks_is_named() -> None:
    [sentence] = sentences(NORTH, replace(SOUTH, classes=("no", "yes", "maybe")), must_mend=True)
    assert "'maybe' is at south and not at north" in sentence


def test_other_spelling_is_named_once() -> None:
    north, south = replace(NORTH, classes=("Pneumonia", "no")), replace(SOUTH, classes=("no", "pneumonia "))
    [sentence] = sentences(north, south, must_mend=True)
    assert "'Pneumonia' at north, 'pneumonia ' at south" in sentence


def test_other_order_is_named() -> None:
    [sentence] = sentences(NORTH, replace(SOUTH, classes=("yes", "no")), must_mend=True)
    assert "class 0 is 'no' at north and 'yes' at south" in sentence


@pytest.mark.parametrize("change", [{"facts": {"data.max_length": 128}}, {"kind": "tokens"}, {"data": "tokens"}])
def test_other_task_is_named(change: dict[str, object]) -> None:
    assert len(sentences(NORTH, replace(SOUTH, **change), must_mend=True)) == 1  # type: ignore[arg-type]


def counted(site: Description, table: str, **cells: int | None) -> Description:
    return replace(
        site, counts={**site.counts, table: {name.replace("_", " "): value for name, value in cells.items()}}
    )


def test_sizes_out_of_scale_are_named() -> None:
    huge = counted(SOUTH, "rows", train=100_000)
    [sentence] = sentences(NORTH, replace(NORTH, site="west"), huge, must_mend=False)
    assert "south has 100,000 rows" in sentence


def typical(site: Description, table: str, **cells: str) -> Description:
    return replace(
        site, typical={table: {f"{name[1:]}%" if name[0] == "q" else name: cell for name, cell in cells.items()}}
    )


def test_texts_that_are_cut_and_empty_ones_are_named() -> None:
    cut, empty = sentences(NORTH, typical(SOUTH, TOKENS, q10="0", q50="1 to 16", q90="129 or more"), must_mend=False)
    assert "10% of the texts of south reach data.max_length = 256" in cut
    assert "10% of the texts of south are empty" in empty


def test_longer_texts_are_named() -> None:
    [sentence] = sentences(NORTH, typical(SOUTH, TOKENS, q50="65 to 128"), must_mend=False)
    assert "median text of south is far larger than that of north" in sentence


def test_other_image_modes_are_named() -> None:
    [sentence] = sentences(typical(NORTH, MODE, largest="L"), typical(SOUTH, MODE, largest="RGB"), must_mend=False)
    assert "'L' at north, 'RGB' at south" in sentence


def test_skewed_labels_are_named() -> None:
    sites = [replace(NORTH, site=name) for name in ("a", "b", "c", "d")]
    [sentence] = sentences(*sites, counted(SOUTH, CLASSES, no=99, yes=1), must_mend=False)
    assert "99% of the rows of south are 'no'" in sentence
    [sentence] = sentences(
        *(counted(each, CLASSES, no=90, yes=10) for each in sites),
        counted(SOUTH, CLASSES, no=10, yes=90),
        must_mend=False,
    )
    assert "the labels of south differ" in sentence


def test_class_that_a_site_hides_does_not_count_as_skew() -> None:
    assert compare([counted(NORTH, CLASSES, no=60, yes=None), counted(SOUTH, CLASSES, no=10, yes=90)]) == []


def test_hidden_counts_are_no_disagreement() -> None:
    hidden = {table: dict.fromkeys(cells) for table, cells in SOUTH.counts.items() if table != "rows"}
    assert compare([NORTH, replace(SOUTH, counts={**SOUTH.counts, **hidden}, typical={})]) == []


@pytest.mark.parametrize("cell", ["", "x to 16", "9" * 90, "-1 to 4", "²"])
def test_odd_cells_are_not_computed_with(cell: str) -> None:
    compare([NORTH, typical(SOUTH, TOKENS, q10=cell, q50=cell, q90=cell)])


def test_same_site_twice_is_refused() -> None:
    with pytest.raises(DescriptionError, match="two descriptions are of the site 'north'"):
        compare([NORTH, NORTH])


# ---- reading


def written(folder: Path, **changes: object) -> Path:
    path = folder / "north.json"
    path.write_text(json.dumps({**json.loads(NORTH.to_json()), **changes}))
    return path


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_description(written(tmp_path)) == NORTH


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": True},
        {"extra": 1},
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
        {"counts": {f"t{number}": {} for number in range(21)}},
        {"counts": {"rows": {f"c{number}": 1 for number in range(1001)}}},
        {"typical": {"tokens": {"50%": 3}}},
        {"typical": {"tokens": {"50%": "\x07"}}},
        {"protection": {}},
        {"protection": {"least": 10, "unit": "row", "epsilon": float("inf"), "scales": None}},
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
