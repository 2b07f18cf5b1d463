"""What a client minimizes: the task's loss, the penalties of rules, and their correction of the gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import toy_run
from line_model import Line, line_batch, line_errors, line_gradient
from torch import Tensor

from partita.core import tensors
from partita.core.client_rule import ClientRule, Context, ForbiddenData
from partita.core.data import Batch
from partita.core.method import Method
from partita.core.model import Output
from partita.core.personal_copy import add_personal_copy, copy_name
from partita.core.plan import Phase, Plan
from partita.core.tensors import Slots, Tensors
from partita.training.client_axis import ClientAxis
from partita.training.gradients import PlainGradients
from partita.training.objective import Objective, masked_mean

MODEL = Line()
NAMES = MODEL.all_names()
PLAN = Plan((Phase(NAMES),), up=NAMES, down=NAMES)
MASK = torch.tensor([1.0, 0.0, 1.0])


@dataclass
class Probe(ClientRule):
    """A penalty of `size` times the sum of b, and a record of what the rule was given."""

    size: float | None = None
    per_example: bool = False

    def __post_init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> Tensor | None:
        self.seen.append((out, params, batch, ctx))
        return None if self.size is None else self.size * params["b"]


def make_objective(*rules: ClientRule, **training: Any) -> Objective:
    return Objective(toy_run(Method("m", client_rules=rules), **training), MODEL, PLAN, 0.25, "cpu")


def loss_of(objective: Objective, batch: Batch, sent: Slots | None = None, memory: Slots | None = None) -> list[float]:
    frozen, trainable = {"b": MODEL.initial["b"]}, {"w": MODEL.initial["w"]}
    both = objective.loss(
        trainable, frozen, MODEL.initial, sent or {}, memory or {}, batch.inputs, batch.targets, batch.mask
    )
    return [float(value) for value in both]


def test_objective_names_model_and_method() -> None:
    assert str(make_objective()) == "line with m"


def test_masked_mean_counts_only_unmasked_losses() -> None:
    losses = torch.tensor([1.0, 5.0, 4.0])
    assert float(masked_mean(losses, None)) == pytest.approx(10 / 3)
    assert float(masked_mean(losses, MASK)) == 2.5
    assert float(masked_mean(losses, torch.tensor([0.0, 1.0, 0.0]))) == 5.0
    assert float(masked_mean(losses, torch.zeros(3))) == 0.0, "an empty batch has no loss"


@pytest.mark.parametrize("mask", [None, MASK])
def test_loss_without_rules_is_the_mean_loss_of_the_task(mask: Tensor | None) -> None:
    batch = line_batch(3, mask)
    expected = float(masked_mean(line_errors(MODEL.initial, batch).square() / 2, mask))
    assert loss_of(make_objective(), batch) == pytest.approx([expected, expected])


def test_loss_adds_all_penalties_and_reports_the_task_alone() -> None:
    """A rule without a penalty adds nothing."""
    batch = line_batch(3, MASK)
    task, _ = loss_of(make_objective(), batch)
    assert loss_of(make_objective(Probe(2.0), Probe(), Probe(8.0)), batch) == pytest.approx([task + 5.0, task])


def test_penalty_reads_output_parameters_batch_and_context() -> None:
    rule, batch = Probe(), line_batch(3, MASK)
    sent, memory = {"s": {"w": torch.ones(2)}}, {"m": {"w": torch.zeros(2)}}
    loss_of(make_objective(rule), batch, sent, memory)
    [(out, params, seen, ctx)] = rule.seen
    assert torch.equal(out.logits, MODEL(MODEL.initial, batch.inputs).logits)
    assert tensors.equal(params, MODEL.initial)
    assert (seen.inputs, seen.targets, seen.mask) == (batch.inputs, batch.targets, batch.mask)
    assert (ctx.model, ctx.plan, ctx.lr) == (MODEL, PLAN, 0.25)
    assert (ctx.anchor, ctx.sent, ctx.memory) == (MODEL.initial, sent, memory)


def test_penalties_are_split_by_whether_they_read_examples() -> None:
    """A rule that does not declare that it reads examples gets none."""
    plain, quiet, reader = Probe(2.0), Probe(), Probe(3.0, per_example=True)
    objective = make_objective(plain, reader, quiet)
    ctx = objective.context(MODEL.initial, {}, {})
    for per_example, expected in ((True, [1.5]), (False, [1.0])):
        found = objective.penalties("out", MODEL.initial, "batch", ctx, per_example)
        assert [float(value) for value in found] == expected
    assert [(out, batch) for out, _, batch, _ in reader.seen] == [("out", "batch")]
    for rule in (plain, quiet):
        [(out, _, batch, _)] = rule.seen
        assert isinstance(out, ForbiddenData)
        assert isinstance(batch, ForbiddenData)


# ---- corrections


@dataclass
class Shift(ClientRule):
    """Adds to one gradient, leaves another out, and returns one that nobody asked for."""

    by: float
    without: str = ""

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        moved = {name: grad + self.by * ctx.sent["s"]["w"][0] for name, grad in grads.items() if name != self.without}
        return {**moved, "stray": torch.ones(1)}


SENT = {"s": {"w": torch.tensor([2.0])}}


def test_objective_corrects_gradients_only_with_such_a_rule_or_a_clip() -> None:
    assert not make_objective().corrects
    assert not make_objective(Probe(1.0)).corrects
    assert make_objective(Probe(1.0), Shift(1.0)).corrects
    assert make_objective(clip=1.0).corrects


def test_correct_applies_rules_in_order_to_the_given_names_only() -> None:
    grads = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
    found = make_objective(Shift(1.0), Shift(10.0, without="b")).correct(grads, MODEL.initial, SENT, {})
    assert {name: value.tolist() for name, value in found.items()} == {"w": [23.0, 24.0]}


def test_correct_clips_after_the_rules() -> None:
    """To the norm over all names, and not at all below the limit."""
    grads = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(2.0)}
    found = make_objective(Shift(0.5), clip=1.0).correct(grads, MODEL.initial, SENT, {})
    size = (4.0 + 9.0 + 9.0) ** 0.5
    assert found["w"].tolist() == pytest.approx([2.0 / size, 3.0 / size], rel=1e-5)
    assert found["b"].item() == pytest.approx(3.0 / size, rel=1e-5)
    unchanged = make_objective(Shift(0.5), clip=100.0).correct(grads, MODEL.initial, SENT, {})
    assert unchanged["w"].tolist() == [2.0, 3.0]


def test_personal_copy_is_clipped_by_itself() -> None:
    grads = {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor(0.0)}
    model, names = add_personal_copy(MODEL, ()), ("w", "b")
    whole = {**grads, **{copy_name(name): 100 * grads[name] for name in names}}
    objective = replace(make_objective(clip=1.0), model=model)
    found = objective.correct(whole, model.initial, {}, {})
    alone = make_objective(clip=1.0).correct(grads, MODEL.initial, {}, {})
    assert {name: found[name].tolist() for name in names} == {name: alone[name].tolist() for name in names}
    assert found["personal.w"].tolist() == pytest.approx([0.6, 0.8])
    assert objective.correct(grads, model.initial, {}, {}).keys() == grads.keys()


# ---- precision


@pytest.mark.parametrize(("precision", "kind"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_forward_pass_runs_in_the_given_precision(precision: str, kind: torch.dtype) -> None:
    objective = make_objective(precision=precision)
    assert objective.full_precision == (kind == torch.float32)
    with objective.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == kind


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_caches_casts_unless_told_otherwise(cache: bool) -> None:
    objective = make_objective(precision="bfloat16")
    with objective.autocast() if cache else objective.autocast(cache=False):
        assert torch.is_autocast_cache_enabled() == cache


# ---- gradients without privacy


@pytest.mark.parametrize("mask", [None, MASK])
def test_plain_gradient_is_that_of_the_mean_loss(mask: Tensor | None) -> None:
    batch, objective = line_batch(3, mask), make_objective()
    values = [{}, {}, {}, {}, batch.inputs, batch.targets, mask]
    grads, task = PlainGradients(objective, ClientAxis(1))(MODEL.initial, values, [None] * 8, 1)
    expected = line_gradient(MODEL.initial, batch)
    assert {name: value.tolist() for name, value in grads.items()} == {
        name: pytest.approx(value.tolist()) for name, value in expected.items()
    }
    assert float(task.detach()) == pytest.approx(
        float(masked_mean(line_errors(MODEL.initial, batch).square() / 2, mask))
    )
    assert not MODEL.initial["w"].requires_grad


def test_plain_gradients_of_a_block_are_those_of_each_client() -> None:
    params = {name: torch.stack([value, 2 * value]) for name, value in MODEL.initial.items()}
    batches = [line_batch(3, MASK), line_batch(3, torch.ones(3))]
    batches[1].inputs["x"].add_(1.0)
    stacked = [torch.stack([batch.inputs["x"] for batch in batches]), torch.stack([b.targets for b in batches])]
    masks = torch.stack([batch.mask for batch in batches])  # type: ignore[misc]
    values = [{}, {}, {}, {}, {"x": stacked[0]}, stacked[1], masks]
    dims = [0, None, None, None, None, 0, 0, 0]
    grads, task = PlainGradients(make_objective(), ClientAxis(2))(params, values, dims, 2)
    assert task.shape == (2,)
    for rank, batch in enumerate(batches):
        own = {name: value[rank] for name, value in params.items()}
        for name, value in line_gradient(own, batch).items():
            assert torch.allclose(grads[name][rank], value)


def test_plain_gradient_leaves_out_parameters_that_the_loss_ignores() -> None:
    batch = line_batch()
    values = [{}, {}, {}, {}, batch.inputs, batch.targets, None]
    grads, _ = PlainGradients(make_objective(), ClientAxis(1))(
        {**MODEL.initial, "spare": torch.ones(2)}, values, [None] * 8, 1
    )
    assert grads.keys() == {"w", "b"}


def test_plain_gradients_use_a_given_lift() -> None:
    """As a compiled program does."""

    def doubled(function: Any, dims: Any) -> Any:
        return lambda *given: tuple(2 * value for value in function(*given))

    batch = line_batch()
    values = [{}, {}, {}, {}, batch.inputs, batch.targets, None]
    grads, _ = PlainGradients(make_objective(), ClientAxis(1), doubled)(MODEL.initial, values, [None] * 8, 1)
    torch.testing.assert_close(grads["w"], 2 * line_gradient(MODEL.initial, batch)["w"])
