"""Methods, privacy and compression over a model with an adapter: only the adapter trains, travels and is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architecture_fixtures import Case, ThreeClients, kind_of, make_model, noise
from helpers import max_difference, play, toy_run

from partita.core import tensors
from partita.core.dp_settings import DPSGDSettings
from partita.core.method import Method, MethodError, compose
from partita.core.model import TagError
from partita.core.optim import SGD
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.serialization import HEADER
from partita.core.tensors import Tensors
from partita.engines.simulation import SimulationEngine
from partita.methods import build
from partita.methods.client_ranks import rank_by_client
from partita.methods.fedavg import fedavg
from partita.models.peft_adapters import AdaptedModel
from partita.privacy.guard import PrivacyConfig, make_private
from partita.storage.client_store import MemoryStore
from partita.testing.conformance import check_method

MODELS = ("llama-lm", "gpt2-lm", "bert-text", "vit-image")
ROLES = ("query", "key", "value")
METHODS: dict[str, Callable[[], Method]] = {
    "fedavg": fedavg,
    "fedprox": lambda: build("fedprox", {"mu": 0.1}),
    "fedfrozen": lambda: build("fedfrozen", {"warmup": 2}),
    "fedfrozen, auto": lambda: build("fedfrozen", {"warmup": "auto", "patience": 1, "threshold": 0.1}),
    "safl": lambda: build("safl", {"k": 1}),
    "fedper": lambda: build("fedper", {"personal": ["lora_B"]}),
    "fedper, layer": lambda: build("fedper", {"personal": ["layer.1"], "finetune": 0}),
    "scaffold": lambda: build("scaffold", {}),
    "fedadam": lambda: build("fedadam", {}),
    "fedadamw": lambda: build("fedadamw", {}),
    "ditto": lambda: build("ditto", {}),
    "quantize": lambda: build("quantize", {}),
    "prune": lambda: build("prune", {"keep": 0.5}),
    "ffa-lora": lambda: build("ffa-lora", {}),
    "fedsa-lora": lambda: build("fedsa-lora", {}),
    "safl+fedfrozen+fedadam": lambda: build("safl+fedfrozen+fedadam", {"k": 1, "warmup": 2, "select": "gradient"}),
    "ranks": lambda: rank_by_client(fedavg(), {"a": 1, "b": 4, "c": 2}),
    "ranks, scaffold": lambda: rank_by_client(build("scaffold", {}), {"a": 1, "b": 4, "c": 2}),
    "ranks, ditto": lambda: rank_by_client(build("ditto", {}), {"a": 1, "b": 4, "c": 2}),
    "ranks, fedsa-lora": lambda: rank_by_client(build("fedsa-lora", {}), {"a": 1, "b": 4, "c": 2}),
}
FAST = {("llama-lm", name) for name in ("fedavg", "fedfrozen", "safl", "fedper", "ranks")}


def adapted(case: str, **options: Any) -> AdaptedModel:
    base = make_model(case)
    base.initial.update({name: value + 0.3 * noise(3, *value.shape) for name, value in base.initial.items()})
    model = base.adapted("lora", Key(1), **{"rank": 4, "alpha": 6.0, "roles": ROLES, **options})
    assert isinstance(model, AdaptedModel)
    # Away from B = 0, where A has no gradient but rounding errors.
    for name in model.names("lora_B"):
        model.initial[name] += 0.3 * noise(4, *model.initial[name].shape)
    return model


def clients(case: str) -> ThreeClients:
    return ThreeClients(Case(None, {}, None, kind_of(case)))  # type: ignore[arg-type]


def frozen_values(model: AdaptedModel) -> Tensors:
    return {name: value.clone() for name, value in model.module.named_parameters()}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=() if (case, name) in FAST else pytest.mark.slow)
        for case in MODELS
        for name in METHODS
    ],
)
def test_methods_conform_on_a_model_with_an_adapter(case: str, name: str) -> None:
    model = adapted(case, ranks=(1, 4, 2)) if name.startswith("ranks") else adapted(case)
    before = frozen_values(model)
    method = METHODS[name]()
    optimizer = SGD(momentum=0.9) if "ditto" in name else None  # as in test_conformance.py
    found = check_method(method, model, clients(case), optimizer, tolerance=2e-5)
    assert found.bytes_up > 0
    assert tensors.equal(frozen_values(model), before), "the base is the same bit for bit"


@pytest.mark.parametrize("case", MODELS)
def test_only_the_adapter_and_the_head_travel_and_are_stored(case: str) -> None:
    model = adapted(case)
    run = toy_run(fedavg(), 2)
    before = frozen_values(model)
    played = play(run, model, clients(case))
    allowed = model.names("lora") | (frozenset() if case.endswith("-lm") else model.names("head"))
    assert model.all_names() == initial_server(run, model).params.keys() == allowed
    for each in played:
        assert each.traffic.up.keys() <= allowed | {HEADER}
        assert each.server.params.keys() == allowed
        assert all(value.numel() == model.initial[name].numel() for name, value in each.server.params.items())
    assert tensors.equal(frozen_values(model), before)


@pytest.mark.parametrize("case", MODELS)
def test_example_level_privacy_clips_and_trains_the_adapter(case: str) -> None:
    """Ghost clipping, clipping of each example's gradient, and blocks of clients agree."""
    model, found = adapted(case), []
    settings = (DPSGDSettings(0.1, 0.0, clipping="direct"), 1), (DPSGDSettings(0.1, 0.0), 3)
    for privacy, block in (*settings, (DPSGDSettings(0.1, 0.0, clipping="ghost"), 1)):
        run = toy_run(Method("private", privacy=privacy), 2, steps=2)
        found.append(play(run, model, clients(case), block=block)[-1].server.params)
    for other in found[1:]:
        assert all(torch.allclose(found[0][name], other[name], atol=1e-5) for name in model.all_names())
    assert max(float((found[0][name] - model.initial[name]).abs().max()) for name in model.names("lora")) > 1e-4


@pytest.mark.parametrize("case", ["llama-lm", "vit-image"])
def test_client_level_privacy_covers_the_adapter(case: str) -> None:
    model = adapted(case)
    config = PrivacyConfig(unit="client", noise=0.5, clip=0.1, delta=1e-3, repeatable=True)
    guard = make_private(toy_run(fedavg(), 2, cohort=1.0), model, {"a": 4, "b": 4, "c": 4}, config)
    played = play(guard.run, model, clients(case))
    assert played[-1].server.params.keys() == model.all_names()


def test_fedper_names_what_can_stay_with_the_client() -> None:
    tied = adapted("llama-lm")
    with pytest.raises(
        TagError, match=r"tagged 'head' are frozen for the whole run .* choose among what trains: .*lora_B"
    ):
        play(toy_run(build("fedper", {}), 1), tied, clients("llama-lm"))
    head = adapted("bert-text")
    played = play(toy_run(build("fedper", {"finetune": 0}), 1), head, clients("bert-text"))
    assert head.names("head").isdisjoint(played[0].traffic.up)


def test_fedfrozen_freezes_the_factors_of_queries_and_keys() -> None:
    model = adapted("llama-lm", roles=("query", "value"))
    played = play(toy_run(build("fedfrozen", {"warmup": 1}), 2), model, clients("llama-lm"))
    for name in model.names("query"):
        assert played[1].server.params[name] is played[0].server.params[name]
        assert name not in played[1].traffic.up
    assert model.names("value") <= played[1].traffic.up.keys()
    value = play(toy_run(build("fedfrozen", {"warmup": 0, "scope": "value"}), 1), model, clients("llama-lm"))
    assert value[0].traffic.up.keys() - {HEADER} == model.names("value")
    with pytest.raises(MethodError, match="nothing of llama-lm would train after the warm-up; add other roles"):
        play(toy_run(build("fedfrozen", {"warmup": 0}), 1), adapted("llama-lm", roles=("query",)), clients("llama-lm"))


def test_methods_that_need_factors_say_how_to_get_them() -> None:
    for name in ("ffa-lora", "fedsa-lora"):
        with pytest.raises(TagError, match=rf"{name} needs a model with low-rank factors, .* set \[model.adapter\]"):
            play(toy_run(build(name, {}), 1), make_model("llama-lm"), clients("llama-lm"))
    both = compose(build("lora", {"rank": 2}), build("ffa-lora", {}))
    assert both.extend is not None
    model = both.extend(make_model("llama-lm"), Key(0))
    played = play(toy_run(both, 1), model, clients("llama-lm"))
    assert played[0].traffic.up.keys() - {HEADER} == model.names("lora_B")


# FFA-LoRA and FedSA-LoRA


def test_ffa_lora_averages_products_exactly_and_equals_fedavg_with_a_frozen_factor() -> None:
    model, population = adapted("llama-lm"), clients("llama-lm")
    run = toy_run(build("ffa-lora", {}), 1, steps=3)
    played = play(run, model, population)
    sent = [reply.delta for reply in _updates(run, model, population)]
    for name in model.names("lora_B"):
        A = model.initial[name.replace("lora_B", "lora_A")]
        products = [(model.initial[name] + delta[name]).double() @ A.double() for delta in sent]
        mean = played[0].server.params[name].double() @ A.double()
        assert torch.allclose(torch.stack(products).mean(0), mean, atol=1e-6), "all clients have four examples"
        assert played[0].server.params[name.replace("lora_B", "lora_A")] is A
        assert name.replace("lora_B", "lora_A") not in played[0].traffic.down
    plain = Method("frozen A", plan=lambda model, info: fedavg().plan(_Only(model, "lora_B"), info))
    assert tensors.equal(play(toy_run(plain, 1, steps=3), model, population)[0].server.params, played[0].server.params)


class _Only:
    """The names of one tag."""

    def __init__(self, model: Any, tag: str) -> None:
        self.own = model.names(tag)

    def all_names(self) -> frozenset[str]:
        return self.own


def _updates(run: Any, model: Any, population: Any) -> list[Any]:
    engine, server = SimulationEngine(run, model, population), initial_server(run, model)
    jobs = [make_job(run, model, server, 0, client)[0] for client in population.clients]
    return list(engine.train(jobs))


def test_fedsa_lora_with_one_client_equals_lora_and_fedper_with_one_factor() -> None:
    model, case = adapted("llama-lm"), "llama-lm"
    population = clients(case)
    population.clients = ("a",)  # type: ignore[misc,assignment]
    store = MemoryStore()
    alone = play(toy_run(build("fedsa-lora", {}), 3), model, population, store=store)
    lora = play(toy_run(fedavg(), 3), model, population)
    A, B = model.names("lora_A"), model.names("lora_B")
    own = {**tensors.select(alone[-1].server.params, A), **tensors.select(store.load("a", 3).personal, B)}
    # Not bit for bit: a client keeps B, and the server adds a difference to it.
    assert max_difference(own, lora[-1].server.params) < 1e-6
    assert all(alone[-1].server.params[name] is model.initial[name] for name in B)
    assert alone[-1].traffic.up.keys() - {HEADER} == A
    both = [
        play(toy_run(method, 2), model, clients(case))
        for method in (build("fedsa-lora", {}), build("fedper", {"personal": ["lora_B"], "finetune": 0}))
    ]
    assert tensors.equal(both[0][-1].server.params, both[1][-1].server.params)
    assert both[0][-1].traffic == both[1][-1].traffic


# Rank by client


def test_clients_of_the_full_rank_train_the_pieces_as_whole_factors() -> None:
    population = clients("llama-lm")
    whole, cut = adapted("llama-lm"), adapted("llama-lm", ranks={"x": 1, "y": 3})
    for name in whole.names("lora"):
        stem, dim = name.removesuffix(".weight"), 0 if "lora_A" in name else 1
        for rank, part in zip((1, 3, 4), whole.initial[name].split([1, 2, 1], dim), strict=True):
            cut.initial[f"{stem}.rank{rank}.weight"] = part.clone()
    full = rank_by_client(fedavg(), dict.fromkeys(population.clients, 4))
    one = play(toy_run(fedavg(), 1, steps=3), whole, population)[0].server.params
    two = play(toy_run(full, 1, steps=3), cut, population)[0].server.params
    for name in whole.names("lora"):
        stem, dim = name.removesuffix(".weight"), 0 if "lora_A" in name else 1
        joined = torch.cat([two[f"{stem}.rank{rank}.weight"] for rank in (1, 3, 4)], dim)
        assert torch.allclose(joined, one[name], rtol=0, atol=1e-6)
        assert not torch.allclose(one[name], whole.initial[name], rtol=0, atol=1e-4)


def test_a_client_sends_in_proportion_to_its_rank_and_others_average_the_rest() -> None:
    population, ranks = clients("llama-lm"), {"a": 1, "b": 4, "c": 2}
    model = adapted("llama-lm", ranks=ranks)
    run = toy_run(rank_by_client(fedavg(), ranks), 1)
    updates = {update.client: update.delta for update in _updates(run, model, population)}
    sizes = {client: sum(value.numel() for value in delta.values()) for client, delta in updates.items()}
    assert sizes["b"] == 4 * sizes["a"]
    assert sizes["c"] == 2 * sizes["a"]
    params = play(run, model, population)[0].server.params
    for name, value in params.items():
        senders = [delta[name] for delta in updates.values() if name in delta]
        assert len(senders) == (3 if ".rank1." in name else 2 if ".rank2." in name else 1)
        assert torch.allclose(value - model.initial[name], torch.stack(senders).mean(0), atol=1e-7)


def test_a_client_of_a_small_rank_has_a_model_of_that_rank() -> None:
    """What it does not have adds nothing: B is zero in the initial values."""
    ranks = {"a": 1, "b": 4, "c": 2}
    base = make_model("llama-lm")
    model = base.adapted("lora", Key(1), rank=4, alpha=6.0, roles=ROLES, ranks=ranks)
    small = base.adapted("lora", Key(1), rank=1, alpha=1.5, roles=ROLES)  # the same scale, 6 / 4
    for name in small.initial:
        small.initial[name] = model.initial[name.replace(".weight", ".rank1.weight")]
    population = clients("llama-lm")
    update = next(each for each in _updates(toy_run(rank_by_client(fedavg(), ranks), 1), model, population))
    alone = next(each for each in _updates(toy_run(fedavg(), 1), small, population))
    for name, value in alone.delta.items():
        assert torch.allclose(update.delta[name.replace(".weight", ".rank1.weight")], value, rtol=0, atol=1e-7)


def test_rank_by_client_refuses_an_adaptation_that_has_no_rank() -> None:
    with pytest.raises(MethodError, match=r"fedper trains a client's copy .* set method.finetune = 0"):
        rank_by_client(build("fedper", {"personal": ["lora_B"]}), {"a": 1})
