"""Optimizers, clipping and schedules against torch's and their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import OPTIMIZERS
from torch import Tensor

from partita.core import tensors
from partita.core.optim import SGD, AdamW, Optimizer, Schedule, clip_gradients
from partita.core.rng import Key
from partita.core.tensors import Tensors

SHAPES = {"matrix": (5, 3), "scalar": (), "vector": (7,), "volume": (2, 3, 4), "wide": (1, 65)}
LR = 0.03


def random_tensors(*path: str | int, scale: float = 1.0, lead: tuple[int, ...] = ()) -> Tensors:
    key = Key(11)
    for step in path:
        key = key / step
    return {
        name: scale * torch.randn((*lead, *shape), generator=(key / name).generator()) for name, shape in SHAPES.items()
    }


def torch_optimizer(optimizer: Optimizer, params: list[Tensor]) -> torch.optim.Optimizer:
    if isinstance(optimizer, SGD):
        return torch.optim.SGD(
            params, LR, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay, nesterov=optimizer.nesterov
        )
    assert isinstance(optimizer, AdamW)
    betas = optimizer.beta1, optimizer.beta2
    return torch.optim.AdamW(params, LR, betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay)


CASES = {
    **OPTIMIZERS,
    "plain": SGD(),
    "decayed momentum": SGD(momentum=0.5, weight_decay=0.3),
    "adamw, other betas": AdamW(0.5, 0.9, 1e-3, 0.0),
}


@pytest.mark.parametrize("kind", CASES)
def test_optimizer_steps_equal_torch_bit_for_bit(kind: str) -> None:
    ours, start = CASES[kind], random_tensors("start")
    params = {name: value.clone() for name, value in start.items()}
    theirs = [value.clone().requires_grad_() for value in start.values()]
    reference, state = torch_optimizer(ours, theirs), ours.init(params)
    for step in range(10):
        grads = random_tensors("grads", step, scale=10.0 ** (step % 4 - 3))
        given = tensors.digest(grads)
        for param, grad in zip(theirs, grads.values(), strict=True):
            param.grad = grad.clone()
        reference.step()
        ours.step(params, grads, state, LR, dict.fromkeys(params, step + 1))
        assert tensors.digest(grads) == given
        assert tensors.equal(params, dict(zip(params, (value.detach() for value in theirs), strict=True))), step
    assert not any(torch.equal(params[name], start[name]) for name in params)


@pytest.mark.parametrize("kind", CASES)
def test_parameter_without_a_gradient_does_not_move(kind: str) -> None:
    ours, params = CASES[kind], random_tensors("start")
    still = params["vector"].clone()
    grads = {name: value for name, value in random_tensors("grads").items() if name != "vector"}
    ours.step(params, grads, ours.init(params), LR, dict.fromkeys(params, 1))
    assert torch.equal(params["vector"], still)


@pytest.mark.parametrize("kind", CASES)
def test_stacked_clients_step_like_each_alone(kind: str) -> None:
    ours, start = CASES[kind], random_tensors("start", lead=(3,))
    stacked = {name: value.clone() for name, value in start.items()}
    alone = [{name: value[client].clone() for name, value in start.items()} for client in range(3)]
    states = ours.init(stacked), *(ours.init(each) for each in alone)
    for step in range(4):
        grads, ages = random_tensors("grads", step, lead=(3,)), dict.fromkeys(start, step + 1)
        ours.step(stacked, grads, states[0], LR, ages)
        for client, params in enumerate(alone):
            own = {name: value[client] for name, value in grads.items()}
            ours.step(params, own, states[client + 1], LR, ages)
            assert tensors.equal(params, {name: value[client] for name, value in stacked.items()})


def test_bias_correction_uses_the_age_of_each_name() -> None:
    """A name that joins later gets its own bias correction, like a torch parameter group added later."""
    ours, params = AdamW(), random_tensors("start")
    late = params["vector"].clone().requires_grad_()
    state = ours.init(params)
    for step in range(3):
        early = {name: value for name, value in random_tensors("grads", step).items() if name != "vector"}
        ours.step(params, early, state, LR, dict.fromkeys(params, step + 1))
    reference = torch_optimizer(ours, [late])
    for step in range(3, 6):
        grads = random_tensors("grads", step)
        ages = {**dict.fromkeys(params, step + 1), "vector": step - 2}
        ours.step(params, grads, state, LR, ages)
        late.grad = grads["vector"]
        reference.step()
    assert torch.equal(params["vector"], late.detach())


@pytest.mark.parametrize("limit", [1e-3, 1.0, 13.0, 1e6])
def test_gradient_clipping_equals_torch_bit_for_bit(limit: float) -> None:
    grads = random_tensors("grads")
    theirs = [torch.zeros_like(value).requires_grad_() for value in grads.values()]
    for param, grad in zip(theirs, grads.values(), strict=True):
        param.grad = grad.clone()
    total = torch.nn.utils.clip_grad_norm_(theirs, limit)
    clipped = clip_gradients(grads, tensors.norm(grads), limit)
    assert torch.equal(tensors.norm(grads), total)
    assert tensors.equal(clipped, {name: param.grad for name, param in zip(grads, theirs, strict=True)})
    assert float(tensors.norm(clipped)) <= limit * (1 + 1e-6)


def test_norm_of_no_tensors_is_zero() -> None:
    assert float(tensors.norm({})) == 0.0


ROUNDS = 12


def test_constant_and_step_schedules_have_known_factors() -> None:
    assert {Schedule().factor(number, ROUNDS) for number in range(ROUNDS)} == {1.0}
    steps = Schedule("step", every=5, gamma=0.5)
    assert [steps.factor(number, ROUNDS) for number in range(ROUNDS)] == [1.0] * 5 + [0.5] * 5 + [0.25] * 2


@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_cosine_schedule_matches_torch_and_linear_schedule_is_a_line(floor: float) -> None:
    cosine, line = Schedule("cosine", floor=floor), Schedule("linear", floor=floor)
    param = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([param], 1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS, eta_min=floor)
    for number in range(ROUNDS):
        assert cosine.factor(number, ROUNDS) == pytest.approx(reference.get_last_lr()[0], abs=1e-12)
        assert cosine.factor(number, ROUNDS) == pytest.approx(
            floor + (1 - floor) * (1 + math.cos(math.pi * number / ROUNDS)) / 2
        )
        assert line.factor(number, ROUNDS) == pytest.approx(1 + (floor - 1) * number / ROUNDS)
        optimizer.step()
        reference.step()
    assert cosine.factor(ROUNDS, ROUNDS) == pytest.approx(floor)
    assert line.factor(ROUNDS, ROUNDS) == pytest.approx(floor)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "step"])
def test_warmup_rises_linearly_before_the_schedule_starts(kind: str) -> None:
    warm, plain = Schedule(kind, warmup=3, every=2), Schedule(kind, every=2)  # type: ignore[arg-type]
    assert [warm.factor(number, ROUNDS) for number in range(3)] == [0.25, 0.5, 0.75]
    assert [warm.factor(3 + number, ROUNDS) for number in range(9)] == [plain.factor(number, 9) for number in range(9)]


def test_warmup_longer_than_the_run_keeps_rising() -> None:
    assert [Schedule("cosine", warmup=5).factor(number, 3) for number in range(3)] == pytest.approx(
        [1 / 6, 2 / 6, 3 / 6]
    )
