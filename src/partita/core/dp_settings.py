"""Settings of example-level and group-level differential privacy (DP-SGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class PrivacyError(ValueError):
    """The privacy guarantee cannot hold with these settings."""


@dataclass(frozen=True)
class DPSGDSettings:
    """Settings of DP-SGD.

    Attributes:
        clip: The maximum norm of one unit's gradient, and so the sensitivity of the sum. A unit is an example, or with
            `groups` all examples of a group.
        noise: The standard deviation of the Gaussian noise, as a multiple of `clip`.
        sampling: "poisson" includes each unit independently, which accountants reward; "shuffle" uses shuffled
            batches, for comparisons.
        clipping: "direct" computes each example's gradient; "ghost" computes only their norms and their clipped sum,
            from the inputs and output gradients of layers; "auto" uses ghost clipping for large batches where it works.
        microbatch: Units whose gradients are in memory at once; None for a whole batch.
        groups: Whether units are groups. A group is drawn whole, and its contribution is the clipped gradient of the
            mean loss of its examples.
        max_per_group: Maximum number of a group's examples that take part in a round; None for all.

    Raises:
        PrivacyError: If a setting is invalid.
    """

    clip: float
    noise: float
    sampling: Literal["poisson", "shuffle"] = "poisson"
    clipping: Literal["auto", "direct", "ghost"] = "auto"
    microbatch: int | None = None
    groups: bool = False
    max_per_group: int | None = None

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise PrivacyError(f"privacy.clip is {self.clip}; it must be above 0")
        if not 0 <= self.noise < float("inf"):
            raise PrivacyError(f"privacy.noise is {self.noise}; it must be a finite number of at least 0")
        if self.noise and self.clip == float("inf"):
            raise PrivacyError("privacy.clip is infinite, so no noise is enough; give it a number, such as 1.0")
        if self.microbatch is not None and self.microbatch < 1:
            raise PrivacyError(f"privacy.microbatch is {self.microbatch}; it must be at least 1, or left out")
        if self.max_per_group is not None and self.max_per_group < 1:
            raise PrivacyError(f"privacy.max_per_group is {self.max_per_group}; it must be at least 1, or left out")
        if self.groups and self.clipping == "ghost":
            raise PrivacyError(
                "privacy.clipping is 'ghost', which computes the norms of single examples; with privacy.unit = 'group' "
                "set it to 'direct'"
            )
