"""Methods, privacy and compression over a model with an adapter: only the adapter trains, travels and is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapter_fixtures import adapted, clients, frozen_values
from architecture_fixtures import make_model
from helpers import play, toy_run

from partita.core import tensors
from partita.core.compose import compose
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import TagError
from partita.core.optim import SGD
from partita.core.rng import Key
from partita.core.rounds import initial_server
from partita.core.serialization import HEADER
from partita.methods import build
from partita.methods.client_ranks import rank_by_client
from partita.methods.fedavg import fedavg
from partita.privacy.guard import make_private
from partita.testing.conformance import check_method

MODELS = ("llama-lm", "gpt2-lm", "bert-text", "vit-image")
METHODS: dict[str, Callable[[], Method]] = {
    "fedavg": fedavg,
    "fedavg, dropout": fedavg,
    "fedavg, dora": fedavg,
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
OPTIONS: dict[str, dict[str, Any]] = {
    "ranks": {"ranks": (1, 4, 2)},
    "dropout": {"dropout": 0.3},
    "dora": {"dora": True, "roles": ("output", "mlp")},
}
# All methods on one model. On the others, whose factors have other places (gpt2) and which train a head too (bert and
# vit): what a method sends, what it chooses by attention, what stays with the client, and each form of the factors.
OTHER_MODELS = {
    "gpt2-lm": ("fedavg, dora", "safl", "fedper", "ranks", "ffa-lora"),
    "bert-text": ("fedavg", "safl", "ranks"),
    "vit-image": ("fedavg, dora", "fedper", "ffa-lora"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for case in MODELS for name in (OTHER_MODELS.get(case, METHODS))],
)
def test_methods_conform_on_a_model_with_an_adapter(case: str, name: str) -> None:
    model = adapted(case, **next((OPTIONS[word] for word in OPTIONS if word in name), {}))
    before = frozen_values(model)
    method = METHODS[name]()
    optimizer = SGD(momentum=0.9) if "ditto" in name else None  # as in test_conformance.py
    found = check_method(method, model, clients(case), optimizer, tolerance=2e-5)
    assert found.bytes_up > 0
    assert tensors.equal(frozen_values(model), before), "the base is the same bit for bit"


@pytest.mark.fast_cases(1)
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


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_example_level_privacy_clips_and_trains_the_adapter(case: str) -> None:
    """Ghost clipping, clipping of each example's gradient, and blocks of clients agree."""
    model, found = adapted(case), []
    settings = (PrivacySettings(clip=0.1, noise=0.0, clipping="direct"), 1), (PrivacySettings(clip=0.1, noise=0.0), 3)
    for privacy, block in (*settings, (PrivacySettings(clip=0.1, noise=0.0, clipping="ghost"), 1)):
        run = toy_run(Method("private", privacy=privacy), 2, steps=2)
        found.append(play(run, model, clients(case), block=block)[-1].server.params)
    for other in found[1:]:
        assert all(torch.allclose(found[0][name], other[name], atol=1e-5) for name in model.all_names())
    assert max(float((found[0][name] - model.initial[name]).abs().max()) for name in model.names("lora")) > 1e-4


@pytest.mark.parametrize("case", ["llama-lm", "vit-image"])
def test_client_level_privacy_covers_the_adapter(case: str) -> None:
    model = adapted(case)
    config = PrivacySettings(unit="client", noise=0.5, clip=0.1, delta=1e-3, repeatable=True)
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
