"""Layer-skipping: the same layers in every round, and FedAvg as its limit."""

from __future__ import annotations

import pytest
from helpers import Clients, final_params, play, toy_model, toy_run

from partita.core import tensors
from partita.core.method_error import MethodError
from partita.core.plan import RoundInfo, plan_for
from partita.methods.fedavg import fedavg
from partita.methods.layer_skipping import layer_skipping
from partita.testing.toy import ToyTransformer

CLIENTS = Clients(a=5, b=9, c=6)
TEN_LAYERS = ToyTransformer(layers=10)


@pytest.mark.parametrize(
    ("layers", "wanted"), [(0.3, (7, 8, 9)), (0.01, (9,)), (1.0, tuple(range(10))), ((0, 4), (0, 4))]
)
def test_layer_skipping_trains_the_chosen_layers_and_the_head(
    layers: float | tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    plan = plan_for(layer_skipping(layers).plan, TEN_LAYERS, RoundInfo(0, 3, "a"))
    assert plan.train == plan.up == TEN_LAYERS.names("head", *(f"layer.{number}" for number in wanted))
    assert plan.down == TEN_LAYERS.all_names()
    assert plan == plan_for(layer_skipping(layers).plan, TEN_LAYERS, RoundInfo(2, 3, "b"))


def test_layer_skipping_trains_embeddings_when_asked() -> None:
    plan = plan_for(layer_skipping(0.2, embeddings=True).plan, TEN_LAYERS, RoundInfo(0, 3, "a"))
    assert plan.train == TEN_LAYERS.names("head", "embedding", "layer.8", "layer.9")


def test_layer_skipping_never_moves_skipped_layers() -> None:
    model = ToyTransformer(width=4, layers=2)
    final = final_params(play(toy_run(layer_skipping((1,)), 2), model, CLIENTS))
    moved = {name for name in final if final[name] is not model.initial[name]}
    assert moved == model.names("layer.1", "head")


def test_layer_skipping_with_everything_is_fedavg_bit_for_bit() -> None:
    methods = layer_skipping(1.0, embeddings=True), fedavg()
    one, two = (play(toy_run(method, 3, cohort=2), toy_model(), CLIENTS) for method in methods)
    assert tensors.equal(final_params(one), final_params(two))


@pytest.mark.parametrize(("layers", "message"), [((10,), "names layer 10, but the model has 10"), (0.0, "fraction")])
def test_layer_skipping_refuses_missing_layers(layers: float | tuple[int, ...], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        plan_for(layer_skipping(layers).plan, TEN_LAYERS, RoundInfo(0, 3, "a"))
