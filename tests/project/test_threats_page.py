"""Every line of the page on threats names a test that exists, or says why there is none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "guide" / "threats.md"


def lines() -> list[tuple[str, str]]:
    """(line, its last column) of all tables."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [(row[0], row[-1]) for row in rows if row[0] != "line"]


def test_page_has_all_its_parts() -> None:
    text = PAGE.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "What leaves a site",
        "What a server can learn",
        "What a stranger can do",
    ]
    assert len(lines()) > 30


@pytest.mark.parametrize(("line", "held_by"), lines())
def test_line_is_held_by_a_test_or_says_why_not(line: str, held_by: str) -> None:
    if held_by.startswith("not tested"):
        assert re.fullmatch(r"not tested( here)?: .{10,}", held_by)
        return
    file, _, name = held_by.strip("`").partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{held_by} does not exist"
