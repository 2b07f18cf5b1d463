"""Layer-skipping: the same layers in every round, and FedAvg as its limit."""

from __future__ import annotations

import pytest
from helpers import Clients, last, play, run_of, small

from partita.core import tensors
from partita.core.method import MethodError
from partita.core.plan import RoundInfo, plan_for
from partita.methods.fedavg import fedavg
from partita.methods.layer_skipping import layer_skipping
from partita.testing.toy import ToyTransformer

CLIENTS = Clients(a=5, b=9, c=6)
DEEP = ToyTransformer(layers=10)


@pytest.mark.parametrize(
    ("layers", "wanted"), [(0.3, (7, 8, 9)), (0.01, (9,)), (1.0, tuple(range(10))), ((0, 4), (0, 4))]
)
def test_the_chosen_layers_and_the_head_train(layers: float | tuple[int, ...], wanted: tuple[int, ...]) -> None:
    plan = plan_for(layer_skipping(layers).plan, DEEP, RoundInfo(0, 3, "a"))
    assert plan.train == plan.up == DEEP.names("head", *(f"layer.{number}" for number in wanted))
    assert plan.down == DEEP.all_names()
    assert plan == plan_for(layer_skipping(layers).plan, DEEP, RoundInfo(2, 3, "b"))


def test_embeddings_train_when_asked_to() -> None:
    plan = plan_for(layer_skipping(0.2, embeddings=True).plan, DEEP, RoundInfo(0, 3, "a"))
    assert plan.train == DEEP.names("head", "embedding", "layer.8", "layer.9")


def test_what_is_skipped_never_moves() -> None:
    model = ToyTransformer(width=4, layers=2)
    final = last(play(run_of(layer_skipping((1,)), 2), model, CLIENTS))
    moved = {name for name in final if final[name] is not model.initial[name]}
    assert moved == model.names("layer.1", "head")


def test_with_all_of_it_it_is_fedavg_bit_for_bit() -> None:
    methods = layer_skipping(1.0, embeddings=True), fedavg()
    one, two = (play(run_of(method, 3, cohort=2), small(), CLIENTS) for method in methods)
    assert tensors.equal(last(one), last(two))


@pytest.mark.parametrize(("layers", "message"), [((10,), "names layer 10, but the model has 10"), (0.0, "fraction")])
def test_layers_that_are_not_there_are_refused(layers: float | tuple[int, ...], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        plan_for(layer_skipping(layers).plan, DEEP, RoundInfo(0, 3, "a"))
