"""Pruning: whole again at the server, counted to the byte, by magnitude and by heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architecture_fixtures import Few, adapted, made
from compression_fixtures import FOUR, WIDE, draw, there_and_back, update_of
from helpers import last, play, run_of
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.compression import CompressionError
from partita.compression.error_feedback import ErrorFeedback
from partita.compression.prune import (
    MARKS,
    PLACES,
    ROWS,
    SHAPE,
    HeadPruner,
    HeadSelector,
    TopKMagnitude,
    prune,
)
from partita.compression.quantize import quantize
from partita.core import tensors
from partita.core.method import Context, Method, MethodError, compose
from partita.core.model import ATTENTION
from partita.core.plan import RoundInfo, plan_for, share_everything
from partita.core.rng import Key
from partita.core.rounds import RoundResult
from partita.methods.fedavg import fedavg
from partita.methods.safl import safl
from partita.testing.toy import ToyTransformer

# ---- the largest numbers


@pytest.mark.parametrize("shape", [(1025,), (40, 30), (8, 8, 30), (300, 300)])
@pytest.mark.parametrize("keep", [0.001, 0.02, 0.1, 0.5, 0.99])
def test_the_largest_numbers_arrive_and_the_others_count_as_zero(shape: tuple[int, ...], keep: float) -> None:
    value = draw(1, *shape)
    sent, opened = there_and_back(TopKMagnitude(keep), update_of({"w": value}))
    count = -(-value.numel() * keep // 1)
    limit = value.abs().flatten().sort(descending=True).values[int(count) - 1]
    assert torch.equal(opened.delta["w"], value.where(value.abs() >= limit, 0.0))
    assert sent.delta["w"].shape == (count,)
    assert opened.slots == {}


@pytest.mark.parametrize(
    ("size", "keep", "slot", "kind"),
    [
        (60_000, 0.01, PLACES, torch.int16),
        (65_536, 0.01, PLACES, torch.int16),
        (65_537, 0.01, PLACES, torch.int32),
        (1_600, 0.0625, PLACES, torch.int16),  # as many bytes either way
        (1_600, 0.063125, MARKS, torch.uint8),
        (60_000, 0.1, MARKS, torch.uint8),
        (70_000, 0.04, MARKS, torch.uint8),
    ],
)
def test_places_are_told_in_the_smallest_way(size: int, keep: float, slot: str, kind: torch.dtype) -> None:
    value = torch.zeros(size)
    value[0], value[-1] = 2.0, -3.0  # the ends of the range
    sent, opened = there_and_back(TopKMagnitude(keep), update_of({"w": value}))
    assert sent.slots.keys() == {SHAPE, slot}
    assert sent.slots[slot]["w"].dtype == kind
    assert sent.slots[SHAPE]["w"].dtype == torch.int32
    listed = len(sent.delta["w"]) * (4 if size > 2**16 else 2)
    assert sent.slots[slot]["w"].nbytes == min(listed, -(-size // 8))
    assert torch.equal(opened.delta["w"], value)


def test_small_tensors_and_the_slots_of_others_travel_whole() -> None:
    given = update_of({"bias": draw(0, 1024), "w": draw(1, 33, 32)}, drag={"w": draw(2, 33, 32)})
    sent, opened = there_and_back(TopKMagnitude(0.1), given)
    assert torch.equal(sent.delta["bias"], given.delta["bias"])
    assert tensors.equal(sent.slots["drag"], given.slots["drag"])
    assert opened.slots.keys() == {"drag"}
    assert len(sent.delta["w"]) == 106


@settings(max_examples=40)
@given(st.integers(1025, 5000), st.floats(0.001, 1.0), st.integers(0, 99))
def test_what_travels_is_never_more_than_the_whole_and_the_places_cost_at_most_a_bit_a_number(
    size: int, keep: float, seed: int
) -> None:
    sent, _ = TopKMagnitude(keep).encode(update_of({"w": draw(seed, size)}), {}, Key(0))
    slots = {slot: part["w"].nbytes for slot, part in sent.slots.items() if slot != SHAPE}
    assert sum(slots.values()) <= -(-size // 8)
    assert sent.delta["w"].numel() <= size


def test_keeping_all_is_fedavg_bit_for_bit() -> None:
    one, two = (play(run_of(method, 2, cohort=2), WIDE, FOUR) for method in (prune(keep=1.0), fedavg()))
    assert tensors.equal(last(one), last(two))
    assert [each.traffic for each in one] == [each.traffic for each in two]


def test_marks_of_another_length_are_refused_also_for_one_element() -> None:
    slots = {SHAPE: {"w": torch.tensor([1025])}, MARKS: {"w": torch.zeros(9, dtype=torch.uint8)}}
    with pytest.raises(CompressionError, match="'w' has indices that do not fit its 1025 elements"):
        TopKMagnitude(0.0005).decode_update(update_of({"w": torch.ones(1)}, **slots))


def test_error_feedback_is_an_option_of_pruning_by_magnitude() -> None:
    assert prune(keep=0.1).transforms == (TopKMagnitude(0.1),)
    assert prune(keep=0.1, error_feedback=True).transforms == (ErrorFeedback(TopKMagnitude(0.1)),)
    with pytest.raises(MethodError, match=r"method\.error_feedback is true with by = 'heads'"):
        prune("heads", error_feedback=True)


# ---- heads


def heads_of(case: str, method: Method, **more: Any) -> list[RoundResult]:
    model = adapted(case)
    return play(run_of(method, 1, **more), model, Few(made(case)))


@pytest.mark.parametrize("case", ["bert-text", "gpt2-text", "vit-image", "llama-tokens", "dinov2-image"])
def test_heads_that_do_not_travel_are_zero_and_all_else_is_as_it_was(case: str) -> None:
    model = adapted(case)
    model.module.config.label2id = {"O": 0, "B-x": 1, "I-x": 2}
    parts = model.head_dimensions()
    plan = plan_for(share_everything, model, RoundInfo(0, 1, "a"))
    paid = {"layer.0": torch.tensor([0.1, 0.3]), "layer.1": torch.tensor([0.6, 0.2])}
    ctx = Context(model, plan, model.initial, {}, {}, 0.1, {ATTENTION: paid})
    told, remembered = HeadSelector(0.5).finish({}, {}, ctx)
    assert remembered == {}
    delta = {name: draw(3, *value.shape) + 5 for name, value in model.initial.items()}
    sent, opened = there_and_back(HeadPruner(), update_of(delta, **told))
    saved = 0
    for name, value in delta.items():
        layer = 0 if name in model.names("layer.0") else 1
        if name not in parts or parts[name][1] == 1:
            assert torch.equal(opened.delta[name], value)
            continue
        dim, count = parts[name]
        lost = 1 if layer == 1 else 0
        whole = [part.clone() for part in value.chunk(count, dim)]
        whole[lost].zero_()
        assert torch.equal(opened.delta[name], torch.cat(whole, dim)), name
        assert sent.delta[name].numel() == value.numel() // 2
        saved += sent.delta[name].numel()
    assert saved
    assert opened.slots == {}


def test_a_shared_head_travels_with_any_of_those_that_share_it() -> None:
    rule = HeadSelector(0.5)
    paid = torch.tensor([0.9, 0.1, 0.8, 0.2, 0.3, 0.1, 0.2, 0.7])
    assert rule._kept(paid, 8).tolist() == [True, False, True, False, True, False, False, True]
    assert rule._kept(paid, 4).tolist() == [True, True, True, True]
    assert HeadSelector(0.25)._kept(paid, 4).tolist() == [True, True, False, False]
    assert HeadSelector(0.01)._kept(paid, 8).sum() == 1


def test_a_head_that_all_share_needs_no_mask() -> None:
    parts = {"query": (0, 4), "key": (0, 1)}
    model: Any = SimpleNamespace(head_dimensions=lambda: parts, tags={name: {"layer.0"} for name in parts}, name="m")
    plan: Any = SimpleNamespace(up=frozenset(parts))
    ctx = Context(model, plan, {}, {}, {}, 0.1, {ATTENTION: {"layer.0": torch.tensor([0.1, 0.4, 0.2, 0.3])}})
    sent, _ = HeadSelector(0.5).finish({}, {}, ctx)
    assert {slot: list(part) for slot, part in sent.items()} == {ROWS: ["query"]}
    assert sent[ROWS]["query"].tolist() == [False, True, False, True]


def test_with_safl_the_heads_that_attend_least_stay_at_home_every_round() -> None:
    for options in ({"k": 1}, {"k": 1, "every": 2}):
        model = adapted("bert-text")
        method = compose(safl(**options), prune("heads"))
        played = play(run_of(method, 2), model, Few(made("bert-text")))
        plain = play(run_of(safl(**options), 2), model, Few(made("bert-text")))
        for one, two in zip(played, plain, strict=True):
            assert one.sent == two.sent or one.number
            assert sum(one.traffic.up.values()) < sum(two.traffic.up.values())


def test_head_pruning_needs_safl_and_more_than_one_head_and_is_open_about_looking() -> None:
    with pytest.raises(MethodError, match=r"needs the attention that safl measures; compose it as 'safl\+prune'"):
        heads_of("bert-text", prune("heads"))
    with pytest.raises(MethodError, match="no noise, or set by = 'magnitude'"):
        heads_of("bert-text", compose(safl(noise=1.0, probe=0.9), prune("heads")))
    with pytest.raises(MethodError, match="has one head per layer, so none can be pruned"):
        play(run_of(compose(safl(), prune("heads")), 1), ToyTransformer(width=4), FOUR)
    [rule] = prune("heads").client_rules
    assert rule.uses_data
    assert rule.release is None
    with pytest.raises(MethodError, match=r"compose 'prune\+quantize'"):
        play(run_of(compose(quantize(), prune()), 1), WIDE, FOUR)
    with pytest.raises(MethodError, match=r"method\.keep is 0"):
        prune(keep=0.0)
