"""Arithmetic on named tensors, function by function, and running means against sums by hand."""

from __future__ import annotations

import math

import pytest
import torch
from packed_fixtures import pack_per_client
from torch import Tensor

from partita.core import tensors, torch_private
from partita.core.tensors import Mean, Tensors

A, B = torch.tensor([3.0, -4.0]), torch.tensor([[12.0]])


def values(part: object) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in dict(part).items()}  # type: ignore[call-overload]


def test_clone_all_copies_every_tensor() -> None:
    source = {"a": A.clone(), "b": B.clone()}
    copies = tensors.clone_all(source)
    source["a"].zero_()
    assert values(copies) == {"a": [3.0, -4.0], "b": [[12.0]]}
    assert tensors.clone_all({}) == {}


def test_clone_views_copies_views_and_keeps_all_other_tensors() -> None:
    """A view would keep the whole block alive."""
    block = torch.ones(4, 2)
    found = tensors.clone_views({"view": block[1], "own": A})
    assert found["own"] is A
    assert torch.equal(found["view"], block[1])
    assert found["view"].untyped_storage().nbytes() == 2 * 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int8, torch.float32),
    ],
)
def test_upcast_returns_float32_or_more(given: torch.dtype, expected: torch.dtype) -> None:
    value = torch.ones(2, dtype=given)
    assert tensors.upcast(value).dtype == expected
    assert (tensors.upcast(value) is value) == (given == expected)


def test_norm_and_largest_value_are_over_all_tensors() -> None:
    """Of 3, -4 and 12 the norm is 13, the sum of sizes 19, and the largest size 12."""
    assert tensors.norm({"a": A, "b": B}).item() == 13.0
    assert tensors.norm({}).item() == 0.0
    assert tensors.max_abs({"a": A, "b": B}).item() == 12.0
    assert tensors.max_abs({"a": A}).item() == 4.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_all_finite_sees_a_single_wrong_value(wrong: float) -> None:
    assert tensors.all_finite({"a": A, "b": B})
    assert tensors.all_finite({})
    for place in ("a", "b"):
        broken = {"a": A.clone(), "b": B.clone()}
        broken[place].view(-1)[0] = wrong
        assert not tensors.all_finite(broken)


def test_all_finite_does_not_square_large_values() -> None:
    assert tensors.all_finite({"a": torch.full((4,), 3e38)})


def test_squared_norms_are_computed_in_float64() -> None:
    assert tensors.squared_norms({"a": A, "b": B}) == {"a": 25.0, "b": 144.0}
    assert tensors.squared_norms({}) == {}
    large = tensors.squared_norms({"a": torch.full((2,), 1e30)})
    assert large["a"] == pytest.approx(2e60, rel=1e-6), "more than float32 can hold"


def test_exact_sum_rounds_once_and_overflows_to_infinity() -> None:
    assert tensors.exact_sum([1e16, 1.0, -1e16]) == 1.0
    assert tensors.exact_sum([1e308, 1e308]) == math.inf
    assert math.isnan(tensors.exact_sum([math.nan, 1.0]))


def test_equal_compares_bits() -> None:
    """So -0.0 differs from 0.0, a NaN equals itself, and the same bits of another type differ."""
    zero, nan = torch.zeros(2), torch.tensor([math.nan])
    assert not tensors.equal({"a": zero}, {"a": -zero})
    assert tensors.equal({"a": nan}, {"a": nan.clone()})
    assert not tensors.equal({"a": zero}, {"a": torch.zeros(2, dtype=torch.int32)})
    assert not tensors.equal({"a": zero}, {"a": zero.view(1, 2)})
    assert not tensors.equal({"a": zero}, {"a": zero, "b": zero})
    assert not tensors.equal({"a": zero, "b": zero}, {"a": zero, "b": zero + 1})
    transposed = torch.arange(6.0).view(2, 3).T
    assert tensors.equal({"a": transposed}, {"a": transposed.contiguous()})


def test_sha256_reads_names_types_shapes_and_bits() -> None:
    value = {"a": torch.zeros(2, 3)}
    others = [{"b": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}, {"a": torch.zeros(2, 3, dtype=torch.int32)}]
    others.append({"a": -torch.zeros(2, 3)})
    assert len({tensors.sha256(each) for each in (value, *others)}) == 5
    assert tensors.sha256(value) == tensors.sha256({"a": torch.zeros(3, 2).T})


def test_digest_has_16_bytes_and_ignores_the_order_of_names() -> None:
    assert len(tensors.digest({"a": A})) == 32
    assert tensors.digest({"a": A, "b": B}) == tensors.digest({"b": B, "a": A})
    assert tensors.digest({"a": torch.zeros(2)}) != tensors.digest({"a": -torch.zeros(2)})


# ---- running means


def packed(*rows: Tensors) -> list[Tensors]:
    return pack_per_client({name: torch.stack([row[name] for row in rows]) for name in rows[0]})  # type: ignore[return-value]


def row(a: float, b: float) -> Tensors:
    return {"a": torch.full((3,), a), "b": torch.full((2,), b)}


@pytest.mark.parametrize("unit", [1.0, 0.125])
@pytest.mark.parametrize("by_layout", [False, True])
def test_mean_weighs_each_addition(by_layout: bool, unit: float) -> None:
    rows = [row(1.0, 8.0), row(5.0, 0.0), row(2.0, 2.0)]
    mean = Mean()
    for part, weight in zip(packed(*rows) if by_layout else rows, (1.0, 3.0, 4.0), strict=True):
        mean.add(part, unit * weight)
    assert (mean.packed is not None) == by_layout
    assert values(mean.value) == {"a": [3.0] * 3, "b": [2.0] * 2}
    assert mean.weight == {"a": 8.0 * unit, "b": 8.0 * unit}
    assert values(mean.over(16.0 * unit)) == {"a": [1.5] * 3, "b": [1.0] * 2}


@pytest.mark.parametrize("by_layout", [False, True])
def test_mean_of_additions_without_weight_is_the_first(by_layout: bool) -> None:
    rows = [row(1.0, 8.0), row(5.0, 0.0)]
    mean = Mean()
    for part in packed(*rows) if by_layout else rows:
        mean.add(part, 0.0)
    assert values(mean.value) == values(rows[0])
    assert mean.weight == {"a": 0.0, "b": 0.0}


def test_mean_by_name_weighs_only_additions_that_have_it() -> None:
    """The first is packed, the second lacks a name, the third is packed with the same layout as the first."""
    first, third = packed(row(1.0, 8.0), row(4.0, 2.0))
    mean = Mean()
    mean.add(first, 1.0)
    mean.add({"a": torch.full((3,), 7.0)}, 1.0)
    mean.add(third, 2.0)
    assert mean.packed is None
    assert values(mean.value) == {"a": [4.0] * 3, "b": [4.0] * 2}
    assert mean.weight == {"a": 4.0, "b": 3.0}
    assert values(first) == values(row(1.0, 8.0)), "additions are not changed"


def test_mean_of_packed_tensors_with_different_layouts_is_by_name() -> None:
    [first], [second] = packed(row(1.0, 8.0)), packed({"a": torch.full((3,), 5.0)})
    mean = Mean()
    mean.add(first, 1.0)
    mean.add(second, 3.0)
    assert values(mean.value) == {"a": [4.0] * 3, "b": [8.0] * 2}


def test_mean_of_packed_tensors_after_plain_ones_is_by_name() -> None:
    mean = Mean()
    mean.add(row(1.0, 8.0), 1.0)
    mean.add(packed(row(5.0, 0.0))[0], 3.0)
    assert values(mean.value) == {"a": [4.0] * 3, "b": [2.0] * 2}


@pytest.mark.parametrize("by_layout", [False, True])
@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_mean_is_in_float32_or_more_whatever_is_added(kind: torch.dtype, by_layout: bool) -> None:
    rows = [{name: value.to(kind) for name, value in row(*numbers).items()} for numbers in ((1.0, 8.0), (5.0, 0.0))]
    mean = Mean()
    for part, weight in zip(packed(*rows) if by_layout else rows, (1.0, 3.0), strict=True):
        mean.add(part, weight)
    expected = torch.promote_types(kind, torch.float32)
    assert {value.dtype for value in mean.value.values()} == {expected}
    assert values(mean.value) == {"a": [4.0] * 3, "b": [2.0] * 2}


def test_mean_does_not_share_memory_with_the_first_addition() -> None:
    for parts in ([row(1.0, 8.0), row(5.0, 0.0)], packed(row(1.0, 8.0), row(5.0, 0.0))):
        mean = Mean()
        for part in parts:
            mean.add(part, 1.0)
        assert values(parts[0]) == values(row(1.0, 8.0))


def test_mean_of_equal_weights_moves_all_names_with_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """And name by name where weights or types differ. On a GPU each call costs more than its arithmetic."""
    calls: list[int] = []
    lerp = torch_private.foreach_lerp_

    def counted(means: list[Tensor], parts: list[Tensor], weight: float) -> None:
        calls.append(len(means))
        lerp(means, parts, weight)

    monkeypatch.setattr(torch_private, "foreach_lerp_", counted)
    mean = Mean()
    mean.add(row(1.0, 8.0), 1.0)
    mean.add(row(5.0, 0.0), 3.0)
    assert calls == [2]
    mean.add({"a": torch.full((3,), 4.0)}, 1.0)
    assert calls == [2, 1]
    mean.add(row(4.0, 2.0), 1.0)
    mean.add({name: value.double() for name, value in row(4.0, 2.0).items()}, 1.0)
    assert calls == [2, 1], "weights differ, then types"
    assert values(mean.value) == {"a": [4.0] * 3, "b": [2.0] * 2}


@pytest.mark.parametrize("place", [0, 5, 99])
def test_only_tensors_without_any_bit_are_all_zero(place: int) -> None:
    value = torch.zeros(100)
    assert tensors.all_zero(value)
    for other in (1.0, -0.0):
        value[place] = other
        assert not tensors.all_zero(value)
