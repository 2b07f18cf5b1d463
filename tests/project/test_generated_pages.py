"""The pages that follow from the code are what the code says now."""

from __future__ import annotations

import json
import re
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
write_reference = import_module("write_reference")
method_table = import_module("method_table")

TABLE = "../methods/README.md"
FEW = ("fedavg", "fedfrozen", "safl")  # each takes half a second
REMEDY = "run: python scripts/write_reference.py"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == TABLE)) for name in write_reference.PAGES]
)
def test_page_of_the_reference_is_up_to_date(name: str) -> None:
    page = write_reference.PAGES[name]()
    assert (write_reference.FOLDER / name).read_text(encoding="utf-8") == page, REMEDY


@pytest.mark.slow
def test_table_of_methods_has_all_methods_and_some_rows_are_up_to_date() -> None:
    text = (write_reference.FOLDER / TABLE).read_text(encoding="utf-8")
    about = {each["name"]: each["about"] for each in method_table._own()}
    assert re.findall(r"^\| \[([\w-]+)\]\(", text, re.MULTILINE) == list(about)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the script does
        for name in FEW:
            assert f"| {' | '.join(method_table.row(name, about[name]))} |\n" in text, REMEDY


def test_page_of_models_shows_what_the_last_run_on_a_gpu_found() -> None:
    write_models = import_module("write_models")
    page = (write_reference.FOLDER / "models.md").read_text(encoding="utf-8")
    found = json.loads(write_models.RESULTS.read_text())["types"]
    assert page.endswith(write_models.gpu_section()), "run: python scripts/write_models.py"
    assert all(columns[name] == "yes" for columns in found.values() for name in ("float32", "dp-sgd"))
