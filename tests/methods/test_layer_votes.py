"""SAFL with agreed layers: one client, one vote; the same plan for all; reductions; what is charged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import OPTIMIZERS, Clients, final_params, play, toy_run

from partita.core import tensors
from partita.core.client import ClientState, begin_round
from partita.core.client_rule import PrivacyRelease
from partita.core.compose import compose
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import layer_tag, layer_tags
from partita.core.plan import RoundInfo
from partita.core.rounds import RoundResult, initial_server, make_job
from partita.core.sampling import BySize
from partita.core.server_rule import Server, average
from partita.core.update import Update
from partita.engines.availability import Availability
from partita.experiment.config import parse
from partita.experiment.runner import start
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.fedprox import fedprox
from partita.methods.layer_votes import (
    AGREED,
    BALLOT,
    VOTES,
    AgreedLayers,
    AgreedPlan,
    LayerVote,
    carrier_of,
    elect,
)
from partita.methods.safl import safl
from partita.methods.selectors import spread_evenly
from partita.privacy.guard import make_private
from partita.testing.conformance import check_method
from partita.testing.toy import ToyTransformer

MODEL = ToyTransformer(width=4, layers=3)
LAYERS = ["layer.0", "layer.1", "layer.2"]
FOUR = Clients(a=5, b=6, c=7, d=8)
SIZES = {client: len(FOUR[client].train) for client in FOUR.clients}


def play_method(method: Method, count: int = 3, clients: Clients = FOUR, **more: Any) -> list[RoundResult]:
    run = toy_run(method, count, OPTIMIZERS["adamw"], min_updates=0, **more)
    return play(run, MODEL, clients)


def layers_of(names: frozenset[str]) -> frozenset[str]:
    return frozenset(layer for name in names if (layer := layer_tag(MODEL.tags[name])))


# ---- reductions


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("options", [{"k": 1.0}, {"k": 3}, {"k": 1.0, "every": 2}, {"k": 1.0, "select": "gradient"}])
def test_agreement_on_all_layers_is_fedavg_bit_for_bit(options: dict[str, Any]) -> None:
    ours = play_method(safl(embeddings=True, agree=True, **options))
    for one, two in zip(ours, play_method(fedavg()), strict=True):
        assert tensors.equal(one.server.params, two.server.params)
        assert (one.loss, one.sent) == (two.loss, two.sent)


@pytest.mark.parametrize(("select", "k"), [("attention", 1), ("gradient", 2)])
def test_agreement_of_one_client_is_its_own_choice_of_the_round_before(select: Any, k: int) -> None:
    clients = Clients(a=9)
    plain = toy_run(safl(k, select, probe=1.0), 4)
    results = play_method(safl(k, select, probe=1.0, agree=True), 4, clients)
    servers = [initial_server(plain, MODEL), *(each.server for each in results)]
    seen = set()
    for number in range(3):
        job, _ = make_job(plain, MODEL, replace(servers[number], state={}), number, "a")
        chosen = layers_of(begin_round(plain, MODEL, job, ClientState(), clients["a"].train).plan.up)
        assert layers_of(results[number + 1].sent["a"]) == chosen
        seen.add(chosen)
    assert seen != {layers_of(results[0].sent["a"])}, "else this test could pass without any vote"


# ---- the plan


def test_all_clients_of_a_round_train_and_send_the_same_layers() -> None:
    """Plain SAFL on the same clients does not, so the test can fail."""
    for method, agreed in ((safl(k=1, agree=True), True), (safl(k=1, select="random"), False)):
        sent = [set(each.sent.values()) for each in play_method(method, 4)]
        assert all(len(names) == 1 for names in sent) is agreed
    for each in play_method(safl(k=2, agree=True), 3):
        [names] = set(each.sent.values())
        assert len(layers_of(names)) == 2
        assert names - MODEL.names(*LAYERS) == MODEL.names("head"), "the head trains and the embeddings do not"


def test_layers_are_spread_evenly_before_the_first_votes() -> None:
    deep = ToyTransformer(width=4, layers=7)
    for k, wanted in ((1, {0}), (2, {0, 6}), (3, {0, 3, 6}), (1.0, set(range(7)))):
        plan = AgreedPlan(k).plan(deep, RoundInfo(0, 5, "a"))
        assert {layer for name in plan.up if (layer := layer_tag(deep.tags[name]))} == {f"layer.{n}" for n in wanted}
        assert plan.down == deep.all_names()
    voted = AgreedPlan(2).plan(deep, RoundInfo(3, 5, "a", {"layer.4": 1.0, "layer.1": 1.0, "layer.0": 0.0}))
    assert {layer for name in voted.up if (layer := layer_tag(deep.tags[name]))} == {"layer.1", "layer.4"}
    assert spread_evenly("abcde", 3) == ["a", "c", "e"]


# ---- votes


def ballot(client: str, examples: int, *votes: int) -> Update:
    values = torch.zeros(2, 4)
    values.view(-1)[: len(votes) + 1] = torch.tensor([*votes, 1.0]) / examples
    return Update(client, {"w": torch.zeros(2, 4)}, {VOTES: {"w": values}}, float(examples), {"w": 1}, None)


@pytest.mark.parametrize("equal_weights", [False, True])
def test_every_client_has_one_vote_whatever_its_number_of_examples(equal_weights: bool) -> None:
    """With equal weights, clients are drawn by size, and a vote over the size is right in expectation."""
    sizes = [1000, 3, 7] if not equal_weights else [5, 5, 5]
    voters = [ballot("a", sizes[0], 1, 0, 0), ballot("b", sizes[1], 0, 0, 1), ballot("c", sizes[2], 0, 0, 1)]
    if equal_weights:
        voters = [replace(voter, weight=1.0) for voter in voters]
    counted = average(voters).slots[VOTES]["w"].flatten()
    assert torch.allclose(counted[:4] / counted[3], torch.tensor([1 / 3, 0, 2 / 3, 1]), atol=1e-6)
    assert elect(LAYERS, counted, 1) == ["layer.2"]


def test_ties_are_broken_by_layer_order_despite_rounding() -> None:
    voters = [ballot("a", 3, 0, 0, 1), ballot("b", 7, 0, 1, 0), ballot("c", 11, 1, 0, 0)]
    counted = average(voters).slots[VOTES]["w"].flatten()
    assert len(set(counted[:3].tolist())) > 1, "the means differ in their last bits"
    assert elect(LAYERS, counted, 2) == ["layer.0", "layer.1"]


def test_without_ballots_the_layers_stay() -> None:
    rule = AgreedLayers(1)
    server = replace(Server({"w": torch.zeros(2, 4)}), state=rule.init(MODEL))
    assert rule.signal(server) == {}
    after = rule.apply(server, average([ballot("a", 5, 0, 1, 0)]))
    assert rule.signal(after) == {"layer.1": 1.0}
    empty = replace(ballot("a", 5, 0, 1, 0), slots={VOTES: {"w": torch.zeros(2, 4)}})
    assert rule.signal(rule.apply(after, average([empty]))) == {"layer.1": 1.0}
    assert rule.signal(rule.apply(after, average([replace(empty, slots={})]))) == {"layer.1": 1.0}
    assert after.state[AGREED].keys() == set(LAYERS)


def test_votes_travel_in_the_smallest_parameter_with_room() -> None:
    names = frozenset(MODEL.names("head") | MODEL.names("layer.0"))
    found = carrier_of(MODEL, names, 4)
    sizes = [MODEL.initial[name].numel() for name in names]
    assert MODEL.initial[found].numel() == min(size for size in sizes if size >= 4)
    with pytest.raises(MethodError, match=r"method\.agree sends votes of 5000 numbers"):
        carrier_of(MODEL, names, 5000)


def test_names_and_sizes_of_an_update_do_not_show_the_vote() -> None:
    run = toy_run(safl(k=1, agree=True), 2)
    job, _ = make_job(run, MODEL, initial_server(run, MODEL), 0, "a")
    votes = set()
    for examples in (FOUR["a"].train, FOUR["d"].train, Clients(z=60)["z"].train):
        each = begin_round(run, MODEL, job, ClientState(), examples)
        assert each.metrics == {}, "scores would show what the client prefers"
        vote = each.ctx.notes[VOTES][BALLOT] * len(examples)
        assert (len(vote), float(vote.sum()), float(vote[-1])) == (4, 2.0, 1.0)
        votes.add(tuple(vote.tolist()))
        [rule] = run.method.client_rules
        sent, remembered = rule.finish(each.ctx.anchor, {}, each.ctx)
        assert remembered == {}
        assert {slot: {name: value.shape for name, value in part.items()} for slot, part in sent.items()} == {
            VOTES: {carrier_of(MODEL, each.plan.up, 4): MODEL.initial[carrier_of(MODEL, each.plan.up, 4)].shape}
        }


def test_a_vote_holds_for_as_many_rounds_as_every_says() -> None:
    results = play_method(safl(k=1, every=3, agree=True), 8)
    signals = [each.server.state[AGREED] for each in results]
    assert any(float(value) for value in signals[0].values()), "the first round votes"
    for number, each in enumerate(results):
        [rule] = safl(k=1, every=3, agree=True).client_rules
        assert isinstance(rule, LayerVote)
        assert rule.release_every == 3
        if number % 3:
            assert signals[number] is signals[number - 1], "no votes were counted"
        else:
            assert number == 0 or signals[number] is not signals[number - 1]
        assert each.skipped is None


def test_lost_clients_do_not_vote() -> None:
    run = toy_run(safl(k=1, agree=True), 2, OPTIMIZERS["adamw"], min_updates=0)
    away = Availability(trace={(0, client): 0.0 for client in "bcd"})
    results = play(run, MODEL, FOUR, availability=away)
    alone = play_method(safl(k=1, agree=True), 1, Clients(a=5))
    assert layers_of(results[1].sent["b"]) == set(AgreedLayers(1).signal(alone[0].server))


# ---- scores instead of votes


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("options", [{"k": 1.0}, {"k": 1.0, "every": 2}, {"k": 3, "select": "gradient"}])
def test_scores_of_all_layers_are_fedavg_bit_for_bit(options: dict[str, Any]) -> None:
    ours = play_method(safl(embeddings=True, agree="scores", **options))
    assert tensors.equal(final_params(ours), final_params(play_method(fedavg())))


@pytest.mark.parametrize("select", ["attention", "gradient"])
def test_scores_of_one_client_choose_as_its_vote_does(select: Any) -> None:
    clients = Clients(a=9)
    votes, scores = (play_method(safl(2, select, probe=1.0, agree=agree), 4, clients) for agree in ("votes", "scores"))
    assert [each.sent for each in votes] == [each.sent for each in scores]
    assert tensors.equal(final_params(votes), final_params(scores))


def test_scores_add_up_to_the_sum_of_unit_vectors_whatever_the_size_of_a_client() -> None:
    run = toy_run(safl(k=1, agree="scores", probe=1.0), 2)
    expected = torch.zeros(3, dtype=torch.float64)
    sent = []
    for client in FOUR.clients:
        job, _ = make_job(run, MODEL, initial_server(run, MODEL), 0, client)
        each = begin_round(run, MODEL, job, ClientState(), FOUR[client].train)
        everything = torch.arange(SIZES[client])
        attention = MODEL.attention(MODEL.initial, FOUR[client].train.take(everything), "auto")
        scores = torch.stack([attention[layer].mean().double() for layer in LAYERS])
        expected += scores / scores.norm()
        [rule] = run.method.client_rules
        slots, _ = rule.finish(each.ctx.anchor, {}, each.ctx)
        sent.append(Update(client, {}, slots, float(SIZES[client]), {}, None))
    [counted] = average(sent).slots[VOTES].values()
    mean = counted.flatten()[:3].double() / counted.flatten()[3]
    assert torch.allclose(mean, expected / 4, atol=1e-5)
    best = LAYERS[int(expected.argmax())]
    assert elect(LAYERS, counted.flatten(), 1) == [best]


@pytest.mark.slow
def test_noise_of_scores_averages_out_over_clients() -> None:
    """The direction of a noisy sum is, in the mean, that of the sum: by symmetry around it."""
    method = safl(k=1, noise=4.0, probe=1.0, agree="scores")
    run = toy_run(method, 1)
    attention = MODEL.attention(MODEL.initial, FOUR["d"].train.take(torch.arange(8)), "auto")
    truth = torch.stack([attention[layer].mean(1).double().sum() for layer in LAYERS])
    sent = []
    for number in range(1000):
        job, _ = make_job(run, MODEL, initial_server(run, MODEL), 0, "d")
        each = begin_round(run, MODEL, replace(job, client=f"d{number}"), ClientState(), FOUR["d"].train)
        sent.append(each.ctx.notes[VOTES][BALLOT][:3] * 8)

    def error(vectors: torch.Tensor) -> float:
        mean = vectors.mean(0)
        return float((mean / mean.norm() - truth / truth.norm()).norm())

    rows = torch.stack(sent)
    single = sum(error(row[None]) for row in rows) / 1000
    tenth = sum(error(part) for part in rows.split(100)) / 10
    assert single > 0.5
    assert tenth < 0.35 * single
    assert error(rows) < 0.12


def test_noisy_scores_are_sent_as_they_would_be_reported() -> None:
    method = safl(k=1, noise=2.0, probe=0.5, agree="scores")
    run = toy_run(method, 2)
    job, _ = make_job(run, MODEL, initial_server(run, MODEL), 0, "a")
    each = begin_round(run, MODEL, job, ClientState(), FOUR["a"].train)
    sent = each.ctx.notes[VOTES][BALLOT] * SIZES["a"]
    [rule] = method.client_rules
    assert isinstance(rule, LayerVote)
    key = run.key / "round" / 0 / "client" / "a" / "start" / 0
    scores = rule.select.rank(LAYERS, 1, FOUR["a"].train, each.ctx, key).scores
    assert sent.tolist() == pytest.approx([*scores.values(), 1.0], abs=1e-12)
    assert each.metrics == {}


# ---- privacy


def test_noisy_votes_are_charged_once_for_the_rounds_that_they_hold() -> None:

    def votes_charged(every: int) -> int:
        run = toy_run(safl(k=1, noise=2.0, probe=0.5, every=every, agree=True), 7)
        guard = make_private(run, MODEL, SIZES, PrivacySettings(noise=1.0))
        bill = guard.forecast(7).bills["a"]
        return bill[PrivacyRelease("layer choice", 2.0, 0.5)]

    assert [votes_charged(every) for every in (1, 2, 3, 7)] == [7, 4, 3, 1]


def test_votes_without_noise_are_refused_under_example_level_privacy() -> None:
    with pytest.raises(MethodError, match="LayerVote starts or selects by a client's examples and adds no noise"):
        make_private(toy_run(safl(k=1, agree=True)), MODEL, SIZES, PrivacySettings(noise=1.0))


# ---- options, compositions, rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": {"a": 1}}, r"same layers, but method\.capacity does not"),
        ({"depth": {"a": 1}}, r"same layers, but method\.depth does not"),
        ({"average_over": "cohort"}, r"method\.average_over has no effect"),
        ({"select": "random"}, "select = 'random' does not read it"),
        ({"select": "static"}, "select = 'static' does not read it"),
    ],
)
def test_agreement_refuses_options_that_let_clients_differ(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        safl(agree=True, **options)


def test_agreement_composes_with_a_penalty() -> None:
    both = compose(fedprox(0.1), safl(k=1, agree=True))
    results = play_method(both, 2)
    assert len(set(results[1].sent.values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"k": 1}, pytest.param({"k": 1, "every": 2, "select": "gradient"}, marks=pytest.mark.slow)]
)
def test_agreement_conforms(options: dict[str, Any]) -> None:
    found = check_method(build("safl", {**options, "agree": True}), MODEL, Clients(c0=3, c1=9, c2=12, c3=6))
    assert found.bytes_up > 0


def test_agreement_with_sampling_by_size_runs() -> None:
    results = play_method(safl(k=1, agree=True), 2, sampling=BySize(), cohort=2, examples=SIZES)
    assert layer_tags(MODEL) == LAYERS
    assert len(set(results[1].sent.values())) == 1
    assert final_params(results).keys() == MODEL.initial.keys()


def test_rows_name_the_layers_that_clients_sent(tmp_path: Any) -> None:
    config = {
        "rounds": 3,
        "method": {"name": "safl", "k": 1, "agree": True},
        "data": {"name": "synthetic", "size": 4, "examples": 60, "test_examples": 20},
        "split": {"name": "iid", "clients": 3},
        "model": {"name": "vit", "width": 8, "layers": 2, "heads": 1, "patch": 2},
        "training": {"optimizer": "sgd", "lr": 0.1, "batch_size": 8, "steps": 1},
    }
    rows = list(start(parse(config), tmp_path / "run"))
    for row in rows:
        assert row["chosen"].keys() == {"c0", "c1", "c2"}
        assert len({tuple(layers) for layers in row["chosen"].values()}) == 1
        assert row["scores"] == {}
