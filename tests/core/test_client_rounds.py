"""Client rounds against plain torch.optim loops: phases, rules, batch order, blocks, adaptation and errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    KERNEL,
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
from torch import Tensor

from partita.core import tensors
from partita.core.batch_schedule import shuffled_batches
from partita.core.client import ClientError, ClientState, Job, begin_round, finish_round
from partita.core.client_rule import ClientRule, Context, LayerSelection
from partita.core.data import Examples
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model, Output
from partita.core.optim import SGD, AdamW, Schedule
from partita.core.plan import NO_NAMES, Phase, Plan, RoundInfo, share
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job, rounds
from partita.core.settings import Run
from partita.core.tensors import Names, Slots, Tensors
from partita.core.update import Update
from partita.core.update_transform import UpdateTransform
from partita.engines.availability import Availability
from partita.engines.simulation import SimulationEngine
from partita.methods.centralized import centralized
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedprox import fedprox
from partita.methods.local_only import local_only
from partita.storage.client_store import DiskStore
from partita.testing.toy import Float64Model, Float64Population, ToyExamples, ToyTransformer
from partita.training.client_axis import VmapError
from partita.training.local_training import group_key, train_clients

ALONE = Clients(c=10)
PAIR = Clients(c=10, d=7)
HEAD = frozenset({"head.weight"})


def job_for(model: Model, client: str = "c", number: int = 0, **more: Any) -> Job:
    return Job(number, client, dict(model.initial), frozenset(), **more)


def run_client_round(run: Run, model: Model, examples: Examples, state: ClientState | None = None, **more: Any) -> Any:
    """Run one client round and return (local result, update, client state)."""
    each = begin_round(run, model, job_for(model), state or ClientState(), examples, **more)
    [learned] = train_clients(run, [each])
    return learned, *finish_round(run, each, learned)


# ---- equal to torch.optim


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("more", [{}, {"clip": 0.3, "epochs": 3}, {"steps": 5}], ids=["epoch", "clip", "steps"])
def test_client_round_equals_a_torch_loop_bit_for_bit(kind: str, more: dict[str, Any]) -> None:
    model, examples = toy_model(), ALONE["c"].train
    run = toy_run(fedavg(), optimizer=OPTIMIZERS[kind], **more)
    before, state = tensors.digest(model.initial), torch.get_rng_state()
    learned, update, _ = run_client_round(run, model, examples)
    loop, batches = TorchLoop(model, run.training), client_batches(run, 0, "c", examples)
    assert len(batches) == (more["steps"] if "steps" in more else 3 * more.get("epochs", 1))
    losses = loop.fit(examples, batches)
    assert learned.losses == losses
    assert tensors.equal(learned.params, loop.values())
    assert tensors.equal(update.delta, tensors.subtract(loop.values(), model.initial))
    assert (update.weight, update.steps) == (10.0, dict.fromkeys(model.initial, len(batches)))
    assert update.loss == pytest.approx(sum(losses) / len(losses))
    assert tensors.digest(model.initial) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_local_only_rounds_equal_one_loop_with_one_optimizer(kind: str) -> None:
    model, examples = toy_model(), ALONE["c"].train
    run = toy_run(local_only(), 5, OPTIMIZERS[kind])
    engine = SimulationEngine(run, model, ALONE)
    loop = TorchLoop(model, run.training)
    for each in rounds(run, model, engine):
        loop.fit(examples, client_batches(run, each.number, "c", examples))
        assert tensors.equal(engine.store.load("c", each.number + 1).personal, loop.values())
        assert not each.traffic.up
        assert not each.traffic.down
    assert tensors.equal(final_params([each]), model.initial)


def test_centralized_equals_one_loop_on_the_pooled_data() -> None:
    model, parts = toy_model(), [PAIR[client].train for client in PAIR.clients]
    pooled = Clients(pooled=1)
    pooled.parts["pooled"] = ToyExamples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
    run = toy_run(centralized(), 5, OPTIMIZERS["adamw"], clip=0.5)
    engine = SimulationEngine(run, model, pooled)
    assert len(list(rounds(run, model, engine))) == 5
    loop = TorchLoop(model, run.training)
    for number in range(5):
        loop.fit(pooled.parts["pooled"], client_batches(run, number, "pooled", pooled.parts["pooled"]))
    assert tensors.equal(engine.store.load("pooled", 5).personal, loop.values())


@pytest.mark.parametrize("kind", ["sgd", "momentum"])
def test_fedavg_with_one_client_equals_a_loop_with_fresh_optimizers(kind: str) -> None:
    """anchor + (after - anchor) rounds twice, each by half an ulp of at most the larger of its terms."""
    model, examples = toy_model(), ALONE["c"].train
    run = toy_run(fedavg(), 5, OPTIMIZERS[kind])
    server = model.initial
    for each in rounds(run, model, SimulationEngine(run, model, ALONE)):
        loop = TorchLoop(model, run.training, server)
        loop.fit(examples, client_batches(run, each.number, "c", examples))
        for name, value in loop.values().items():
            size = torch.maximum(server[name].abs(), value.abs()).clamp(min=torch.finfo(torch.float32).tiny)
            ulps = (each.server.params[name] - value).abs() / (size * torch.finfo(torch.float32).eps)
            assert float(ulps.max()) <= 2.0, name
        server = each.server.params


def test_schedule_sets_the_learning_rate_of_each_round() -> None:
    model, examples = toy_model(), ALONE["c"].train
    run = toy_run(local_only(), 3, schedule=Schedule("linear"))
    engine = SimulationEngine(run, model, ALONE)
    loop = TorchLoop(model, run.training)
    for each in rounds(run, model, engine):
        loop.optimizer.param_groups[0]["lr"] = run.training.lr * (1 - each.number / 3)
        loop.fit(examples, client_batches(run, each.number, "c", examples))
        assert tensors.equal(engine.store.load("c", each.number + 1).personal, loop.values())


# ---- phases


def plan_in_phases(*phases: Phase, keep: Names = NO_NAMES) -> Any:
    def plan(model: Model, round_info: RoundInfo) -> Plan:
        train = NO_NAMES.union(*(phase.names for phase in phases))
        return Plan(phases, up=train - keep, down=model.all_names() - keep, keep=keep)

    return plan


def test_each_phase_trains_its_names_and_steps_are_counted_by_name() -> None:
    model, examples = toy_model(), ALONE["c"].train
    body = model.all_names() - HEAD
    method = Method("two phases", plan_in_phases(Phase(HEAD, epochs=2), Phase(body), keep=HEAD))
    run = toy_run(method, optimizer=OPTIMIZERS["momentum"], steps=4)
    learned, update, state = run_client_round(run, model, examples)
    loop = TorchLoop(model, run.training)
    key = run.key / "round" / 0 / "client" / "c" / "batches"
    for index, (names, epochs) in enumerate([(HEAD, 2), (body, None)]):
        for name, value in loop.params.items():
            value.requires_grad_(name in names).grad = None
        loop.fit(examples, shuffled_batches(10, run.training, epochs, key / index))
    assert tensors.equal(learned.params, loop.values())
    assert update.steps == {**dict.fromkeys(HEAD, 6), **dict.fromkeys(body, 4)}
    assert update.delta.keys() == body
    assert state.personal.keys() == HEAD
    assert len(learned.losses) == 10


def test_name_in_two_phases_counts_steps_of_both() -> None:
    model = toy_model()
    method = Method("overlap", plan_in_phases(Phase(HEAD), Phase(model.all_names())))
    _, update, _ = run_client_round(toy_run(method), model, ALONE["c"].train)
    assert update.steps == {**dict.fromkeys(model.all_names(), 3), "head.weight": 6}


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_overlapping_phases_train_the_same_in_blocks(kind: str) -> None:
    """The second phase continues the optimizer of the first, whose age differs between clients of different sizes."""
    model, population = Float64Model(toy_model()), Float64Population(Clients(c=4, d=17))
    method = Method("overlap", plan_in_phases(Phase(HEAD), Phase(model.all_names())))
    run = toy_run(method, 2, OPTIMIZERS[kind])
    single, block = (final_params(play(run, model, population, block=block)) for block in (1, 2))
    assert max_difference(single, block) < 1e-10


# ---- client rules


@dataclass(frozen=True)
class RecordMovement(ClientRule):
    """Sends and stores the movement of every name, ignoring the plan."""

    slots: Names = frozenset({"moved"})

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        moved = {"moved": {name: params[name] - ctx.anchor[name] + 1 for name in params}}
        return moved, moved


@pytest.mark.parametrize("keep", [NO_NAMES, HEAD])
def test_rule_output_is_restricted_to_the_plan(keep: Names) -> None:
    model = toy_model()
    train = model.all_names() - KERNEL

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        return share(train, down=model.all_names() - keep, keep=keep)

    _, update, state = run_client_round(toy_run(Method("m", plan, (RecordMovement(),))), model, ALONE["c"].train)
    assert update.delta.keys() == update.slots["moved"].keys() == train - keep
    assert state.memory["moved"].keys() == train
    assert state.personal.keys() == keep


def test_rule_memory_of_untrained_names_is_kept() -> None:
    model = toy_model()
    before = {"moved": {name: torch.full_like(value, 7.0) for name, value in model.initial.items()}}
    run = toy_run(Method("m", fedfrozen(warmup=0).plan, (RecordMovement(),)))
    _, _, state = run_client_round(run, model, ALONE["c"].train, ClientState(memory=before))
    assert state.memory["moved"].keys() == model.all_names()
    assert all(torch.equal(state.memory["moved"][name], before["moved"][name]) for name in KERNEL)
    assert not any(
        torch.equal(state.memory["moved"][name], before["moved"][name]) for name in model.all_names() - KERNEL
    )


@dataclass(frozen=True)
class Sums(UpdateTransform):
    """Remembers the sum of the client's deltas. Writes down what it was given."""

    slots: Names = frozenset({"sums"})
    returns: str = "sums"
    given: list[Slots] = field(default_factory=list)

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        self.given.append(memory)
        old = memory.get(self.returns, {})
        sums = {name: old[name] + value if name in old else value for name, value in update.delta.items()}
        return update, {self.returns: {**sums, "elsewhere": torch.ones(1)}}


def test_a_transform_gets_back_what_it_remembered_and_nothing_else() -> None:
    """First nothing, then its own slots with every name so far. A name that does not go up keeps its value."""
    model, one, two = toy_model(), Sums(), Sums(frozenset({"more", "unused"}), "more")
    whole, part = (
        toy_run(Method("m", fedfrozen(warmup=warmup).plan, (RecordMovement(),), (one, two))) for warmup in (1, 0)
    )
    _, first, before = run_client_round(whole, model, ALONE["c"].train)
    assert before.memory.keys() == {"moved", "sums", "more"}
    assert tensors.equal(before.memory["sums"], dict(first.delta)), "the name outside the plan is dropped"
    _, second, after = run_client_round(part, model, ALONE["c"].train, before)
    assert second.delta.keys() == model.all_names() - KERNEL
    for transform, slot in ((one, "sums"), (two, "more")):
        assert transform.given[0] == {}
        assert transform.given[1].keys() == {slot}
        assert tensors.equal(transform.given[1][slot], before.memory[slot])
        assert after.memory[slot].keys() == model.all_names()
        for name, value in after.memory[slot].items():
            old = before.memory[slot][name]
            assert torch.equal(value, old if name in KERNEL else old + second.delta[name])


def test_rules_do_not_see_what_transforms_remember() -> None:
    """Otherwise blocks would stack it, and clients with different residuals could not train together."""
    model = toy_model()
    state = ClientState(memory={"moved": dict(model.initial), "sums": {"head.weight": torch.ones(3, 4)}})
    run = toy_run(Method("m", client_rules=(RecordMovement(),), transforms=(Sums(),)))
    assert begin_round(run, model, job_for(model), state, ALONE["c"].train).ctx.memory.keys() == {"moved"}


@dataclass(frozen=True)
class ForeignSlot(ClientRule):
    remembers: bool

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        mine = {"foreign": params}
        return ({}, mine) if self.remembers else (mine, {})


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Method("m", client_rules=(ForeignSlot(False),)), "ForeignSlot returns the slot 'foreign'"),
        (Method("m", client_rules=(ForeignSlot(True),)), "ForeignSlot returns the slot 'foreign'"),
        (Method("m", transforms=(Sums(returns="mine"),)), "Sums returns the slot 'mine'"),
    ],
    ids=["sent", "remembered", "transform"],
)
def test_a_slot_that_was_not_declared_is_refused(method: Method, words: str) -> None:
    with pytest.raises(ClientError, match=f"client 'c': {words}, which is not in its slots"):
        run_client_round(toy_run(method), toy_model(), ALONE["c"].train)


@dataclass(frozen=True)
class PullEveryName(ClientRule):
    """A penalty and a gradient that try to move every name, including frozen ones."""

    def penalty(self, out: Output, params: Tensors, batch: Any, ctx: Context) -> Tensor:
        return sum((value.sum() for value in params.values()), start=torch.zeros(()))

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        assert grads.keys() <= ctx.plan.train
        return {name: grad + ctx.anchor[name] for name, grad in grads.items()}


def test_client_rule_cannot_move_a_frozen_name() -> None:
    model = toy_model()
    method = Method("m", fedfrozen(warmup=0).plan, (PullEveryName(),))
    played = play(toy_run(method, 2, AdamW(weight_decay=0.1)), model, PAIR)
    assert tensors.equal(tensors.select(final_params(played), KERNEL), tensors.select(model.initial, KERNEL))
    assert not any(torch.equal(final_params(played)[name], model.initial[name]) for name in model.all_names() - KERNEL)


def test_penalty_and_gradient_hooks_enter_the_step() -> None:
    """The penalty has gradient 1 everywhere and the correction adds the anchor; the reference applies both by hand."""
    model, examples = toy_model(), ALONE["c"].train
    run = toy_run(Method("m", client_rules=(PullEveryName(),)), steps=1)
    learned, _, _ = run_client_round(run, model, examples)
    [indices] = client_batches(run, 0, "c", examples)
    params = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
    batch = examples.take(indices)
    loss = model.losses(model(params, batch.inputs), batch.targets).mean()
    slopes = torch.autograd.grad(loss + sum(value.sum() for value in params.values()), list(params.values()))
    expected = {
        name: value - run.training.lr * (slope + value)
        for (name, value), slope in zip(model.initial.items(), slopes, strict=True)
    }
    assert max_difference(learned.params, expected) < 1e-6
    assert float(learned.losses[0]) == pytest.approx(float(loss.detach()), rel=1e-6)  # the task loss alone


@dataclass(frozen=True)
class TrainOnly(ClientRule):
    """Trains only the wanted names, and reads a batch of the client's data."""

    wanted: Names

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        assert len(probe.take(torch.arange(2)).targets) == 2
        return LayerSelection(self.wanted)


def test_client_rule_can_narrow_but_not_widen_the_plan() -> None:
    model = toy_model()
    asked = HEAD | KERNEL | {"nowhere"}
    method = Method("m", fedfrozen(warmup=0).plan, (TrainOnly(asked), TrainOnly(model.all_names())))
    learned, update, _ = run_client_round(toy_run(method), model, ALONE["c"].train)
    assert learned.params.keys() == update.delta.keys() == update.steps.keys() == HEAD


def test_client_that_narrows_to_nothing_sends_an_empty_update() -> None:
    _, update, _ = run_client_round(
        toy_run(Method("m", client_rules=(TrainOnly(NO_NAMES),))), toy_model(), ALONE["c"].train
    )
    assert (update.delta, update.steps, update.loss) == ({}, {}, None)


@dataclass(frozen=True)
class Inertia(ClientRule):
    """Adds the movement of the client's previous round to each step; the first round has none."""

    slots: Names = frozenset({"way"})

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        way = ctx.memory.get("way", {})
        return {name: grad - way[name] if name in way else grad for name, grad in grads.items()}

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        return {}, {"way": {name: params[name] - ctx.anchor[name] for name in params}}


def test_new_and_returning_clients_train_in_a_block_as_alone() -> None:
    """In the second round one client has rule memory and the other has none yet."""
    model, population = Float64Model(toy_model()), Float64Population(PAIR)
    run, availability = toy_run(Method("inertia", client_rules=(Inertia(),)), 2), Availability(trace={(0, "d"): 0.0})
    single = final_params(play(run, model, population, availability=availability))
    for order in (("c", "d"), ("d", "c")):
        population.clients = order
        assert (
            max_difference(single, final_params(play(run, model, population, availability=availability, block=2)))
            < 1e-10
        )


@dataclass(frozen=True)
class InertiaFromStart(Inertia):
    """The same rule with a memory from the first round on."""

    def memory(self, anchor: Tensors) -> Slots:
        return {"way": {name: torch.zeros_like(value) for name, value in anchor.items()}}


def test_clients_in_a_block_keep_separate_rule_memories() -> None:
    model, population = Float64Model(toy_model()), Float64Population(PAIR)
    plain, run = (toy_run(Method("m", client_rules=local), 3) for local in ((), (InertiaFromStart(),)))
    single, block = (final_params(play(run, model, population, block=block)) for block in (1, 2))
    assert max_difference(single, block) < 1e-10
    assert max_difference(single, final_params(play(plain, model, population))) > 1e-3


def test_clients_with_equal_phases_but_different_plans_train_in_a_block_as_alone() -> None:
    """The proximal term covers parameters from the server: the head for one client, not for the other."""
    model, population = Float64Model(toy_model()), Float64Population(PAIR)

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        keep = HEAD if round_info.client == "d" else NO_NAMES
        return share(model.all_names(), down=model.all_names() - keep, keep=keep)

    run = toy_run(Method("m", plan, fedprox(5.0).client_rules), 2)
    single, block = (final_params(play(run, model, population, block=block)) for block in (1, 2))
    assert max_difference(single, block) < 1e-10


@dataclass(frozen=True)
class OnlySGD(ClientRule):
    optimizers: Names = frozenset({"sgd"})


def test_run_refuses_an_optimizer_that_a_rule_does_not_support() -> None:
    method = Method("scaffold", client_rules=(OnlySGD(),))
    assert toy_run(method, optimizer=SGD(weight_decay=0.1))
    with pytest.raises(MethodError, match=r"scaffold: OnlySGD is derived for sgd, not for adamw; set training\.opt"):
        toy_run(method, optimizer=AdamW())
    with pytest.raises(MethodError, match="not for sgd with momentum"):
        toy_run(method, optimizer=SGD(momentum=0.9))


# ---- batch order


def test_batches_differ_by_client_and_by_round() -> None:
    model, run = toy_model(), toy_run(fedavg(), 2)
    seen = {
        tuple(
            begin_round(run, model, job_for(model, client, number), ClientState(), ALONE["c"].train)
            .schedules[0]
            .order.tolist()
        )
        for client in ("c", "d")
        for number in (0, 1)
    }
    assert len(seen) == 4


def test_straggler_takes_the_first_part_of_the_same_steps() -> None:
    model, examples = toy_model(), ALONE["c"].train
    run = toy_run(fedavg(), epochs=4)
    learned, update, _ = run_client_round(run, model, examples, fraction=0.5)
    loop = TorchLoop(model, run.training)
    loop.fit(examples, client_batches(run, 0, "c", examples)[:6])
    assert tensors.equal(learned.params, loop.values())
    assert set(update.steps.values()) == {6}
    assert update.weight == 10.0


# ---- a block of clients


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_block_trains_each_client_as_alone(kind: str) -> None:
    """Clients differ in size, so short batches are padded and some clients finish early."""
    model, population = Float64Model(toy_model()), Float64Population(Clients(a=5, b=14, c=9))
    run = toy_run(fedavg(), optimizer=OPTIMIZERS[kind], clip=0.5, epochs=2)
    visits = [
        begin_round(run, model, job_for(model, client), ClientState(), population[client].train)
        for client in population.clients
    ]
    for each, together in zip(visits, train_clients(run, visits), strict=True):
        [alone] = train_clients(run, [each])
        assert alone.steps == together.steps
        assert max_difference(alone.params, together.params) < 1e-9
        torch.testing.assert_close(alone.losses, together.losses, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 3])
def test_delta_is_params_minus_anchor_bit_for_bit(count: int) -> None:
    """Also when phases overlap and when each client has its own anchor."""
    model, population = toy_model(), Clients(a=5, b=14, c=9)
    middle = frozenset({"layers.0.value.weight"})
    phases = plan_in_phases(Phase(HEAD | middle, epochs=2), Phase(model.all_names() - HEAD), keep=HEAD)
    run = toy_run(Method("overlap", phases), optimizer=OPTIMIZERS["adamw"])
    visits = []
    for number, client in enumerate(population.clients[:count]):
        job = job_for(model, client)
        mine = {name: job.params[name] + number for name in middle}
        state = ClientState(personal={name: model.initial[name] * number for name in HEAD})
        visits.append(
            begin_round(run, model, replace(job, params={**job.params, **mine}), state, population[client].train)
        )
    for each, learned in zip(visits, train_clients(run, visits), strict=True):
        update, _ = finish_round(run, each, learned)
        assert list(update.delta) == sorted(model.all_names() - HEAD)
        assert list(learned.params) == sorted(model.all_names())
        assert tensors.equal(
            update.delta, tensors.subtract(tensors.select(learned.params, each.plan.up), each.ctx.anchor)
        )


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_carried_optimizers_of_different_ages_stay_separate_in_a_block(kind: str) -> None:
    model, population = Float64Model(toy_model()), Float64Population(Clients(a=5, b=14, c=9))
    run = toy_run(local_only(), 3, OPTIMIZERS[kind])
    states = []
    for block in (1, 3):
        engine = SimulationEngine(run, model, population, block=block, availability=Availability(trace={(1, "b"): 0.0}))
        list(rounds(run, model, engine))
        states.append({client: engine.store.load(client, 3).personal for client in population.clients})
    for client in population.clients:
        assert max_difference(states[0][client], states[1][client]) < 1e-9


# ---- adaptation before an evaluation


def test_adaptation_for_evaluation_leaves_no_trace() -> None:
    model = toy_model()

    def head_first(model: Model) -> tuple[Phase, ...]:
        return (Phase(HEAD, epochs=3),)

    plain = toy_run(fedavg(), 2, lr=0.3)
    tuned = replace(plain, method=replace(plain.method, adapt=head_first))
    scores = []
    for run, block in ((plain, 1), (tuned, 1), (tuned, 2)):
        engine = SimulationEngine(run, model, PAIR, block=block)
        first = next(iter(rounds(run, model, engine)))
        digest = tensors.digest(first.server.params)
        jobs = [make_job(run, model, first.server, 0, client)[0] for client in PAIR.clients]
        scores.append(dict(engine.evaluate(jobs)))
        assert scores[-1] == dict(engine.evaluate(jobs))
        assert tensors.digest(first.server.params) == digest
        assert engine.store.load("c", 9) == ClientState()
        onward = final_params(list(rounds(run, model, engine, first.server, 1)))
        assert tensors.equal(onward, final_params(play(plain, model, PAIR, block=block)))
    without, single, block = scores
    for client in PAIR.clients:
        assert single[client]["loss"] < without[client]["loss"]
        assert single[client]["loss"] == pytest.approx(block[client]["loss"], rel=1e-5)


def test_evaluation_uses_personal_parameters_after_the_round(tmp_path: Path) -> None:
    model, run = toy_model(), toy_run(local_only(), 2)
    engine = SimulationEngine(run, model, PAIR, store=DiskStore(tmp_path))
    list(rounds(run, model, engine))
    for client, scores in engine.evaluate([Job(1, client, {}, frozenset()) for client in PAIR.clients]):
        part = PAIR[client].test
        whole = part.take(torch.arange(len(part)))
        losses = model.losses(model(engine.store.load(client, 2).personal, whole.inputs), whole.targets)
        assert scores["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
        assert float(losses.mean()) < float(model.losses(model(model.initial, whole.inputs), whole.targets).mean())


@pytest.mark.parametrize("local", [(), (PullEveryName(),)], ids=["plain", "with a rule"])
def test_adaptation_equals_a_plain_loop_over_the_phase(local: tuple[ClientRule, ...]) -> None:
    """The method's client rules apply to its rounds only, not to adaptation."""
    model, examples = toy_model(), ALONE["c"].train
    method = replace(fedavg(), client_rules=local, adapt=lambda model: (Phase(HEAD, epochs=2),))
    run = toy_run(method)
    engine = SimulationEngine(run, model, ALONE)
    [(_, scores)] = engine.evaluate([job_for(model)])
    loop = TorchLoop(model, run.training)
    for name, value in loop.params.items():
        value.requires_grad_(name in HEAD)
    key = run.key / "round" / 0 / "client" / "c" / "adapt" / "batches" / 0
    loop.fit(examples, shuffled_batches(10, run.training, 2, key))
    whole = examples.take(torch.arange(10))
    expected = float(model.losses(model(loop.values(), whole.inputs), whole.targets).mean())
    assert scores["loss"] == pytest.approx(expected, rel=1e-6)


# ---- mixed precision


def test_bfloat16_training_stays_near_float32_and_keeps_float32_weights() -> None:
    model = toy_model()
    wide, mixed = (toy_run(fedavg(), 3, OPTIMIZERS["momentum"], precision=kind) for kind in ("float32", "bfloat16"))
    for block in (1, 2):
        one, two = (final_params(play(run, model, PAIR, block=block)) for run in (wide, mixed))
        assert {value.dtype for value in two.values()} == {torch.float32}
        assert 0 < max_difference(one, two) < 0.02
    moved = max_difference(one, model.initial)
    assert moved > 0.1  # so that the bound of 0.02 is meaningful


# ---- errors


def test_nan_loss_names_client_and_step() -> None:
    model, examples = toy_model(), ALONE["c"].train
    run = toy_run(fedavg())
    [_, second, _] = client_batches(run, 0, "c", examples)
    x = examples.x.clone()
    x[second[0]] = float("nan")
    with pytest.raises(ClientError, match=r"'c': the loss is nan at step 2 of 3 in round 0; lower training.lr") as info:
        run_client_round(run, model, ToyExamples(x, examples.y))
    assert info.value.client == "c"


def test_client_without_examples_is_refused() -> None:
    with pytest.raises(ClientError, match="client 'c': has no training examples; add some or remove the client"):
        run_client_round(toy_run(fedavg()), toy_model(), Clients(c=0)["c"].train)


class Branching(ToyTransformer):
    """Branches on its data, which vmap cannot lift."""

    name = "branching model"

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        out = super().__call__(params, inputs)
        return out if out.logits.sum() > 0 else Output(-out.logits)


def test_model_that_vmap_cannot_lift_is_refused_in_blocks_and_runs_alone() -> None:
    model, run = Branching(width=4, layers=1), toy_run(fedavg(), 1)
    with pytest.raises(
        VmapError,
        match=r"vmap does not support branching model with fedavg over clients: .*; set engine.clients_per_block = 1",
    ):
        play(run, model, PAIR, block=2)
    assert len(play(run, model, PAIR, block=1)) == 1


def test_round_starts_from_sent_kept_and_initial_parameters() -> None:
    model = toy_model()
    sent, kept = HEAD, KERNEL

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        return Plan((Phase(sent | kept),), up=sent, down=sent, keep=kept)

    run = toy_run(Method("m", plan))
    job = Job(0, "c", {name: model.initial[name] + 1 for name in sent}, sent)
    own = {name: model.initial[name] + 2 for name in sorted(kept)[:1]}
    each = begin_round(run, model, job, ClientState(own), ALONE["c"].train)
    expected = {**model.initial, **job.params, **own}
    assert tensors.equal(each.ctx.anchor, expected)
    assert initial_server(run, model).params.keys() == model.all_names()


# ---- found by mutation testing


def test_context_holds_the_narrowed_plan() -> None:
    model = toy_model()
    each = begin_round(
        toy_run(Method("m", client_rules=(TrainOnly(HEAD),))), model, job_for(model), ClientState(), ALONE["c"].train
    )
    assert each.plan.train == each.ctx.plan.train == HEAD


def test_name_without_optimizer_age_groups_as_age_zero() -> None:
    """A carried optimizer may have state for some names only. Clients with different ages must not share a block."""
    model, run = toy_model(), toy_run(local_only(), optimizer=AdamW())
    names = sorted(model.all_names())

    def aged(ages: Mapping[str, int]) -> Any:
        state = ClientState(memory={"optimizer.age": {name: torch.tensor(age) for name, age in ages.items()}})
        return group_key(run, begin_round(run, model, job_for(model), state, ALONE["c"].train))

    some, every = dict.fromkeys(names[1:], 1), dict.fromkeys(names, 1)
    assert aged(some) != aged(every)
    assert aged(some) == aged({**some, names[0]: 0})
    assert aged(every) == aged(dict(reversed(every.items())))


class ModelWithSpareParameter(ToyTransformer):
    """Has a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__(width=4, layers=1)
        self.initial = {**self.initial, "spare": torch.ones(3)}
        self.tags = {**self.tags, "spare": frozenset({"head"})}


@pytest.mark.parametrize("block", [1, 2])
def test_parameter_unused_by_the_loss_does_not_move(block: int) -> None:
    model = ModelWithSpareParameter()
    params = final_params(play(toy_run(fedavg(), 2, OPTIMIZERS["momentum"]), model, PAIR, block=block))
    assert torch.equal(params["spare"], torch.ones(3))
    assert max_difference(params, model.initial) > 1e-2


@dataclass(frozen=True)
class HalveGradients(ClientRule):
    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        return {name: grad / 2 for name, grad in grads.items()}


class StartsElsewhere(ClientRule):
    """Starts the head from `by` times its value."""

    def __init__(self, by: float | None) -> None:
        self.by = by

    def start(self, params: Tensors, examples: Examples, ctx: Context, key: Key) -> tuple[Tensors, Slots]:
        return ({} if self.by is None else {"head.weight": self.by * params["head.weight"]}), {}


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("phases", [1, 2])
def test_training_starts_where_the_rules_say_and_the_delta_counts_from_the_anchor(phases: int, block: int) -> None:
    """With two phases, the first trains the body on a frozen head, which is already where it starts."""
    model, names = toy_model(), toy_model().all_names()
    split = (Phase(names),) if phases == 1 else (Phase(names - HEAD), Phase(HEAD))
    plan = Plan(split, up=names, down=names)

    def train(*rules: ClientRule, start: Tensors) -> Tensors:
        run = toy_run(Method("m", lambda model, round_info: plan, rules), 1)
        begun = [
            begin_round(run, model, Job(0, client, start, frozenset()), ClientState(), PAIR[client].train)
            for client in ("c", "d")[:block]
        ]
        return dict(train_clients(run, begun)[-1].delta)

    moved = {**model.initial, "head.weight": 3.0 * model.initial["head.weight"]}
    found = train(StartsElsewhere(1.5), StartsElsewhere(2.0), start=model.initial)
    expected = train(start=moved)
    expected["head.weight"] = expected["head.weight"] + moved["head.weight"] - model.initial["head.weight"]
    assert max_difference(found, expected) < 1e-6
    assert float(found["head.weight"].abs().max()) > 0.5


@pytest.mark.parametrize("by", [None, 1.0])
def test_start_that_changes_nothing_equals_plain_training_bit_for_bit(by: float | None) -> None:
    one, two = (
        final_params(play(toy_run(Method("m", client_rules=rules), 2), toy_model(), PAIR, block=2))
        for rules in ((), (StartsElsewhere(by),))
    )
    assert tensors.equal(one, two)


@pytest.mark.parametrize(
    "others", [(ClientRule(), HalveGradients()), (HalveGradients(), ClientRule())], ids=["first", "second"]
)
def test_gradient_correction_applies_beside_rules_without_one(others: tuple[ClientRule, ...]) -> None:
    alone, among, plain = (
        final_params(play(toy_run(Method("m", client_rules=local), 2), toy_model(), PAIR))
        for local in ((HalveGradients(),), others, ())
    )
    assert tensors.equal(alone, among)
    assert max_difference(alone, plain) > 1e-3


def test_vmap_error_over_clients_names_the_block_size_under_mixed_precision() -> None:
    run = toy_run(fedavg(), 1, precision="bfloat16")
    with pytest.raises(VmapError, match=r"over clients: .*; set engine\.clients_per_block = 1"):
        play(run, Branching(width=4, layers=1), PAIR, block=2)


@pytest.mark.parametrize(
    "read", [lambda ctx: ctx.round_info.round, lambda ctx: ctx.notes["a"], lambda ctx: list(ctx.notes)]
)
@pytest.mark.parametrize("hook", ["step_gradient", "penalty", "gradient"])
def test_rule_cannot_read_round_info_or_notes_within_a_step(hook: str, read: Any) -> None:
    """Otherwise a penalty weight that grows with the round would silently use round 0."""

    class Growing(ClientRule):
        def step_gradient(self, gradient_at: Any, params: Any, ctx: Context) -> Any:
            return read(ctx) if hook == "step_gradient" else gradient_at({})

        def penalty(self, out: Any, params: Any, batch: Any, ctx: Context) -> Any:
            return read(ctx) if hook == "penalty" else None

        def gradient(self, grads: Any, ctx: Context) -> Any:
            return read(ctx) if hook == "gradient" else grads

    run = toy_run(Method("growing", client_rules=(Growing(),)), 1)
    with pytest.raises(
        MethodError, match=r"ctx\.(round_info|notes) cannot be read in step_gradient, penalty or gradient"
    ):
        play(run, toy_model(), PAIR)
