"""The settings of a site are read strictly: an error names file, key and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.experiment.config import ConfigError
from partita.site.config import check_files, load_site
from partita.site.toml_tables import SiteError

WHOLE = """
name = "north"
experiment = "experiment.toml"
policy = "policy.toml"
state = "state"
[server]
address = "fl.example.org:8765"
root_certificates = "ca.crt"
[keys]
node = "keys/north"
[set]
"data.path" = "/srv/data"
"engine.threads" = 4
"""
SHORT = 'name = "north"\n[server]\naddress = "fl.example.org:8765"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "site.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, WHOLE)
    monkeypatch.chdir(tmp_path)
    site = load_site(Path(path.name))
    monkeypatch.chdir("/")
    assert site == load_site(path) == load_site(tmp_path)
    assert site.experiment_file == tmp_path / "experiment.toml"
    assert site.policy_file == tmp_path / "policy.toml"
    assert site.state_folder == tmp_path / "state"
    assert site.root_certificates == tmp_path / "ca.crt"
    assert site.node_key == tmp_path / "keys/north"
    assert site.changes == ['data.path="/srv/data"', "engine.threads=4"]


def test_defaults_are_the_agreed_layout(tmp_path: Path) -> None:
    whole = load_site(write(tmp_path, WHOLE))
    short = load_site(write(tmp_path, SHORT))
    for place in ("experiment_file", "policy_file", "state_folder", "root_certificates", "node_key"):
        assert getattr(short, place) == getattr(whole, place)
    assert short.changes == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WHOLE.replace("policy =", "polcy ="), "unknown key 'polcy'; did you mean 'policy'?"),
        (WHOLE.replace("address =", "adress ="), "unknown key 'server.adress'; did you mean 'address'?"),
        (WHOLE.replace("node =", "folder ="), "unknown key 'keys.folder'"),
        ('folder = "/etc"\n' + SHORT, "unknown key 'folder'"),
        ('name = "north"\n', "'server' is missing; it must be a table, [server]"),
        (SHORT.replace('name = "north"', ""), "'name' is missing; it must be a text"),
        (SHORT.replace('"north"', '""'), "name is ''; it must be a text of one line that is not empty"),
        (SHORT.replace('"north"', "7"), "name is 7; it must be a text"),
        ('name = "north"\nserver = "fl.example.org:8765"', "it must be a table, [server]"),
        (SHORT.replace(":8765", ""), "server.address is 'fl.example.org'; write host and port"),
        (SHORT.replace(":8765", ":99999"), "server.address is 'fl.example.org:99999'; write host and port"),
        (SHORT.replace("fl.example.org", "https://fl"), "write host and port"),
        (SHORT + '[set]\n"method.mu" = 1\n', "set.method.mu cannot differ from the experiment"),
        (SHORT + '[set]\n"privacy.noise" = 0\n', "a site can only set data. and engine. keys"),
        (SHORT + '[set]\ndata.path = "/srv"\n', 'write it in quotes: "data.path" = "/srv/data"'),
        (SHORT + '[set]\n"data" = 1\n', 'write it in quotes: "data.path" = "/srv/data"'),
    ],
)
def test_error_names_file_key_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SiteError) as caught:
        load_site(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config .*site.toml: No such file"):
        load_site(tmp_path)
    with pytest.raises(ConfigError, match="is not TOML"):
        load_site(write(tmp_path, "name = north"))


def test_missing_files_are_named_with_where_they_come_from(tmp_path: Path) -> None:
    site = load_site(write(tmp_path, WHOLE))
    (tmp_path / "keys").mkdir()
    for file, key in [
        ("experiment.toml", "experiment"),
        ("policy.toml", "policy"),
        ("ca.crt", "server.root_certificates"),
        ("keys/north", "keys.node"),
    ]:
        with pytest.raises(SiteError, match=rf"^{key} names .*{file}, which does not exist; \w+"):
            check_files(site)
        (tmp_path / file).touch()
    check_files(site)
