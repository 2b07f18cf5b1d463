"""Controls of SAFL: layers drawn for all clients together, and given layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from helpers import OPTIMIZERS, Clients, final_params, play, toy_run

from partita.core import tensors
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model, input_side_names, layer_tag
from partita.core.plan import Plan, RoundInfo, share
from partita.core.rounds import RoundResult
from partita.engines.availability import Availability
from partita.experiment.config import parse
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.layer_skipping import layer_skipping
from partita.methods.safl import safl
from partita.methods.selectors import Random, TopLayers
from partita.storage.client_store import MemoryStore
from partita.testing.conformance import check_method
from partita.testing.toy import ToyTransformer

MODEL = ToyTransformer(width=4, layers=4)
FOUR = Clients(a=5, b=6, c=7, d=8)
ALL = (0, 1, 2, 3)


def play_method(method: Method, count: int = 3, clients: Clients = FOUR, **more: Any) -> list[RoundResult]:
    run = toy_run(method, count, OPTIMIZERS["adamw"], cohort=0.5, min_updates=0, **more)
    return play(run, MODEL, clients, availability=Availability(client_dropout=0.1, straggler_rate=0.3))


def layers_by_round(results: list[RoundResult]) -> list[set[tuple[int, ...]]]:
    """For each round, the different choices of its clients."""
    return [
        {
            tuple(
                sorted({int(layer.removeprefix("layer.")) for name in names if (layer := layer_tag(MODEL.tags[name]))})
            )
            for names in each.sent.values()
        }
        for each in results
    ]


def same(one: list[RoundResult], two: list[RoundResult]) -> bool:
    return tensors.equal(final_params(one), final_params(two)) and [
        (each.sent, each.traffic, each.loss) for each in one
    ] == [(each.sent, each.traffic, each.loss) for each in two]


# ---- given layers


def without_embeddings(model: Model, round_info: RoundInfo) -> Plan:
    return share(model.all_names() - input_side_names(model), down=model.all_names())


def test_all_layers_given_is_fedavg_without_embeddings_bit_for_bit() -> None:
    ours = play_method(safl(select="static", layers=ALL))
    assert same(ours, play_method(Method("plain", plan=without_embeddings)))
    assert same(play_method(safl(select="static", layers=ALL, embeddings=True)), play_method(fedavg()))


@pytest.mark.parametrize("layers", [(0,), (1, 3), (3, 0), (2, 3)])
def test_given_layers_are_those_of_layer_skipping_bit_for_bit(layers: tuple[int, ...]) -> None:
    ours = play_method(safl(select="static", layers=layers))
    assert same(ours, play_method(layer_skipping(layers)))
    assert layers_by_round(ours) == [{tuple(sorted(layers))}] * 3


def test_given_topmost_layers_are_the_default() -> None:
    assert same(play_method(safl(k=2, select="static")), play_method(safl(select="static", layers=(2, 3))))


def test_layers_of_a_config_are_a_list() -> None:
    config = parse({"method": {"name": "safl", "select": "static", "layers": [1, 3]}})
    method = build("safl", {key: value for key, value in config.method.items() if key != "name"})
    assert layers_by_round(play_method(method)) == [{(1, 3)}] * 3


# ---- layers drawn for all clients together


def test_common_layers_are_the_same_for_all_clients_and_change_between_rounds() -> None:
    found = layers_by_round(play_method(safl(k=2, select="random", common=True), 12))
    assert all(len(choices) == 1 for choices in found)
    assert len({frozenset(choices) for choices in found}) > 2
    own = layers_by_round(play_method(safl(k=2, select="random"), 12))
    assert any(len(choices) > 1 for choices in own), "without it clients differ"


def test_common_layers_of_the_whole_run_are_given_layers_bit_for_bit() -> None:
    drawn = play_method(safl(k=2, select="random", common=True, every=6), 6)
    [[layers]] = {frozenset(choices) for choices in layers_by_round(drawn)}
    assert same(drawn, play_method(safl(select="static", layers=layers), 6))


@pytest.mark.slow
def test_common_layers_hold_for_every_rounds_also_for_clients_that_join_later() -> None:
    found = layers_by_round(play_method(safl(k=1, select="random", common=True, every=4), 16))
    assert [set.union(*found[start : start + 4]) for start in (0, 4, 8, 12)] == [
        found[0],
        found[4],
        found[8],
        found[12],
    ]
    assert len({frozenset(choices) for choices in found}) > 1


def test_common_layers_with_all_layers_are_fedavg_bit_for_bit() -> None:
    ours = play_method(safl(k=1.0, select="random", common=True, embeddings=True))
    assert same(ours, play_method(fedavg()))


@pytest.mark.slow
def test_common_layers_depend_on_the_seed_and_are_uniform() -> None:
    counts = Counter[int]()
    for seed in range(30):
        run = toy_run(safl(k=1, select="random", common=True), 4, seed=seed)
        found = layers_by_round(play(run, MODEL, Clients(a=2, b=2)))
        counts.update(layer for choices in found for layers in choices for layer in layers)
    # 120 draws of 4 layers: a standard deviation is 4.7, so 27 is beyond odds of 1e-8.
    assert all(abs(counts[layer] - 30) < 27 for layer in ALL)
    assert sum(counts.values()) == 120


def test_common_layers_of_clients_with_less_capacity_are_among_those_of_others() -> None:
    results = play_method(safl(k=3, select="random", common=True, capacity={"a": 1, "b": 1}), 8)
    for choices in layers_by_round(results):
        largest = set(max(choices, key=len))
        assert all(set(choice) <= largest for choice in choices)


def test_common_layers_are_not_remembered() -> None:
    store = MemoryStore()
    play(toy_run(safl(k=1, select="random", common=True, every=3), 2), MODEL, FOUR, store=store)
    assert not store.load("a", 2).memory
    [rule] = safl(k=1, select="random", common=True, every=3).client_rules
    assert isinstance(rule, TopLayers)
    assert rule.select == Random(common=True, every=3)


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"common": True}, r"method\.common is about layers drawn at random, but select = 'attention'"),
        ({"layers": (1,)}, r"method\.layers is for select = 'static', not 'attention'"),
        ({"layers": (1,), "select": "random", "common": True}, r"method\.layers is for select = 'static'"),
        ({"layers": (), "select": "static"}, r"method\.layers is \[\]; give different numbers"),
        ({"layers": (1, 1), "select": "static"}, r"method\.layers is \[1, 1\]; give different numbers"),
        ({"layers": (-1,), "select": "static"}, r"method\.layers is \[-1\]; give different numbers"),
        ({"layers": (1,), "select": "static", "capacity": {"a": 1}}, r"but method\.capacity does not"),
    ],
)
def test_controls_refuse_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        safl(**options)


def test_a_layer_beyond_the_model_is_refused() -> None:
    with pytest.raises(MethodError, match=r"method\.layers names layer 4, but tiny attention has 4, from 0 to 3"):
        play_method(safl(select="static", layers=(1, 4)))


@pytest.mark.parametrize(
    "options",
    [
        {"k": 1, "select": "random", "common": True, "every": 2},
        pytest.param({"select": "static", "layers": (0, 2)}, marks=pytest.mark.slow),
    ],
)
def test_controls_conform(options: dict[str, Any]) -> None:
    found = check_method(build("safl", options), MODEL, Clients(c0=3, c1=9, c2=12, c3=6))
    assert found.bytes_up > 0
