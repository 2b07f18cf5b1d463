"""FedSAM: against a closed form on quadratics, a plain torch loop, and FedAvg."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import Clients, client_batches, final_params, max_difference, play, toy_model, toy_run
from quadratics import LR, QuadraticClients, final_point, initial_point

from partita.core import tensors
from partita.core.client import ClientState, Job, begin_round
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.plan import NO_NAMES
from partita.core.tensors import Tensors
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedsam import FedSAMClient, fedsam, perturbed
from partita.training.local_training import train_clients

RHO = 0.3


def test_one_step_on_quadratics_has_a_closed_form() -> None:
    """The gradient at w + rho g / |g| is g + rho H g / |g|, and the norm is that of each client's own gradient."""
    bowls, w = QuadraticClients(), initial_point()
    g = np.einsum("ijk,ik->ij", bowls.H, w - bowls.a)
    uphill = RHO * g / np.linalg.norm(g, axis=1, keepdims=True)
    expected = w - LR * np.einsum("i,ij->j", bowls.p, g + np.einsum("ijk,ik->ij", bowls.H, uphill))
    found = final_point(fedsam(RHO), bowls, steps=1, count=1)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_perturbation_has_length_rho_and_the_direction_of_the_gradient() -> None:
    params = toy_model().initial
    direction = {name: 7.0 * value + 1.0 for name, value in params.items() if name != "head.weight"}
    step = tensors.subtract(perturbed(params, direction, RHO), params)
    assert step.keys() == direction.keys()
    assert float(tensors.norm(step)) == pytest.approx(RHO, rel=1e-5)
    factor = RHO / float(tensors.norm(direction))
    torch.testing.assert_close(step, tensors.scale(direction, factor), rtol=1e-3, atol=1e-6)


def test_zero_gradient_gives_no_perturbation() -> None:
    params = toy_model().initial
    assert tensors.equal(perturbed(params, tensors.zeros_like(params), RHO), params)
    assert perturbed(params, {}, RHO) == {}


def sam_loop(run: Any, start: Tensors, names: frozenset[str], batches: Any, examples: Any) -> Tensors:
    """Plain SGD with SAM, written with torch alone."""
    model, params = toy_model(), {name: value.clone() for name, value in start.items()}

    def gradient(at: Tensors, batch: Any) -> Tensors:
        live = {name: at[name].clone().requires_grad_() for name in sorted(names)}
        loss = model.losses(model({**at, **live}, batch.inputs), batch.targets).mean()
        return dict(zip(live, torch.autograd.grad(loss, list(live.values())), strict=True))

    for indices in batches:
        batch = examples.take(indices)
        grads = gradient(params, batch)
        length = torch.sqrt(sum((grad.square().sum() for grad in grads.values()), torch.zeros(())))
        moved = {**params, **{name: params[name] + RHO * grad / length for name, grad in grads.items()}}
        for name, grad in gradient(moved, batch).items():
            params[name] = params[name] - run.training.lr * grad
    return params


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "without the kernel"])
def test_client_round_equals_a_torch_loop(frozen: bool) -> None:
    """Of what trains only: a frozen kernel is not perturbed, and does not count in the norm."""
    model, clients = toy_model(), Clients(a=10)
    method = Method("m", plan=fedfrozen(0).plan if frozen else fedavg().plan, client_rules=(FedSAMClient(RHO),))
    run = toy_run(method, 1)
    names = model.all_names() - (model.names("query", "key") if frozen else NO_NAMES)
    begun = begin_round(run, model, Job(0, "a", dict(model.initial), NO_NAMES), ClientState(), clients["a"].train)
    [learned] = train_clients(run, [begun])
    batches = client_batches(run, 0, "a", clients["a"].train)
    expected = sam_loop(run, model.initial, names, batches, clients["a"].train)
    assert learned.params.keys() == names
    assert max_difference(learned.params, {name: expected[name] for name in names}) < 1e-6


@pytest.mark.parametrize("block", [1, 3])
def test_fedsam_with_rho_zero_is_fedavg_bit_for_bit(block: int) -> None:
    clients = Clients(a=5, b=9, c=6)
    one, two = (play(toy_run(method, 3), toy_model(), clients, block=block) for method in (fedsam(0.0), fedavg()))
    assert tensors.equal(final_params(one), final_params(two))
    assert [each.loss for each in one] == [each.loss for each in two]
    assert max_difference(final_params(one), final_params(play(toy_run(fedsam(), 3), toy_model(), clients))) > 1e-4


def test_negative_rho_is_refused() -> None:
    with pytest.raises(MethodError, match=r"method\.rho is -0\.1"):
        fedsam(-0.1)
