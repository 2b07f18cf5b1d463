"""Random numbers for privacy: the ChaCha20 stream against RFC 8439, and the noise drawn from it."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from partita.core import chacha
from partita.core.noise import GRID_BITS, add_noise, gaussian_noise
from partita.core.rng import Key

# RFC 8439, appendix A.1: the key stream of a zero key and nonce, blocks 0 and 1.
RFC = bytes.fromhex(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
)
KEYS = [bytes(range(start, start + 32)) for start in (0, 7, 99)]


def test_cipher_stream_matches_rfc_8439() -> None:
    assert chacha._cipher_stream(bytes(32), 2) == RFC


def test_gpu_kernel_source_compiled_for_cpu_computes_the_cipher_stream(tmp_path: Path) -> None:
    """Compiles the kernel's C++ for the CPU. tests/training/test_devices.py runs the kernel itself on a GPU."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    key = int.from_bytes(KEYS[2], "little")
    words = [key >> 64 * place & 2**64 - 1 for place in range(4)]
    given = ", ".join(f"(long long){word}ull" for word in words)
    main = f'int main() {{ for (long long i = 0; i < 64; i++) printf("%llu\\n", chacha20<long long>(i, {given})); }}'
    (tmp_path / "kernel.cpp").write_text(f"#include <cstdio>\n{chacha._KERNEL}\n{main}\n")
    subprocess.run([compiler, "-w", "-o", tmp_path / "kernel", tmp_path / "kernel.cpp"], check=True)
    printed = subprocess.run([tmp_path / "kernel"], check=True, capture_output=True, text=True).stdout.split()
    assert np.array(printed, np.uint64).tobytes() == chacha._cipher_stream(KEYS[2], 8)


def test_draws_do_not_depend_on_other_draws_of_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [10, 0, 1000]
    together = chacha.normal(KEYS, counts)
    apart = [chacha.normal([key], [count])[0] for key, count in zip(KEYS, counts, strict=True)]
    monkeypatch.setattr(chacha, "_PASS", 1)
    in_passes = chacha.normal(KEYS, counts)
    for one, other, third in zip(together, apart, in_passes, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def test_normal_draws_are_gaussian_and_uncorrelated() -> None:
    draw = chacha.normal(KEYS[:1], [400_000])[0].numpy()
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
    np.testing.assert_allclose(chacha.normal(KEYS[1:2], [395])[0].numpy(), wanted[16:411], rtol=1e-12, atol=1e-12)


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


def test_kernel_receives_word_indices_and_key_words() -> None:
    """A fake kernel on the CPU looks the words up in the library's stream. Equal lengths share a launch."""
    streams = {key: torch.from_numpy(np.frombuffer(chacha._cipher_stream(key, 5), np.int64).copy()) for key in KEYS}
    launches = []

    def kernel(index: torch.Tensor, *words: torch.Tensor) -> torch.Tensor:
        assert len(words) == 4
        assert all(word.dtype == torch.int64 and word.shape == (len(words[0]), 1) for word in words)
        launches.append(len(words[0]))
        return torch.stack([streams[key.numpy().tobytes()][index] for key in torch.cat(words, 1)])

    blocks, keys = [2, 0, 5, 2], [*KEYS[:3], KEYS[1]]
    found = chacha._kernel_stream(kernel, keys, blocks, torch.device("cpu"))
    for key, count, words in zip(keys, blocks, found, strict=True):
        assert words.numpy().tobytes() == chacha._cipher_stream(key, count)
    assert launches == [2, 1, 1]


def test_normal_draws_use_the_requested_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def stream(keys: list[bytes], blocks: list[int], device: torch.device) -> list[torch.Tensor]:
        asked.append(device.type)
        return [torch.zeros(8 * count, dtype=torch.int64) for count in blocks]

    monkeypatch.setattr(chacha, "_stream", stream)
    chacha.normal(KEYS[:2], [10, 3], torch.device("cuda"))
    chacha.normal(KEYS[:2], [10, 3])
    assert asked == ["cuda", "cpu"]


@pytest.mark.parametrize("wrong", [0, 1, 2**62])
def test_gpu_kernel_with_a_different_stream_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    def stream(kernel: object, keys: list[bytes], blocks: list[int], device: torch.device) -> list[torch.Tensor]:
        words = torch.tensor(np.frombuffer(chacha._cipher_stream(keys[0], blocks[0]), np.int64).tolist())
        words[-1] ^= wrong
        return [words]

    monkeypatch.setattr(chacha, "create_jit_fn", lambda source: source)
    monkeypatch.setattr(chacha, "_kernel_stream", stream)
    if wrong:
        with pytest.raises(chacha.CipherError, match="the stream of this GPU differs"):
            chacha._kernel.__wrapped__()
    else:
        assert chacha._kernel.__wrapped__() == chacha._KERNEL


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
        [alone] = chacha.normal([(Key(9) / name).digest(32)], [64])
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
