"""Ditto: FedAvg for the shared model, local training for the copies, and the proximal term between them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import (
    OPTIMIZERS,
    Clients,
    TorchLoop,
    client_batches,
    final_params,
    max_difference,
    play,
    toy_model,
    toy_run,
)
from quadratics import (
    LR,
    QuadraticClients,
    client_step_matrix,
    copy_as_vector,
    fixed_point,
    initial_point,
    quadratic_rounds,
)

from partita.core import tensors
from partita.core.compose import compose
from partita.core.dp_settings import PrivacySettings
from partita.core.method_error import MethodError
from partita.core.personal_copy import add_personal_copy, copy_name
from partita.core.tensors import Tensors
from partita.methods.ditto import ditto
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen
from partita.methods.local_only import local_only
from partita.storage.client_store import MemoryStore

CLIENTS = Clients(a=5, b=9, c=6)
BASE = toy_model()
MODEL = add_personal_copy(toy_model())


def shared(params: Tensors) -> Tensors:
    return {name: params[name] for name in BASE.initial}


def copies(store: MemoryStore, client: str, done: int) -> Tensors:
    personal = store.load(client, done).personal
    return {name: personal[copy_name(name)] for name in BASE.initial}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adamw"])
@pytest.mark.parametrize("block", [1, 2])
def test_shared_model_is_fedavg_bit_for_bit(optimizer: str, block: int) -> None:
    settings = {"count": 3, "optimizer": OPTIMIZERS[optimizer], "cohort": 2, "clip": 1.0}
    one = play(toy_run(ditto(0.7), **settings), MODEL, CLIENTS, block=block)  # type: ignore[arg-type]
    two = play(toy_run(fedavg(), **settings), BASE, CLIENTS, block=block)  # type: ignore[arg-type]
    assert tensors.equal(shared(final_params(one)), final_params(two))
    for left, right in zip(one, two, strict=True):
        assert (left.loss, left.traffic, left.drift) == (right.loss, right.traffic, right.drift)


def test_copies_without_the_proximal_term_are_local_only_bit_for_bit() -> None:
    stores = MemoryStore(), MemoryStore()
    play(toy_run(ditto(0.0), 3, cohort=2, clip=1.0), MODEL, CLIENTS, store=stores[0])
    play(toy_run(local_only(), 3, cohort=2, clip=1.0), BASE, CLIENTS, store=stores[1])
    for client in CLIENTS.clients:
        assert tensors.equal(copies(stores[0], client, 3), stores[1].load(client, 3).personal)


def test_copy_equals_a_plain_loop_with_the_proximal_term() -> None:
    lam, store = 0.7, MemoryStore()
    run = toy_run(ditto(lam), 2, cohort=3)
    played = play(run, MODEL, CLIENTS, store=store)
    for client in CLIENTS.clients:
        own = BASE.initial
        for number, received in enumerate([MODEL.initial, played[0].server.params]):
            loop = TorchLoop(BASE, run.training, own)
            examples = CLIENTS[client].train
            for indices in client_batches(run, number, client, examples):
                batch = examples.take(indices)
                loop.optimizer.zero_grad()
                loss = BASE.losses(BASE(loop.params, batch.inputs), batch.targets).mean()
                away = [((value - received[name]) ** 2).sum() for name, value in loop.params.items()]
                (loss + lam / 2 * torch.stack(away).sum()).backward()
                loop.optimizer.step()
            own = loop.values()
        assert max_difference(copies(store, client, 2), own) < 1e-6


@pytest.mark.slow
def test_stronger_proximal_term_keeps_the_copy_closer_to_the_received_model() -> None:
    away = []
    for lam in (0.0, 1.0, 5.0, 20.0):  # 20 = 1 / lr
        store = MemoryStore()
        play(toy_run(ditto(lam), 1, steps=8), MODEL, CLIENTS, store=store)
        away.append(max_difference(copies(store, "b", 1), BASE.initial))
    assert away == sorted(away, reverse=True)
    assert away[-1] < 0.5 * away[0]


@pytest.mark.slow
def test_copies_of_quadratic_clients_reach_the_proximal_optimum() -> None:
    """With w at FedAvg's fixed point, v_i minimizes f_i(v) + lam / 2 |v - w|^2: (H_i + lam I) v = H_i a_i + lam w."""
    bowls, lam, steps, count, store = QuadraticClients(), 0.8, 5, 25, MemoryStore()
    list(quadratic_rounds(ditto(lam), bowls, steps, count, store=store))
    w = fixed_point(bowls.p, client_step_matrix(bowls.H, steps), bowls.a)
    for place, client in enumerate(bowls.clients):
        H, a = bowls.H[place], bowls.a[place]
        optimum = np.linalg.solve(H + lam * np.eye(5), H @ a + lam * w)
        np.testing.assert_allclose(copy_as_vector(store.load(client, count)), optimum, rtol=0, atol=1e-4)


def test_one_round_of_a_quadratic_client_is_the_closed_form() -> None:
    bowls, lam, steps, store = QuadraticClients(), 0.8, 3, MemoryStore()
    list(quadratic_rounds(ditto(lam), bowls, steps, 1, store=store))
    start, H, a = initial_point(), bowls.H[1], bowls.a[1]
    optimum = np.linalg.solve(H + lam * np.eye(5), H @ a + lam * start)
    shrink = np.linalg.matrix_power(np.eye(5) - LR * (H + lam * np.eye(5)), steps)
    np.testing.assert_allclose(
        copy_as_vector(store.load("c1", 1)), optimum + shrink @ (start - optimum), rtol=0, atol=1e-12
    )


def test_only_the_chosen_parameters_get_a_copy() -> None:
    method, store = ditto(0.5, copied=("head",)), MemoryStore()
    assert method.extend is not None
    model = method.extend(toy_model(), toy_run(method).key)
    play(toy_run(method, 2), model, CLIENTS, store=store)
    assert store.load("a", 2).personal.keys() == {"personal.head.weight"}
    assert not torch.equal(store.load("a", 2).personal["personal.head.weight"], BASE.initial["head.weight"])


@pytest.mark.slow
def test_copies_freeze_with_their_originals() -> None:
    method, store = compose(fedfrozen(1), ditto(0.5)), MemoryStore()
    run = toy_run(method, 3)
    play(replace(run, rounds=1), MODEL, CLIENTS, store=store)
    early = {name: value.clone() for name, value in copies(store, "a", 1).items()}
    store = MemoryStore()
    played = play(run, MODEL, CLIENTS, store=store)
    late = copies(store, "a", 3)
    moved = {name for name in late if not torch.equal(early[name], late[name])}
    assert moved == BASE.all_names() - BASE.names("query", "key")
    other = play(toy_run(fedfrozen(1), 3), BASE, CLIENTS)
    assert tensors.equal(shared(final_params(played)), final_params(other))


def test_negative_weight_and_example_level_privacy_are_refused() -> None:
    with pytest.raises(MethodError, match=r"method.lam is -1; the proximal weight cannot be negative"):
        ditto(-1)
    with pytest.raises(MethodError, match=r"ditto: DittoClient .*one more release.*privacy.unit = 'client'"):
        replace(ditto(), privacy=PrivacySettings(clip=1.0, noise=1.0))
