"""Settings of differential privacy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from partita.core.options import Count, NotNegative, Positive, Range, validate_fields


class PrivacyError(ValueError):
    """The privacy guarantee cannot hold with these settings."""


@dataclass(frozen=True)
class PrivacySettings:
    """The `[privacy]` table: a budget, for which the noise is computed, or the noise itself.

    `make_private` computes the noise. It checks the two against each other if both are set.

    Raises:
        OptionError: If a value is not one that the config takes.
        PrivacyError: If there is neither a budget nor noise, or if settings contradict each other.
    """

    unit: Annotated[
        Literal["example", "group", "client"],
        "whose presence is hidden: an example, all examples of a group such as a patient, or a client",
    ] = "example"
    group: Annotated[str | None, "column with the group of each row, such as `patient_id`; `group` only"] = None
    max_per_group: Annotated[
        Count | None, "examples of a group that take part in a round, a new draw in each; `group` only; left out: all"
    ] = None
    epsilon: Annotated[Positive | None, "budget; the noise is computed from it"] = None
    noise: Annotated[NotNegative | None, "standard deviation of the noise, in multiples of the clip"] = None
    delta: Annotated[
        Annotated[float, Range(above=0, below=1)] | None,
        "delta of the guarantee; must be well below 1 / number of examples, groups or clients",
    ] = None
    clip: Annotated[
        float, Range(above=0, high=math.inf), "maximum norm of the gradient of an example or group, or of an update"
    ] = 1.0
    sampling: Annotated[Literal["poisson", "shuffle"], "`poisson` draws each example or group independently"] = (
        "poisson"
    )
    clipping: Annotated[Literal["auto", "direct", "ghost"], "how per-example gradient norms are computed"] = "auto"
    microbatch: Annotated[Count | None, "number of examples or groups whose gradients are held at once"] = None
    accountant: Annotated[Literal["auto", "pld", "rdp"], "how epsilon is computed"] = "auto"
    disclose_validation: Annotated[
        bool, "clients report exact scores on their validation parts, which the guarantee does not cover"
    ] = False
    repeatable: Annotated[
        bool, "draw noise from the seed, for research only: anyone can recompute it, so epsilon is only simulated"
    ] = False

    def __post_init__(self) -> None:
        validate_fields(self, "privacy")
        if self.epsilon is None and self.noise is None:
            raise PrivacyError("privacy has neither epsilon nor noise; set a budget such as epsilon = 2.0")
        if self.noise != 0 and self.clip == math.inf:
            raise PrivacyError("privacy.clip is infinite, so no noise is enough; give it a number, such as 1.0")
        if (self.unit == "group") != (self.group is not None):
            raise PrivacyError(
                "privacy.unit is 'group', but privacy.group is not set; name the column with the group of each row, "
                "such as group = 'patient_id'"
                if self.group is None
                else f"privacy.group is '{self.group}', but privacy.unit is '{self.unit}'; set unit = 'group', or "
                "leave group out"
            )
        if self.group is None and self.max_per_group is not None:
            raise PrivacyError("privacy.max_per_group is about groups; leave it out, or set unit = 'group'")
        if self.group is not None and self.clipping == "ghost":
            raise PrivacyError(
                "privacy.clipping is 'ghost', which computes the norms of single examples; with privacy.unit = 'group' "
                "set it to 'direct'"
            )
        for key in ("sampling", "clipping", "microbatch", "disclose_validation") if self.unit == "client" else ():
            if getattr(self, key) != getattr(PrivacySettings, key):
                raise PrivacyError(f"privacy.{key} is about a client's examples; leave it out with unit = 'client'")

    @property
    def known_noise(self) -> float:
        """The noise.

        Raises:
            PrivacyError: If it has not been computed from the budget.
        """
        if self.noise is None:
            raise PrivacyError("privacy.noise is not known yet; make_private computes it from privacy.epsilon")
        return self.noise
