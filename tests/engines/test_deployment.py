"""Flower with real processes: a SuperLink and SuperNodes on this machine. No test depends on timing."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers import SMALL_TASK, final_params, max_difference, server_in

from partita import models
from partita.core import tensors
from partita.core.rounds import rounds
from partita.engines.availability import Availability
from partita.engines.flower.local_deployment import (
    QUIET,
    LocalDeployment,
    current_environment,
    deploy_locally,
    find_executable,
    free_ports,
    terminate,
)
from partita.engines.secure import SecureEngine
from partita.engines.simulation import SimulationEngine
from partita.experiment import builder, flower_app, run_folder, runner
from partita.experiment.config import load
from partita.record import file_names
from partita.storage.client_store import DiskStore
from partita.storage.safe_text import label_folder

LONG = 300.0  # seconds; nothing takes this long, even on a busy machine

CONFIG = (
    """
rounds = 2
method = {{name = "{method}"{options}}}
[model]
name = "plain"
[federation]
min_updates = 2
[engine]
clients_per_block = 1
"""
    + SMALL_TASK
    + "test_examples = 20\nclasses = 3\n"
)

# A model of the tests, so that no process has to import transformers.
OWN_MODEL = """from partita import models

models.INDEX["plain"] = "plain_model:plain"
"""

# A site that starts its first job, touches a file, and hangs.
HANGING_SITE = """import os
import time
from pathlib import Path

from flwr.clientapp import ClientApp

from partita.experiment.flower_app import client

honest = client(Path(__file__).with_name("experiment.toml"))
app = ClientApp()
app.query()(honest)


@app.train()
def learn(message, context):
    if context.node_config["client"] == "c1":
        Path(os.environ["BEGUN"]).touch()
        time.sleep(3600)
    return honest(message, context)


app.evaluate()(honest)
"""


# The same for a run with secure aggregation: it hangs after it has shared its keys, before it trains.
HANGING_SECURE_SITE = (
    HANGING_SITE.replace("@app.train()", '@app.train("mask")')
    + """
for stage in ("advertise", "share_keys", "check", "confirm", "unmask"):
    app.train(stage)(honest)
"""
)


@pytest.fixture(autouse=True)
def register_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the model in this process; OWN_MODEL does so in the started ones."""
    monkeypatch.setitem(models.INDEX, "plain", "plain_model:plain")


@pytest.fixture(scope="module", autouse=True)
def tests_on_python_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=os.pathsep)
        yield


def write_app(
    folder: Path,
    method: str = "fedavg",
    options: str = "",
    client: str | None = None,
    tables: Mapping[str, str] | None = None,
) -> Path:
    config = CONFIG.format(method=method, options=options)
    for old, new in (tables or {}).items():
        config = config.replace(old, new)
    (folder / "experiment.toml").write_text(config)
    app = flower_app.init(folder / "app", folder / "experiment.toml")
    (app / "federation" / "__init__.py").write_text(OWN_MODEL)
    if client:
        (app / "federation" / "client_app.py").write_text(client)
    return app


def wait_until(what: str, happened: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < until, f"never happened: {what}"
        time.sleep(0.1)


def has_ended(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_run_survives_a_site_killed_during_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    app = write_app(tmp_path, client=HANGING_SITE)
    with deploy_locally(["c0", "c1", "c2"], tmp_path / "logs", ["partita.experiment.flower_app"]) as federation:
        settings = f'deadline={LONG} patience=1.0 folder="{tmp_path / "run"}"'
        running = threading.Thread(target=federation.run, args=(app, settings))
        running.start()
        wait_until("c1 trains", lambda: (tmp_path / "begun").exists() or not running.is_alive())
        assert running.is_alive(), "the run ended too early"
        os.killpg(federation.nodes["c1"].pid, signal.SIGKILL)
        running.join(LONG)
        groups = [federation.link.pid, *(node.pid for node in federation.nodes.values())]
    result = run_folder.finished(tmp_path / "run")
    assert result, "the run did not finish"
    rows = [json.loads(line) for line in (tmp_path / "run" / file_names.ROWS).read_text().splitlines()]
    assert [(sorted(row["cohort"]), list(row["lost"])) for row in rows] == [
        (["c0", "c1", "c2"], ["c1"]),
        (["c0", "c2"], []),  # a silent client is not asked again until it responds
    ]
    built = builder.build(load(tmp_path / "experiment.toml"))
    away = Availability(trace={(0, "c1"): 0.0, (1, "c1"): 0.0})
    played = list(
        rounds(built.run, built.model, SimulationEngine(built.run, built.model, built.federation, availability=away))
    )
    there = server_in(tmp_path / "run")
    # The cohort order, and so the order of the sum, depends on the number of available clients.
    assert max_difference(final_params(played), there.params) < 1e-6
    wait_until("all processes have ended", lambda: all(has_ended(group) for group in groups))


@pytest.mark.slow
def test_masks_of_a_site_killed_before_it_sent_its_update_are_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    secure = {
        "rounds = 2": "rounds = 1",
        "[engine]": "[secure_aggregation]\nthreshold = 0.5\nmin_clients = 2\ncollusion = 0.0\n[engine]",
    }
    app = write_app(tmp_path, client=HANGING_SECURE_SITE, tables=secure)
    with deploy_locally(["c0", "c1", "c2"], tmp_path / "logs", ["partita.experiment.flower_app"]) as federation:
        settings = f'deadline={LONG} patience=1.0 folder="{tmp_path / "run"}"'
        running = threading.Thread(target=federation.run, args=(app, settings))
        running.start()
        wait_until("c1 has shared its keys", lambda: (tmp_path / "begun").exists() or not running.is_alive())
        assert running.is_alive(), "the run ended too early"
        os.killpg(federation.nodes["c1"].pid, signal.SIGKILL)
        running.join(LONG)
    assert run_folder.finished(tmp_path / "run"), "the run did not finish"
    rows = [json.loads(line) for line in (tmp_path / "run" / file_names.ROWS).read_text().splitlines()]
    assert [(sorted(row["cohort"]), list(row["lost"])) for row in rows] == [(["c0", "c1", "c2"], ["c1"])]
    assert [(row["secure"]["clients"], row["secure"]["recovered"]) for row in rows] == [(2, 1)]
    built = builder.build(load(tmp_path / "experiment.toml"))
    away = Availability(trace={(0, "c1"): 0.0})
    inner = SimulationEngine(built.run, built.model, built.federation, availability=away)
    played = list(rounds(built.run, built.model, SecureEngine(inner, built.run, built.model)))
    assert max_difference(final_params(played), server_in(tmp_path / "run").params) < 1e-6


# ---- certificates and keys


def openssl(words: str, folder: Path) -> None:
    subprocess.run(["openssl", *shlex.split(words)], cwd=folder, check=True, capture_output=True)


def certificates(folder: Path) -> None:
    """Certificates and keys as described in the guide."""
    openssl("ecparam -name prime256v1 -genkey -noout -out ca.key", folder)
    openssl("req -x509 -new -key ca.key -sha256 -days 2 -subj /CN=group -out ca.crt", folder)
    openssl("ecparam -name prime256v1 -genkey -noout -out server.key", folder)
    openssl("req -new -key server.key -subj /CN=server -out server.csr", folder)
    (folder / "san.ext").write_text("subjectAltName=IP:127.0.0.1\n")
    sign = "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -sha256 -extfile san.ext"
    openssl(f"{sign} -out server.pem", folder)
    for name in ("known", "stranger"):
        subprocess.run(["ssh-keygen", *shlex.split(f"-q -t ecdsa -b 384 -N '' -f {name}")], cwd=folder, check=True)


@pytest.mark.slow
def test_node_authentication_refuses_an_unknown_node(tmp_path: Path) -> None:
    certificates(tmp_path)
    port, *others = free_ports(3)
    home = tmp_path / "flwr"
    home.mkdir()
    address = f'address = "127.0.0.1:{port}"\nroot-certificates = "{tmp_path / "ca.crt"}"\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "group"\n[superlink.group]\n{address}')
    started: list[subprocess.Popen[bytes]] = []

    def launch(name: str, command: str, words: str) -> subprocess.Popen[bytes]:
        # No app runs here, so no app process is started.
        words = f"{find_executable(command, environment)} {words} --isolation process"
        with (tmp_path / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                shlex.split(words), cwd=tmp_path, env=environment, stdout=log, stderr=log, process_group=0
            )
        started.append(process)
        return process

    def said(name: str, text: str) -> bool:
        return text in (tmp_path / f"{name}.log").read_text(errors="replace")

    environment = {**current_environment(), **QUIET, "FLWR_HOME": str(home)}
    with ExitStack() as stack:
        stack.callback(terminate, started)
        tls = "--ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key"
        launch("link", "flower-superlink", f"{tls} --enable-supernode-auth --port {port}")
        wait_until("the SuperLink is up", lambda: said("link", "Application startup complete"))
        register = [find_executable("flwr", environment), "supernode", "register", str(tmp_path / "known.pub"), "group"]
        subprocess.run(register, env=environment, check=True, capture_output=True)
        for name, own in zip(("known", "stranger"), others, strict=True):
            key = f"--root-certificates ca.crt --auth-supernode-private-key {name}"
            launch(name, "flower-supernode", f"{key} --superlink 127.0.0.1:{port} --port {own}")
        wait_until("the known node is taken in", lambda: said("known", "SuperNode ID:"))
        assert started[-1].wait(LONG) != 0, "the unknown SuperNode exits"
        assert not said("stranger", "SuperNode ID:")
        assert started[1].poll() is None, "the known SuperNode keeps running"


# ---- equality with a simulation


# Method -> its options, and replacements in the config.
PRIVATE = """
[privacy]
noise = 1.0
"""
# State at the sites and the server, a secret and choices of each site, and a model that every process extends itself.
# test_flower.py compares every method over a grid within one process.
METHOD_SETTINGS: dict[str, tuple[str, dict[str, str]]] = {
    "scaffold": ("", {}),
    "safl": (", k = 1, noise = 2.0, probe = 0.5", {"[engine]": f"{PRIVATE}repeatable = true\n[engine]"}),
    "ditto": ("", {}),
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    with deploy_locally(
        ["c0", "c1", "c2"], tmp_path_factory.mktemp("federation"), ["partita.experiment.flower_app"]
    ) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_flower_deployment_gives_the_tensors_of_a_simulation(
    method: str, federation: LocalDeployment, tmp_path: Path
) -> None:
    options, tables = METHOD_SETTINGS[method]
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    (tmp_path / "secret").chmod(0o600)
    tables = {old: new.replace("SECRET", str(tmp_path / "secret")) for old, new in tables.items()}
    app = write_app(tmp_path, method, options, tables=tables)
    federation.run(app, f'deadline={LONG} folder="{tmp_path / "there"}"')
    config = load(tmp_path / "experiment.toml")
    for _ in runner.start(config, tmp_path / "here"):
        pass
    ends = [server_in(tmp_path / side) for side in ("here", "there")]
    assert tensors.equal(ends[0].params, ends[1].params)
    assert ends[0].versions == ends[1].versions
    for slot, part in ends[0].state.items():
        assert tensors.equal(part, ends[1].state[slot])
    for client in ("c0", "c1", "c2"):
        here = DiskStore(tmp_path / "here" / "clients").load(client, config.rounds)
        [site] = (federation.folder / "sites").glob(f"{label_folder(config.label)}-*/{client}")
        there = DiskStore(site / "states").load(client, config.rounds)
        for slot, part in {"personal": here.personal, **here.memory}.items():
            assert tensors.equal(part, {"personal": there.personal, **there.memory}[slot])
