"""The statistics of an audit, against textbook formulas written independently."""

from __future__ import annotations

import math

import evidence
import numpy as np
import pytest
from evidence import Check
from scipy.stats import binom, chi2, kstest, norm
from scipy.stats import t as student


def test_check_fails_below_its_share_of_the_significance() -> None:
    checks = [
        Check("one", 1.0, 1.1, 5.001e-7, 10, (0.9, 1.2)),
        Check("two", 0.0, 0.5, 5e-7, 20),
        Check("three", 2.0, 3.0, 4.999e-7, 30, (2.5, 3.5)),
    ]
    first, second = evidence.judge(checks[:2])
    assert first == {
        "what": "one",
        "charged": 1.0,
        "found": 1.1,
        "interval": [0.9, 1.2],
        "numbers": 10,
        "p": 5.001e-7,
        "passed": True,
    }
    assert (second["passed"], second["interval"]) == (True, None)
    assert [check["passed"] for check in evidence.judge(checks[1:])] == [True, False]
    assert [check["passed"] for check in evidence.judge(checks)] == [True] * 3, (
        "each of three checks has a third of 1e-6"
    )


def two_sided_chance(squares: float, count: int) -> float:
    return float(min(1.0, 2 * chi2.cdf(squares, count), 2 * chi2.sf(squares, count)))


@pytest.mark.parametrize("parts", [{"a": (130.0, 100), "b": (35.0, 50)}, {"a": (99.5, 100), "b": (90.0, 60)}])
def test_deviation_pools_all_parts_and_its_p_value_is_the_worst_part(
    parts: dict[str, tuple[float, int]],
) -> None:
    check = evidence.check_deviation("noise", 2.5, parts)
    squares, numbers = sum(square for square, _ in parts.values()), sum(count for _, count in parts.values())
    assert (check.what, check.charged, check.numbers) == ("noise", 2.5, numbers)
    assert check.found == pytest.approx(2.5 * math.sqrt(squares / numbers))
    assert check.interval == pytest.approx(
        [2.5 * math.sqrt(squares / chi2.ppf(0.995, numbers)), 2.5 * math.sqrt(squares / chi2.ppf(0.005, numbers))]
    )
    assert check.interval is not None
    assert check.interval[0] < check.found < check.interval[1]
    chances = [
        two_sided_chance(squares, numbers),
        *(two_sided_chance(*part) for part in parts.values() if part[0] != 99.5),
    ]
    assert check.p == pytest.approx(min(1.0, 3 * min(chances)), rel=1e-9)


def test_deviation_check_finds_one_wrong_part_in_a_plausible_whole() -> None:
    parts = {"a": (1600.0, 1000), "b": (400.0, 1000)}
    assert evidence.check_deviation("noise", 1.0, parts).p < 1e-20
    assert evidence.check_deviation("noise", 1.0, {"both": (2000.0, 2000)}).p == 1.0


@pytest.mark.parametrize(("ratio", "fine"), [(1.0049, True), (0.9951, True), (1.0051, False), (0.9949, False)])
def test_deviation_within_half_a_percent_is_tolerated(ratio: float, fine: bool) -> None:
    count = 10**8
    found = evidence._chance_of_squares(ratio**2 * count, count)
    assert (found == 1.0) if fine else (found < 1e-6)
    few = evidence._chance_of_squares(130.0, 100)
    assert few == pytest.approx(two_sided_chance(130.0, 100))


def test_normality_check_is_a_kolmogorov_smirnov_test() -> None:
    numbers = np.random.default_rng(3).standard_normal(200) * 1.2
    check, test = evidence.check_normality("shape", numbers), kstest(numbers, "norm")
    assert check == Check("shape", 0.0, float(test.statistic), float(test.pvalue), 200)


def test_p_value_of_a_cosine_matches_student_t() -> None:
    """A single number has no direction. A cosine of 1, or above by rounding, has p-value 0."""
    cosines = np.array([0.9, 0.9, -0.9, 0.3, 1.0, 1.0 + 2e-16, -1.0, 0.0])
    lengths = np.array([1, 2, 2, 50, 10, 10, 3, 7])
    found = evidence.chance_of_cosine(cosines, lengths)
    assert found[0] == 1.0
    for place in (1, 2, 3):
        cosine, freedom = abs(cosines[place]), lengths[place] - 1
        wanted = 2 * student.sf(cosine * math.sqrt(freedom / (1 - cosine**2)), freedom)
        assert found[place] == pytest.approx(wanted)
    assert found[4:7].tolist() == [0.0] * 3
    assert found[7] == 1.0


def test_count_check_tests_each_group_and_reports_the_total() -> None:
    groups = {0.3: (45, 100), 0.5: (24, 60)}
    check = evidence.check_counts("sampled", groups)
    chances = [
        2 * min(binom.cdf(count, trials, share), 1 - binom.cdf(count - 1, trials, share))
        for share, (count, trials) in groups.items()
    ]
    reach = 2.5758293035489004 * math.sqrt(0.3 * 0.7 * 100 + 0.5 * 0.5 * 60) / 160
    assert (check.what, check.numbers) == ("sampled", 160)
    assert check.charged == pytest.approx((30 + 30) / 160)
    assert check.found == pytest.approx(69 / 160)
    assert check.p == pytest.approx(2 * min(chances))
    assert check.interval == pytest.approx([69 / 160 - reach, 69 / 160 + reach])
    assert evidence.check_counts("sampled", {0.5: (30, 60)}).p == 1.0
    assert evidence.check_counts("sampled", {0.5: (30, 60), 0.4: (24, 60)}).p == 1.0


def test_dispersion_check_compares_batch_sizes_with_a_binomial() -> None:
    counts, shares = np.array([40, 50, 60, 70]), np.array([0.2, 0.3, 0.4, 0.5])
    sizes = np.array([8, 20, 20, 33])
    check = evidence.check_dispersion(sizes, counts, shares)
    draw = np.random.default_rng(0).random(4)
    scores = norm.ppf(binom.cdf(sizes - 1, counts, shares) + draw * binom.pmf(sizes, counts, shares))
    squares = sum(score**2 for score in scores)
    expected = [(8 - 8) ** 2 / 6.4, (20 - 15) ** 2 / 10.5, (20 - 24) ** 2 / 14.4, (33 - 35) ** 2 / 17.5]
    assert (check.charged, check.numbers) == (1.0, 4)
    assert check.found == pytest.approx(sum(expected) / 4)
    assert check.p == pytest.approx(two_sided_chance(squares, 4))


@pytest.mark.parametrize("size", [0, 2000])
def test_impossible_batch_size_gives_a_tiny_positive_p_value(size: int) -> None:
    check = evidence.check_dispersion(np.array([size]), np.array([2000]), np.array([0.5]))
    assert 0 < check.p < 1e-12


@pytest.mark.parametrize(("below", "above", "wanted"), [(0.1, 0.9, 0.2), (0.9, 0.05, 0.1), (0.6, 0.7, 1.0)])
def test_two_sided_p_value_doubles_the_smaller_tail_up_to_one(below: float, above: float, wanted: float) -> None:
    assert evidence.chance_of_either(below, above) == pytest.approx(wanted)


def test_deviation_at_the_tolerated_error_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "ROUNDING", 0.5)  # a ratio of 1.5 is exact in floating point
    assert evidence._chance_of_squares(2.25 * 1000, 1000) < 1e-6
    assert evidence._chance_of_squares(2.24 * 1000, 1000) == 1.0
