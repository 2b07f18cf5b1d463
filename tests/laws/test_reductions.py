"""Reductions of one method to another, bit for bit, and compositions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers import KERNEL, OPTIMIZERS, Clients, ServerMomentum, final_params, max_difference, play, toy_model, toy_run

from partita.core import tensors
from partita.core.client_rule import ClientRule
from partita.core.compose import compose
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.plan import Phase, RoundInfo, plan_for
from partita.core.rounds import RoundResult
from partita.core.server_rule import ServerRule
from partita.core.tensors import Names
from partita.core.update_transform import UpdateTransform
from partita.engines.availability import Availability
from partita.methods.centralized import centralized
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen, frozen_names
from partita.methods.fedprox import fedprox
from partita.methods.local_only import local_only
from partita.storage.client_store import MemoryStore
from partita.testing.toy import Float64Model, Float64Population, PooledPopulation, ToyTransformer

MODEL = toy_model()
FOUR = Clients(a=5, b=6, c=7, d=8)


FEDAVG = fedavg()


@cache
def play_method(method: Method, optimizer: str = "adamw", count: int = 4, wire: bool = False) -> list[RoundResult]:
    """Half the clients per round, some of which drop out or straggle."""
    run = toy_run(method, count, OPTIMIZERS[optimizer], cohort=0.5, min_updates=0)
    return play(run, MODEL, FOUR, availability=Availability(client_dropout=0.2, straggler_rate=0.3), wire=wire)


def assert_same(one: list[RoundResult], two: list[RoundResult]) -> None:
    for left, right in zip(one, two, strict=True):
        assert tensors.digest(left.server.params) == tensors.digest(right.server.params)
        assert (left.traffic, left.cohort, left.lost, left.loss) == (
            right.traffic,
            right.cohort,
            right.lost,
            right.loss,
        )
    assert tensors.digest(final_params(one)) != tensors.digest(MODEL.initial)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (fedprox(0.0), FEDAVG),
        (fedfrozen(warmup=1.0), FEDAVG),
        (fedfrozen(warmup=4), FEDAVG),
        (fedfrozen(warmup=0.5), fedfrozen(warmup=2)),
        (compose(fedavg(), fedprox(0.3)), fedprox(0.3)),
        (compose(fedprox(0.3), FEDAVG), fedprox(0.3)),
        (compose(fedfrozen(2), fedprox(0.0)), fedfrozen(2)),
        (compose(fedfrozen(2), fedprox(0.3)), compose(fedprox(0.3), fedfrozen(2))),
        (Method("still", server_rule=ServerMomentum(0.0)), FEDAVG),
    ],
    ids=lambda method: method.name,
)
def test_methods_reduce_to_each_other_bit_for_bit(left: Method, right: Method) -> None:
    assert_same(play_method(left), play_method(right))


@pytest.mark.parametrize("left", [fedprox(0.0), fedfrozen(warmup=1.0)], ids=lambda method: method.name)
def test_methods_reduce_to_fedavg_with_nesterov(left: Method) -> None:
    assert_same(play_method(left, "nesterov"), play_method(FEDAVG, "nesterov"))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (fedprox(0.3), FEDAVG),
        (fedfrozen(2), FEDAVG),
        (fedfrozen(1), fedfrozen(2)),
        (compose(fedfrozen(2), fedprox(0.3)), fedfrozen(2)),
        (Method("momentum", server_rule=ServerMomentum(0.5)), FEDAVG),
    ],
)
def test_methods_differ_outside_their_reductions(left: Method, right: Method) -> None:
    assert tensors.digest(final_params(play_method(left))) != tensors.digest(final_params(play_method(right)))


def test_fedfrozen_without_warmup_keeps_the_initial_kernel() -> None:
    for each in play_method(fedfrozen(warmup=0)):
        assert all(torch.equal(each.server.params[name], MODEL.initial[name]) for name in KERNEL)
        assert not any(name in each.traffic.up for name in KERNEL)


def test_stronger_proximal_term_keeps_clients_closer_to_the_anchor() -> None:
    """At this learning rate, mu = 1 / lr = 20 is the largest value at which the penalty does not overshoot."""
    runs = [toy_run(fedprox(mu), 1, steps=8) for mu in (0.0, 1.0, 5.0, 20.0)]
    moved = [play(run, MODEL, FOUR)[0].drift["mlp"]["distance"] for run in runs]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 0.5 * moved[0]


def test_centralized_with_one_client_is_local_only() -> None:
    one, states = Clients(a=9), []
    for method in (local_only(), centralized()):
        store = MemoryStore()
        play(toy_run(method, 4, OPTIMIZERS["adamw"]), MODEL, one, store=store)
        states.append(store.load("a", 4))
    assert tensors.digest(states[0].personal) == tensors.digest(states[1].personal)
    for slot in ("optimizer.first", "optimizer.second", "optimizer.age"):
        assert tensors.digest(states[0].memory[slot]) == tensors.digest(states[1].memory[slot])


def test_pooling_one_client_keeps_its_examples() -> None:
    pooled, whole = PooledPopulation(Clients(a=9))["pooled"].train, Clients(a=9)["a"].train
    one, two = pooled.take(torch.arange(9)), whole.take(torch.arange(9))
    assert torch.equal(one.inputs["x"], two.inputs["x"])
    assert torch.equal(one.targets, two.targets)


def test_local_only_client_does_not_depend_on_others() -> None:
    stores = MemoryStore(), MemoryStore()
    run = toy_run(local_only(), 3, OPTIMIZERS["adamw"])
    play(run, MODEL, FOUR, store=stores[0])
    play(run, MODEL, Clients(c=7), store=stores[1])
    one, two = (store.load("c", 3).personal for store in stores)
    assert tensors.digest(one) == tensors.digest(two)


METHODS = [fedavg(), fedprox(0.3), fedfrozen(2), compose(fedfrozen(1), fedprox(0.3)), local_only()]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_serialized_messages_do_not_change_results(method: Method) -> None:
    one, two = play_method(method), play_method(method, wire=True)
    for left, right in zip(one, two, strict=True):
        assert tensors.digest(left.server.params) == tensors.digest(right.server.params)
        assert (left.traffic, left.loss) == (right.traffic, right.loss)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_block_size_does_not_change_results(method: Method) -> None:
    model, population = Float64Model(MODEL), Float64Population(FOUR)
    run = toy_run(method, 3, OPTIMIZERS["adamw"])
    availability = Availability(trace={(0, "b"): 0.5, (1, "c"): 0.0, (2, "d"): 0.3})
    results = []
    for block in (1, 2, 3):
        store = MemoryStore()
        server = final_params(play(run, model, population, block=block, availability=availability, store=store))
        own = {
            f"{client}/{name}": value
            for client in FOUR.clients
            for name, value in store.load(client, 3).personal.items()
        }
        results.append({**server, **own})
    for other in results[1:]:
        assert max_difference(results[0], other) < 1e-9


# ---- FedFrozen's plans


def trained_names(method: Method, number: int, model: ToyTransformer = MODEL) -> Names:
    return plan_for(method.plan, model, RoundInfo(number, 10, "c")).train


def test_fedfrozen_plan_follows_warmup_scope_and_freeze() -> None:
    every = MODEL.all_names()
    assert [trained_names(fedfrozen(3), number) == every for number in range(5)] == [True, True, True, False, False]
    assert [trained_names(fedfrozen(0.3), number) == every for number in range(5)] == [True, True, True, False, False]
    assert trained_names(fedfrozen(0), 0) == every - KERNEL
    assert trained_names(fedfrozen(0, scope="value"), 0) == MODEL.names("value", "head")
    assert trained_names(fedfrozen(0, freeze="mlp"), 0) == every - MODEL.names("mlp")
    assert trained_names(fedfrozen(0, freeze="value"), 0) == every - MODEL.names("value")
    plan = plan_for(fedfrozen(0).plan, MODEL, RoundInfo(0, 10, "c"))
    assert (plan.up, plan.down, plan.keep) == (every - KERNEL, every, frozenset())


def test_random_freeze_has_the_shapes_of_the_kernel_and_varies() -> None:
    model = ToyTransformer()
    kernel = model.names("query", "key")

    def shapes(names: Names) -> list[tuple[int, ...]]:
        return sorted(tuple(model.initial[name].shape) for name in names)

    drawn = [frozen_names(model, "random", draw) for draw in range(8)]
    assert all(shapes(names) == shapes(kernel) for names in drawn)
    assert len(set(drawn)) > 4
    assert drawn[0] == frozen_names(ToyTransformer(), "random", 0)


# ---- compositions


@dataclass(frozen=True)
class RuleWithSlot(ClientRule):
    slots: Names = frozenset({"h"})


@dataclass(frozen=True)
class OtherServerRule(ServerRule):
    pass


def test_compose_concatenates_rules_and_transforms() -> None:
    first, second = UpdateTransform(), UpdateTransform()
    whole = compose(
        Method("a", client_rules=(RuleWithSlot(),), transforms=(first,)),
        Method(
            "b",
            client_rules=fedprox(1.0).client_rules,
            transforms=(second,),
            server_rule=OtherServerRule(),
            carry_optimizer=True,
        ),
        fedfrozen(2),
    )
    assert whole.name == "a+b+fedfrozen"
    assert [type(rule).__name__ for rule in whole.client_rules] == ["RuleWithSlot", "FedProxClient"]
    assert whole.transforms == (first, second)
    assert isinstance(whole.server_rule, OtherServerRule)
    assert trained_names(whole, 9) == MODEL.all_names() - KERNEL
    assert whole.carry_optimizer
    assert not whole.pool


def no_adaptation(model: Any) -> tuple[Phase, ...]:
    return ()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((fedfrozen(1), fedfrozen(2)), "fedfrozen[+]fedfrozen: both set the plan"),
        ((fedfrozen(1), fedavg(), local_only()), "both set the plan"),
        (
            (Method("a", server_rule=OtherServerRule()), Method("b", server_rule=ServerMomentum())),
            "a[+]b: both set the server's rule",
        ),
        (
            (Method("a", client_rules=(RuleWithSlot(),)), Method("b", client_rules=(RuleWithSlot(),))),
            "a[+]b: RuleWithSlot and RuleWithSlot use the slot 'h'",
        ),
        ((Method("a", adapt=no_adaptation), Method("b", adapt=lambda model: ())), "both set the adapt"),
    ],
)
def test_ambiguous_composition_is_refused(parts: tuple[Method, ...], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        compose(*parts)


class Remembering(UpdateTransform):
    slots = frozenset({"h"})


@pytest.mark.parametrize(
    ("rules", "transforms", "owners"),
    [
        ((RuleWithSlot(), RuleWithSlot()), (), "RuleWithSlot and RuleWithSlot"),
        ((RuleWithSlot(),), (Remembering(),), "RuleWithSlot and Remembering"),
        ((), (Remembering(), Remembering()), "Remembering and Remembering"),
    ],
)
def test_method_with_a_duplicate_slot_is_refused(rules: Any, transforms: Any, owners: str) -> None:
    with pytest.raises(MethodError, match=f"m: {owners} use the slot 'h'; use one of them"):
        Method("m", client_rules=rules, transforms=transforms)


def test_composing_one_method_returns_it() -> None:
    method = replace(fedprox(0.1), adapt=no_adaptation)
    assert compose(method) == method
