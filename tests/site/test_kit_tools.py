"""The files of a group are read by the tools that they are for, where these are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from site_kit_fixtures import write_kit

PARTIES = ("server", "south")
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders with empty files in place of the certificates, which some tools look for."""
    return write_kit(tmp_path_factory.mktemp("kit"))


def call(*words: object, cwd: Path | None = None, wrong: bool = False) -> str:
    """Return what a command printed. It must succeed, or fail if `wrong`."""
    if shutil.which(str(words[0]), path=PATH) is None:
        pytest.skip(f"{words[0]} is not installed")
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env={**os.environ, "PATH": PATH}, capture_output=True, text=True
    )
    printed = done.stdout + done.stderr
    assert (done.returncode != 0) == wrong, printed
    return printed


def scripts(kit: Path) -> list[Path]:
    found = [path for path in kit.rglob("*") if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash")]
    assert len(found) >= 14
    return [*found, kit / "server" / "environment.sh"]


@pytest.mark.slow
def test_scripts_are_bash(kit: Path) -> None:
    for path in scripts(kit):
        call("bash", "-n", path)


@pytest.mark.slow
def test_scripts_pass_shellcheck(kit: Path) -> None:
    for folder in (*PARTIES, "server/ca"):
        names = [path.name for path in scripts(kit) if path.parent == kit / folder]
        call("shellcheck", "--external-sources", *names, cwd=kit / folder)
    call("shellcheck", *(kit / "server" / "image").glob("*.sh"))


# The keys of the Compose specification that the files use; the whole schema is not on PyPI.
SERVICE_KEYS = {
    "image", "command", "entrypoint", "working_dir", "user", "init", "read_only", "cap_drop", "security_opt",
    "pids_limit", "restart", "stop_grace_period", "environment", "tmpfs", "volumes", "dns", "extra_hosts", "networks",
    "deploy", "ports", "network_mode", "depends_on",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("party", PARTIES)
def test_compose_files_have_known_keys(party: str, kit: Path) -> None:
    compose = yaml.safe_load((kit / party / "compose.yaml").read_text())
    assert compose.keys() == {"name", "services", "networks"}
    for service in compose["services"].values():
        assert service.keys() <= SERVICE_KEYS
        for volume in service["volumes"]:
            assert volume.keys() <= {"type", "source", "target", "read_only", "bind"}
            assert (volume["source"][:2] == "./") or volume["source"].startswith("/")


@pytest.mark.parametrize("party", PARTIES)
def test_compose_files_are_read_by_docker(party: str, kit: Path) -> None:
    if "compose" not in call("docker", "--help"):
        pytest.skip("docker has no compose plugin")
    call("docker", "compose", "--file", kit / party / "compose.yaml", "config", "--quiet")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("party", PARTIES)
def test_units_are_read_by_systemd_and_are_closed(party: str, kit: Path, tmp_path: Path) -> None:
    for source in (kit / party).glob("*.service"):
        unit = tmp_path / source.name
        # The programs that it names are not on this machine.
        unit.write_text(source.read_text().replace("/opt/partita/venv/bin/partita", "/bin/true"))
        assert call("systemd-analyze", "verify", "--man=no", unit).strip() == ""
        printed = call("systemd-analyze", "security", "--offline=yes", "--no-pager", unit)
        exposure = float(printed.split("Overall exposure level for")[1].split(":")[1].split()[0])
        assert exposure < 2.0, printed


@pytest.mark.parametrize("party", PARTIES)
def test_rules_are_read_by_nftables(party: str, kit: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("nft checks rules only as root")
    call("nft", "--check", "--file", kit / party / "nftables.conf")


@pytest.mark.slow
def test_certificates_are_made_where_they_stay_and_hold_only_the_agreed_names(kit: Path, tmp_path: Path) -> None:
    server = shutil.copytree(kit / "server", tmp_path / "server")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    call(server / "ca" / "make-ca.sh")
    authority = (server / "ca" / "ca.key").read_bytes()
    assert "it is kept" in call(server / "ca" / "make-ca.sh", wrong=True)
    call(server / "make-keys.sh")
    key = (server / "keys" / "server.key").read_bytes()
    call(server / "make-keys.sh")
    assert (server / "keys" / "server.key").read_bytes() == key, "a new request is for the same key"
    assert (server / "ca" / "ca.key").read_bytes() == authority
    for file in (server / "ca" / "ca.key", server / "keys" / "server.key"):
        assert file.stat().st_mode & 0o077 == 0
    # A request that asks for more names and for the rights of an authority gets neither.
    greedy = ["-addext", "subjectAltName=DNS:evil.example.org", "-addext", "basicConstraints=CA:TRUE"]
    words = ["openssl", "req", "-new", "-key", server / "keys" / "server.key", "-subj", "/CN=x", *greedy]
    call(*words, "-out", server / "server.csr")
    call(server / "ca" / "sign.sh", server / "server.csr")
    check = ["openssl", "verify", "-CAfile", server / "ca" / "ca.crt", "-purpose", "sslserver"]
    for name in ("-verify_hostname fl.example.org", "-verify_ip 203.0.113.5", "-verify_ip 127.0.0.1"):
        call(*check, *name.split(), server / "ca" / "server.pem")
    call(*check, "-verify_hostname", "evil.example.org", server / "ca" / "server.pem", wrong=True)
    shown = call("openssl", "x509", "-in", server / "ca" / "server.pem", "-noout", "-text")
    assert "CA:FALSE" in shown
    assert "evil" not in shown
    for name in ("ca.crt", "server.pem"):
        shutil.copy(server / "ca" / name, server / name)
    (server / "state" / "nginx").mkdir()
    if shutil.which("nginx"):
        printed = call("nginx", "-t", "-e", "stderr", "-p", server, "-c", server / "nginx.conf")
        assert "test is successful" in printed
        assert "warn" not in printed


def test_node_key_is_made_at_the_site_and_kept(kit: Path, tmp_path: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    site = shutil.copytree(kit / "north", tmp_path / "north")
    assert "384" in call(site / "make-keys.sh")
    key = site / "keys" / "north"
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.parent.stat().st_mode & 0o777 == 0o700
    before = key.read_bytes()
    assert "it is kept" in call(site / "make-keys.sh", wrong=True)
    assert key.read_bytes() == before


def local_wheel(folder: Path) -> Path:
    """A wheel that has the name of partita and needs nothing."""
    path = folder / "partita-9.9-py3-none-any.whl"
    about = "partita-9.9.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("partita_stand_in.py", "VALUE = 1\n")
        extras = "".join(f"Provides-Extra: {extra}\n" for extra in ("data", "flower", "lora", "privacy", "text"))
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: partita\nVersion: 9.9\n{extras}")
        tags = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{about}/WHEEL", tags)
        names = ("partita_stand_in.py", f"{about}/METADATA", f"{about}/WHEEL", f"{about}/RECORD")
        wheel.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in names))
    return path


@pytest.mark.slow  # it makes two virtual environments
def test_wheelhouse_is_collected_installed_offline_and_refused_once_changed(kit: Path, tmp_path: Path) -> None:
    image = shutil.copytree(kit / "north" / "image", tmp_path / "image")
    wheel = local_wheel(tmp_path)
    call(image / "wheelhouse.sh", wheel, "--no-index")
    [line] = (image / "requirements.lock").read_text().splitlines()
    assert line.startswith("partita==9.9 --hash=sha256:")
    assert len((image / "SHA256SUMS").read_text().splitlines()) == 2
    call(image / "install.sh", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    assert call(python, "-c", "import partita_stand_in as x; print(x.VALUE)").strip() == "1"
    with (image / "wheelhouse" / wheel.name).open("ab") as file:
        file.write(b"x")
    assert "FAILED" in call(image / "install.sh", tmp_path / "other", wrong=True)
    assert not (tmp_path / "other").exists()
    # Even if someone also changes the sums, pip compares with the lock.
    call("bash", "-c", "sha256sum wheelhouse/*.whl requirements.lock > SHA256SUMS", cwd=image)
    assert "DO NOT MATCH" in call(image / "install.sh", tmp_path / "other", wrong=True)
