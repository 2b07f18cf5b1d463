"""The automatic warm-up: what the server measures, when it freezes, and that a resumed run does the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Clients, play, toy_model, toy_run
from torch import Tensor

from partita.core import tensors
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.plan import RoundInfo
from partita.core.rng import Key
from partita.core.server_rule import Server
from partita.core.update import Update
from partita.methods.auto_warmup import squared_norm
from partita.methods.fedfrozen import fedfrozen
from partita.storage import checkpoint
from partita.testing.conformance import check_method

FOUR = Clients(a=5, b=9, c=7, d=12)
EARLY_FREEZE = fedfrozen("auto", threshold=1.3, patience=2)


@pytest.mark.slow
def test_resumed_run_freezes_at_the_same_round_bit_for_bit(tmp_path: Path) -> None:
    run = toy_run(EARLY_FREEZE, 8, lr=0.2)
    whole = play(run, toy_model(), FOUR)
    when = next(t for t, each in enumerate(whole) if each.server.state["warmup"]["frozen"])
    assert 1 <= when < 7, "freezing must happen during the run"
    for stop in (when, when + 1):
        path = checkpoint.save(tmp_path / str(stop), stop, whole[stop - 1].server)
        done, server = checkpoint.load(path)
        again = play(run, toy_model(), FOUR, server, done)
        for one, two in zip(whole[stop:], again, strict=True):
            assert tensors.equal(one.server.params, two.server.params)
            assert one.traffic == two.traffic
            for slot, part in one.server.state.items():
                assert tensors.equal(part, two.server.state[slot])


def test_patience_counts_consecutive_rounds() -> None:
    """A round below the threshold resets the count; a frozen kernel is not sent, so it stays frozen."""
    rule, model = EARLY_FREEZE.server_rule, toy_model()
    unit = torch.ones(4, 4)
    apart, alike = (unit, -0.9 * unit), (10 * unit, 10 * unit)

    def signals(*story: tuple[Tensor, Tensor]) -> tuple[list[float], Server]:
        server, said = Server(dict(model.initial), rule.init(model)), []
        for left, right in story:
            updates = [
                _make_update(client, {"layers.0.query.weight": delta}) for client, delta in (("a", left), ("b", right))
            ]
            server = rule.apply(server, rule.reduce(server, updates, 2))
            said.append(rule.signal(server)["frozen"])
        return said, server

    assert rule.signal(Server({}, rule.init(model))) == {"frozen": 0.0}
    said, server = signals(apart, apart)
    assert said == [0.0, 1.0]
    said, calmed = signals(apart, alike)
    assert (said, float(calmed.state["warmup"]["streak"])) == ([0.0, 0.0], 0.0)
    still = rule.apply(server, rule.reduce(server, [_make_update("a", {}), _make_update("b", {})], 2))
    assert still.state is server.state


def _make_update(client: str, delta: dict[str, Tensor]) -> Update:
    return Update(client, delta, {}, 1.0, {}, None)


def test_spread_is_the_weighted_mean_squared_distance() -> None:
    rule, model = EARLY_FREEZE.server_rule, toy_model()
    server = Server(dict(model.initial), rule.init(model))
    name = "layers.0.key.weight"
    deltas = {client: torch.randn(4, 4, generator=(Key(0) / client).generator()) for client in "abc"}
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    updates = [replace(_make_update(client, {name: delta}), weight=weights[client]) for client, delta in deltas.items()]
    after = rule.apply(server, rule.reduce(server, iter(updates), 3)).state
    mean = sum(weights[client] * delta for client, delta in deltas.items()) / 8
    spread = sum(weights[client] * (delta - mean).square().sum() for client, delta in deltas.items()) / 8
    assert float(after["warmup"]["spread"]) == pytest.approx(0.3 * float(spread), rel=1e-5)
    torch.testing.assert_close(after["progress"][name], 0.3 * mean)


def test_max_warmup_freezes_regardless_of_the_signal() -> None:
    model = toy_model()
    method = fedfrozen("auto", threshold=1e9, max_warmup=0.5)
    sizes = [len(method.plan(model, RoundInfo(round, 10, "a")).train) for round in range(10)]
    assert sizes[:5] == [len(model.all_names())] * 5
    assert sizes[5:] == [len(model.all_names()) - 4] * 5
    assert len(method.plan(model, RoundInfo(0, 10, "a", {"frozen": 1.0})).train) == len(model.all_names()) - 4
    played = play(toy_run(fedfrozen("auto", threshold=1e9), 4), model, FOUR)
    plain = play(toy_run(Method("plain"), 4), model, FOUR)
    assert tensors.equal(played[-1].server.params, plain[-1].server.params), "never firing, it is FedAvg bit for bit"


def test_auto_warmup_tracks_the_names_that_will_be_frozen() -> None:
    model = toy_model()
    watched = fedfrozen("auto", freeze="mlp").server_rule.init(model)["progress"]
    assert watched.keys() == model.names("mlp")
    model.initial = {name: value.bfloat16() for name, value in model.initial.items()}
    wide = fedfrozen("auto").server_rule.init(model)["progress"]
    assert {value.dtype for value in wide.values()} == {torch.float32}, "a long mean in bfloat16 stops moving"
    assert wide.keys() == model.names("query", "key")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup": "automatic"}, "'automatic'; give rounds, a fraction from 0.0 to 1.0, or 'auto'"),
        ({"warmup": "auto", "threshold": 0.0}, "threshold"),
        ({"warmup": "auto", "threshold": "client"}, "'client'; give a number above 0, or 'clients'"),
        ({"warmup": "auto", "patience": 0}, "at least one round"),
        ({"warmup": "auto", "max_warmup": 1.5}, "a fraction from 0.0 to 1.0"),
    ],
)
def test_invalid_auto_warmup_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(MethodError, match=words):
        fedfrozen(**options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_auto_warmup_conforms_across_the_freeze() -> None:
    check_method(fedfrozen("auto", threshold=0.5, patience=1), toy_model(), Clients(c0=3, c1=9, c2=12, c3=6))


def test_auto_warmup_matches_the_formula_round_by_round() -> None:
    """Enough thresholds to distinguish slightly different formulas."""
    told = [count for threshold in np.linspace(0.3, 1.5, 40) for count in streaks_of_formula(float(threshold))]
    assert {0, 1, 2} <= set(told), "the rule must rise and fall for this to say anything"


def streaks_of_formula(threshold: float) -> list[int]:
    """The streaks of the formula in numpy, with a client of weight zero and an untracked name."""
    rule, model = fedfrozen("auto", threshold=threshold, patience=2).server_rule, toy_model()
    server = Server(dict(model.initial), rule.init(model))
    watched, shapes = ("layers.0.key.bias", "layers.0.query.weight"), {"head.weight": (3, 4)}
    shapes |= {name: tuple(model.initial[name].shape) for name in watched}
    draws, weights = np.random.default_rng(4), {"a": 0.5, "b": 0.2, "c": 0.0}
    progress, spread, streak, told = dict.fromkeys(watched, 0.0), 0.0, 0, []
    for number in range(8):
        drift = 0.3 if number in (2, 3, 6, 7) else 2.0  # the scale of what all clients share
        common = {name: drift * draws.normal(size=shape) for name, shape in shapes.items()}
        own = {
            client: {
                name: (common[name] + draws.normal(size=shape)).astype("float32") for name, shape in shapes.items()
            }
            for client in weights
        }
        updates = [
            replace(
                _make_update(client, {name: torch.from_numpy(value) for name, value in delta.items()}), weight=weight
            )
            for (client, delta), weight in zip(own.items(), weights.values(), strict=True)
        ]
        server = rule.apply(server, rule.reduce(server, updates, 3))
        share = {client: weight / 0.7 for client, weight in weights.items()}
        mean = {name: sum(share[client] * own[client][name].astype("float64") for client in own) for name in watched}
        apart = sum(
            share[c] * np.sum((own[c][name].astype("float64") - mean[name]) ** 2) for c in own for name in watched
        )
        progress = {name: 0.7 * progress[name] + 0.3 * mean[name] for name in watched}
        spread = 0.7 * spread + 0.3 * apart
        debias = 1 - 0.7 ** (number + 1)
        ahead = sum(np.sum((value / debias) ** 2) for value in progress.values())
        streak = streak + 1 if spread / debias > threshold**2 * ahead else 0
        told.append(streak)
        found = server.state["warmup"]
        assert float(found["spread"]) == pytest.approx(spread, rel=1e-6)
        assert (float(found["rounds"]), float(found["streak"])) == (number + 1, streak)
        assert rule.signal(server) == {"frozen": float(streak >= 2)}
        for name in watched:
            np.testing.assert_allclose(server.state["progress"][name], progress[name], rtol=0, atol=1e-6)
    assert found["spread"].dtype == torch.float64
    return told


@pytest.mark.parametrize(
    ("weights", "freezes_above"),
    [
        ((1.0, 1.0), 10.0),
        ((3.0, 3.0, 0.0), 10.0),  # a client without weight is no client
        ((1.0,) * 17, 20.0),
        ((2.0, 1.0, 1.0), 10 * (16 / 6 - 1) ** 0.25),  # (2 + 1 + 1)² / (4 + 1 + 1) clients
    ],
)
def test_the_default_threshold_grows_with_the_effective_number_of_clients(
    weights: tuple[float, ...], freezes_above: float
) -> None:
    rule, model = fedfrozen("auto", patience=1).server_rule, toy_model()
    name = "layers.0.query.weight"
    shares = torch.tensor(weights) / sum(weights)
    ahead, apart = (torch.zeros(model.initial[name].shape) for _ in range(2))
    ahead.view(-1)[0], apart.view(-1)[1] = 1.0, 1.0
    away = torch.arange(len(weights)).float()
    away = away - (shares * away).sum()
    away = away / (shares * away.square()).sum().sqrt()  # weighted mean 0 and variance 1
    for ratio, frozen in ((0.999 * freezes_above, 0.0), (1.001 * freezes_above, 1.0)):
        server = Server(dict(model.initial), rule.init(model))
        updates = [
            replace(_make_update(f"c{place}", {name: ahead + ratio * float(own) * apart}), weight=weight)
            for place, (own, weight) in enumerate(zip(away, weights, strict=True))
        ]
        server = rule.apply(server, rule.reduce(server, updates, len(weights)))
        assert rule.signal(server) == {"frozen": frozen}


def test_still_clients_and_weightless_clients_do_not_count_as_disagreement() -> None:
    rule, model = EARLY_FREEZE.server_rule, toy_model()
    server = Server(dict(model.initial), rule.init(model))
    name = "layers.0.key.weight"
    still = rule.apply(server, rule.reduce(server, [_make_update(each, {name: torch.zeros(4, 4)}) for each in "ab"], 2))
    assert float(still.state["warmup"]["streak"]) == 0
    nobody = [replace(_make_update("a", {name: torch.ones(4, 4)}), weight=0.0)]
    assert rule.reduce(server, nobody, 2).slots["warmup_spread"] == {}


def test_squared_norm_is_summed_in_double_precision() -> None:
    assert squared_norm({"a": torch.tensor([4096.0, 1.0])}, "a") == 4096**2 + 1
