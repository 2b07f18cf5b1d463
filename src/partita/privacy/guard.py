"""A run under a promise of privacy: the noise that the promise asks for, and a tally of what is spent."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from partita.core.dp_settings import DPSGDSettings, PrivacyError
from partita.core.method import PrivacyRelease
from partita.core.model import Model
from partita.core.options import Count, NotNegative, Positive, Range
from partita.core.plan import RoundInfo, plan_for
from partita.core.rounds import initial_server
from partita.core.settings import Run
from partita.privacy.client_level import protect_clients
from partita.privacy.disclosure import disclosed
from partita.privacy.spending import TRAINING, PrivacySpending, find_noise, releases_of

ANY_CLIENT = "any client"  # in whose name the bill of client-level privacy is kept: it is the same for all


@dataclass(frozen=True)
class PrivacyConfig:
    """What is asked for: a budget, for which the noise is found, or the noise itself; both: the noise is checked."""

    unit: Annotated[Literal["example", "client"], "whose presence is hidden"] = "example"
    epsilon: Annotated[Positive | None, "budget, for which the noise is found"] = None
    noise: Annotated[NotNegative | None, "standard deviation of the noise, in multiples of the clip"] = None
    delta: Annotated[
        Annotated[float, Range(above=0, below=1)] | None,
        "delta of the guarantee; well below one in the number of examples or clients",
    ] = None
    clip: Annotated[
        float, Range(above=0, high=math.inf), "largest norm of one example's gradient, or of one client's update"
    ] = 1.0
    sampling: Annotated[Literal["poisson", "shuffle"], "`poisson` draws each example on its own"] = "poisson"
    clipping: Annotated[Literal["auto", "direct", "ghost"], "how the norms of gradients are computed"] = "auto"
    microbatch: Annotated[Count | None, "examples whose gradients are held at once"] = None
    accountant: Annotated[Literal["auto", "pld", "rdp"], "how epsilon is computed"] = "auto"
    repeatable: Annotated[
        bool, "draw noise by the seed, for research: anyone can recompute it, so epsilon is a simulation"
    ] = False

    def __post_init__(self) -> None:
        if self.epsilon is None and self.noise is None:
            raise PrivacyError("privacy says neither epsilon nor noise; give a budget such as epsilon = 2.0")
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise PrivacyError(f"privacy.epsilon is {self.epsilon}; it must be a number above 0")
        if self.delta is not None and not 0 < self.delta < 1:
            raise PrivacyError(f"privacy.delta is {self.delta}; it is a probability, such as 1e-5")
        own = {"sampling": "poisson", "clipping": "auto", "microbatch": None}
        for key, usual in own.items() if self.unit == "client" else ():
            if getattr(self, key) != usual:
                raise PrivacyError(f"privacy.{key} is about a client's examples; leave it out with unit = 'client'")


@dataclass(frozen=True)
class PrivacyGuard:
    """A run with its noise, and what it may cost. `planned` is the cost of all rounds as they will be drawn."""

    run: Run
    model: Model
    privacy_config: PrivacyConfig  # with noise and delta
    sizes: Mapping[str, int]  # training examples by client; 0: not known here
    planned: float | None  # None where a client's size is not known
    account: PrivacySpending = field(repr=False, compare=False)

    def charge(
        self, number: int, cohort: Collection[str], signal: Mapping[str, float], population: int | None = None
    ) -> None:
        """Everyone who was asked pays for a whole round, also who was lost: an answer may have been seen.

        `population` is the number of clients that were there to be drawn: where some were away, the others were
        drawn with a higher probability. All of them unless given.
        """
        self._charge(self.account, number, cohort, signal, population or len(self.sizes))

    def spent(self) -> float | None:
        """So far. None where a client's number of examples is not known here."""
        if not all(self.sizes.values()) and not self.account.of_clients:
            return None
        spent = self.account.epsilon()
        if self.privacy_config.epsilon is not None and spent > self.privacy_config.epsilon:
            raise PrivacyError(
                f"epsilon has come to {spent:.4g}, beyond the budget of {self.privacy_config.epsilon:g}: clients "
                "were asked more often than was planned; the run ends here"
            )
        return spent

    def forecast(self, rounds: int) -> PrivacySpending:
        """The bill of the first rounds. Cohorts are drawn by the run's key, so it is known who will be asked when."""
        account = replace(self.account, bills={})
        signal = self.run.method.server_rule.signal(initial_server(self.run, self.model))
        for number in range(rounds):
            cohort = self.run.draw_cohort(number, list(self.sizes))
            self._charge(account, number, cohort, signal, len(self.sizes))
        return account

    def _charge(
        self,
        account: PrivacySpending,
        number: int,
        cohort: Collection[str],
        signal: Mapping[str, float],
        population: int,
    ) -> None:
        run = self.run
        if account.of_clients:
            transform: Any = run.method.transforms[0]
            account.charge(ANY_CLIENT, [PrivacyRelease(TRAINING, transform.noise, len(cohort) / population)])
            return
        for client in cohort:
            plan = plan_for(run.method.plan, self.model, RoundInfo(number, run.rounds, client, signal))
            account.charge(client, releases_of(run, plan, self.sizes.get(client, 0)))

    def about(self) -> dict[str, Any]:
        """For the record."""
        privacy_config = self.privacy_config
        return {
            "unit": privacy_config.unit,
            "budget": privacy_config.epsilon,
            "delta": privacy_config.delta,
            "noise": privacy_config.noise,
            "clip": privacy_config.clip,
            "sampling": privacy_config.sampling if privacy_config.unit == "example" else "cohort",
            "accountant": self.account.by,
            "repeatable": privacy_config.repeatable,
            "planned": None if self.planned == math.inf else self.planned,
            **disclosed(privacy_config.unit),
        }


def make_private(run: Run, model: Model, sizes: Mapping[str, int], privacy_config: PrivacyConfig) -> PrivacyGuard:
    """Find the noise for the rounds, cohorts and steps that lie ahead, and put the method under it."""
    of_clients = privacy_config.unit == "client"
    cohort = run.cohort_size(len(sizes))
    units = len(sizes) if of_clients else max(sizes.values(), default=0)
    delta = _delta(privacy_config, units)
    by = (
        privacy_config.accountant
        if privacy_config.accountant != "auto"
        else "rdp"
        if of_clients and cohort < len(sizes)
        else "pld"
    )
    known = of_clients or all(sizes.values())
    if privacy_config.noise is None and not known:
        raise PrivacyError(
            "privacy.epsilon needs the number of examples at every client, which is not known here; find the noise "
            "with 'partita budget', and set privacy.noise"
        )

    def under(noise: float) -> Run:
        if of_clients:
            method = protect_clients(run.method, privacy_config.clip, noise, cohort, run.secret)
            # Drift is measured on updates before the noise.
            return replace(run, method=method, hidden_cohorts=True, drift=False)
        private = DPSGDSettings(
            privacy_config.clip, noise, privacy_config.sampling, privacy_config.clipping, privacy_config.microbatch
        )
        return replace(run, method=replace(run.method, privacy=private))

    trial = PrivacyGuard(
        under(1.0 if privacy_config.noise is None else privacy_config.noise),
        model,
        privacy_config,
        sizes,
        None,
        PrivacySpending(delta, by, of_clients),
    )
    ahead = trial.forecast(run.rounds if known else 0)
    noise = privacy_config.noise
    if noise is None:
        assert privacy_config.epsilon is not None
        noise = find_noise(ahead, privacy_config.epsilon)
    planned = ahead.with_noise(noise).epsilon() if known else None
    if planned is not None and privacy_config.epsilon is not None and planned > privacy_config.epsilon:
        raise PrivacyError(
            f"privacy.noise {noise:g} lets {run.rounds} rounds cost epsilon {planned:.4g}, and privacy.epsilon is "
            f"{privacy_config.epsilon:g}; leave the noise out to have it found"
        )
    resolved = replace(privacy_config, noise=noise, delta=delta)
    return PrivacyGuard(under(noise), model, resolved, sizes, planned, PrivacySpending(delta, by, of_clients))


def _delta(privacy_config: PrivacyConfig, units: int) -> float:
    """Well below one in the number of units: at one in it, giving one of them away whole would be allowed."""
    if privacy_config.delta is None:
        return min(1e-5, 0.1 / max(1, units))
    if privacy_config.delta * units >= 1:
        raise PrivacyError(
            f"privacy.delta is {privacy_config.delta:g}, but with {units} {privacy_config.unit}s it must be well "
            f"below {1 / units:g}, or one of them may be given away whole"
        )
    return privacy_config.delta
