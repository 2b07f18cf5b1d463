"""Reductions of one method to another, bit for bit, and compositions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers import KERNEL, OPTIMIZERS, Clients, ServerMomentum, distance, last, play, run_of, small

from partita.core import tensors
from partita.core.method import ClientRule, Method, MethodError, ServerRule, UpdateTransform, compose
from partita.core.plan import Phase, RoundInfo, plan_for
from partita.core.rounds import RoundResult
from partita.core.tensors import Names
from partita.engines.availability import Availability
from partita.methods.centralized import centralized
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen, frozen_names
from partita.methods.fedprox import fedprox
from partita.methods.local_only import local_only
from partita.storage.client_store import MemoryStore
from partita.testing.toy import Float64Model, Float64Population, PooledPopulation, ToyTransformer

MODEL = small()
FOUR = Clients(a=5, b=6, c=7, d=8)


FEDAVG = fedavg()


@cache
def played(method: Method, optimizer: str = "adamw", count: int = 4, wire: bool = False) -> list[RoundResult]:
    """Half the clients per round, some of which drop out or straggle."""
    run = run_of(method, count, OPTIMIZERS[optimizer], cohort=0.5, min_updates=0)
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
    assert tensors.digest(last(one)) != tensors.digest(MODEL.initial)


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
def test_reductions_bit_for_bit(left: Method, right: Method) -> None:
    assert_same(played(left), played(right))


@pytest.mark.parametrize("left", [fedprox(0.0), fedfrozen(warmup=1.0)], ids=lambda method: method.name)
def test_reductions_under_another_optimizer(left: Method) -> None:
    assert_same(played(left, "nesterov"), played(FEDAVG, "nesterov"))


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
def test_and_otherwise_they_differ(left: Method, right: Method) -> None:
    assert tensors.digest(last(played(left))) != tensors.digest(last(played(right)))


def test_without_warm_up_the_kernel_stays_the_initial_one() -> None:
    for each in played(fedfrozen(warmup=0)):
        assert all(torch.equal(each.server.params[name], MODEL.initial[name]) for name in KERNEL)
        assert not any(name in each.traffic.up for name in KERNEL)


def test_a_stronger_proximal_term_holds_clients_nearer_to_the_anchor() -> None:
    """At this learning rate, mu = 1 / lr = 20 is the largest value at which the penalty does not overshoot."""
    runs = [run_of(fedprox(mu), 1, steps=8) for mu in (0.0, 1.0, 5.0, 20.0)]
    moved = [play(run, MODEL, FOUR)[0].drift["mlp"]["distance"] for run in runs]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 0.5 * moved[0]


def test_centralized_on_one_clients_data_is_local_only_of_that_client() -> None:
    one, states = Clients(a=9), []
    for method in (local_only(), centralized()):
        store = MemoryStore()
        play(run_of(method, 4, OPTIMIZERS["adamw"]), MODEL, one, store=store)
        states.append(store.load("a", 4))
    assert tensors.digest(states[0].personal) == tensors.digest(states[1].personal)
    for slot in ("optimizer.first", "optimizer.second", "optimizer.age"):
        assert tensors.digest(states[0].memory[slot]) == tensors.digest(states[1].memory[slot])


def test_pooling_one_client_is_that_client() -> None:
    pooled, whole = PooledPopulation(Clients(a=9))["pooled"].train, Clients(a=9)["a"].train
    one, two = pooled.take(torch.arange(9)), whole.take(torch.arange(9))
    assert torch.equal(one.inputs["x"], two.inputs["x"])
    assert torch.equal(one.targets, two.targets)


def test_local_only_of_a_client_does_not_depend_on_the_others() -> None:
    stores = MemoryStore(), MemoryStore()
    run = run_of(local_only(), 3, OPTIMIZERS["adamw"])
    play(run, MODEL, FOUR, store=stores[0])
    play(run, MODEL, Clients(c=7), store=stores[1])
    one, two = (store.load("c", 3).personal for store in stores)
    assert tensors.digest(one) == tensors.digest(two)


METHODS = [fedavg(), fedprox(0.3), fedfrozen(2), compose(fedfrozen(1), fedprox(0.3)), local_only()]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_real_messages_change_nothing(method: Method) -> None:
    one, two = played(method), played(method, wire=True)
    for left, right in zip(one, two, strict=True):
        assert tensors.digest(left.server.params) == tensors.digest(right.server.params)
        assert (left.traffic, left.loss) == (right.traffic, right.loss)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_size_of_a_block_does_not_matter(method: Method) -> None:
    model, population = Float64Model(MODEL), Float64Population(FOUR)
    run = run_of(method, 3, OPTIMIZERS["adamw"])
    availability = Availability(trace={(0, "b"): 0.5, (1, "c"): 0.0, (2, "d"): 0.3})
    results = []
    for block in (1, 2, 3):
        store = MemoryStore()
        server = last(play(run, model, population, block=block, availability=availability, store=store))
        own = {
            f"{client}/{name}": value
            for client in FOUR.clients
            for name, value in store.load(client, 3).personal.items()
        }
        results.append({**server, **own})
    for other in results[1:]:
        assert distance(results[0], other) < 1e-9


# ---- FedFrozen's plans


def trains(method: Method, number: int, model: ToyTransformer = MODEL) -> Names:
    return plan_for(method.plan, model, RoundInfo(number, 10, "c")).train


def test_fedfrozen_trains_what_it_says() -> None:
    every = MODEL.all_names()
    assert [trains(fedfrozen(3), number) == every for number in range(5)] == [True, True, True, False, False]
    assert [trains(fedfrozen(0.3), number) == every for number in range(5)] == [True, True, True, False, False]
    assert trains(fedfrozen(0), 0) == every - KERNEL
    assert trains(fedfrozen(0, scope="value"), 0) == MODEL.names("value", "head")
    assert trains(fedfrozen(0, freeze="mlp"), 0) == every - MODEL.names("mlp")
    assert trains(fedfrozen(0, freeze="value"), 0) == every - MODEL.names("value")
    plan = plan_for(fedfrozen(0).plan, MODEL, RoundInfo(0, 10, "c"))
    assert (plan.up, plan.down, plan.keep) == (every - KERNEL, every, frozenset())


def test_a_random_freeze_is_as_large_as_the_kernel_shape_by_shape() -> None:
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
class Slotted(ClientRule):
    slots: Names = frozenset({"h"})


@dataclass(frozen=True)
class Other(ServerRule):
    pass


def test_composing_queues_rules_and_transforms() -> None:
    first, second = UpdateTransform(), UpdateTransform()
    whole = compose(
        Method("a", client_rules=(Slotted(),), transforms=(first,)),
        Method(
            "b", client_rules=fedprox(1.0).client_rules, transforms=(second,), server_rule=Other(), carry_optimizer=True
        ),
        fedfrozen(2),
    )
    assert whole.name == "a+b+fedfrozen"
    assert [type(rule).__name__ for rule in whole.client_rules] == ["Slotted", "FedProxClient"]
    assert whole.transforms == (first, second)
    assert isinstance(whole.server_rule, Other)
    assert trains(whole, 9) == MODEL.all_names() - KERNEL
    assert whole.carry_optimizer
    assert not whole.pool


def tune(model: Any) -> tuple[Phase, ...]:
    return ()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((fedfrozen(1), fedfrozen(2)), "fedfrozen[+]fedfrozen: both set the plan"),
        ((fedfrozen(1), fedavg(), local_only()), "both set the plan"),
        (
            (Method("a", server_rule=Other()), Method("b", server_rule=ServerMomentum())),
            "a[+]b: both set the server's rule",
        ),
        (
            (Method("a", client_rules=(Slotted(),)), Method("b", client_rules=(Slotted(),))),
            "a[+]b: Slotted and Slotted use the slot 'h'",
        ),
        ((Method("a", adapt=tune), Method("b", adapt=lambda model: ())), "both set the adapt"),
    ],
)
def test_a_composition_that_would_have_to_guess_is_refused(parts: tuple[Method, ...], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        compose(*parts)


class Remembering(UpdateTransform):
    slots = frozenset({"h"})


@pytest.mark.parametrize(
    ("rules", "transforms", "owners"),
    [
        ((Slotted(), Slotted()), (), "Slotted and Slotted"),
        ((Slotted(),), (Remembering(),), "Slotted and Remembering"),
        ((), (Remembering(), Remembering()), "Remembering and Remembering"),
    ],
)
def test_a_method_with_one_slot_twice_is_refused(rules: Any, transforms: Any, owners: str) -> None:
    with pytest.raises(MethodError, match=f"m: {owners} use the slot 'h'; use one of them"):
        Method("m", client_rules=rules, transforms=transforms)


def test_composing_one_method_gives_it_back() -> None:
    method = replace(fedprox(0.1), adapt=tune)
    assert compose(method) == method
