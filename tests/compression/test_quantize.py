"""Quantization: whole again at the server to a step, unbiased, and by its key."""

from __future__ import annotations

import pytest
import torch
from compression_fixtures import encode_and_decode, make_update, random_normal
from torch import Tensor

from partita.compression import CompressionError
from partita.compression.quantize import SCALE, Int8Quantizer
from partita.core import tensors
from partita.core.rng import Key

# ---- eight bits


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("shape", [(100,), (9, 30), (3, 5, 30)])
def test_quantization_error_is_below_one_step_of_its_row(shape: tuple[int, ...], rows: bool) -> None:
    value = random_normal(1, *shape) * torch.arange(1, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))
    sent, opened = encode_and_decode(Int8Quantizer(rows), make_update({"w": value}))
    assert sent.delta["w"].dtype == torch.int8
    assert sent.delta["w"].shape == value.shape
    whole = rows and value.ndim > 1
    largest = value.flatten(1).abs().amax(1) if whole else value.abs().max().view(1)
    step = (largest / 127).view(-1, *[1] * (value.ndim - 1))
    assert sent.slots[SCALE]["w"].shape == largest.shape
    assert bool(((opened.delta["w"] - value).abs() <= step * (1 + 1e-4)).all())
    assert not torch.equal(opened.delta["w"], value)


def test_stochastic_rounding_is_unbiased_and_keyed() -> None:
    value = random_normal(2, 4, 25)
    update = make_update({"w": value})
    opened = [encode_and_decode(Int8Quantizer(), update, Key(0) / number)[1].delta["w"] for number in range(400)]
    step = value.abs().amax(1, keepdim=True) / 127
    # The mean of 400 draws, each of a variance of at most a quarter of a step squared.
    assert bool(((torch.stack(opened).mean(0) - value).abs() < 5 * 0.5 * step / 20).all())
    assert torch.equal(encode_and_decode(Int8Quantizer(), update, Key(0) / 7)[1].delta["w"], opened[7])
    assert not torch.equal(opened[7], opened[8])


def test_quantization_is_exact_for_whole_steps_and_zeros() -> None:
    grid = torch.arange(-127, 128, dtype=torch.float32).repeat(2, 1) * torch.tensor([[0.5], [4.0]])
    given = {"grid": grid, "still": torch.zeros(70), "few": random_normal(0, 64)}
    sent, opened = encode_and_decode(Int8Quantizer(), make_update(given))
    assert tensors.equal(opened.delta, given)
    assert sent.slots[SCALE].keys() == {"grid", "still"}, "64 numbers are too few for a scale to pay"


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_quantization_keeps_non_finite_values_non_finite(odd: float) -> None:
    value = random_normal(0, 70)
    value[3] = odd
    assert not bool(encode_and_decode(Int8Quantizer(), make_update({"w": value}))[1].delta["w"].isfinite().all())


def test_each_name_has_draws_of_its_own_in_the_type_of_its_values() -> None:
    value = random_normal(5, 9, 30).double()
    sent, _ = Int8Quantizer().encode(make_update({"v": value, "w": value}), {}, Key(3))
    assert not torch.equal(sent.delta["v"], sent.delta["w"])
    steps = value / sent.slots[SCALE]["w"][:, None]
    uniform = torch.rand(9, 30, generator=(Key(3) / "w").generator(), dtype=torch.float64)
    assert torch.equal(sent.delta["w"], (steps + uniform).floor().clamp(-127, 127).to(torch.int8))


@pytest.mark.parametrize(
    ("value", "scale"), [(torch.ones(9, 30), torch.ones(9)), (torch.ones(9, 30).int(), torch.ones(9))]
)
def test_only_eight_bits_have_a_scale(value: Tensor, scale: Tensor) -> None:
    with pytest.raises(CompressionError, match=r"'w' is torch\.\w+32 \(9, 30\) with a scale of shape \(9,\)"):
        Int8Quantizer().decode_update(make_update({"w": value}, **{SCALE: {"w": scale}}))
