"""A site that is away for a day, a server that restarts, and a site whose data changes: each has a way back."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fixtures import CPU, THREE, FakeGrid, VirtualClock, flower_engine, make_grid, through_bytes
from flower_fixtures import clock as clock
from flower_fixtures import task_identity as task_identity
from flwr.app import Context, Message, RecordDict
from helpers import SMALL_TASK, SMALL_VIT, files_in, server_in, toy_model, toy_run

from partita.core import tensors
from partita.core.dp_settings import PrivacySettings
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job, rounds
from partita.data.digest import examples_digest
from partita.data.task import Subset, Table
from partita.engines.availability import Availability
from partita.engines.flower import data_record, messages
from partita.engines.flower.client import client_app
from partita.engines.flower.fingerprints import Fingerprints
from partita.engines.flower.site import Site
from partita.evaluation import ACCURACY
from partita.experiment import flower_app, runner
from partita.experiment.config import load
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.storage.client_store import DiskStore

DAY = 24 * 3600.0


# ---- a client that does not answer for a day


@pytest.mark.slow
def test_client_that_is_away_for_a_day_continues_where_it_was(tmp_path: Path, clock: VirtualClock) -> None:
    """It is lost once, asked nothing while it is away, and keeps its head; the others go on."""
    model, run = toy_model(), toy_run(build("fedper", {"finetune": 0}), 6)
    grid = make_grid(run, model, THREE, tmp_path)
    away, cohorts, head = grid.nodes[11], [], {}
    for each in rounds(run, model, flower_engine(run, model, grid, THREE.clients, deadline=3600.0, poll=60.0)):
        cohorts.append((sorted(each.cohort), [lost.client for lost in each.lost]))
        if each.number == 0:
            head = DiskStore(tmp_path / "c1" / "states", CPU).load("c1", 1).personal
            grid.nodes[11] = lambda message: None
        if each.number == 1:  # by now Flower has noticed
            del grid.nodes[11]
        if each.number == 3:
            clock.now += DAY
            grid.nodes[11] = away
    everyone, others = ["c0", "c1", "c2"], ["c0", "c2"]
    assert cohorts == [(everyone, []), (everyone, ["c1"]), *[(others, [])] * 2, *[(everyone, [])] * 2]
    assert head, "it has a head of its own"
    states = DiskStore(tmp_path / "c1" / "states", CPU)
    assert tensors.equal(states.load("c1", 4).personal, head), "the rounds without it did not change its head"
    assert not tensors.equal(states.load("c1", 6).personal, head), "it trained again after its return"


# ---- a server that restarts

CONFIG = (
    """
rounds = 4
[method]
name = "fedper"
finetune = 0
[federation]
min_updates = 2
skip_failed_clients = true
[engine]
clients_per_block = 1
"""
    + SMALL_TASK
    + "test_examples = 20"
    + SMALL_VIT
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "experiment.toml").write_text(CONFIG)
    return tmp_path / "app" / "experiment.toml"


def run_settings(folder: Path, *changes: str) -> dict[str, Any]:
    return {"folder": str(folder), "deadline": 60.0, "clients": 2, "set": shlex.join(changes)}


def sites(config: Path, folder: Path, settings: dict[str, Any], nodes: dict[str, dict[str, Any]]) -> FakeGrid:
    """Sites whose node config is read at every message, as if it had been changed and the site restarted."""

    def answer(name: str) -> Any:
        def reply(message: Message) -> Message:
            own = {"client": name, "folder": str(folder), **nodes[name]}
            return flower_app.client(config)(message, Context(1, 1, own, RecordDict(), settings))

        return reply

    return FakeGrid({node: answer(name) for node, name in enumerate(nodes)})


@pytest.mark.slow
def test_server_that_dies_after_it_has_asked_continues_with_the_same_result(config: Path, tmp_path: Path) -> None:
    """The sites trained the round that the server lost, and train it again for the new session."""
    for _ in runner.start(load(config), tmp_path / "here"):
        pass
    settings = run_settings(tmp_path / "there")
    grid = sites(config, tmp_path / "sites", settings, {"c0": {}, "c1": {}, "c2": {}})
    served = flower_app.serve(grid, load(config), settings, "1")
    next(served)

    def dies(reply: Message) -> None:
        if reply.metadata.message_type == "train":
            raise ConnectionError("killed")

    grid.fetching = dies
    with pytest.raises(ConnectionError):
        next(served)
    grid.fetching = lambda reply: None
    for _ in flower_app.serve(grid, load(config), settings, "2"):
        pass
    ends = [server_in(tmp_path / side).params for side in ("here", "there")]
    assert tensors.equal(*ends)


# ---- a site that changes its data


def serve(config: Path, folder: Path, nodes: dict[str, dict[str, Any]], *changes: str) -> Iterator[dict[str, Any]]:
    split = "split={name='site', sites=['c0', 'c1', 'c2']}"
    settings = run_settings(folder / "run", split, *changes)
    grid = sites(config, folder / "sites", settings, nodes)
    return flower_app.serve(grid, load(config, [split, *changes]), settings, "1")


def data_files(folder: Path) -> list[Path]:
    return sorted((folder / "sites").rglob(data_record.FILE))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the number of examples")
@pytest.mark.parametrize("way_back", ["restored", "accepted"])
def test_site_whose_data_changed_waits_until_it_is_restored_or_accepted(
    way_back: str, config: Path, tmp_path: Path
) -> None:
    nodes: dict[str, dict[str, Any]] = {name: {"data.examples": 40} for name in ("c0", "c1", "c2")}
    served = serve(config, tmp_path, nodes)
    assert next(served)["lost"] == {}
    nodes["c1"] = {"data.examples": 44}
    [(client, reason)] = next(served)["lost"].items()
    assert client == "c1"
    assert "its training data has changed since it joined the run; the site restores the data, or accepts" in reason
    assert next(served)["lost"].keys() == {"c1"}, "it stays out until someone decides"
    if way_back == "restored":
        nodes["c1"] = {"data.examples": 40}
    else:
        [record] = [path for path in data_files(tmp_path) if path.parent.name == "c1"]
        record.unlink()
    assert next(served)["lost"] == {}


def test_digest_sees_every_kind_of_change() -> None:
    pixels, targets = torch.arange(24.0).view(6, 4), torch.arange(6)
    rows = torch.tensor([0, 2, 5])

    def digest(pixels: torch.Tensor = pixels, targets: torch.Tensor = targets, rows: torch.Tensor = rows) -> str:
        return examples_digest(Subset(Table({"pixel_values": pixels}, targets), rows))

    changed = pixels.clone()
    changed[2, 1] += 1e-3
    other = pixels.clone()
    other[3, 1] += 1.0  # a row of another client
    found = [
        digest(),
        digest(changed),
        digest(targets=targets.flip(0)),
        digest(rows=rows.flip(0)),
        digest(rows=rows[:2]),
    ]
    assert len(set(found)) == len(found)
    assert digest(other) == digest()


def private_site(folder: Path, digest: str) -> Site:
    run = toy_run(fedavg(), 3, steps=1, secret=Key(11))
    run = replace(run, method=replace(run.method, privacy=PrivacySettings(clip=1.0, noise=1.0)))
    return Site(run, toy_model(), "c1", THREE["c1"], folder, Availability(), CPU, ACCURACY, data_digest=lambda: digest)


def ask(site: Site, round: int = 0) -> messages.ErrorReply | None:
    model = toy_model()
    job, _ = make_job(site.run, model, initial_server(site.run, model), round, "c1")
    content = messages.encode_job(job, Fingerprints()(job.params), "1", "", "", 0, 0)
    message = through_bytes(Message(content, 1, "train"))
    app = client_app(lambda context: "c1", lambda context: site)
    return messages.decode_error(app(message, Context(1, 1, {}, RecordDict(), {})).content)


def test_accepted_data_gets_no_noise_that_was_used_for_the_old_data(tmp_path: Path) -> None:
    """Two replies of one round with equal noise would reveal by their difference what changed."""
    assert ask(private_site(tmp_path, "old")) is None
    (tmp_path / data_record.FILE).unlink()
    refused = ask(private_site(tmp_path, "new"))
    assert refused
    assert "answering again would reuse its noise" in refused.reason
    assert ask(private_site(tmp_path, "new"), round=1) is None


def test_refused_job_changes_no_file_of_the_site(tmp_path: Path) -> None:
    ask(private_site(tmp_path, "old"))
    before = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    refused = ask(private_site(tmp_path, "new"), round=1)
    assert refused
    assert refused.fault, "a run that does not skip failures stops, so that someone looks"
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == before
    assert json.loads((tmp_path / data_record.FILE).read_text()) == {"digest": "old"}
