"""A run under a promise of privacy: the noise that the promise asks for, and a tally of what is spent."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from partita.core.dp_settings import PrivacyError, Private
from partita.core.method import Release
from partita.core.model import Model
from partita.core.options import Count, NotNegative, Positive, Range
from partita.core.plan import Turn, plan_for
from partita.core.rounds import begin
from partita.core.settings import Run
from partita.privacy.client_level import protect_clients
from partita.privacy.disclosure import disclosed
from partita.privacy.spending import TRAINING, Account, find_noise, releases_of

ANYONE = "any client"  # in whose name the bill of client-level privacy is kept: it is the same for all


@dataclass(frozen=True)
class Terms:
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
    norms: Annotated[Literal["auto", "direct", "ghost"], "how the norms of gradients are computed"] = "auto"
    chunk: Annotated[Count | None, "examples whose gradients are held at once"] = None
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
        own = {"sampling": "poisson", "norms": "auto", "chunk": None}
        for key, usual in own.items() if self.unit == "client" else ():
            if getattr(self, key) != usual:
                raise PrivacyError(f"privacy.{key} is about a client's examples; leave it out with unit = 'client'")


@dataclass(frozen=True)
class Guard:
    """A run with its noise, and what it may cost. `planned` is the cost of all rounds as they will be drawn."""

    run: Run
    model: Model
    terms: Terms  # with noise and delta
    sizes: Mapping[str, int]  # training examples by client; 0: not known here
    planned: float | None  # None where a client's size is not known
    account: Account = field(repr=False, compare=False)

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
        if self.terms.epsilon is not None and spent > self.terms.epsilon:
            raise PrivacyError(
                f"epsilon has come to {spent:.4g}, beyond the budget of {self.terms.epsilon:g}: clients were asked "
                "more often than was planned; the run ends here"
            )
        return spent

    def ahead(self, rounds: int) -> Account:
        """The bill of the first rounds. Cohorts are drawn by the run's key, so it is known who will be asked when."""
        account = replace(self.account, bills={})
        signal = self.run.method.server.signal(begin(self.run, self.model))
        for number in range(rounds):
            cohort = self.run.draw_cohort(number, list(self.sizes))
            self._charge(account, number, cohort, signal, len(self.sizes))
        return account

    def _charge(
        self, account: Account, number: int, cohort: Collection[str], signal: Mapping[str, float], population: int
    ) -> None:
        run = self.run
        if account.of_clients:
            transform: Any = run.method.channel[0]
            account.charge(ANYONE, [Release(TRAINING, transform.noise, len(cohort) / population)])
            return
        for client in cohort:
            plan = plan_for(run.method.plan, self.model, Turn(number, run.rounds, client, signal))
            account.charge(client, releases_of(run, plan, self.sizes.get(client, 0)))

    def about(self) -> dict[str, Any]:
        """For the record."""
        terms = self.terms
        return {
            "unit": terms.unit,
            "budget": terms.epsilon,
            "delta": terms.delta,
            "noise": terms.noise,
            "clip": terms.clip,
            "sampling": terms.sampling if terms.unit == "example" else "cohort",
            "accountant": self.account.by,
            "repeatable": terms.repeatable,
            "planned": None if self.planned == math.inf else self.planned,
            **disclosed(terms.unit),
        }


def protect(run: Run, model: Model, sizes: Mapping[str, int], terms: Terms) -> Guard:
    """Find the noise for the rounds, cohorts and steps that lie ahead, and put the method under it."""
    of_clients = terms.unit == "client"
    cohort = run.cohort_size(len(sizes))
    units = len(sizes) if of_clients else max(sizes.values(), default=0)
    delta = _delta(terms, units)
    by = terms.accountant if terms.accountant != "auto" else "rdp" if of_clients and cohort < len(sizes) else "pld"
    known = of_clients or all(sizes.values())
    if terms.noise is None and not known:
        raise PrivacyError(
            "privacy.epsilon needs the number of examples at every client, which is not known here; find the noise "
            "with 'partita budget', and set privacy.noise"
        )

    def under(noise: float) -> Run:
        if of_clients:
            method = protect_clients(run.method, terms.clip, noise, cohort, run.secret)
            # Drift is measured on updates before the noise.
            return replace(run, method=method, hidden_cohorts=True, drift=False)
        private = Private(terms.clip, noise, terms.sampling, terms.norms, terms.chunk)
        return replace(run, method=replace(run.method, privacy=private))

    trial = Guard(
        under(1.0 if terms.noise is None else terms.noise), model, terms, sizes, None, Account(delta, by, of_clients)
    )
    ahead = trial.ahead(run.rounds if known else 0)
    noise = terms.noise
    if noise is None:
        assert terms.epsilon is not None
        noise = find_noise(ahead, terms.epsilon)
    planned = ahead.with_noise(noise).epsilon() if known else None
    if planned is not None and terms.epsilon is not None and planned > terms.epsilon:
        raise PrivacyError(
            f"privacy.noise {noise:g} lets {run.rounds} rounds cost epsilon {planned:.4g}, and privacy.epsilon is "
            f"{terms.epsilon:g}; leave the noise out to have it found"
        )
    resolved = replace(terms, noise=noise, delta=delta)
    return Guard(under(noise), model, resolved, sizes, planned, Account(delta, by, of_clients))


def _delta(terms: Terms, units: int) -> float:
    """Well below one in the number of units: at one in it, giving one of them away whole would be allowed."""
    if terms.delta is None:
        return min(1e-5, 0.1 / max(1, units))
    if terms.delta * units >= 1:
        raise PrivacyError(
            f"privacy.delta is {terms.delta:g}, but with {units} {terms.unit}s it must be well below {1 / units:g}, or "
            "one of them may be given away whole"
        )
    return terms.delta
