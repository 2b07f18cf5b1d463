"""FedPart: full rounds, then one group of layers at a time."""

from __future__ import annotations

import pytest
from helpers import Clients, final_params, play, toy_model, toy_run

from partita.core import tensors
from partita.core.method_error import MethodError
from partita.core.plan import RoundInfo, plan_for
from partita.methods.fedavg import fedavg
from partita.methods.fedpart import fedpart, groups
from partita.testing.toy import ToyTransformer

CLIENTS = Clients(a=5, b=9, c=6)


def test_fedpart_groups_run_from_embedding_to_head_and_cover_all_names() -> None:
    model = ToyTransformer(layers=12)
    found = groups(model)
    wanted = [model.names("embedding"), *(model.names(f"layer.{n}") for n in range(12)), model.names("head")]
    assert found == wanted
    assert frozenset().union(*found) == model.all_names()
    assert sum(map(len, found)) == len(model.all_names())


def test_fedpart_cycles_through_full_rounds_and_groups() -> None:
    model = ToyTransformer(layers=2)
    a, b, c, d = groups(model)
    whole = model.all_names()
    cycle = [whole, whole, whole, a, a, b, b, c, c, d, d]
    planner = fedpart(full_rounds=3, rounds_per_layer=2).plan
    plans = [plan_for(planner, model, RoundInfo(number, 99, "a")) for number in range(22)]
    assert [plan.train for plan in plans] == cycle * 2
    assert all(plan.up == plan.train and plan.down == whole and not plan.keep for plan in plans)


def test_fedpart_moves_and_sends_only_the_current_group() -> None:
    model = toy_model()
    before = model.initial
    for number, each in enumerate(play(toy_run(fedpart(full_rounds=0, rounds_per_layer=1), 3), model, CLIENTS)):
        after = each.server.params
        assert {name for name in before if after[name] is not before[name]} == groups(model)[number]
        assert {name for name in each.traffic.up if name} == groups(model)[number]
        before = after


def test_fedpart_with_full_rounds_only_is_fedavg_bit_for_bit() -> None:
    one, two = (
        play(toy_run(method, 3, cohort=2), toy_model(), CLIENTS) for method in (fedpart(full_rounds=3), fedavg())
    )
    assert tensors.equal(final_params(one), final_params(two))


@pytest.mark.parametrize("wrong", [{"full_rounds": -1}, {"rounds_per_layer": 0}])
def test_fedpart_refuses_invalid_options(wrong: dict[str, int]) -> None:
    with pytest.raises(MethodError, match=r"method.full_rounds is"):
        fedpart(**wrong)
