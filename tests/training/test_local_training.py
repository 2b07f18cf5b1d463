"""All phases of local training on a model whose steps are known by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import toy_run
from line_model import Line, line_batch
from torch import Tensor

from partita.core.client import OPTIMIZER_PREFIX, ClientRound, ClientState, Job, LocalResult, begin_round
from partita.core.data import Batch
from partita.core.method import Method
from partita.core.optim import SGD, AdamW
from partita.core.plan import Phase, Plan
from partita.core.settings import Run
from partita.core.tensors import Slots
from partita.training.local_training import group_key, train_clients

MODEL = Line()
W, BOTH = frozenset({"w"}), MODEL.all_names()


class LineExamples:
    def __init__(self, count: int = 8) -> None:
        self.batch = line_batch(count)

    def __len__(self) -> int:
        return len(self.batch.targets)

    def take(self, indices: Tensor) -> Batch:
        return Batch({"x": self.batch.inputs["x"][indices]}, self.batch.targets[indices])


def make_run(*phases: Phase, carry: bool = False, **more: Any) -> Run:
    plan = Plan(phases or (Phase(BOTH),), up=BOTH, down=BOTH)
    return toy_run(Method("m", lambda model, round_info: plan, carry_optimizer=carry), lr=0.05, **more)


def begin(run: Run, client: str = "a", count: int = 8, memory: Slots | None = None) -> ClientRound:
    job = Job(0, client, dict(MODEL.initial), BOTH)
    return begin_round(run, MODEL, job, ClientState({}, memory or {}), LineExamples(count))


def torch_loop(run: Run, begun: ClientRound) -> dict[str, list[float]]:
    """One torch.optim.SGD for all phases, whose momentum lasts from phase to phase."""
    params = {name: value.clone().requires_grad_() for name, value in MODEL.initial.items()}
    assert isinstance(run.training.steps_by, SGD)
    optimizer = torch.optim.SGD(params.values(), run.training.lr, momentum=run.training.steps_by.momentum)
    for phase, schedule in zip(begun.plan.phases, begun.schedules, strict=True):
        for indices in schedule:
            batch = begun.examples.take(indices)
            optimizer.zero_grad()
            MODEL.losses(MODEL(params, batch.inputs), batch.targets).mean().backward()
            for name in BOTH - phase.names:
                params[name].grad = None
            optimizer.step()
    return {name: value.tolist() for name, value in params.items()}


def assert_trained_as(result: LocalResult, expected: dict[str, list[float]]) -> None:
    assert {name: value.tolist() for name, value in result.params.items()} == {
        name: pytest.approx(value, rel=1e-5) for name, value in expected.items()
    }


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("carry", [False, True])
def test_momentum_lasts_from_phase_to_phase(carry: bool, clients: int) -> None:
    """Whether or not the method carries it to the next round."""
    run = make_run(Phase(W), Phase(BOTH, epochs=2), carry=carry, optimizer=SGD(momentum=0.9))
    rounds = [begin(run, f"c{rank}", 8 - 3 * rank) for rank in range(clients)]
    for begun, result in zip(rounds, train_clients(run, rounds), strict=True):
        assert_trained_as(result, torch_loop(run, begun))
        steps = [len(schedule) for schedule in begun.schedules]
        assert result.steps == {"w": sum(steps), "b": steps[1]}
        assert len(result.losses) == sum(steps)


@pytest.mark.parametrize("carry", [False, True])
def test_optimizer_state_is_read_only_where_it_is_needed(carry: bool) -> None:
    """For a later phase or round; reading it may copy it from a GPU."""
    run = make_run(carry=carry, optimizer=SGD(momentum=0.9))
    [result] = train_clients(run, [begin(run)])
    assert result.optimizer.keys() == ({"momentum"} if carry else set())


@pytest.mark.parametrize("drift", [False, True])
@pytest.mark.parametrize("clients", [1, 2, 3])
def test_facts_are_those_of_each_clients_own_delta(clients: int, drift: bool) -> None:
    run = make_run(drift=drift)
    rounds = [begin(run, f"c{rank}", 4 + 4 * rank) for rank in range(clients)]
    for result in train_clients(run, rounds):
        assert result.facts.delta is result.delta
        assert result.facts.finite
        for name, value in result.delta.items():
            assert torch.equal(value, result.params[name] - MODEL.initial[name])
        if clients > 1 and not drift:
            square = sum(float(value.double().square().sum()) for value in result.delta.values())
            assert result.facts.square == pytest.approx(square)
        else:
            assert result.facts.square is None
        assert result.facts.squares is None


def test_facts_say_that_a_delta_is_not_finite() -> None:
    """In the first or in the last of two phases."""
    for phases in ((Phase(BOTH),), (Phase(BOTH), Phase(W)), (Phase(W), Phase(BOTH))):
        run = make_run(*phases)
        begun = begin(run)
        begun.examples.batch.targets.fill_(float("inf"))  # type: ignore[attr-defined]
        [result] = train_clients(run, [begun])
        assert not result.facts.finite


# ---- clients that fit one block


def aged(**ages: int) -> Slots:
    return {f"{OPTIMIZER_PREFIX}age": {name: torch.tensor(age) for name, age in ages.items()}}


def test_clients_share_a_block_when_model_plan_and_memory_agree() -> None:
    run = make_run()
    one = begin(run)
    assert group_key(run, one) == group_key(run, begin(run, "b", 3))
    other_plan = replace(one, plan=one.plan.narrow(W))
    other_model = replace(one, ctx=replace(one.ctx, model=Line()))
    slots = replace(one, ctx=replace(one.ctx, memory={"seen": {"w": torch.ones(2)}}))
    names = replace(one, ctx=replace(one.ctx, memory={"seen": {"b": torch.ones(())}}))
    assert len({group_key(run, each) for each in (one, other_plan, other_model, slots, names)}) == 5


def test_clients_of_an_optimizer_with_step_counts_need_equal_ages() -> None:
    run = make_run(carry=True, optimizer=AdamW())
    new, old, older = (group_key(run, begin(run, memory=aged(**ages))) for ages in ({}, {"w": 3}, {"w": 4}))
    assert len({new, old, older}) == 3
    assert old == group_key(run, begin(run, memory=aged(w=3, b=0)))
    assert old != group_key(run, begin(run, memory=aged(w=0, b=3)))
    plain = make_run(carry=True, optimizer=SGD(momentum=0.9))
    assert group_key(plain, begin(plain, memory=aged(w=3))) == group_key(plain, begin(plain, memory=aged(w=4)))


def test_overlapping_phases_with_step_counts_need_equal_numbers_of_steps() -> None:
    """The later phase of a shared name starts from the steps of the earlier one."""
    for phases, same in (((Phase(BOTH),), True), ((Phase(W), Phase(BOTH)), False)):
        run = make_run(*phases, optimizer=AdamW())
        assert (group_key(run, begin(run, count=8)) == group_key(run, begin(run, count=4))) == same


def test_facts_are_not_finite_when_the_last_phase_sends_nothing() -> None:
    b = BOTH - W
    plan = Plan((Phase(W), Phase(b)), up=W, down=W, keep=b)
    run = toy_run(Method("m", lambda model, round_info: plan))
    begun = begin(run)
    begun.examples.batch.targets.fill_(float("inf"))  # type: ignore[attr-defined]
    [result] = train_clients(run, [begun])
    assert not result.facts.finite
