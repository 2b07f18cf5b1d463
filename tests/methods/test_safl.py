"""SAFL: reductions, what is trained and sent, where gradients stop, options, and depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architecture_fixtures import Few, adapted, inputs_of, made
from helpers import OPTIMIZERS, Clients, distance, last, play, run_of
from torch import nn

from partita.core import serialization, tensors
from partita.core.client import ClientState, begin_round, finish_round
from partita.core.method import Method, MethodError, PrivacyRelease, Server, ServerRule, compose
from partita.core.model import Model, layer_tag
from partita.core.rounds import RoundResult, initial_server, make_job
from partita.core.update import Update
from partita.engines.availability import Availability
from partita.experiment.config import parse
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedprox import fedprox
from partita.methods.layer_skipping import layer_skipping
from partita.methods.safl import CohortMean, safl
from partita.methods.selectors import Attention, TopLayers
from partita.testing.conformance import check_method
from partita.testing.toy import ToyTransformer
from partita.training.local_training import train_clients

MODEL = ToyTransformer(width=4, layers=3)
FOUR = Clients(a=5, b=6, c=7, d=8)


def played(method: Method, count: int = 3, model: Model = MODEL, **more: Any) -> list[RoundResult]:
    run = run_of(method, count, OPTIMIZERS["adamw"], cohort=0.5, min_updates=0)
    return play(run, model, FOUR, availability=Availability(client_dropout=0.1, straggler_rate=0.3), **more)


# ---- reductions


@pytest.mark.parametrize("options", [{"k": 1.0}, {"k": 3}, {"k": 1.0, "every": 2}, {"k": 1.0, "select": "random"}])
def test_with_all_layers_and_embeddings_it_is_fedavg_bit_for_bit(options: dict[str, Any]) -> None:
    for one, two in zip(played(safl(embeddings=True, **options)), played(fedavg()), strict=True):
        assert tensors.equal(one.server.params, two.server.params)
        assert (one.traffic, one.loss, one.sent) == (two.traffic, two.loss, two.sent)


def test_the_topmost_layers_are_layer_skipping_bit_for_bit() -> None:
    one, two = played(safl(k=2, select="static")), played(layer_skipping((1, 2)))
    assert tensors.equal(last(one), last(two))
    assert [each.traffic for each in one] == [each.traffic for each in two]


def test_over_the_cohort_with_all_layers_it_is_fedavg_up_to_rounding() -> None:
    one, two = played(safl(k=1.0, embeddings=True, average_over="cohort")), played(fedavg())
    assert distance(last(one), last(two)) < 1e-6


def test_and_otherwise_it_is_not() -> None:
    results = [tensors.digest(last(played(safl(k=1, select=select)))) for select in ("attention", "random", "static")]
    assert len({*results, tensors.digest(last(played(fedavg())))}) == 4


# ---- what is trained and sent


def test_what_nobody_chose_is_handed_on_as_the_same_object_and_costs_nothing() -> None:
    before = MODEL.initial
    kinds = set()
    for each in played(safl(k=1)):
        sent = frozenset[str]().union(*each.sent.values())
        for name, value in each.server.params.items():
            assert (value is before[name]) == (name not in sent)
        assert each.traffic.up.keys() - {serialization.HEADER} == sent
        kinds.add(frozenset(layer for name in sent if (layer := layer_tag(MODEL.tags[name]))))
        assert "embed.weight" not in sent
        before = each.server.params
    assert len(kinds) > 1


def test_a_client_sends_the_bytes_of_its_layers_and_head_and_no_more() -> None:
    [each] = played(safl(k=1), 1)
    wanted = 0
    for names in each.sent.values():
        assert len({layer for name in names if (layer := layer_tag(MODEL.tags[name]))}) == 1
        wanted += len(serialization.pack({"delta": tensors.select(MODEL.initial, names)}))
    assert sum(each.traffic.up.values()) == wanted > 0


def test_what_was_not_chosen_is_untouched_at_the_client_too() -> None:
    """No weight decay and no momentum reaches the other names."""
    run = run_of(safl(k=1), 1, OPTIMIZERS["adamw"])
    server = initial_server(run, MODEL)
    job, _ = make_job(run, MODEL, server, 0, "a")
    each = begin_round(run, MODEL, job, ClientState(), FOUR["a"].train)
    [learned] = train_clients(run, [each])
    update, _ = finish_round(run, each, learned)
    assert learned.params.keys() == update.delta.keys() == update.steps.keys() == each.plan.train
    assert all(float(value.abs().max()) > 0 for value in update.delta.values())


# ---- where gradients stop


@pytest.mark.parametrize("case", ["bert-text", "vit-image", "llama-tokens", "clip-towers"])
@pytest.mark.parametrize("method", [safl(k=1, select="static"), layer_skipping(0.25)], ids=lambda method: method.name)
def test_the_backward_pass_stops_at_the_lowest_layer_that_was_chosen(case: str, method: Method) -> None:
    """Below it nothing requires a gradient, so no activations are kept."""
    sizes = {"clip-towers": {}}.get(case, {"num_hidden_layers": 4})
    model = adapted(case, sizes=sizes)
    asked: dict[int, bool] = {}

    def see(number: int) -> Any:
        def hook(part: nn.Module, given: Any, out: Any) -> None:
            first = out[0] if isinstance(out, tuple) else out
            asked[number] = asked.get(number, False) or first.requires_grad

        return hook

    depth = len({layer for tags in model.tags.values() if (layer := layer_tag(tags))})
    for path, part in model.module.named_modules():
        if isinstance(part, nn.Module) and path.rpartition(".")[2].isdigit():
            part.register_forward_hook(see(int(path.rpartition(".")[2])))
    run = run_of(method, 1, steps=1)
    play(run, model, Few(made(case)))
    assert asked == {number: number == depth - 1 for number in range(depth)}


# ---- aggregation


def update_of(client: str, weight: float, **delta: float) -> Update:
    return Update(client, {name: torch.tensor([value]) for name, value in delta.items()}, {}, weight, {}, None)


def test_senders_or_the_cohort_share_a_layer() -> None:
    updates = [update_of("a", 1.0, x=2.0, head=1.0), update_of("b", 3.0, y=4.0, head=5.0)]
    server = Server({name: torch.zeros(1) for name in ("x", "y", "z", "head")})
    for rule, x, y in ((safl().server_rule, 2.0, 4.0), (safl(average_over="cohort").server_rule, 0.5, 3.0)):
        after = rule.apply(server, rule.reduce(server, iter(updates), 2))
        assert [float(after.params[name]) for name in ("x", "y", "head")] == [x, y, 4.0]
        assert after.params["z"] is server.params["z"]
    assert type(safl().server_rule) is ServerRule
    assert safl(average_over="cohort").server_rule == CohortMean()


# ---- options


def test_it_says_that_it_looks_and_how_private_that_is() -> None:
    for select, looks in (("attention", True), ("gradient", True), ("random", False), ("static", False)):
        [rule] = safl(select=select).client_rules  # type: ignore[arg-type]
        assert (rule.uses_data, rule.release) == (looks, None)
    [rule] = safl(noise=2.0, probe=0.25, clip=0.5).client_rules
    assert rule.uses_data
    assert rule.release == PrivacyRelease("layer choice", 2.0, 0.25)
    assert isinstance(rule, TopLayers)
    assert rule.select == Attention("auto", 0.25, 2.0, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, r"method\.k is 0"),
        ({"capacity": {"a": 1.5}}, r"method\.k is 1\.5"),
        ({"every": 0}, r"method\.every and probe are 0 and 32"),
        ({"probe": 0}, "give at least one round, and a number of examples"),
        ({"probe": 1.5}, "give at least one round, and a number of examples"),
        ({"noise": -1.0}, r"method\.noise and clip are -1\.0 and 1\.0"),
        ({"noise": 1.0, "probe": 0.5, "clip": 0.0}, r"method\.noise and clip"),
        (
            {"noise": 1.0, "probe": 0.5, "select": "gradient"},
            "noise needs bounded scores, and only select = 'attention'",
        ),
        ({"noise": 1.0}, "probe is 32 examples, but with noise .* give a fraction"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        safl(**options)


def test_capacities_can_be_said_in_a_config() -> None:
    config = parse({"method": {"name": "safl", "k": 1, "capacity": {"c3": 2, "c4": 0.5}}})
    method = build("safl", {key: value for key, value in config.method.items() if key != "name"})
    assert isinstance(rule := method.client_rules[0], TopLayers)
    assert rule.capacity == (("c3", 2), ("c4", 0.5))
    assert method.clients == {"c3", "c4"}, "so that a missing client is reported"
    assert safl(capacity={"a": 1}, depth={"b": 1}).clients == {"a", "b"}
    assert hash(method.client_rules)


# ---- clients of different depth


def test_a_shallower_client_runs_trains_and_is_sent_only_the_layers_it_has() -> None:
    method = safl(k=1.0, embeddings=True, depth={"a": 2, "b": 1})
    run = run_of(method)
    lacks = {"a": {"layer.1"}, "b": {"layer.1", "layer.2"}, "c": set()}
    for client, without in lacks.items():
        job, plan = make_job(run, MODEL, initial_server(run, MODEL), 0, client)
        missing = MODEL.names(*without) if without else frozenset()
        assert plan.down == plan.up == MODEL.all_names() - missing == job.params.keys()
        each = begin_round(run, MODEL, job, ClientState(), FOUR["c"].train)
        assert each.plan.train == MODEL.all_names() - missing
        # Skipped layers do not affect its output.
        noisy = {name: value + (name in missing) for name, value in MODEL.initial.items()}
        batch = FOUR["c"].train.take(torch.arange(3))
        ours, theirs = (each.ctx.model(params, batch.inputs).logits for params in (noisy, MODEL.initial))
        assert torch.equal(ours, theirs)
        assert torch.equal(theirs, MODEL(MODEL.initial, batch.inputs).logits) == (not without)


def test_clients_of_different_depth_train_one_model() -> None:
    rounds = played(safl(k=1.0, depth={"a": 2, "b": 1}), 4)
    for each in rounds:
        for client, depth in {"a": 2, "b": 1, "c": 3, "d": 3}.items():
            if client in each.sent:
                assert len({layer for name in each.sent[client] if (layer := layer_tag(MODEL.tags[name]))}) == depth
    assert distance(last(rounds), MODEL.initial) > 1e-3


def test_full_depth_is_no_depth() -> None:
    one, two = played(safl(k=2, depth={"a": 3})), played(safl(k=2))
    assert tensors.equal(last(one), last(two))


@pytest.mark.parametrize("case", ["vit-image", "bert-text", "gpt2-lm", "llama-text"])
def test_a_transformer_without_a_layer_is_the_transformer_with_one_layer_less(case: str) -> None:
    it = made(case)
    less = adapted(case, sizes={"num_hidden_layers": 1})
    params = {name: it.params[name] for name in less.initial}  # of the first layer, and what is outside
    inputs = inputs_of(it)
    assert torch.equal(
        it.model.skip_layers(frozenset({"layer.1"}))(it.params, inputs).logits, less(params, inputs).logits
    )
    assert not torch.equal(it.model(it.params, inputs).logits, less(params, inputs).logits)


def test_a_depth_that_cannot_be_is_refused() -> None:
    with pytest.raises(MethodError, match="gives 'a' 4 layers, but tiny attention has 3"):
        played(safl(depth={"a": 4}))


# ---- compositions


def test_under_fedfrozen_a_chosen_layer_leaves_its_kernel_at_home() -> None:
    for each in played(compose(fedfrozen(1), safl(k=1)), 3):
        sent = frozenset[str]().union(*each.sent.values())
        assert bool(sent & MODEL.names("query", "key")) == (each.number < 1)
        assert sent & MODEL.names("value")


def test_it_needs_no_plan_of_its_own_so_that_any_other_plan_goes_with_it() -> None:
    frozen = fedfrozen()
    assert compose(frozen, safl()).plan is compose(safl(), frozen).plan is frozen.plan
    assert compose(fedprox(0.1), safl()).client_rules == (*fedprox(0.1).client_rules, *safl().client_rules)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("safl", {"k": 1, "every": 2}, id="remembers"),
        pytest.param("safl", {"k": 2, "depth": {"c1": 2, "c3": 1}}, id="depth"),
        pytest.param("safl", {"k": 1, "noise": 1.0, "probe": 0.5}, id="private", marks=pytest.mark.slow),
        pytest.param("safl", {"k": 1, "select": "gradient"}, id="gradient", marks=pytest.mark.slow),
        pytest.param("safl", {"k": 1, "select": "random"}, id="random", marks=pytest.mark.slow),
        pytest.param("safl", {"k": 1, "select": "round-robin"}, id="round-robin", marks=pytest.mark.slow),
        pytest.param("safl", {"k": 1, "select": "static"}, id="static", marks=pytest.mark.slow),
        pytest.param("safl", {"k": 1, "average_over": "cohort"}, id="cohort", marks=pytest.mark.slow),
        pytest.param("safl", {"capacity": {"c1": 2, "c3": 1.0}}, id="capacity", marks=pytest.mark.slow),
        pytest.param("fedfrozen+safl", {"k": 1, "every": 2, "warmup": 2}, id="fedfrozen", marks=pytest.mark.slow),
        pytest.param("safl+scaffold", {"k": 1}, id="scaffold", marks=pytest.mark.slow),
    ],
)
def test_it_keeps_its_promises_in_every_setting(name: str, options: dict[str, Any]) -> None:
    found = check_method(build(name, options), MODEL, Clients(c0=3, c1=9, c2=12, c3=6))
    assert found.block_difference < 1e-5
    assert found.bytes_up > 0


def test_it_learns() -> None:
    """Although each client trains only a third of the layers."""
    clients = Clients(a=40, b=40, c=40)
    run = run_of(safl(k=1), 8, OPTIMIZERS["adamw"], lr=0.02)
    losses = [each.loss for each in play(run, MODEL, clients)]
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < 0.8 * losses[0]
