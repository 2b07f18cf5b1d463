"""Ranks by client: pieces are whole factors for the full rank, and smaller models for smaller ranks."""

from __future__ import annotations

import pytest
import torch
from adapter_fixtures import ROLES, adapted, clients, updates_of
from architecture_fixtures import make_model
from helpers import play, toy_run

from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.personal_copy import copy_name
from partita.core.plan import Phase, Plan, RoundInfo, plan_for
from partita.core.rng import Key
from partita.methods.client_ranks import rank_by_client
from partita.methods.ditto import ditto
from partita.methods.fedavg import fedavg
from partita.methods.fedper import fedper


@pytest.mark.slow
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
    updates = {update.client: update.delta for update in updates_of(run, model, population)}
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
    update = next(each for each in updates_of(toy_run(rank_by_client(fedavg(), ranks), 1), model, population))
    alone = next(each for each in updates_of(toy_run(fedavg(), 1), small, population))
    for name, value in alone.delta.items():
        assert torch.allclose(update.delta[name.replace(".weight", ".rank1.weight")], value, rtol=0, atol=1e-7)


def test_rank_by_client_refuses_an_adaptation_that_has_no_rank() -> None:
    with pytest.raises(MethodError, match=r"fedper trains a client's copy .* set method.finetune = 0"):
        rank_by_client(fedper(("lora_B",)), {"a": 1})


def test_plan_cuts_what_is_beyond_the_rank_from_every_part_of_the_plan() -> None:
    model = adapted("llama-lm", ranks=(1, 2, 4))
    method = rank_by_client(fedper(("lora_B",), 0), {"a": 2, "b": 4, "c": 2})
    plans = {client: plan_for(method.plan, model, RoundInfo(0, 1, client)) for client in "abcz"}
    held = model.names("rank.1", "rank.2")
    assert plans["a"].train == plans["a"].down | plans["a"].keep == held
    assert plans["a"].keep == held & model.names("lora_B")
    assert plans["a"].up == held & model.names("lora_A")
    assert plans["a"] is plans["c"], "clients of one rank can share a block"
    assert plans["b"].train == plans["z"].train == model.all_names(), "others than the clients of the run have all"


def test_plan_cuts_personal_copies_and_phases_of_which_nothing_is_left() -> None:
    extend = ditto().extend
    assert extend is not None
    model = adapted("llama-lm", ranks=(1, 4))
    copied = extend(model, Key(0))
    plan = plan_for(rank_by_client(ditto(), {"a": 1}).plan, copied, RoundInfo(0, 1, "a"))
    assert plan.train == model.names("rank.1") | {copy_name(name) for name in model.names("rank.1")}
    assert plan.keep == {copy_name(name) for name in model.names("rank.1")}
    small, large = model.names("rank.1"), model.names("rank.4")
    phases = Plan((Phase(large, 2), Phase(small | large, 3)), small | large, small | large)
    cut = rank_by_client(Method("two", plan=lambda model, info: phases), {"a": 1}).plan(model, RoundInfo(0, 1, "a"))
    assert cut == Plan((Phase(small, 3),), small, small)
