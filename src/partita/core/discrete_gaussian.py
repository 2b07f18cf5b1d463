"""Exact draws from the discrete Gaussian: integers x with probability in proportion to exp(-x^2 / (2 variance)).

Rejection from a discrete Laplace distribution (Canonne, Kairouz, Steinke 2020, algorithms 2 and 3). Its scale is a
power of two, so that a candidate is a few bits of the stream, and both rejections are one decision.

A decision compares a uniform number with exp(-x) for a rational x. Float64 decides only if the two are further apart
than `MARGIN`, which exceeds its error by a factor of about 1000. All other decisions are made with as many digits and
random bits as they need. So the draws have exactly the stated probabilities, if the key's stream is uniform.
"""

from __future__ import annotations

import hashlib
import math
from decimal import ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction
from functools import cache
from itertools import count as counting

import numpy as np
from numpy.typing import NDArray

from partita.core import chacha

WORD = 64  # bits of the stream for one decision
MAX_VARIANCE = 2**112  # a draw must fit in int64
# The float64 error of a probability. With z = |candidate| / std, the exponent has an error below 8 (z + 2)^2 2**-53,
# which moves exp(-exponent) <= exp(-(z - sqrt(2))^2 / 2) by less than 2**-46; a library's exp adds less than 2**-48.
MARGIN = 2.0**-40
_PASS = 2**20  # candidates that are processed together
_WORDS = 3  # 64-bit words of a candidate: sign and remainder, quotient, decision


class DiscreteGaussianError(ValueError):
    """The distribution cannot be sampled."""


def discrete_gaussian(key: bytes, count: int, variance: Fraction, margin: float = MARGIN) -> NDArray[np.int64]:
    """Draw independent integers from the discrete Gaussian around 0.

    Args:
        key: 32 bytes. The same key always gives the same draws. Use it for one draw only.
        count: How many to draw.
        variance: The parameter of the distribution. Its variance is at most this, and equal to it within 1e-6 from a
            parameter of 1 up.
        margin: How close a decision must be for exact arithmetic to make it. The draws do not depend on it.

    Returns:
        int64 integers of shape (count,).

    Raises:
        DiscreteGaussianError: If the variance is not above 0, or too large for 64-bit integers.
    """
    if not 0 < variance <= MAX_VARIANCE:
        raise DiscreteGaussianError(
            f"the variance of discrete noise is {float(variance):g}; it must be above 0 and at most 2**112"
        )
    bits = max(0, round(math.log2(variance) / 2))  # the proposal's scale is 2**bits, close to the standard deviation
    drawn: list[NDArray[np.int64]] = []
    missing = count
    for number in counting():
        if missing <= 0:
            break
        # Between 1 / 2.5 and 1 / 2 of the candidates are accepted.
        size = min(_PASS, 5 * missing // 2 + 64)
        accepted = _pass(_subkey(key, b"pass", number), size, variance, bits, margin)[:missing]
        drawn.append(accepted)
        missing -= len(accepted)
    return np.concatenate(drawn) if drawn else np.zeros(0, np.int64)


def _pass(key: bytes, size: int, variance: Fraction, bits: int, margin: float) -> NDArray[np.int64]:
    """Draw candidates and return the accepted ones.

    A candidate is a sign, a remainder r below t = 2**bits and a quotient q with P(q >= k) = exp(-k). Its size is
    s = r + t q, and it is accepted with probability exp(-r / t) exp(-(s - variance / t)^2 / (2 variance)). So the
    probability of a size is in proportion to exp(-s / t - s^2 / (2 variance) + s / t). A negative zero is rejected.
    """
    words = chacha.integers(key, _WORDS * size).reshape(_WORDS, size)
    negative = words[0] >> np.uint64(WORD - 1) == 1
    remainders = (words[0] & np.uint64(2**bits - 1)).astype(np.int64)
    thresholds = _thresholds()
    quotients = len(thresholds) - np.searchsorted(thresholds, words[1], side="right")
    tied = np.flatnonzero(np.isin(words[1], thresholds) | (words[1] == 0))
    sizes = remainders + (quotients << bits)
    exponents = remainders * 0.5**bits + (sizes - float(variance) * 0.5**bits) ** 2 / (2 * float(variance))
    difference = words[2] * 0.5**WORD - np.exp(-exponents)
    accepted = difference < 0
    for place in {*tied.tolist(), *np.flatnonzero(np.abs(difference) <= margin).tolist()}:
        remainder, uniform = int(remainders[place]), int(words[2][place])
        quotient = _exact_quotient(int(words[1][place]), _subkey(key, b"quotient", place))
        sizes[place] = exact_size = remainder + (quotient << bits)
        exponent = Fraction(remainder, 2**bits) + (exact_size - variance / 2**bits) ** 2 / (2 * variance)
        accepted[place] = is_below(uniform, exponent, _subkey(key, b"decision", place))
    accepted &= ~(negative & (sizes == 0))
    signed: NDArray[np.int64] = np.where(negative, -sizes, sizes)[accepted]
    return signed


def is_below(uniform: int, exponent: Fraction, key: bytes) -> bool:
    """Whether a uniform number in [0, 1) is below exp(-exponent), without rounding.

    Args:
        uniform: The first 64 bits of the number.
        exponent: At least 0.
        key: Its further bits, if they are needed.
    """
    known = WORD
    while True:
        low, high = _exp_bounds(exponent, known + 8)  # in units of 2**-(known + 8)
        if (uniform + 1) << 8 <= low:
            return True
        if uniform << 8 >= high:
            return False
        more = hashlib.blake2b(known.to_bytes(8, "big"), key=key, digest_size=WORD // 8).digest()
        uniform, known = uniform << WORD | int.from_bytes(more, "big"), known + WORD


def _exp_bounds(exponent: Fraction, bits: int) -> tuple[int, int]:
    """Integers with low <= 2**bits exp(-exponent) <= high, one or two apart."""
    with localcontext() as context:
        # The digits of 2**bits and of the exponent, and 10 more: all roundings together are far below 1.
        context.prec = bits // 3 + len(str(int(exponent))) + 10
        context.Emin, context.Emax = -(10**9), 10**9
        value = (-(Decimal(exponent.numerator) / Decimal(exponent.denominator))).exp() * 2**bits
        floor = int(value.to_integral_value(ROUND_FLOOR)) if value >= 1 else 0
    return max(0, floor - 1), floor + 2


@cache
def _thresholds() -> NDArray[np.uint64]:
    """floor(2**64 exp(-k)) for all k from 1 for which it is above 0, in increasing order."""
    with localcontext() as context:
        context.prec = 60
        exact = [int((Decimal(-k).exp() * 2**WORD).to_integral_value(ROUND_FLOOR)) for k in range(1, WORD)]
    return np.array(sorted(value for value in exact if value), np.uint64)


def _exact_quotient(uniform: int, key: bytes) -> int:
    """The number of k from 1 up with a uniform number below exp(-k)."""
    return next(k for k in counting() if not is_below(uniform, Fraction(k + 1), key))


def _subkey(key: bytes, purpose: bytes, number: int) -> bytes:
    return hashlib.blake2b(purpose + number.to_bytes(8, "big"), key=key, digest_size=chacha.KEY_BYTES).digest()
