"""One phase of training on a model whose steps are known by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers import toy_run
from line_model import Line, line_batch, line_errors, line_gradient
from torch import Tensor

from partita.core import tensors
from partita.core.client_rule import ClientRule, Context
from partita.core.data import Batch
from partita.core.method import Method
from partita.core.optim import SGD, AdamW, Optimizer
from partita.core.packed import PackedTensors
from partita.core.plan import NO_NAMES, Phase, Plan
from partita.core.tensors import Names, Slots, Tensors
from partita.training import phase_trainer
from partita.training.parameter_groups import ParameterGroup
from partita.training.phase_trainer import EagerOptimizer, PhaseTrainer, leaves
from partita.training.phase_work import PhaseWork

MODEL = Line()
BOTH, LR = MODEL.all_names(), 0.25


def make_work(
    starts: Sequence[Tensors] = (MODEL.initial,),
    names: Names = BOTH,
    up: Names = BOTH,
    rules: tuple[ClientRule, ...] = (),
    optimizer: Optimizer | None = None,
    moments: Sequence[Slots] = (),
    anchors: Sequence[Tensors] = (),
    memories: Sequence[Slots] = (),
    lr: float = LR,
    **more: Any,
) -> PhaseWork:
    """One phase of as many clients as there are starts."""
    run = toy_run(Method("m", client_rules=rules), optimizer=optimizer, lr=lr, **more)
    keep = names - up
    plan = Plan((Phase(names),), up=up & names, down=BOTH - keep, keep=keep)
    contexts = [
        Context(MODEL, plan, anchor, {"sent": {"w": torch.ones(2)}}, memory, lr)
        for anchor, memory in zip(
            anchors or [MODEL.initial for _ in starts], memories or [{}] * len(starts), strict=True
        )
    ]
    return PhaseWork(run, plan.phases[0], contexts, starts, moments or [{} for _ in starts])


def scaled(by: float) -> Tensors:
    return tensors.scale(MODEL.initial, by)


def stacked(*batches: Batch) -> Batch:
    masks = [batch.mask for batch in batches]
    return Batch(
        {"x": torch.stack([batch.inputs["x"] for batch in batches])},
        torch.stack([batch.targets for batch in batches]),
        None if masks[0] is None else torch.stack(masks),  # type: ignore[arg-type]
    )


def after_step(params: Tensors, batch: Batch) -> Tensors:
    return {name: params[name] - LR * grad for name, grad in line_gradient(params, batch).items()}


def assert_close(found: Mapping[str, Tensor], expected: Tensors) -> None:
    torch.testing.assert_close({name: found[name] for name in found}, {name: expected[name] for name in found})
    assert found.keys() == expected.keys()


# ---- steps


def test_step_of_a_single_client_moves_against_the_gradient() -> None:
    batch, trainer = line_batch(), PhaseTrainer(make_work())
    losses = trainer.step(batch)
    assert losses.shape == (1,)
    assert not losses.requires_grad
    assert float(losses[0]) == pytest.approx(float(line_errors(MODEL.initial, batch).square().mean() / 2))
    [params] = trainer.params()
    assert_close(params, after_step(MODEL.initial, batch))
    assert MODEL.initial["w"].tolist() == [1.0, -2.0]


@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 0.0, 1.0])])
def test_step_of_a_block_moves_the_clients_in_the_batch(mask: Tensor | None) -> None:
    """The last client has finished and stays where it is."""
    starts = [scaled(by) for by in (1.0, 2.0, 3.0)]
    batches = [line_batch(3, mask), replace(line_batch(3, mask), targets=torch.tensor([3.0, 1.0, 4.0]))]
    trainer = PhaseTrainer(make_work(starts))
    losses = trainer.step(stacked(*batches))
    assert losses.shape == (2,)
    assert not losses.requires_grad
    expected = [after_step(start, batch) for start, batch in zip(starts, batches, strict=False)]
    for params, own in zip(trainer.params(), [*expected, starts[2]], strict=True):
        assert_close(params, own)


def test_step_leaves_frozen_parameters_to_the_model() -> None:
    """Each client of the block has its own frozen parameter."""
    starts = [scaled(by) for by in (1.0, 2.0, 3.0)]
    trainer = PhaseTrainer(make_work(starts, names=frozenset({"w"})))
    trainer.step(stacked(line_batch(), line_batch()))
    for params, start in zip(trainer.params(), starts[:2], strict=False):
        assert_close(params, {"w": after_step(start, line_batch())["w"]})


class Pull(ClientRule):
    """Reads anchor, sent slots and memory: each client has its own anchor and memory, the slot is shared or not."""

    slots = frozenset({"own"})

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        return {"w": ctx.anchor["w"] + 10 * ctx.sent["sent"]["w"] + 100 * ctx.memory["own"]["w"]}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_corrected_step_reads_each_clients_own_context(count: int) -> None:
    """Rules see one client at a time; a name that they leave out does not move."""
    anchors = [scaled(by) for by in (1.0, 2.0, 3.0)][:count]
    memories = [{"own": {"w": torch.full((2,), float(rank))}} for rank in range(count)]
    trainer = PhaseTrainer(make_work([MODEL.initial] * count, rules=(Pull(),), anchors=anchors, memories=memories))
    trainer.step(line_batch() if count == 1 else stacked(*[line_batch()] * count))
    for rank, params in enumerate(trainer.params()):
        slope = anchors[rank]["w"] + 10 + 100 * rank
        assert_close(params, {"w": MODEL.initial["w"] - LR * slope, "b": MODEL.initial["b"]})


def test_step_runs_in_the_given_runner() -> None:
    seen: list[Batch] = []

    def runner(step: Any, batch: Batch, variant: object) -> Tensor:
        assert variant is None, "a step without privacy computes in one way"
        seen.append(batch)
        return step(batch) + 1

    batch = line_batch()
    plain, shifted = PhaseTrainer(make_work()).step(batch), PhaseTrainer(make_work(), run_step=runner).step(batch)
    assert torch.equal(shifted, plain + 1)
    assert seen == [batch]


# ---- optimizer steps


@dataclass
class RecordingOptimizer:
    """Records the learning rate and the step counts that it is given."""

    calls: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def step(self, params: Tensors, grads: Tensors, state: Slots, lr: float, step_counts: Mapping[str, int]) -> None:
        self.calls.append((lr, dict(step_counts)))


def group(recorder: RecordingOptimizer, lr_factor: float = 1.0, *names: str) -> ParameterGroup:
    return ParameterGroup(recorder, lr_factor, names or ("b", "w"))  # type: ignore[arg-type]


def test_eager_optimizer_counts_steps_from_the_initial_ones() -> None:
    recorder, initial = RecordingOptimizer(), {"w": 4, "b": 0}
    optimizer, grads = EagerOptimizer([group(recorder)]), {"w": torch.zeros(2)}
    optimizer.reset(0.5, initial)
    optimizer.step({}, grads, {})
    optimizer.step({}, grads, {})
    assert recorder.calls == [(0.5, {"w": 5, "b": 1}), (0.5, {"w": 6, "b": 2})]
    assert initial == {"w": 4, "b": 0}
    optimizer.reset(0.25, initial)
    optimizer.step({}, grads, {})
    assert recorder.calls[-1] == (0.25, {"w": 5, "b": 1})


def test_trainer_uses_a_given_optimizer_and_gradients() -> None:
    recorder = RecordingOptimizer()
    asked: list[int] = []

    def gradients(trainable: Tensors, values: Any, dims: Any, count: int) -> tuple[Tensors, Tensor]:
        asked.append(count)
        return trainable, torch.tensor(3.0)

    trainer = PhaseTrainer(make_work(), gradients, EagerOptimizer([group(recorder)]))
    assert trainer.step(line_batch()).tolist() == [3.0]
    assert asked == [1]
    assert recorder.calls == [(LR, {"w": 1, "b": 1})]


@pytest.mark.parametrize("clients", [1, 2])
def test_states_hold_moments_and_ages_of_each_client(clients: int) -> None:
    old: Slots = {"age": {"w": torch.tensor(3)}}
    trainer = PhaseTrainer(make_work([MODEL.initial] * clients, optimizer=AdamW(), moments=[old] * clients))
    trainer.step(line_batch() if clients == 1 else stacked(line_batch(), line_batch()))
    states = trainer.states([2, 1][:clients])
    assert len(states) == clients
    for state, taken in zip(states, (2, 1), strict=False):
        assert state.keys() == {"first", "second", "age"}
        assert {name: int(value) for name, value in state["age"].items()} == {"w": 3 + taken, "b": taken}
        gradient = line_gradient(MODEL.initial, line_batch())
        assert_close(state["first"], {name: 0.1 * gradient[name] for name in ("b", "w")})


def test_states_of_an_optimizer_without_step_counts_have_no_age() -> None:
    [state] = PhaseTrainer(make_work(optimizer=SGD(momentum=0.5))).states([2])
    assert state.keys() == {"momentum"}
    assert PhaseTrainer(make_work()).states([2]) == [{}]


# ---- reuse


def contents(trainer: PhaseTrainer) -> list[list[Any]]:
    parts = trainer.trainable, trainer.moments, *[value for value, _ in trainer.fixed]
    return [[value.tolist() for value in leaves(part)] for part in parts]


@pytest.mark.parametrize("start", ["same", "different"])
@pytest.mark.parametrize("momentum", [None, 0.0, 7.0])
def test_reloaded_trainer_equals_a_new_one(start: str, momentum: float | None) -> None:
    """Whether clients start alike or apart, with or without optimizer state."""
    optimizer = SGD() if momentum is None else SGD(momentum=0.5)
    moments: list[Slots] = [
        {"momentum": {"w": torch.full((2,), momentum + rank)}} if momentum else {} for rank in range(2)
    ]
    end = scaled(3.0)
    work = make_work(
        [end, dict(end) if start == "same" else scaled(4.0)],
        frozenset({"w"}),
        optimizer=optimizer,
        moments=moments,
        lr=0.5,
    )
    first = make_work(
        [scaled(1.0), scaled(2.0)],
        frozenset({"w"}),
        optimizer=optimizer,
        moments=[{"momentum": {"w": torch.ones(2)}}, {}] if momentum is not None else [],
    )
    if start == "same":  # so that the frozen parameters are shared in both
        common = scaled(1.0)
        first = replace(first, start_params=[common, dict(common)])
    trainer = PhaseTrainer(first, reused=True)
    places = [value.data_ptr() for value in leaves([trainer.trainable, trainer.moments])]
    trainer.step(stacked(line_batch(), line_batch()))
    trainer.reload(work)
    new = PhaseTrainer(work)
    assert contents(trainer) == contents(new)
    assert places == [value.data_ptr() for value in leaves([trainer.trainable, trainer.moments])]
    for each in (trainer, new):
        each.step(stacked(line_batch(), line_batch()))
    assert contents(trainer) == contents(new)


END = scaled(3.0)


@pytest.mark.parametrize(
    ("starts", "aged"),
    [
        ([END, END, scaled(4.0)], ()),
        ([END, scaled(4.0), END], ()),
        ([END, {**END, "b": torch.tensor(9.0)}, END], ()),
        ([END, END, END], ()),
        ([END, END, END], (0,)),
        ([END, END, END], (2,)),
        ([END, END, END], (0, 1, 2)),
    ],
)
def test_reload_gives_each_client_its_own_start_and_moments(starts: list[Tensors], aged: tuple[int, ...]) -> None:
    """All clients are alike, or one has other parameters, one other parameter, or optimizer state of its own."""
    moments: list[Slots] = [
        {"momentum": {"w": torch.full((2,), 7.0 + rank)}} if rank in aged else {} for rank in range(3)
    ]
    optimizer = SGD(momentum=0.5)
    trainer = PhaseTrainer(make_work([scaled(1.0)] * 3, optimizer=optimizer), reused=True)
    trainer.step(stacked(*[line_batch()] * 3))
    work = make_work(starts, optimizer=optimizer, moments=moments)
    trainer.reload(work)
    assert contents(trainer) == contents(PhaseTrainer(work))


def test_reload_takes_the_anchor_the_rate_and_the_ages_of_the_new_work() -> None:
    trainer = PhaseTrainer(make_work(optimizer=AdamW()), reused=True)
    anchor = scaled(5.0)
    work = make_work(optimizer=AdamW(), anchors=[anchor], moments=[{"age": {"w": torch.tensor(6)}}], lr=0.125)
    trainer.reload(work)
    assert trainer.anchor[0] is anchor
    assert trainer.initial_steps == {"b": 0, "w": 6}
    assert isinstance(trainer.optimizer, EagerOptimizer)
    assert (trainer.optimizer.lr, trainer.optimizer.step_counts) == (0.125, {"b": 0, "w": 6})


@pytest.mark.parametrize("reused", [True, False])
def test_results_are_copies_only_if_the_trainer_is_reused(reused: bool) -> None:
    start = scaled(1.0)
    work = make_work([start], frozenset({"w"}), optimizer=SGD(momentum=0.5))
    trainer = PhaseTrainer(work, reused=reused)
    [params], [state] = trainer.params(), trainer.states([0])
    trainer.step(line_batch())
    assert (params["w"].tolist() == MODEL.initial["w"].tolist()) == reused
    assert (state["momentum"]["w"].tolist() == [0.0, 0.0]) == reused
    frozen = trainer.fixed[0][0]["b"]
    assert torch.equal(frozen, start["b"])
    assert (frozen is start["b"]) == (not reused), "its owner may change it"


# ---- deltas


def moved_trainer(clients: int, **more: Any) -> PhaseTrainer:
    """Client i is at (i + 2) times the anchor, so that its delta is (i + 1) times the anchor."""
    return PhaseTrainer(make_work([scaled(rank + 2.0) for rank in range(clients)], **more))


def squared_norm(part: Tensors) -> float:
    return sum(float(value.double().square().sum()) for value in part.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("drift", [False, True])
@pytest.mark.parametrize("clients", [1, 3])
def test_deltas_are_parameters_minus_anchor(
    clients: int, drift: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_trainer, "PACKED_DEVICES", ("cpu",) if packed else ())
    found = moved_trainer(clients, drift=drift).deltas()
    assert len(found.deltas) == clients
    for rank, delta in enumerate(found.deltas):
        assert_close(delta, scaled(rank + 1.0))
        assert isinstance(delta, PackedTensors) == (packed and clients > 1)
    assert float(found.largest) == 2.0 * clients
    if clients == 1 or (drift and not packed):
        assert found.squares is None
    else:
        one = [squared_norm({name: value}) for name, value in sorted(MODEL.initial.items())]
        own = one if drift else [sum(one)]
        expected = [[square * (rank + 1) ** 2 for square in own] for rank in range(clients)]
        assert found.squares is not None
        assert found.squares.tolist() == [pytest.approx(row) for row in expected]
        assert found.squares.dtype == torch.float64


@pytest.mark.parametrize("clients", [1, 2])
def test_deltas_have_only_names_that_are_sent(clients: int) -> None:
    for delta in moved_trainer(clients, up=frozenset({"b"})).deltas().deltas:
        assert list(delta) == ["b"]
    nothing = moved_trainer(clients, up=NO_NAMES).deltas()
    assert [dict(delta) for delta in nothing.deltas] == [{}] * clients
    assert (float(nothing.largest), nothing.largest.shape, nothing.squares) == (0.0, (), None)


def test_deltas_are_not_packed_when_clients_differ_in_anchor_or_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_trainer, "PACKED_DEVICES", ("cpu",))
    apart = PhaseTrainer(make_work([scaled(2.0), scaled(5.0)], anchors=[scaled(1.0), scaled(3.0)])).deltas()
    for delta, expected in zip(apart.deltas, (scaled(1.0), scaled(2.0)), strict=True):
        assert not isinstance(delta, PackedTensors)
        assert_close(delta, expected)
    mixed = {"w": MODEL.initial["w"], "b": MODEL.initial["b"].double()}
    doubled = [{name: 2 * value for name, value in mixed.items()} for _ in range(2)]
    for delta in PhaseTrainer(make_work(doubled, anchors=[mixed, mixed])).deltas().deltas:
        assert {name: value.dtype for name, value in delta.items()} == {"w": torch.float32, "b": torch.float64}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("packed", [False, True])
def test_largest_is_not_finite_if_any_delta_is_not(packed: bool, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_trainer, "PACKED_DEVICES", ("cpu",) if packed else ())
    broken = {**MODEL.initial, "b": torch.tensor(wrong)}
    assert not torch.isfinite(PhaseTrainer(make_work([MODEL.initial, broken])).deltas().largest)


def test_leaves_are_in_the_order_of_names_at_every_level() -> None:
    one, two, three = (torch.tensor(float(number)) for number in (1, 2, 3))
    found = list(leaves([{"b": {"y": two, "x": one}, "c": three}, one]))
    assert [float(value) for value in found] == [1.0, 2.0, 3.0, 1.0]
    assert list(leaves({})) == []


# ---- clients that have finished


def test_finished_client_stays_exactly_as_it_was() -> None:
    """Also if what is computed in its place is not finite, as with noise that was not drawn."""
    spoiled: list[PhaseTrainer] = []

    def run_step(step: Any, batch: Any, variant: Any) -> Any:
        losses = step(batch)
        for trainer in spoiled:
            for value in [*trainer.trainable.values(), *trainer.moments["momentum"].values()]:
                value[spoiled_from:] = torch.nan
        return losses

    starts = [scaled(by) for by in (1.0, 2.0, 3.0, 4.0)]
    work = make_work(starts, optimizer=SGD(0.9, 0.1))
    trainer = PhaseTrainer(work, run_step=run_step)
    expected = PhaseTrainer(make_work(starts, optimizer=SGD(0.9, 0.1)))
    for each in (trainer, expected):
        each.step(stacked(*[line_batch()] * 4))
    spoiled.append(trainer)
    for active, count in ((3, 4), (2, 4), (2, 2), (1, 2)):
        spoiled_from = active
        assert trainer.step(stacked(*[line_batch()] * count), active).shape == (active,)
        expected.step(stacked(*[line_batch()] * active))
    spoiled.clear()
    steps = [5, 4, 2, 1]
    for found, wanted in zip(trainer.params(), expected.params(), strict=True):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.isfinite(trainer.deltas().largest)
    for found, wanted in zip(trainer.states(steps), expected.states(steps), strict=True):
        assert all(torch.equal(found["momentum"][name], wanted["momentum"][name]) for name in wanted["momentum"])


def test_clients_set_aside_do_not_enter_the_next_round() -> None:
    trainer = PhaseTrainer(make_work([scaled(1.0), scaled(2.0)]), reused=True)
    trainer.step(stacked(line_batch(), line_batch()))
    trainer.step(stacked(line_batch(), line_batch()), 1)
    trainer.reload(make_work([scaled(5.0), scaled(6.0)]))
    for found, start in zip(trainer.params(), (5.0, 6.0), strict=True):
        assert all(torch.equal(found[name], value) for name, value in scaled(start).items())
