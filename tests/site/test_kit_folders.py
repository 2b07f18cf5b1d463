"""The folders of a group: what is in them, that they fit together, and what a second `init` keeps."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest
import yaml
from shell import Shell
from site_kit_fixtures import GROUP, write_experiment, write_kit

from partita.experiment.config import load, shared_digest
from partita.experiment.flower_app import run_config
from partita.site.config import load_site
from partita.site.kit.folders import write_files
from partita.site.kit.group import load_group
from partita.site.kit.party_files import UID, group_files
from partita.site.toml_tables import SiteError
from partita.storage.atomic_files import LinkError


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kit(tmp_path_factory.mktemp("kit"))


@pytest.mark.slow
def test_all_parties_have_the_same_experiment(kit: Path) -> None:
    files = [kit / party / "experiment.toml" for party in ("server", "north", "south")]
    files.append(kit / "server" / "app" / "federation" / "experiment.toml")
    assert len({file.read_bytes() for file in files}) == 1
    assert run_config(kit / "server" / "app")["clients"] == 2
    assert run_config(kit / "server" / "app")["folder"].startswith("/opt/partita/server/state/runs/")


def test_policy_approves_nothing_and_proposes_what_the_plan_sends(kit: Path) -> None:
    policy = tomllib.loads((kit / "north" / "policy.toml").read_text())
    config = load(kit / "north" / "experiment.toml")
    assert policy["experiments"] == []
    assert policy["leave"]["scores"] is False, "the experiment asks for them, and nobody has agreed"
    assert "head" not in policy["leave"]["roles"]
    assert policy["leave"]["never"] == ["classifier.bias", "classifier.weight"], "fedper keeps its head"
    assert policy["leave"]["names"] == []
    assert policy["limits"]["rounds"] == config.rounds
    assert policy["limits"]["bytes_total"] == config.rounds * policy["limits"]["bytes_per_round"]
    assert policy.keys() == {"experiments", "leave", "limits"}, "nothing that the experiment does not have"


def test_site_file_says_who_and_where(kit: Path) -> None:
    site = load_site(kit / "south")
    assert (site.name, site.server.address) == ("south", "fl.example.org:8765")
    assert site.set == {"data.path": "/srv/data/south", "engine.device": "cuda"}
    assert site.node_key == kit.resolve() / "south" / "keys" / "south"
    own = load(site.experiment_file, site.changes)
    assert shared_digest(own) == shared_digest(load(site.experiment_file))


def test_files_are_private_and_hold_no_key(kit: Path) -> None:
    paths = list(kit.rglob("*"))
    assert len(paths) > 60
    for path in (kit, *paths):
        mode, script = stat.S_IMODE(path.stat().st_mode), path.is_file() and path.read_bytes().startswith(b"#!/usr/bin")
        assert mode == (0o700 if path.is_dir() or script else 0o600), path
        assert path.is_dir() or b"PRIVATE KEY" not in path.read_bytes()
    assert not list(kit.glob("*/keys")) + list(kit.glob("*/state")) + list(kit.rglob("*.key"))


@pytest.mark.slow
def test_second_init_changes_nothing_and_keeps_what_was_made(tmp_path: Path) -> None:
    kit = write_kit(tmp_path)
    group = load_group(tmp_path / "group.toml")
    assert write_files(group_files(group), kit) == [], "equal inputs give equal files"
    made = {kit / "north" / name: b"mine" for name in ("keys/north", "state/log.jsonl", "ca.crt")}
    made[kit / "server" / "ca" / "ca.key"] = b"mine"
    for path, content in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    policy = kit / "north" / "policy.toml"
    proposed = policy.read_text()
    policy.write_text(proposed + "# signed\n")
    (kit / "south" / "README.md").unlink()
    with pytest.raises(SiteError, match=r"north/policy.toml exists and differs; compare it, and overwrite .* --force"):
        write_files(group_files(group), kit)
    assert policy.read_text().endswith("# signed\n")
    assert not (kit / "south" / "README.md").exists(), "nothing is written if something is refused"
    assert write_files(group_files(group), kit, force=True) == [
        kit / "north" / "policy.toml",
        kit / "south" / "README.md",
    ]
    assert policy.read_text() == proposed
    assert all(path.read_bytes() == content for path, content in made.items())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (kit / "south" / "image").rename(tmp_path / "moved")
    (kit / "south" / "image").symlink_to(elsewhere)
    with pytest.raises(LinkError, match=r"south/image is a symbolic link"):
        write_files(group_files(group), kit, force=True)
    assert not list(elsewhere.iterdir())


@pytest.mark.slow
def test_image_command_writes_the_image_folder_of_a_party(kit: Path, tmp_path: Path, run_partita: Shell) -> None:
    code, out, _ = run_partita("sites", "image", "--out", str(tmp_path / "image"))
    assert (code, out.split()[:2]) == (0, ["wrote", "5"])
    for party in (kit / "north" / "image").iterdir():
        own, same = (tmp_path / "image" / party.name).read_bytes(), party.read_bytes()
        if party.name == "Dockerfile":  # without a group, the base image is not known
            own, same = (text.partition(b"\nFROM ")[2] for text in (own, same))
        assert own == same
    (tmp_path / "image" / "requirements.txt").write_text("torch==1.0\n")
    code, _, error = run_partita("sites", "image", "--out", str(tmp_path / "image"))
    assert code == 1
    assert "requirements.txt exists and differs" in error
    assert run_partita("sites", "image", "--out", str(tmp_path / "image"), "--force")[1].startswith("wrote 1 files")


@pytest.mark.slow
def test_limits_below_the_plan_are_refused(tmp_path: Path) -> None:
    group = GROUP.replace("[site.set]", "[site.limits]\nbytes_per_round = 10\n[site.set]")
    with pytest.raises(
        SiteError, match=r"the site 'south' has limits.bytes_per_round = 10, but the plan needs \d{4,};"
    ):
        write_kit(tmp_path, group)
    assert not (tmp_path / "parties").exists()


def test_containers_of_a_site_have_no_rights(kit: Path) -> None:
    compose = yaml.safe_load((kit / "south" / "compose.yaml").read_text())
    [site] = compose["services"].values()
    assert site["user"] == f"{UID}:{UID}"
    assert (site["read_only"], site["cap_drop"], site["security_opt"]) == (True, ["ALL"], ["no-new-privileges:true"])
    assert "ports" not in site
    assert "privileged" not in site
    assert site["extra_hosts"] == ["fl.example.org:203.0.113.5"]
    writable = [volume["target"] for volume in site["volumes"] if not volume.get("read_only")]
    assert writable == ["/site/state"]
    assert "/srv/data/south" in [volume["source"] for volume in site["volumes"] if volume.get("read_only")]
    assert site["image"].partition("@")[2].startswith("sha256:")
    [network] = compose["networks"].values()
    bridge = network["driver_opts"]["com.docker.network.bridge.name"]
    assert len(bridge) <= 15, "the longest name of an interface"
    assert f'iifname "{bridge}" counter drop' in (kit / "south" / "nftables.conf").read_text()


def test_only_the_proxy_of_the_server_is_reached(kit: Path) -> None:
    start, proxy = ((kit / "server" / name).read_text() for name in ("start.sh", "nginx.conf"))
    assert "--host 127.0.0.1 --port 8766" in start
    assert "--enable-supernode-auth --disable-runtime-dependency-installation" in start
    assert "listen 8765 ssl" in proxy
    assert "location / { return 403; }" in proxy
    services = yaml.safe_load((kit / "server" / "compose.yaml").read_text())["services"]
    assert services["superlink"]["ports"] == ["8765:8765"], "the port of the proxy, not of the SuperLink"
    assert services["proxy"]["network_mode"] == "service:superlink"


@pytest.mark.slow
def test_own_code_of_the_experiment_travels_and_is_not_approved(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    (tmp_path / "mine.py").write_text("def spread(logits, targets):\n    return float(logits.std())\n")
    text = (tmp_path / "experiment.toml").read_text() + '[evaluate]\nmetrics = ["mine.py:spread"]\n'
    kit = write_kit(tmp_path, experiment=text)
    assert (kit / "north" / "code" / "mine.py").read_bytes() == (tmp_path / "mine.py").read_bytes()
    policy = tomllib.loads((kit / "north" / "policy.toml").read_text())
    assert policy["code"] == policy["experiments"] == []
    volumes = yaml.safe_load((kit / "north" / "compose.yaml").read_text())["services"]["site"]["volumes"]
    assert "/site/code" in [volume["target"] for volume in volumes]


@pytest.mark.slow
def test_command_names_what_is_still_open(tmp_path: Path, run_partita: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_experiment(tmp_path)
    Path("group.toml").write_text(GROUP.replace('ips = ["192.0.2.7"]', ""))
    code, out, err = run_partita("sites", "init", "group.toml", "--out", "parties")
    assert code == 0, err
    assert "for server, north, south to parties" in out
    assert out.splitlines()[1:] == ["still open: south has no ips: the server's firewall rules do not admit it"]
    Path("parties/north/policy.toml").write_text("")
    assert run_partita("sites", "init", "group.toml")[0] == 1
