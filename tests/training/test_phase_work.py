"""What a phase starts from: copies of what it trains, and what all clients share without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import toy_run
from line_model import Line

from partita.core import tensors
from partita.core.client_rule import ClientRule, Context
from partita.core.method import Method
from partita.core.optim import SGD, AdamW, Optimizer
from partita.core.plan import Phase, Plan
from partita.core.tensors import Names, Slots, Tensors
from partita.training.phase_work import UNUSED, PhaseWork

MODEL = Line()
W, BOTH = frozenset({"w"}), frozenset({"w", "b"})


class RememberingRule(ClientRule):
    slots = frozenset({"seen"})


def make_work(
    clients: int = 1,
    names: Names = BOTH,
    rules: tuple[ClientRule, ...] = (),
    optimizer: Optimizer | None = None,
    starts: Sequence[Tensors] = (),
    moments: Sequence[Slots] = (),
) -> PhaseWork:
    run = toy_run(Method("m", client_rules=rules), optimizer=optimizer)
    plan = Plan((Phase(names),), up=names, down=BOTH)
    contexts = [
        Context(MODEL, plan, MODEL.initial, {"sent": {"w": torch.full((2,), 1.0 + rank)}}, {"seen": {}}, 0.25)
        for rank in range(clients)
    ]
    return PhaseWork(
        run, plan.phases[0], contexts, starts or [MODEL.initial] * clients, moments or [{} for _ in contexts]
    )


@pytest.mark.parametrize("clients", [1, 3])
def test_phase_work_describes_its_clients_names_and_objective(clients: int) -> None:
    work = make_work(clients)
    assert work.axis.count == clients
    assert work.names == ["b", "w"]
    assert work.device == torch.device("cpu")
    assert (work.objective.model, work.objective.lr, work.objective.device_type) == (MODEL, 0.25, "cpu")
    assert work.objective.plan is work.contexts[0].plan


def test_initial_steps_are_the_stored_ages_and_zero_for_names_without_one() -> None:
    assert make_work().initial_steps == {"b": 0, "w": 0}
    aged: Slots = {"age": {"w": torch.tensor(7), "other": torch.tensor(9)}}
    assert make_work(moments=[aged]).initial_steps == {"b": 0, "w": 7}


@pytest.mark.parametrize("clients", [1, 2])
def test_fixed_holds_only_frozen_parameters_when_no_rule_reads_the_rest(clients: int) -> None:
    params, *others = make_work(clients, W).fixed
    assert params[1] is None
    assert params[0].keys() == {"b"}
    assert params[0]["b"] is MODEL.initial["b"]
    assert others == [UNUSED] * 3
    [(nothing, _), *_] = make_work(clients).fixed
    assert nothing == {}


def test_fixed_holds_anchor_slots_and_memory_when_there_are_rules() -> None:
    work = make_work(clients=2, names=W, rules=(RememberingRule(),))
    _, anchor, sent, memory = work.fixed
    assert anchor is work.anchor
    assert anchor[0] is MODEL.initial
    assert anchor[1] is None
    assert sent[1] == {"sent": {"w": 0}}
    assert sent[0]["sent"]["w"].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert memory[0] == {"seen": {}}


def test_stacked_copies_each_clients_trained_parameters() -> None:
    starts = [MODEL.initial, tensors.scale(MODEL.initial, 2.0)]
    trainable, moments = make_work(2, W, starts=starts).stacked()
    assert moments == {}
    assert trainable.keys() == {"w"}
    assert torch.equal(trainable["w"], torch.stack([starts[0]["w"], starts[1]["w"]]))
    alone, _ = make_work(1).stacked()
    assert tensors.equal(alone, MODEL.initial)
    alone["w"].zero_()
    assert MODEL.initial["w"].tolist() == [1.0, -2.0], "a step must not change the start"


def test_stacked_takes_the_stored_optimizer_state_and_zeros_for_what_is_missing() -> None:
    """A client may have no state at all, or none for a name that it never trained."""
    stored: Any = {"momentum": {"w": torch.tensor([3.0, 4.0])}}
    _, moments = make_work(2, optimizer=SGD(momentum=0.9), moments=[stored, {}]).stacked()
    assert moments.keys() == {"momentum"}
    assert moments["momentum"]["w"].tolist() == [[3.0, 4.0], [0.0, 0.0]]
    assert moments["momentum"]["b"].tolist() == [0.0, 0.0]
    _, fresh = make_work(optimizer=AdamW()).stacked()
    assert {slot: {name: value.abs().sum().item() for name, value in part.items()} for slot, part in fresh.items()} == {
        "first": {"b": 0.0, "w": 0.0},
        "second": {"b": 0.0, "w": 0.0},
    }


def test_parameters_that_clients_keep_are_stacked_and_all_others_shared() -> None:
    run = toy_run(Method("m", client_rules=(RememberingRule(),)))
    plan = Plan((Phase(W),), up=W, down=W, keep=frozenset({"b"}))
    contexts = [Context(MODEL, plan, MODEL.initial, {}, {"seen": {"w": MODEL.initial["w"]}}, 0.25) for _ in range(2)]
    work = PhaseWork(run, plan.phases[0], contexts, [MODEL.initial] * 2, [{}, {}])
    (frozen, frozen_dims), (anchor, anchor_dims), _, (memory, memory_dims) = work.fixed
    assert frozen_dims == {"b": 0}
    assert frozen["b"].shape == (2, *MODEL.initial["b"].shape)
    assert anchor_dims == {"w": None, "b": 0}
    assert anchor["w"] is MODEL.initial["w"]
    assert memory_dims == {"seen": {"w": 0}}
    assert memory["seen"]["w"].shape == (2, *MODEL.initial["w"].shape)
