"""Random numbers for privacy: the ChaCha20 stream against RFC 8439, and the noise drawn from it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_on_cpu import CpuKernels
from scipy import stats

from partita.core import chacha
from partita.core.noise import (
    _ADD_ONCE,
    GRID_BITS,
    _grid_exponent,
    add_noise,
    add_noise_once,
    gaussian_noise,
)
from partita.core.rng import Key

# RFC 8439, appendix A.1: the key stream of a zero key and nonce, blocks 0 and 1.
RFC = bytes.fromhex(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
)
KEYS = [bytes(range(start, start + 32)) for start in (0, 7, 99)]


def test_cipher_stream_matches_rfc_8439() -> None:
    assert chacha._cipher_stream(bytes(32), 2) == RFC


@pytest.mark.slow
def test_gpu_kernels_compiled_for_cpu_compute_the_stream_and_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' C++ on the CPU. tests/training/test_devices.py runs the kernels themselves on a GPU."""
    kernels, cpu = CpuKernels(tmp_path), torch.device("cpu")
    monkeypatch.setattr(chacha, "launch", kernels.launch)
    chacha._check_kernels.__wrapped__(cpu)
    keys, counts = [*KEYS, *KEYS, KEYS[1]], [9, 0, 64, 1, 17, 0, 8]
    found = chacha._kernel_normals(keys, counts, cpu, 0.7)
    torch.testing.assert_close(found, chacha.normal(keys, counts, std=0.7), rtol=1e-12, atol=1e-12)
    assert kernels.launches[-1] == ("normals", 2 + 8 + 1 + 3 + 1), "one launch for all keys"


def test_draws_do_not_depend_on_other_draws_of_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [10, 0, 1000]
    together = chacha.normal(KEYS, counts)
    apart = [chacha.normal([key], [count]) for key, count in zip(KEYS, counts, strict=True)]
    monkeypatch.setattr(chacha, "_PASS", 1)
    assert torch.equal(together, torch.cat(apart))
    assert torch.equal(together, chacha.normal(KEYS, counts))


def test_normal_draws_are_gaussian_and_uncorrelated() -> None:
    draw = chacha.normal(KEYS[:1], [400_000]).numpy()
    assert stats.kstest(draw, "norm").pvalue > 1e-4
    assert abs(float(stats.kurtosis(draw))) < 0.05
    assert np.sort(np.abs(draw))[-1] > 4.0, "the draws have tails"
    for lag in (1, 2, 3, 4, 5, 8, 64):  # the two of a Box-Muller pair are 4 apart
        assert abs(np.corrcoef(draw[:-lag], draw[lag:])[0, 1]) < 5 / math.sqrt(len(draw))
        assert abs(np.corrcoef(draw[:-lag] ** 2, draw[lag:] ** 2)[0, 1]) < 5 / math.sqrt(len(draw))


def test_extreme_words_give_finite_normal_draws() -> None:
    for word in (0, -1, 2**63 - 1, -(2**63), 1):
        made = chacha._box_muller(torch.full((8,), word))
        assert bool(torch.isfinite(made).all())
    assert float(chacha._box_muller(torch.zeros(8, dtype=torch.int64)).abs().max()) == pytest.approx(9.42, abs=0.01)


def test_normal_draws_match_the_box_muller_formula() -> None:
    """The Box-Muller formula in plain Python, on cipher words and on words at the ends of the integer range."""
    ends = [1, 2, 2**63 - 1, -(2**63), 0, -1, 2**62, -(2**62)]
    words = [*ends, *ends[::-1], *np.frombuffer(chacha._cipher_stream(KEYS[1], 50), np.int64).tolist()]
    wanted = []
    for start in range(0, len(words), 8):
        radii = [math.sqrt(-2 * math.log((word % 2**63 + 0.5) / 2**63)) for word in words[start : start + 4]]
        angles = [2 * math.pi * (word / 2**64) for word in words[start + 4 : start + 8]]
        wanted += [radius * math.cos(angle) for radius, angle in zip(radii, angles, strict=True)]
        wanted += [radius * math.sin(angle) for radius, angle in zip(radii, angles, strict=True)]
    np.testing.assert_allclose(chacha._box_muller(torch.tensor(words)).numpy(), wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(chacha.normal(KEYS[1:2], [395]).numpy(), wanted[16:411], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ([], []),
        ([0, 0], [(0, 2)]),
        ([8, 8], [(0, 2)]),
        ([8, 8, 1], [(0, 2), (2, 3)]),
        ([8, 8, 8, 8, 8], [(0, 2), (2, 4), (4, 5)]),
        ([100], [(0, 1)]),
        ([3, 100, 3, 13, 1], [(0, 1), (1, 2), (2, 4), (4, 5)]),
    ],
)
def test_passes_group_as_many_draws_as_fit(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], wanted: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(chacha, "_PASS", 2)  # two blocks hold 16 numbers
    assert list(chacha._passes(counts)) == wanted


def test_bernoulli_is_true_strictly_below_the_probability() -> None:
    words = np.frombuffer(chacha._cipher_stream(KEYS[0], 3), np.uint64)[:20]
    draws = [int(word) // 2**11 / 2**53 for word in words]
    for probability in (0.0, *draws, 1.0):
        found = chacha.bernoulli(KEYS[0], 20, probability)
        assert found.tolist() == [draw < probability for draw in draws]


def test_normal_draws_use_the_requested_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(chacha, "_check_kernels", lambda device: asked.append(("check", device.type)))
    monkeypatch.setattr(
        chacha, "_kernel_normals", lambda keys, counts, device, std: asked.append((counts, device.type, std))
    )
    chacha.normal(KEYS[:2], [10, 3], torch.device("cuda"), 0.5)
    assert asked == [("check", "cuda"), ([10, 3], "cuda", 0.5)]
    chacha.normal(KEYS[:2], [10, 3])
    assert len(asked) == 2


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["stream_words", "normals"])
def test_gpu_kernels_with_different_results_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = CpuKernels(tmp_path)

    def wrong(source: str, own: str, count: int, *args: torch.Tensor | int) -> None:
        kernels.launch(source, own, count, *args)
        if own == name:
            out = args[-2]
            assert isinstance(out, torch.Tensor)
            out[-1] += 1

    monkeypatch.setattr(chacha, "launch", wrong)
    with pytest.raises(chacha.CipherError, match="the stream of this GPU differs"):
        chacha._check_kernels.__wrapped__(torch.device("cpu"))


def test_draws_that_are_too_large_are_refused() -> None:
    with pytest.raises(chacha.CipherError, match="one draw is limited to"):
        chacha.normal(KEYS[:1], [8 * 2**32 + 1])
    with pytest.raises(chacha.CipherError, match="a draw on a GPU is limited to"):
        chacha._streams(KEYS[:2], [8 * 2**31, 8 * 2**31], torch.device("cpu"))


@pytest.mark.parametrize("rate", [0.0, 0.013, 0.4, 1.0])
def test_poisson_draws_have_the_requested_rate(rate: float) -> None:
    """Within five standard deviations over 400,000 draws."""
    drawn = sum(len((Key(4) / step).poisson(1000, rate)) for step in range(400))
    assert abs(drawn - 400_000 * rate) <= 5 * math.sqrt(400_000 * rate * (1 - rate))


def test_every_bit_of_a_secret_changes_the_noise() -> None:
    """All 256 bits count, while torch's generator keeps 32 bits of a seed on a CPU and 64 on a GPU."""
    like = {"w": torch.empty(64)}
    root = int.from_bytes(KEYS[2], "big")
    noise = gaussian_noise(like, Key(root), 1.0)["w"]
    others = [gaussian_noise(like, Key(root ^ 1 << bit), 1.0)["w"] for bit in range(256)]
    assert max(abs(float(torch.dot(noise, other)) / 64) for other in others) < 0.75
    assert len({float(other[0]) for other in others}) == 256


@pytest.mark.slow
def test_public_draws_use_more_than_32_seed_bits() -> None:
    """With 32 bits, about ten of 300,000 keys would share their first draw; with 53 bits none does."""
    keys = [Key(0) / number for number in range(300_000)]
    assert len({key.uniform() for key in keys}) == len(keys)
    first = {torch.randint(2**62, (1,), generator=(Key(1) / number).generator()).item() for number in range(2000)}
    assert len(first) == 2000
    state = Key(1).generator().get_state()
    assert not torch.equal(state, torch.Generator().manual_seed(Key(1).seed() % 2**32).get_state())
    assert state[24 : 24 + 8 * 624].view(torch.int64).unique().numel() > 600, "all words of the state are filled"


def test_generator_from_a_key_is_uniform_and_normal() -> None:
    uniform = torch.rand(100_000, generator=Key(2).generator(), dtype=torch.float64).numpy()
    normal = torch.randn(100_000, generator=Key(3).generator()).numpy()
    assert stats.kstest(uniform, "uniform").pvalue > 1e-4
    assert stats.kstest(normal, "norm").pvalue > 1e-4


# ---- releasing noisy values


@pytest.mark.parametrize("std", [1e-6, 0.3, 700.0])
def test_released_values_lie_on_a_grid_independent_of_the_input(std: float) -> None:
    """Mironov's attack infers the value from the gaps between representable floating-point sums."""
    grid = 2.0 ** (math.floor(math.log2(std)) - GRID_BITS)
    noise = gaussian_noise({"w": torch.empty(20_000)}, Key(5), std)["w"]
    for value in (0.0, 0.1 * std, math.pi * std):
        released = add_noise(torch.full((20_000,), value), noise, std)
        steps = released.double() / grid
        assert torch.equal(steps, steps.round())
        assert bool((steps % 2).any()), "the grid is no coarser than needed"
        assert released.dtype == torch.float32
        assert float(released.double().std()) == pytest.approx(std, rel=0.02)
        assert float(released.double().mean()) == pytest.approx(value, abs=0.05 * std)


def test_released_value_is_the_grid_point_nearest_to_value_plus_noise() -> None:
    value, noise = torch.tensor([0.5, 1.0, -2.0, 0.0]), torch.tensor([0.25, -3.0, 0.3, 0.0004], dtype=torch.float64)
    wanted = [0.75, -2.0, round(-1.7 * 1024) / 1024, 0.0]
    assert add_noise(value, noise, 1.0).tolist() == wanted


def test_each_name_gets_independent_noise() -> None:
    """Shared noise would cancel when a server subtracts two tensors. A name's noise does not depend on other names."""
    like = {"a": torch.empty(64), "b": torch.empty(64), "c": torch.empty(2, 32)}
    noise = gaussian_noise(like, Key(9), 2.0)
    drawn = [noise[name].flatten() for name in like]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert abs(float(np.corrcoef(drawn[one].numpy(), drawn[other].numpy())[0, 1])) < 0.6
    for name in like:
        assert torch.equal(gaussian_noise({name: like[name]}, Key(9), 2.0)[name], noise[name])
        alone = chacha.normal([(Key(9) / name).digest(32)], [64])
        assert torch.equal(2.0 * alone, noise[name].flatten())


def test_nearby_values_reach_the_same_grid_points() -> None:
    """Without the grid, the sums of two nearby values hardly overlap; on the grid they reach the same points."""
    noise = gaussian_noise({"w": torch.empty(200_000)}, Key(6), 1.0)["w"]
    reached = [set(add_noise(torch.full((200_000,), value), noise, 1.0).tolist()) for value in (0.0, 1e-3)]
    core = [step * 2.0**-GRID_BITS for step in range(-512, 512)]  # half a standard deviation: each is hit 80 times
    assert all(point in part for point in core for part in reached)
    plain = [set((torch.full((200_000,), value).double() + noise).tolist()) for value in (0.0, 1e-3)]
    assert len(plain[0] & plain[1]) < 10


def test_error_names_the_extra_when_cryptography_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    chacha._need.cache_clear()
    with pytest.raises(chacha.CipherError, match=r"pip install 'partita\[privacy\]'"):
        Key(0).poisson(5, 0.5)
    chacha._need.cache_clear()


def test_kernel_adds_noise_as_the_cpu_does_and_overwrites_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value, noise = 1e3 * torch.randn(50), gaussian_noise({"w": torch.empty(50)}, Key(1), 0.3)["w"]
    held, released = noise.clone(), torch.empty(50)
    CpuKernels(tmp_path).launch(_ADD_ONCE, "add_noise_once", 50, value, held, released, _grid_exponent(0.3))
    assert torch.equal(released, add_noise(value, noise, 0.3))
    assert bool(held.isnan().all())


def test_noise_that_was_added_is_gone() -> None:
    value, noise = torch.randn(5), gaussian_noise({"w": torch.empty(5)}, Key(1), 0.3)["w"]
    wanted = add_noise(value, noise, 0.3)
    assert torch.equal(add_noise_once(value, noise, 0.3), wanted)
    assert bool(noise.isnan().all())
