"""`partita site run` with real processes: a SuperLink with TLS and node keys, and an app that attacks its sites."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from helpers import max_difference, server_in
from site_fixtures import SiteKit, write_site

from partita.core.rounds import rounds
from partita.engines.availability import Availability
from partita.engines.flower.local_deployment import QUIET, current_environment, find_executable, free_ports, terminate
from partita.engines.simulation import SimulationEngine
from partita.experiment import builder, flower_app, run_folder
from partita.experiment.config import load
from partita.record import file_names
from partita.site.answering import REASON

LONG = 300.0  # seconds; nothing takes this long, even on a busy machine

# It notes where it was imported, and then behaves, so that the run goes on.
HOSTILE_APP = """import os
from pathlib import Path

with open({notes!r}, "a") as file:
    file.write(os.environ["FLWR_HOME"] + "\\n")

from partita.experiment.flower_app import client

app = client(Path(__file__).with_name("experiment.toml"))
"""


def wait_until(what: str, happened: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < until, f"never happened: {what}"
        time.sleep(0.1)


def certificates(folder: Path) -> None:
    """Certificates as in the guide to Flower."""
    san = "subjectAltName=IP:127.0.0.1"
    for words in (
        "ecparam -name prime256v1 -genkey -noout -out ca.key",
        "req -x509 -new -key ca.key -sha256 -days 2 -subj /CN=group -out ca.crt",
        "ecparam -name prime256v1 -genkey -noout -out server.key",
        f"req -x509 -key server.key -CA ca.crt -CAkey ca.key -days 2 -subj /CN=server -addext {san} -out server.pem",
    ):
        subprocess.run(["openssl", *shlex.split(words)], cwd=folder, check=True, capture_output=True)


def node_key(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(path)], check=True)


def task_port(kit: SiteKit) -> int:
    """The port on which the site's SuperNode gives tasks, from its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        words = (process / "cmdline").read_bytes().decode().split("\0") if (process / "cmdline").exists() else []
        if str(kit.site.node_key) in words and "--port" in words:
            return int(words[words.index("--port") + 1])
    raise AssertionError("the site's SuperNode does not run")


@pytest.mark.slow
def test_app_of_the_server_runs_under_flower_and_never_at_a_site(tmp_path: Path) -> None:
    kit, notes, plain = write_site(tmp_path / "c1"), tmp_path / "notes", tmp_path / "plain"
    app = flower_app.init(tmp_path / "app", kit.site.experiment_file, clients=2)
    (app / "federation" / "client_app.py").write_text(HOSTILE_APP.format(notes=str(notes)))
    certificates(tmp_path)
    (kit.folder / "ca.crt").write_bytes((tmp_path / "ca.crt").read_bytes())
    port, plain_port = free_ports(2)
    text = (kit.folder / "site.toml").read_text()
    (kit.folder / "site.toml").write_text(text.replace(":8765", f":{port}"))
    for key in (kit.site.node_key, tmp_path / "plain.key"):
        node_key(key)
    home = tmp_path / "flwr"
    home.mkdir()
    address = f'address = "127.0.0.1:{port}"\nroot-certificates = "{tmp_path / "ca.crt"}"\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "group"\n[superlink.group]\n{address}')
    started: list[subprocess.Popen[bytes]] = []

    def said(name: str, text: str) -> bool:
        return text in (tmp_path / f"{name}.log").read_text(errors="replace")

    environment = {"OMP_NUM_THREADS": "1", **current_environment(), **QUIET, "FLWR_HOME": str(home)}
    with ExitStack() as stack:
        stack.callback(terminate, started)

        def launch(name: str, command: list[str], **more: str) -> subprocess.Popen[bytes]:
            with (tmp_path / f"{name}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command, cwd=tmp_path, env={**environment, **more}, stdout=log, stderr=log, process_group=0
                    )
                )
            return started[-1]

        def program(name: str, words: str) -> list[str]:
            return [find_executable(name, environment), *shlex.split(words)]

        tls = "--ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key"
        launch("link", program("flower-superlink", f"{tls} --enable-supernode-auth --port {port}"))
        wait_until("the SuperLink is up", lambda: said("link", "Application startup complete"))
        for name, key in (("c1", kit.site.node_key), ("c0", tmp_path / "plain.key")):
            words = f"supernode register {key}.pub group --name {name}"
            subprocess.run(program("flwr", words), env=environment, check=True, capture_output=True)
        # Only now: a SuperNode with an unknown key stops at once.
        site = launch("site", [sys.executable, "-m", "partita", "site", "run", str(kit.folder)])
        node = f"--root-certificates ca.crt --auth-supernode-private-key plain.key --superlink 127.0.0.1:{port}"
        own = f'--port {plain_port} --node-config \'client="c0" folder="{plain}"\''
        launch("plain", program("flower-supernode", f"{node} {own}"), FLWR_HOME=str(plain))

        def run_app(folder: str) -> None:
            settings = f'deadline={LONG} folder="{tmp_path / folder}"'
            words = f"run app group --stream --run-config {shlex.quote(settings)}"
            ran = subprocess.run(
                program("flwr", words), cwd=tmp_path, env=environment, capture_output=True, timeout=LONG
            )
            assert run_folder.finished(tmp_path / folder), ran.stdout.decode() + ran.stderr.decode()
            assert site.poll() is None

        run_app("run")
        kit.allow('[leave]\nroles = ["mlp"]\n')  # a person has changed their mind, and the server asks all the same
        run_app("more")
        # Another program of this machine cannot take the site's tasks.
        client = RuntimeHttpClient.from_server_address(
            f"127.0.0.1:{task_port(kit)}", True, None, [RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")]
        )
        stack.callback(client.close)
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-clientapp"]))
    homes = set(notes.read_text().splitlines())
    assert homes == {str(plain)}, "the attack works under flower-supernode, and only there"
    assert not list(kit.folder.rglob("client_app.py")), "the app was not unpacked"
    rows = [json.loads(line) for line in (tmp_path / "run" / file_names.ROWS).read_text().splitlines()]
    assert [(sorted(row["cohort"]), row["lost"]) for row in rows] == [(["c0", "c1"], {})] * 4
    lines = kit.log.lines()
    kinds = [line["kind"] for line in lines]
    assert kinds == ["started", "name", *["left"] * 4, "name", *["refused"] * 4, "stopped"]
    assert len({line["app"] for line in lines[1:-1]}) == 1
    assert all("[leave] does not allow" in line["reason"] for line in lines if line["kind"] == "refused")
    lost = [json.loads(line)["lost"] for line in (tmp_path / "more" / file_names.ROWS).read_text().splitlines()]
    assert lost == [{"c1": REASON}] * 4, "the server is told nothing but that"
    assert "The policy covers all." in (tmp_path / "site.log").read_text()
    built = builder.build(load(kit.site.experiment_file))
    away = Availability(trace={(number, "c2"): 0.0 for number in range(4)})
    *_, last = rounds(
        built.run, built.model, SimulationEngine(built.run, built.model, built.federation, availability=away)
    )
    assert max_difference(last.server.params, server_in(tmp_path / "run").params) < 1e-6


@pytest.mark.slow
def test_site_that_its_policy_refuses_does_not_start(tmp_path: Path) -> None:
    kit = write_site(tmp_path / "c1")
    kit.allow(approve=False)
    node_key(kit.site.node_key)
    (kit.folder / "ca.crt").touch()
    ended = subprocess.run(
        [sys.executable, "-m", "partita", "site", "run", str(kit.folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert ended.returncode == 1
    assert "REFUSED: experiments does not list it" in ended.stdout
    assert "the site does not start: experiment: experiments does not list it" in ended.stderr
    assert kit.kinds() == ["started", "refused"]
