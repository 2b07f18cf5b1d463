"""The doctor finds every fault on the way to the server, and says what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from doctor_fixtures import LOOPBACK, Authority, examined_site, https_server, make_authority, make_site

from partita.site.doctor import network
from partita.site.doctor.checks import Examined
from partita.site.doctor.network import check_clock, check_server


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority()


def site_at(folder: Path, port: int, authority: Authority) -> Examined:
    make_site(folder / "north", port=port)
    authority.save(folder / "north" / "ca.crt")
    return examined_site(folder / "north")


def test_right_server_passes_all_checks(tmp_path: Path, authority: Authority) -> None:
    with https_server(authority.issue(tmp_path)) as port:
        site = site_at(tmp_path, port, authority)
        for check in (check_server, check_clock):
            assert check(site).status == "ok", check(site)


def test_closed_port_is_named(tmp_path: Path, authority: Authority) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    outcome = check_server(site_at(tmp_path, port, authority))
    assert outcome.status == "failed"
    assert f"port {port} refuses" in outcome.sentence


def test_firewall_that_drops_packets_is_named(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop(*given: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(network.socket, "create_connection", drop)
    outcome = check_server(site_at(tmp_path, 8765, authority))
    assert outcome.status == "failed"
    assert "firewall" in outcome.remedy


def test_unknown_name_is_named(tmp_path: Path, authority: Authority) -> None:
    site_at(tmp_path, 8765, authority)
    (tmp_path / "north" / "site.toml").write_text('name = "north"\n[server]\naddress = "fl.invalid:8765"\n')
    outcome = check_server(examined_site(tmp_path / "north"))
    assert outcome.status == "failed"
    assert "fl.invalid is unknown" in outcome.sentence


@pytest.mark.parametrize("name", ["hospital group", "another group"])  # an attacker's would have the same name
def test_certificate_of_another_authority_is_refused(tmp_path: Path, authority: Authority, name: str) -> None:
    with https_server(make_authority(name=name).issue(tmp_path)) as port:
        outcome = check_server(site_at(tmp_path, port, authority))
    assert outcome.status == "failed"
    assert "not from the group's authority" in outcome.sentence
    assert "do not connect" in outcome.remedy


@pytest.mark.parametrize(("first", "last", "says"), [(-10, -1, "has expired"), (1, 10, "is not yet valid")])
def test_certificate_out_of_date_is_named(
    tmp_path: Path, authority: Authority, first: int, last: int, says: str
) -> None:
    with https_server(authority.issue(tmp_path, first=first, last=last)) as port:
        outcome = check_server(site_at(tmp_path, port, authority))
    assert outcome.status == "failed"
    assert says in outcome.sentence
    assert "clock" in outcome.remedy


def test_certificate_for_another_name_is_named(tmp_path: Path, authority: Authority) -> None:
    with https_server(authority.issue(tmp_path, name="fl.example.org")) as port:
        outcome = check_server(site_at(tmp_path, port, authority))
    assert outcome.status == "failed"
    assert f"for another name than {LOOPBACK}" in outcome.sentence


def test_certificate_that_expires_soon_is_a_warning(tmp_path: Path, authority: Authority) -> None:
    with https_server(authority.issue(tmp_path, last=29)) as port:
        outcome = check_server(site_at(tmp_path, port, authority))
    assert outcome.status == "warning"
    assert "the first certificate expires in 29 days" in outcome.sentence


def test_authority_that_expires_soon_is_a_warning(tmp_path: Path) -> None:
    authority = make_authority(last=20)
    with https_server(authority.issue(tmp_path)) as port:
        outcome = check_server(site_at(tmp_path, port, authority))
    assert outcome.status == "warning"
    assert "the first certificate expires in 20 days" in outcome.sentence


def test_server_without_tls_is_named(tmp_path: Path, authority: Authority) -> None:
    with https_server(None) as port:
        outcome = check_server(site_at(tmp_path, port, authority))
    assert outcome.status == "failed"
    assert "does not speak TLS" in outcome.sentence


@pytest.mark.parametrize("content", [None, "", "not a certificate"])
def test_missing_or_broken_authority_is_named(tmp_path: Path, authority: Authority, content: str | None) -> None:
    site = site_at(tmp_path, 1, authority)
    file = tmp_path / "north" / "ca.crt"
    file.unlink()
    if content is not None:
        file.write_text(content)
    outcome = check_server(site)
    assert outcome.status == "failed"
    assert str(file) in outcome.sentence


@pytest.mark.parametrize(
    ("clock", "status", "says"),
    [
        (50.0, "ok", "within"),
        (-3600.0, "failed", "ahead of"),
        (90.0, "failed", "behind"),
        (None, "failed", "no date"),
    ],
)
def test_clock_is_compared_with_the_servers(
    tmp_path: Path, authority: Authority, clock: float | None, status: str, says: str
) -> None:
    with https_server(authority.issue(tmp_path), clock=clock) as port:
        outcome = check_clock(site_at(tmp_path, port, authority))
    assert outcome.status == status
    assert says in outcome.sentence


def test_clock_is_not_believed_from_another_server(tmp_path: Path, authority: Authority) -> None:
    with https_server(make_authority().issue(tmp_path)) as port:
        outcome = check_clock(site_at(tmp_path, port, authority))
    assert outcome.status == "failed"
