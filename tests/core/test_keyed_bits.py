"""Random words by seed, place and coordinates: uniform, independent, and the same in every batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats
from torch import Tensor

from partita.core.keyed_bits import example_seeds, keep_factors, place_id, place_tensor, random_words, uniforms
from partita.core.rng import Key

KEY = Key(5) / "round" / 0
PLACE = place_id("layer.0.dropout")


def seeds_of(count: int, step: int = 0, key: Key = KEY) -> Tensor:
    return example_seeds([key], step, torch.arange(count))[0]


def words_of(examples: int, *sizes: int, place: int = PLACE, step: int = 0) -> Tensor:
    return random_words(seeds_of(examples, step), place, sizes)


def correlation(left: Tensor, right: Tensor) -> float:
    pair = torch.stack([uniforms(left).flatten(), uniforms(right).flatten()]).double()
    return float(torch.corrcoef(pair)[0, 1])


def test_seeds_depend_on_key_step_and_example_only() -> None:
    keys = [KEY / "client" / name for name in "abc"]
    block = example_seeds(keys, 4, torch.arange(9))
    assert block.shape == (3, 9)
    assert block.unique().numel() == 27
    assert torch.equal(block[1], seeds_of(9, 4, keys[1]))
    other_order = torch.tensor([[5, 2], [0, 8], [3, 3]])
    assert torch.equal(block.gather(1, other_order), example_seeds(keys, 4, other_order))
    assert not torch.isin(block, example_seeds(keys, 5, torch.arange(9))).any()


def test_seeds_of_neighboring_steps_do_not_overlap() -> None:
    drawn = torch.cat([seeds_of(300, step) for step in range(300)])
    assert drawn.unique().numel() == 300 * 300
    assert stats.kstest(drawn.double().numpy() / 2**64 + 0.5, "uniform").pvalue > 1e-3


def test_words_depend_on_coordinates_and_not_on_sizes() -> None:
    long = words_of(6, 4, 11, 16)
    assert torch.equal(words_of(3, 4, 7, 16), long[:3, :, :7])
    assert torch.equal(words_of(6, 2, 3, 5), long[:, :2, :3, :5])
    order = torch.tensor([4, 0, 2])
    assert torch.equal(random_words(seeds_of(6)[order], PLACE, (4, 11, 16)), long[order])


@pytest.mark.parametrize("sizes", [(), (512,), (16, 64), (2, 8, 64)])
def test_words_are_uniform(sizes: tuple[int, ...]) -> None:
    drawn = uniforms(words_of(4096 if not sizes else 64, *sizes)).flatten()
    counts = torch.histc(drawn, 64, 0, 1).numpy()
    assert stats.chisquare(counts).pvalue > 1e-3


def test_words_are_independent_of_neighbors_seeds_places_and_steps() -> None:
    words = words_of(64, 32, 128)
    limit = 4.5 / words.numel() ** 0.5  # standard deviations of the correlation
    for shifted in (words.roll(1, 0), words.roll(1, 1), words.roll(1, 2), words.roll((1, 1), (1, 2))):
        assert abs(correlation(words, shifted)) < limit
    for other in (words_of(64, 32, 128, place=place_id("layer.1.dropout")), words_of(64, 32, 128, place=PLACE + 1)):
        assert abs(correlation(words, other)) < limit
    assert abs(correlation(words, words_of(64, 32, 128, step=1))) < limit


def test_parity_of_four_corners_of_a_rectangle_is_fair() -> None:
    """Rows and columns enter by an exclusive or, which cancels over a rectangle; the hash must break this up."""
    kept = words_of(64, 64, 128) > 0
    corners = kept[:, :32, :64] ^ kept[:, 32:, :64] ^ kept[:, :32, 64:] ^ kept[:, 32:, 64:]
    assert stats.binomtest(int(corners.sum()), corners.numel()).pvalue > 1e-3


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_factors_keep_the_right_share_and_the_expectation(rate: float) -> None:
    words = words_of(64, 32, 128)
    factors = keep_factors(words, rate, torch.float32)
    assert set(factors.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - rate)).item() if rate < 1 else 0.0}
    dropped = int((factors == 0).sum())
    if rate in (0.0, 1.0):
        assert dropped == rate * words.numel()
    else:
        assert stats.binomtest(dropped, words.numel(), rate).pvalue > 1e-3
        assert abs(float(factors.mean()) - 1) < 5 * (rate / (1 - rate) / words.numel()) ** 0.5


def test_numbers_of_kept_elements_by_row_are_binomial() -> None:
    kept = (keep_factors(words_of(256, 64, 64), 0.3, torch.float32) > 0).sum(-1).flatten().numpy()
    edges = [int(stats.binom.ppf(share, 64, 0.7)) for share in (0.1, 0.25, 0.4, 0.6, 0.75, 0.9)]
    bounds = [-1, *edges, 64]
    counts = [int(((kept > low) & (kept <= high)).sum()) for low, high in itertools.pairwise(bounds)]
    shares = [stats.binom.cdf(high, 64, 0.7) - stats.binom.cdf(low, 64, 0.7)
              for low, high in itertools.pairwise(bounds)]  # fmt: skip
    assert stats.chisquare(counts, [share * len(kept) for share in shares]).pvalue > 1e-3


def test_words_are_the_same_on_every_machine() -> None:
    """The first draws, in plain Python integers."""
    mask = 2**32 - 1

    def half_mixed(word: int) -> int:
        word = word * 0x7FEB352D & mask
        return (word ^ word >> 15) * 0x846CA68B & mask

    def mixed(word: int) -> int:
        word = half_mixed(word ^ word >> 16)
        return word ^ word >> 16

    seed = int(seeds_of(2)[1]) % 2**64
    row = mixed(mixed((seed ^ PLACE) & mask) ^ seed >> 32 ^ PLACE >> 32)
    row = mixed(row ^ mixed(3 + 0x9E3779B9 & mask))
    word = half_mixed(row ^ mixed(5 + 2 * 0x9E3779B9 & mask))
    assert int(words_of(2, 4, 6)[1, 3, 5]) % 2**32 == word


# An independent implementation, in Python's integers: splitmix64 for seeds, lowbias32 for words.


def mix32(word: int) -> int:
    word ^= word >> 16
    return finish32(word) ^ (finish32(word) >> 16)


def finish32(word: int) -> int:
    word = word * 0x7FEB352D % 2**32
    return (word ^ (word >> 15)) * 0x846CA68B % 2**32


def splitmix64(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def test_seeds_and_words_are_those_of_the_published_hashes() -> None:
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first output of splitmix64 from the state 0
    start, step = int.from_bytes(KEY.digest(8), "big"), 7
    of_step = splitmix64((start + step * 0x9E3779B97F4A7C15) % 2**64)
    seeds = [splitmix64((of_step + (place + 1) * 0x9E3779B97F4A7C15) % 2**64) for place in range(5)]
    assert [seed % 2**64 for seed in seeds_of(5, step).tolist()] == seeds
    for seed, found in zip(seeds, words_of(5, 3, 2, step=step), strict=True):
        first = mix32(seed % 2**32 ^ PLACE % 2**32)
        first = mix32(first ^ seed >> 32 ^ PLACE >> 32)
        for row, column in itertools.product(range(3), range(2)):
            of_row = mix32(first ^ mix32((row + 0x9E3779B9) % 2**32))
            word = finish32(of_row ^ mix32((column + 2 * 0x9E3779B9) % 2**32))
            assert int(found[row, column]) % 2**32 == word


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.75])
def test_the_smallest_kept_word_is_the_rate(rate: float) -> None:
    bound = round(rate * 2**32) - 2**31
    words = torch.tensor([-(2**31), bound - 1, bound, 2**31 - 1], dtype=torch.int32)
    assert keep_factors(words, rate, torch.float64).tolist() == pytest.approx([0, 0, 1 / (1 - rate), 1 / (1 - rate)])
    assert keep_factors(words, 1.0, torch.float64).dtype == torch.float64


@pytest.mark.parametrize("place", [PLACE, 0, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_place_as_a_tensor_draws_the_same_words(place: int) -> None:
    assert torch.equal(random_words(seeds_of(3), place_tensor(place), (4,)), words_of(3, 4, place=place))
