"""What must hold on every device. Without a GPU, the GPU cases are skipped."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from ghost_fixtures import TextClients, tiny_model
from graph_fixtures import max_relative_difference
from graph_fixtures import train_with_graphs as play_graphs
from helpers import Clients, max_difference, small_config, toy_model, toy_run

from partita import AdamW
from partita.core.dp_settings import DPSGDSettings
from partita.core.noise import add_noise, add_noise_once, gaussian_noise
from partita.core.rng import Key
from partita.core.rounds import initial_server, rounds
from partita.engines.autotune import choose_graphs
from partita.engines.simulation import SimulationEngine
from partita.experiment import run_folder
from partita.experiment.runner import resume, start
from partita.methods.fedavg import fedavg
from partita.training.ghost_kernels import scaled_parts
from partita.training.ghost_layers import product

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

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


@on_a_gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedlesam"])
def test_cuda_graphs_match_eager_training_on_a_gpu(method: str, block: int, compile: bool) -> None:
    graphs = choose_graphs(True, compile, torch.device("cuda"))
    recorded = play_graphs(method, AdamW(), graphs, block, device="cuda")
    assert max_relative_difference(recorded, play_graphs(method, AdamW(), None, block, device="cuda")) < 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", [*ON_CPU, *(pytest.param(each, marks=on_a_gpu) for each in ON_GPU)], ids=str)
def test_run_repeats_and_resumes_exactly(method: str, engine: dict[str, Any], tmp_path: Path) -> None:
    settings = small_config(method, 4, **engine)
    for name in ("whole", "again"):
        list(start(settings, tmp_path / name))
    list(islice(start(settings, tmp_path / "stopped"), 2))
    list(resume(settings, tmp_path / "stopped"))
    whole = rows_and_digest(tmp_path / "whole")
    assert rows_and_digest(tmp_path / "again") == whole
    assert rows_and_digest(tmp_path / "stopped") == whole


@on_a_gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", ON_GPU, ids=str)
def test_two_workers_on_one_gpu_give_the_result_of_one(method: str, engine: dict[str, Any], tmp_path: Path) -> None:
    for workers in (1, 2):
        list(start(small_config(method, 4, workers=workers, **engine), tmp_path / str(workers)))
    assert rows_and_digest(tmp_path / "1") == rows_and_digest(tmp_path / "2")


@on_a_gpu
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


@on_a_gpu
def test_private_round_on_a_gpu_matches_a_cpu_up_to_rounding() -> None:
    run, clients = toy_run(replace(fedavg(), privacy=DPSGDSettings(clip=0.5, noise=0.8)), lr=1.0), Clients(a=8, b=12)
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


@on_a_gpu
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


@on_a_gpu
@pytest.mark.parametrize("std", [0.3, 2.0])
def test_noise_is_added_on_a_gpu_as_on_a_cpu_and_then_gone(std: float) -> None:
    value, noise = torch.randn(3, 1001), gaussian_noise({"w": torch.empty(3, 1001)}, Key(1), std)["w"]
    held = noise.cuda()
    assert torch.equal(add_noise_once(value.cuda(), held, std).cpu(), add_noise(value, noise, std))
    assert bool(held.isnan().all())


@on_a_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("clipping", ["ghost", "direct"])
@pytest.mark.parametrize("block", [1, 2])
def test_captured_private_steps_match_eager_ones_on_a_gpu(block: int, clipping: Any, precision: Any) -> None:
    """The released sums are rounded to a grid, so most of them are equal."""
    settings = DPSGDSettings(0.3, 0.5, clipping=clipping)
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
