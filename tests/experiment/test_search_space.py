"""Spaces of `partita tune`: how they are read, checked against the config, and sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import SMALL_TASK, SMALL_VIT
from hypothesis import given
from hypothesis import strategies as st

from partita.core.options import OptionError
from partita.core.rng import Key
from partita.experiment.compare import load_method
from partita.experiment.search_space import Choice, Interval, parse_space, spaces_of, with_settings
from partita.experiment.trial_sampler import Outcome, Pruner, Sampler, Search
from partita.experiment.tuning import Options, plan_tuning

LR = "training.lr=log(1e-4,1e-1)"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(f'method.name = "fedavg"\nrounds = 2\n{SMALL_VIT}{SMALL_TASK}')
    return file


def test_spaces_are_read() -> None:
    assert parse_space("training.lr=log(1e-5, 1e-2)").values == Interval(1e-5, 1e-2, log=True)
    assert parse_space("training.momentum = uniform(0,0.9)").values == Interval(0, 0.9)
    assert parse_space("training.epochs=int(1,5)").values == Interval(1, 5, whole=True)
    assert parse_space("training.epochs=int(1,64,log)").values == Interval(1, 64, log=True, whole=True)
    assert parse_space("method.mu=choice(0.01, 0.1, 1)").values == Choice(("0.01", "0.1", "1"))
    assert parse_space("mine.py:fedx: method.mu=choice(1,2)").method == "mine.py:fedx"
    assert parse_space(LR).method is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("training.lr", "cannot read --space"),
        ("training.lr=normal(0,1)", "'normal' is unknown"),
        ("training.lr=log(0,1)", "a logarithm needs one above 0"),
        ("training.lr=uniform(2,1)", "a lower and a larger upper bound"),
        ("training.lr=uniform(1)", "a lower and a larger upper bound"),
        ("training.lr=uniform(0,nan)", "a lower and a larger upper bound"),
        ("training.epochs=int(1,2.5)", "must be whole numbers"),
        ("training.lr=choice(1)", "two or more different values"),
        ("seed=int(0,9)", "cannot be tuned"),
        ("rounds=int(1,9)", "cannot be tuned"),
        ("split.alpha=log(0.1,1)", "cannot be tuned"),
        ("privacy.epsilon=uniform(1,9)", "cannot be tuned"),
        ("evaluate.every=int(1,9)", "cannot be tuned"),
        ("method.name=choice(fedavg,fedprox)", "list the methods in --methods"),
    ],
)
def test_unreadable_space_is_named(text: str, reason: str) -> None:
    with pytest.raises(OptionError, match="--space") as error:
        parse_space(text)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("methods", "spaces", "reason"),
    [
        ("fedavg", ["training.lrr=log(1e-4,1e-1)"], "unknown key 'training.lrr'"),
        ("fedavg", ["training.lr=uniform(-1,1)"], "training.lr"),
        ("fedavg,fedprox", ["method.mu=log(1e-3,1)"], "limit it: --space 'METHOD: method.mu=log"),
        ("fedavg", [LR, "fedprx: method.mu=log(1e-3,1)"], "a method that --methods does not have"),
        ("fedavg,fedprox", ["fedprox: method.mu=log(1e-3,1)"], "fedavg has no --space"),
        ("fedavg", [LR, "training.lr=choice(1,2)"], "two spaces for training.lr"),
        ("fedavg", ["training.schedule=choice(cosine,cosinus)"], "cosinus"),
    ],
)
def test_spaces_are_checked_against_the_config_before_any_run(
    config: Path, tmp_path: Path, methods: str, spaces: list[str], reason: str
) -> None:
    with pytest.raises(OptionError) as error:
        plan_tuning(config, [], Options(methods, tuple(spaces)), tmp_path / "out")
    assert reason in str(error.value)
    assert not (tmp_path / "out").exists()


def test_space_of_one_method_replaces_the_common_one() -> None:
    spaces = [
        parse_space(LR),
        parse_space("fedprox: training.lr=choice(1,2)"),
        parse_space("fedprox: method.mu=int(1,2)"),
    ]
    assert [space.key for space in spaces_of("fedprox(mu=3)", spaces)] == ["training.lr", "method.mu"]
    assert spaces_of("fedprox", spaces)[0].values == Choice(("1", "2"))
    assert spaces_of("fedavg", spaces) == (spaces[0],)


def test_chosen_settings_are_written_as_compare_reads_them(config: Path) -> None:
    spec = with_settings("fedprox(mu=0.5, training.momentum=0.1)", {"method.mu": "0.2", "training.lr": "0.03"})
    assert spec == "fedprox(mu=0.2, training.momentum=0.1, training.lr=0.03)"
    loaded = load_method(config, [], spec)
    assert (loaded.method["mu"], loaded.training.lr, loaded.training.momentum) == (0.2, 0.03, 0.1)
    assert with_settings("fedavg", {}) == "fedavg"


@pytest.mark.slow
@given(st.floats(1e-6, 1.0), st.floats(1.01, 1e6), st.floats(0, 1), st.booleans())
def test_rounded_values_stay_in_their_interval(low: float, high: float, place: float, log: bool) -> None:
    interval = Interval(low, high, log)
    text = interval.text(low + place * (high - low))
    assert interval.number(text) is not None
    assert all(interval.number(each) is not None for each in interval.grid(5))


def sampler(search: Search, *spaces: str, budget: int = 12, **default: str) -> Sampler:
    return Sampler(tuple(map(parse_space, spaces)), search, default, budget, True, Key(0) / "tune")


def trials(sampled: Sampler) -> list[dict[str, str]]:
    """Run trials whose score is best at a learning rate of 0.01."""
    done: list[Outcome] = []
    while len(done) < sampled.budget and (settings := sampled.propose(done)) is not None:
        score = -abs(float(settings.get("training.lr", 0)) - 0.01)
        done.append(Outcome(settings, ((1, score),), score))
    return [dict(outcome.settings) for outcome in done]


@pytest.mark.parametrize("search", ["tpe", "random", "grid"])
def test_first_trial_is_the_default_and_none_is_repeated(search: Search) -> None:
    found = trials(sampler(search, LR, "training.epochs=int(1,3)", **{"training.lr": "5.0"}))
    assert found[0] == {"training.lr": "5.0"}  # also if it lies outside of its space
    assert len(found) == len({str(each) for each in found})
    assert len(found) == (10 if search == "grid" else 12)  # 3 by 3 points
    assert found == trials(sampler(search, LR, "training.epochs=int(1,3)", **{"training.lr": "5.0"}))


@pytest.mark.parametrize("search", ["tpe", "random", "grid"])
def test_finite_space_is_tried_once(search: Search) -> None:
    found = trials(sampler(search, "training.epochs=int(1,2)", "method.mu=choice(1,2)", **{"method.mu": "1"}))
    assert len(found) == 5  # the default has no epochs, so it is none of the four
    assert len({str(sorted(each.items())) for each in found}) == 5


def test_methods_get_the_same_random_draws_of_a_shared_space() -> None:
    plain = trials(sampler("random", LR))
    more = trials(sampler("random", LR, "method.mu=log(1e-3,1)"))
    assert [each["training.lr"] for each in plain[1:]] == [each["training.lr"] for each in more[1:]]


def test_grid_needs_a_budget_for_all_choices() -> None:
    with pytest.raises(OptionError, match="--budget is 4, but a grid of all choices and the default need 5 trials"):
        sampler("grid", "method.mu=choice(1,2,3,4)", budget=4).grid()


def test_tpe_learns_from_scores_and_from_failures() -> None:
    """Failed trials are the worst, so the search leaves the region in which all fail."""
    made = sampler("tpe", "training.lr=uniform(0,1)", budget=30)
    done: list[Outcome] = []
    while len(done) < 30 and (settings := made.propose(done)):
        value = float(settings["training.lr"])
        done.append(Outcome(settings) if value > 0.5 else Outcome(settings, ((1, value),), value))
    late = [float(outcome.settings["training.lr"]) for outcome in done[20:]]
    assert sum(value > 0.5 for value in late) <= 3


def test_pruner_stops_below_the_median_after_a_quarter_of_the_rounds() -> None:
    space = (parse_space(LR),)
    done = [
        Outcome({"training.lr": "0.01"}, tuple((step, score) for step in range(1, 9)), score)
        for score in (0.5, 0.6, 0.7)
    ]
    weak, strong = (Pruner(space, done, 9, 8, higher_is_better=True) for _ in range(2))
    assert [weak.stops(step, 0.1) for step in (1, 2)] == [False, True]
    assert not any(strong.stops(step, 0.65) for step in range(1, 9))
    assert not Pruner(space, done[:2], 9, 8, higher_is_better=True).stops(4, 0.1)  # too few to compare with
    assert not Pruner(space, done, 9, 8, higher_is_better=True).stops(4, float("nan"))
    assert Pruner(space, done, 9, 8, higher_is_better=False).stops(4, 0.9)
