"""A person's approval: what is shown, what is written, and when nothing is."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from site_fixtures import SiteKit, write_site

from partita.core.own_code import digest
from partita.site.approval import approve
from partita.site.policy import load_policy
from partita.site.toml_tables import SiteError

PROPOSED = """# Read it.
experiments = []  # none yet
code = [
    "{other}",
]

[leave]
# all but the head
roles = ["*"]
scores = false

[limits]
rounds = 9
"""
OTHER = "0" * 32


class Person:
    """Someone who reads what is shown, and gives these answers."""

    def __init__(self, *answers: bool) -> None:
        self.answers, self.pages = list(answers), list[str]()

    def __call__(self, shown: str, question: str) -> bool:
        self.pages.append(f"{shown}\n{question}")
        return self.answers.pop(0)


@pytest.fixture
def kit(tmp_path: Path) -> SiteKit:
    made = write_site(tmp_path / "c1")
    made.site.policy_file.write_text(PROPOSED.format(other=OTHER))
    return made


def test_approval_shows_code_and_page_and_changes_only_its_own_lines(kit: SiteKit) -> None:
    code = digest((kit.folder / "plain_model.py").read_bytes())
    person = Person(True, True)
    assert approve(kit.site, person)
    assert f"plain_model.py, digest {code}" in person.pages[0]
    assert "The policy covers all." in person.pages[1]
    assert kit.terms.digest in person.pages[1].splitlines()[-1]
    expected = PROPOSED.replace("[]", f'["{kit.terms.digest}"]').replace(
        '[\n    "{other}",\n]', f'["{OTHER}", "{code}"]'
    )
    assert kit.site.policy_file.read_text() == expected
    assert approve(kit.site, again := Person(True)), "the code is known now"
    assert len(again.pages) == 1
    assert kit.site.policy_file.read_text() == expected


@pytest.mark.parametrize("answers", [(False,), (True, False)], ids=["code", "page"])
def test_nothing_changes_without_a_yes(kit: SiteKit, answers: tuple[bool, ...]) -> None:
    before = kit.site.policy_file.read_text()
    assert not approve(kit.site, Person(*answers))
    assert kit.site.policy_file.read_text() == before


def test_code_is_not_run_before_a_yes(kit: SiteKit) -> None:
    model = kit.folder / "plain_model.py"
    model.write_text("from pathlib import Path\nPath(__file__).with_name('was_run').touch()\n" + model.read_text())
    assert not approve(kit.site, Person(False))
    assert not (kit.folder / "was_run").exists()


def test_experiment_beyond_the_policy_is_not_approved(kit: SiteKit) -> None:
    file = kit.site.policy_file
    file.write_text(file.read_text().replace("rounds = 9", "rounds = 2"))
    before = file.read_text()
    with pytest.raises(SiteError, match=r"policy\.toml does not cover the experiment: rounds: limits\.rounds is 2; "):
        approve(kit.site, Person(True))
    assert file.read_text() == before


def test_scores_are_approved_by_name(kit: SiteKit) -> None:
    file = kit.site.experiment_file
    file.write_text(file.read_text().replace("personal_every = 0", "personal_every = 1"))
    with pytest.raises(SiteError, match=r"leave\.scores is false; .*; or approve with --scores"):
        approve(kit.site, Person(True))
    assert approve(kit.site, Person(True, True), scores=True)
    assert load_policy(kit.site.policy_file).leave.scores
    assert tomllib.loads(kit.site.policy_file.read_text())["limits"] == {"rounds": 9}


def test_policy_without_the_keys_gets_them_at_its_top(kit: SiteKit) -> None:
    kit.site.policy_file.write_text('leave = {roles = ["*"]}\n')
    assert approve(kit.site, Person(True, True))
    assert load_policy(kit.site.policy_file).experiments == (kit.terms.digest,)
    assert kit.site.policy_file.read_text().endswith('leave = {roles = ["*"]}\n')
    kit.site.policy_file.write_text('# [leave]\nleave = {roles = ["*"], scores = false}\n')
    file = kit.site.experiment_file
    file.write_text(file.read_text().replace("personal_every = 0", "personal_every = 1"))
    with pytest.raises(SiteError, match="is written in a way that cannot be changed here; add by hand"):
        approve(kit.site, Person(True, True), scores=True)
