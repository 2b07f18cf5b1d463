"""FedPer: its plan, its personal head, and its limits FedAvg and local-only."""

from __future__ import annotations

import pytest
import torch
from helpers import Clients, TorchLoop, client_batches, final_params, max_difference, play, toy_model, toy_run

from partita.core import tensors
from partita.core.plan import Phase, RoundInfo, plan_for
from partita.methods.fedavg import fedavg
from partita.methods.fedper import fedper
from partita.methods.local_only import local_only
from partita.storage.client_store import MemoryStore

CLIENTS = Clients(a=5, b=9, c=6)
MODEL = toy_model()
HEAD = MODEL.names("head")
ALL_TAGS = tuple(sorted(frozenset().union(*MODEL.tags.values())))


def test_fedper_keeps_the_head_and_shares_the_body() -> None:
    plan = plan_for(fedper().plan, MODEL, RoundInfo(0, 3, "a"))
    assert (plan.train, plan.keep) == (MODEL.all_names(), HEAD)
    assert plan.up == plan.down == MODEL.all_names() - HEAD
    assert len(plan.phases) == 1


def test_fedper_head_equals_a_plain_loop_from_the_client_head() -> None:
    run, store = toy_run(fedper(), 2, cohort=3), MemoryStore()
    played = play(run, MODEL, CLIENTS, store=store)
    for client in CLIENTS.clients:
        head = MODEL.initial
        for number, start in enumerate([MODEL.initial, played[0].server.params]):
            loop = TorchLoop(MODEL, run.training, {**start, **tensors.select(head, HEAD)})
            loop.fit(CLIENTS[client].train, client_batches(run, number, client, CLIENTS[client].train))
            head = loop.values()
        assert max_difference(store.load(client, 2).personal, tensors.select(head, HEAD)) == 0


def test_fedper_with_nothing_personal_is_fedavg_bit_for_bit() -> None:
    one, two = (play(toy_run(method, 3, cohort=2), MODEL, CLIENTS) for method in (fedper(personal=()), fedavg()))
    assert tensors.equal(final_params(one), final_params(two))


def test_fedper_with_everything_personal_is_local_only_bit_for_bit() -> None:
    stores = MemoryStore(), MemoryStore()
    for method, store in zip((fedper(personal=ALL_TAGS), local_only()), stores, strict=True):
        play(toy_run(method, 3), MODEL, CLIENTS, store=store)
    for client in CLIENTS.clients:
        assert tensors.equal(*(store.load(client, 3).personal for store in stores))


def test_fedper_server_head_keeps_its_initial_value() -> None:
    final = final_params(play(toy_run(fedper(), 2), MODEL, CLIENTS))
    assert all(final[name] is MODEL.initial[name] for name in HEAD)


@pytest.mark.parametrize("finetune", [1, 4])
def test_fedper_adapts_all_parameters_before_evaluation(finetune: int) -> None:
    adapt = fedper(finetune=finetune).adapt
    assert adapt is not None
    assert adapt(MODEL) == (Phase(MODEL.all_names(), finetune),)
    assert fedper(finetune=0).adapt is None


def test_fedper_heads_differ_between_clients() -> None:
    store = MemoryStore()
    play(toy_run(fedper(), 1), MODEL, CLIENTS, store=store)
    heads = [store.load(client, 1).personal["head.weight"] for client in CLIENTS.clients]
    assert not torch.equal(heads[0], heads[1])
