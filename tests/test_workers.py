"""Several processes give what one gives, bit for bit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers import Clients, run_of, small

from partita.conformance import states_of
from partita.core import tree
from partita.core.learn import ClientFault
from partita.core.method import Method
from partita.core.model import Model
from partita.core.rounds import ask, begin, rounds
from partita.core.run import Run, RunError
from partita.engines.embedded import Embedded
from partita.engines.faults import Faults
from partita.engines.workers import Workers
from partita.methods import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forks")
CLIENTS = Clients(c0=3, c1=9, c2=12, c3=6, c4=5)


@contextmanager
def workers(run: Run, model: Model, count: int = 2, block: int = 1) -> Iterator[Workers]:
    engine = Workers(Embedded(run, model, CLIENTS, block, faults=Faults(dropout=0.2, straggle=0.3)), count)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedper", "fedtp", "fedfrozen+moon"])
@pytest.mark.parametrize("block", [1, 2])
def test_workers_give_what_the_engine_gives(name: str, block: int) -> None:
    method, model = build(name), small()
    run = run_of(method, count=4, cohort=4)
    alone = Embedded(run, model, CLIENTS, block, faults=Faults(dropout=0.2, straggle=0.3))
    one = list(rounds(run, model, alone))
    with workers(run, model, block=block) as engine:
        many = list(rounds(run, model, engine))
        assert [each.lost for each in many] == [each.lost for each in one]
        assert [each.traffic for each in many] == [each.traffic for each in one]
        assert all(tree.equal(mine.server.params, its.server.params) for mine, its in zip(many, one, strict=True))
        kept = states_of(run, engine.engine)
        for client, expected in states_of(run, alone).items():
            assert tree.equal(kept[client], expected), client
        jobs = [ask(run, model, one[-1].server, 3, client)[0] for client in CLIENTS.clients]
        assert dict(engine.evaluate(jobs)) == dict(alone.evaluate(jobs))


def test_a_round_that_nobody_hears_to_the_end_leaves_no_trace() -> None:
    run, model = run_of(build("fedavg"), count=2), small()
    with workers(run, model, count=3) as engine:
        server = begin(run, model)
        first = next(engine.train(ask(run, model, server, 0, client)[0] for client in CLIENTS.clients))
        assert first.client == "c0"
        again = list(rounds(run, model, engine))
        plain = Embedded(run, model, CLIENTS, faults=Faults(dropout=0.2, straggle=0.3))
        assert tree.equal(again[-1].server.params, list(rounds(run, model, plain))[-1].server.params)


def test_a_clients_fault_comes_through_with_its_name() -> None:
    run, model = run_of(build("fedavg"), lr=1e30, count=3), small()
    with workers(run, model) as engine, pytest.raises(ClientFault, match=r"client 'c\d': the loss is nan"):
        list(rounds(run, model, engine))


def test_a_dead_worker_is_an_error() -> None:
    run, model = run_of(build("fedavg")), small()
    with workers(run, model) as engine:
        for process in torch.multiprocessing.active_children():
            os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        with pytest.raises(RunError, match="a worker process died"):
            list(rounds(run, model, engine))


def test_what_cannot_be_shared_out_is_refused() -> None:
    run, model = run_of(Method("plain")), small()
    with pytest.raises(RunError, match="real messages"):
        Workers(Embedded(run, model, CLIENTS, wire=True), 2)
    elsewhere = Embedded(run, model, CLIENTS)
    elsewhere.device = torch.device("cuda")
    with pytest.raises(RunError, match=r"on a GPU set engine\.block"):
        Workers(elsewhere, 2)
