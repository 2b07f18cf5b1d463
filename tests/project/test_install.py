"""scripts/install.py tells uv where pip looks for packages, and falls back to pip."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
install = import_module("install")


def test_uv_gets_the_settings_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From pip's file and its environment variables; what is said to uv itself stays."""
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://mirror.example/simple\nfind-links = /wheels\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://one.example https://two.example")
    for name in ("PIP_INDEX_URL", "PIP_FIND_LINKS", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "7")
    # In a process of its own: pip's modules get in the way of setuptools'.
    command = [sys.executable, "-c", "import install, json; print(json.dumps(install.settings()))"]
    found = json.loads(subprocess.run(command, cwd=SCRIPTS, check=True, capture_output=True, text=True).stdout)
    assert found["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert found["UV_INDEX"] == "https://one.example https://two.example"
    assert found["UV_FIND_LINKS"] == "/wheels"
    assert found["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert "UV_HTTP_TIMEOUT" not in found


def test_pip_installs_where_uv_cannot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran = []

    def run(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        ran.append(command[2])
        return subprocess.CompletedProcess(command, int(command[2] == "uv" or "uv" in command))

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install, "settings", dict)
    for known, tried in ((None, ["pip", "pip"]), (object(), ["uv", "pip"])):
        ran.clear()
        monkeypatch.setattr(install.importlib.util, "find_spec", lambda name, known=known: known)
        monkeypatch.setattr(sys, "argv", ["install.py", "--python", "python3", "-e", ".[dev]"])
        with pytest.raises(SystemExit) as end:
            install.main()
        assert (ran, end.value.code) == (tried, 0)
        assert "pip takes longer" in capsys.readouterr().out
