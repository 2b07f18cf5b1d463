"""Gradients that a rule computes itself: at other points, from several evaluations, for one client or a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from graph_fixtures import max_relative_difference, small_vit_run
from helpers import OPTIMIZERS, Clients, final_params, max_difference, no_vmap_fallback, play, toy_model, toy_run
from line_model import Line, line_batch, line_errors, line_gradient
from test_cuda_graphs import ReplayingRecorder
from test_phase_trainer import LR, assert_close, make_work, scaled, stacked
from torch import Tensor

from partita import SimulationEngine, rounds
from partita.core import tensors
from partita.core.client_rule import ClientRule, Context, GradientAt
from partita.core.data import Batch
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Output
from partita.core.optim import SGD
from partita.core.plan import Phase, Plan
from partita.core.rounds import RoundResult
from partita.core.tensors import Tensors
from partita.methods.fedprox import FedProxClient
from partita.training.cuda_graphs import GraphCache
from partita.training.phase_trainer import PhaseTrainer

MODEL = Line()
THREE = Clients(a=10, b=7, c=5)


class PlainStep(ClientRule):
    """The plain gradient, asked for at a point that is spelled out."""

    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        return gradient_at({name: params[name] for name in sorted(ctx.plan.train)})


@dataclass(frozen=True)
class Ahead(ClientRule):
    """The gradient one normalized step ahead: two evaluations, and a norm of one client."""

    by: float = 0.3

    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        grads = gradient_at({})
        factor = self.by / tensors.norm(grads)
        return gradient_at({name: params[name] - factor * grad for name, grad in grads.items()})


@dataclass(frozen=True)
class AtFunction(ClientRule):
    """The gradient at a point that a test chooses."""

    point: Callable[[Tensors, Context], Tensors]

    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        return gradient_at(self.point(params, ctx))


def train(*rules: ClientRule, block: int = 1, plan: Plan | None = None, **more: Any) -> list[RoundResult]:
    method = Method("m", client_rules=rules)
    if plan is not None:
        method = replace(method, plan=lambda model, round_info: plan)
    return play(toy_run(method, 2, **more), toy_model(), THREE, block=block)


# ---- against plain training


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("more", [{}, {"clip": 0.3}, {"precision": "bfloat16"}], ids=["plain", "clip", "bfloat16"])
def test_gradient_at_the_parameters_is_the_plain_one_bit_for_bit(kind: str, block: int, more: dict[str, Any]) -> None:
    one, two = (train(*rules, block=block, optimizer=OPTIMIZERS[kind], **more) for rules in ((), (PlainStep(),)))
    assert tensors.equal(final_params(one), final_params(two))
    assert [each.loss for each in one] == [each.loss for each in two]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("block", [1, 3])
def test_plain_gradient_beside_penalties_and_corrections_is_the_plain_one_bit_for_bit(block: int) -> None:
    """The gradient that a rule asks for includes the penalties of all rules, and their corrections follow."""

    class Halve(ClientRule):
        def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
            return {name: 0.5 * grad for name, grad in grads.items()}

    others = (FedProxClient(2.0), Halve())
    one, two = (final_params(train(*rules, block=block)) for rules in (others, (PlainStep(), *others)))
    assert tensors.equal(one, two)
    assert max_difference(one, final_params(train())) > 1e-3


def test_blocks_equal_single_clients() -> None:
    """In float32 with SGD, up to the rounding of a batched product; every client has a norm of its own."""
    with no_vmap_fallback():
        one, two = (train(Ahead(), block=block) for block in (1, 3))
    assert max_difference(final_params(one), final_params(two)) < 1e-6
    assert max_difference(final_params(one), final_params(train())) > 1e-3


@pytest.mark.slow
def test_every_phase_evaluates_its_own_names() -> None:
    names, head = toy_model().all_names(), frozenset({"head.weight"})
    plan = Plan((Phase(head), Phase(names - head)), up=names, down=names)
    one, two = (train(*rules, plan=plan, block=2) for rules in ((), (PlainStep(),)))
    assert tensors.equal(final_params(one), final_params(two))
    seen: list[set[str]] = []

    class Watch(ClientRule):
        def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
            assert params.keys() == names
            grads = gradient_at({})
            seen.append(set(grads))
            return {**grads, "head.weight": torch.zeros_like(params["head.weight"])}  # restricted to the phase

    train(Watch(), plan=plan)
    assert {frozenset(each) for each in seen} == {head, names - head}


# ---- by hand


def moved(rules: tuple[ClientRule, ...], count: int = 1, **more: Any) -> tuple[list[Any], Tensor]:
    """Each client's parameters after one step from 1, 2, ... times the initial ones, and the losses."""
    work = make_work([scaled(rank + 1.0) for rank in range(count)], rules=rules, **more)
    trainer = PhaseTrainer(work)
    losses = trainer.step(line_batch() if count == 1 else stacked(*[line_batch()] * count))
    return trainer.params(), losses


def double(params: Tensors, ctx: Context) -> Tensors:
    return {name: 2 * value for name, value in params.items()}


@pytest.mark.parametrize("count", [1, 3])
def test_gradient_is_evaluated_at_the_given_point(count: int) -> None:
    """The loss is that of the parameters before the step all the same."""
    params, losses = moved((AtFunction(double),), count)
    for rank in range(count):
        start, batch = scaled(rank + 1.0), line_batch()
        grads = line_gradient(scaled(2 * (rank + 1.0)), batch)
        assert_close(params[rank], {name: start[name] - LR * grad for name, grad in grads.items()})
        assert float(losses[rank]) == pytest.approx(float(line_errors(start, batch).square().mean() / 2))
        assert not losses.requires_grad


@pytest.mark.parametrize("count", [1, 3])
def test_names_outside_the_point_keep_their_values(count: int) -> None:
    params, _ = moved((AtFunction(lambda params, ctx: {"b": params["b"] + 1}),), count)
    for rank in range(count):
        start = scaled(rank + 1.0)
        grads = line_gradient({**start, "b": start["b"] + 1}, line_batch())
        assert_close(params[rank], {name: start[name] - LR * grad for name, grad in grads.items()})


@pytest.mark.parametrize("count", [1, 3])
def test_point_may_be_the_same_for_all_clients(count: int) -> None:
    """Then no value of it has a client dimension."""
    params, _ = moved((AtFunction(lambda params, ctx: ctx.anchor),), count)
    grads = line_gradient(MODEL.initial, line_batch())
    for rank in range(count):
        assert_close(params[rank], {name: scaled(rank + 1.0)[name] - LR * grad for name, grad in grads.items()})


@pytest.mark.parametrize("count", [1, 3])
def test_point_may_move_a_frozen_parameter(count: int) -> None:
    """It has no gradient, and does not train."""
    params, _ = moved((AtFunction(double),), count, names=frozenset({"w"}))
    for rank in range(count):
        grads = line_gradient(scaled(2 * (rank + 1.0)), line_batch())
        assert_close(params[rank], {"w": scaled(rank + 1.0)["w"] - LR * grads["w"]})


@pytest.mark.parametrize("count", [1, 3])
def test_name_that_the_rule_leaves_out_does_not_move(count: int) -> None:
    class OnlyB(ClientRule):
        def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
            return {"stray": params["w"], "b": gradient_at({})["b"]}

    params, _ = moved((OnlyB(),), count)
    for rank in range(count):
        start = scaled(rank + 1.0)
        step = LR * line_gradient(start, line_batch())["b"]
        assert_close(params[rank], {"w": start["w"], "b": start["b"] - step})


def test_rule_reads_each_clients_own_context() -> None:
    """A gradient without any evaluation, of a name that the loss need not depend on."""

    class Pull(ClientRule):
        slots = frozenset({"own"})

        def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
            return {"w": params["w"] + ctx.anchor["w"] + 10 * ctx.sent["sent"]["w"] + 100 * ctx.memory["own"]["w"]}

    memories = [{"own": {"w": torch.full((2,), float(rank))}} for rank in range(3)]
    anchors = [scaled(rank + 2.0) for rank in range(3)]
    params, losses = moved((Pull(),), 3, memories=memories, anchors=anchors)
    for rank in range(3):
        start = scaled(rank + 1.0)
        grad = start["w"] + anchors[rank]["w"] + 10 + 100 * rank
        assert_close(params[rank], {"w": start["w"] - LR * grad, "b": start["b"]})
        assert float(losses[rank]) == pytest.approx(float(line_errors(start, line_batch()).square().mean() / 2))


def test_evaluations_run_the_model_as_often_as_the_rule_asks() -> None:
    """And once more for the loss, unless one of them was at the parameters."""
    calls: list[Tensor] = []

    class Counted(Line):
        def __call__(self, params: Tensors, inputs: Tensors) -> Output:
            calls.append(params["w"])
            return super().__call__(params, inputs)

    cases: list[tuple[tuple[ClientRule, ...], int]] = [
        ((), 1), ((PlainStep(),), 1), ((Ahead(),), 2), ((AtFunction(double),), 2)
    ]  # fmt: skip
    for rules, expected in cases:
        work = make_work(rules=rules)
        work = replace(work, contexts=[replace(ctx, model=Counted()) for ctx in work.contexts])
        calls.clear()
        PhaseTrainer(work).step(line_batch())
        assert len(calls) == expected


@pytest.mark.parametrize("count", [1, 2])
def test_point_with_an_unknown_name_is_refused(count: int) -> None:
    rule = AtFunction(lambda params, ctx: {"v": params["w"]})
    with pytest.raises(MethodError, match="AtFunction asks for the gradient at a value of 'v', which line does not"):
        moved((rule,), count)


def test_rule_that_branches_on_values_names_the_block_size() -> None:
    class Branching(ClientRule):
        def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
            grads = gradient_at({})
            return grads if tensors.norm(grads) > 0 else {}

    train(Branching())
    with pytest.raises(ValueError, match=r"set engine\.clients_per_block = 1"):
        train(Branching(), block=3)


# ---- replayed and compiled steps


def vit_params(rules: tuple[ClientRule, ...], graphs: GraphCache | None, block: int, **more: Any) -> Tensors:
    run, model, federation = small_vit_run("fedavg", SGD(0.9), 2, **more)
    run = replace(run, method=replace(run.method, client_rules=rules))
    *_, last = rounds(run, model, SimulationEngine(run, model, federation, block, graphs=graphs))
    return dict(last.server.params)


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 4])
def test_replayed_steps_equal_eager_ones(block: int) -> None:
    again = ReplayingRecorder()
    replayed = vit_params((Ahead(),), GraphCache(again), block, steps=5)
    assert again.recorded
    assert max_relative_difference(replayed, vit_params((Ahead(),), None, block, steps=5)) < 1e-4


@pytest.mark.slow
def test_compiled_steps_equal_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward passes are compiled: of the evaluation, and of the loss before the step."""
    whole, rule = torch.compile, AtFunction(double)
    monkeypatch.setattr(torch, "compile", lambda made, **told: whole(made, backend="aot_eager", **told))
    compiled = vit_params((rule,), GraphCache(None, compile=True), 4, steps=2)
    assert max_relative_difference(compiled, vit_params((rule,), None, 4, steps=2)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_blocks_of_a_transformer_equal_single_clients(precision: str) -> None:
    """With the attention and the layers of `transformers`; in bfloat16, up to its rounding."""
    one, two = (vit_params((Ahead(0.05),), None, block, steps=3, precision=precision) for block in (1, 4))
    assert max_relative_difference(one, two) < (1e-4 if precision == "float32" else 0.1)


def test_padding_does_not_count() -> None:
    """A block pads short batches; the mask reaches every evaluation."""
    mask = torch.tensor([1.0, 0.0, 1.0])
    trainer = PhaseTrainer(make_work(rules=(AtFunction(double),)))
    trainer.step(Batch(line_batch().inputs, line_batch().targets, mask))
    grads = line_gradient(scaled(2.0), line_batch(3, mask))
    [params] = trainer.params()
    assert_close(params, {name: MODEL.initial[name] - LR * grad for name, grad in grads.items()})


def test_default_is_the_plain_gradient() -> None:
    grads = {"w": torch.ones(2)}
    found = ClientRule().step_gradient(lambda point: {} if point else grads, MODEL.initial, None)  # type: ignore[arg-type]
    assert found is grads
