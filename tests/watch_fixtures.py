"""A server of the live page in a thread, and plain requests to it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from partita.watch import state
from partita.watch.server import WatchServer
from partita.watch.state import Watcher


@contextmanager
def serving(*roots: Path) -> Iterator[WatchServer]:
    """Serve the page of these folders, and look at them at every request."""
    patch = pytest.MonkeyPatch()
    patch.setattr(state, "REFRESH", 0.0)
    patch.setattr(state, "SEARCH", 0.0)
    server = WatchServer(Watcher(roots))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        patch.undo()


def ask(
    server: WatchServer, path: str | None = None, method: str = "GET", host: str | None = "localhost", body: str = ""
) -> tuple[int, dict[str, str], bytes]:
    """Send a request as it is; return status, headers and body. The path begins below the token, if it is relative."""
    target = f"/{server.token}/{path or ''}" if path is None or not path.startswith("/") else path
    hosts = "" if host is None else f"Host: {host}\r\n"
    return send(server, f"{method} {target} HTTP/1.1\r\n{hosts}\r\n{body}".encode("utf-8", "surrogateescape"))


def send(server: WatchServer, data: bytes) -> tuple[int, dict[str, str], bytes]:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(data)
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), content


def state_of(server: WatchServer) -> dict[str, Any]:
    status, _, content = ask(server, "state")
    assert status == 200
    found: dict[str, Any] = json.loads(content)
    return found
