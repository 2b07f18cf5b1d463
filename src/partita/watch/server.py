"""The web server of the live page: on the loopback interface, read-only, behind a random token.

A request names one of a few files in memory, or asks for the state or the report. No path reaches the file system.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader

from partita.storage.safe_text import printable
from partita.watch.state import Watcher

HTML = "text/html; charset=utf-8"
ASSETS = {"watch.js": "text/javascript; charset=utf-8", "watch.css": "text/css; charset=utf-8"}


def page_files(roots: Sequence[Path]) -> dict[str, tuple[str, bytes]]:
    """Return (type, content) of each file by its name in the address; the page itself has an empty name."""
    environment = Environment(loader=PackageLoader("partita.watch"), autoescape=True)
    page = environment.get_template("page.html").render(roots=", ".join(printable(root) for root in roots))
    folder = files("partita.watch").joinpath("assets")
    return {"": (HTML, page.encode())} | {
        name: (kind, folder.joinpath(name).read_bytes()) for name, kind in ASSETS.items()
    }


LOOPBACK = "127.0.0.1"
# A page of another site that lets its name point to this machine sends that name.
HOSTS = ("127.0.0.1", "localhost", "[::1]")
MAX_CONNECTIONS = 100
MAX_SECONDS = 15.0  # time for a request and its answer, however slowly they travel
JSON = "application/json"
NO_HEADERS: Mapping[str, str] = {}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# The report may stand in the page. Its own policy, in the document, allows its script and style by their hashes only.
IN_FRAME = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Frame-Options": "SAMEORIGIN",
}


class WatchServer(ThreadingHTTPServer):
    """Serves the page for the runs of a watcher.

    Args:
        watcher: Reads the runs.
        port: The port; 0 to let the system choose a free one.

    Raises:
        OSError: If the port is in use.
    """

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, watcher: Watcher, port: int = 0) -> None:
        self.watcher, self.files = watcher, page_files(watcher.roots)
        self.token = secrets.token_urlsafe(24)
        self.open_code: str | None = secrets.token_urlsafe(24)
        self.reading, self.counting = threading.Lock(), threading.Lock()
        self.connections: dict[socket.socket, float] = {}  # -> when it was opened
        super().__init__((LOOPBACK, port), _Request)

    def server_bind(self) -> None:
        """Bind without asking the network for the name of this machine."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, self.server_address[1]

    @property
    def address(self) -> str:
        """The address of the page, with the token."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    @property
    def opening_address(self) -> str:
        """An address that leads to the page once. A browser's command line, which others can see, may hold it."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.open_code}"

    def take_open_code(self, given: bytes) -> bool:
        """Return whether this is the code of the opening address, which then is used up."""
        with self.counting:
            if self.open_code is None or not secrets.compare_digest(given, self.open_code.encode()):
                return False
            self.open_code = None
            return True

    def state(self) -> bytes:
        """Return the state of the runs, as JSON."""
        with self.reading:
            self.watcher.look()
            return json.dumps(self.watcher.state(), allow_nan=False, separators=(",", ":")).encode()

    def report(self) -> bytes:
        """Return the report of all runs."""
        with self.reading:
            return self.watcher.report().encode()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Accept a connection. If there are too many, end the oldest: a page's own requests take milliseconds."""
        with self.counting:
            if len(self.connections) >= MAX_CONNECTIONS:
                oldest = next(iter(self.connections))
                del self.connections[oldest]
                _end(oldest)
            self.connections[request] = time.monotonic()
            return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self.counting:
            self.connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that take too long. The server calls this twice a second."""
        with self.counting:
            late = [each for each, since in self.connections.items() if time.monotonic() - since > MAX_SECONDS]
        for connection in late:
            _end(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a connection that broke."""


def _end(connection: socket.socket) -> None:
    """End a connection: its thread then reads the end, and closes it."""
    with contextlib.suppress(OSError):  # closed in the meantime
        connection.shutdown(socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    """Answers one request; every connection carries one."""

    server: WatchServer
    protocol_version = "HTTP/1.0"
    timeout = MAX_SECONDS

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or _host_name(hosts[0]) not in HOSTS:
            return self._send(HTTPStatus.FORBIDDEN)
        try:
            url = urlsplit(self.path)
        except ValueError:
            return self._send(HTTPStatus.NOT_FOUND)
        _, given, *rest = [*url.path.split("/", 2), ""]
        token = given.encode(errors="surrogatepass")
        if rest == [""] and self.command == "GET" and self.server.take_open_code(token):
            return self._send(HTTPStatus.SEE_OTHER, location=f"/{self.server.token}/")
        if not secrets.compare_digest(token, self.server.token.encode()):
            return self._send(HTTPStatus.NOT_FOUND)
        name = rest[0]
        if name == "state":
            return self._send(HTTPStatus.OK, JSON, self.server.state())
        if name == "report":
            return self._send(HTTPStatus.OK, HTML, self.server.report(), more=IN_FRAME)
        if len(rest) == 2 and name in self.server.files:
            return self._send(HTTPStatus.OK, *self.server.files[name])
        return self._send(HTTPStatus.NOT_FOUND)

    def _send(
        self,
        status: HTTPStatus,
        kind: str = "text/plain; charset=utf-8",
        content: bytes = b"",
        location: str = "",
        more: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        self.send_response_only(status)
        content = content or f"{status.value}\n".encode()
        for name, value in {**HEADERS, **more, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        if location:
            self.send_header("Location", location)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is not a GET or HEAD request without detail."""
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal belongs to the user, and addresses hold the token."""


def _host_name(host: str) -> str:
    """Return the host of a Host header without its port, which an ssh tunnel may change."""
    name, colon, port = host.strip().lower().rpartition(":")
    return name if colon and port.isdecimal() else host.strip().lower()
