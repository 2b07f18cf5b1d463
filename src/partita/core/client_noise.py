"""Settings of noise that clients add before secure aggregation, so that only their sum carries all of it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from partita.core.dp_settings import PrivacyError

MIN_STD = 0.5  # standard deviation of one client's noise, in grid points, from which on the accounting is proved


@dataclass(frozen=True)
class ClientNoise:
    """Discrete Gaussian noise at each client (Kairouz, Liu, Steinke 2021).

    Attributes:
        clip: The maximum L2 norm of an update, delta and slots together.
        noise: The standard deviation of the sum of `honest` clients' noise, in multiples of the clip.
        honest: The fewest honest clients in a sum. Each adds 1 / honest of the variance.

    Raises:
        PrivacyError: If a setting is out of range.
    """

    clip: float
    noise: float
    honest: int

    def __post_init__(self) -> None:
        if not 0 < self.clip < float("inf"):
            raise PrivacyError(f"privacy.clip is {self.clip}; with noise at the clients it must be a number above 0")
        if not 0 < self.noise < float("inf"):
            raise PrivacyError(f"privacy.noise is {self.noise}; with noise at the clients it must be above 0")
        if self.honest < 1:
            raise PrivacyError(
                "secure_aggregation.collusion leaves no honest client in the smallest sum that is released; lower it, "
                "or raise federation.cohort, secure_aggregation.neighbors or threshold"
            )

    def variance(self, scale: float) -> Fraction:
        """Return the variance of one client's noise on a grid with `scale` points per unit.

        Raises:
            PrivacyError: If it is so small that the grid would dominate the noise.
        """
        variance = (Fraction(self.noise) * Fraction(self.clip) * Fraction(scale)) ** 2 / self.honest
        if variance < Fraction(MIN_STD) ** 2:
            raise PrivacyError(
                f"the noise of one client is {float(variance) ** 0.5:.3g} points of the grid, and it must be at least "
                f"{MIN_STD:g}; set secure_aggregation.bits = 64, or lower secure_aggregation.max_value"
            )
        return variance
