"""The server of the live page answers its own page, and nobody and nothing else."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import webbrowser
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from report_fixtures import write_run
from shell import Shell
from watch_fixtures import ask, send, serving, state_of

from partita.watch import server as server_module
from partita.watch.server import WatchServer

KINDS = {
    "": "text/html",
    "watch.js": "text/javascript",
    "watch.css": "text/css",
    "state": "application/json",
}
HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchServer]:
    root = tmp_path_factory.mktemp("runs")
    write_run(root, "fedavg", 0)
    with serving(root) as running:
        yield running


def test_the_page_and_its_files_come_with_strict_headers(server: WatchServer) -> None:
    for name, kind in KINDS.items():
        status, headers, content = ask(server, name)
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert int(headers["Content-Length"]) == len(content) > 100
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert not {"Access-Control-Allow-Origin", "Server", "Set-Cookie"} & headers.keys()
        status, headers, nothing = ask(server, name, "HEAD")
        assert (status, nothing) == (200, b"")
        assert int(headers["Content-Length"]) > 100


def test_the_page_has_no_script_or_style_of_its_own_or_from_elsewhere(server: WatchServer) -> None:
    page = ask(server)[2].decode()
    assert page.count("<script") == page.count('<script src="watch.js"') == 1
    assert not any(text in page for text in ("<style", "style=", "onclick", "http:", "https:", "//"))


def test_only_loopback_is_bound(server: WatchServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert len(server.token) >= 32


@pytest.mark.parametrize(
    "path",
    [
        "/", "/state", "/watch.js", "//", "/x/", "/x/state", "/%2e%2e/", "/../", "/..%2f..%2fetc/passwd", "/é/",
        "http://localhost/", "*", "/x/../state", "http://[/",
    ],
)  # fmt: skip
def test_without_the_token_there_is_nothing(server: WatchServer, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    assert send(server, request)[::2] == (404, b"404\n")


def test_a_part_of_the_token_is_not_enough(server: WatchServer) -> None:
    for token in (server.token[:-1], server.token + "a", server.token.swapcase(), ""):
        assert ask(server, f"/{token}/state")[0] == 404
    assert ask(server, f"/{server.token}")[0] == 404


@pytest.mark.parametrize(
    "name",
    [
        "../", "../../etc/passwd", "..%2f..%2fetc/passwd", "watch.js/", "/watch.js", "assets/watch.js", "config.toml",
        "fedavg-0/rows.jsonl", "state/", "state/../watch.js", "%00", "watch.js%00", ".", "page.html",
    ],
)  # fmt: skip
def test_with_the_token_no_path_reaches_the_file_system(server: WatchServer, name: str) -> None:
    assert ask(server, f"/{server.token}/{name}")[::2] == (404, b"404\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "X<b>"])
def test_only_get_and_head_are_answered(server: WatchServer, method: str) -> None:
    status, headers, content = ask(server, "state", method, body="x" * 100)
    assert status == 405
    assert content == b"405\n"
    assert "Allow" not in headers


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "", "127.0.0.1@evil", None,
     "localhost\r\nHost: evil.example", "0.0.0.0", "192.168.0.1"],
)  # fmt: skip
def test_a_name_that_only_points_here_is_refused(server: WatchServer, host: str | None) -> None:
    assert ask(server, host=host)[::2] == (403, b"403\n")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:80"])
def test_a_tunnel_may_use_another_port(server: WatchServer, host: str) -> None:
    assert ask(server, host=host)[0] == 200


@pytest.mark.parametrize("data", [b"\r\n\r\n", b"\x16\x03\x01\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n",
                                  b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
                                  b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n"])  # fmt: skip
def test_broken_requests_get_no_detail_and_do_no_harm(server: WatchServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        try:
            answer = b"".join(iter(lambda: connection.recv(2**16), b""))
        except ConnectionResetError:  # the server did not read all of it
            answer = b""
    assert b"Python" not in answer
    assert server.token.encode() not in answer
    assert ask(server)[0] == 200


def test_the_report_may_stand_in_the_page_only_and_runs_its_own_script_only(server: WatchServer) -> None:
    state_of(server)
    status, headers, content = ask(server, "report")
    assert status == 200
    assert headers["X-Frame-Options"] == "SAMEORIGIN"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none';" in policy
    assert policy.endswith("frame-ancestors 'self'")
    own = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', content.decode())
    assert own
    assert "script-src 'sha256-" in own[1].replace("&#39;", "'")
    assert "unsafe" not in own[1]
    assert b"fedavg" in content


def test_the_version_changes_with_the_runs_only(server: WatchServer) -> None:
    first = state_of(server)
    assert [run["label"] for run in first["runs"]] == ["fedavg"]
    assert state_of(server)["version"] == first["version"]


def test_a_hostile_name_stays_a_json_string_and_text_of_the_page(tmp_path: Path) -> None:
    root = tmp_path / "<script>alert(1)<" / "b>"
    write_run(root, HOSTILE, 0, edit=lambda row: {**row, "lost": {HOSTILE: HOSTILE}, "test": {HOSTILE: 0.5}})
    with serving(root) as server:
        assert state_of(server)["runs"][0]["label"] == HOSTILE
        page, shown = ask(server)[2].decode(), ask(server, "report")[2].decode()
    assert "<script>alert" not in page + shown
    assert "&lt;script&gt;alert(1)&lt;" in page


def test_the_opening_address_leads_to_the_page_once(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        path = server.opening_address.partition(str(server.server_port))[2]
        assert server.token not in path
        assert ask(server, "/" + path[1:-1])[0] == 404
        assert ask(server, path, host="evil.example")[0] == 403
        status, headers, _ = ask(server, path)
        assert (status, headers["Location"]) == (303, f"/{server.token}/")
        assert ask(server, path)[0] == 404


def test_slow_clients_are_cut_off_and_do_not_keep_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(server_module.time, "monotonic", lambda: clock[0])
    with serving(tmp_path) as server:
        slow = [socket.create_connection(("127.0.0.1", server.server_port), timeout=10) for _ in range(50)]
        for connection in slow:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert ask(server)[0] == 200
        clock[0] = server_module.MAX_SECONDS + 1  # they may have sent a byte a second
        for connection in slow:
            assert connection.recv(1) == b""
            connection.close()
        assert ask(server)[0] == 200


def test_idle_connections_do_not_keep_the_page_from_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more connections than allowed, the oldest end. Before, a page had to wait until they were 15 seconds old."""
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 5)
    with serving(tmp_path) as server:
        address = ("127.0.0.1", server.server_port)
        held = [socket.create_connection(address, timeout=10) for _ in range(12)]
        with urllib.request.urlopen(server.address, timeout=5) as page:
            assert page.status == 200
        assert held[0].recv(1) == b"", "the oldest has ended"
        held[-1].settimeout(0.1)
        with pytest.raises(TimeoutError, match="timed out"):
            held[-1].recv(1)
        assert len(server.connections) <= 5
        for connection in held:
            connection.close()


@pytest.mark.slow
def test_the_command_prints_one_line_and_ends_with_one_line(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0)
    command = [sys.executable, "-m", "partita", "watch", str(tmp_path), "--no-browser"]
    # A shell lets its background jobs ignore Ctrl-C, and so their children.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen)
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line.startswith(f"watching {tmp_path} at http://127.0.0.1:")
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err) == (130, "", "stopped\n")


@pytest.mark.slow
def test_a_browser_is_opened_where_there_is_a_display(
    tmp_path: Path, run_partita: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(WatchServer, "serve_forever", lambda self: None)
    monkeypatch.setattr(os, "nice", lambda step: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    for display, options, expected in (("", (), 0), (":0", ("--no-browser",), 0), (":0", (), 1)):
        monkeypatch.setenv("DISPLAY", display)
        code, out, _ = run_partita("watch", tmp_path, *options)
        assert code == 0
        assert len(opened) == expected
    assert opened[0] not in out  # a command line shows no token that lasts
    assert opened[0].partition("127.0.0.1:")[2].partition("/")[0] in out


@pytest.mark.slow
def test_the_command_names_what_is_wrong(tmp_path: Path, run_partita: Shell) -> None:
    (tmp_path / "file").touch()
    code, _, err = run_partita("watch", tmp_path / "file", "--no-browser")
    assert (code, err) == (
        1,
        f"error: {tmp_path / 'file'} is a file; name a run folder, or a folder that contains run folders\n",
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run_partita("watch", tmp_path, "--no-browser", "--port", port)
    assert code == 1
    assert err == f"error: port {port} on 127.0.0.1 cannot be used (Address already in use); choose another --port\n"


@pytest.mark.slow
def test_a_hundred_runs_are_answered_quickly(tmp_path: Path) -> None:
    for seed in range(100):
        write_run(tmp_path, "fedavg", seed, rounds=4)
    with serving(tmp_path) as server:
        assert len(state_of(server)["runs"]) == 100
        begin, cpu = time.perf_counter(), time.process_time()
        state_of(server)
        assert time.process_time() - cpu < 1
        assert time.perf_counter() - begin < 10
