"""Quantization: whole again at the server to a step, unbiased, and by its key."""

from __future__ import annotations

import pytest
import torch
from compression_fixtures import draw, there_and_back, update_of
from torch import Tensor

from partita.compression import CompressionError
from partita.compression.quantize import SCALE, Int8Quantizer
from partita.core import tensors
from partita.core.rng import Key

# ---- eight bits


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("shape", [(100,), (9, 30), (3, 5, 30)])
def test_a_number_is_off_by_less_than_a_step_of_its_row(shape: tuple[int, ...], rows: bool) -> None:
    value = draw(1, *shape) * torch.arange(1, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))
    sent, opened = there_and_back(Int8Quantizer(rows), update_of({"w": value}))
    assert sent.delta["w"].dtype == torch.int8
    assert sent.delta["w"].shape == value.shape
    whole = rows and value.ndim > 1
    largest = value.flatten(1).abs().amax(1) if whole else value.abs().max().view(1)
    step = (largest / 127).view(-1, *[1] * (value.ndim - 1))
    assert sent.slots[SCALE]["w"].shape == largest.shape
    assert bool(((opened.delta["w"] - value).abs() <= step * (1 + 1e-4)).all())
    assert not torch.equal(opened.delta["w"], value)


def test_rounding_keeps_the_mean_and_follows_its_key() -> None:
    value = draw(2, 4, 25)
    update = update_of({"w": value})
    opened = [there_and_back(Int8Quantizer(), update, Key(0) / number)[1].delta["w"] for number in range(400)]
    step = value.abs().amax(1, keepdim=True) / 127
    # The mean of 400 draws, each of a variance of at most a quarter of a step squared.
    assert bool(((torch.stack(opened).mean(0) - value).abs() < 5 * 0.5 * step / 20).all())
    assert torch.equal(there_and_back(Int8Quantizer(), update, Key(0) / 7)[1].delta["w"], opened[7])
    assert not torch.equal(opened[7], opened[8])


def test_whole_steps_and_zeros_arrive_exactly() -> None:
    grid = torch.arange(-127, 128, dtype=torch.float32).repeat(2, 1) * torch.tensor([[0.5], [4.0]])
    given = {"grid": grid, "still": torch.zeros(70), "few": draw(0, 64)}
    sent, opened = there_and_back(Int8Quantizer(), update_of(given))
    assert tensors.equal(opened.delta, given)
    assert sent.slots[SCALE].keys() == {"grid", "still"}, "64 numbers are too few for a scale to pay"


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_is_noticed(odd: float) -> None:
    value = draw(0, 70)
    value[3] = odd
    assert not bool(there_and_back(Int8Quantizer(), update_of({"w": value}))[1].delta["w"].isfinite().all())


def test_each_name_has_draws_of_its_own_in_the_type_of_its_values() -> None:
    value = draw(5, 9, 30).double()
    sent, _ = Int8Quantizer().encode(update_of({"v": value, "w": value}), {}, Key(3))
    assert not torch.equal(sent.delta["v"], sent.delta["w"])
    steps = value / sent.slots[SCALE]["w"][:, None]
    uniform = torch.rand(9, 30, generator=(Key(3) / "w").generator(), dtype=torch.float64)
    assert torch.equal(sent.delta["w"], (steps + uniform).floor().clamp(-127, 127).to(torch.int8))


@pytest.mark.parametrize(
    ("value", "scale"), [(torch.ones(9, 30), torch.ones(9)), (torch.ones(9, 30).int(), torch.ones(9))]
)
def test_only_eight_bits_have_a_scale(value: Tensor, scale: Tensor) -> None:
    with pytest.raises(CompressionError, match=r"'w' is torch\.\w+32 \(9, 30\) with a scale of shape \(9,\)"):
        Int8Quantizer().decode_update(update_of({"w": value}, **{SCALE: {"w": scale}}))
