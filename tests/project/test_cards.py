"""Method cards match the code: sections, parameters and plan tables."""

from __future__ import annotations

import inspect
import re

import pytest

from partita.core.registry import find_function
from partita.experiment.preview import plan_section
from partita.methods import INDEX
from partita.methods.cards import HEADINGS, card, listing

FEW = ("fedavg", "fedfrozen", "safl", "prune", "ffa-lora", "fedper")  # one of each kind


@pytest.mark.parametrize("name", INDEX)
def test_card_has_its_sections_in_order(name: str) -> None:
    text = card(name)
    assert text.startswith(f"# {name}\n")
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == HEADINGS
    for section in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        assert section.strip(), "no section is empty"
    assert "<!--" not in text, "nothing is left to fill in"


@pytest.mark.parametrize("name", INDEX)
def test_card_lists_each_parameter_with_its_default(name: str) -> None:
    parameters = inspect.signature(find_function("method", name)).parameters.values()
    section = card(name).partition("## Parameters\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, re.MULTILINE)
    assert listed == [(each.name, repr(each.default)) for each in parameters]
    assert listed or section.strip() == "None."


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in INDEX])
def test_card_shows_the_plan_as_printed_by_the_code(name: str) -> None:
    assert f"## Plan\n{plan_section(name)}\n" in card(name), "run: python scripts/write_plans.py"


@pytest.mark.parametrize("name", INDEX)
def test_card_evidence_has_a_command_or_says_there_is_none(name: str) -> None:
    section = card(name).partition("## Evidence\n")[2].partition("\n## ")[0]
    assert "partita compare" in section or "no evidence yet" in section.lower()


def test_listing_without_imports_has_the_signatures_of_the_functions() -> None:
    for row in listing():
        function = find_function("method", row["name"])
        signature = {each.name: each.default for each in inspect.signature(function).parameters.values()}
        assert list(row["parameters"].items()) == list(signature.items())
        assert (inspect.getdoc(inspect.getmodule(function)) or "").splitlines()[0] == row["about"]


def test_every_method_has_a_one_line_description() -> None:
    assert [row["name"] for row in listing()] == list(INDEX)
    assert all(row["about"].endswith(".") for row in listing())
