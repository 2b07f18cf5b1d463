"""Each alarm is raised in a federation built to cause it, and not in a healthy one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Clients, play, toy_run
from torch import Tensor

from partita.core.data import Batch
from partita.core.model import TokenChoice, layer_tags
from partita.core.tensors import Tensors
from partita.evaluation import Evaluation
from partita.experiment.alarms import (
    LONG_WINDOW,
    SHORT_WINDOW,
    Alarm,
    RoundSummary,
    check_test,
    check_window,
    summarize,
)
from partita.experiment.config import parse
from partita.experiment.runner import start
from partita.methods.fedavg import fedavg
from partita.methods.safl import safl
from partita.testing.toy import ToyTransformer

FIVE_CLIENTS = Clients(a=12, b=9, c=6, d=8, e=10)


class ModelWithScores(ToyTransformer):
    """Attention scores are a function of the layer number and the batch."""

    def __init__(self, score: Any) -> None:
        super().__init__(width=4, layers=6)
        self.score = score

    def attention(self, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, Tensor]:
        scores = {layer: self.score(number, batch) for number, layer in enumerate(layer_tags(self))}
        return {layer: torch.full((len(batch.targets), 1), score) for layer, score in scores.items()}


def alarms_by_round(model: ToyTransformer, count: int = LONG_WINDOW, **options: Any) -> list[list[Alarm]]:
    """The alarms raised after each round."""
    seen = [
        summarize(each, model) for each in play(toy_run(safl(**options), count, lr=0.02, steps=1), model, FIVE_CLIENTS)
    ]
    return [check_window(seen[: place + 1], layer_tags(model)) for place in range(count)]


def kinds(rung: list[Alarm]) -> set[str]:
    return {alarm.kind for alarm in rung}


def varied_score(number: int, batch: Batch) -> float:
    """Differs between clients and rounds, as the probe does; two layers stand out for all clients."""
    return 0.2 + 0.5 * (number % 5 == 0) + 0.4 * float((batch.inputs["x"][:3].sum() * (number + 1)).sin())


@pytest.mark.slow
def test_healthy_federation_raises_no_alarm() -> None:
    """Clients choose three of six layers, which change from round to round, and agree on two or three of them."""
    model = ModelWithScores(lambda number, batch: varied_score(number, batch) + 0.5 * (number % 5 == 0))
    rung = alarms_by_round(model, LONG_WINDOW + 2, k=3, probe=4)
    assert all(each == [] for each in rung)


@pytest.mark.slow
def test_clients_that_choose_different_layers_raise_an_alarm() -> None:
    """Random attention of a small model: five clients, two of four layers each."""
    model = ToyTransformer(width=6, layers=4)
    rung = alarms_by_round(model, SHORT_WINDOW + 1, k=2, probe=4)
    assert [kinds(each) for each in rung[: SHORT_WINDOW - 1]] == [set()] * (SHORT_WINDOW - 1)
    assert {"layer disagreement"} in [kinds(each) for each in rung[SHORT_WINDOW - 1 :]]
    for options in ({"agree": "scores"}, {"agree": True}, {"select": "random"}, {"select": "static"}):
        agreed = alarms_by_round(model, SHORT_WINDOW + 1, k=2, probe=4, **options)
        assert "layer disagreement" not in {kind for each in agreed for kind in kinds(each)}, options


def test_disagreement_is_measured_against_random_choices() -> None:
    layers, told = [f"layer.{number}" for number in range(6)], {"a": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}

    def raised(*sent: set[int]) -> list[Alarm]:
        by_client = {f"c{place}": numbers for place, numbers in enumerate(sent)}
        return check_window([make_summary(n, by_client, told) for n in range(SHORT_WINDOW)], layers)

    # Pairs of clients share 1, 1 and 2 of two layers: two thirds, which is exactly halfway from a third to all.
    assert raised({0, 1}, {0, 1}, {0, 2}) == []
    # One pair of six shares both layers, the others one: 7 of 12.
    [alarm] = raised({0, 1}, {0, 2}, {1, 2}, {0, 1})
    assert alarm.kind == "layer disagreement"
    assert "two clients had only 58% of their layers in common" in alarm.text
    assert "method.agree = 'scores'" in alarm.text
    # The smaller of two choices counts, so a client with a smaller model that chooses among the same layers agrees.
    assert raised({0, 1, 2, 3}, {0, 1, 2, 3}, {0}) == []
    # Two clients are too few, and clients that send no layer did not choose.
    assert raised({0, 1}, {2, 3}) == []
    assert raised({0, 1}, {0, 2}, {1, 2}, {0, 1}, set()) == []


@pytest.mark.slow
def test_equal_attention_scores_raise_an_alarm() -> None:
    flat = ModelWithScores(lambda number, batch: 0.3 + 0.001 * varied_score(number, batch))
    rung = alarms_by_round(flat, SHORT_WINDOW + 1, k=3)
    assert [("attention collapse" in kinds(each)) for each in rung] == [False] * (SHORT_WINDOW - 1) + [True] * 2
    [alarm] = [alarm for alarm in rung[-1] if alarm.kind == "attention collapse"]
    assert alarm.round == SHORT_WINDOW
    assert "set method.select = 'gradient'" in alarm.text
    some = ModelWithScores(lambda number, batch: 0.3 + 0.1 * number)
    assert "attention collapse" not in kinds(alarms_by_round(some, SHORT_WINDOW, k=3)[-1])


@pytest.mark.slow
def test_layers_nobody_selects_raise_an_alarm() -> None:
    fixed = ModelWithScores(lambda number, batch: 0.1 + 0.1 * number)
    rung = alarms_by_round(fixed, LONG_WINDOW, k=2)
    assert [("layer starvation" in kinds(each)) for each in rung] == [False] * (LONG_WINDOW - 1) + [True]
    [alarm] = rung[-1]
    assert "4 of 6 layers (0, 1, 2, 3) were chosen by no client in the last 8 rounds" in alarm.text
    few = alarms_by_round(fixed, LONG_WINDOW, k=5)[-1]
    assert kinds(few) == {"layer starvation"}, "one layer is never selected"
    assert alarms_by_round(fixed, LONG_WINDOW, k=6)[-1] == []
    assert alarms_by_round(fixed, LONG_WINDOW, k=2, select="static")[-1] == [], "a static selection raises no alarm"


@pytest.mark.slow
def test_layers_sent_by_a_single_client_raise_an_alarm() -> None:
    def own(number: int, batch: Batch) -> float:
        """Each client prefers its own layer, identified by its number of examples."""
        place = [12, 9, 6, 8, 10].index(len(batch.targets))
        return 0.9 if number == place else 0.1

    rung = alarms_by_round(ModelWithScores(own), SHORT_WINDOW + 1, k=1)
    assert [("aggregation mismatch" in kinds(each)) for each in rung] == [False] * (SHORT_WINDOW - 1) + [True] * 2
    [alarm] = [alarm for alarm in rung[-1] if alarm.kind == "aggregation mismatch"]
    assert "15 of 15 came from a single client" in alarm.text
    assert "federation.cohort" in alarm.text


@pytest.mark.slow
def test_no_alarm_when_all_clients_send_all_layers() -> None:
    model = ToyTransformer(width=4, layers=2)
    seen = [summarize(each, model) for each in play(toy_run(fedavg(), LONG_WINDOW, steps=1), model, FIVE_CLIENTS)]
    assert check_window(seen, layer_tags(model)) == []


def make_summary(
    round: int, sent: Mapping[str, set[int]], scores: Mapping[str, list[float]] | None = None
) -> RoundSummary:
    told = {c: {f"layer.{n}": score for n, score in enumerate(each)} for c, each in (scores or {}).items()}
    return RoundSummary(round, {c: frozenset(f"layer.{n}" for n in numbers) for c, numbers in sent.items()}, told)


def test_alarms_need_a_full_window_and_three_clients() -> None:
    layers = [f"layer.{number}" for number in range(4)]
    apart = {"a": {0}, "b": {1}, "c": {2}}
    assert kinds(check_window([make_summary(n, apart) for n in range(SHORT_WINDOW)], layers)) == {
        "aggregation mismatch"
    }
    for other in ({"a": {0}, "b": {1}}, {"a": {0}, "b": {0}, "c": {1}}):
        assert check_window([make_summary(0, apart), make_summary(1, other), make_summary(2, apart)], layers) == []
    flat, steep = {"a": [0.5, 0.5, 0.5, 0.49]}, {"a": [0.5, 0.1, 0.5, 0.49]}
    rounds = [
        make_summary(0, {}, flat),
        make_summary(1, {}),
        make_summary(2, {}, flat),
        make_summary(3, {}),
        make_summary(4, {}, flat),
    ]
    assert kinds(check_window(rounds, layers)) == {"attention collapse"}, "rounds without scores are skipped"
    assert check_window([*rounds[:-1], make_summary(4, {}, steep)], layers) == []
    assert kinds(check_window([make_summary(n, {}, {"a": [0.0] * 4}) for n in range(3)], layers)) == {
        "attention collapse"
    }
    assert check_window([], layers) == []


def test_summary_keeps_noisy_scores_as_sent() -> None:
    model = ToyTransformer(width=4, layers=4)
    [each] = play(toy_run(safl(noise=1.0, probe=0.5), 1), model, FIVE_CLIENTS)
    found = summarize(each, model)
    assert found.scores.keys() == found.sent.keys() == set(FIVE_CLIENTS.clients)
    for client, scores in found.scores.items():
        assert torch.tensor(list(scores.values())).norm() == pytest.approx(1)
        best = max(scores, key=lambda layer: scores[layer])
        assert found.sent[client] == {best}


def test_one_predicted_class_raises_an_alarm_after_the_first_rounds() -> None:
    stuck, classes = Evaluation({}, (1,)), ("a", "b")
    assert [bool(check_test(round, stuck, classes)) for round in range(8)] == [False] * 4 + [True] * 4
    assert check_test(7, Evaluation({}), classes) == []
    [alarm] = check_test(7, stuck, classes)
    assert "predicts 'b' for the whole test set" in alarm.text
    assert "predicts no label for" in check_test(7, Evaluation({}, ()), classes)[0].text
    assert "'a' and 'b'" in check_test(7, Evaluation({}, (0, 1)), classes)[0].text


@pytest.mark.parametrize("unit", [None, "client"])
def test_model_that_hardly_trains_raises_the_alarm_in_its_rows(unit: str | None, tmp_path: Path) -> None:
    """An untrained model gives every image the class that its head prefers."""
    config: dict[str, Any] = {
        "rounds": 7,
        "data": {"name": "synthetic", "examples": 60, "size": 4, "test_examples": 30, "classes": 2, "noise": 0.1},
        "split": {"name": "iid", "clients": 2},
        "model": {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 2},
        "training": {"lr": 1e-6, "steps": 1, "optimizer": "sgd", "batch_size": 8},
        "method": {"name": "fedavg"},
        "evaluate": {"every": 2, "personal_every": 0},
    }
    private = {} if unit is None else {"privacy": {"unit": unit, "clip": 1e-6, "noise": 1.0, "accountant": "rdp"}}
    rows = list(start(parse({**config, **private}), tmp_path / "run"))
    raised = ["one predicted class" in row.get("alarms", {}) for row in rows]
    assert raised == [False] * 5 + [True, True], rows[-1]["test"]
