"""Blocks against single clients, on federations whose clients differ in size.

The rows of such a federation lie in one table, so a block takes the batches of all its clients with one call. Clients
of different sizes give batches of different sizes, masks, and clients that finish early: what belongs to one client
must never end up with another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import OPTIMIZERS, max_difference, toy_model, toy_run
from torch import Tensor

from partita.core.batch_schedule import BatchSchedule
from partita.core.client import ClientState, Job, LocalResult, begin_round
from partita.core.client_rule import ClientRule, Context
from partita.core.data import IGNORE_INDEX, Batch
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import SGD
from partita.core.plan import NO_NAMES, Phase, Plan, RoundInfo, share
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.core.settings import Run
from partita.core.tensors import Names, Slots, Tensors
from partita.data.split import split
from partita.data.task import Federation, Subset, Table, Task
from partita.engines.availability import Availability
from partita.engines.simulation import SimulationEngine
from partita.methods import build
from partita.methods.local_only import local_only
from partita.testing.toy import Float64Model
from partita.testing.trial import states_of
from partita.training.batch_shapes import BatchPadding, step_shapes
from partita.training.batching import collate, iterate_batches
from partita.training.local_training import group_key, train_clients

HEAD = frozenset({"head.weight"})
NOISY = PrivacySettings(clip=0.5, noise=0.8)


BATCH = 6


def skewed_federation(seed: int) -> Federation:
    """A Dirichlet split in float64, so that a block and a single client agree to many digits."""
    x = torch.randn(120, 4, 4, generator=Key(11).generator(), dtype=torch.float64)
    y = (x.sum((1, 2)) > 0).long() + (x[:, 0, 0] > 0.5).long()
    table = Table({"x": x}, y)
    task = Task("clouds", table, table, classes=("a", "b", "c"))
    return split(task, "dirichlet", 6, key=Key(seed), alpha=0.5, min_examples=2, validation=0.0, test=0.0)


def has_unequal_clients(federation: Federation) -> bool:
    """Whether some clients have less than a batch, others several, and clients are not ordered by size."""
    sizes = [len(federation[client].train) for client in federation.clients]
    steps = {-(-size // BATCH) for size in sizes}
    descending = any(sizes == sorted(sizes, reverse=way) for way in (True, False))
    return min(sizes) < BATCH and len({*sizes}) > 4 and len(steps) > 3 and not descending


FEDERATION = next(each for each in map(skewed_federation, range(1000)) if has_unequal_clients(each))


def make_run(method: Method, count: int, *more: Any, **options: Any) -> Run:
    return toy_run(method, count, *more, batch_size=BATCH, **options)


def final_tensors(run: Run, block: int, federation: Federation = FEDERATION, **engine: Any) -> dict[str, Tensors]:
    """All tensors after the last round: the server's parameters and slots, and each client's state."""
    model = Float64Model(toy_model())
    made = SimulationEngine(run, model, federation, block=block, **engine)
    *_, final = rounds(run, model, made)
    slots = {f"{slot}/{name}": value for slot, part in final.server.state.items() for name, value in part.items()}
    return {"server": {**final.server.params, **slots}, **states_of(run, made)}


def differences(one: Mapping[str, Tensors], two: Mapping[str, Tensors]) -> dict[str, float]:
    assert one.keys() == two.keys()
    return {owner: max_difference(one[owner], two[owner]) for owner in one if one[owner]}


def check_blocks_train_as_alone(run: Run, blocks: Sequence[int] = (4,), **engine: Any) -> None:
    single = final_tensors(run, 1, **engine)
    for block in blocks:
        found = differences(single, final_tensors(run, block, **engine))
        assert max(found.values()) < 1e-9, (block, found)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "name", ["fedavg", "fedprox", "scaffold", "feddyn", "fednova", "moon", "fedper", "fedrep", "fedfrozen", "fedadam"]
)
def test_methods_train_in_blocks_as_alone(name: str) -> None:
    options = {"head_epochs": 2} if name == "fedrep" else {"warmup": 1} if name == "fedfrozen" else {}
    method = build(name, options)
    optimizer = SGD(momentum=0.9) if method.supports_optimizer("sgd with momentum") else SGD()
    check_blocks_train_as_alone(make_run(method, 2, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_carried_optimizers_train_in_blocks_as_alone(kind: str) -> None:
    """Optimizer ages differ, because one client misses a round and another one is a straggler."""
    availability = Availability(trace={(0, "c1"): 0.0, (1, "c4"): 0.5})
    check_blocks_train_as_alone(make_run(local_only(), 3, OPTIMIZERS[kind], epochs=2), availability=availability)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedprox"])
def test_private_clients_train_in_blocks_as_alone(name: str) -> None:
    """Poisson batches: sizes differ between steps and clients, and some are empty."""
    check_blocks_train_as_alone(make_run(replace(build(name), privacy=NOISY), 2, lr=0.1))


@pytest.mark.slow
def test_private_clients_with_adamw_train_in_blocks_as_alone() -> None:
    check_blocks_train_as_alone(make_run(replace(local_only(), privacy=NOISY), 2, OPTIMIZERS["adamw"]))


@dataclass(frozen=True)
class Inertia(ClientRule):
    """A penalty, a gradient correction and a memory that all differ between clients."""

    slots: Names = frozenset({"way"})

    def penalty(self, out: Any, params: Tensors, batch: Any, ctx: Context) -> Tensor:
        return sum(((params[name] - ctx.anchor[name]) ** 2).sum() for name in sorted(ctx.plan.down & ctx.plan.train))  # type: ignore[return-value]

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        way = ctx.memory.get("way", {})
        return {name: grad - way[name] if name in way else grad for name, grad in grads.items()}

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        way = {"way": {name: params[name] - ctx.anchor[name] for name in steps}}
        return way, way


def plan_by_client(model: Model, round_info: RoundInfo) -> Plan:
    """Odd clients keep the head, and the third trains nothing else."""
    keep = HEAD if int(round_info.client[1:]) % 2 else NO_NAMES
    train = HEAD if round_info.client == "c2" else model.all_names()
    return share(train, down=model.all_names() - keep, keep=keep)


@pytest.mark.slow
def test_clients_with_different_plans_and_memories_train_in_blocks_as_alone() -> None:
    run = make_run(Method("inertia", plan_by_client, (Inertia(),)), 3, SGD(momentum=0.9))
    check_blocks_train_as_alone(run, blocks=(2, 6), availability=Availability(trace={(0, "c3"): 0.0}))


def plan_in_two_phases(model: Model, round_info: RoundInfo) -> Plan:
    return Plan((Phase(HEAD, epochs=2), Phase(model.all_names())), up=model.all_names(), down=model.all_names())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_overlapping_phases_train_in_blocks_as_alone(kind: str) -> None:
    check_blocks_train_as_alone(
        make_run(replace(build("fedavg"), plan=plan_in_two_phases, carry_optimizer=True), 2, OPTIMIZERS[kind])
    )


@pytest.mark.slow
@pytest.mark.parametrize("private", [None, NOISY], ids=["open", "private"])
def test_each_client_of_a_block_learns_from_its_own_rows(private: PrivacySettings | None) -> None:
    """Parameters, losses, steps and deltas are those of a single client, in any block order."""
    run, model = make_run(replace(build("fedavg"), privacy=private), 1, epochs=2), Float64Model(toy_model())
    visits = [
        begin_round(run, model, Job(0, client, dict(model.initial), NO_NAMES), ClientState(), FEDERATION[client].train)
        for client in FEDERATION.clients
    ]
    assert len({group_key(run, each) for each in visits}) == 1, "they fit one block"
    alone = [train_clients(run, [each])[0] for each in visits]
    assert len({tuple(map(len, each.schedules)) for each in visits}) > 3
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 5, 0]):
        for place, found in zip(order, train_clients(run, [visits[place] for place in order]), strict=True):
            assert_same_result(alone[place], found)
    apart = [max_difference(alone[0].params, other.params) for other in alone[1:]]
    assert min(apart) > 1e-3, "clients differ by much more than the tolerance"


def assert_same_result(one: LocalResult, two: LocalResult) -> None:
    assert one.steps == two.steps
    assert max_difference(one.params, two.params) < 1e-10
    assert max_difference(one.delta, two.delta) < 1e-10
    torch.testing.assert_close(one.losses, two.losses, rtol=1e-10, atol=1e-10)


def test_iterate_batches_gives_each_client_its_rows_and_masks_the_rest() -> None:
    """From one shared table and from separate tables, each client gets its own rows and a mask for the padding."""
    sizes = {"c0": (4, 4, 1), "c3": (2, 3), "c1": (3, 0), "c5": (1,)}
    parts = [FEDERATION[client].train for client in sizes]
    schedules = [BatchSchedule((Key(7) / client).permutation(sum(own)), own) for client, own in sizes.items()]
    schedules = [replace(each, order=each.order % len(part)) for each, part in zip(schedules, parts, strict=True)]
    apart = [replace(part, table=replace(part.table)) for part in parts]  # type: ignore[type-var, attr-defined]
    for examples in (parts, apart):
        for step, batch in enumerate(iterate_batches(examples, schedules, torch.device("cpu"))):
            here = [(part, list(deal)[step]) for part, deal in zip(parts, schedules, strict=True) if step < len(deal)]
            assert len(batch.targets) == len(here)
            assert (batch.mask is None) == (len({len(indices) for _, indices in here}) == 1), "no mask without padding"
            for rank, (part, indices) in enumerate(here):
                mask = batch.targets.new_ones(len(batch.targets[rank])) if batch.mask is None else batch.mask[rank]
                assert mask.tolist() == [1] * len(indices) + [0] * (len(mask) - len(indices))
                wanted = part.take(indices)
                assert torch.equal(batch.inputs["x"][rank][: len(indices)], wanted.inputs["x"])
                assert torch.equal(batch.targets[rank][: len(indices)], wanted.targets)


def test_collate_pads_with_zeros_ignored_targets_and_a_mask() -> None:
    """Inputs are padded with zeros, targets with IGNORE_INDEX, and short batches with a masked first example."""
    long = Batch({"tokens": torch.tensor([[1, 2, 3], [4, 5, 6]])}, torch.tensor([[7, 8, 9], [1, 2, 3]]))
    short = Batch({"tokens": torch.tensor([[7, 8]])}, torch.tensor([[5, 6]]))
    for place, order in ((1, [long, short]), (0, [short, long])):
        joined = collate(order)
        assert joined.inputs["tokens"][place].tolist() == [[7, 8, 0], [7, 8, 0]]
        assert joined.targets[place].tolist() == [[5, 6, IGNORE_INDEX], [5, 6, IGNORE_INDEX]]
        assert torch.equal(joined.inputs["tokens"][1 - place], long.inputs["tokens"])
        assert torch.equal(joined.targets[1 - place], long.targets)
        assert joined.mask is not None
        assert joined.mask[place].tolist() == [1, 0]
        assert joined.mask[1 - place].tolist() == [1, 1]
    assert collate([long, long]).mask is None
    counted = collate([replace(long, mask=torch.tensor([0.0, 1.0])), long])
    assert counted.mask is not None
    assert counted.mask.tolist() == [[0, 1], [1, 1]]


def test_step_without_examples_is_masked_out() -> None:
    """From one shared table, from separate tables, and for a single client."""
    parts = [FEDERATION[client].train for client in ("c0", "c1")]
    apart = [replace(part, table=replace(part.table)) for part in parts]  # type: ignore[type-var, attr-defined]
    schedules = [BatchSchedule(torch.arange(2), (0, 2)), BatchSchedule(torch.arange(1), (0, 1))]
    for examples in (parts, apart):
        nothing, something = iterate_batches(examples, schedules, torch.device("cpu"))
        assert nothing.mask is not None
        assert nothing.mask.tolist() == [[0], [0]]
        assert nothing.inputs["x"].shape == (2, 1, 4, 4)
        assert something.mask is not None
        assert something.mask.tolist() == [[1, 1], [1, 0]]
    nothing, something = iterate_batches(parts[:1], schedules[:1], torch.device("cpu"))
    assert nothing.mask is not None
    assert (nothing.mask.tolist(), something.mask) == ([0], None)
    assert torch.equal(something.targets, parts[0].take(torch.arange(2)).targets)


@pytest.mark.parametrize("multiple", [2, 4])
def test_batches_are_padded_to_a_multiple_with_a_mask(multiple: int) -> None:
    """From one shared table, from separate tables, and for a single client; also a full batch and an empty one."""
    parts = [FEDERATION[client].train for client in ("c0", "c3")]
    apart = [replace(part, table=replace(part.table)) for part in parts]  # type: ignore[type-var, attr-defined]
    sizes = (4, 1, 0), (3, 2)
    schedules = [BatchSchedule(torch.arange(sum(own)) % 3, own) for own in sizes]
    for examples in (parts, apart, parts[:1]):
        shapes = step_shapes(sizes[: len(examples)], BatchPadding(multiple, None))
        padded = list(iterate_batches(examples, schedules[: len(examples)], torch.device("cpu"), None, shapes))
        plain = list(iterate_batches(examples, schedules[: len(examples)], torch.device("cpu")))
        for step, (wide, narrow) in enumerate(zip(padded, plain, strict=True)):
            own = [size[step] for size in sizes[: len(examples)] if step < len(size)]
            assert shapes[step].active == shapes[step].clients == len(own)  # so few clients are not padded
            longest = -(-max(*own, 1) // multiple) * multiple
            assert wide.mask is not None
            rows = wide.mask.view(-1, longest)
            assert rows.tolist() == [[1.0] * size + [0.0] * (longest - size) for size in own]
            dim = int(len(examples) > 1)
            for name, value in [*wide.inputs.items(), ("", wide.targets)]:
                before = narrow.inputs[name] if name else narrow.targets
                assert value.shape[dim] == longest
                for rank, size in enumerate(own):
                    found, wanted = (each[rank] if dim else each for each in (value, before))
                    assert torch.equal(found[:size], wanted[:size])


def batches_of(*clients: Subset) -> list[Batch]:
    schedules = [BatchSchedule(torch.arange(len(each)), (2,)) for each in clients]
    return list(iterate_batches(clients, schedules, torch.device("cpu")))


def test_clients_with_tables_of_their_own_keep_their_rows() -> None:
    first, second = (Table({"x": start + torch.arange(4.0)}, torch.arange(4)) for start in (0.0, 10.0))
    rows = torch.tensor([1, 3])
    [batch] = batches_of(Subset(first, rows), Subset(second, rows))
    assert batch.inputs["x"].tolist() == [[1.0, 3.0], [11.0, 13.0]]
    [together] = batches_of(Subset(first, rows), Subset(first, rows - 1))
    assert together.inputs["x"].tolist() == [[1.0, 3.0], [0.0, 2.0]]


def test_sequences_of_vectors_are_padded_to_the_longest() -> None:
    short, long = (Batch({"x": torch.ones(2, width, 3)}, torch.zeros(2)) for width in (1, 4))
    joined = collate([short, long]).inputs["x"]
    assert joined.shape == (2, 2, 4, 3)
    assert joined[0, :, 1:].abs().sum() == 0
    assert joined.sum() == 2 * 3 + 2 * 4 * 3
