"""Begin and end of a client's round, without training: what hooks are given, and what becomes of their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import toy_run
from line_model import Line, line_batch

from partita.core.batch_schedule import group_by_length, poisson_batches, shuffled_batches
from partita.core.client import (
    OPTIMIZER_PREFIX,
    ClientError,
    ClientRound,
    ClientState,
    Job,
    LocalResult,
    adaptation_round,
    begin_round,
    finish_round,
)
from partita.core.client_rule import ClientRule, Context, ForbiddenData, LayerSelection, PrivacyRelease
from partita.core.data import Batch, Examples
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.plan import Phase, Plan, RoundInfo
from partita.core.rng import Key
from partita.core.settings import Run, RunError
from partita.core.tensors import Slots, Tensors
from partita.core.update import DeltaFacts, Update
from partita.core.update_transform import UpdateTransform

MODEL = Line()
W, B, BOTH = frozenset({"w"}), frozenset({"b"}), MODEL.all_names()
JOB = Job(2, "c", {"w": torch.tensor([5.0, 6.0])}, W, {"sent": {"w": torch.ones(2)}}, {"warm": 1.0})
PRIVATE = PrivacySettings(clip=1.0, noise=1.0)


class FiveExamples:
    def __len__(self) -> int:
        return 5

    def take(self, indices: torch.Tensor) -> Batch:
        return line_batch(len(indices))


def keep_b(model: object, round_info: RoundInfo) -> Plan:
    return Plan((Phase(BOTH), Phase(B, epochs=2)), up=W, down=W, keep=B)


def make_run(*rules: ClientRule, transforms: tuple[UpdateTransform, ...] = (), **more: Any) -> Run:
    own = {key: more.pop(key) for key in ("privacy", "carry_optimizer", "shape") if key in more}
    return toy_run(Method("m", keep_b, rules, transforms, **own), 4, **more)


def begin(run: Run, state: ClientState | None = None, fraction: float = 1.0) -> ClientRound:
    return begin_round(run, MODEL, JOB, state or ClientState(), FiveExamples(), fraction)


def trained(losses: tuple[float, ...] = (1.0, 2.0, 6.0), optimizer: Slots | None = None) -> LocalResult:
    delta = {"w": torch.ones(2)}
    params = {"w": JOB.params["w"] + 1, "b": torch.tensor(9.0)}
    return LocalResult(params, {"w": 2, "b": 6}, losses, optimizer or {}, DeltaFacts(delta, True))


# ---- the beginning


def test_round_begins_with_sent_kept_and_initial_parameters() -> None:
    for state, b in ((ClientState(), 0.5), (ClientState({"b": torch.tensor(7.0)}), 7.0)):
        ctx = begin(make_run(), state).ctx
        assert {name: value.tolist() for name, value in ctx.anchor.items()} == {"w": [5.0, 6.0], "b": b}
    assert ctx.sent is JOB.slots
    assert (ctx.round_info.round, ctx.round_info.client, ctx.round_info.signal) == (2, "c", {"warm": 1.0})
    assert ctx.notes == {}


@pytest.mark.parametrize("secret", [None, Key(99)])
def test_batches_follow_the_key_of_round_client_and_phase(secret: Key | None) -> None:
    """The secret key, where there is one."""
    run = make_run(secret=secret)
    begun = begin(run)
    key = (secret or run.key) / "round" / 2 / "client" / "c"
    assert begun.key == key
    for place, (schedule, epochs) in enumerate(zip(begun.schedules, (None, 2), strict=True)):
        expected = shuffled_batches(5, run.training, epochs, key / "batches" / place)
        assert (schedule.order.tolist(), schedule.sizes) == (expected.order.tolist(), expected.sizes)


@pytest.mark.parametrize(
    ("privacy", "make"),
    [
        (None, shuffled_batches),
        (PRIVATE, poisson_batches),
        (replace(PRIVATE, sampling="shuffle"), shuffled_batches),
    ],
)
def test_batches_are_sampled_as_the_privacy_settings_say(privacy: PrivacySettings | None, make: Any) -> None:
    run = make_run(privacy=privacy)
    begun = begin(run)
    expected = make(5, run.training, None, begun.key / "batches" / 0)
    assert (begun.schedules[0].order.tolist(), begun.schedules[0].sizes) == (expected.order.tolist(), expected.sizes)
    assert begun.dp_settings is privacy


class FiveTexts(FiveExamples):
    def lengths(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.tensor([3, 9, 1, 9, 5])[indices]


def test_texts_are_grouped_by_their_lengths_in_every_phase() -> None:
    run = make_run(group_by_length=True)
    begun = begin_round(run, MODEL, JOB, ClientState(), FiveTexts())
    lengths = torch.tensor([3, 9, 1, 9, 5])
    for schedule, plain in zip(begun.schedules, begin(make_run()).schedules, strict=True):
        assert lengths[schedule.order].tolist() == [9, 9, 5, 3, 1] * (len(plain) // 2)
        assert torch.equal(schedule.order, group_by_length(plain, lengths, run.training).order)
    with pytest.raises(
        RunError, match=r"^training\.group_by_length needs texts, and .* have no lengths.*; leave it out$"
    ):
        begin(run)


def test_straggler_takes_the_given_fraction_of_its_steps() -> None:
    assert [len(schedule) for schedule in begin(make_run(), fraction=0.5).schedules] == [1, 2]
    assert [len(schedule) for schedule in begin(make_run()).schedules] == [2, 4]


class Remembering(ClientRule):
    slots = frozenset({"seen", "more"})

    def memory(self, anchor: Tensors) -> Slots:
        return {"seen": {"w": 2 * anchor["w"]}}


def test_memory_is_that_of_the_rules_until_the_client_has_stored_its_own() -> None:
    """Slots of transforms and of the optimizer are not the rules' memory."""
    run = make_run(Remembering())
    assert begin(run).ctx.memory["seen"]["w"].tolist() == [10.0, 12.0]
    stored = {"seen": {"w": torch.zeros(2)}, "other": {"w": torch.ones(2)}}
    memory = begin(run, ClientState({}, stored)).ctx.memory
    assert memory == {"seen": stored["seen"]}


class StrayMemory(ClientRule):
    slots = frozenset({"seen"})

    def memory(self, anchor: Tensors) -> Slots:
        return {"seen": {}, "stray": {}}


def test_memory_with_a_slot_of_another_rule_is_refused() -> None:
    with pytest.raises(ClientError, match="client 'c': StrayMemory returns the slot 'stray', which is not in its"):
        begin(make_run(StrayMemory()))


@dataclass
class Selecting(ClientRule):
    """Selects names, and records what it was given."""

    names: frozenset[str]
    number: float = 0.0
    uses_data: bool = False
    release = PrivacyRelease("names", noise=1.0, share=1.0)

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        self.given = plan, probe, ctx, key
        note = {f"note{self.number:g}": {"w": torch.ones(1)}}
        return LayerSelection(self.names, note, {f"metric{self.number:g}": self.number})


def test_rules_narrow_the_plan_in_turn_with_keys_of_their_own() -> None:
    first, second = Selecting(W, 1.0), Selecting(BOTH, 2.0)
    begun = begin(make_run(ClientRule(), first, second))
    assert begun.plan.train == begun.ctx.plan.train == W
    assert first.given[0].train == BOTH
    assert second.given[0].train == W
    assert first.given[2].plan.train == second.given[2].plan.train == BOTH
    assert first.given[2].notes == second.given[2].notes == {}
    assert [rule.given[3] for rule in (first, second)] == [begun.key / "narrow" / place for place in (1, 2)]
    assert begun.ctx.notes.keys() == {"note1", "note2"}
    assert begun.metrics == {"metric1": 1.0, "metric2": 2.0}


@pytest.mark.parametrize(
    ("privacy", "uses_data", "hidden"),
    [(None, False, False), (None, True, False), (PRIVATE, False, True), (PRIVATE, True, False)],
)
def test_examples_are_hidden_from_rules_that_do_not_declare_their_use(
    privacy: PrivacySettings | None, uses_data: bool, hidden: bool
) -> None:
    rule = Selecting(BOTH, uses_data=uses_data)
    begin(make_run(rule, privacy=privacy))
    assert isinstance(rule.given[1], ForbiddenData) == hidden


@dataclass
class Starting(ClientRule):
    """Starts from given values, and records what it was given."""

    values: Tensors
    number: float = 0.0
    uses_data: bool = False
    release = PrivacyRelease("start", noise=1.0, share=1.0)

    def start(self, params: Tensors, examples: Examples, ctx: Context, key: Key) -> tuple[Tensors, Slots]:
        self.given = params, examples, ctx, key
        return self.values, {f"start{self.number:g}": {"w": torch.ones(1)}}


def test_rules_choose_the_start_in_turn_after_all_have_narrowed_the_plan() -> None:
    first, second = Starting({"w": torch.zeros(2)}, 1.0), Starting({}, 2.0)
    begun = begin(make_run(ClientRule(), first, second, Selecting(W, 3.0)))
    assert {name: value.tolist() for name, value in begun.start.items()} == {"w": [0.0, 0.0]}
    assert begun.ctx.anchor["w"].tolist() == [5.0, 6.0]
    assert [rule.given[0]["w"].tolist() for rule in (first, second)] == [[5.0, 6.0], [0.0, 0.0]]
    assert first.given[0]["b"] is second.given[0]["b"] is begun.ctx.anchor["b"]
    for place, rule in ((1, first), (2, second)):
        _, examples, ctx, key = rule.given
        assert (len(examples), ctx.plan.train, ctx.notes.keys(), ctx.round_info.round) == (5, W, {"note3"}, 2)
        assert key == begun.key / "start" / place
    assert begun.ctx.notes.keys() == {"note3", "start1", "start2"}


def test_start_is_not_called_if_no_training_follows() -> None:
    rule = Starting({"stray": torch.zeros(2)})
    begun = begin_round(make_run(rule), MODEL, JOB, ClientState(), FiveExamples(), trains=False)
    assert (begun.start, begun.ctx.notes) == ({}, {})
    assert not hasattr(rule, "given")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"b": torch.tensor(1.0), "a": torch.zeros(1)},
            "'a', which does not train in this round; return only names in",
        ),
        ({"w": torch.zeros(3)}, r"'w' of shape \(3,\) and type torch.float32, but the parameter has shape \(2,\)"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, "'w' of shape .2,. and type torch.float64, but .* torch.float32"),
    ],
)
def test_start_with_another_name_shape_or_type_is_refused(values: Tensors, said: str) -> None:
    with pytest.raises(MethodError, match=rf"m: Starting\.start returns {said}"):
        begin(make_run(Starting(values)))


def test_start_with_a_name_that_was_narrowed_away_is_refused() -> None:
    with pytest.raises(MethodError, match="'b', which does not train in this round"):
        begin(make_run(Selecting(W), Starting({"b": torch.tensor(1.0)})))


@pytest.mark.parametrize(
    ("privacy", "uses_data", "hidden"),
    [(None, False, False), (None, True, False), (PRIVATE, False, True), (PRIVATE, True, False)],
)
def test_examples_are_hidden_from_a_start_that_does_not_declare_their_use(
    privacy: PrivacySettings | None, uses_data: bool, hidden: bool
) -> None:
    rule = Starting({}, uses_data=uses_data)
    begin(make_run(rule, privacy=privacy))
    assert isinstance(rule.given[1], ForbiddenData) == hidden


def test_model_of_a_client_is_the_one_that_the_method_shapes() -> None:
    other = Line()
    seen: list[RoundInfo] = []

    def shape(model: object, round_info: RoundInfo) -> Line:
        seen.append(round_info)
        return other

    assert begin(make_run(shape=shape)).ctx.model is other
    assert seen[0].client == "c"
    assert begin(make_run()).ctx.model is MODEL


def test_adaptation_trains_its_phases_without_rules_or_memory() -> None:
    run = make_run(Remembering(), privacy=PRIVATE, secret=Key(99))
    phases = (Phase(W, epochs=3),)
    begun = adaptation_round(run, MODEL, JOB, ClientState({"b": torch.tensor(7.0)}), FiveExamples(), phases)
    assert (begun.plan.phases, begun.plan.up, begun.plan.down, begun.plan.keep) == (
        phases,
        frozenset(),
        frozenset(),
        BOTH,
    )
    assert begun.ctx.anchor["b"].item() == 7.0
    assert (begun.ctx.sent, begun.ctx.memory, begun.dp_settings) == ({}, {}, None)
    assert begun.key == run.key / "round" / 2 / "client" / "c" / "adapt"
    assert [len(schedule) for schedule in begun.schedules] == [6]


# ---- the end


def test_update_has_the_delta_the_mean_loss_and_the_number_of_examples() -> None:
    learned = trained()
    update, state = finish_round(make_run(), begin(make_run()), learned)
    assert update.delta is learned.delta
    assert (update.client, update.round, update.weight, update.loss) == ("c", 2, 5.0, 3.0)
    assert (update.steps, update.slots, update.facts) == ({"w": 2, "b": 6}, {}, learned.facts)
    assert state.personal["b"].item() == 9.0
    assert state.memory == {}


def test_update_without_steps_or_under_privacy_has_no_loss() -> None:
    assert finish_round(make_run(), begin(make_run()), trained(()))[0].loss is None
    run = make_run(privacy=PRIVATE)
    assert finish_round(run, begin(run), trained((1.0, float("nan"))))[0].loss is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_loss_that_is_not_finite_names_its_step(wrong: float) -> None:
    with pytest.raises(ClientError, match=f"client 'c': the loss is {wrong} at step 2 of 3 in round 2;"):
        finish_round(make_run(), begin(make_run()), trained((1.0, wrong, 1.0)))


def test_kept_name_that_did_not_train_stays_at_its_anchor() -> None:
    run, state = make_run(), ClientState({"b": torch.tensor(7.0), "old": torch.tensor(1.0)})
    learned = replace(trained(), params={"w": JOB.params["w"]})
    _, after = finish_round(run, begin(run, state), learned)
    assert {name: value.item() for name, value in after.personal.items()} == {"b": 7.0, "old": 1.0}


class Finishing(Remembering):
    """Sends and remembers for all names."""

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        return {"more": dict(params)}, {"seen": {"b": params["b"]}}


def test_rule_results_are_restricted_and_merged_into_the_memory() -> None:
    """Sent slots to names that travel; remembered ones name by name into what the client had."""
    run = make_run(ClientRule(), Finishing())
    stored = ClientState({}, {"seen": {"w": torch.zeros(2)}, "other": {"w": torch.ones(2)}})
    update, state = finish_round(run, begin(run, stored), trained())
    assert update.slots.keys() == {"more"}
    assert update.slots["more"].keys() == W
    assert update.slots["more"]["w"].tolist() == [6.0, 7.0]
    assert state.memory.keys() == {"seen", "other"}
    assert {name: value.tolist() for name, value in state.memory["seen"].items()} == {"w": [0.0, 0.0], "b": 9.0}
    assert stored.memory["seen"].keys() == W, "the state before the round is not changed"


@pytest.mark.parametrize("carry", [True, False])
def test_optimizer_state_is_carried_only_if_the_method_asks(carry: bool) -> None:
    run = make_run(carry_optimizer=carry)
    slot = f"{OPTIMIZER_PREFIX}momentum"
    stored = ClientState({}, {slot: {"b": torch.tensor(1.0)}, "other": {}})
    begun = begin(run, stored)
    assert begun.optimizer == ({"momentum": stored.memory[slot]} if carry else {})
    _, state = finish_round(run, begun, trained(optimizer={"momentum": {"w": torch.ones(2)}}))
    assert state.memory[slot].keys() == (BOTH if carry else B)


@dataclass
class Counting(UpdateTransform):
    """Adds to the weight, and remembers a number by name."""

    own: str
    slots: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.slots = frozenset({self.own})

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        self.given = memory, key
        return replace(update, weight=update.weight * 2 + 1), {self.own: {"w": torch.ones(2), "b": torch.ones(())}}


def test_transforms_encode_in_turn_with_their_own_memory_and_keys() -> None:
    """They remember only names that travel, merged into what they had."""
    first, second = Counting("one"), Counting("two")
    run = make_run(transforms=(first, second))
    stored = ClientState({}, {"one": {"old": torch.zeros(1)}, "three": {}})
    begun = begin(run, stored)
    update, state = finish_round(run, begun, trained())
    assert update.weight == 23.0
    assert first.given[0] == {"one": stored.memory["one"]}
    assert second.given[0] == {}
    assert [each.given[1] for each in (first, second)] == [begun.key / "channel" / place for place in (0, 1)]
    assert {slot: set(part) for slot, part in state.memory.items()} == {
        "one": {"old", "w"},
        "two": {"w"},
        "three": set(),
    }


def test_state_holds_copies_of_views() -> None:
    """A view would keep the tensors of the whole block alive."""
    block = torch.ones(3, 2)
    run = make_run(Finishing())
    learned = replace(trained(), params={"w": block[0], "b": torch.ones(3)[1]})
    _, state = finish_round(run, begin(run), learned)
    for part in (state.personal, state.memory["seen"]):
        assert all(value.untyped_storage().nbytes() == 4 * value.numel() for value in part.values())
