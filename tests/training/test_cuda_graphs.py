"""CUDA graphs on a CPU, with a fake recorder that repeats the work at each replay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from graph_fixtures import ReplayingRecorder, max_relative_difference, small_vit_run, train_with_graphs
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, Unsupported

from partita import Key, Run, SimulationEngine, Training, data, methods, models, rounds
from partita.core import tensors
from partita.core.client import ClientState, begin_round
from partita.core.data import Batch
from partita.core.optim import SGD, AdamW, Optimizer, Schedule
from partita.core.rounds import initial_server, make_job
from partita.core.settings import RunError
from partita.core.tensors import Tensors
from partita.engines import autotune
from partita.engines.autotune import bf16_slowdown, choose_graphs
from partita.storage.client_store import MemoryStore
from partita.testing.trial import states_of
from partita.training import compilation
from partita.training.client_axis import VmapError
from partita.training.compilation import CompiledGradients, CompileError
from partita.training.cuda_capture import Recorder, Replay
from partita.training.cuda_graphs import GraphCache, GraphedSteps, GraphError
from partita.training.gradients import GradientEstimator
from partita.training.local_training import train_clients

CASES = {
    "fedavg": ("fedavg", AdamW(), 4),
    "one by one": ("fedavg", AdamW(), 1),
    "momentum": ("fedavg", SGD(0.9, 0.01), 4),
    "nesterov": ("fedprox", SGD(0.9, nesterov=True), 4),
    "slots": ("scaffold", SGD(), 4),
    "own state": ("local-only", AdamW(), 4),
    "sent state": ("fedadamw", AdamW(), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "optimizer", "block"), CASES.values(), ids=CASES)
def test_rounds_with_graphs_equal_eager_rounds(method: str, optimizer: Optimizer, block: int) -> None:
    again = ReplayingRecorder()
    recorded = train_with_graphs(method, optimizer, GraphCache(again), block)
    assert again.recorded  # otherwise nothing is compared
    plain = train_with_graphs(method, optimizer, None, block)
    assert recorded.keys() == plain.keys()
    assert max_relative_difference(recorded, plain) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "local-only"])
def test_queueing_a_block_ahead_does_not_change_results(method: str, recorded: bool) -> None:
    """Although both blocks may use the same static tensors."""
    ended = [
        train_with_graphs(method, SGD(), GraphCache(ReplayingRecorder()) if recorded else None, 1, ahead=ahead)
        for ahead in (0, 1)
    ]
    assert tensors.equal(*ended)


@pytest.mark.slow
def test_recorded_steps_follow_the_learning_rate_schedule() -> None:
    schedule = Schedule("linear")
    recorded = train_with_graphs("fedavg", AdamW(), GraphCache(ReplayingRecorder()), 4, schedule=schedule)
    assert max_relative_difference(recorded, train_with_graphs("fedavg", AdamW(), None, 4, schedule=schedule)) < 1e-4
    assert max_relative_difference(recorded, train_with_graphs("fedavg", AdamW(), None, 4)) > 1e-2


OPTIONS: dict[str, dict[str, Any]] = {
    "warm-up": {"warmup_steps": 3},
    "layer decay": {"layer_decay": 0.5},
    "norms and biases": {"decay_norms_and_biases": False},
    "accumulation": {"accumulate": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_recorded_steps_follow_the_options_of_training(options: dict[str, Any]) -> None:
    optimizer = AdamW(eps=1e-4, weight_decay=0.5)
    again = ReplayingRecorder()
    recorded = train_with_graphs("fedavg", optimizer, GraphCache(again), 4, **options)
    assert again.recorded
    assert max_relative_difference(recorded, train_with_graphs("fedavg", optimizer, None, 4, **options)) < 1e-3
    assert max_relative_difference(recorded, train_with_graphs("fedavg", optimizer, None, 4)) > 1e-2


@pytest.mark.slow
def test_each_shape_is_recorded_once() -> None:
    counts = []
    for rounds_played in (4, 8):
        again = ReplayingRecorder()
        train_with_graphs("fedavg", AdamW(), GraphCache(again), 4, rounds_played, steps=6)
        counts.append(again.recorded)
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
def test_results_are_not_overwritten_by_a_later_replay() -> None:
    key = Key(3)
    task = data.load("synthetic", key, examples=90, size=8, channels=1)
    federation = data.split(task, "iid", clients=4, key=key)
    model = models.build("vit", task, key, layers=1, width=8, heads=2, patch=4)
    run = Run(methods.build("fedavg"), Training(1e-2, AdamW(), batch_size=4), rounds=1, key=key)
    jobs = [make_job(run, model, initial_server(run, model), 0, client)[0] for client in federation.clients]
    visits = [begin_round(run, model, job, ClientState(), federation[job.client].train) for job in jobs]
    again = ReplayingRecorder()
    graphs = GraphCache(again)
    held = [each for pair in (visits[:2], visits[2:]) for each in train_clients(run, pair, graphs)]
    before = [tensors.digest(part) for each in held for part in (each.params, each.delta)]
    assert len({*before}) == 8
    train_clients(run, visits[:2], graphs)
    assert again.recorded
    assert len(graphs.known) == 1
    assert before == [tensors.digest(part) for each in held for part in (each.params, each.delta)]


def refuse_to_record(work: Callable[[], Tensor]) -> Replay:
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def refuse_to_record_inside_vmap(work: Callable[[], Tensor]) -> Replay:
    try:
        return refuse_to_record(work)
    except RuntimeError as error:
        raise VmapError("vmap cannot lift it; set engine.clients_per_block = 1") from error


def refuse_to_record_compiled_code(work: Callable[[], Tensor]) -> Replay:
    try:
        return refuse_to_record(work)
    except RuntimeError as error:
        raise CompileError("vit cannot be compiled; set engine.compile = false") from error


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("recorder", [refuse_to_record, refuse_to_record_inside_vmap, refuse_to_record_compiled_code])
def test_capture_failure_names_the_setting(recorder: Recorder) -> None:
    with pytest.raises(
        GraphError,
        match=r"vit with fedavg cannot be captured in a CUDA graph: operation not.*engine\.cuda_graphs = false",
    ):
        train_with_graphs("fedavg", AdamW(), GraphCache(recorder), 4)


@pytest.mark.slow
def test_capture_failure_falls_back_to_eager_with_a_warning_when_not_strict() -> None:
    with pytest.warns(UserWarning, match="they run eagerly"):
        plainly = train_with_graphs("fedavg", AdamW(), GraphCache(refuse_to_record, strict=False), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert max_relative_difference(plainly, train_with_graphs("fedavg", AdamW(), None, 4)) < 1e-4


@pytest.mark.parametrize("captures", [True, False])
def test_the_last_eager_step_uses_the_tensors_of_the_capture(captures: bool) -> None:
    """Otherwise the compiler could meet other strides during the capture, and would have to make another program."""
    seen: list[Batch] = []
    batches = [Batch({"x": torch.full((4, 2), float(number))[:, :1]}, torch.tensor([number])) for number in range(5)]

    def step(batch: Batch) -> Tensor:
        seen.append(batch)
        return batch.inputs["x"].sum() + batch.targets.sum()

    def record(work: Callable[[], Tensor]) -> Replay | None:
        return ReplayingRecorder()(work) if captures else None

    steps = GraphedSteps(record)
    losses = [float(steps(step, batch, None)) for batch in batches]
    assert losses == [5.0 * number for number in range(5)]
    assert seen[0] is batches[0]
    assert seen[1] is not batches[1]
    assert seen[1].inputs["x"].is_contiguous()
    if captures:
        assert all(batch is seen[1] for batch in seen[2:])
    else:
        assert [id(batch) for batch in seen[2:]] == [id(batch) for batch in batches[2:]]
        assert not steps.held


def raising(error: Exception) -> GradientEstimator:
    def gradients(*_: Any) -> Any:
        raise error

    return gradients


def plain_gradients(*_: Any) -> tuple[Tensors, Tensor]:
    return {}, torch.zeros(1)


def test_memory_is_no_reason_to_stop_compiling() -> None:
    failures: list[Exception] = []
    full = raising(torch.OutOfMemoryError("no memory"))
    with pytest.raises(torch.OutOfMemoryError):
        CompiledGradients(full, plain_gradients, "vit", failures.append)({}, [], [], 1)
    assert not failures


@pytest.mark.parametrize("capturing", [True, False])
def test_a_failed_capture_is_no_failure_of_the_compiler(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_is_capturing", lambda: capturing)
    failures: list[Exception] = []
    calls: list[str] = []

    def compiled(*_: Any) -> Any:
        calls.append("compiled")
        raise RuntimeError("refused")

    def plain(*_: Any) -> Any:
        calls.append("plain")
        return {}, torch.zeros(1)

    gradients = CompiledGradients(compiled, plain, "vit", failures.append)
    if capturing:
        with pytest.raises(CompileError, match="refused"):
            gradients({}, [], [], 1)
        assert calls == ["compiled"]
        assert not failures
    else:
        for _ in range(2):
            gradients({}, [], [], 1)
        assert calls == ["compiled", "plain", "plain"]
        assert [str(error) for error in failures] == ["vit cannot be compiled: refused"]


FAILURES = [
    (TypeError("no such layout\nand more"), "no such layout"),
    (NotImplementedError(), "NotImplementedError"),
    (Unsupported("Data-dependent branching\n  Explanation: ..."), "Data-dependent branching"),
    (BackendCompilerFailed(lambda: None, KeyError("no kernel"), None), "raised: KeyError: 'no kernel'"),
]


@pytest.mark.parametrize(("error", "reason"), FAILURES, ids=lambda part: type(part).__name__)
def test_any_error_of_the_compiler_is_one_line(error: Exception, reason: str) -> None:
    """A failure of "auto" is told and not raised."""
    failures: list[Exception] = []
    CompiledGradients(raising(error), plain_gradients, "vit", failures.append)({}, [], [], 1)
    with pytest.raises(CompileError) as caught:
        CompiledGradients(raising(error), plain_gradients, "vit")({}, [], [], 1)
    assert str(failures[0]).startswith("vit cannot be compiled: ")
    assert str(failures[0]).endswith(reason)
    assert str(caught.value) == f"{failures[0]}; set engine.compile = false"


def test_a_mistake_in_the_loss_is_not_blamed_on_the_compiler() -> None:
    failures: list[Exception] = []
    compiled, plain = raising(Unsupported("sizes may not match")), raising(RuntimeError("sizes do not match"))
    for on_failure in (failures.append, None):
        with pytest.raises(RuntimeError, match="sizes do not match"):
            CompiledGradients(compiled, plain, "vit", on_failure)({}, [], [], 1)
    assert not failures


def test_cpu_uses_no_graphs() -> None:
    cpu = torch.device("cpu")
    assert choose_graphs("auto", False, cpu) is choose_graphs(False, False, cpu) is None
    with pytest.raises(RunError, match=r"engine\.cuda_graphs is for GPUs"):
        choose_graphs(True, False, cpu)


@pytest.mark.slow
def test_compiled_rounds_equal_eager_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as a full graph, without the compiler's own kernels, which are slow to build. Of one size."""
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda made, **told: whole(made, backend="aot_eager", **told))
    compiled = train_with_graphs("fedprox", SGD(0.9), GraphCache(None, compile=True), 4, 2, steps=2)
    assert max_relative_difference(compiled, train_with_graphs("fedprox", SGD(0.9), None, 4, 2, steps=2)) < 1e-4


@pytest.mark.slow
def test_compilation_covers_two_plans_and_all_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More programs than torch compiles for one function by default, which is lowered here: each takes two seconds."""
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda made, **told: whole(made, backend="eager", **told))
    adamw = AdamW(eps=1e-4)  # gradients of rounding errors stay small
    with torch._dynamo.config.patch(recompile_limit=3):
        compiled = train_with_graphs("fedfrozen", adamw, GraphCache(None, compile=True), 4, 2, batch_size=16)
    assert max_relative_difference(compiled, train_with_graphs("fedfrozen", adamw, None, 4, 2, batch_size=16)) < 1e-4
    torch.compiler.reset()
    monkeypatch.setattr("partita.training.compilation.MAX_PROGRAMS", 1)
    with pytest.raises(CompileError, match=r"need more than 1 compiled programs; set engine\.compile = false"):
        train_with_graphs("fedfrozen", AdamW(), GraphCache(None, compile=True), 4, 1)


def test_compile_failure_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(made: object, **told: object) -> Callable[..., object]:
        def call(*parts: object) -> object:
            raise RuntimeError("no compiler here\nand more")

        return call

    monkeypatch.setattr(torch, "compile", refused)
    with pytest.raises(CompileError, match=r"cannot be compiled: no compiler here; set engine\.compile = false"):
        train_with_graphs("fedavg", AdamW(), GraphCache(None, compile=True), 4)


def test_bf16_slowdown_is_the_ratio_of_best_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {torch.float32: iter([2.0, 1.0, 4.0]), torch.bfloat16: iter([9.0, 8.0, 7.0])}
    monkeypatch.setattr(autotune, "_seconds", lambda square: next(times[square.dtype]))
    assert bf16_slowdown() == 7.0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("optimizer", [AdamW(), SGD(0.9)], ids=["adamw", "momentum"])
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedper", "fedfrozen"])
def test_run_with_graphs_resumes_bit_for_bit(method: str, optimizer: Optimizer) -> None:
    """After a resume the first steps run eagerly again, where the uninterrupted run replays graphs."""
    run, model, federation = small_vit_run(method, optimizer)
    kept = MemoryStore()
    engines = [
        SimulationEngine(run, model, federation, 4, store=store, graphs=GraphCache(ReplayingRecorder()))
        for store in (None, kept)
    ]
    *_, last = rounds(run, model, engines[0])
    *_, second = islice(rounds(run, model, engines[1]), 2)
    again = ReplayingRecorder()
    late = SimulationEngine(run, model, federation, 4, store=kept, graphs=GraphCache(again))
    *_, end = rounds(run, model, late, second.server, 2)
    assert again.recorded
    assert tensors.equal(last.server.params, end.server.params)
    whole, resumed = states_of(run, engines[0]), states_of(run, late)
    assert all(tensors.equal(whole[client], resumed[client]) for client in federation.clients)
