"""The lab simulator against closed forms and the core, and the automatic warm-up against the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import figures
import numpy as np
import pytest
import torch
from helpers import play
from linear_attention import experiments
from linear_attention.model import LabPopulation, LinearAttention, ridge
from linear_attention.simulate import (
    Setting,
    Trace,
    automatic_warmup,
    frozen_stage,
    losses_by_warmup,
    sharpness,
    step_size,
    threshold_by_clients,
    warm_up,
)
from linear_attention.synthetic import Differences, Federation, Size, draw, stack
from linear_attention.theory import (
    Data,
    Features,
    Kernel,
    LabError,
    attend,
    best_value,
    drift,
    feature_map,
    fixed_point,
    loss,
    moments,
    profile,
    profile_gradient,
    ridged,
)
from torch import Tensor

from partita.core.compose import compose
from partita.core.method import Method
from partita.core.rng import Key
from partita.core.rounds import RoundResult
from partita.core.settings import Run, Training
from partita.methods import auto_warmup
from partita.methods.fedfrozen import fedfrozen

RIDGE = 0.05
TINY = Size(clients=3, examples=5, tokens=4, width=3, rank=2, outputs=2)
MAPS = ("identity", "elu", "relu", "random")


def make_world(
    name: str = "identity", level: float = 1.0, seed: int = 0, size: Size = TINY
) -> tuple[Federation, Features]:
    features = feature_map(name, size.rank)
    return draw(Key(seed), level, features, size), features


def stacked_rows(world: Federation, features: Features) -> tuple[Tensor, Tensor]:
    """Z and Y of all examples stacked, each row times the square root of its weight."""
    data = world.data
    root = (data.weight[:, None] * data.share).sqrt()[..., None, None]
    mixed = attend(data.inputs, world.kernel.spread(), features)
    return (root * mixed).flatten(0, -2), (root * data.targets).flatten(0, -2)


# ---- closed forms


@pytest.mark.parametrize("name", MAPS)
def test_linear_attention_matches_the_formula(name: str) -> None:
    world, features = make_world(name)
    tokens = world.data.inputs[1, 2]  # (token, width)
    query, key = world.kernel
    expected = features(tokens @ query) @ features(tokens @ key).T @ tokens
    torch.testing.assert_close(attend(world.data.inputs, world.kernel.spread(), features)[1, 2], expected)


def test_random_features_approach_the_exponential_kernel() -> None:
    features = feature_map("random", 2, Key(1), count=200_000)
    query, key = torch.tensor([0.3, -0.5]).double(), torch.tensor([0.4, 0.2]).double()
    assert float(features(query) @ features(key)) == pytest.approx(float(torch.exp(query @ key)), rel=0.01)


@pytest.mark.parametrize("name", MAPS)
def test_best_value_solves_the_stacked_ridge_problem(name: str) -> None:
    world, features = make_world(name)
    mixed, targets = stacked_rows(world, features)
    eye = RIDGE**0.5 * np.eye(mixed.shape[1])
    augmented = np.vstack([mixed.numpy(), eye]), np.vstack([targets.numpy(), np.zeros((len(eye), targets.shape[1]))])
    expected, residual, *_ = np.linalg.lstsq(*augmented)
    means = moments(world.data, world.kernel, features)
    np.testing.assert_allclose(best_value(means, RIDGE).numpy(), expected, atol=1e-10)
    assert float(profile(means, RIDGE)) == pytest.approx(residual.sum() / 2, rel=1e-10)


def test_lab_loss_is_the_weighted_mean_over_examples() -> None:
    world, features = make_world()
    mixed, targets = stacked_rows(world, features)
    value = torch.ones(3, 2).double()
    expected = (targets - mixed @ value).square().sum() / 2 + RIDGE * value.square().sum() / 2
    means = moments(world.data, world.kernel, features)
    assert float(loss(means, value, RIDGE)) == pytest.approx(float(expected), rel=1e-12)
    best = best_value(means, RIDGE)
    assert float(loss(means, best, RIDGE)) == pytest.approx(float(profile(means, RIDGE)), rel=1e-12)
    assert loss(means, best + 0.01, RIDGE) > profile(means, RIDGE)


@pytest.mark.parametrize("name", MAPS)
def test_profile_gradient_matches_autograd_and_differences(name: str) -> None:
    """The envelope theorem: no term for the change of W*. Compared with autograd and finite differences."""
    world, features = make_world(name)
    gradient = profile_gradient(world.data, world.kernel, RIDGE, features)
    live = Kernel(*(side.clone().requires_grad_() for side in world.kernel))
    through = torch.autograd.grad(profile(moments(world.data, live, features), RIDGE), live)
    for ours, theirs in zip(gradient, through, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)

    def at(step: float) -> Tensor:
        moved = world.kernel._replace(key=world.kernel.key + step * nudge)
        return profile(moments(world.data, moved, features), RIDGE)

    nudge = torch.zeros_like(world.kernel.key)
    nudge[1, 0] = 1.0
    difference_quotient = (at(1e-6) - at(-1e-6)) / 2e-6
    assert float(difference_quotient) == pytest.approx(float(gradient.key[1, 0]), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_frozen_stage_converges_to_its_fixed_point(steps: int) -> None:
    world, features = make_world(level=2.0)
    means = moments(world.data, world.kernel, features)
    setting = Setting(float(step_size(world, 0.5, features)), steps, 0, RIDGE)
    value = frozen_stage(means, world.value, setting, 5000)
    expected = fixed_point(means, RIDGE, setting.lr, steps)
    torch.testing.assert_close(value, expected, atol=1e-8, rtol=0)
    assert len(set(world.data.weight.tolist())) > 1, "the weights must be unequal for this to mean much"


def test_frozen_round_is_local_gradient_steps_and_a_mean() -> None:
    world, features = make_world(level=2.0)
    means = moments(world.data, world.kernel, features)
    start = torch.ones(3, 2).double()
    ends = []
    for gram, cross in zip(means.gram, means.cross, strict=True):
        value = start
        for _ in range(3):
            value = value - 0.2 * (ridged(gram, RIDGE) @ value - cross)
        ends.append(value)
    expected = sum(weight * end for weight, end in zip(world.data.weight, ends, strict=True))
    torch.testing.assert_close(frozen_stage(means, start, Setting(0.2, 3, 0, RIDGE), 1), expected)


def test_lab_drift_is_zero_for_one_step_or_identical_clients_and_grows_otherwise() -> None:
    world, features = make_world(level=2.0)
    means = moments(world.data, world.kernel, features)
    lr = float(step_size(world, 0.5, features))
    distance, excess = drift(means, RIDGE, lr, 1)
    assert float(distance) < 1e-10
    assert abs(float(excess)) < 1e-12
    alike = replace(means, gram=means.gram[:1].expand(3, -1, -1), cross=means.cross[:1].expand(3, -1, -1))
    assert float(drift(alike, RIDGE, lr, 20)[0]) < 1e-10
    far = [float(drift(means, RIDGE, lr, steps)[0]) for steps in (2, 5, 20)]
    assert 1e-3 < far[0] < far[1] < far[2]
    value = fixed_point(means, RIDGE, lr, 20)
    excess = drift(means, RIDGE, lr, 20)[1]
    assert float(excess) == pytest.approx(float(loss(means, value, RIDGE) - profile(means, RIDGE)), rel=1e-8)


def test_small_warmup_steps_from_fitted_values_descend_on_the_profile() -> None:
    """With W at W*, a small step follows the profile's own gradient, so it decreases F at any level of heterogeneity.

    After it W lags behind W* by the order of the step, so the next rounds descend too while the gradient is larger.
    """
    world, features = make_world(level=2.0, seed=3)
    fitted = replace(world, value=best_value(moments(world.data, world.kernel, features), RIDGE))
    many = stack([fitted])
    trace = warm_up(many, Setting(0.02, 2, 12, RIDGE), features)
    values = torch.stack([profile(moments(many.data, trace.kernel_at(t), features), RIDGE) for t in range(13)])
    assert (values[1:] < values[:-1]).all()
    gradient = profile_gradient(world.data, world.kernel, RIDGE, features)
    tiny = warm_up(many, Setting(1e-7, 1, 1, RIDGE), features)
    step = (tiny.kernel_at(1).query[0] - world.kernel.query) / -1e-7
    torch.testing.assert_close(step, gradient.query, atol=1e-6, rtol=1e-6)


# ---- generated federations


def test_lab_federation_depends_on_its_key() -> None:
    one, again, other = make_world(seed=1)[0], make_world(seed=1)[0], make_world(seed=2)[0]
    for name in ("inputs", "targets", "weight"):
        assert torch.equal(getattr(one.data, name), getattr(again.data, name))
    assert torch.equal(one.kernel.query, again.kernel.query)
    draws = [{*world.data.inputs.flatten().tolist(), *world.data.targets.flatten().tolist()} for world in (one, other)]
    assert not (draws[0] & draws[1]) - {0.0}, "no number is common to two keys; 0 fills clients with fewer examples"
    assert not torch.isin(one.kernel.query, other.kernel.query).any()


def test_heterogeneity_level_controls_how_far_clients_differ() -> None:
    features = feature_map("identity", 2)
    size = Size(clients=6, examples=200)

    def spread(level: float, differ: Differences) -> float:
        """The spread of the clients' own best value weights."""
        world = draw(Key(0), level, features, size, differ, noise=0.0)
        means = moments(world.data, world.kernel, features)
        own = torch.linalg.solve(ridged(means.gram, 1e-3), means.cross)
        return float(own.std(0).norm() / own.mean(0).norm())

    still = spread(0.0, Differences())
    for name in ("rotation", "value", "kernel"):
        assert spread(1.0, replace(Differences(0, 0, 0, 0, 0), **{name: 1.0})) > 1.5 * still
    world = draw(Key(0), 0.0, features, size)
    assert torch.equal(world.data.weight, torch.full((6,), 1 / 6, dtype=torch.float64))
    assert draw(Key(0), 2.0, features, size).data.weight.std() > 0.02


def test_weights_sum_to_one_and_stacking_changes_no_result() -> None:
    worlds = [make_world(level=level, seed=seed)[0] for seed, level in enumerate((0.0, 1.0, 3.0))]
    features = make_world()[1]
    many = stack(worlds)
    torch.testing.assert_close(many.data.share.sum(-1), torch.ones(3, 3).double())
    torch.testing.assert_close(many.data.weight.sum(-1), torch.ones(3).double())
    together = profile(moments(many.data, many.kernel, features), RIDGE)
    for place, world in enumerate(worlds):
        alone = profile(moments(world.data, world.kernel, features), RIDGE)
        assert float(together[place]) == pytest.approx(float(alone), rel=1e-12)


def test_invalid_lab_settings_are_refused() -> None:
    with pytest.raises(LabError, match="feature map 'elo'; it can be: elu, identity, random, relu"):
        feature_map("elo", 2)
    with pytest.raises(LabError, match="level -1"):
        draw(Key(0), -1.0, feature_map("relu", 2))
    with pytest.raises(LabError, match="one federation, not 2"):
        LabPopulation(stack([make_world()[0], make_world()[0]]).data)


# ---- the simulator and the core


def core_rounds(world: Federation, features: Features, method: Method, setting: Setting) -> list[RoundResult]:
    training = Training(lr=float(setting.lr), optimizer="sgd", batch_size=1000, steps=setting.steps)
    run = Run(compose(method, ridge(setting.ridge)), training, setting.rounds, Key(0))
    return play(run, LinearAttention(world, features), LabPopulation(world.data), block=3)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", MAPS)
def test_lab_simulator_and_core_give_the_same_tensors(name: str) -> None:
    world, features = make_world(name, level=1.5)
    other, _ = make_world(name, level=0.5, seed=9)
    many = stack([world, other])
    setting = Setting(torch.tensor([0.05, 0.02]).double(), 3, 4, RIDGE)
    trace = warm_up(many, setting, features)
    means = moments(many.data, trace.kernel_at(2), features)
    value = frozen_stage(means, trace.value[2], setting, 2)
    for place, each in enumerate((world, other)):
        own = replace(setting, lr=float(setting.lr[place]))
        full, half = core_rounds(each, features, fedfrozen(1.0), own), core_rounds(each, features, fedfrozen(2), own)
        for done in range(4):
            params = full[done].server.params
            torch.testing.assert_close(params["query.weight"], trace.kernel.query[done + 1, place], atol=1e-10, rtol=0)
            torch.testing.assert_close(params["value.weight"], trace.value[done + 1, place], atol=1e-10, rtol=0)
        params = half[-1].server.params
        torch.testing.assert_close(params["key.weight"], trace.kernel.key[2, place], atol=1e-10, rtol=0)
        torch.testing.assert_close(params["value.weight"], value[place], atol=1e-10, rtol=0)
    final = losses_by_warmup(many, trace, setting, features)
    torch.testing.assert_close(final[2], loss(means, value, RIDGE))
    last = moments(many.data, trace.kernel_at(4), features)
    torch.testing.assert_close(final[4], loss(last, trace.value[4], RIDGE))


def test_sharpness_predicts_which_frozen_stages_converge() -> None:
    world, features = make_world()
    many = stack([world, world])
    steep = step_size(many, 1.0, features)
    setting = Setting(torch.stack([steep[0] * 1.9, steep[1] * 2.6]), 1, 0, 0.0)
    still = Trace(Kernel(*(side[None] for side in many.kernel)), many.value[None], torch.zeros(0, 2))
    found = sharpness(many, still, setting, features)
    torch.testing.assert_close(found, torch.tensor([1.9, 2.6]).double())
    alone = Data(
        many.data.inputs, many.data.targets, many.data.share, _weight_of_the_steepest(world, features).expand(2, 3)
    )
    ends = frozen_stage(moments(alone, many.kernel, features), torch.ones_like(many.value), setting, 400)
    assert ends[0].norm() < 100 < ends[1].norm()


def _weight_of_the_steepest(world: Federation, features: Features) -> Tensor:
    top = torch.linalg.eigvalsh(moments(world.data, world.kernel, features).gram)[:, -1]
    return (top == top.max()).double()


# ---- the automatic warm-up


def frozen_at(played: list[RoundResult]) -> int:
    """The first round that left the kernel unchanged, or the number of rounds if there is none."""
    kernels = [each.server.params["query.weight"] for each in played]
    return next((t for t in range(1, len(kernels)) if kernels[t] is kernels[t - 1]), len(kernels))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("threshold", "patience"), [(1.5, 1), (2.0, 3)])
def test_auto_warmup_freezes_when_the_simulator_predicts(threshold: float, patience: int) -> None:
    worlds = [make_world(level=level, seed=seed)[0] for seed, level in enumerate((0.5, 2.0))]
    features = make_world()[1]
    many = stack(worlds)
    setting = Setting(0.15, 6, 12, RIDGE)
    chosen = automatic_warmup(warm_up(many, setting, features), threshold, patience)
    assert int(chosen.min()) < 12, "nothing freezes here, so nothing is compared"
    for place, world in enumerate(worlds):
        method = fedfrozen("auto", threshold=threshold, patience=patience)
        assert frozen_at(core_rounds(world, features, method, setting)) == int(chosen[place])


@pytest.mark.slow
def test_the_default_threshold_freezes_when_the_simulator_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_warmup, "FACTOR", 1.5)  # so that it freezes within a few rounds
    worlds = [make_world(level=level, seed=seed)[0] for seed, level in enumerate((0.5, 2.0))]
    features, many = make_world()[1], stack(worlds)
    setting = Setting(0.15, 6, 12, RIDGE)
    trace = warm_up(many, setting, features)
    chosen = automatic_warmup(trace, threshold_by_clients(many.data.weight), 1)
    assert int(chosen.min()) < 12, "nothing freezes here, so nothing is compared"
    for place, world in enumerate(worlds):
        played = core_rounds(world, features, fedfrozen("auto", patience=1), setting)
        assert frozen_at(played) == int(chosen[place])


def test_identical_clients_never_freeze_and_opposed_clients_soon_do() -> None:
    features = feature_map("identity", 2)
    world, _ = make_world(level=0.0)
    same = Data(*(value[:1].expand_as(value).contiguous() for value in _data_with_equal_weights(world.data)))
    setting = Setting(0.1, 4, 8, RIDGE)
    agree = replace(world, data=same)
    assert frozen_at(core_rounds(agree, features, fedfrozen("auto", threshold=0.1, patience=1), setting)) == 8
    opposed = same.targets * torch.tensor([1.0, -1.0, 0.0])[:, None, None, None]
    quarrel = replace(world, data=replace(same, targets=opposed), value=0.2 * torch.ones(3, 2).double())
    assert frozen_at(core_rounds(quarrel, features, fedfrozen("auto", threshold=1.0, patience=2), setting)) < 8


def _data_with_equal_weights(data: Data) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return data.inputs, data.targets, data.share, torch.full_like(data.weight, 1 / len(data.weight))


# ---- figures


@pytest.fixture
def small_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROUNDS", 6), ("SEARCH", 2), ("LEVELS", (0.0, 1.0)), ("STEPS", (1, 3))):
        monkeypatch.setattr(experiments, name, value)
    monkeypatch.setattr(figures, "LOCAL", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("small_figures")
def test_lab_figures_are_drawn_and_written(tmp_path: Path) -> None:
    assert [path.name for path in figures.draw("fig1", tmp_path / "out", seeds=2)] == ["fig1.png", "fig1.svg"]
    labels = [axes.get_title("left")[0] for axes in figures.fig2(2, lambda: None).figure.axes]
    assert labels == ["a", "b", "c", "d"]


@pytest.mark.slow
@pytest.mark.usefixtures("small_figures")
def test_all_lab_figures_and_a_self_contained_page_are_written(tmp_path: Path) -> None:
    written = figures.draw("all", tmp_path / "out", seeds=2)
    assert [path.name for path in written] == ["fig1.png", "fig1.svg", "fig2.png", "fig2.svg", "laboratory.html"]
    assert all(path.stat().st_size > 5000 for path in written)
    text = written[-1].read_text()
    assert text.count('<img alt="fig') == 2
    assert "://" not in text


@pytest.mark.usefixtures("small_figures")
def test_bias_is_positive_and_drift_needs_several_local_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experiments, "SEARCH", 30)
    batch = experiments.run((0.5, 2.0), 2, 1)
    bias, excess = experiments.bias_and_drift(batch)
    assert bias.shape == excess.shape == (7, 4)
    assert bias.min() > 1e-3, "six rounds of one step cannot reach the least"
    assert excess.abs().max() < 1e-12
    monkeypatch.setattr(experiments, "SEARCH", 1)
    assert experiments.bias_and_drift(experiments.run((0.5, 2.0), 2, 8))[1].min() > 1e-9
