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


def test_warmup_as_long_as_the_run_reaches_the_full_rate_afterwards() -> None:
    for kind in ("constant", "cosine", "linear", "step"):
        schedule = Schedule(kind, warmup=3, floor=0.5)  # type: ignore[arg-type]
        assert [schedule.factor(number, 3) for number in (2, 3)] == [0.75, 1.0]


def test_schedule_defaults_drop_to_a_tenth_every_ten_rounds() -> None:
    assert Schedule() == Schedule("constant", 0, 0.0, 10, 0.1)
    assert [Schedule("step").factor(number, 30) for number in (9, 10, 20)] == pytest.approx([1.0, 0.1, 0.01])
    assert Schedule("step", warmup=2, every=3).factor(4, 30) == 1.0
    assert Schedule("step", warmup=2, every=3).factor(5, 30) == pytest.approx(0.1)


def test_optimizer_defaults_are_those_of_torch() -> None:
    param = torch.zeros(1, requires_grad=True)
    theirs = torch.optim.AdamW([param]).defaults
    ours = AdamW()
    assert ((ours.beta1, ours.beta2), ours.eps, ours.weight_decay) == (
        theirs["betas"],
        theirs["eps"],
        theirs["weight_decay"],
    )
    theirs = torch.optim.SGD([param]).defaults
    assert SGD() == SGD(theirs["momentum"], theirs["weight_decay"], theirs["nesterov"])


def test_optimizer_name_and_state_say_what_it_depends_on() -> None:
    params = random_tensors("start")
    assert (SGD().name, SGD(0.9).name, AdamW().name) == ("sgd", "sgd with momentum", "adamw")
    assert (SGD().uses_step_count, SGD(0.9).uses_step_count, AdamW().uses_step_count) == (False, False, True)
    assert [set(each.init(params)) for each in (SGD(), SGD(0.9), AdamW())] == [set(), {"momentum"}, {"first", "second"}]
    with pytest.raises(ValueError, match=r"training\.nesterov needs training\.momentum above 0"):
        SGD(nesterov=True)


@pytest.mark.parametrize("kind", CASES)
def test_capturable_step_equals_the_plain_step(kind: str) -> None:
    """The learning rate and the step counts are tensors, and a later name has its own step count."""
    ours, both = CASES[kind], []
    for by_tensors in (False, True):
        params = random_tensors("start")
        state = ours.init(params)
        for step in range(1, 5):
            grads, ages = random_tensors("grads", step), {**dict.fromkeys(params, step), "vector": step + 2}
            if by_tensors:
                counts = {name: torch.tensor(float(age)) for name, age in ages.items()}
                ours.capturable_step(params, grads, state, torch.tensor(LR), counts)
            else:
                ours.step(params, grads, state, LR, ages)
        both.append({"params": params, **state})
    for slot, part in both[0].items():
        for name, value in part.items():
            assert torch.allclose(value, both[1][slot][name], rtol=1e-5, atol=1e-6), (slot, name)


def test_clipped_gradients_are_finite_when_they_are_zero() -> None:
    zero = {"w": torch.zeros(3)}
    assert clip_gradients(zero, tensors.norm(zero), 1.0)["w"].tolist() == [0.0] * 3


@pytest.mark.parametrize("warmup", [0, 3])
def test_schedule_of_one_round_reaches_its_floor_after_it(warmup: int) -> None:
    for kind in ("cosine", "linear"):
        schedule = Schedule(kind, warmup=warmup, floor=0.25)  # type: ignore[arg-type]
        assert [schedule.factor(warmup + number, warmup + 1) for number in (0, 1)] == [1.0, 0.25]
