"""What a site tells: protected counts of all its rows, and nothing else."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from partita.data import DataError
from partita.experiment.config import Config, parse
from partita.site.description import describe as module
from partita.site.description import record
from partita.site.description.describe import charge, describe
from partita.site.description.record import Description, DescriptionError
from partita.site.description.tables import CLASSES, ROWS, TOKENS, typical_cells

SITES = {"name": "site", "sites": ["north", "south"], "client": "north"}
WORDS = ["no", "mild", "fever", "cough", "note"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import BertTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    BertTokenizer(vocab={word: place for place, word in enumerate(words)}, model_max_length=64).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def texts(tmp_path: Path, tokenizer: str) -> Callable[..., Config]:
    """An experiment on 100 texts: 80 are 'no', 20 are 'yes', and ten patients have ten each."""

    def make(**data: object) -> Config:
        file = tmp_path / "notes.csv"
        with file.open("w", newline="") as out:
            rows = csv.writer(out)
            rows.writerow(["text", "label", "patient"])
            for row in range(100):
                length = 3 if row % 4 else 30
                rows.writerow([" ".join([WORDS[row % 5]] * length), "no" if row % 5 else "yes", f"p{row % 10}"])
        options = {"name": "text", "path": str(file), "tokenizer": tokenizer, "max_length": 20, **data}
        return parse({"method": {"name": "fedavg"}, "data": options, "split": SITES, "model": {"name": "vit"}})

    return make


def test_all_rows_are_counted_in_every_table(texts: Callable[..., Config]) -> None:
    found = describe(texts(), "north")
    assert found["counts"][ROWS] == {"all": 100}
    assert found["counts"][CLASSES] == {"no": 80, "yes": 20}
    assert found["classes"] == ["no", "yes"]
    assert found["facts"] == {"data.max_length": 20}


def test_texts_at_the_limit_are_in_the_last_cell(texts: Callable[..., Config]) -> None:
    """75 texts of 3 tokens and 25 of 30, of which 18 are read."""
    found = describe(texts(), "north")
    assert found["typical"] == {"10%": "1 to 16", "50%": "1 to 16", "90%": "18 or more"}
    assert set(found["counts"]) == {ROWS, CLASSES}


def test_quantile_with_few_rows_beyond_it_is_left_out() -> None:
    cells = {"0": 1, "1 to 16": 97, "17 or more": 1}
    assert set(typical_cells(cells, 9)) == {"10%", "50%", "90%"}
    assert set(typical_cells(cells, 10)) == {"50%"}
    assert typical_cells(cells)["50%"] == "1 to 16"


def test_windows_of_a_text_count_once(texts: Callable[..., Config]) -> None:
    found = describe(texts(long_texts="windows"), "north")
    assert found["counts"][CLASSES] == {"no": 80, "yes": 20}
    assert found["counts"][ROWS] == {"all": 100}


def test_least_counts_patients_where_there_is_a_column(texts: Callable[..., Config]) -> None:
    """Rows 0, 5, 10, ... are 'yes': 20 rows of two patients."""
    found = describe(texts(), "north", least=3, groups="patient")
    assert found["counts"][CLASSES] == {"no": None, "yes": None}
    assert found["protection"]["unit"] == "patient"


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        ({}, {"least": 51}, "100 rows, too few"),
        ({}, {"epsilon": 1.0, "groups": "patient"}, "use --least with --groups"),
        ({}, {"epsilon": 1e-9}, "at least 0.001"),
        ({"limit": 50}, {}, r"data\.limit leaves rows out"),
    ],
)
def test_protection_that_would_not_hold_is_refused(
    texts: Callable[..., Config], data: dict[str, object], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(DescriptionError, match=says):
        describe(texts(**data), "north", **options)


def test_rows_that_were_drawn_by_the_split_are_refused(texts: Callable[..., Config]) -> None:
    config = texts()
    with pytest.raises(DescriptionError, match=r"split\.shots leaves rows out"):
        describe(replace(config, split={**config.split, "shots": 4}), "north")


def test_missing_column_of_groups_is_named(texts: Callable[..., Config]) -> None:
    with pytest.raises(DataError, match="did you mean 'patient'"):
        describe(texts(), "north", groups="pateint")


def test_label_column_of_free_text_is_refused(texts: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """Class names leave the site, so a column of diagnoses in words or of patients must not pass as one of labels."""
    monkeypatch.setattr(record, "MAX_CLASSES", 5)
    with pytest.raises(DescriptionError, match=r"name the right column in data\.label"):
        describe(texts(label="patient"), "north")


def test_epsilon_is_split_over_tables_and_scaled_by_what_a_row_changes(
    texts: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: list[Fraction] = []
    monkeypatch.setattr(module, "discrete_laplace", lambda scale: scales.append(scale) or 0)
    found = describe(texts(), "north", epsilon=0.6)
    assert found["protection"]["epsilon"] == 0.6
    assert set(scales) == {Fraction(5)}
    charged = 3 * 1 / 5  # what one row changes in each of three tables, over its scale
    assert charged == pytest.approx(found["protection"]["epsilon"])


@pytest.mark.slow
def test_one_row_more_changes_no_more_than_the_noise_is_made_for(
    texts: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claimed sensitivities, on the counts without noise, for each way to leave out one row of some."""
    monkeypatch.setattr(module, "discrete_laplace", lambda scale: 0)
    config = texts()
    file = Path(config.data["path"])
    head, *lines = file.read_text().splitlines()

    def counts(kept: list[str]) -> Description:
        file.write_text("\n".join([head, *kept]) + "\n")
        return describe(config, "north", epsilon=1.0)

    for size in (50, 55, 60):  # rows are held out at different numbers of rows
        whole = counts(lines[:size])
        for row in (0, 1, 7):
            less = counts([line for place, line in enumerate(lines[:size]) if place != row])
            for table, most in ((ROWS, 1), (CLASSES, 1), (TOKENS, 1)):
                changed = sum(
                    abs((whole["counts"][table][c] or 0) - (less["counts"][table][c] or 0))
                    for c in whole["counts"][table]
                )
                assert changed <= most, (size, row, table)


def test_charges_add_up_and_are_on_disk(tmp_path: Path) -> None:
    assert charge(tmp_path / "state", 1.0) == 1.0
    assert charge(tmp_path / "state", 0.5) == 1.5
    lines = (tmp_path / "state" / module.CHARGES).read_text().splitlines()
    assert [json.loads(line)["epsilon"] for line in lines] == [1.0, 0.5]
