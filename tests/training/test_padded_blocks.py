"""Captured steps of unequal clients, which are padded, against plain steps of one client after another.

The recorder runs a step again at each replay. All in float64, so that the two agree to many digits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from graph_fixtures import ReplayingRecorder
from helpers import OPTIMIZERS, max_difference, play, toy_model, toy_run
from text_fixtures import TextClients, long_bert

from partita.core.client_rule import ClientRule, Context
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.optim import SGD, AdamW, Optimizer
from partita.core.rng import Key
from partita.core.rounds import RoundResult, rounds
from partita.core.settings import Run
from partita.core.tensors import Tensors
from partita.data.client_ids import NamedClients
from partita.data.task import Federation, Table, Task
from partita.engines.simulation import SimulationEngine
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.local_only import local_only
from partita.testing.toy import Float64Model
from partita.testing.trial import states_of
from partita.training.batch_shapes import few_clients, step_shapes
from partita.training.cuda_graphs import GraphCache

BATCH, LR = 6, 2**-4  # the rate of a captured step is float32
# In steps: 5, 4, 3, 3, 2, 1, 1. After the first step, five of seven clients go on, and six are computed.
SIZES = {"a": 2, "b": 14, "c": 25, "d": 9, "e": 19, "f": 13, "g": 4}
NOISY = PrivacySettings(clip=0.5, noise=0.8)


def unequal_federation() -> Federation:
    total = sum(SIZES.values())
    x = torch.randn(total, 4, 4, generator=Key(11).generator(), dtype=torch.float64)
    table = Table({"x": x}, (x.sum((1, 2)) > 0).long() + (x[:, 0, 0] > 0.5).long())
    rows = torch.arange(total).split(list(SIZES.values()))
    none = torch.zeros(0, dtype=torch.long)
    task = Task("clouds", table, table, classes=("a", "b", "c"))
    return Federation(task, NamedClients(list(SIZES)), [(own, none, none) for own in rows])


FEDERATION = unequal_federation()


def played(run: Run, block: int, graphs: GraphCache | None = None) -> tuple[list[RoundResult], dict[str, Tensors]]:
    """The rounds, and all tensors after the last one: those of the server and the state of each client."""
    model = Float64Model(toy_model())
    engine = SimulationEngine(run, model, FEDERATION, block, graphs=graphs)
    results = list(rounds(run, model, engine))
    server = results[-1].server
    slots = {f"{slot}/{name}": value for slot, part in server.state.items() for name, value in part.items()}
    losses = (
        {} if results[-1].loss is None else {"loss": torch.tensor([each.loss for each in results], dtype=torch.float64)}
    )
    return results, {"server": {**server.params, **slots, **losses}, **states_of(run, engine)}


def check_trains_as_alone(run: Run, block: int = len(SIZES)) -> None:
    recorder = ReplayingRecorder()
    _, together = played(run, block, GraphCache(recorder))
    assert recorder.recorded
    _, alone = played(run, 1)
    assert together.keys() == alone.keys()
    found = {owner: max_difference(together[owner], alone[owner]) for owner in alone if alone[owner]}
    assert max(found.values()) < 1e-7, found


def unequal_run(method: Method, optimizer: Optimizer | None = None, count: int = 3, **more: Any) -> Run:
    return toy_run(method, count, optimizer, LR, batch_size=BATCH, **more)


def test_some_steps_compute_a_client_that_has_finished() -> None:
    """Otherwise the tests below would not test it."""
    steps = sorted((-(-size // BATCH) for size in SIZES.values()), reverse=True)
    active = [sum(own > step for own in steps) for step in range(steps[0])]
    assert [(count, few_clients(count, len(SIZES))) for count in active] == [(7, 7), (5, 6), (4, 4), (2, 2), (1, 1)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_train_padded_as_alone(kind: str) -> None:
    """With weight decay and momentum, which would move a finished client without any gradient."""
    check_trains_as_alone(unequal_run(fedavg(), OPTIMIZERS[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_moments_of_finished_clients_are_kept(kind: str) -> None:
    """Clients carry their optimizer into the next round, so moments that went on would show."""
    check_trains_as_alone(unequal_run(local_only(), OPTIMIZERS[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedprox", "scaffold", "feddyn", "moon", "fedper", "fedrep", "fedsam"])
def test_methods_train_padded_as_alone(name: str) -> None:
    check_trains_as_alone(unequal_run(build(name), SGD()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"epochs": 2}, {"clip": 0.1}, {"accumulate": 2, "batch_size": 3}, {"warmup_steps": 2}],
    ids=["epochs", "clip", "accumulate", "warm-up"],
)
def test_options_of_training_apply_to_padded_steps(options: dict[str, Any]) -> None:
    check_trains_as_alone(toy_run(fedavg(), 3, AdamW(weight_decay=0.1), LR, **{"batch_size": BATCH, **options}))


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3])
def test_smaller_blocks_train_padded_as_alone(block: int) -> None:
    check_trains_as_alone(unequal_run(fedavg(), AdamW()), block)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
@pytest.mark.parametrize(("method", "optimizer"), [(fedavg(), SGD(0.9)), (local_only(), AdamW(weight_decay=0.1))])
def test_private_clients_train_padded_as_alone(method: Method, optimizer: Optimizer, sampling: Any) -> None:
    settings = replace(NOISY, sampling=sampling)
    check_trains_as_alone(unequal_run(replace(method, privacy=settings), optimizer, 8))


# ---- captures


@pytest.mark.slow
def test_run_of_very_unequal_clients_needs_few_captures() -> None:
    """Three of twelve clients per round, in a block: no more than three numbers of clients and four sizes."""
    shares = torch.tensor([900, 240, 130, 61, 47, 33, 20, 9, 5, 3, 2, 1])
    table = Table({"x": torch.zeros(int(shares.sum()), 4, 4)}, torch.zeros(int(shares.sum()), dtype=torch.long))
    none = torch.zeros(0, dtype=torch.long)
    parts = [(rows, none, none) for rows in torch.arange(int(shares.sum())).split(shares.tolist())]
    names = NamedClients([f"c{place}" for place in range(len(shares))])
    federation = Federation(Task("zeros", table, table, classes=("a", "b", "c")), names, parts)
    for block, most in ((3, 3 * 4), (1, 5)):
        recorder = ReplayingRecorder()
        run = toy_run(fedavg(), 12, batch_size=32, cohort=3)
        play(run, toy_model(), federation, block=block, graphs=GraphCache(recorder))
        assert 2 <= recorder.recorded <= most
        sizes = [[32] * (count // 32) + [count % 32] * (count % 32 > 0) for count in shares.tolist()]
        exact = {(shape.units, shape.masked) for own in sizes for shape in step_shapes([own])}
        assert len(exact) == 11  # without padding, a client alone has this many shapes


@pytest.mark.slow
def test_round_reports_the_share_of_padding() -> None:
    run = unequal_run(fedavg())
    [eager, *_], _ = played(run, 7)
    [captured, *_], _ = played(run, 7, GraphCache(ReplayingRecorder()))
    [alone, *_], _ = played(run, 1)
    steps = [7, 5, 4, 2, 1]
    real = sum(SIZES.values())
    assert captured.padding == pytest.approx(1 - real / (BATCH * (sum(steps) + 1)))  # one finished client
    assert eager.padding == pytest.approx(1 - real / (BATCH * (sum(steps) - 1) + 1))  # the last batch has one example
    assert alone.padding == 0
    private, _ = played(unequal_run(replace(fedavg(), privacy=NOISY)), 7)
    assert {each.padding for each in private} == {None}


# ---- texts


@pytest.mark.slow
def test_texts_of_many_lengths_train_padded_as_alone() -> None:
    """With dropout, whose draws depend neither on the padding nor on the other clients."""
    population, ends, captures = TextClients(), [], []
    for block, recorder in ((1, None), (1, ReplayingRecorder()), (6, ReplayingRecorder())):
        run = toy_run(fedavg(), 4, SGD(0.9), batch_size=2)
        graphs = GraphCache(recorder) if recorder else None
        results = play(run, long_bert(), population, block=block, graphs=graphs)
        ends.append({**results[-1].server.params, "loss": torch.tensor([each.loss for each in results])})
        captures.append(recorder.recorded if recorder else 0)
    assert max_difference(ends[0], ends[1]) < 1e-5
    assert max_difference(ends[0], ends[2]) < 1e-5
    assert min(captures[1:]) > 0
    undropped = play(toy_run(fedavg(), 4, SGD(0.9), batch_size=2, dropout=False), long_bert(), population)
    assert max_difference(ends[0], undropped[-1].server.params | {"loss": ends[0]["loss"]}) > 1e-3


# ---- blocks of different sizes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "local-only", "fedsam"])
def test_smaller_block_uses_the_graphs_of_a_larger_one(name: str) -> None:
    """Seven clients in blocks of five: the last two take the places of the first two of five."""
    optimizer = AdamW(weight_decay=0.1) if name in ("fedavg", "local-only") else SGD()
    graphs = GraphCache(ReplayingRecorder())
    run = unequal_run(build(name), optimizer)
    _, together = played(run, 5, graphs)
    # Clients with other numbers of steps before the round train in blocks of their own, some alone.
    assert [trainer.axis.count for trainer in graphs.known.values() if trainer.axis.many] == [5]
    _, alone = played(run, 1)
    assert max(max_difference(together[owner], alone[owner]) for owner in alone if alone[owner]) < 1e-7


@dataclass(frozen=True)
class GradientOfTheAnchor(ClientRule):
    """All clients ask for a gradient at the same point, which has no client dimension."""

    def step_gradient(self, gradient_at: Any, params: Tensors, ctx: Context) -> Tensors:
        found: Tensors = gradient_at({name: ctx.anchor[name] for name in params})
        return found


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
def test_point_shared_by_all_clients_fits_those_that_still_train(recorded: bool) -> None:
    run = unequal_run(Method("m", client_rules=(GradientOfTheAnchor(),)))
    _, together = played(run, 5, GraphCache(ReplayingRecorder()) if recorded else None)
    _, alone = played(run, 1)
    assert max_difference(together["server"], alone["server"]) < 1e-7


@pytest.mark.slow
def test_larger_block_replaces_a_smaller_one() -> None:
    graphs, ends = GraphCache(ReplayingRecorder()), []
    run, model = unequal_run(fedavg(), SGD(0.9)), Float64Model(toy_model())
    for block, room in ((2, 2), (7, 7), (2, 7)):
        ends.append(play(run, model, FEDERATION, block=block, graphs=graphs)[-1].server.params)
        assert [trainer.axis.count for trainer in graphs.known.values() if trainer.axis.many] == [room]
    assert max_difference(ends[0], ends[2]) == 0  # bit for bit: a leading part computes as a block of its own


@pytest.mark.slow
def test_smaller_private_block_has_its_own_sizes_and_noise() -> None:
    graphs = GraphCache(ReplayingRecorder())
    run = unequal_run(replace(fedavg(), privacy=NOISY), SGD(0.9), 4)
    _, together = played(run, 5, graphs)
    assert [trainer.axis.count for trainer in graphs.known.values()] == [5]
    _, alone = played(run, 1)
    assert max_difference(together["server"], alone["server"]) < 1e-7
