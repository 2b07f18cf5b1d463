"""What must hold on every device. Without a GPU, the GPU cases are skipped."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from ghost_fixtures import TextClients, tiny_model
from graph_fixtures import max_relative_difference, small_vit_run
from graph_fixtures import train_with_graphs as play_graphs
from helpers import Clients, max_difference, small_config, toy_model, toy_run
from torch import Tensor

from partita.core.dp_settings import PrivacySettings
from partita.core.noise import add_noise, add_noise_once, gaussian_noise
from partita.core.optim import AdamW
from partita.core.rng import Key
from partita.core.rounds import initial_server, rounds
from partita.engines.autotune import choose_graphs
from partita.engines.simulation import SimulationEngine
from partita.evaluation import evaluate
from partita.experiment import run_folder
from partita.experiment.runner import resume, start
from partita.methods.fedavg import fedavg
from partita.training.captured_forward import CapturedForward
from partita.training.cuda_capture import CudaRecorder
from partita.training.cuda_graphs import GraphCache
from partita.training.ghost_layers import product, scaled_parts

METHODS = ["fedavg", "scaffold", "fedper"]
ON_GPU: list[dict[str, Any]] = [{"device": "cuda", "clients_per_block": 1}, {"device": "cuda", "clients_per_block": 2}]
ON_GPU += [{"device": "cuda", "clients_per_block": 2, "cuda_graphs": False}]
ON_CPU: list[dict[str, Any]] = [{"device": "cpu", "clients_per_block": 1}, {"device": "cpu", "clients_per_block": 2}]


def rows_and_digest(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """A run's rows without their times, and the digest of its result."""
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in run_folder.read_rows(folder)]
    result = run_folder.finished(folder)
    assert result is not None
    return rows, result["digest"]


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedlesam"])
def test_cuda_graphs_match_eager_training_on_a_gpu(method: str, block: int, compile: bool) -> None:
    graphs = choose_graphs(True, compile, torch.device("cuda"))
    recorded = play_graphs(method, AdamW(), graphs, block, device="cuda")
    assert max_relative_difference(recorded, play_graphs(method, AdamW(), None, block, device="cuda")) < 1e-3


def wait_for_the_gpu() -> Tensor:
    """Work that cannot be captured, after random draws."""
    drawn = torch.nn.functional.dropout(torch.ones(64, 64, device="cuda"), 0.5)
    return drawn * float(drawn.sum().item())


def mistaken_work() -> Tensor:
    """Work that can be captured up to a mistake."""
    torch.randn(8, device="cuda")
    raise KeyError("no such name")


@pytest.mark.gpu
@pytest.mark.parametrize("work", [wait_for_the_gpu, mistaken_work])
def test_a_failed_capture_leaves_the_gpu_usable(work: Callable[[], Tensor]) -> None:
    """Draws, eager training, graphs from before, and new graphs; without the memory of the failed one."""
    recorder, given = CudaRecorder(), torch.arange(8.0, device="cuda")
    expected = play_graphs("fedavg", AdamW(), None, 4, device="cuda")
    replay, doubled = recorder(lambda: 2 * given)
    drawing, noise = recorder(lambda: torch.randn(1000, device="cuda"))
    stream, taken = torch.cuda.current_stream(), torch.cuda.memory_allocated()
    for _ in range(3):
        with pytest.raises((RuntimeError, KeyError), match=r"captur|no such name"):
            recorder(work)
        assert torch.cuda.current_stream() == stream
        assert not torch.cuda.is_current_stream_capturing()
        assert float(torch.randn(1000, device="cuda").std()) == pytest.approx(1, abs=0.2)
        given.add_(1)
        replay()
        assert torch.equal(doubled, 2 * given)
        drawing()
        first = noise.clone()
        drawing()
        assert not torch.equal(first, noise)
        assert float(noise.std()) == pytest.approx(1, abs=0.2)
        again, tripled = recorder(lambda: 3 * given)
        again()
        assert torch.equal(tripled, 3 * given)
        del again, tripled
    gc.collect()
    assert torch.cuda.memory_allocated() <= taken + 2**16
    assert max_relative_difference(play_graphs("fedavg", AdamW(), None, 4, device="cuda"), expected) == 0
    recorded = play_graphs("fedavg", AdamW(), GraphCache(recorder), 4, device="cuda")
    assert max_relative_difference(recorded, expected) < 1e-3


@pytest.mark.gpu
def test_captured_evaluations_match_eager_ones_on_a_gpu() -> None:
    run, model, federation = small_vit_run("fedavg", AdamW(), 4)
    graphs = GraphCache(CudaRecorder())
    engine = SimulationEngine(run, model, federation, 4, torch.device("cuda"), graphs=graphs)
    for result in rounds(run, model, engine):
        eager = evaluate(model, result.server.params, federation.test)
        captured = evaluate(model, result.server.params, federation.test, forward=graphs.forward)
        assert captured.scores == pytest.approx(eager.scores, rel=1e-5)
    assert isinstance(graphs.forward, CapturedForward)
    assert any(graphs.forward.captured.values())


@pytest.mark.gpu
def test_random_draws_do_not_depend_on_captures() -> None:
    ends = []
    for captures in (0, 1):
        torch.cuda.manual_seed(5)
        for _ in range(captures):
            CudaRecorder()(lambda: torch.randn(8, device="cuda"))
        ends.append(torch.randn(8, device="cuda"))
    assert torch.equal(*ends)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [1, 4])
def test_training_goes_on_where_compiled_steps_cannot_be_captured(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled loss waits for the GPU. Steps are then compiled, and run one by one."""
    whole = torch.compile

    def waiting(made: Any, **told: Any) -> Any:
        program = whole(made, **told)

        def call(*parts: Any) -> Any:
            found = program(*parts)
            found[0].sum().item()
            return found

        return call

    monkeypatch.setattr(torch, "compile", waiting)
    graphs = GraphCache(CudaRecorder(), strict=False, compile=True, strict_compile=False)
    with pytest.warns(UserWarning, match="cannot be captured in a CUDA graph"):
        compiled = play_graphs("fedavg", AdamW(), graphs, block, device="cuda")
    assert graphs.compile
    torch.randn(8, device="cuda")
    assert max_relative_difference(compiled, play_graphs("fedavg", AdamW(), None, block, device="cuda")) < 1e-3


@pytest.mark.gpu
def test_training_goes_on_after_the_compiler_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(made: Any, **told: Any) -> Any:
        def call(*parts: Any) -> None:
            raise RuntimeError("no compiler here")

        return call

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", refused)
        graphs = choose_graphs(True, True, torch.device("cuda"), strict_compile=False)
        with pytest.warns(UserWarning, match="steps are not compiled"):
            plain = play_graphs("fedavg", AdamW(), graphs, 4, device="cuda")
    compiled = play_graphs("fedavg", AdamW(), choose_graphs(True, True, torch.device("cuda")), 4, device="cuda")
    assert max_relative_difference(compiled, plain) < 1e-3


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", [*ON_CPU, *(pytest.param(each, marks=pytest.mark.gpu) for each in ON_GPU)], ids=str)
def test_run_repeats_and_resumes_exactly(method: str, engine: dict[str, Any], tmp_path: Path) -> None:
    settings = small_config(method, 4, **engine)
    for name in ("whole", "again"):
        list(start(settings, tmp_path / name))
    list(islice(start(settings, tmp_path / "stopped"), 2))
    list(resume(settings, tmp_path / "stopped"))
    whole = rows_and_digest(tmp_path / "whole")
    assert rows_and_digest(tmp_path / "again") == whole
    assert rows_and_digest(tmp_path / "stopped") == whole


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", ON_GPU, ids=str)
def test_two_workers_on_one_gpu_give_the_result_of_one(method: str, engine: dict[str, Any], tmp_path: Path) -> None:
    for workers in (1, 2):
        list(start(small_config(method, 4, workers=workers, **engine), tmp_path / str(workers)))
    assert rows_and_digest(tmp_path / "1") == rows_and_digest(tmp_path / "2")


@pytest.mark.gpu
def test_gpu_noise_equals_cpu_noise() -> None:
    """Up to float64 rounding, which the release grid removes. The first draw compares the ciphers bit for bit."""
    like = {"w": torch.zeros(300, 70), "b": torch.zeros(7)}
    noises = [
        gaussian_noise({name: value.to(device) for name, value in like.items()}, Key(3), 0.5)
        for device in ("cpu", "cuda")
    ]
    for name, value in like.items():
        assert torch.allclose(noises[0][name], noises[1][name].cpu(), rtol=1e-12, atol=1e-12)
        released = [add_noise(value.to(noise[name].device), noise[name], 0.5).cpu() for noise in noises]
        assert torch.equal(*released)


@pytest.mark.gpu
def test_private_round_on_a_gpu_matches_a_cpu_up_to_rounding() -> None:
    run, clients = toy_run(replace(fedavg(), privacy=PrivacySettings(clip=0.5, noise=0.8)), lr=1.0), Clients(a=8, b=12)
    ends = []
    for device in ("cpu", "cuda"):
        model = toy_model()
        engine = SimulationEngine(run, model, clients, 2, torch.device(device))
        server = replace(
            initial_server(run, model), params={name: value.to(device) for name, value in model.initial.items()}
        )
        first = next(rounds(run, model, engine, server))
        ends.append({name: value.cpu() for name, value in first.server.params.items()})
    assert max_difference(*ends) < 1e-3  # one grid point at most: sums of gradients differ by rounding
    assert max_difference(ends[0], {name: value.cpu() for name, value in model.initial.items()}) > 0.1


@pytest.mark.gpu
def test_weighted_gradients_in_half_precision_are_exact_and_never_longer_on_a_gpu() -> None:
    draw = torch.Generator().manual_seed(0)
    given = (1e3 * torch.randn(2, 5, 3, 16, generator=draw)).bfloat16()
    given[0, 1] = math.nan
    shares = torch.rand(2, 5, generator=draw)
    shares[0, 1], shares[0, 2], shares[1, 0] = 0.0, 1.0, 1e-30
    first, second = (part.cpu().double() for part in scaled_parts(given.cuda(), shares.cuda()))
    weights = shares.numpy().view("int32") & -(2**16)  # rounded down to 8 bits
    wanted = given.double() * torch.from_numpy(weights.view("float32")).double()[:, :, None, None]
    assert torch.equal((first + second)[shares > 1e-20], wanted[shares > 1e-20])
    assert not (first + second)[0, 1].any()
    assert product(given[0].cuda(), given[0].mT.cuda()).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("std", [0.3, 2.0])
def test_noise_is_added_on_a_gpu_as_on_a_cpu_and_then_gone(std: float) -> None:
    value, noise = torch.randn(3, 1001), gaussian_noise({"w": torch.empty(3, 1001)}, Key(1), std)["w"]
    held = noise.cuda()
    assert torch.equal(add_noise_once(value.cuda(), held, std).cpu(), add_noise(value, noise, std))
    assert bool(held.isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("clipping", ["ghost", "direct"])
@pytest.mark.parametrize("block", [1, 2])
def test_captured_private_steps_match_eager_ones_on_a_gpu(block: int, clipping: Any, precision: Any) -> None:
    """The released sums are rounded to a grid, so most of them are equal."""
    settings = PrivacySettings(clip=0.3, noise=0.5, clipping=clipping)
    run = toy_run(replace(fedavg(), privacy=settings), count=2, steps=8, precision=precision)
    ends = []
    for graphs in (choose_graphs(True, False, torch.device("cuda")), None):
        model = tiny_model("Bert", ())
        model.to(torch.device("cuda"))
        engine = SimulationEngine(run, model, TextClients(), block, torch.device("cuda"), graphs=graphs)
        *_, last = rounds(run, model, engine)
        ends.append({name: value.cpu() for name, value in last.server.params.items()})
    assert max_difference(*ends) < (1e-3 if precision == "float32" else 1e-2)
    assert max_difference(ends[0], {name: value.cpu() for name, value in model.initial.items()}) > 0.05
