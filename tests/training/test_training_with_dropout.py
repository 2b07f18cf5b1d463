"""Training with dropout: blocks, engines, accumulation, privacy, graphs and resumed runs draw the same masks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from architecture_fixtures import make_model
from helpers import final_params, max_difference, play, toy_run
from torch import Tensor

from partita.core.client import ClientState, begin_round
from partita.core.client_rule import ClientRule, Context
from partita.core.data import EXAMPLE_SEEDS, Batch, ClientData
from partita.core.dp_settings import PrivacySettings
from partita.core.keyed_bits import example_seeds
from partita.core.method import Method
from partita.core.model import Output
from partita.core.optim import SGD
from partita.core.personal_copy import add_personal_copy
from partita.core.rounds import initial_server, make_job, rounds
from partita.core.settings import Run
from partita.core.tensors import Tensors
from partita.engines.multiprocess import MultiprocessEngine
from partita.engines.simulation import SimulationEngine
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.models.functional import FunctionalModel
from partita.training import local_training
from partita.training.cuda_capture import CudaRecorder
from partita.training.cuda_graphs import GraphCache
from partita.training.local_training import train_clients
from partita.training.phase_trainer import PhaseTrainer


class Texts:
    """Texts of different lengths, padded to the longest of a batch."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(2, 19, (length,), generator=draw) for length in lengths]
        self.targets = torch.randint(0, 3, (len(lengths),), generator=draw)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Tensor) -> Batch:
        rows = [self.rows[index] for index in indices.tolist()]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
        return Batch({"input_ids": ids, "attention_mask": (ids != 1).long()}, self.targets[indices])


class TextClients:
    """Clients whose numbers of examples and longest texts differ."""

    clients = ("a", "b", "c")
    lengths: ClassVar = {"a": [3, 5, 2, 4, 6, 3, 2], "b": [9, 8, 4, 3, 7], "c": [2, 2, 3, 2, 2, 2, 2, 3, 3]}

    def __getitem__(self, client: str) -> ClientData:
        part = Texts(self.lengths[client], ord(client))
        return ClientData(part, part, part)


POPULATION = TextClients()


def bert(**options: Any) -> FunctionalModel:
    return make_model("bert-text", **options)


def ends(method: Method, block: int = 1, engine: Any = None, **options: Any) -> Tensors:
    run = toy_run(method, 2, options.pop("optimizer", None) or SGD(0.9), **options)
    played = play(run, bert(), POPULATION, block=block, **(engine or {}))
    return {**final_params(played), "losses": torch.tensor([each.loss for each in played])}


@pytest.mark.slow
def test_training_drops_by_default_and_only_then() -> None:
    on, off = ends(fedavg()), ends(fedavg(), dropout=False)
    assert max_difference(on, off) > 1e-3
    assert max_difference(on, ends(fedavg())) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("method", "block"), [("fedsam", 3), ("moon", 3), ("fedavg", 2)])
def test_blocks_equal_single_clients(method: str, block: int) -> None:
    assert max_difference(ends(build(method)), ends(build(method), block=block)) < 1e-5


@pytest.mark.slow
def test_accumulated_batches_equal_one_large_batch() -> None:
    large, parts = ends(fedavg(), batch_size=4), ends(fedavg(), batch_size=2, accumulate=2)
    assert max_difference(large, parts) < 1e-5
    assert max_difference(parts, ends(fedavg(), block=3, batch_size=2, accumulate=2)) < 1e-5


def test_seeds_come_from_the_key_of_client_round_and_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    step = PhaseTrainer.step

    def watched(self: PhaseTrainer, batch: Batch, active: int) -> Tensor:
        seen.append(batch.inputs[EXAMPLE_SEEDS])
        return step(self, batch, active)

    monkeypatch.setattr(PhaseTrainer, "step", watched)
    run = toy_run(fedavg(), 1)
    model = bert()
    job, _ = make_job(run, model, initial_server(run, model), 0, "a")
    client_round = begin_round(run, model, job, ClientState(), POPULATION["a"].train)
    train_clients(run, [client_round])
    key = run.key / "round" / 0 / "client" / "a" / "dropout" / 0
    assert [len(seeds) for seeds in seen] == [4, 3]
    [schedule] = client_round.schedules
    for number, (seeds, indices) in enumerate(zip(seen, schedule, strict=True)):
        assert torch.equal(seeds, example_seeds([key], number, indices)[0])


@pytest.mark.slow
def test_no_seeds_are_made_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    whole = local_training.iterate_batches

    def watched(examples: Any, schedules: Any, device: Any, seed_keys: Any, *more: Any) -> Any:
        keys.append(seed_keys)
        return whole(examples, schedules, device, seed_keys, *more)

    monkeypatch.setattr(local_training, "iterate_batches", watched)
    ends(fedavg(), dropout=False)
    assert set(keys) == {None}
    model = make_model("bert-text", sizes={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    play(toy_run(fedavg(), 1), model, POPULATION)
    assert set(keys) == {None}
    ends(fedavg())
    assert keys[-1] is not None


def test_a_personal_copy_has_the_dropout_of_its_model() -> None:
    assert add_personal_copy(bert()).uses_dropout()


@pytest.mark.slow
def test_resumed_run_draws_the_same_masks() -> None:
    run, model = toy_run(fedavg(), 3, SGD(0.9)), bert()
    whole = play(run, model, POPULATION)
    resumed = play(run, model, POPULATION, server=whole[0].server, start=1)
    assert max_difference(final_params(whole), final_params(resumed)) == 0


def make_engine() -> SimulationEngine:
    return SimulationEngine(toy_run(fedavg(), 2, SGD(0.9)), bert(), POPULATION)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers share memory as on Linux")
def test_worker_processes_draw_the_same_masks() -> None:
    one = make_engine()
    alone = list(rounds(one.run, one.model, one))
    # Where tests before have trained on a GPU, forks cannot train.
    engine = MultiprocessEngine(make_engine(), 2, make_engine if torch.cuda.is_available() else None)
    try:
        together = list(rounds(one.run, one.model, engine))
    finally:
        engine.close()
    # Other masks would change much more. Some kernels round by where in memory their inputs lie.
    assert max_difference(final_params(alone), final_params(together)) < 1e-8


def private_run(clipping: str, microbatch: int | None = None) -> Run:
    settings = PrivacySettings(clip=1e3, noise=0.0, clipping=clipping, microbatch=microbatch, sampling="shuffle")  # type: ignore[arg-type]
    return toy_run(Method("private", privacy=settings), 1, SGD(0.9), batch_size=4)


@pytest.mark.slow
def test_per_example_gradients_have_the_masks_of_the_batch() -> None:
    """With a clip that never applies, no noise and full batches, DP-SGD is plain training."""
    population = TextClients()
    population.lengths = {name: [3, 5, 2, 4, 6, 3, 2, 4] for name in population.clients}
    model = bert(frozen=("embedding",))
    plain = final_params(play(toy_run(fedavg(), 1, SGD(0.9), batch_size=4), model, population))
    for run, block in (
        (private_run("direct"), 1), (private_run("direct"), 3), (private_run("direct", 3), 1), (private_run("ghost"), 1)
    ):  # fmt: skip
        assert max_difference(plain, final_params(play(run, model, population, block=block))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3])
def test_captured_steps_read_the_seeds_from_their_buffer(block: int) -> None:
    """A fake graph, which repeats the work at each replay: it sees only the tensors of the capture."""

    def recorder(work: Callable[[], Tensor]) -> Any:
        result = torch.empty(0)

        def replay() -> None:
            found = work()
            result.resize_(found.shape).copy_(found)

        return replay, result

    assert (
        max_difference(
            ends(fedavg(), block, epochs=2, batch_size=2),
            ends(fedavg(), block, {"graphs": GraphCache(recorder)}, epochs=2, batch_size=2),
        )
        < 1e-5
    )


class Watching(ClientRule):
    """Records the inputs that a penalty sees."""

    per_example = True
    seen: ClassVar[list[set[str]]] = []

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> Tensor | None:
        self.seen.append(set(batch.inputs))
        return None


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("privacy", [None, PrivacySettings(clip=1.0, noise=0.0)])
def test_rules_see_the_batch_without_seeds(privacy: PrivacySettings | None) -> None:
    """So what a rule computes with other parameters, such as MOON's reference features, has no dropout."""
    Watching.seen.clear()
    method = Method("watching", client_rules=(Watching(),), privacy=privacy)
    play(toy_run(method, 1, SGD()), bert(frozen=("embedding",)), POPULATION)
    assert Watching.seen
    assert all(names == {"input_ids", "attention_mask"} for names in Watching.seen)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [1, 3])
def test_a_gpu_drops_what_a_cpu_drops_also_in_cuda_graphs(block: int) -> None:
    options = {"epochs": 2, "batch_size": 2}
    gpu = {"device": torch.device("cuda")}
    cpu, eager = ends(fedavg(), block, **options), ends(fedavg(), block, gpu, **options)
    graphs = ends(fedavg(), block, {**gpu, "graphs": GraphCache(CudaRecorder(), strict=True)}, **options)
    for found in (eager, graphs):
        assert max_difference(cpu, {name: value.cpu() for name, value in found.items()}) < 1e-3
    off = ends(fedavg(), block, gpu, dropout=False, **options)
    assert max_difference(cpu, {name: value.cpu() for name, value in off.items()}) > 1e-2
