"""APFL: a plain torch loop, its limits FedAvg and local-only, and the mixing weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import OPTIMIZERS, Clients, client_batches, final_params, max_difference, play, toy_model, toy_run
from quadratics import QuadraticClients, quadratic_rounds
from torch import Tensor

from partita.core import tensors
from partita.core.client import ClientState
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.personal_copy import copy_name
from partita.core.rng import Key
from partita.core.rounds import make_job
from partita.core.tensors import Tensors
from partita.engines.simulation import SimulationEngine
from partita.evaluation import score
from partita.methods.apfl import ALPHA, apfl
from partita.methods.fedavg import fedavg
from partita.methods.local_only import local_only
from partita.storage.client_store import MemoryStore

CLIENTS = Clients(a=5, b=9, c=6)
BASE = toy_model()


def extended(method: Method) -> Model:
    assert method.extend is not None
    return method.extend(toy_model(), Key(0))


def shared(params: Tensors) -> Tensors:
    return {name: params[name] for name in BASE.initial}


def copies(state: ClientState) -> Tensors:
    return {name: state.personal[copy_name(name)] for name in BASE.initial}


def gradient(params: Tensors, inputs: Tensors, targets: Tensor) -> Tensors:
    live = {name: value.clone().requires_grad_() for name, value in params.items()}
    loss = BASE.losses(BASE(live, inputs), targets).mean()
    return dict(zip(live, torch.autograd.grad(loss, list(live.values())), strict=True))


def reference_rounds(method: Method, alpha: float, adaptive: bool, store: MemoryStore) -> dict[str, float]:
    """Compare two rounds with a loop as in the paper's algorithm; return each client's mixing weight."""
    run, model = toy_run(method, 2, cohort=3, lr=0.2), extended(method)
    played, weights = play(run, model, CLIENTS, store=store), {}
    for client in CLIENTS.clients:
        v, weight, lr = BASE.initial, torch.tensor(alpha), run.training.lr
        for number, received in enumerate([model.initial, played[0].server.params]):
            w = shared(received)
            for indices in client_batches(run, number, client, CLIENTS[client].train):
                batch = CLIENTS[client].train.take(indices)
                mixed = {name: weight * v[name] + (1 - weight) * w[name] for name in w}
                at_w, at_mixed = (gradient(point, batch.inputs, batch.targets) for point in (w, mixed))
                slope = torch.stack([((v[name] - w[name]) * at_mixed[name]).sum() for name in w]).sum()
                v = {name: v[name] - lr * weight * at_mixed[name] for name in w}
                w = {name: w[name] - lr * at_w[name] for name in w}
                weight = (weight - lr * slope).clamp(0, 1) if adaptive else weight
        state = store.load(client, 2)
        assert max_difference(copies(state), v) < 1e-5
        assert abs(float(state.personal[ALPHA] - weight)) < 1e-5
        weights[client] = float(weight)
    return weights


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_fixed_mixture_equals_a_plain_loop(alpha: float) -> None:
    reference_rounds(apfl(alpha, adaptive=False), alpha, False, MemoryStore())


def test_adaptive_mixture_equals_a_plain_loop() -> None:
    weights = reference_rounds(apfl(0.3), 0.3, True, MemoryStore())
    assert len({round(weight, 4) for weight in weights.values()} | {0.3}) == 4, "each client learns its own"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_mixing_weight_stays_between_0_and_1(alpha: float) -> None:
    """On quadratics far apart, a step without the projection would leave the interval in both directions."""
    found = []
    for sign in (1, -1):
        bowls, store = QuadraticClients(), MemoryStore()
        bowls.a *= sign * 20
        list(quadratic_rounds(apfl(alpha), bowls, 3, 4, store=store))
        found += [float(store.load(client, 4).personal[ALPHA]) for client in bowls.clients]
    assert all(0 <= weight <= 1 for weight in found)
    assert {0.0, 1.0} & set(found), "some reach an end"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_shared_model_is_fedavg_bit_for_bit(optimizer: str) -> None:
    method = apfl(0.6, adaptive=False)
    one = play(toy_run(method, 3, OPTIMIZERS[optimizer], cohort=2, clip=1.0), extended(method), CLIENTS)
    two = play(toy_run(fedavg(), 3, OPTIMIZERS[optimizer], cohort=2, clip=1.0), BASE, CLIENTS)
    assert tensors.equal(shared(final_params(one)), final_params(two))
    assert [(result.loss, result.traffic) for result in one] == [(result.loss, result.traffic) for result in two]


def test_weight_0_is_fedavg_tested_at_the_clients() -> None:
    method, store = apfl(0.0, adaptive=False), MemoryStore()
    run, model = toy_run(method, 2), extended(method)
    played = play(run, model, CLIENTS, store=store)
    assert all(tensors.equal(copies(store.load(client, 2)), BASE.initial) for client in CLIENTS.clients)
    jobs = [make_job(run, model, played[-1].server, 1, client)[0] for client in CLIENTS.clients]
    for client, scores in SimulationEngine(run, model, CLIENTS, store=store).evaluate(jobs):
        assert scores == score(BASE, shared(played[-1].server.params), CLIENTS[client].test)


def test_weight_1_is_local_only_bit_for_bit() -> None:
    method, stores = apfl(1.0, adaptive=False), (MemoryStore(), MemoryStore())
    run, model = toy_run(method, 3, cohort=2, clip=1.0), extended(method)
    played = play(run, model, CLIENTS, store=stores[0])
    play(toy_run(local_only(), 3, cohort=2, clip=1.0), BASE, CLIENTS, store=stores[1])
    jobs = [make_job(run, model, played[-1].server, 2, client)[0] for client in CLIENTS.clients]
    for client, scores in SimulationEngine(run, model, CLIENTS, store=stores[0]).evaluate(jobs):
        alone = stores[1].load(client, 3).personal
        assert tensors.equal(copies(stores[0].load(client, 3)), alone)
        assert scores == score(BASE, alone, CLIENTS[client].test)


def test_adaptive_weight_needs_plain_sgd() -> None:
    with pytest.raises(MethodError, match="apfl: APFLClient is derived for sgd, not for adamw"):
        toy_run(apfl(), 1, OPTIMIZERS["adamw"])
    assert apfl(adaptive=False).supports_optimizer("adamw")


def test_invalid_weight_and_example_level_privacy_are_refused() -> None:
    with pytest.raises(MethodError, match=r"method.alpha is 1.5; a mixing weight is from 0 to 1"):
        apfl(1.5)
    with pytest.raises(MethodError, match=r"apfl: APFLClient .*one more release"):
        replace(apfl(), privacy=PrivacySettings(clip=1.0, noise=1.0))
