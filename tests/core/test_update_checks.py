"""Update validation: what is accepted, what is refused, and what the server rule receives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers import toy_model, toy_run
from torch import Tensor

from partita.core.client_rule import ClientRule, Context, LayerSelection
from partita.core.data import Examples
from partita.core.method import Method
from partita.core.model import Model
from partita.core.packed import PackedTensors, layout_for
from partita.core.plan import Phase, Plan, RoundInfo
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.tensors import Names, Slots, Tensors
from partita.core.update import DeltaFacts, Update
from partita.core.update_checks import (
    CheckedUpdate,
    InvalidUpdate,
    UpdateLimits,
    UpdateValidator,
    _measure,
    readable,
    shorten,
)
from partita.core.update_transform import UpdateTransform
from partita.methods.fedavg import fedavg
from partita.methods.scaffold import scaffold
from partita.privacy.client_level import protect_clients

SIZES = {"a": 10, "b": 6, "unknown": 0}
EVERY = frozenset(toy_model().initial)
SOME = frozenset({"embed.weight", "layers.0.key.bias"})


@dataclass
class ValidatorSetup:
    """A validator for one run. Ten examples in batches of four are three steps."""

    method: Method = field(default_factory=fedavg)
    settings: dict[str, Any] = field(default_factory=dict)
    model: Model = field(default_factory=toy_model)

    def __post_init__(self) -> None:
        self.run = toy_run(self.method, **{"examples": SIZES, **self.settings})
        self.server = initial_server(self.run, self.model)
        self.limits = UpdateLimits(self.run, self.model)
        self.plan = make_job(self.run, self.model, self.server, 0, "a")[1]
        self.inspector = UpdateValidator(
            self.limits, self.server, 0, lambda client: make_job(self.run, self.model, self.server, 0, client)[0]
        )

    def update(self, names: Names = EVERY, **changes: Any) -> Update:
        """An update with norm 1 in each of these names."""
        delta = {name: unit_tensor(self.model.initial[name]) for name in sorted(names)}
        return replace(Update("a", delta, {}, 10.0, dict.fromkeys(delta, 1), 0.5), **changes)

    def check(self, update: Update) -> CheckedUpdate:
        return self.inspector.check(update, self.plan)

    def refuses(self, update: Update, said: str) -> None:
        with pytest.raises(InvalidUpdate, match=said):
            self.check(update)


def unit_tensor(like: Tensor) -> Tensor:
    value = torch.zeros_like(like)
    value.view(-1)[0] = 1.0
    return value


class CustomMapping(Mapping[Any, Any]):
    """A client's own mapping type, which must be read only once."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self.values_ = values

    def __getitem__(self, name: Any) -> Any:
        return self.values_[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


class SelectEverything(ClientRule):
    """Selects by data, so its clients may report scores and send fewer names."""

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        return LayerSelection(plan.train)


class SelectSome(ClientRule):
    """Selects without data, so the server knows what each client sends."""

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        return LayerSelection(SOME)


# ---- numbers


@pytest.mark.parametrize("weight", [10, 10.0, 0.001])
def test_weight_up_to_the_number_of_examples_passes(weight: float) -> None:
    desk = ValidatorSetup()
    assert desk.check(desk.update(weight=weight)).update.weight == weight


@pytest.mark.parametrize("weight", [0, -1.0, 10.001, math.nan, math.inf, 10**400, True, "5", None])
def test_weight_beyond_the_number_of_examples_or_no_number_is_refused(weight: object) -> None:
    desk = ValidatorSetup()
    desk.refuses(desk.update(weight=weight), "sent the weight .* above 0 and at most 10")


def test_weight_of_unknown_client_is_bounded_by_max_examples_with_one_warning() -> None:
    desk = ValidatorSetup(settings={"max_examples": 50})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [desk.limits.examples(client) for client in ("a", "unknown", "unknown", "stranger", "b")]
    assert found == [10, 50, 50, 50, 6]
    [warning] = caught
    assert "federation.max_examples = 50" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ValidatorSetup(settings={"max_examples": 50, "examples": None}).limits.examples("a") == 50


@pytest.mark.parametrize("loss", [None, 0, 0.5, 1e9, -1e9])
def test_loss_may_be_none_or_a_plausible_number(loss: float | None) -> None:
    desk = ValidatorSetup()
    assert desk.check(desk.update(loss=loss)).update.loss == loss


@pytest.mark.parametrize("loss", [1.001e9, -1.001e9, math.nan, -math.inf, 10**400, False, "0.5"])
def test_implausible_loss_is_refused(loss: object) -> None:
    desk = ValidatorSetup()
    desk.refuses(desk.update(loss=loss), "sent the loss")


@pytest.mark.parametrize("steps", [0, -1, 4, 2.0, True, None, "1"])
def test_steps_must_be_integers_within_the_possible_range(steps: object) -> None:
    desk = ValidatorSetup()
    for fine in (1, 3):
        desk.check(desk.update(steps=dict.fromkeys(EVERY, fine)))
    taken = {**dict.fromkeys(EVERY, 1), "head.weight": steps}
    desk.refuses(desk.update(steps=taken), "sent 'head.weight' after .* a whole number from 1 to 3")
    desk.refuses(desk.update(steps={name: 1 for name in EVERY if name != "head.weight"}), "after None steps")
    desk.refuses(desk.update(steps={**dict.fromkeys(EVERY, 1), "new": 1}), "sent steps of 'new'")


def test_step_limits_of_two_phases_add_up() -> None:
    def plan(model: Model, round_info: RoundInfo) -> Plan:
        return Plan((Phase(EVERY, 2), Phase(SOME, 3)), up=EVERY, down=EVERY)

    desk = ValidatorSetup(Method("twice", plan))
    assert desk.limits.steps(desk.plan, 10) == {name: 15 if name in SOME else 6 for name in EVERY}


def test_metrics_are_limited_in_number_name_layer_and_value() -> None:
    desk = ValidatorSetup(Method("telling", client_rules=(ClientRule(), SelectEverything())))
    for told in (
        {f"score/{number}": 1e9 for number in range(1024)},
        {"x" * 64: -1.0, "score/layer.0": 3, f"{'x' * 64}/{'y' * 64}": 0.0},
    ):
        assert desk.check(desk.update(metrics=told)).update.metrics == told
    for wrong, said in (
        ({f"{number}": 1.0 for number in range(1025)}, "sent 1025 metrics; .* at most 1024"),
        ({"x" * 65: 1.0}, "a name has letters, digits"),
        ({"a/b/c": 1.0}, "a name has letters, digits"),
        ({"a b": 1.0}, "a name has letters, digits"),
        ({5: 1.0}, "a metric named 5; a name has letters, digits"),
        ({"score/layer.1": 1.0}, "a metric of 'layer.1'"),
        ({"score": 1.001e9}, "for the metric 'score'; it must be a number from -1e"),
        ({"score": math.nan}, "for the metric 'score'"),
        ({"score": True}, "for the metric 'score'"),
    ):
        desk.refuses(desk.update(metrics=wrong), said)
    plain = ValidatorSetup()
    plain.refuses(plain.update(metrics={"score": 1.0}), "sent 1 metrics; clients of fedavg send at most 0")


# ---- tensors


def test_delta_must_have_planned_names_shapes_and_dtypes() -> None:
    desk = ValidatorSetup()
    desk.check(desk.update(SOME))
    for name, value, said in (
        ("new", torch.ones(2), "sent 'new', which its plan does not send up in round 0"),
        ("embed.weight", torch.ones(4), r"of shape \(4,\), not \(4, 4\)"),
        ("embed.weight", torch.ones(4, 4).double(), "as torch.float64 on cpu, not torch.float32 on cpu"),
    ):
        update = desk.update(SOME)
        desk.refuses(replace(update, delta={**update.delta, name: value}), said)


def packed_row(delta: Mapping[str, Tensor]) -> PackedTensors:
    form = layout_for(tuple(delta), tuple(value.shape for value in delta.values()))
    [row] = form.per_client(form.pack([value.unsqueeze(0) for value in delta.values()]))
    return row


def test_packed_deltas_with_bad_steps_or_names_are_refused() -> None:
    desk = ValidatorSetup()
    update = desk.update()
    row, fine, wrong = packed_row(update.delta), dict.fromkeys(EVERY, 3), dict.fromkeys(EVERY, 4)
    desk.refuses(replace(update, delta=row, steps=wrong), "a whole number from 1 to 3")
    for _ in range(2):
        checked = desk.check(replace(update, delta=row, steps=fine))
        assert checked.update.delta is row
        assert checked.norm == pytest.approx(math.sqrt(len(EVERY)))
    desk.refuses(replace(update, delta=row, steps=wrong), "a whole number from 1 to 3")
    stray = packed_row({**update.delta, "new": torch.ones(1)})
    desk.refuses(replace(update, delta=stray), "sent 'new', which its plan does not send up")


def test_norm_limit_is_a_thousand_times_the_initial_norm_and_at_least_a_thousand() -> None:
    limits = ValidatorSetup().limits
    large, tiny = frozenset({"embed.weight", "head.weight"}), frozenset({"head.weight"})
    limits.model.initial["head.weight"] = torch.full((3, 4), 1e-3)
    limits.model.initial["embed.weight"] = torch.full((4, 4), 3.0)
    wanted = {tiny: 1000.0, large: 1000 * math.sqrt(16 * 9 + 12e-6)}
    for names in (tiny, large, tiny, large):
        assert limits.norm(names) == pytest.approx(wanted[names], rel=1e-6)


def test_update_above_the_norm_limit_is_refused() -> None:
    desk = ValidatorSetup()
    limit = desk.limits.norm(frozenset({"head.weight"}))
    for factor, fine in ((0.999, True), (1.001, False)):
        update = desk.update(frozenset({"head.weight"}))
        update = replace(update, delta={"head.weight": update.delta["head.weight"] * limit * factor})
        if fine:
            assert desk.check(update).norm == pytest.approx(0.999 * limit)
        else:
            desk.refuses(update, "is implausible")


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_error_names_the_tensor_that_is_not_finite(wrong: float) -> None:
    desk = ValidatorSetup()
    for container in (dict, packed_row):
        update = desk.update()
        delta = {**update.delta, "head.weight": torch.full((3, 4), wrong)}
        desk.refuses(replace(update, delta=container(delta)), "sent 'head.weight' with values that are not finite")


def test_finite_values_whose_norm_overflows_are_refused() -> None:
    """Only float64 values are this large. The overflow must not raise another error."""
    part = {name: torch.full((1,), 1.2e154, dtype=torch.float64) for name in ("b", "a", "c")}
    update = ValidatorSetup().update()
    assert _measure(replace(update, delta={"a": part["a"]})).square == pytest.approx(1.2e154**2)
    with pytest.raises(InvalidUpdate, match="sent 'a' with values that are not finite"):
        _measure(replace(update, delta=part))


@pytest.mark.parametrize("container", [dict, packed_row])
def test_known_facts_of_finite_deltas_are_not_measured_again(container: Any) -> None:
    delta = container({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})

    def measured(facts: DeltaFacts | None) -> tuple[float | None, Mapping[str, float] | None]:
        found = _measure(replace(ValidatorSetup().update(), delta=delta, facts=facts))
        assert found.finite
        assert found.delta is delta
        return found.square, found.squares

    truth = (25.0, {"a": 9.0, "b": 16.0})
    claims: dict[str, Any] = {"square": 49.0, "squares": {"a": 36.0, "b": 13.0}}
    assert measured(None) == truth
    assert measured(DeltaFacts(delta, True)) == truth, "norms are not known"
    assert measured(DeltaFacts(delta, False, **claims)) == truth, "a client of the same block may not be finite"
    assert measured(DeltaFacts(delta, True, **claims)) == (49.0, claims["squares"])
    assert measured(DeltaFacts(dict(delta), True, **claims)) == truth, "facts about another object"


@pytest.mark.parametrize("facts", [5, {"finite": True}])
def test_facts_of_another_type_are_refused(facts: Any) -> None:
    with pytest.raises(InvalidUpdate, match="sent facts as"):
        readable(replace(ValidatorSetup().update(), facts=facts))


def test_an_update_that_passed_carries_facts_about_its_delta() -> None:
    desk = ValidatorSetup()
    update = desk.check(desk.update()).update
    facts = update.known_facts()
    assert facts is not None
    assert facts.finite
    assert facts.squares == pytest.approx(dict.fromkeys(EVERY, 1.0))
    assert desk.check(update).update is update, "nothing to copy"
    assert replace(update, delta=dict(update.delta)).known_facts() is None, "a new delta has no facts"


def test_update_above_max_norm_is_scaled_with_its_slots() -> None:
    for bound, bounded in ((None, False), (6.0, False), (5.0, False), (2.5, True)):
        desk = ValidatorSetup(scaffold(), {"max_norm": bound})
        update = desk.update(SOME)
        delta = {
            "embed.weight": 3 * unit_tensor(torch.zeros(4, 4)),
            "layers.0.key.bias": 4 * unit_tensor(torch.zeros(4)),
        }
        slots = {"control": {name: 2 * value for name, value in delta.items()}}
        checked = desk.check(replace(update, delta=delta, slots=slots))
        assert (checked.norm, checked.bounded) == (5.0, bounded)
        factor = 0.5 if bounded else 1.0
        for name, value in delta.items():
            assert torch.equal(checked.update.delta[name], factor * value)
            assert torch.equal(checked.update.slots["control"][name], factor * 2 * value)


# ---- slots


def with_control(update: Update, names: Names) -> Update:
    control = {name: torch.zeros_like(toy_model().initial[name]) for name in sorted(names)}
    return replace(update, slots={"control": control})


def test_slot_must_cover_exactly_the_honest_names() -> None:
    desk = ValidatorSetup(replace(scaffold(), client_rules=(ClientRule(), *scaffold().client_rules)))
    desk.check(with_control(desk.update(), EVERY))
    desk.check(with_control(desk.update(SOME), SOME))
    count = len(EVERY)
    desk.refuses(desk.update(), f"sent the slot 'control' for none; an honest update has it for {count} names")
    desk.refuses(with_control(desk.update(), SOME), f"for 2 names; an honest update has it for {count} names")
    desk.refuses(with_control(desk.update(SOME), EVERY), f"for {count} names; an honest update has it for 2 names")
    desk.refuses(replace(desk.update(SOME), slots={**with_control(desk.update(), SOME).slots, "x": {}}), "the slot 'x'")
    alone = ValidatorSetup(scaffold())
    alone.refuses(alone.update(), "sent the slot 'control' for none")
    plain = ValidatorSetup()
    plain.refuses(with_control(plain.update(), EVERY), "sent the slot 'control', which fedavg does not have")


def test_error_names_the_first_unplanned_name() -> None:
    """A name that is not a string must not end the check with another error."""
    desk = ValidatorSetup(scaffold())
    update = desk.update(SOME)
    for stray, said in (({"zz": 1, "y": 1}, "sent 'y'"), ({"zz": 1, 5: 1}, "sent 5")):
        delta: Any = {**update.delta, **dict.fromkeys(stray, torch.ones(1))}
        desk.refuses(with_control(replace(update, delta=delta), SOME), said)


def test_implausibly_large_slot_is_refused() -> None:
    desk = ValidatorSetup(scaffold())
    update = with_control(desk.update(SOME), SOME)
    limit = desk.limits.norm(SOME) / 0.05
    for factor, fine in ((0.99, True), (1.01, False)):
        control = {**update.slots["control"], "layers.0.key.bias": unit_tensor(torch.zeros(4)) * limit * factor}
        each = replace(update, slots={"control": control})
        if fine:
            desk.check(each)
        else:
            desk.refuses(each, "sent the slot 'control' of norm .* implausible")


class SlotFromFullContext(ClientRule):
    """Sends a slot only if its context is as in training: with kept names and round info."""

    slots = frozenset({"seen"})

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        assert ctx.round_info is not None
        full = "head.weight" in ctx.plan.train and "head.weight" in steps and ctx.round_info.client == "a"
        return ({"seen": dict(params)} if full else {}), {"seen": {}}


def test_honest_slots_are_computed_with_the_full_training_context() -> None:
    up = EVERY - {"head.weight"}

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        return Plan((Phase(EVERY),), up=up, down=up, keep=EVERY - up)

    desk = ValidatorSetup(Method("keeping", plan, client_rules=(SlotFromFullContext(),)))
    assert desk.inspector._honest_slots("a", desk.plan, up) == {"seen": up}
    assert desk.inspector._honest_slots("a", desk.plan, SOME) == {"seen": SOME}


class MemoryOnlySlot(ClientRule):
    """Keeps a slot in its memory and sends none."""

    slots = frozenset({"seen"})


def test_slot_kept_only_in_memory_is_refused_when_sent() -> None:
    desk = ValidatorSetup(Method("remembering", client_rules=(MemoryOnlySlot(),)))
    update = desk.update(SOME)
    desk.check(update)
    slots = {"seen": {"head.weight": torch.zeros(3, 4)}}
    desk.refuses(replace(update, slots=slots), "sent the slot 'seen' for 1 names; an honest update has it for none")


class DataDependentSlot(ClientRule):
    """The slots it sends depend on its training data, so the server cannot know them."""

    slots = frozenset({"seen"})

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        raise KeyError("what was seen")


def test_data_dependent_slot_may_cover_only_names_in_the_delta() -> None:
    desk = ValidatorSetup(Method("looking", client_rules=(DataDependentSlot(),)))
    update = desk.update(SOME)

    def sent(*names: str) -> Update:
        return replace(update, slots={"seen": {name: unit_tensor(toy_model().initial[name]) for name in names}})

    desk.check(update)
    desk.check(sent("embed.weight"))
    desk.check(sent(*SOME))
    desk.refuses(sent(*SOME, "head.weight"), "for 3 names; an honest update has it for 2 names")


# ---- client-level privacy


def test_client_level_privacy_requires_equal_names_and_hides_norms() -> None:
    protected = protect_clients(fedavg(), 100.0, 1.0, 2)
    desk = ValidatorSetup(replace(protected, transforms=(*protected.transforms, UpdateTransform())))
    checked = desk.check(desk.update())
    assert (checked.norm, checked.bounded) == (None, False)
    facts = checked.update.known_facts()
    assert facts is not None
    assert facts.finite
    desk.refuses(desk.update(SOME), f"sent 2 names, not the {len(EVERY)} names of the round")
    narrowing = ValidatorSetup(protect_clients(Method("telling", client_rules=(SelectSome(),)), 100.0, 1.0, 2))
    narrowing.refuses(narrowing.update(), f"sent {len(EVERY)} names, not the 2 names of the round")  # though the first
    narrowing.check(narrowing.update(SOME))
    narrowing.refuses(narrowing.update(), f"sent {len(EVERY)} names, not the 2 names of the round")
    plain = ValidatorSetup()
    plain.check(plain.update(SOME))
    plain.check(plain.update())


# ---- containers


def test_plain_containers_are_not_copied() -> None:
    desk = ValidatorSetup()
    for delta in (desk.update().delta, packed_row(desk.update().delta)):
        update = desk.update(delta=delta)
        assert readable(update) is update


@pytest.mark.parametrize("which", ["delta", "steps", "metrics", "slots"])
def test_custom_mapping_in_a_reply_is_copied_into_a_dict(which: str) -> None:
    desk = ValidatorSetup()
    update = desk.update(metrics={"score": 1.0}, slots={"seen": {"head.weight": torch.ones(2)}})
    changes: dict[str, Any] = {which: CustomMapping(getattr(update, which))}
    found = readable(replace(update, **changes))
    for each in ("delta", "steps", "metrics", "slots"):
        assert type(getattr(found, each)) is dict
        assert getattr(found, each).keys() == getattr(update, each).keys()


@pytest.mark.parametrize("lazy", [False, True])
def test_custom_mapping_in_a_slot_is_copied_into_a_dict(lazy: bool) -> None:
    desk = ValidatorSetup()
    part = CustomMapping({"head.weight": torch.ones(2)})
    update = desk.update(slots={"seen": part})
    found = readable(replace(update, steps=CustomMapping(update.steps)) if lazy else update)
    assert type(found.slots["seen"]) is dict
    assert torch.equal(found.slots["seen"]["head.weight"], torch.ones(2))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"delta": [torch.ones(1)]}, "sent delta as list; it must be a mapping from names"),
        ({"slots": {"seen": 5}}, "sent slot 'seen' as int"),
        ({"delta": {5: torch.ones(1)}}, "sent 5 in its delta as Tensor; it must be a tensor named by a text"),
        ({"delta": {"w": [1.0]}}, "sent 'w' in its delta as list"),
        ({"delta": {"w": torch.ones(1, requires_grad=True)}}, "without a gradient"),
        ({"delta": {"w": torch.ones(1, dtype=torch.complex64)}}, "as torch.complex64"),
        ({"delta": {"w": torch.ones(2).to_sparse()}}, "torch.sparse_coo"),
        ({"steps": None}, "sent steps as NoneType"),
    ],
)
def test_anything_but_named_tensors_is_refused(changes: dict[str, Any], said: str) -> None:
    desk = ValidatorSetup()
    with pytest.raises(InvalidUpdate, match=said):
        readable(desk.update(**changes))


# ---- messages


class UnprintableObject:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 198, f"'{'x' * 198}'"),
        ("x" * 199, f"'{'x' * 199}..."),
        (ValueError("why"), "ValueError: why"),
        (UnprintableObject(), "an odd UnprintableObject"),
        (5, "5"),
    ],
)
def test_shorten_describes_any_value_in_200_characters(value: object, text: str) -> None:
    assert shorten(value) == text
