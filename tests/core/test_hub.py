"""Whether the Hub can be reached is known within seconds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from partita.core import hub
from partita.core.hub import offline_reason


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    hub._reachable.cache_clear()


@pytest.fixture
def port() -> Iterator[int]:
    """A port that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_offline_variable_is_respected(value: str, offline: bool, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert offline_reason() == ("HF_HUB_OFFLINE is set" if offline else None)


def test_host_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: (_ for _ in ()).throw(OSError("refused")))
    assert offline_reason() == "hub.invalid cannot be reached"


def test_lookup_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()

    def hang(*_: object, **__: object) -> None:
        forever.wait()
        raise OSError("too late")

    monkeypatch.setattr(hub, "WAIT", 0.01)
    monkeypatch.setattr(socket, "create_connection", hang)
    assert offline_reason() == "huggingface.co cannot be reached"
    forever.set()


def test_host_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(hub, "_connects", lambda host, port: asked.append((host, port)) or True)
    assert offline_reason() is None
    assert offline_reason() is None
    assert asked == [("huggingface.co", 443)]


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({}, ("huggingface.co", 443)),
        ({"HF_ENDPOINT": "http://mirror.local"}, ("mirror.local", 80)),
        ({"HF_ENDPOINT": "https://mirror.local:8443/hub"}, ("mirror.local", 8443)),
        ({"https_proxy": "http://proxy.local:3128"}, ("proxy.local", 3128)),
        ({"https_proxy": "proxy.local:3128"}, ("proxy.local", 3128)),
        ({"https_proxy": "http://proxy.local:3128", "no_proxy": "huggingface.co"}, ("huggingface.co", 443)),
    ],
)
def test_address_is_that_of_the_endpoint_or_its_proxy(
    variables: dict[str, str], address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked = []
    monkeypatch.setattr(hub, "_connects", lambda host, port: asked.append((host, port)) or True)
    assert offline_reason() is None
    assert asked == [address]


def test_connection_is_tried_with_a_time_limit(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub._connects("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    assert not hub._connects("127.0.0.1", closed)
    limits = []
    monkeypatch.setattr(socket, "create_connection", lambda *_, timeout=None: limits.append(timeout) or socket.socket())
    assert hub._connects("127.0.0.1", port)
    assert limits == [hub.WAIT]
