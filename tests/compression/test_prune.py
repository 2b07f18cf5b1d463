"""Pruning: whole again at the server, counted to the byte, by magnitude and by heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architecture_fixtures import ThreeClients, make_case, make_model
from compression_fixtures import FOUR, WIDE_MODEL, encode_and_decode, make_update, random_normal
from helpers import final_params, play, toy_run
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
from partita.core.client_rule import Context
from partita.core.compose import compose
from partita.core.method import Method
from partita.core.method_error import MethodError
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
def test_pruning_keeps_the_largest_numbers_and_zeroes_the_rest(shape: tuple[int, ...], keep: float) -> None:
    value = random_normal(1, *shape)
    sent, opened = encode_and_decode(TopKMagnitude(keep), make_update({"w": value}))
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
def test_pruned_indices_use_the_smallest_encoding(size: int, keep: float, slot: str, kind: torch.dtype) -> None:
    value = torch.zeros(size)
    value[0], value[-1] = 2.0, -3.0  # the ends of the range
    sent, opened = encode_and_decode(TopKMagnitude(keep), make_update({"w": value}))
    assert sent.slots.keys() == {SHAPE, slot}
    assert sent.slots[slot]["w"].dtype == kind
    assert sent.slots[SHAPE]["w"].dtype == torch.int32
    listed = len(sent.delta["w"]) * (4 if size > 2**16 else 2)
    assert sent.slots[slot]["w"].nbytes == min(listed, -(-size // 8))
    assert torch.equal(opened.delta["w"], value)


def test_small_tensors_and_other_slots_are_not_pruned() -> None:
    given = make_update(
        {"bias": random_normal(0, 1024), "w": random_normal(1, 33, 32)}, drag={"w": random_normal(2, 33, 32)}
    )
    sent, opened = encode_and_decode(TopKMagnitude(0.1), given)
    assert torch.equal(sent.delta["bias"], given.delta["bias"])
    assert tensors.equal(sent.slots["drag"], given.slots["drag"])
    assert opened.slots.keys() == {"drag"}
    assert len(sent.delta["w"]) == 106


@settings(max_examples=40)
@given(st.integers(1025, 5000), st.floats(0.001, 1.0), st.integers(0, 99))
def test_pruned_indices_cost_at_most_one_bit_per_number(size: int, keep: float, seed: int) -> None:
    sent, _ = TopKMagnitude(keep).encode(make_update({"w": random_normal(seed, size)}), {}, Key(0))
    slots = {slot: part["w"].nbytes for slot, part in sent.slots.items() if slot != SHAPE}
    assert sum(slots.values()) <= -(-size // 8)
    assert sent.delta["w"].numel() <= size


def test_pruning_that_keeps_all_is_fedavg_bit_for_bit() -> None:
    one, two = (play(toy_run(method, 2, cohort=2), WIDE_MODEL, FOUR) for method in (prune(keep=1.0), fedavg()))
    assert tensors.equal(final_params(one), final_params(two))
    assert [each.traffic for each in one] == [each.traffic for each in two]


def test_marks_of_another_length_are_refused_also_for_one_element() -> None:
    slots = {SHAPE: {"w": torch.tensor([1025])}, MARKS: {"w": torch.zeros(9, dtype=torch.uint8)}}
    with pytest.raises(CompressionError, match="'w' has indices that do not fit its 1025 elements"):
        TopKMagnitude(0.0005).decode_update(make_update({"w": torch.ones(1)}, **slots))


def test_error_feedback_is_an_option_of_pruning_by_magnitude() -> None:
    assert prune(keep=0.1).transforms == (TopKMagnitude(0.1),)
    assert prune(keep=0.1, error_feedback=True).transforms == (ErrorFeedback(TopKMagnitude(0.1)),)
    with pytest.raises(MethodError, match=r"method\.error_feedback is true with by = 'heads'"):
        prune("heads", error_feedback=True)


# ---- heads


def play_one_round(case: str, method: Method, **more: Any) -> list[RoundResult]:
    model = make_model(case)
    return play(toy_run(method, 1, **more), model, ThreeClients(make_case(case)))


@pytest.mark.parametrize("case", ["bert-text", "gpt2-text", "vit-image", "llama-tokens", "dinov2-image"])
def test_pruned_heads_are_zero_and_the_rest_is_unchanged(case: str) -> None:
    model = make_model(case)
    model.module.config.label2id = {"O": 0, "B-x": 1, "I-x": 2}
    parts = model.head_dimensions()
    plan = plan_for(share_everything, model, RoundInfo(0, 1, "a"))
    attention = {"layer.0": torch.tensor([0.1, 0.3]), "layer.1": torch.tensor([0.6, 0.2])}
    ctx = Context(model, plan, model.initial, {}, {}, 0.1, {ATTENTION: attention})
    told, remembered = HeadSelector(0.5).finish({}, {}, ctx)
    assert remembered == {}
    delta = {name: random_normal(3, *value.shape) + 5 for name, value in model.initial.items()}
    sent, opened = encode_and_decode(HeadPruner(), make_update(delta, **told))
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


def test_shared_head_is_kept_with_any_head_that_shares_it() -> None:
    rule = HeadSelector(0.5)
    attention = torch.tensor([0.9, 0.1, 0.8, 0.2, 0.3, 0.1, 0.2, 0.7])
    assert rule._kept(attention, 8).tolist() == [True, False, True, False, True, False, False, True]
    assert rule._kept(attention, 4).tolist() == [True, True, True, True]
    assert HeadSelector(0.25)._kept(attention, 4).tolist() == [True, True, False, False]
    assert HeadSelector(0.01)._kept(attention, 8).sum() == 1


def test_a_head_that_all_share_needs_no_mask() -> None:
    parts = {"query": (0, 4), "key": (0, 1)}
    model: Any = SimpleNamespace(head_dimensions=lambda: parts, tags={name: {"layer.0"} for name in parts}, name="m")
    plan: Any = SimpleNamespace(up=frozenset(parts))
    ctx = Context(model, plan, {}, {}, {}, 0.1, {ATTENTION: {"layer.0": torch.tensor([0.1, 0.4, 0.2, 0.3])}})
    sent, _ = HeadSelector(0.5).finish({}, {}, ctx)
    assert {slot: list(part) for slot, part in sent.items()} == {ROWS: ["query"]}
    assert sent[ROWS]["query"].tolist() == [False, True, False, True]


@pytest.mark.slow
def test_head_pruning_with_safl_reduces_the_bytes_of_every_round() -> None:
    for options in ({"k": 1}, {"k": 1, "every": 2}):
        model = make_model("bert-text")
        method = compose(safl(**options), prune("heads"))
        played = play(toy_run(method, 2), model, ThreeClients(make_case("bert-text")))
        plain = play(toy_run(safl(**options), 2), model, ThreeClients(make_case("bert-text")))
        for one, two in zip(played, plain, strict=True):
            assert one.sent == two.sent or one.number
            assert sum(one.traffic.up.values()) < sum(two.traffic.up.values())


def test_head_pruning_refuses_unsupported_compositions_and_declares_data_use() -> None:
    with pytest.raises(MethodError, match=r"needs the attention that safl measures; compose it as 'safl\+prune'"):
        play_one_round("bert-text", prune("heads"))
    with pytest.raises(MethodError, match="no noise, or set by = 'magnitude'"):
        play_one_round("bert-text", compose(safl(noise=1.0, probe=0.9), prune("heads")))
    with pytest.raises(MethodError, match="has one head per layer, so none can be pruned"):
        play(toy_run(compose(safl(), prune("heads")), 1), ToyTransformer(width=4), FOUR)
    [rule] = prune("heads").client_rules
    assert rule.uses_data
    assert rule.release is None
    with pytest.raises(MethodError, match=r"compose 'prune\+quantize'"):
        play(toy_run(compose(quantize(), prune()), 1), WIDE_MODEL, FOUR)
    with pytest.raises(MethodError, match=r"method\.keep is 0"):
        prune(keep=0.0)
