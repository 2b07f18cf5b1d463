"""FedLESAM: against a plain torch loop over rounds, and FedAvg."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import Clients, client_batches, final_params, max_difference, play, toy_model, toy_run

from partita.core import tensors
from partita.core.client_rule import Context
from partita.core.compose import compose
from partita.core.method_error import MethodError
from partita.core.plan import Plan, share
from partita.core.settings import Run
from partita.core.tensors import Names, Tensors
from partita.methods.fedavg import fedavg
from partita.methods.fedlesam import FedLESAMClient, fedlesam
from partita.methods.fedper import fedper

RHO = 0.3
CLIENTS = Clients(a=5, b=9, c=6)
MODEL = toy_model()
HEAD = MODEL.names("head")
ALL = MODEL.all_names()


def reference(run: Run, kept: Names = frozenset()) -> Tensors:
    """All rounds, written with torch alone: each client remembers the global model that it received last."""
    world = {name: value.clone() for name, value in MODEL.initial.items()}
    received: dict[str, Tensors] = {}
    own: dict[str, Tensors] = {}
    for number in range(run.rounds):
        cohort = run.draw_cohort(number, CLIENTS.clients)
        sizes = {client: len(CLIENTS[client].train) for client in cohort}
        total = {name: torch.zeros_like(value) for name, value in world.items()}
        for client in cohort:
            start = {**world, **own.get(client, {})}
            last = received.get(client, world)
            away = {name: last[name] - world[name] for name in sorted(ALL - kept)}
            length = torch.sqrt(sum((value.square().sum() for value in away.values()), torch.zeros(())))
            uphill = {name: RHO * value / length if client in received else 0 * value for name, value in away.items()}
            params = _steps(run, number, client, start, uphill)
            for name in ALL - kept:
                total[name] += sizes[client] / sum(sizes.values()) * (params[name] - world[name])
            received[client] = dict(world)
            own[client] = {name: params[name] for name in kept}
        world = {name: value + total[name] for name, value in world.items()}
    return world


def _steps(run: Run, number: int, client: str, start: Tensors, uphill: Tensors) -> Tensors:
    examples, params = CLIENTS[client].train, dict(start)
    for indices in client_batches(run, number, client, examples):
        batch = examples.take(indices)
        live = {name: (value + uphill.get(name, 0.0)).detach().requires_grad_() for name, value in params.items()}
        loss = MODEL.losses(MODEL(live, batch.inputs), batch.targets).mean()
        for name, grad in zip(live, torch.autograd.grad(loss, list(live.values())), strict=True):
            params[name] = params[name] - run.training.lr * grad
    return params


@pytest.mark.parametrize("block", [1, 2])
def test_rounds_equal_a_torch_loop(block: int) -> None:
    """Two of three clients take part in each round, so some perturbations span several rounds."""
    run = toy_run(fedlesam(RHO), 5, cohort=2)
    assert max_difference(final_params(play(run, MODEL, CLIENTS, block=block)), reference(run)) < 1e-5
    assert max_difference(final_params(play(run, MODEL, CLIENTS)), final_params(play_fedavg(5, cohort=2))) > 1e-3


def test_personal_parameters_are_not_perturbed() -> None:
    """With a personal head, as in FedPer: it never comes from the server."""
    run = toy_run(compose(fedper(finetune=0), fedlesam(RHO)), 3)
    found, expected = final_params(play(run, MODEL, CLIENTS)), reference(run, HEAD)
    assert max_difference({name: found[name] for name in ALL - HEAD}, tensors.select(expected, ALL - HEAD)) < 1e-5


def play_fedavg(count: int, **more: Any) -> list[Any]:
    return play(toy_run(fedavg(), count, **more), MODEL, CLIENTS)


def test_first_round_is_fedavg_bit_for_bit() -> None:
    """No client has received a model before."""
    one = play(toy_run(fedlesam(RHO), 2), MODEL, CLIENTS)
    two = play_fedavg(2)
    assert tensors.equal(one[0].server.params, two[0].server.params)
    assert max_difference(one[1].server.params, two[1].server.params) > 1e-3


@pytest.mark.parametrize("block", [1, 3])
def test_fedlesam_with_rho_zero_is_fedavg_bit_for_bit(block: int) -> None:
    one, two = (play(toy_run(method, 3), MODEL, CLIENTS, block=block) for method in (fedlesam(0.0), fedavg()))
    assert tensors.equal(final_params(one), final_params(two))


def context(plan: Plan, received: Tensors) -> Context:
    return Context(MODEL, plan, MODEL.initial, {}, {"received": received}, 0.1)


def test_step_evaluates_one_gradient_at_the_distance_rho() -> None:
    asked: list[Tensors] = []

    def gradient_at(point: Tensors) -> Tensors:
        asked.append(point)
        return point

    params = tensors.scale(MODEL.initial, 3.0)
    received = {name: value + 1.0 for name, value in MODEL.initial.items()}
    plan = share(ALL, down=ALL - HEAD, keep=HEAD)
    FedLESAMClient(RHO).step_gradient(gradient_at, params, context(plan, received))
    [point] = asked
    assert point.keys() == ALL - HEAD
    step = tensors.subtract(point, params)
    assert float(tensors.norm(step)) == pytest.approx(RHO, rel=1e-5)
    assert min(float(value.min()) for value in step.values()) > 0, "uphill is where the model came from"


def test_client_remembers_what_it_received_and_trains() -> None:
    plan = share(ALL - HEAD, down=ALL)
    ctx = replace(context(plan, {}), notes={})
    sent, remembered = FedLESAMClient(RHO).finish(tensors.scale(MODEL.initial, 3.0), {}, ctx)
    assert sent == {}
    assert tensors.equal(remembered["received"], tensors.select(MODEL.initial, ALL - HEAD))


def test_negative_rho_is_refused() -> None:
    with pytest.raises(MethodError, match=r"method\.rho is -0\.1"):
        fedlesam(-0.1)
