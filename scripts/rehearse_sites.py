"""Play a group of three sites and a server on this machine, from `partita sites init` to the result.

Every step is a command that the parties would type, under TLS with node keys, policies, logs and the doctor. In
between, the server and later a site are killed with SIGKILL in the middle of a round. It prints the transcript, and
ends with 1 if a step fails or something is lost. It needs openssl, ssh-keygen and nginx.

    python scripts/rehearse_sites.py --folder /tmp/rehearsal
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

SITES = ("north", "south", "east")
ROUNDS = 6
CONNECTED = "SuperNode ID:"  # in the output of a SuperNode
TOOLS = ("openssl", "ssh-keygen", "nginx")
EXPERIMENT = """
label = "wards"
rounds = {rounds}

[method]
name = "fedper"
finetune = 0

[data]
name = "images"
path = "{folder}/data/server"
channels = 1

[split]
name = "site"
sites = ["north", "south", "east"]

[model]
name = "vit"
layers = 2
width = 32
patch = 2

[training]
epochs = 3

[federation]
min_updates = 2
skip_failed_clients = true

[evaluate]
personal_every = 1
"""
GROUP = """
name = "hospital group"
experiment = "experiment.toml"

[server]
address = "127.0.0.1:{port}"
data = "{folder}/data/server"
folder = "{folder}/parties/server"
"""
SITE = """
[[site]]
name = "{name}"
data = "{folder}/data/{name}"
ips = ["127.0.0.1"]
folder = "{folder}/parties/{name}"
"""


class Rehearsal:
    """The folder of a rehearsal, its processes and its transcript."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, time.monotonic()
        self.parties = folder / "parties"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.logs: list[IO[bytes]] = []
        programs = Path(sys.executable).parent
        self.environment = {**os.environ, "PATH": f"{programs}{os.pathsep}/usr/sbin{os.pathsep}{os.environ['PATH']}"}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def command(self, party: str, *words: str, status: int = 0) -> str:
        """Run a command in a party's folder, print its output, and check its exit status."""
        place = self.parties / party if party else self.folder
        self.say(f"{party or 'group'}$ {' '.join(words)}")
        done = subprocess.run(words, cwd=place, env=self.environment, capture_output=True, text=True)
        for line in (done.stdout + done.stderr).splitlines():
            print(f"             {line}")
        if done.returncode != status:
            raise SystemExit(f"{words[0]} ended with {done.returncode}, not {status}")
        return done.stdout

    def start(self, name: str, party: str, *words: str) -> None:
        """Start a program of a party in a process group of its own."""
        self.say(f"{party}$ {' '.join(words)} &")
        log = (self.folder / f"{name}.log").open("ab")
        self.logs.append(log)
        self.processes[name] = subprocess.Popen(
            words, cwd=self.parties / party, env=self.environment, stdout=log, stderr=log, process_group=0
        )

    def start_site(self, site: str) -> None:
        """Start a site, and wait until it is connected."""
        log = self.folder / f"{site}.log"
        before = log.read_text().count(CONNECTED) if log.exists() else 0
        self.start(site, site, "partita", "site", "run")
        self.wait_for(f"{site} is connected", lambda: log.read_text().count(CONNECTED) > before)

    def kill(self, name: str) -> None:
        """Kill a program and all that it started, as a power cut would."""
        process = self.processes.pop(name)
        self.say(f"kill -9 of {name}")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop_all(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        for log in self.logs:
            log.close()

    def wait_for(self, what: str, happened: Callable[[], object], seconds: float = 300.0) -> None:
        """Wait until something has happened."""
        end = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > end:
                raise SystemExit(f"{what} did not happen within {seconds:g} s")
            time.sleep(0.05)
        self.say(what)

    @property
    def run(self) -> Path:
        return self.parties / "server" / "state" / "runs" / "wards"

    def rows(self) -> list[dict[str, Any]]:
        path = self.run / "rows.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def left(self, site: str) -> list[dict[str, Any]]:
        """Return what left a site, by its log."""
        path = self.parties / site / "state" / "log.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["kind"] == "left"]


def write_data(folder: Path) -> None:
    """Give each site and the server a quarter of scikit-learn's digits, as image files."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / "data" / (*SITES, "server")[number % 4] / "train" / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).save(place / f"{number}.png")


def free_port() -> int:
    """Return a port that is free, and whose next one, which the SuperLink takes, is free too."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def set_up(group: Rehearsal, port: int) -> None:
    """Write the folders, and make keys and certificates as each party would."""
    write_data(group.folder)
    (group.folder / "experiment.toml").write_text(EXPERIMENT.format(rounds=ROUNDS, folder=group.folder))
    sites = "".join(SITE.format(name=name, folder=group.folder) for name in SITES)
    (group.folder / "group.toml").write_text(GROUP.format(port=port, folder=group.folder) + sites)
    group.command("", "partita", "sites", "init", "group.toml", "--out", "parties")
    group.command("server", "ca/make-ca.sh")
    group.command("server", "./make-keys.sh")
    group.command("server", "ca/sign.sh", "server.csr")
    group.command("server", "cp", "ca/ca.crt", "ca/server.pem", ".")
    for site in SITES:
        group.command(site, "./make-keys.sh")
        group.command(site, "cp", "../server/ca.crt", ".")
        group.command("server", "cp", f"../{site}/keys/{site}.pub", "sites/")


def start_server(group: Rehearsal, port: int) -> None:
    group.start("superlink", "server", "./start.sh")
    group.wait_for("the SuperLink listens", lambda: listens(port + 1), 60)


def rehearse(group: Rehearsal) -> None:
    port = free_port()
    set_up(group, port)
    start_server(group, port)
    group.start("proxy", "server", "./proxy.sh")
    group.wait_for("the proxy listens", lambda: listens(port), 60)
    group.command("server", "./register.sh")
    for site in SITES:
        group.command(site, "partita", "site", "plan")
        group.command(site, "partita", "site", "approve", "--yes", "--scores")
        group.command(site, "partita", "site", "doctor")
        group.command(site, "partita", "site", "describe", "--out", "described.json")
    described = [f"parties/{site}/described.json" for site in SITES]
    group.command("", "partita", "sites", "describe", *described)
    for site in SITES:
        group.start_site(site)
    group.start("run", "server", "./run.sh", "wards", "deadline=90.0")
    group.wait_for("two rounds are recorded", lambda: len(group.rows()) >= 2)
    before = len(group.left("north"))
    group.wait_for("a site has sent an update of the next round", lambda: len(group.left("north")) > before)
    group.kill("superlink")
    group.kill("run")
    kept = group.rows()
    start_server(group, port)
    group.start("run", "server", "./run.sh", "wards", "deadline=90.0")
    group.wait_for("the run goes on after the server's restart", lambda: len(group.rows()) > len(kept))
    if group.rows()[: len(kept)] != kept:
        raise SystemExit("rows from before the server's death have changed")
    before = len(group.left("south"))
    group.wait_for("south has sent an update", lambda: len(group.left("south")) > before)
    group.kill("south")
    group.start_site("south")
    group.wait_for("the run has finished", lambda: (group.run / "result.json").exists(), 900)
    check(group)
    group.command("server", "partita", "report", "state/runs/wards")


def check(group: Rehearsal) -> None:
    """Check that nothing was lost: all rounds are recorded, and each site's log holds what left, unbroken."""
    rows = group.rows()
    if [row["round"] for row in rows] != list(range(ROUNDS)):
        raise SystemExit(f"the rounds {[row['round'] for row in rows]} are recorded, not 0 to {ROUNDS - 1}")
    for row in rows:
        lost = "".join(f"; lost {client}: {reason}" for client, reason in row["lost"].items())
        group.say(f"round {row['round']}: {len(row['cohort']) - len(row['lost'])} sites answered{lost}")
    for site in SITES:
        group.command(site, "partita", "site", "log")
        group.command(site, "partita", "site", "log", "--verify")
        answered = {row["round"] for row in rows if site in row["cohort"] and site not in row["lost"]}
        if missing := answered - {line["round"] for line in group.left(site)}:
            raise SystemExit(f"the log of {site} has no line for the rounds {sorted(missing)}, which the server counts")
    for key in ("ca.key", "server.key"):
        if found := [path for site in SITES for path in (group.parties / site).rglob(key)]:
            raise SystemExit(f"{found[0]} is the server's, and in a site's folder")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to play; kept afterwards. Default: a temporary folder")
    given = parser.parse_args().folder
    if missing := [tool for tool in TOOLS if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin")]:
        print(f"this needs {', '.join(missing)}; install it first", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as temporary:
        folder = (given or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        group = Rehearsal(folder)
        try:
            rehearse(group)
        finally:
            group.stop_all()
    group.say("done: nothing was lost, and every log verifies")
    return 0


if __name__ == "__main__":
    sys.exit(main())
