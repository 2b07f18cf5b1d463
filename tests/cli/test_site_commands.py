"""The commands that check and describe sites, as people and scripts use them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from doctor_fixtures import make_site
from typer.testing import CliRunner, Result

from partita.cli import describe, site_doctor


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make_site(tmp_path / "north")


def call(*words: object) -> Result:
    app, of_site, of_sites = typer.Typer(), typer.Typer(), typer.Typer()
    site_doctor.register(of_site)
    describe.register_site(of_site)
    of_sites.callback()(lambda: None)
    describe.register_sites(of_sites)
    app.add_typer(of_site, name="site")
    app.add_typer(of_sites, name="sites")
    return CliRunner().invoke(app, [str(word) for word in words], terminal_width=200)


def test_doctor_is_green_or_exits_with_1(site: Path) -> None:
    green = call("site", "doctor", site, "--offline")
    assert green.exit_code == 0, green.output
    assert "all checks passed" in green.output
    (site / "keys" / "north").chmod(0o644)
    red = call("site", "doctor", site, "--offline")
    assert red.exit_code == 1
    assert "chmod 600" in red.output
    assert "1 failed" in red.output


def test_doctor_prints_json(site: Path) -> None:
    (site / "experiment.toml").write_text("broken")
    result = call("site", "doctor", site, "--offline", "--json")
    assert result.exit_code == 1
    found = {each["check"]: each for each in json.loads(result.stdout)}
    assert found["experiment"]["status"] == "failed"
    assert found["rehearsal"]["status"] == "skipped"


def test_doctor_checks_the_site_at_any_working_folder(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site.parent)
    assert call("site", "doctor", "north", "--offline").exit_code == 0
    assert Path.cwd() == site.parent


def test_description_is_printed_before_it_is_sent_and_says_nothing_else(site: Path) -> None:
    result = call("site", "describe", site, "--least", 5)
    assert result.exit_code == 0, result.output
    written = (site / "north.json").read_text()
    assert written in result.stdout
    assert set(json.loads(written)) == {
        "format", "site", "data", "kind", "facts", "classes", "protection", "counts", "typical"
    }  # fmt: skip


def test_noise_is_charged_and_stated(site: Path) -> None:
    call("site", "describe", site, "--epsilon", 1)
    result = call("site", "describe", site, "--epsilon", 0.5)
    assert "epsilon 0.5 for this file, 1.5 for all so far" in result.output


def test_two_protections_are_refused(site: Path) -> None:
    result = call("site", "describe", site, "--epsilon", 1, "--least", 10)
    assert result.exit_code == 1
    assert "choose one" in str(result.exception)


def test_sites_that_agree_get_a_list_of_classes_that_the_doctor_reads(site: Path, tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    call("site", "describe", site, "--least", 5, "--out", files[0])
    files[1].write_text(files[0].read_text().replace('"north"', '"south"'))
    agreed = call("sites", "describe", *files, "--classes", site / "classes.json")
    assert agreed.exit_code == 0, agreed.output
    assert "nothing disagrees" in agreed.output
    assert "as in classes.json" in call("site", "doctor", site, "--offline").output


def test_sites_that_disagree_exit_with_1_and_get_no_list(site: Path, tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    call("site", "describe", site, "--least", 5, "--out", files[0])
    files[1].write_text(files[0].read_text().replace('"north"', '"[red]south"').replace("class1", "Class1"))
    result = call("sites", "describe", *files, "--classes", tmp_path / "classes.json")
    assert result.exit_code == 1
    assert "spelled differently" in result.output
    assert "[red]south" in result.output, "names are not markup"
    assert not (tmp_path / "classes.json").exists()
