"""FedPer: its plan, its personal head, and its limits FedAvg and local-only."""

from __future__ import annotations

import pytest
import torch
from helpers import Clients, TorchLoop, batches_of, distance, last, play, run_of, small

from partita.core import tensors
from partita.core.plan import Phase, RoundInfo, plan_for
from partita.methods.fedavg import fedavg
from partita.methods.fedper import fedper
from partita.methods.local_only import local_only
from partita.storage.client_store import MemoryStore

CLIENTS = Clients(a=5, b=9, c=6)
MODEL = small()
HEAD = MODEL.names("head")
EVERYTHING = tuple(sorted(frozenset().union(*MODEL.tags.values())))


def test_the_plan() -> None:
    plan = plan_for(fedper().plan, MODEL, RoundInfo(0, 3, "a"))
    assert (plan.train, plan.keep) == (MODEL.all_names(), HEAD)
    assert plan.up == plan.down == MODEL.all_names() - HEAD
    assert len(plan.phases) == 1


def test_body_and_head_are_those_of_a_plain_loop_from_the_clients_own_head() -> None:
    run, store = run_of(fedper(), 2, cohort=3), MemoryStore()
    played = play(run, MODEL, CLIENTS, store=store)
    for client in CLIENTS.clients:
        head = MODEL.initial
        for number, start in enumerate([MODEL.initial, played[0].server.params]):
            loop = TorchLoop(MODEL, run.training, {**start, **tensors.select(head, HEAD)})
            loop.fit(CLIENTS[client].train, batches_of(run, number, client, CLIENTS[client].train))
            head = loop.values()
        assert distance(store.load(client, 2).personal, tensors.select(head, HEAD)) == 0


def test_with_nothing_personal_it_is_fedavg_bit_for_bit() -> None:
    one, two = (play(run_of(method, 3, cohort=2), MODEL, CLIENTS) for method in (fedper(personal=()), fedavg()))
    assert tensors.equal(last(one), last(two))


def test_with_everything_personal_it_is_local_only_bit_for_bit() -> None:
    stores = MemoryStore(), MemoryStore()
    for method, store in zip((fedper(personal=EVERYTHING), local_only()), stores, strict=True):
        play(run_of(method, 3), MODEL, CLIENTS, store=store)
    for client in CLIENTS.clients:
        assert tensors.equal(*(store.load(client, 3).personal for store in stores))


def test_the_servers_head_stays_as_it_was_drawn() -> None:
    final = last(play(run_of(fedper(), 2), MODEL, CLIENTS))
    assert all(final[name] is MODEL.initial[name] for name in HEAD)


@pytest.mark.parametrize("finetune", [1, 4])
def test_before_a_test_a_client_trains_a_copy_of_all_of_it(finetune: int) -> None:
    adapt = fedper(finetune=finetune).adapt
    assert adapt is not None
    assert adapt(MODEL) == (Phase(MODEL.all_names(), finetune),)
    assert fedper(finetune=0).adapt is None


def test_heads_differ_between_clients() -> None:
    store = MemoryStore()
    play(run_of(fedper(), 1), MODEL, CLIENTS, store=store)
    heads = [store.load(client, 1).personal["head.weight"] for client in CLIENTS.clients]
    assert not torch.equal(heads[0], heads[1])
