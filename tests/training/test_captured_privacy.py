"""Captured steps of DP-SGD on a CPU, with a fake recorder that repeats the work at each replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ghost_fixtures import TextClients, tiny_model
from graph_fixtures import ReplayingRecorder
from group_fixtures import Hospitals
from helpers import Clients, final_params, max_difference, play, toy_model, toy_run

from partita.core import tensors
from partita.core.client import ClientError
from partita.core.dp_settings import PrivacySettings
from partita.core.noise import add_noise, gaussian_noise
from partita.core.rng import Key
from partita.core.settings import Run
from partita.core.tensors import Tensors
from partita.methods import build
from partita.training import private_gradients
from partita.training.client_axis import ClientAxis
from partita.training.cuda_graphs import GraphCache, GraphedSteps
from partita.training.ghost_layers import GhostError
from partita.training.private_gradients import StepNoise

ONLY_NOISE = PrivacySettings(clip=1e-10, noise=1e9)  # whatever the examples are, the released sums are the noise


def private_run(settings: PrivacySettings, method: str = "fedavg", **more: Any) -> Run:
    return toy_run(replace(build(method), privacy=settings), **{"steps": 6, "count": 2, **more})


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3])
def test_captured_steps_release_the_noise_of_eager_steps_bit_for_bit(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients with different expected batch sizes, which take turns in the same captured tensors."""
    released: list[Tensors] = []

    class Watched(StepNoise):
        def add(self, sums: Tensors, count: int) -> Tensors:
            noisy = super().add(sums, count)
            released.append(tensors.clone_all(noisy))
            return noisy

    monkeypatch.setattr(private_gradients, "StepNoise", Watched)
    run, recorder = private_run(ONLY_NOISE), ReplayingRecorder()
    for graphs in (GraphCache(recorder), None):
        play(run, toy_model(), Clients(a=8, b=3, c=9), block=block, graphs=graphs)
    assert recorder.recorded
    captured, eager = released[: len(released) // 2], released[len(released) // 2 :]
    assert len(eager) == 2 * 6 * (3 if block == 1 else 1)
    assert all(map(tensors.equal, captured, eager))
    assert len({tensors.digest(noise) for noise in eager}) == len(eager)


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["direct", "ghost"])
@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_captured_steps_equal_eager_steps_to_rounding(clipping: Any, block: int, method: str) -> None:
    run = private_run(PrivacySettings(clip=0.3, noise=0.0, clipping=clipping), method, steps=8, count=1)
    recorder = ReplayingRecorder()
    captured = final_params(play(run, tiny_model("Bert"), TextClients(), block=block, graphs=GraphCache(recorder)))
    assert recorder.recorded
    eager = final_params(play(run, tiny_model("Bert"), TextClients(), block=block))
    assert max_difference(captured, eager) < 1e-5
    assert max_difference(eager, tiny_model("Bert").initial) > 1e-2


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drawn", [1, 4])
@pytest.mark.parametrize("block", [1, 2])
def test_a_step_whose_noise_was_not_drawn_ends_the_run(
    graphs: bool, drawn: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack on replayed steps: with old noise, the difference of two releases would be exact."""
    draw, calls = StepNoise.draw, list[int]()

    def forget(self: StepNoise, trainable: Tensors, keys: Any) -> None:
        calls.append(1)
        if len(calls) <= drawn:
            draw(self, trainable, keys)

    monkeypatch.setattr(StepNoise, "draw", forget)
    run, cache = (
        private_run(PrivacySettings(clip=0.5, noise=1.0), count=1),
        GraphCache(ReplayingRecorder()) if graphs else None,
    )
    with pytest.raises(ClientError, match="not finite"):
        play(run, toy_model(), Clients(a=8, b=8), block=block, graphs=cache)


def test_noise_is_used_once() -> None:
    like = {"w": torch.zeros(3, 2), "b": torch.zeros(())}
    for count in (1, 2):
        stacked = {name: torch.stack([value] * count) if count > 1 else value for name, value in like.items()}
        noise = StepNoise(ClientAxis(count), 0.5)
        for step in range(2):
            keys = [Key(rank) / step for rank in range(count)]
            noise.draw(stacked, keys)
            found = noise.add(stacked, count)
            for rank, key in enumerate(keys):
                drawn = gaussian_noise(like, key, 0.5)
                for name, value in like.items():
                    own = found[name][rank] if count > 1 else found[name]
                    assert torch.equal(own, add_noise(value, drawn[name], 0.5))
        assert all(value.isnan().all() for value in noise.add(stacked, count).values())


def test_a_draw_for_fewer_clients_leaves_no_noise_for_the_others() -> None:
    like = {"w": torch.zeros(3, 2)}
    noise = StepNoise(ClientAxis(3), 0.5)
    noise.draw(like, [Key(rank) for rank in range(3)])
    noise.add(like, 3)
    noise.draw({"w": like["w"][:2]}, [Key(8), Key(9)])
    assert not noise.held["w"][:2].isnan().any()
    assert noise.held["w"][2].isnan().all()
    assert noise.add({"w": like["w"][:2]}, 2)["w"].shape == (2, 2)
    assert noise.held["w"].isnan().all()


@pytest.mark.slow
def test_few_graphs_serve_poisson_batches_of_all_sizes() -> None:
    """About 64 examples a batch, with a standard deviation of 7; without padding, there would be a shape per size."""
    run = private_run(PrivacySettings(clip=0.5, noise=1.0, microbatch=8), batch_size=64, steps=40, count=1)
    recorder = ReplayingRecorder()
    cache = GraphCache(recorder)
    play(run, toy_model(), Clients(a=400), graphs=cache)
    [trainer] = cache.known.values()
    assert isinstance(trainer.run_step, GraphedSteps)
    assert len(trainer.run_step.taken) <= 6
    assert 1 <= recorder.recorded <= 6


@pytest.mark.slow
def test_a_failed_check_of_norms_leaves_the_captured_ghost_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto", a later phase can fail the check. Its steps must not replay what was captured before."""
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", 0)
    checks, sums = list[int](), list[int]()
    check, direct = private_gradients.check_norms, private_gradients.clipped_sum

    def failing(*given: Any) -> None:
        checks.append(1)
        if len(checks) > 2:  # the third phase: two clients, two rounds
            raise GhostError("wrong")
        check(*given)

    def counted(*given: Any) -> Any:
        sums.append(1)
        return direct(*given)

    monkeypatch.setattr(private_gradients, "check_norms", failing)
    monkeypatch.setattr(private_gradients, "clipped_sum", counted)
    run, recorder = (
        private_run(PrivacySettings(clip=0.3, noise=0.5, sampling="shuffle"), steps=6, count=2),
        ReplayingRecorder(),
    )
    play(run, tiny_model("Bert"), TextClients(), graphs=GraphCache(recorder))
    assert len(checks) == 4, "each phase checks on its own"
    assert recorder.recorded == 2 * 2, "batches of four and of two examples, with ghost norms and directly"
    assert len(sums) == 2 * 6, "both phases of the second round"


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3])
def test_captured_steps_of_groups_equal_eager_steps(block: int) -> None:
    """Batches are padded in the number of groups."""
    settings = PrivacySettings(clip=0.5, noise=0.0, unit="group", group="patient")
    run, hospitals = (
        private_run(settings, batch_size=16, steps=8, count=1),
        Hospitals(a=[2] * 30, b=[2] * 20, c=[2] * 9),
    )
    recorder = ReplayingRecorder()
    captured = final_params(play(run, toy_model(), hospitals, block=block, graphs=GraphCache(recorder)))
    assert recorder.recorded
    assert max_difference(captured, final_params(play(run, toy_model(), hospitals, block=block))) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 2])
def test_a_private_run_with_graphs_resumes_bit_for_bit(block: int) -> None:
    """After a resume the first steps run eagerly again, where the uninterrupted run replays graphs."""
    run, clients = private_run(PrivacySettings(clip=0.5, noise=0.8), count=4), Clients(a=8, b=12)
    whole = play(run, toy_model(), clients, block=block, graphs=GraphCache(ReplayingRecorder()))
    again = ReplayingRecorder()
    resumed = play(run, toy_model(), clients, whole[1].server, 2, block=block, graphs=GraphCache(again))
    assert again.recorded
    assert tensors.equal(final_params(whole), final_params(resumed))


@pytest.mark.slow
def test_settings_of_privacy_have_graphs_of_their_own() -> None:
    """The clip is a number in the captured step."""
    cache, ended = GraphCache(ReplayingRecorder()), []
    model = toy_model()
    for clip in (0.1, 0.4):
        run = private_run(PrivacySettings(clip=clip, noise=0.0), count=1)
        ended.append(final_params(play(run, model, Clients(a=8), graphs=cache)))
        assert max_difference(ended[-1], final_params(play(run, model, Clients(a=8)))) < 1e-6
    assert max_difference(*ended) > 1e-3
    assert len(cache.known) == 2
