"""What carriage by Flower costs over the embedded engine, with the server and all sites on this machine (Linux).

Time a round, bytes through the sites' network, and memory, for payloads of several sizes; then where the time of one
site's message goes; then what partita itself does with a message, in CPU time, which depends little on other work. Both
engines must end with the same tensors, or the comparison is void.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from environment import environment
from torch import Tensor
from torch.nn import functional

from partita import models
from partita.core.model import Model, Output
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.tensors import Tensors
from partita.engines.autotune import configure_backends
from partita.engines.flower import messages
from partita.engines.flower.client import train
from partita.engines.flower.fingerprints import Fingerprints
from partita.engines.flower.local_deployment import LocalDeployment, deploy_locally
from partita.experiment import flower_app, run_folder, runner
from partita.experiment.config import load
from partita.tasks import TaskInfo

ROUNDS = 4  # the first also asks for names and the last also evaluates: those between are measured
MESSAGES = 5  # whose CPU time is measured
CONFIG = """
rounds = {rounds}
method = {{name = "fedavg"}}
model = {model}
[training]
optimizer = "sgd"
lr = 0.1
steps = 1
[data]
name = "synthetic"
test_examples = 20
[split]
name = "iid"
clients = {clients}
[evaluate]
personal_every = 1000
max_clients = 1
drift = false
[checkpoint]
every = 1000
[engine]
clients_per_block = 1
threads = 1
"""
SECURE = "[secure_aggregation]\n"
OWN_MODEL = """from partita import models

models.INDEX["payload"] = "flower:payload"
"""
# A site that notes when it did what.
NOTES = """import json
import os
import time
from pathlib import Path

begun = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
notes = {"process": begun, "Flower": time.clock_gettime(time.CLOCK_BOOTTIME)}


def note(what):
    notes[what] = time.clock_gettime(time.CLOCK_BOOTTIME)


import torch

note("torch")
from partita.experiment import builder, flower_app

note("partita")
build = builder.build


def noted(config, *more, **named):
    models.find_function(models.INDEX, config.model["name"], "model")
    note("the model's library")
    built = build(config, *more, **named)
    note("data and model")
    return built


from partita import models
from partita.engines.flower import client as site

flower_app.build, train = noted, site.train


def learn(*given, **named):
    content = train(*given, **named)
    note("training")
    with open(os.environ["NOTES"], "a") as file:
        print(json.dumps(notes), file=file)
    return content


site.train = learn
app = flower_app.client(Path(__file__).with_name("experiment.toml"))
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--megabytes", type=float, nargs="*", default=[1.0, 100.0], help="what a client gets and sends"
    )
    options.add_argument(
        "--memory", action="store_true", help="measure it; looking takes time, so give no heed to times"
    )
    options.add_argument("--clients", type=int, default=10)
    options.add_argument("--secure", action="store_true", help="measure secure aggregation too; at least 3 clients")
    options.add_argument(
        "--parts", action=argparse.BooleanOptionalAction, default=True, help="a message's time by part"
    )
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    # Processes of Flower find the payload's model in this file.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    os.environ["OMP_NUM_THREADS"] = "1"
    models.INDEX["payload"] = "flower:payload"
    about = environment(
        torch.device("cpu"),
        configure_backends("auto"),
        f"{chosen.clients} clients x 1 step of SGD, server and sites on {os.cpu_count()} cores; "
        f"mean of rounds 1 to {ROUNDS - 2}",
    )
    about["load before"] = round(os.getloadavg()[0], 1)
    results = [
        measure(megabytes, chosen.clients, chosen.memory, secure)
        for megabytes in chosen.megabytes
        for secure in ([False, True] if chosen.secure else [False])
    ]
    apart = [parts()] if chosen.parts else []
    own = [own_part(megabytes) for megabytes in chosen.megabytes]
    print(f"{about['work']}; {about['device']}, torch {about['torch']}, load {about['load before']} before")
    for row in [*results, *apart, *own]:
        print()
        for what, value in row.items():
            print(f"{what:34} {value:,}" if type(value) is int else f"{what:34} {value}")
    if chosen.out:
        found = {
            "environment": about,
            "results": results,
            "seconds of a message by part": apart,
            "CPU seconds of partita in a message": own,
        }
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")


def measure(megabytes: float, clients: int, look: bool, secure: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder, gate = Path(name), Gate()
        app = write_app(
            folder, clients, f'{{name = "payload", megabytes = {megabytes}}}', OWN_MODEL, SECURE if secure else ""
        )
        here = list(runner.start(load(folder / "experiment.toml"), folder / "here"))
        names = [f"c{number}" for number in range(clients)]
        with deploy_locally(
            names, folder / "logs", ["partita.experiment.flower_app", "flower"], gate=gate
        ) as federation:
            passed, peaks = watch(federation, app, folder / "there", gate, look)
        there = [json.loads(line) for line in (folder / "there" / run_folder.ROWS).read_text().splitlines()]
        ends = [run_folder.finished(folder / side) for side in ("here", "there")]
    if not ends[0] or not ends[1] or ends[0]["digest"] != ends[1]["digest"]:
        raise SystemExit(f"{megabytes} MB: the engines do not end with the same tensors; the comparison is void")
    between = range(1, ROUNDS - 1)
    embedded, flower = (statistics.mean(rows[number]["seconds"] for number in between) for rows in (here, there))
    counted = sum(sum(here[number]["bytes"].values()) for number in between) // len(between)
    network = (passed[ROUNDS - 2] - passed[0]) // len(between)
    row = {
        "megabytes": megabytes,
        "clients": clients,
        "secure aggregation": secure,
        "seconds, embedded": round(embedded, 3),
        "seconds, Flower": round(flower, 2),
        "seconds, overhead": round(flower - embedded, 2),
        "bytes, counted": counted,
        "bytes, through the network": network,
        "bytes, more in per cent": round(100 * (network / counted - 1), 3),
    }
    if look:
        row["peak GB, a site"] = round(max(peaks[client] for client in names) / 1e9, 2)
        row["peak GB, SuperLink and server"] = round(peaks["server"] / 1e9, 2)
    return row


def write_app(folder: Path, clients: int, model: str, own: str = "", more: str = "") -> Path:
    (folder / "experiment.toml").write_text(CONFIG.format(rounds=ROUNDS, clients=clients, model=model) + more)
    app = flower_app.init(folder / "app", folder / "experiment.toml")
    (app / "federation" / "__init__.py").write_text(own)
    return app


def settings(folder: Path) -> str:
    return f'deadline=3600.0 folder="{folder}"'


def watch(
    federation: LocalDeployment, app: Path, folder: Path, gate: Gate, look: bool
) -> tuple[list[int], dict[str, int]]:
    """(bytes that had passed when each round ended, the most memory of each site and of the server)"""
    running = threading.Thread(target=federation.run, args=(app, settings(folder)), daemon=True)
    running.start()
    passed: list[int] = []
    peaks: dict[str, int] = {}
    rows = folder / run_folder.ROWS
    while running.is_alive():
        done = rows.read_bytes().count(b"\n") if rows.exists() else 0
        passed += [gate.passed] * (done - len(passed))
        for place, held in memory(federation).items() if look else ():
            peaks[place] = max(held, peaks.get(place, 0))
        time.sleep(0.1)
    return passed + [gate.passed] * (ROUNDS - len(passed)), peaks


def memory(federation: LocalDeployment) -> dict[str, int]:
    """Bytes in use by place. A page that several processes share counts once, a part of it for each."""
    ours = f"FLWR_HOME={federation.environment['FLWR_HOME']}".encode()
    places = {node.pid: client for client, node in federation.nodes.items()}
    held: dict[str, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if ours not in (process / "environ").read_bytes():
                continue
            place = places.get(os.getpgid(int(process.name)), "server")
            for line in (process / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    held[place] = held.get(place, 0) + 1024 * int(line.split()[1])
        except OSError:
            pass  # it has ended
    return held


@dataclass
class Gate:
    """Stands before the SuperLink and counts what passes."""

    passed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, port: int) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(listener, port), daemon=True).start()
        return int(listener.getsockname()[1])

    def _serve(self, listener: socket.socket, port: int) -> None:
        while True:
            site, _ = listener.accept()
            link = socket.create_connection(("127.0.0.1", port))
            for source, sink in ((site, link), (link, site)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        """By the kernel, without a copy, so that counting costs little."""
        out, into = os.pipe()
        try:
            while count := os.splice(source.fileno(), into, 2**20):
                with self.lock:
                    self.passed += count
                while count:
                    count -= os.splice(out, sink.fileno(), count)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one side is gone, and the other will notice
        finally:
            os.close(out)
            os.close(into)


def parts() -> dict[str, Any]:
    """Seconds of one site's messages, of a small ViT of transformers; the mean of the rounds between."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        app = write_app(folder, 1, '{name = "vit"}')
        (app / "federation" / "client_app.py").write_text(NOTES)
        os.environ["NOTES"] = str(folder / "notes")
        with deploy_locally(["c0"], folder / "logs", flower_app.modules(app)) as federation:
            federation.run(app, settings(folder / "there"))
        rows = [json.loads(line) for line in (folder / "there" / run_folder.ROWS).read_text().splitlines()]
        notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    between = range(1, ROUNDS - 1)
    whole = statistics.mean(rows[number]["seconds"] for number in between)
    found: dict[str, Any] = {}
    steps = list(notes[0])
    for before, step in pairwise(steps):
        found[step] = round(statistics.mean(notes[number][step] - notes[number][before] for number in between), 2)
    return {
        **found,
        "waiting, sending, the server": round(whole - sum(found.values()), 2),
        "the round": round(whole, 2),
    }


def own_part(megabytes: float) -> dict[str, Any]:
    """CPU seconds of what partita does with one client's messages of a round; the median of some rounds."""
    times: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        times.setdefault(what, []).append(time.process_time() - start)
        return result

    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), f'{{name = "payload", megabytes = {megabytes}}}'
        file = folder / "experiment.toml"
        file.write_text(CONFIG.format(rounds=MESSAGES, clients=2, model=model))
        both = flower_app.site_settings(file, "c0", [], [])
        for _ in range(MESSAGES):
            site, experiment = timed("site: data and model", lambda: flower_app.open_site("c0", folder, *both))
        server = initial_server(experiment.run, experiment.model)
        for number in range(MESSAGES):
            server = replace(server, params={name: value + 0.001 for name, value in server.params.items()})
            job, _ = make_job(experiment.run, experiment.model, server, number, "c0")
            seal = timed("server: fingerprint", lambda job=job: Fingerprints()(job.params))
            encode = partial(messages.encode_job, job, seal, "session", site.config, "", number, 0)
            content = timed("server: pack", encode)
            reply = timed("site: answer, with training", partial(train, site, content))
            answer = messages.with_job_id(reply, content)
            timed("server: unpack", partial(messages.decode_update, answer, messages.decode_job_id(answer), 2**40))
    return {"megabytes": megabytes, **{what: round(statistics.median(each), 3) for what, each in times.items()}}


class Payload(Model):
    """So many bytes that are trained and sent, and hardly anything to compute.

    They are random, so are their gradients, and every step changes all of them: of what comes twice, Flower sends one.
    """

    name = "payload"

    def __init__(self, task: TaskInfo, key: Key, megabytes: float) -> None:
        self.tags = {"head.weight": frozenset({"head"}), "table": frozenset({"embedding"})}
        self.initial = {
            "head.weight": 0.1
            * torch.randn(len(task.classes), task.channels * task.size**2, generator=key.generator()),
            "table": torch.randn(int(megabytes * 250_000), generator=key.generator()),
        }

    def to(self, device: torch.device) -> None:
        pass

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        features, squares = inputs["pixel_values"].flatten(1), params["table"].square()
        factor = 1 + (squares - squares.detach()).sum()  # 1, with gradients that do not vanish in a long table
        return Output(functional.linear(features, params["head.weight"]) * factor, features)

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return functional.cross_entropy(out.logits, targets, reduction="none")


def payload(task: TaskInfo, key: Key, megabytes: float = 1.0) -> Payload:
    return Payload(task, key, megabytes)


if __name__ == "__main__":
    main()
