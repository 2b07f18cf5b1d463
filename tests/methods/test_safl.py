"""SAFL: reductions, what is trained and sent, where gradients stop, options, and depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architecture_fixtures import ThreeClients, inputs_of, make_case, make_model
from helpers import OPTIMIZERS, Clients, final_params, max_difference, play, toy_run
from torch import nn

from partita.core import serialization, tensors
from partita.core.client import ClientState, begin_round, finish_round
from partita.core.client_rule import PrivacyRelease
from partita.core.compose import compose
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model, layer_tag
from partita.core.rounds import RoundResult, initial_server, make_job
from partita.core.server_rule import Server, ServerRule
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


def play_method(method: Method, count: int = 3, model: Model = MODEL, **more: Any) -> list[RoundResult]:
    run = toy_run(method, count, OPTIMIZERS["adamw"], cohort=0.5, min_updates=0)
    return play(run, model, FOUR, availability=Availability(client_dropout=0.1, straggler_rate=0.3), **more)


# ---- reductions


@pytest.mark.parametrize("options", [{"k": 1.0}, {"k": 3}, {"k": 1.0, "every": 2}, {"k": 1.0, "select": "random"}])
def test_safl_with_all_layers_and_embeddings_is_fedavg_bit_for_bit(options: dict[str, Any]) -> None:
    for one, two in zip(play_method(safl(embeddings=True, **options)), play_method(fedavg()), strict=True):
        assert tensors.equal(one.server.params, two.server.params)
        assert (one.traffic, one.loss, one.sent) == (two.traffic, two.loss, two.sent)


def test_safl_static_selection_is_layer_skipping_bit_for_bit() -> None:
    one, two = play_method(safl(k=2, select="static")), play_method(layer_skipping((1, 2)))
    assert tensors.equal(final_params(one), final_params(two))
    assert [each.traffic for each in one] == [each.traffic for each in two]


def test_safl_over_the_cohort_with_all_layers_is_fedavg_up_to_rounding() -> None:
    one, two = play_method(safl(k=1.0, embeddings=True, average_over="cohort")), play_method(fedavg())
    assert max_difference(final_params(one), final_params(two)) < 1e-6


def test_safl_selectors_give_different_results() -> None:
    results = [
        tensors.digest(final_params(play_method(safl(k=1, select=select))))
        for select in ("attention", "random", "static")
    ]
    assert len({*results, tensors.digest(final_params(play_method(fedavg())))}) == 4


# ---- what is trained and sent


def test_safl_leaves_unselected_parameters_untouched_and_unsent() -> None:
    before = MODEL.initial
    kinds = set()
    for each in play_method(safl(k=1)):
        sent = frozenset[str]().union(*each.sent.values())
        for name, value in each.server.params.items():
            assert (value is before[name]) == (name not in sent)
        assert each.traffic.up.keys() - {serialization.HEADER} == sent
        kinds.add(frozenset(layer for name in sent if (layer := layer_tag(MODEL.tags[name]))))
        assert "embed.weight" not in sent
        before = each.server.params
    assert len(kinds) > 1


def test_safl_client_sends_only_the_bytes_of_its_layers_and_head() -> None:
    [each] = play_method(safl(k=1), 1)
    wanted = 0
    for names in each.sent.values():
        assert len({layer for name in names if (layer := layer_tag(MODEL.tags[name]))}) == 1
        wanted += len(serialization.pack({"delta": tensors.select(MODEL.initial, names)}))
    assert sum(each.traffic.up.values()) == wanted > 0


def test_safl_client_trains_only_its_selected_names() -> None:
    """No weight decay and no momentum reaches the other names."""
    run = toy_run(safl(k=1), 1, OPTIMIZERS["adamw"])
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
def test_backward_pass_stops_at_the_lowest_selected_layer(case: str, method: Method) -> None:
    """Below it nothing requires a gradient, so no activations are kept."""
    sizes = {"clip-towers": {}}.get(case, {"num_hidden_layers": 4})
    model = make_model(case, sizes=sizes)
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
    run = toy_run(method, 1, steps=1)
    play(run, model, ThreeClients(make_case(case)))
    assert asked == {number: number == depth - 1 for number in range(depth)}


# ---- aggregation


def make_update(client: str, weight: float, **delta: float) -> Update:
    return Update(client, {name: torch.tensor([value]) for name, value in delta.items()}, {}, weight, {}, None)


def test_safl_averages_a_layer_over_senders_or_the_cohort() -> None:
    updates = [make_update("a", 1.0, x=2.0, head=1.0), make_update("b", 3.0, y=4.0, head=5.0)]
    server = Server({name: torch.zeros(1) for name in ("x", "y", "z", "head")})
    for rule, x, y in ((safl().server_rule, 2.0, 4.0), (safl(average_over="cohort").server_rule, 0.5, 3.0)):
        after = rule.apply(server, rule.reduce(server, iter(updates), 2))
        assert [float(after.params[name]) for name in ("x", "y", "head")] == [x, y, 4.0]
        assert after.params["z"] is server.params["z"]
    assert type(safl().server_rule) is ServerRule
    assert safl(average_over="cohort").server_rule == CohortMean()


# ---- options


def test_safl_declares_data_use_and_privacy_release() -> None:
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
def test_safl_refuses_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        safl(**options)


def test_safl_capacities_can_be_set_in_a_config() -> None:
    config = parse({"method": {"name": "safl", "k": 1, "capacity": {"c3": 2, "c4": 0.5}}})
    method = build("safl", {key: value for key, value in config.method.items() if key != "name"})
    assert isinstance(rule := method.client_rules[0], TopLayers)
    assert rule.capacity == (("c3", 2), ("c4", 0.5))
    assert method.clients == {"c3", "c4"}, "so that a missing client is reported"
    assert safl(capacity={"a": 1}, depth={"b": 1}).clients == {"a", "b"}
    assert hash(method.client_rules)


# ---- clients of different depth


def test_safl_shallow_client_runs_trains_and_receives_only_its_layers() -> None:
    method = safl(k=1.0, embeddings=True, depth={"a": 2, "b": 1})
    run = toy_run(method)
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


def test_safl_clients_of_different_depth_train_one_model() -> None:
    rounds = play_method(safl(k=1.0, depth={"a": 2, "b": 1}), 4)
    for each in rounds:
        for client, depth in {"a": 2, "b": 1, "c": 3, "d": 3}.items():
            if client in each.sent:
                assert len({layer for name in each.sent[client] if (layer := layer_tag(MODEL.tags[name]))}) == depth
    assert max_difference(final_params(rounds), MODEL.initial) > 1e-3


def test_safl_full_depth_equals_no_depth() -> None:
    one, two = play_method(safl(k=2, depth={"a": 3})), play_method(safl(k=2))
    assert tensors.equal(final_params(one), final_params(two))


@pytest.mark.parametrize("case", ["vit-image", "bert-text", "gpt2-lm", "llama-text"])
def test_skipping_a_layer_equals_a_transformer_with_one_layer_less(case: str) -> None:
    it = make_case(case)
    less = make_model(case, sizes={"num_hidden_layers": 1})
    params = {name: it.params[name] for name in less.initial}  # of the first layer, and what is outside
    inputs = inputs_of(it)
    assert torch.equal(
        it.model.skip_layers(frozenset({"layer.1"}))(it.params, inputs).logits, less(params, inputs).logits
    )
    assert not torch.equal(it.model(it.params, inputs).logits, less(params, inputs).logits)


def test_safl_refuses_a_depth_beyond_the_model() -> None:
    with pytest.raises(MethodError, match="gives 'a' 4 layers, but tiny attention has 3"):
        play_method(safl(depth={"a": 4}))


# ---- compositions


def test_safl_with_fedfrozen_does_not_send_frozen_kernels() -> None:
    for each in play_method(compose(fedfrozen(1), safl(k=1)), 3):
        sent = frozenset[str]().union(*each.sent.values())
        assert bool(sent & MODEL.names("query", "key")) == (each.number < 1)
        assert sent & MODEL.names("value")


def test_safl_composes_with_the_plan_of_another_method() -> None:
    frozen = fedfrozen()
    assert compose(frozen, safl()).plan is compose(safl(), frozen).plan is frozen.plan
    assert compose(fedprox(0.1), safl()).client_rules == (*fedprox(0.1).client_rules, *safl().client_rules)


@pytest.mark.slow
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
def test_safl_conforms_in_every_setting(name: str, options: dict[str, Any]) -> None:
    found = check_method(build(name, options), MODEL, Clients(c0=3, c1=9, c2=12, c3=6))
    assert found.block_difference < 1e-5
    assert found.bytes_up > 0


def test_safl_reduces_the_loss() -> None:
    """Although each client trains only a third of the layers."""
    clients = Clients(a=40, b=40, c=40)
    run = toy_run(safl(k=1), 8, OPTIMIZERS["adamw"], lr=0.02)
    losses = [each.loss for each in play(run, MODEL, clients)]
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < 0.8 * losses[0]
