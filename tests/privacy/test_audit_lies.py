"""The checks of the mechanism find training that differs from what was charged, and pass honest training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mechanism
import pytest
import torch
from evidence import judge
from helpers import Clients, play, toy_model, toy_run
from mechanism import check_examples
from mechanism_choice import check_choice
from mechanism_clients import check_clients
from torch import Tensor

from partita.core import client
from partita.core.client_rule import PrivacyRelease
from partita.core.dp_settings import PrivacySettings
from partita.core.rng import Key
from partita.core.rounds import initial_server
from partita.core.settings import Run
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.engines.simulation import SimulationEngine
from partita.methods import build, selectors
from partita.methods.fedavg import fedavg
from partita.methods.selectors import Attention, Ranking
from partita.privacy import client_level as of_clients
from partita.privacy.client_level import ClippedUpdates, protect_clients
from partita.testing.toy import ToyTransformer
from partita.training import local_training, private_gradients
from partita.training.dp_sgd import NoiseSource

Patch = pytest.MonkeyPatch
gaussian, of_block = of_clients.gaussian_noise, private_gradients.block_noise
clipped_sum, ghost_sum, clip_update = (
    private_gradients.clipped_sum,
    private_gradients.ghost_sum,
    ClippedUpdates._clipped,
)


@pytest.fixture(autouse=True)
def small_checks(monkeypatch: Patch) -> None:
    monkeypatch.setattr(mechanism, "STEPS", 3)
    monkeypatch.setattr(mechanism, "INSPECTED_ROUNDS", 24)


def failed_example_checks(seed: int = 7, side_by_side: int = 1, **privacy: Any) -> set[str]:
    """The checks that fail for a run with three clients, one of them smaller than a batch."""
    run = toy_run(
        replace(fedavg(), privacy=PrivacySettings(**{"clip": 0.5, "noise": 0.8, **privacy})), batch_size=8, seed=seed
    )
    checks = check_examples(run, toy_model(), Clients(a=40, b=24, c=6), initial_server(run, toy_model()), side_by_side)
    return {check["what"] for check in judge(checks) if not check["passed"]}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_checks_pass_an_honest_run(seed: int) -> None:
    assert not failed_example_checks(seed, side_by_side=1 + seed % 3)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["scaffold", "fedrep", "fedfrozen", "zero-shot"])
def test_checks_pass_honest_runs_of_other_methods(name: str) -> None:
    """Methods with a gradient correction, two phases, a changing plan, and nothing to train."""
    run, model = toy_run(replace(build(name), privacy=PrivacySettings(clip=0.5, noise=0.8)), batch_size=8), toy_model()
    checks = judge(check_examples(run, model, Clients(a=40, b=6), initial_server(run, model)))
    assert [check["what"] for check in checks if not check["passed"]] == []
    assert len(checks) == (1 if name == "zero-shot" else 12)


@pytest.mark.slow
def test_audit_passes_shuffled_batches_charged_as_shuffled() -> None:
    assert not failed_example_checks(sampling="shuffle")


def test_checks_detect_half_the_noise(monkeypatch: Patch) -> None:
    monkeypatch.setattr(private_gradients, "block_noise", lambda like, keys, std: of_block(like, keys, std / 2))
    assert "noise multiplier" in failed_example_checks()


@pytest.mark.slow
def test_checks_detect_a_tensor_without_noise(monkeypatch: Patch) -> None:
    """One small tensor of 13: the standard deviation over all tensors hardly changes."""

    def lie(like: Tensors, keys: Sequence[Key], std: float) -> Tensors:
        drawn = of_block(like, keys, std)
        return {**drawn, "layers.0.norm.weight": torch.zeros_like(drawn["layers.0.norm.weight"])}

    monkeypatch.setattr(private_gradients, "block_noise", lie)
    assert "noise multiplier" in failed_example_checks()


@pytest.mark.slow
def test_checks_detect_uniform_noise(monkeypatch: Patch) -> None:
    """Uniform noise of the same standard deviation has no tails, so it gives no guarantee."""

    def lie(like: Tensors, keys: Sequence[Key], std: float) -> Tensors:
        drawn = of_block(like, keys, 1.0)
        return {name: (torch.special.ndtr(value) - 0.5) * 12**0.5 * std for name, value in drawn.items()}

    monkeypatch.setattr(private_gradients, "block_noise", lie)
    assert failed_example_checks() == {"noise: distance from a normal distribution"}


@dataclass(frozen=True)
class ConstantKey:
    """A key that stays the same whatever is appended to its path."""

    key: Key

    def __truediv__(self, step: object) -> Key:
        return self.key


def _noise_source_with_key(
    path: Callable[[Run, client.ClientRound, int], Any],
) -> Callable[[Run, client.ClientRound, int], NoiseSource]:
    honest = local_training._noise_source
    return lambda run, client_round, phase: replace(
        honest(run, client_round, phase), key=path(run, client_round, phase)
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("between", "path", "side_by_side"),
    [
        ("steps", lambda run, client_round, phase: ConstantKey(client_round.key / "noise" / phase), 1),
        ("rounds", lambda run, client_round, phase: run.key / "client" / client_round.job.client / phase, 1),
        ("clients", lambda run, client_round, phase: run.key / "round" / client_round.job.round / phase, 1),
        ("clients", lambda run, client_round, phase: run.key / "round" / client_round.job.round / phase, 3),
    ],
    ids=["steps", "rounds", "clients", "clients in a block"],
)
def test_checks_detect_repeated_noise(
    monkeypatch: Patch, between: str, path: Callable[[Run, client.ClientRound, int], Any], side_by_side: int
) -> None:
    monkeypatch.setattr(local_training, "_noise_source", _noise_source_with_key(path))
    assert f"noise: largest correlation between {between}" in failed_example_checks(side_by_side=side_by_side)


@pytest.mark.slow
def test_checks_detect_equal_noise_in_all_tensors(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        private_gradients,
        "block_noise",
        lambda like, keys, std: {n: of_block({"": v}, keys, std)[""] for n, v in like.items()},
    )
    assert "noise: largest correlation between tensors" in failed_example_checks()


def test_checks_detect_a_missing_clip(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        private_gradients,
        "clipped_sum",
        lambda *rest: clipped_sum(*rest[:5], PrivacySettings(clip=float("inf"), noise=0.0)),
    )
    assert failed_example_checks() == {"largest contribution of one example / clip"}


@pytest.mark.slow
def test_checks_detect_a_missing_clip_with_ghost_clipping(monkeypatch: Patch) -> None:
    from ghost_fixtures import TextClients, tiny_model

    def failed() -> set[str]:
        run = toy_run(
            replace(fedavg(), privacy=PrivacySettings(clip=0.5, noise=0.8, clipping="ghost")), count=1, batch_size=3
        )
        model = tiny_model("Bert")
        checks = judge(check_examples(run, model, TextClients(), initial_server(run, model)))
        return {check["what"] for check in checks if not check["passed"]}

    assert not failed()
    monkeypatch.setattr(
        private_gradients,
        "ghost_sum",
        lambda *rest: ghost_sum(*rest[:-1], PrivacySettings(clip=float("inf"), noise=0.0)),
    )
    assert failed() == {"largest contribution of one example / clip"}


@pytest.mark.slow
def test_checks_detect_clipping_of_the_batch_instead_of_examples(monkeypatch: Patch) -> None:
    """Then an example's contribution depends on the others, and two batches may differ by more than the clip.

    Each audit tries a few examples, so not every run shows it.
    """

    def lie(*rest: Any) -> tuple[Tensors, Tensor]:
        total, losses = clipped_sum(*rest[:5], PrivacySettings(clip=float("inf"), noise=0.0))
        norm = torch.sqrt(sum((value**2).sum() for value in total.values()))  # type: ignore[call-overload]
        return {name: value * (0.5 / norm) for name, value in total.items()}, losses

    monkeypatch.setattr(private_gradients, "clipped_sum", lie)
    failed = [failed_example_checks(seed) for seed in range(6)]
    assert sum(names == {"largest contribution of one example / clip"} for names in failed) >= 2


@pytest.mark.slow
def test_checks_detect_shuffled_batches_charged_as_poisson(monkeypatch: Patch) -> None:
    monkeypatch.setattr(client, "poisson_batches", client.shuffled_batches)
    failed = failed_example_checks()
    assert "variance of batch sizes / binomial" in failed
    assert "examples in common between batches of two steps" in failed


@pytest.mark.slow
def test_checks_detect_a_sampling_rate_above_the_charged_one(monkeypatch: Patch) -> None:
    honest = client.poisson_batches
    monkeypatch.setattr(
        client,
        "poisson_batches",
        lambda count, training, *rest: honest(count, replace(training, batch_size=12), *rest),
    )
    assert "sampling rate" in failed_example_checks()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("between", "parts"), [("rounds", ("client",)), ("clients", ("round",))])
def test_checks_detect_repeated_samples(monkeypatch: Patch, between: str, parts: tuple[str, ...]) -> None:
    honest = client._batch_schedules

    def lie(run: Run, job: client.Job, plan: Any, examples: Any, key: Key, *rest: Any) -> Any:
        key = run.key / (job.client if parts == ("client",) else job.round)
        return honest(run, job, plan, examples, key, *rest)

    monkeypatch.setattr(client, "_batch_schedules", lie)
    assert f"examples in common between batches of two {between}" in failed_example_checks()


def failed_client_checks(seed: int = 7, count: int = 6, cohorts: list[list[str]] | None = None) -> set[str]:
    run = toy_run(protect_clients(fedavg(), 0.1, 0.7, 2), count=count, seed=seed, cohort=2, steps=1)
    model, clients = toy_model(), Clients(a=8, b=8, c=8, d=8)
    recorded = [list(result.cohort) for result in play(run, model, clients)] if cohorts is None else cohorts
    checks = check_clients(run, model, SimulationEngine(run, model, clients), initial_server(run, model), recorded)
    return {check["what"] for check in judge(checks) if not check["passed"]}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("seed", range(3))
def test_checks_pass_an_honest_client_level_run(seed: int) -> None:
    assert not failed_client_checks(seed)


def test_checks_detect_half_the_client_level_noise(monkeypatch: Patch) -> None:
    monkeypatch.setattr(of_clients, "gaussian_noise", lambda like, key, std: gaussian(like, key, std / 2))
    assert "noise multiplier" in failed_client_checks()


def test_checks_detect_repeated_client_level_noise(monkeypatch: Patch) -> None:
    monkeypatch.setattr(of_clients, "gaussian_noise", lambda like, key, std: gaussian(like, Key(1), std))
    assert "noise: largest correlation between rounds" in failed_client_checks()


def test_checks_detect_unclipped_updates(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ClippedUpdates, "decode_update", lambda self, update: update)
    assert failed_client_checks() == {"largest contribution of one client / clip"}


def test_checks_detect_updates_weighted_by_examples(monkeypatch: Patch) -> None:
    def lie(self: ClippedUpdates, update: Update) -> Update:
        clipped = clip_update(self, update)
        return replace(clipped, delta={name: 8 * value for name, value in clipped.delta.items()})

    monkeypatch.setattr(ClippedUpdates, "_clipped", lie)
    assert failed_client_checks() == {"largest contribution of one client / clip"}


def test_checks_detect_wrong_cohort_sizes_and_repeated_cohorts() -> None:
    assert "clients in a cohort" in failed_client_checks(cohorts=[["a", "b", "c"]] * 4)
    assert "share of a cohort asked again in the next round" in failed_client_checks(cohorts=[["a", "b"]] * 40)


def failed_selection_checks(
    select: Attention | None = None, release: PrivacyRelease | None = None, seed: int = 7
) -> set[str]:
    method = build("safl", {"k": 1, "noise": 3.0, "probe": 0.5})
    [rule] = method.client_rules
    rule = replace(rule, select=select or rule.select, release=release or rule.release)  # type: ignore[type-var]
    run = toy_run(replace(method, client_rules=(rule,), privacy=PrivacySettings(clip=1.0, noise=1.0)), seed=seed)
    model = ToyTransformer(width=4, layers=3)
    checks = check_choice(run, model, Clients(a=8), initial_server(run, model))
    assert len(checks) == 3
    return {check["what"] for check in judge(checks) if not check["passed"]}


COSINE_CHECK = "layer choice: cosine of noisy scores with the true ones"


class RepeatedNoiseAttention(Attention):
    def rank(self, layers: Any, count: int, examples: Any, ctx: Any, key: Key) -> Ranking:
        return super().rank(layers, count, examples, ctx, Key(1) / ctx.round_info.client)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("seed", range(3))
def test_checks_pass_an_honest_layer_selection(seed: int) -> None:
    assert not failed_selection_checks(seed=seed)


@pytest.mark.slow
def test_checks_detect_dishonest_layer_selection(monkeypatch: Patch) -> None:
    assert failed_selection_checks(Attention(probe=0.5, noise=1.5)) == {COSINE_CHECK}
    assert failed_selection_checks(Attention(probe=1.0, noise=3.0)) == {COSINE_CHECK}
    assert "layer choice: correlation of noise between rounds" in failed_selection_checks(
        RepeatedNoiseAttention(probe=0.5, noise=3.0)
    )
    monkeypatch.setattr(selectors, "clip_rows", lambda rows, norm: rows)
    assert failed_selection_checks() == {COSINE_CHECK}
