"""The file that calls `fit` at sites: each reads its own rows with it, and none runs a version that it has not read."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from flower_fixtures import ANY_SIZE, task_identity
from helpers import server_in
from python_file_fixtures import FILE, LINES, write_file
from shell import Shell
from site_fixtures import SiteKit, refused
from site_kit_fixtures import GROUP, write_kit

from partita.core import tensors
from partita.engines.flower import messages
from partita.engines.flower.local_deployment import deploy_locally
from partita.experiment import flower_app, runner
from partita.experiment.config import load

__all__ = ["task_identity"]
SITES = ("c0", "c1", "c2")
ROWS = {site: "".join(f"{line}\n" for line in LINES.splitlines() if f'"{site}"' in line) for site in SITES}
BY_SITE = f"split={{name = 'site', sites = {list(SITES)}}}"
CHANGES = [BY_SITE, "evaluate.personal_every=0", "federation.skip_failed_clients=true"]
ATTACK = "from pathlib import Path\nPath('pwned').touch()\n"


def write_party(folder: Path, text: str = FILE, rows: str = ROWS["c1"]) -> SiteKit:
    """Write the folder of site c1, with the experiment that the file makes. Nothing is approved."""
    file = write_file(folder, text, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        experiment = load(file, CHANGES).to_toml(folder)
    (folder / "experiment.toml").write_text(experiment)
    (folder / "site.toml").write_text('name = "c1"\n[server]\naddress = "127.0.0.1:8765"\n')
    (folder / "policy.toml").write_text('[leave]\nroles = ["*"]\n')
    return SiteKit(folder)


def approve(kit: SiteKit, patch: pytest.MonkeyPatch) -> None:
    with patch.context() as there:
        there.chdir(kit.folder)
        kit.allow()


def order(kit: SiteKit, patch: pytest.MonkeyPatch) -> messages.RecordDict:
    with patch.context() as there:
        there.chdir(kit.folder)
        return kit.order()


@pytest.mark.slow
def test_site_trains_on_the_rows_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = write_party(tmp_path / "c1")
    raw = tomllib.loads((kit.folder / "experiment.toml").read_text())
    assert (raw["data"], raw["model"]) == ({"name": "federation.py:data"}, {"name": "federation.py:model"})
    approve(kit, monkeypatch)
    content = order(kit, monkeypatch)
    update = messages.decode_update(kit.send(content), messages.decode_job_id(content, "job"), ANY_SIZE)
    with monkeypatch.context() as there:
        there.chdir(kit.folder)
        experiment = kit.terms.experiment
    assert update.weight == len(experiment.federation["c1"].train)
    assert len(experiment.federation["c0"].train) == 0
    assert experiment.federation.task.row_count < len(ROWS["c1"].splitlines())


def test_changed_file_at_the_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit, server = write_party(tmp_path / "c1"), write_party(tmp_path / "server", ATTACK + FILE, LINES)
    (server.folder / "pwned").unlink()
    approve(kit, monkeypatch)
    refused(kit.send(order(server, monkeypatch)))
    assert "the server's config has the digest" in kit.log.lines()[-1]["reason"]
    assert not (kit.folder / "pwned").exists(), "the site ran its own version"
    messages.decode_update(
        kit.send(content := order(kit, monkeypatch)), messages.decode_job_id(content, "job"), ANY_SIZE
    )


@pytest.mark.slow
def test_file_that_nobody_has_approved_is_not_run(
    tmp_path: Path, run_partita: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = write_party(tmp_path / "c1")
    approve(kit, monkeypatch)
    content = order(kit, monkeypatch)
    (kit.folder / "federation.py").write_text(ATTACK + FILE)
    refused(kit.send(content))
    assert "custom code 'federation.py': code in the policy does not list its digest" in kit.log.lines()[-1]["reason"]
    for command in ("plan", "approve"):
        assert run_partita("site", command, kit.folder)[0] == 1
    assert not list(tmp_path.rglob("pwned"))
    code, out, errors = run_partita("site", "approve", kit.folder, "--yes")
    assert code == 0, errors
    assert "custom code federation.py, digest" in out
    assert (kit.folder / "pwned").exists(), "approved code runs, so the test above can fail"


@pytest.mark.slow
def test_kit_of_a_group_has_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = write_party(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = (kit.folder / "experiment.toml").read_text()
    for old, new in zip(("c0", "c1", "c2"), ("north", "south", ""), strict=True):
        text = text.replace(f'    "{old}",\n', f'    "{new}",\n' if new else "")
    group = GROUP.replace('data = "/srv/data/north"\n', "")
    parties = write_kit(tmp_path, group, experiment=text)
    for party in ("north", "south", "server"):
        assert (parties / party / "code" / "federation.py").read_text() == FILE
        raw = tomllib.loads((parties / party / "experiment.toml").read_text())
        assert raw["data"] == {"name": "code/federation.py:data"}
    for site in ("north", "south"):
        assert tomllib.loads((parties / site / "policy.toml").read_text())["code"] == []
        assert "data.path" not in tomllib.loads((parties / site / "site.toml").read_text())["set"]
    assert "/srv/data/south" in (parties / "south" / "compose.yaml").read_text()


@pytest.mark.slow
def test_flower_deployment_gives_the_tensors_of_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_file(tmp_path)
    changes = ["engine.clients_per_block=1"]
    app = flower_app.init(tmp_path / "app", file, changes)
    with deploy_locally(SITES, tmp_path / "federation", flower_app.modules(app)) as federation:
        federation.run(app, f'deadline=300.0 folder="{tmp_path / "there"}"')
    for _ in runner.start(load(file, changes), tmp_path / "here"):
        pass
    assert tensors.equal(*(server_in(tmp_path / side).params for side in ("here", "there")))
    digests = {json.loads((tmp_path / side / "result.json").read_text())["digest"] for side in ("here", "there")}
    assert len(digests) == 1
