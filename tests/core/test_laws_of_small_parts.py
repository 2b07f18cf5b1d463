"""Properties of the smallest parts: plans, tensor mappings, keys, messages, parameter versions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import toy_model
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core import serialization, tensors
from partita.core.model import TagError
from partita.core.plan import NO_NAMES, Phase, Plan, PlanError, RoundInfo, plan_for, share, share_everything
from partita.core.rng import Key
from partita.core.serialization import SerializationError
from partita.core.server_rule import average
from partita.core.tensors import Mean, Names, Tensors
from partita.core.update import Update
from partita.core.versions import ParameterVersions

few_examples = settings(max_examples=50)
NAMES = ("a", "b", "c", "d", "e")
subsets = st.frozensets(st.sampled_from(NAMES))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any consistent plan, in up to three phases that may overlap."""
    keep = draw(subsets)
    down = draw(subsets) - keep
    up = draw(subsets) & down
    train = sorted(up | draw(st.frozensets(st.sampled_from(sorted(keep)))) if keep else up)
    parts = [draw(st.frozensets(st.sampled_from(train))) for _ in range(draw(st.integers(0, 2)))] if train else []
    return Plan((*(Phase(part, 2) for part in parts), Phase(frozenset(train))), up, down, keep)


# ---- plans


def contradictions() -> dict[str, dict[str, Any]]:
    whole = {"phases": (Phase(frozenset("a")),), "up": frozenset("a"), "down": frozenset("a"), "keep": NO_NAMES}
    return {
        "kept by the client and also sent up": whole | {"keep": frozenset("a"), "down": frozenset("b")},
        "kept by the client and also sent down": whole
        | {"phases": (), "up": NO_NAMES, "keep": frozenset("a"), "down": frozenset("a")},
        "sent up but never trained": whole | {"phases": ()},
        "sent up but do not come down": whole | {"down": NO_NAMES},
        "trained and then lost": whole | {"up": NO_NAMES, "down": NO_NAMES},
    }


@pytest.mark.parametrize("what", contradictions())
def test_contradictory_plan_is_refused_by_name(what: str) -> None:
    with pytest.raises(PlanError, match=rf"^a: these names are {what}.*; (take|add) "):
        Plan(**contradictions()[what])


def test_plan_error_shortens_a_long_list_of_names() -> None:
    with pytest.raises(PlanError, match=r"^a, b, c and 2 more: "):
        Plan((), up=frozenset(NAMES), down=frozenset(NAMES))


def test_plan_with_names_outside_the_model_is_refused() -> None:
    model = toy_model()

    def stray(model: Any, round_info: RoundInfo) -> Plan:
        return share(model.all_names() | {"nowhere"}, down=model.all_names() | {"nowhere"})

    with pytest.raises(PlanError, match="nowhere: these names are in the plan but not in tiny attention"):
        plan_for(stray, model, RoundInfo(0, 1, "c"))
    assert plan_for(share_everything, model, RoundInfo(0, 1, "c")).train == model.all_names()


def test_unknown_tag_error_suggests_the_nearest_tag() -> None:
    with pytest.raises(TagError, match=r"tagged 'querry'; it has: .*mlp.*Did you mean 'query'\?"):
        toy_model().names("querry")


@given(plans(), subsets)
@few_examples
def test_narrowing_a_plan_only_removes_names(plan: Plan, names: Names) -> None:
    less = plan.narrow(names)
    assert less.train == plan.train & names
    assert less.up == plan.up & names
    assert (less.down, less.keep) == (plan.down, plan.keep)
    assert all(phase.names for phase in less.phases)
    kept = [phase for phase in plan.phases if phase.names & names]
    assert [phase.epochs for phase in less.phases] == [phase.epochs for phase in kept]


@given(plans(), subsets, subsets)
@few_examples
def test_narrowing_twice_equals_narrowing_to_the_intersection(plan: Plan, one: Names, two: Names) -> None:
    assert plan.narrow(one).narrow(two) == plan.narrow(one & two) == plan.narrow(two).narrow(one)
    if all(phase.names for phase in plan.phases):
        assert plan.narrow(plan.train) == plan


@given(subsets, subsets)
@few_examples
def test_share_sends_up_trained_names_that_are_not_kept(train: Names, keep: Names) -> None:
    plan = share(train, down=frozenset(NAMES) - keep, keep=keep)
    assert (plan.train, plan.up, plan.keep) == (train, train - keep, keep)


# ---- tensor mappings

values = st.floats(-100, 100, width=32)
weights = st.floats(0.25, 50, width=16)


@st.composite
def payloads(draw: st.DrawFn) -> list[tuple[Tensors, float]]:
    """Weighted messages, each with a subset of the names."""
    count = draw(st.integers(1, 5))
    return [
        (
            {name: torch.tensor(draw(st.lists(values, min_size=3, max_size=3))) for name in sorted(draw(subsets))},
            draw(weights),
        )
        for _ in range(count)
    ]


def numpy_mean(sent: list[tuple[Tensors, float]], name: str, divisor: float | None = None) -> np.ndarray:
    parts = [(part[name].numpy().astype(np.float64), weight) for part, weight in sent if name in part]
    total = sum(value * weight for value, weight in parts)
    return total / (divisor or sum(weight for _, weight in parts))


@given(payloads(), st.randoms(use_true_random=False))
@few_examples
def test_mean_over_senders_matches_numpy_in_any_order(
    sent: list[tuple[Tensors, float]], shuffler: random.Random
) -> None:
    before = [tensors.digest(part) for part, _ in sent]
    for _ in range(2):
        mean = Mean()
        for part, weight in sent:
            mean.add(part, weight)
        assert mean.value.keys() == set().union(*(part for part, _ in sent))
        for name, value in mean.value.items():
            np.testing.assert_allclose(value.numpy(), numpy_mean(sent, name), rtol=1e-5, atol=1e-4)
            assert mean.weight[name] == pytest.approx(sum(weight for part, weight in sent if name in part))
        assert [tensors.digest(part) for part, _ in sent] == before
        order = list(zip(sent, before, strict=True))
        shuffler.shuffle(order)
        sent, before = [pair for pair, _ in order], [digest for _, digest in order]


@given(payloads())
@few_examples
def test_mean_of_one_message_is_an_exact_copy(sent: list[tuple[Tensors, float]]) -> None:
    [(first, weight), *_] = sent
    mean = Mean()
    mean.add(first, weight)
    assert tensors.equal(mean.value, first)
    mean.add({name: value + 1 for name, value in first.items()}, weight)
    assert all(not torch.equal(mean.value[name], first[name]) for name in first)


def test_mean_of_equal_messages_is_that_message_bit_for_bit() -> None:
    value = {"a": torch.randn(50, generator=Key(0).generator())}
    mean = Mean()
    for weight in (3.0, 7.0, 0.1):
        mean.add(value, weight)
    assert tensors.equal(mean.value, value)


def test_half_precision_is_summed_in_float32() -> None:
    mean = Mean()
    for _ in range(1000):
        mean.add({"a": torch.tensor([1.0], dtype=torch.bfloat16)}, 1.0)
    mean.add({"a": torch.tensor([2.0], dtype=torch.bfloat16)}, 1.0)
    assert mean.value["a"].dtype == torch.float32
    assert float(mean.value["a"]) == pytest.approx(1 + 1 / 1001, rel=1e-5)


@given(payloads(), st.sampled_from(["senders", "cohort"]))
@few_examples
def test_average_over_senders_and_over_the_cohort(sent: list[tuple[Tensors, float]], over: Any) -> None:
    updates = [Update("c", part, {"slot": part}, weight, {}, None) for part, weight in sent]
    result = average(iter(updates), over)
    total = sum(weight for _, weight in sent)
    assert result.cohort == len(sent)
    for name, value in result.delta.items():
        expected = numpy_mean(sent, name, total if over == "cohort" else None)
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-5, atol=1e-4)
    assert tensors.equal(result.delta, result.slots["slot"])


def test_average_uses_the_given_weights() -> None:
    updates = [Update("c", {"a": torch.tensor([value])}, {}, 100.0 * value, {}, None) for value in (1.0, 3.0)]
    assert float(average(updates, weigh=lambda update: 1.0).delta["a"]) == 2.0


@given(payloads(), subsets)
@few_examples
def test_tensor_arithmetic_works_name_by_name(sent: list[tuple[Tensors, float]], names: Names) -> None:
    whole = {name: torch.full((3,), float(place)) for place, name in enumerate(NAMES)}
    part, factor = sent[0]
    assert list(tensors.select(whole, names)) == sorted(names)
    added = tensors.add(whole, part)
    assert all(torch.equal(added[name], whole[name] + part[name]) for name in part)
    assert all(added[name] is whole[name] for name in whole.keys() - part.keys())
    assert tensors.equal(tensors.subtract(part, whole), {name: part[name] - whole[name] for name in part})
    assert tensors.equal(tensors.scale(part, factor), {name: part[name] * factor for name in part})
    assert tensors.restrict_slots({"s": part, "t": whole}, names).keys() == {"s", "t"}
    assert tensors.restrict_slots({"s": part}, names)["s"].keys() == names & part.keys()
    flat = np.concatenate([value.numpy().astype(np.float64) for value in part.values()]) if part else np.zeros(1)
    assert float(tensors.norm(part)) == pytest.approx(np.linalg.norm(flat), rel=1e-5)


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, 2.0, 4.0])},
        {"b": torch.tensor([1.0, 2.0, 3.0])},
        {"a": torch.tensor([[1.0, 2.0, 3.0]])},
        {"a": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)},
        {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.zeros(0)},
        {},
    ],
    ids=["value", "name", "shape", "type", "more", "less"],
)
def test_equal_and_digest_see_every_difference(other: Tensors) -> None:
    one = {"a": torch.tensor([1.0, 2.0, 3.0])}
    assert tensors.equal(one, {"a": one["a"].clone()})
    assert tensors.digest(one) == tensors.digest({"a": one["a"].clone()})
    assert not tensors.equal(one, other)
    assert tensors.digest(one) != tensors.digest(other)


# ---- keys

path_steps = st.one_of(st.integers(-3, 1000), st.text(max_size=4))
paths = st.lists(path_steps, max_size=4)


def follow(root: int, path: Sequence[str | int]) -> Key:
    key = Key(root)
    for step in path:
        key = key / step
    return key


def draws(key: Key) -> tuple[Any, ...]:
    return key.seed(), key.uniform(), key.permutation(50).tolist(), key.sample(range(1000), 5)


@pytest.mark.slow
@given(st.integers(0, 3), st.integers(0, 3), paths, paths)
@few_examples
def test_draws_depend_only_on_the_key_path(root: int, other: int, path: list[Any], second: list[Any]) -> None:
    one, two = follow(root, path), follow(other, second)
    assert draws(one) == draws(follow(root, path))
    same = root == other and [(type(step), step) for step in path] == [(type(step), step) for step in second]
    assert (draws(one)[0] == two.seed()) == same


def test_key_path_distinguishes_numbers_from_text() -> None:
    assert (Key(0) / 1).seed() != (Key(0) / "1").seed()
    assert (Key(0) / "a" / "b").seed() != (Key(0) / "ab").seed() != (Key(0) / "a, b").seed()
    assert (Key(0) / "round" / 1 / 2).seed() != (Key(0) / "round" / 12).seed()


def test_keys_neither_read_nor_change_global_random_state() -> None:
    seen = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
        seen.append(draws(Key(5) / "x"))
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
    assert seen[0] == seen[1]


def test_uniform_draws_are_uniform() -> None:
    drawn = np.sort([(Key(1) / number).uniform() for number in range(2000)])
    assert np.abs(drawn - np.linspace(0, 1, 2000)).max() < 1.63 / np.sqrt(2000)  # Kolmogorov-Smirnov at one percent


class CountingPopulation(Sequence[int]):
    """A population that counts how many of its members were accessed."""

    def __init__(self, count: int) -> None:
        self.count, self.made = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        self.made += 1
        return index


@given(st.integers(0, 2**32), st.integers(1, 40))
@few_examples
def test_sample_is_unique_and_touches_only_the_sampled_members(seed: int, count: int) -> None:
    population = CountingPopulation(10**9)
    sample = Key(seed).sample(population, count)
    assert len(set(sample)) == count
    assert population.made == count


def test_sampling_all_members_reaches_every_order() -> None:
    seen = {tuple((Key(0) / number).sample("abc", 3)) for number in range(200)}
    assert len(seen) == 6
    counts = np.bincount(np.concatenate([(Key(1) / number).permutation(4)[:1].numpy() for number in range(2000)]))
    assert np.abs(counts / 2000 - 0.25).max() < 0.05


# ---- messages

TYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]
words = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
slot_words = words.filter(lambda word: "/" not in word)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Tensors]:
    def tensor() -> torch.Tensor:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        value = torch.randint(0, 200, shape, generator=Key(draw(st.integers(0, 99))).generator())
        return value.to(draw(st.sampled_from(TYPES)))

    slots = draw(st.lists(slot_words, max_size=3, unique=True))
    return {
        slot: {name: tensor() for name in draw(st.lists(words, min_size=1, max_size=4, unique=True))} for slot in slots
    }


@pytest.mark.slow
@given(messages())
@settings(max_examples=120)
def test_message_round_trips_and_byte_counts_match_its_size(slots: dict[str, Tensors]) -> None:
    packed, counted = serialization.pack(slots), serialization.byte_counts(slots)
    assert sum(counted.values()) == (len(packed) if slots else 0)
    for name in set().union(*slots.values()):
        held = [part[name] for part in slots.values() if name in part]
        assert counted[name] == sum(value.numel() * value.element_size() for value in held)
    named = {f"{slot}/{name}": value for slot, part in slots.items() for name, value in part.items()}
    assert packed == safetensors.torch.save(named), "the library writes the same file"
    back = serialization.unpack(packed)
    assert back.keys() == slots.keys()
    assert all(tensors.digest(back[slot]) == tensors.digest(slots[slot]) for slot in slots)
    assert all(list(part) == sorted(part) for part in back.values()), "sums must not depend on the order in the file"


@given(st.lists(messages(), max_size=3), st.integers(1, 3))
@settings(max_examples=40)
def test_total_bytes_is_the_sum_over_messages(several: list[dict[str, Tensors]], times: int) -> None:
    counted = [serialization.byte_counts(slots) for slots in several * times]
    assert serialization.total_bytes(counted) == sum((Counter(each) for each in counted), Counter())


@pytest.mark.parametrize("name", ["ü", "naïve é", "日本語", "😀", "a\\b", 'say "x"', "new\nline", "a/b", "\x7f"])
def test_byte_counts_match_for_names_in_any_script(name: str) -> None:
    for repeat in range(1, 9):  # headers are padded, so one length alone could hide a difference
        slots = {"delta": {name * repeat: torch.ones(2)}}
        about = {name * repeat: name}
        assert serialization.save(slots["delta"], about) == safetensors.torch.save(slots["delta"], about)
        assert sum(serialization.byte_counts(slots).values()) == len(serialization.pack(slots))
        assert serialization.unpack(serialization.pack(slots)).keys() == {"delta"}


def test_byte_counts_match_for_offsets_of_every_size() -> None:
    slots = {"s": {f"n{size}": torch.zeros(size, dtype=kind) for size, kind in enumerate(TYPES * 3, start=9)}}
    assert sum(serialization.byte_counts(slots).values()) == len(serialization.pack(slots))
    assert serialization.byte_counts({}) == serialization.byte_counts({"empty": {}}) == {}


@pytest.mark.parametrize("length", range(1, 9))
def test_byte_counts_match_at_every_header_padding(length: int) -> None:
    """An offset range 1 to 10 has one digit more than 0 to 9, which shows at one of eight padded header lengths."""
    slots = {"s": {"n" * length: torch.zeros(9, dtype=torch.int8)}}
    assert sum(serialization.byte_counts(slots).values()) == len(serialization.pack(slots))


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("slots", [("s", "s"), ("t", "s")])
def test_byte_counts_do_not_depend_on_the_order_of_names(length: int, slots: tuple[str, str]) -> None:
    """Of tensors of 10 bytes and 1 byte, the offsets have two digits more if the larger one is first."""
    message: dict[str, Tensors] = {}
    for slot, first, size in zip(slots, "zy", (1, 10), strict=True):
        message.setdefault(slot, {})[first * length] = torch.zeros(size, dtype=torch.int8)
    assert sum(serialization.byte_counts(message).values()) == len(serialization.pack(message))


def test_metadata_is_read_without_the_tensors() -> None:
    for size in (1, 300):
        about = {"round": "3", "client": "ü" * size}
        packed = serialization.pack({"delta": {"a": torch.ones(5)}}, about)
        assert serialization.read_metadata(packed) == about
        assert serialization.unpack(packed)["delta"]["a"].tolist() == [1.0] * 5


def test_message_holds_one_tensor_under_two_names() -> None:
    value = torch.arange(6.0).view(2, 3)
    slots = {"params": {"a": value}, "memory": {"a": value, "b": value[0], "c": value.t(), "d": value[:, 1]}}
    back = serialization.unpack(serialization.pack(slots))
    assert all(tensors.equal(back[slot], slots[slot]) for slot in slots)
    assert sum(serialization.byte_counts(slots).values()) == len(serialization.pack(slots))


# ---- parameter versions

CLIENTS = ("u", "v", "w")


@given(st.data(), st.booleans())
@few_examples
def test_parameter_versions_agree_with_a_dict_of_dicts(data: st.DataObject, clients_have_initial_model: bool) -> None:
    """Random rounds: some clients acknowledge some names, then some names change."""
    ledger = ParameterVersions(dict.fromkeys(NAMES, 0), clients_have_initial_model=clients_have_initial_model)
    present = dict.fromkeys(NAMES, "initial")
    held: dict[str, dict[str, str]] = {
        client: dict(present) if clients_have_initial_model else {} for client in CLIENTS
    }
    for number in range(data.draw(st.integers(1, 6))):
        for client in CLIENTS:
            for wanted in (frozenset(NAMES), data.draw(subsets)):
                expected = {name for name in wanted if held[client].get(name) != present[name]}
                assert ledger.missing(client, wanted) == expected
        received = data.draw(
            st.lists(st.tuples(st.sampled_from(CLIENTS), subsets), max_size=3, unique_by=lambda pair: pair[0])
        )
        ledger = ledger.acknowledge(received)
        for client, names in received:
            held[client] |= {name: present[name] for name in names}
        changed = data.draw(subsets)
        ledger = ledger.changed(changed, number + 1)
        present |= dict.fromkeys(changed, f"round {number}")


def test_client_that_acknowledged_misses_nothing_until_a_name_changes() -> None:
    everything = frozenset(NAMES)
    ledger = ParameterVersions(dict.fromkeys(NAMES, 0))
    assert ledger.missing("u", everything) == everything
    ledger = ledger.acknowledge([("u", everything)])
    assert ledger.missing("u", everything) == NO_NAMES
    assert ledger.missing("v", everything) == everything
    ledger = ledger.changed(frozenset("ab"), 1)
    assert ledger.missing("u", everything) == frozenset("ab")
    assert ledger.missing("u", frozenset("bc")) == frozenset("b")
    # After two missed rounds: everything that changed in either, once.
    ledger = ledger.changed(frozenset("bd"), 2)
    assert ledger.missing("u", everything) == frozenset("abd")


def test_forget_makes_only_the_given_names_missing() -> None:
    ledger = ParameterVersions({"a": 0, "b": 0, "c": 0}).acknowledge([("x", frozenset("abc")), ("y", frozenset("abc"))])
    ledger = ledger.forget([("x", frozenset("b")), ("new", frozenset("a"))])
    assert ledger.missing("x", frozenset("abc")) == {"b"}
    assert ledger.missing("y", frozenset("abc")) == set()
    assert ledger.missing("new", frozenset("abc")) == set("abc")
    clients_have_initial_model = ParameterVersions({"a": 0, "b": 0}, clients_have_initial_model=True).forget(
        [("x", frozenset("b"))]
    )
    assert clients_have_initial_model.missing("x", frozenset("ab")) == {"b"}


def test_preloaded_clients_miss_only_changed_names() -> None:
    ledger = ParameterVersions(dict.fromkeys(NAMES, 0), clients_have_initial_model=True)
    assert ledger.missing("new", frozenset(NAMES)) == NO_NAMES
    assert ledger.changed(frozenset("c"), 1).missing("new", frozenset(NAMES)) == frozenset("c")


def test_clients_with_equal_versions_share_one_object() -> None:
    ledger = ParameterVersions(dict.fromkeys(NAMES, 0)).acknowledge(
        (str(number), frozenset(NAMES)) for number in range(100)
    )
    assert len({id(row) for row in ledger.held.values()}) == 1


def test_unsupported_dtype_is_refused_with_the_supported_ones() -> None:
    slots = {"delta": {"w": torch.zeros(2, dtype=torch.complex64)}}
    for write in (serialization.pack, serialization.byte_counts):
        with pytest.raises(
            SerializationError, match=r"'delta/w' is torch\.complex64, .*one of int64, .*in the transform's"
        ):
            write(slots)
