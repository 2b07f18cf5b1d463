"""The Flower engine gives the results of a simulation bit for bit, and its rounds end whatever a site does."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import image_fixtures
import pytest
import torch
from compression_fixtures import WIDE_MODEL
from flower_fixtures import (
    THREE,
    FakeGrid,
    Reply,
    Tamper,
    VirtualClock,
    blob,
    flower_engine,
    make_grid,
    records,
    rewrite,
    tamper_with,
)
from flower_fixtures import clock as clock
from flower_fixtures import task_identity as task_identity
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.cli.config_utils import load_and_validate
from flwr.common.config import parse_config_args
from helpers import SMALL_TASK, SMALL_VIT, Clients, files_in, final_params, server_in, toy_model, toy_run
from PIL import Image
from shell import Shell
from track_fixtures import read_tensorboard
from typer.testing import CliRunner

from partita import data
from partita.cli import flower as flower_commands
from partita.compression.prune import prune
from partita.core import serialization, tensors
from partita.core.client import ClientError, ClientState
from partita.core.data import ClientData, Population
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import SGD, AdamW
from partita.core.plan import Plan, RoundInfo, share_everything
from partita.core.rng import Key
from partita.core.rounds import ClientFailure, initial_server, make_job, rounds
from partita.core.sampling import PowerOfChoice
from partita.core.server_rule import Server
from partita.core.settings import Run, RunError
from partita.core.update import Update
from partita.data.errors import DataError
from partita.engines.availability import Availability
from partita.engines.flower import local_deployment
from partita.engines.simulation import SimulationEngine
from partita.experiment import flower_app, run_folder, runner
from partita.experiment.config import load
from partita.experiment.preview import preview
from partita.methods import INDEX, NEEDS_FACTORS, build
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen
from partita.methods.scaffold import scaffold
from partita.record import file_names
from partita.storage import checkpoint
from partita.storage.client_store import DiskStore
from partita.testing.toy import ToyExamples

FOUR = Clients(c0=3, c1=7, c2=9, c3=4)  # one to three batches each


def tensors_by_client(
    run: Run, store: Callable[[str], ClientState], clients: Iterable[str]
) -> dict[str, dict[str, Any]]:
    return {client: {"personal": store(client).personal, **store(client).memory} for client in clients}


def equal_states(one: dict[str, dict[str, Any]], two: dict[str, dict[str, Any]]) -> bool:
    flat = [
        {f"{c}/{s}/{n}": v for c, slots in each.items() for s, part in slots.items() for n, v in part.items()}
        for each in (one, two)
    ]
    return tensors.equal(*flat)


# ---- equality with a simulation


ENVELOPE = 2_000  # bytes of a Flower message besides its tensors
BRIEF: dict[str, dict[str, Any]] = {"fedrep": {"head_epochs": 2}, "lora": {"rank": 2}, "flora": {"rank": 2}}


def run_model_and_population(name: str) -> tuple[Run, Model, Population]:
    method = build(name, BRIEF.get(name, {}))
    model: Model = image_fixtures.small_vit() if method.extend else toy_model()
    model = image_fixtures.adapted_vit() if name in NEEDS_FACTORS else model
    population: Any = image_fixtures.FOUR if method.extend or name in NEEDS_FACTORS else FOUR
    if method.extend:
        model = method.extend(model, toy_run(method).key)
    optimizer = AdamW(weight_decay=0.1) if method.supports_optimizer("adamw") else SGD()
    return (
        toy_run(method, 3, optimizer, lr=0.02, cohort=0.5, min_updates=0, clients_have_initial_model=name == "fedpart"),
        model,
        population,
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", INDEX)
def test_flower_gives_the_tensors_scores_and_bytes_of_a_simulation(name: str, tmp_path: Path) -> None:
    run, model, population = run_model_and_population(name)
    availability = Availability(client_dropout=0.15, straggler_rate=0.3)
    embedded = SimulationEngine(run, model, population, availability=availability)
    grid = make_grid(run, model, population, tmp_path, availability)
    engine = flower_engine(run, model, grid, population.clients)
    counted, asked = {"down": 0, "up": 0}, 0
    for one, two in zip(rounds(run, model, embedded), rounds(run, model, engine), strict=True):
        counted["down"] += sum(one.traffic.down.values())
        counted["up"] += sum(one.traffic.up.values())
        asked += len(one.cohort)
        assert tensors.equal(one.server.params, two.server.params)
        assert one.traffic == two.traffic
        assert (one.cohort, one.lost, one.loss, one.drift) == (two.cohort, two.lost, two.loss, two.drift)
        assert one.server.versions == two.server.versions
    assert dict(+grid.scale.tensors) == {way: size for way, size in counted.items() if size}
    names = sum(len(name) for name in model.initial)  # an update lists the steps of each name
    assert grid.scale.rest["down"] <= asked * ENVELOPE
    assert grid.scale.rest["up"] <= asked * (ENVELOPE + 2 * names)
    there = tensors_by_client(
        run, lambda client: DiskStore(tmp_path / client / "states").load(client, run.rounds), population.clients
    )
    here = tensors_by_client(run, lambda client: embedded.store.load(client, run.rounds), population.clients)
    assert equal_states(here, there)
    jobs = [make_job(run, model, one.server, one.number, client)[0] for client in population.clients]
    assert list(engine.evaluate(jobs)) == list(embedded.evaluate(jobs))


class OwnParts(Clients):
    """Clients whose validation examples are the first two of their examples."""

    def __getitem__(self, client: str) -> ClientData:
        part = self.parts[client]
        return ClientData(part, ToyExamples(part.x[:2], part.y[:2]), part)


@pytest.mark.slow
def test_flower_samples_by_losses_and_scores_on_validation_as_a_simulation_does(tmp_path: Path) -> None:
    sizes = {client: len(FOUR[client].train) for client in FOUR.clients}
    run = toy_run(fedavg(), 5, cohort=2, sampling=PowerOfChoice(candidates=3), examples=sizes)
    model, population = toy_model(), OwnParts(**sizes)
    embedded = SimulationEngine(run, model, population)
    engine = flower_engine(run, model, make_grid(run, model, population, tmp_path), population.clients)
    for one, two in zip(rounds(run, model, embedded), rounds(run, model, engine), strict=True):
        assert (one.cohort, one.losses) == (two.cohort, two.losses)
        assert tensors.equal(one.server.params, two.server.params)
    jobs = [make_job(run, model, one.server, one.number, client)[0] for client in population.clients]
    own = dict(embedded.evaluate(jobs, "validation"))
    assert own == dict(engine.evaluate(jobs, "validation"))
    assert own != dict(embedded.evaluate(jobs))
    assert list(engine.evaluate(jobs, FOUR["c0"].test)) == [], "examples are never sent"


@pytest.mark.slow
def test_what_transforms_remember_stays_at_the_site(tmp_path: Path) -> None:
    run = toy_run(prune(keep=0.02, error_feedback=True), 3)
    embedded = SimulationEngine(run, WIDE_MODEL, FOUR)
    engine = flower_engine(run, WIDE_MODEL, make_grid(run, WIDE_MODEL, FOUR, tmp_path), FOUR.clients, deadline=60.0)
    for one, two in zip(rounds(run, WIDE_MODEL, embedded), rounds(run, WIDE_MODEL, engine), strict=True):
        assert tensors.equal(one.server.params, two.server.params)
        assert one.traffic == two.traffic
    there = tensors_by_client(
        run, lambda client: DiskStore(tmp_path / client / "states").load(client, run.rounds), FOUR.clients
    )
    here = tensors_by_client(run, lambda client: embedded.store.load(client, run.rounds), FOUR.clients)
    assert equal_states(here, there)
    assert all(embedded.store.load(client, run.rounds).memory for client in FOUR.clients)


# ---- sites that fail


def replace_head(value: torch.Tensor) -> Callable[[Any], Any]:
    return lambda delta: {**delta, "head.weight": value}


OVERSIZED_BLOB = serialization.pack({"delta": {"head.weight": torch.zeros(10**5)}})
FAULTS: dict[str, tuple[Tamper, str]] = {
    "nan": (rewrite(delta=replace_head(torch.full((3, 4), float("nan")))), "with values that are not finite"),
    "another shape": (rewrite(delta=replace_head(torch.zeros(4, 3))), r"of shape \(4, 3\), not \(3, 4\)"),
    "a slot of its own": (rewrite(slots={"s": {"head.weight": torch.zeros(2)}}), "sent the slot 's', which fedavg"),
    "another name": (rewrite(delta={"nowhere": torch.zeros(2)}), "sent 'nowhere', which its plan does not"),
    "no weight": (rewrite(weight=float("inf")), "sent the weight inf"),
    "a loss of nan": (rewrite(loss=float("nan")), "sent the loss nan"),
    "no steps": (rewrite(steps={}), "after None steps"),
    "negative steps": (rewrite(steps=lambda steps: dict.fromkeys(steps, -2)), "after -2 steps"),
    "half a step": (rewrite(steps=lambda steps: dict.fromkeys(steps, 0.5)), "after 0.5 steps"),
    "cut short": (blob(lambda data: data[:-9]), "its tensors cannot be read"),
    "too much": (blob(lambda data: OVERSIZED_BLOB), r"it has 4\d\d,\d\d\d bytes of tensors"),
    "noise": (blob(lambda data: b"\xff" * 99), "it names tensors in 18,446,744,073,709,551,615 bytes"),
    "a pickle": (blob(lambda data: data, "pickle"), "are not one safetensors blob"),
    "nothing": (lambda message, reply: Message(RecordDict(), reply_to=message), "has no ConfigRecord 'job_id'"),
    "no tensors": (records(tensors=ConfigRecord()), "has no ArrayRecord 'tensors'"),
    "a list for a number": (records(numbers=MetricRecord({"weight": [1.0, 2.0]})), "'weight' is missing"),
    "an odd refusal": (records(refusal=ConfigRecord({"reason": 3})), "'reason' is missing"),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", FAULTS)
def test_bad_reply_is_recorded_and_equals_an_absent_client(kind: str, tmp_path: Path) -> None:
    tamper, reason = FAULTS[kind]
    model, run = toy_model(), toy_run(fedavg(), 2, skip_failed_clients=True, drift=False)
    grid = make_grid(run, model, THREE, tmp_path)
    tamper_with(grid, 11, tamper)
    played = list(rounds(run, model, flower_engine(run, model, grid, THREE.clients)))
    assert [[lost.client for lost in each.lost] for each in played] == [["c1"], []]
    with pytest.raises(AssertionError, match=reason):  # so that pytest shows the whole reason on a mismatch
        raise AssertionError(played[0].lost[0].reason)
    away = SimulationEngine(run, model, THREE, availability=Availability(trace={(0, "c1"): 0.0}))
    assert tensors.equal(final_params(played), final_params(list(rounds(run, model, away))))


@pytest.mark.parametrize("kind", ["nan", "cut short"])
def test_bad_reply_ends_a_run_that_does_not_skip_failures(kind: str, tmp_path: Path) -> None:
    model, run = toy_model(), toy_run(fedavg(), 2)
    grid = make_grid(run, model, THREE, tmp_path)
    tamper_with(grid, 11, FAULTS[kind][0])
    with pytest.raises(ClientError, match=f"client 'c1': .*{FAULTS[kind][1]}"):
        list(rounds(run, model, flower_engine(run, model, grid, THREE.clients)))


def error_reply(message: Message, reply: Message) -> Message:
    return Message(Error(5, "the node went away"), reply_to=message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tamper", "reason"), [(lambda *_: None, "gave no answer within 0.4 s"), (error_reply, "the node went away")]
)
def test_silent_client_is_lost_for_the_round_and_keeps_its_previous_state(
    tamper: Tamper, reason: str, tmp_path: Path, clock: VirtualClock
) -> None:
    """Client c1 trains in round 1, but its reply is lost: its state of that round must not count."""
    model, run = toy_model(), toy_run(scaffold(), 4)
    grid = make_grid(run, model, THREE, tmp_path)
    tamper_with(grid, 11, tamper, when=1)
    played = list(rounds(run, model, flower_engine(run, model, grid, THREE.clients, deadline=0.4)))
    assert [[lost.client for lost in each.lost] for each in played] == [[], ["c1"], [], []]
    assert reason in played[1].lost[0].reason
    embedded = SimulationEngine(run, model, THREE, availability=Availability(trace={(1, "c1"): 0.0}))
    whole = list(rounds(run, model, embedded))
    assert tensors.equal(final_params(played), final_params(whole))
    assert [each.traffic.down for each in played] == [each.traffic.down for each in whole]


def test_round_ends_at_the_deadline_when_an_upload_hangs(tmp_path: Path, clock: VirtualClock) -> None:
    model, run = toy_model(), toy_run(fedavg(), 1)
    grid = make_grid(run, model, THREE, tmp_path)
    over = threading.Event()

    def hang(reply: Message) -> None:
        if reply.metadata.src_node_id == 11 and reply.metadata.group_id:
            clock.sleep(1.0)
            over.wait()

    grid.fetching = hang
    [played] = rounds(run, model, flower_engine(run, model, grid, THREE.clients, deadline=0.5))
    over.set()
    assert played.lost == (ClientFailure("c1", "had not sent its whole answer within 0.5 s"),)


@pytest.mark.slow
def test_replies_in_time_count_after_an_earlier_client_times_out(tmp_path: Path, clock: VirtualClock) -> None:
    model, run = toy_model(), toy_run(fedavg(), 1)
    grid = make_grid(run, model, THREE, tmp_path)
    grid.fetching = lambda reply: clock.sleep(0.05)
    tamper_with(grid, 11, lambda *_: None)
    engine = flower_engine(run, model, grid, THREE.clients, deadline=0.3)
    engine.clients()
    found = list(
        engine.train(make_job(run, model, initial_server(run, model), 0, client)[0] for client in ("c1", "c0", "c2"))
    )
    assert [(each.client, type(each)) for each in found] == [("c1", ClientFailure), ("c0", Update), ("c2", Update)]


@pytest.mark.slow
@pytest.mark.parametrize("silent", ["no answer", "an upload that hangs"])
def test_round_ends_after_patience_once_enough_clients_replied(silent: str, tmp_path: Path) -> None:
    """The silent client is asked first, and refusals do not count: patience starts with the second update."""
    model, run, over = toy_model(), toy_run(fedavg(), 1, min_updates=2), threading.Event()
    grid = make_grid(run, model, FOUR, tmp_path, Availability(trace={(0, "c3"): 0.0}))
    if silent == "no answer":
        tamper_with(grid, 12, lambda *_: None)

    def slow(reply: Message) -> None:
        if reply.metadata.group_id and reply.metadata.src_node_id in (11, 12):
            over.wait(0.6 if reply.metadata.src_node_id == 11 else 60)

    grid.fetching = slow
    engine = flower_engine(run, model, grid, FOUR.clients, deadline=600.0, patience=0.2)
    engine.clients()
    order = ("c1", "c3", "c0", "c2")
    found = list(engine.train(make_job(run, model, initial_server(run, model), 0, client)[0] for client in order))
    over.set()
    assert [(each.client, type(each)) for each in found] == [
        ("c1", ClientFailure),
        ("c3", ClientFailure),
        ("c0", Update),
        ("c2", Update),
    ]
    what = "gave no answer" if silent == "no answer" else "had not sent its whole answer"
    assert isinstance(found[0], ClientFailure)
    assert found[0].reason.startswith(what)


@pytest.mark.slow
def test_patience_waits_for_min_updates_and_raises_network_errors(tmp_path: Path) -> None:
    model, run = toy_model(), toy_run(fedavg(), 1, min_updates=3)
    grid = make_grid(run, model, THREE, tmp_path)
    grid.fetching = lambda reply: time.sleep(0.3) if reply.metadata.src_node_id == 11 else None
    [played] = rounds(run, model, flower_engine(run, model, grid, THREE.clients, patience=0.0))
    assert played.lost == ()

    def breaks(reply: Message) -> None:
        raise OSError("no network")

    grid.fetching = breaks
    engine = flower_engine(run, model, grid, THREE.clients, patience=0.0)
    engine.nodes = {"c0": 12, "c1": 11, "c2": 10}
    with pytest.raises(OSError, match="no network"):
        list(engine.train([make_job(run, model, initial_server(run, model), 0, "c0")[0]]))


@pytest.mark.slow
def test_unresponsive_client_gets_no_job_until_it_responds(tmp_path: Path, clock: VirtualClock) -> None:
    """Flower lists a dead node as online for a minute, and each job for it would cost a whole deadline."""
    model, run = toy_model(), toy_run(fedavg(), 4)
    grid = make_grid(run, model, THREE, tmp_path)
    alive, cohorts = grid.nodes[11], []
    waiting: list[Message] = []
    for each in rounds(run, model, flower_engine(run, model, grid, THREE.clients, deadline=0.4)):
        cohorts.append((sorted(each.cohort), [lost.client for lost in each.lost]))
        if each.number == 0:
            grid.nodes[11] = waiting.append
        if each.number == 2:  # it comes back and finds the messages sent to it
            grid.nodes[11] = alive
            grid.replies |= {message.metadata.message_id: alive(message) for message in waiting}  # type: ignore[misc]
    everyone, others = ["c0", "c1", "c2"], ["c0", "c2"]
    assert cohorts == [(everyone, []), (everyone, ["c1"]), (others, []), (everyone, [])]


def test_too_few_flower_replies_end_the_run(tmp_path: Path) -> None:
    model, run = toy_model(), toy_run(fedavg(), 1, min_updates=3)
    grid = make_grid(run, model, THREE, tmp_path)
    tamper_with(grid, 11, error_reply)
    with pytest.raises(RunError, match=r"only 2 of 3 clients answered .*the node went away"):
        list(rounds(run, model, flower_engine(run, model, grid, THREE.clients)))


def break_file(path: Path, how: str, before: bytes) -> None:
    if how == "gone":
        shutil.rmtree(path.parent)
    else:
        held = path.read_bytes()
        path.write_bytes({"cut short": held[:-5], "old": before, "empty": b"", "zeros": bytes(len(held))}[how])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("how", ["gone", "cut short", "old", "empty", "zeros"])
def test_client_that_lost_its_copy_is_sent_everything(how: str, tmp_path: Path) -> None:
    """The kernel froze after round 0, so no other client is sent it again."""
    model, run, kernel = toy_model(), toy_run(fedfrozen(1), 5), sorted(toy_model().names("query"))[0]
    engine = flower_engine(run, model, make_grid(run, model, THREE, tmp_path), THREE.clients)
    played, before = [], b""
    for each in rounds(run, model, engine):
        played.append(each)
        if each.number == 0:
            before = (tmp_path / "c1" / "copy.safetensors").read_bytes()
        if each.number == 1:
            break_file(tmp_path / "c1" / "copy.safetensors", how, before)
    assert [[(lost.client, lost.empty) for lost in each.lost] for each in played] == [[], [], [("c1", True)], [], []]
    size = model.initial[kernel].numel() * 4
    assert [each.traffic.down[kernel] // size for each in played] == [3, 3, 0, 1, 0]
    away = SimulationEngine(run, model, THREE, availability=Availability(trace={(2, "c1"): 0.0}))
    assert tensors.equal(final_params(played), final_params(list(rounds(run, model, away))))


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, OSError, DataError])
def test_only_the_type_of_an_internal_error_leaves_the_site(
    kind: type[Exception], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaky(Clients):
        def __getitem__(self, client: str) -> Any:
            raise kind("patient 4711 has no scan")

    model, run = toy_model(), toy_run(fedavg(), 1, min_updates=0, skip_failed_clients=True)
    grid = make_grid(run, model, Leaky(c0=3), tmp_path)
    [played] = rounds(run, model, flower_engine(run, model, grid, ["c0"]))
    assert played.lost == (ClientFailure("c0", f"failed with {kind.__name__}; see the log of its SuperNode"),)
    assert "patient 4711" in caplog.text


def test_site_refuses_jobs_for_another_client_or_model(tmp_path: Path) -> None:
    model, run = toy_model(), toy_run(fedavg(), 1, min_updates=0, skip_failed_clients=True)
    grid = make_grid(run, model, THREE, tmp_path)
    engine = flower_engine(run, model, grid, THREE.clients)
    engine.clients()
    engine.nodes |= {"c0": engine.nodes["c1"]}
    jobs = [make_job(run, model, initial_server(run, model), 0, "c0")[0]]
    [lost] = engine.train(jobs)
    assert lost == ClientFailure("c0", "this site is 'c1'; check the node config of both sites")
    [lost] = engine.train([replace(jobs[0], client="c2", params={**jobs[0].params, "head.weight": torch.zeros(9, 4)})])
    assert isinstance(lost, ClientFailure)
    assert lost.reason == "the server's 'head.weight' is (9, 4) and here it is (3, 4); are model and classes the same?"


# ---- client names


def test_late_joiner_takes_part_from_the_next_round(tmp_path: Path) -> None:
    model, run = toy_model(), toy_run(fedavg(), 4)
    grid = make_grid(run, model, FOUR, tmp_path)
    late = grid.nodes.pop(12)
    cohorts = []
    for each in rounds(run, model, flower_engine(run, model, grid, FOUR.clients, wait_for=3)):
        cohorts.append(set(each.cohort))
        if each.number == 1:
            grid.nodes[12] = late
    assert cohorts == [{"c0", "c2", "c3"}] * 2 + [{"c0", "c1", "c2", "c3"}] * 2


def test_duplicate_and_unknown_client_names_are_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, run = toy_model(), toy_run(fedavg(), 1)
    grid = make_grid(run, model, Clients(c0=3, c1=4, c9=5), tmp_path)  # nodes 12, 11, 10
    grid.nodes[20] = grid.nodes[12]
    engine = flower_engine(run, model, grid, FOUR.clients, wait_for=2)
    assert engine.clients() == ["c0", "c1"]
    assert engine.nodes == {"c0": 12, "c1": 11}
    assert "node 10 says it is 'c9', which is not a client of this run" in caplog.text
    assert "node 20 says it is 'c0', like another node" in caplog.text
    del grid.nodes[12]
    assert engine.clients() == ["c0", "c1"]
    assert engine.nodes == {"c0": 20, "c1": 11}


def test_node_with_a_registered_key_can_only_be_the_client_of_that_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A registered site, and later one without a name, claim to be another one."""
    model, run = toy_model(), toy_run(fedavg(), 1)
    grid = make_grid(run, model, Clients(c0=3, c1=4, c2=5), tmp_path)  # nodes 12, 11, 10
    honest = grid.nodes.pop(12)
    grid.nodes[11] = honest  # says that it is c0
    grid.nodes[20] = honest
    grid.registered = {11: "c1", 10: "c2"}
    engine = flower_engine(run, model, grid, ["c0", "c1", "c2"], wait_for=2)
    assert engine.clients() == ["c0", "c2"]
    assert engine.nodes == {"c0": 20, "c2": 10}, "nobody is registered as c0 yet"
    assert "node 11 says it is 'c0', but its key is registered as 'c1'; it is refused" in caplog.text
    grid.nodes[12], grid.registered[12] = honest, "c0"
    assert engine.registry.online() == {"c0": 12, "c2": 10}
    grid.nodes[21] = honest
    assert engine.registry.online() == {"c0": 12, "c2": 10}
    assert "node 21 says it is 'c0', but another key is registered under that name; it is refused" in caplog.text
    del grid.nodes[12]
    assert engine.registry.online() == {"c2": 10}, "nobody takes its place"


def test_too_few_connected_clients_are_an_error_naming_those_present(tmp_path: Path, clock: VirtualClock) -> None:
    model, run = toy_model(), toy_run(fedavg(), 1)
    grid = make_grid(run, model, Clients(c0=3, c2=4), tmp_path)
    with pytest.raises(RunError, match=r"3 clients are needed, but after 0.1 s there are 2 \(c0, c2\); start the"):
        flower_engine(run, model, grid, FOUR.clients, wait_for=3, deadline=0.1).clients()


def test_site_whose_name_query_fails_is_asked_again(tmp_path: Path) -> None:
    model, run, asked = toy_model(), toy_run(fedavg(), 1), []
    grid = make_grid(run, model, Clients(c0=3), tmp_path)
    honest = grid.nodes[10]

    def slow_to_wake(message: Message) -> Message | None:
        asked.append(message)
        return error_reply(message, message) if len(asked) < 3 else honest(message)

    grid.nodes[10] = slow_to_wake
    assert flower_engine(run, model, grid, ["c0"]).clients() == ["c0"]
    assert len(asked) == 3


# ---- a restarted server


def plan_with_late_head(model: Model, round_info: RoundInfo) -> Plan:
    """The head trains from round 2 on: at the checkpoint it has its initial value, at the sites it does not."""
    plan = share_everything(model, round_info)
    return plan if round_info.round >= 2 else plan.narrow(model.all_names() - model.names("head"))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "method", [scaffold(), build("fedper"), Method("late head", plan_with_late_head)], ids=lambda m: m.name
)
def test_server_resumed_from_a_checkpoint_gives_the_same_result(method: Method, tmp_path: Path) -> None:
    """The sites are two rounds ahead of the checkpoint; their state of those rounds must not count."""
    model = toy_model()
    run = toy_run(method, 5, cohort=3 if method.name == "late head" else 2, clients_have_initial_model=True)
    whole = list(
        rounds(run, model, flower_engine(run, model, make_grid(run, model, THREE, tmp_path / "a"), THREE.clients))
    )
    grid = make_grid(run, model, THREE, tmp_path / "b")
    stream = rounds(run, model, flower_engine(run, model, grid, THREE.clients))
    checkpoint.save(tmp_path, 2, [next(stream) for _ in range(2)][-1].server)
    next(stream), next(stream)
    done, server = checkpoint.load(next(tmp_path.glob("*.safetensors")))
    server = Server(server.params, server.state, replace(server.versions, held={}))
    again = flower_engine(run, model, grid, THREE.clients, session="2", start=done)
    assert tensors.equal(final_params(list(rounds(run, model, again, server, done))), final_params(whole))
    one, two = (
        tensors_by_client(
            run, lambda client, side=side: DiskStore(tmp_path / side / client / "states").load(client, 5), THREE.clients
        )
        for side in "ab"
    )
    assert equal_states(one, two)


def test_site_keeps_only_states_that_a_checkpoint_may_need(tmp_path: Path) -> None:
    model, run, one = toy_model(), toy_run(scaffold(), 6), Clients(c1=4)
    engine = flower_engine(run, model, make_grid(run, model, one, tmp_path), one.clients)
    for each in rounds(run, model, engine):
        engine.store.commit(each.number + 1)
    numbers = sorted(int(Path(name).name[:6]) for name in files_in(tmp_path / "c1" / "states"))
    assert numbers == [3, 4, 5]


# ---- the app


CONFIG = (
    """
rounds = 3
method = {{name = "{method}"{options}}}
[evaluate]
personal_every = 2
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


def write_config(folder: Path, method: str = "fedavg", options: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text(CONFIG.format(method=method, options=options))
    return folder / "experiment.toml"


def app_grid(config: Path, folder: Path, run_config: dict[str, Any], **nodes: dict[str, Any]) -> FakeGrid:
    """A grid that calls the app of every site as Flower would."""

    def site(name: str, more: dict[str, Any]) -> Reply:
        own = {"client": name, "folder": str(folder), **more}
        return lambda message: flower_app.client(config)(message, Context(1, 1, own, RecordDict(), run_config))

    return FakeGrid({node: site(name, more) for node, (name, more) in enumerate(nodes.items())})


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / file_names.ROWS).read_text().splitlines()]
    # Sites do not say how much of their work was padding: it follows from how many examples they have.
    return [{**{name: value for name, value in row.items() if name != "padding"}, "seconds": 0} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), [("scaffold", ""), ("fedfrozen", ", warmup = 1")])
def test_served_and_resumed_run_records_the_rows_of_a_local_run(method: str, options: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "app", method, options)
    for _ in runner.start(load(config), tmp_path / "here"):
        pass
    settings = {"folder": str(tmp_path / "there"), "deadline": 60.0, "clients": 3, "set": ""}
    grid = app_grid(config, tmp_path / "sites", settings, c0={}, c1={}, c2={})
    stopped = flower_app.serve(grid, load(config), settings, "1")
    next(stopped), next(stopped)
    stopped.close()
    for _ in flower_app.serve(grid, load(config), settings, "2"):
        pass
    here, there = (tmp_path / side for side in ("here", "there"))
    assert files_in(there) >= {"config.toml", "environment.json", "plan.json", "rows.jsonl", "result.json"}
    ends = [server_in(folder) for folder in (here, there)]
    assert tensors.equal(ends[0].params, ends[1].params)
    one, two = rows_of(here), rows_of(there)
    if method == "fedfrozen":  # after the restart, sites are also sent parameters that froze before it
        assert sum(two[2].pop("down").values()) > sum(one[2].pop("down").values())
        one[2]["bytes"]["down"] = two[2]["bytes"]["down"]
    assert one == two
    result = run_folder.finished(there)
    assert result
    assert result["digest"] == tensors.digest(ends[0].params)
    with pytest.raises(run_folder.RunFolderError, match="holds a run of another config") as refused:
        next(flower_app.serve(grid, load(config, ["seed=3"]), settings, "3"))
    [remedy] = shlex.split(str(refused.value).partition("--run-config ")[2])
    assert next(flower_app.serve(grid, load(config), {**settings, **parse_config_args([remedy])}, "4"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # TensorBoard's own
def test_server_tracks_across_a_restart_and_sites_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, checked = write_config(tmp_path / "app"), list[str]()
    monkeypatch.setattr("partita.experiment.builder.check_installed", checked.append)
    words = ['track.to=["tensorboard"]']
    settings = {"folder": str(tmp_path / "there"), "deadline": 60.0, "clients": 3, "set": shlex.join(words)}
    grid = app_grid(config, tmp_path / "sites", settings, c0={}, c1={}, c2={})
    stopped = flower_app.serve(grid, load(config, words), settings, "1")
    next(stopped)
    stopped.close()
    rows = len(list(flower_app.serve(grid, load(config, words), settings, "2"))) + 1
    assert checked == ["tensorboard"] * 2  # by the two starts of the server
    found, _ = read_tensorboard(tmp_path / "there" / "track" / "tensorboard")
    assert [step for step, _ in found["round"]] == list(range(rows))
    assert [value for _, value in found["bytes/up"]] == [row["bytes"]["up"] for row in rows_of(tmp_path / "there")]


@pytest.mark.slow
def test_served_run_samples_validates_and_stops_as_a_local_run_does(tmp_path: Path) -> None:
    """Also after the server was killed between the row of the last round and the result."""
    config = write_config(tmp_path / "app")
    words = ["rounds=6", "sampling.name=power_of_choice", "sampling.candidates=3", "federation.cohort=2"]
    words += ["stop.patience=2", "stop.min_delta=2.0"]
    for _ in runner.start(load(config, words), tmp_path / "here"):
        pass
    settings = {"folder": str(tmp_path / "there"), "deadline": 60.0, "clients": 3, "set": " ".join(words)}
    grid = app_grid(config, tmp_path / "sites", settings, c0={}, c1={}, c2={})
    for session, count in (("1", 2), ("2", 1)):
        stopped = flower_app.serve(grid, load(config, words), settings, session)
        for _ in range(count):
            next(stopped)
        stopped.close()
    assert list(flower_app.serve(grid, load(config, words), settings, "3")) == []
    here, there = (tmp_path / side for side in ("here", "there"))
    one, two = rows_of(here), rows_of(there)
    for row in (*one, *two):  # after a restart, sites are sent everything again
        del row["down"], row["bytes"]
    assert one == two
    assert len(two) == 3
    assert "accuracy on validation has not improved by more than 2 for 2 evaluations" in str(run_folder.stopped(there))
    ends = [{**(run_folder.finished(folder) or {}), "seconds": 0} for folder in (here, there)]
    assert ends[0] == ends[1]
    bests = [{path.name[:6] for path in (folder / "checkpoints" / "best").iterdir()} for folder in (here, there)]
    assert bests[0] == bests[1] != set()


def test_site_can_change_only_data_and_engine_keys(tmp_path: Path) -> None:
    config = write_config(tmp_path / "app")
    settings = {
        "folder": str(tmp_path / "run"),
        "deadline": 60.0,
        "clients": 3,
        "set": "rounds=1 federation.min_updates=0",
    }
    nodes: dict[str, dict[str, Any]] = {
        "c0": {"data.noise": 2.0, "engine.threads": 1},
        "c1": {"training.lr": 5.0},
        "c2": {"data.noize": 2.0},
    }
    grid = app_grid(config, tmp_path / "sites", settings, **nodes)
    [row] = flower_app.serve(grid, load(config, ["rounds=1", "federation.min_updates=0"]), settings, "1")
    unknown = row["lost"].pop("c2")
    assert unknown.startswith("unknown key 'data.noize'; did you mean 'noise'? It can be: noise, ")
    assert row["lost"] == {
        "c1": "the node config sets training.lr=5.0, but a site can only change data. and engine. keys",
    }


@pytest.mark.slow
def test_each_private_site_creates_its_own_secret(tmp_path: Path) -> None:
    config = write_config(tmp_path / "app")
    words = ["rounds=2", "privacy.noise=1.0"]
    settings = {"folder": str(tmp_path / "run"), "deadline": 60.0, "clients": 3, "set": " ".join(words)}
    (tmp_path / "mine").write_bytes(b"0123456789abcdef")
    (tmp_path / "mine").chmod(0o600)
    grid = app_grid(
        config, tmp_path / "sites", settings, c0={"engine.secret_file": str(tmp_path / "mine")}, c1={}, c2={}
    )
    for row in flower_app.serve(grid, load(config, words), settings, "1"):
        assert not row["lost"]
        assert row["train_loss"] is None
    made = {path.parent.parent.name: path for path in (tmp_path / "sites").rglob("private/secret")}
    assert made.keys() == {"c0", "c1", "c2"}
    assert len({path.read_bytes() for path in made.values()}) == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in made.values())


def test_sites_can_read_their_own_data(tmp_path: Path) -> None:
    """Each site reads its own rows; the server only has a test set."""
    config = write_config(tmp_path / "app", "fedper")
    changes = ["rounds=1", "split={name='site', sites=['north', 'south']}", "evaluate.personal_every=1"]
    settings = {"folder": str(tmp_path / "run"), "deadline": 60.0, "clients": 2, "set": shlex.join(changes)}
    sizes = {"north": {"data.examples": 30}, "south": {"data.examples": 90}}
    with pytest.warns(UserWarning, match=r"weights are trusted up to federation\.max_examples"):
        [row] = flower_app.serve(app_grid(config, tmp_path, settings, **sizes), load(config, changes), settings, "1")
    assert row["lost"] == {}
    assert row["test"] is None, "there is no shared model for the central test"
    assert set(row["personal"]["accuracy"]) == {"north", "south"}


@pytest.mark.parametrize(("client", "sizes"), [("north", [21, 0]), ("south", [0, 21]), (None, [0, 0])])
def test_site_split_gives_all_rows_to_the_named_client(client: str | None, sizes: list[int]) -> None:
    task = data.load("synthetic", Key(0), examples=30)
    split = data.split(task, "site", key=Key(0), sites=("north", "south"), client=client)
    assert [len(split[name].train) for name in split.clients] == sizes


def test_unlisted_site_is_refused() -> None:
    task = data.load("synthetic", Key(0), examples=30)
    with pytest.raises(ValueError, match=r"split.client is 'nort', .* did you mean 'north'"):
        data.split(task, "site", key=Key(0), sites=("north", "south"), client="nort")
    with pytest.raises(ValueError, match=r"split.sites is empty"):
        data.split(task, "site", key=Key(0), sites=())


def test_written_app_passes_flower_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = flower_app.init(tmp_path / "app", write_config(tmp_path), ["rounds=7"], clients=2)
    project, warnings = load_and_validate(app / "pyproject.toml")
    assert warnings == []
    assert project["tool"]["flwr"]["app"]["config"] == {
        "clients": 2,
        "deadline": 600.0,
        "patience": math.inf,
        "folder": str(tmp_path / "runs" / "fedavg-seed-0-flower"),
        "sites": str(tmp_path / "runs" / "sites"),
        "set": "",
    }
    assert load(app / "federation" / "experiment.toml") == load(tmp_path / "experiment.toml", ["rounds=7"])
    assert list(flower_app.population(app)) == ["c0", "c1", "c2"]
    with pytest.raises(flower_app.FlowerError, match="already holds a pyproject"):
        flower_app.init(app, tmp_path / "experiment.toml")


def test_init_command_writes_an_app_and_prints_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path)
    done = CliRunner().invoke(flower_commands.app, ["init", "app", "--config", str(config), "--set", "seed=4"])
    assert done.exit_code == 0, done.output
    assert "partita flower up app --run" in done.output
    assert flower_app.run_config(Path("app"))["folder"] == str(tmp_path / "runs" / "fedavg-seed-4-flower")


def guide_config(folder: Path) -> Path:
    """The config of the Flower guide as it stands there, with a few images on the server."""
    guide = Path(__file__).parent.parent.parent / "docs" / "guide" / "flower.md"
    text = guide.read_text().partition("cat > experiment.toml << END\n")[2].partition("\nEND\n")[0]
    for name in ("0", "1"):
        for part in ("train", "test"):
            image = folder / "data" / "server" / part / name / "a.png"
            image.parent.mkdir(parents=True)
            Image.new("L", (8, 8)).save(image)
    (folder / "experiment.toml").write_text(text.replace("$PWD", str(folder)))
    return folder / "experiment.toml"


def test_server_without_training_rows_writes_the_guides_app_and_shows_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = guide_config(tmp_path)
    assert load(config).engine.clients_per_block == "auto"
    done = CliRunner().invoke(flower_commands.app, ["init", "app", "--config", str(config)])
    assert done.exit_code == 0, done.output
    assert list(flower_app.population(Path("app"))) == ["north", "south"]
    assert preview(load(config), 0, "south").bytes_up > 0
    with pytest.raises(RunError, match=r"no client has training examples on this machine.*set split\.client"):
        next(runner.start(load(config), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


class NoDeployment(Exception):
    """A process would have been started."""


@pytest.mark.slow
def test_up_checks_its_run_folder_before_it_starts_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_partita: Shell
) -> None:
    def refuse(*words: Any) -> None:
        raise NoDeployment

    monkeypatch.setattr(local_deployment, "deploy_locally", refuse)
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path)
    assert run_partita("run", "--config", config, "--out", "other", "--set", "rounds=1")[0] == 0
    assert run_partita("flower", "init", "app", "--config", config)[0] == 0
    code, _, error = run_partita("flower", "up", "app", "--run", "--out", "other")
    assert code == 1
    assert "other holds a run of another config: " in error
    with pytest.raises(NoDeployment):  # the remedy works as printed
        run_partita("flower", "up", "app", "--run", *shlex.split(error.partition("folder: ")[2]))
    with pytest.raises(NoDeployment):
        run_partita("flower", "up", "app", "--run")
    assert run_partita("run", "--config", config, "--out", "runs/fedavg-seed-0-flower")[0] == 0
    code, _, error = run_partita("flower", "up", "app", "--run")
    assert code == 1
    assert "holds a finished run of this app" in error


@pytest.mark.parametrize("finishes", [False, True])
def test_up_passes_its_run_folder_on_and_fails_if_the_run_does_not_finish_there(
    finishes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_partita: Shell
) -> None:
    def run(app: Path, settings: str) -> None:
        config = parse_config_args([settings])
        assert config == {"clients": 3, "folder": str(tmp_path / "run ü")}
        if finishes:
            run_folder.write_json(Path(str(config["folder"])) / file_names.RESULT, {"rounds": 3})

    @contextmanager
    def deployment(*words: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(folder=tmp_path / "logs", run=run)

    monkeypatch.setattr(local_deployment, "deploy_locally", deployment)
    flower_app.init(tmp_path / "app", write_config(tmp_path))
    code, _, error = run_partita("flower", "up", tmp_path / "app", "--run", "--out", tmp_path / "run ü")
    assert (code, "the run did not finish" in error) == ((0, False) if finishes else (1, True))


def test_refused_flwr_run_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_deployment, "find_executable", lambda name, environment: "false")
    deployment = local_deployment.LocalDeployment(tmp_path, {}, None, {})  # type: ignore[arg-type]
    with pytest.raises(local_deployment.DeploymentError, match="exited with status 1"):
        deployment.run(tmp_path, "")


def test_flower_commands_name_the_extra_when_flower_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_commands, "find_spec", lambda name: None)
    for words in (["up", str(tmp_path)], ["init", str(tmp_path), "--config", "experiment.toml"]):
        failed = CliRunner().invoke(flower_commands.app, words)
        assert "pip install 'partita[flower]'" in str(failed.exception)


def test_simulated_nodes_become_clients_by_partition_number(tmp_path: Path) -> None:
    config = write_config(tmp_path / "app")
    settings = {"folder": str(tmp_path / "run"), "sites": str(tmp_path / "sites"), "deadline": 60.0, "clients": 3}

    def node(number: int) -> Reply:
        own: Any = {"partition-id": number, "num-partitions": 3}
        return lambda message: flower_app.client(config)(message, Context(1, 1, own, RecordDict(), settings))  # type: ignore[arg-type]

    grid = FakeGrid({number: node(2 - number) for number in range(3)})
    row = next(flower_app.serve(grid, load(config), settings, "1"))
    assert sorted(row["cohort"]) == ["c0", "c1", "c2"]
    assert row["lost"] == {}
    assert {path.name for path in (tmp_path / "sites").glob("*/*")} == {"c0", "c1", "c2"}
