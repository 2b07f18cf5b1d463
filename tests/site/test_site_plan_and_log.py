"""`partita site plan` and `partita site log`, as the people at a site see them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from flower_fixtures import task_identity as task_identity
from shell import Shell
from site_fixtures import SiteKit, write_site

from partita.site.config import load_site
from partita.site.program import KEPT, restrict_environment, supernode_command


@pytest.fixture
def partita(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


@pytest.fixture
def kit(tmp_path: Path) -> SiteKit:
    return write_site(tmp_path / "c1", "fedper")


@pytest.mark.slow
def test_form_names_what_leaves_and_what_stays(kit: SiteKit, partita: Shell) -> None:
    code, page, _ = partita("site", "plan", kit.folder)
    assert code == 0
    assert page.rstrip().endswith("The policy covers all.")
    leaves, stays = page.split("Never leave:")
    terms = kit.terms
    assert terms.personal == {"head.weight"}
    assert "head.weight" in stays
    assert "head.weight" not in leaves
    assert f"rounds 0 to 3, bytes of an update: {terms.update_bytes(0):,}" in leaves
    assert f"{4 * terms.update_bytes(0):,} in the 4 rounds" in leaves  # type: ignore[operator]
    _, full, _ = partita("site", "plan", kit.folder, "--names")
    assert all(name in full for name in terms.plan(0).up)


@pytest.mark.slow
def test_form_prints_the_digest_to_approve_and_exits_with_1(kit: SiteKit, partita: Shell) -> None:
    kit.allow(approve=False)
    code, page, _ = partita("site", "plan", kit.folder)
    assert code == 1
    assert f"experiment: {kit.terms.digest}" in page
    assert (
        "REFUSED: experiments does not list it; read this page, and to approve it, run 'partita site approve'" in page
    )
    assert "REFUSED: the policy does not cover 1 of these lines." in page
    code, page, _ = partita("site", "approve", kit.folder, "--yes")
    assert code == 0
    assert "The policy covers all." in page
    assert partita("site", "plan", kit.folder)[0] == 0


def test_stages_follow_the_plan_of_each_round(tmp_path: Path) -> None:
    kit = write_site(tmp_path / "c1", "fedpart")
    file = kit.site.experiment_file
    file.write_text(file.read_text().replace('"fedpart"', '"fedpart", full_rounds = 1'))
    terms = kit.terms
    assert [number for stage in terms.stages for number in range(stage.first, stage.last + 1)] == list(range(4))
    for stage in terms.stages:
        for number in range(stage.first, stage.last + 1):
            assert terms.plan(number).up == stage.plan.up
            assert terms.update_bytes(number) == stage.bytes
    assert len(terms.stages) > 1, "the method sends other layers in other rounds"


@pytest.mark.slow
def test_log_is_printed_and_checked(kit: SiteKit, partita: Shell) -> None:
    kit.send(kit.order(0))
    kit.send(kit.order(9))
    code, page, _ = partita("site", "log", kit.folder)
    one, two = page.splitlines()[-2:]
    assert code == 0
    assert "left" in one
    assert "round 0" in one
    assert f"{kit.terms.update_bytes(0):,} bytes" in one
    assert "refused" in two
    assert "was asked for round 9" in two
    _, page, _ = partita("site", "log", kit.folder, "--json")
    assert [json.loads(line) for line in page.splitlines()] == kit.log.lines()
    code, page, _ = partita("site", "log", kit.folder, "--verify")
    assert code == 0
    assert page.startswith("2 lines, each follows from the one before\n")
    assert f"head: {kit.log.head()}" in page
    assert "note the head elsewhere" in page
    head = kit.log.lines()[0]["hash"]
    assert "the head that you noted is line 1" in partita("site", "log", kit.folder, "--head", head)[1]


@pytest.mark.slow
def test_damaged_log_says_its_first_bad_line_and_exits_with_1(kit: SiteKit, partita: Shell) -> None:
    for number in range(3):
        kit.send(kit.order(number))
    text = kit.log.path.read_text()
    kit.log.path.write_text(text.replace('"round":1', '"round":0'))
    for words in (("--verify",), ()):
        code, _, errors = partita("site", "log", kit.folder, *words)
        assert code == 1
        assert "line 2 was changed" in errors


@pytest.mark.slow
def test_control_characters_of_a_server_do_not_reach_the_terminal(kit: SiteKit, partita: Shell) -> None:
    kit.send(kit.order(session="\x1b[2J\x1b]0;pwned\x07"))
    for words in ((), ("--json",)):
        assert "\x1b" not in partita("site", "log", kit.folder, *words)[1]


def test_supernode_starts_no_program_and_keeps_to_the_loopback(kit: SiteKit, tmp_path: Path) -> None:
    words = supernode_command(kit.site, 9999, tmp_path / "secret", {"PATH": str(Path(sys.executable).parent)})
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    assert pairs["--isolation"] == "process"
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--superexec-auth-secret-file"] == str(tmp_path / "secret")
    assert pairs["--root-certificates"] == str(kit.folder / "ca.crt")
    assert pairs["--auth-supernode-private-key"] == str(kit.folder / "keys" / "c1")
    assert "--insecure" not in words


def test_environment_is_small_and_flower_is_quiet(kit: SiteKit) -> None:
    before = dict(os.environ)
    try:
        os.environ |= {"AWS_SECRET_ACCESS_KEY": "x", "LD_PRELOAD": "", "HTTP_PROXY": "http://proxy"}
        restrict_environment(load_site(kit.folder))
        now = dict(os.environ)
    finally:
        os.environ.clear()
        os.environ.update(before)
    own = {"PATH", "FLWR_HOME", "NO_PROXY", "no_proxy"}
    quiet = {name for name in now if name.startswith("FLWR_")}
    assert now.keys() <= set(KEPT) | own | quiet
    assert now["FLWR_TELEMETRY_ENABLED"] == "0"
    assert now["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert now["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert Path(now["FLWR_HOME"]).is_relative_to(kit.site.state_folder)
