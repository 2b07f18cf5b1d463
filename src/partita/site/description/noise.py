"""Exact discrete Laplace noise from the operating system's generator, without floating-point numbers.

The sampler of Canonne, Kairouz and Steinke, "The Discrete Gaussian for Differential Privacy" (2020), algorithms 1 and
2. Floating-point samplers leave traces in the low bits that can reveal the true value.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from fractions import Fraction

RandBelow = Callable[[int], int]  # draws an integer from 0 to its argument - 1


def discrete_laplace(scale: Fraction, randbelow: RandBelow = secrets.randbelow) -> int:
    """Draw an integer x with probability in proportion to exp(-|x| / scale).

    Args:
        scale: Above 0.
        randbelow: Source of uniform integers.
    """
    numerator, denominator = scale.numerator, scale.denominator
    while True:
        remainder = randbelow(numerator)
        if not _bernoulli_exp(Fraction(remainder, numerator), randbelow):
            continue
        quotient = 0
        while _bernoulli_exp(Fraction(1), randbelow):
            quotient += 1
        size = (remainder + numerator * quotient) // denominator
        negative = randbelow(2)
        if not (negative and size == 0):  # zero must not be drawn twice as often
            return -size if negative else size


def _bernoulli_exp(exponent: Fraction, randbelow: RandBelow) -> bool:
    """Return True with probability exp(-exponent), for an exponent from 0 to 1."""
    count = 1
    while randbelow(count * exponent.denominator) < exponent.numerator:
        count += 1
    return count % 2 == 1
