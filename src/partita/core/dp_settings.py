"""Settings of example-level differential privacy (DP-SGD), and the error of a setting that cannot hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class PrivacyError(ValueError):
    """A setting under which a promise of privacy could not be kept."""


@dataclass(frozen=True)
class DPSGDSettings:
    """`noise` is the deviation of the Gaussian in multiples of `clip`, the most that one example adds to a sum.

    Poisson sampling takes every example by itself, which accountants reward; shuffled batches are for comparisons.
    """

    clip: float
    noise: float
    sampling: Literal["poisson", "shuffle"] = "poisson"
    clipping: Literal["auto", "direct", "ghost"] = "auto"  # direct: of each example's gradient; ghost: read off layers
    microbatch: int | None = None  # examples whose gradients are held at once; None: a whole batch

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise PrivacyError(f"privacy.clip is {self.clip}; it must be above 0")
        if not 0 <= self.noise < float("inf"):
            raise PrivacyError(f"privacy.noise is {self.noise}; it must be a number from 0 up")
        if self.noise and self.clip == float("inf"):
            raise PrivacyError("privacy.clip is infinite, so no noise is enough; give it a number, such as 1.0")
        if self.microbatch is not None and self.microbatch < 1:
            raise PrivacyError(f"privacy.microbatch is {self.microbatch}; it must be at least 1, or left out")
