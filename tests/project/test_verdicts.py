"""The page of verdicts and the cards agree on every claim, and its intervals are in the studies that it names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from partita.methods.cards import card

STUDIES = Path(__file__).parents[2] / "studies"
VERDICTS = ("held", "did not hold", "could not be tested", "not yet tested")
CARDS = {"FedFrozen": "fedfrozen", "SAFL": "safl", "pFedDC": "pfeddc"}  # heading of the page -> method
INTERVAL = re.compile(r"-?\d+(?:\.\d+)? \[-?[\d.]+, -?[\d.]+\]")


@dataclass(frozen=True)
class Row:
    """One claim on the page."""

    method: str
    id: str
    claim: str
    regime: str
    verdict: str
    difference: str
    study: str


def rows() -> list[Row]:
    page = (STUDIES / "README.md").read_text()
    found = []
    for heading, method in CARDS.items():
        section = page.partition(f"\n### {heading}\n")[2].partition("\n##")[0]
        table = [line for line in section.splitlines() if line.startswith("|")]
        assert table[0] == "| id | claim | regime | verdict | difference | study |"
        for line in table[2:]:
            id, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append(Row(method, id.strip("`"), *cells))
    return found


def plain(text: str) -> str:
    """Return a text with simple minus signs, and without plus signs, units, backslashes and line breaks."""
    text = re.sub(r"\s+", " ", text).replace("−", "-").replace("+", "")
    return text.replace("\\[", "[").replace(" points [", " [").replace("% [", " [")


def evidence(method: str) -> str:
    return card(method).partition("## Evidence\n")[2].partition("\n## ")[0]


def test_every_claim_has_an_id_and_a_known_verdict() -> None:
    found = rows()
    assert len({row.id for row in found}) == len(found) > 20
    assert {row.verdict for row in found} == set(VERDICTS)


@pytest.mark.parametrize("method", CARDS.values())
def test_card_gives_the_same_verdicts(method: str) -> None:
    on_page = {row.id: row.verdict for row in rows() if row.method == method}
    on_card = re.findall(r"^- `([\w-]+)` \*\*([\w ]+)\*\*", evidence(method), re.MULTILINE)
    assert dict(on_card) == on_page, "the card lists each claim as: - `id` **verdict**: what was measured"
    assert len(on_card) == len(on_page)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.id)
def test_a_tested_claim_names_its_study_which_has_its_intervals(row: Row) -> None:
    folders = re.findall(r"\]\(([\w/]+)\)", row.study)
    tested = row.verdict in ("held", "did not hold")
    assert bool(folders) == tested
    texts = plain(" ".join((STUDIES / folder / "README.md").read_text() for folder in folders))
    for interval in INTERVAL.findall(plain(row.difference)):
        assert interval in texts


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.id)
def test_the_card_has_the_intervals_of_the_page(row: Row) -> None:
    text = plain(evidence(row.method))
    for interval in INTERVAL.findall(plain(row.difference)):
        assert interval in text
