"""Private runs: find the noise for a privacy budget and track the epsilon that is spent."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from partita.core.dp_settings import DPSGDSettings, PrivacyError
from partita.core.method import ClientRule, Method, PrivacyRelease, UpdateTransform
from partita.core.model import Model
from partita.core.options import Count, NotNegative, Positive, Range
from partita.core.plan import Plan, RoundInfo, plan_for
from partita.core.rounds import initial_server
from partita.core.sampling import Uniform
from partita.core.settings import Run
from partita.privacy.client_level import protect_clients
from partita.privacy.disclosure import disclosed
from partita.privacy.spending import TRAINING, PrivacySpending, find_noise, releases_of

ANY_CLIENT = "any client"  # key of the client-level ledger, which is the same for all clients


@dataclass(frozen=True)
class PrivacyConfig:
    """Privacy settings: a budget, for which the noise is computed, or the noise itself. With both, they are checked.

    Raises:
        PrivacyError: If there is neither a budget nor noise, or if settings are invalid or contradict each other.
    """

    unit: Annotated[Literal["example", "client"], "whose presence is hidden"] = "example"
    epsilon: Annotated[Positive | None, "budget; the noise is computed from it"] = None
    noise: Annotated[NotNegative | None, "standard deviation of the noise, in multiples of the clip"] = None
    delta: Annotated[
        Annotated[float, Range(above=0, below=1)] | None,
        "delta of the guarantee; must be well below 1 / number of examples or clients",
    ] = None
    clip: Annotated[
        float, Range(above=0, high=math.inf), "maximum norm of an example's gradient, or of a client's update"
    ] = 1.0
    sampling: Annotated[Literal["poisson", "shuffle"], "`poisson` draws each example independently"] = "poisson"
    clipping: Annotated[Literal["auto", "direct", "ghost"], "how per-example gradient norms are computed"] = "auto"
    microbatch: Annotated[Count | None, "number of per-example gradients held at once"] = None
    accountant: Annotated[Literal["auto", "pld", "rdp"], "how epsilon is computed"] = "auto"
    repeatable: Annotated[
        bool, "draw noise from the seed, for research only: anyone can recompute it, so epsilon is only simulated"
    ] = False

    def __post_init__(self) -> None:
        if self.epsilon is None and self.noise is None:
            raise PrivacyError("privacy has neither epsilon nor noise; set a budget such as epsilon = 2.0")
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise PrivacyError(f"privacy.epsilon is {self.epsilon}; it must be a number above 0")
        if self.delta is not None and not 0 < self.delta < 1:
            raise PrivacyError(f"privacy.delta is {self.delta}; it is a probability, such as 1e-5")
        example_level = {"sampling": "poisson", "clipping": "auto", "microbatch": None}
        for key, default in example_level.items() if self.unit == "client" else ():
            if getattr(self, key) != default:
                raise PrivacyError(f"privacy.{key} is about a client's examples; leave it out with unit = 'client'")


@dataclass(frozen=True)
class PrivacyGuard:
    """A run with its noise and its privacy budget."""

    run: Run
    model: Model
    privacy_config: PrivacyConfig  # with noise and delta filled in
    sizes: Mapping[str, int]  # training examples by client; 0: unknown here
    planned: float | None  # epsilon of all rounds with the cohorts as they will be drawn; None if a size is unknown
    account: PrivacySpending = field(repr=False, compare=False)  # what the clients have spent so far

    def charge(
        self, number: int, cohort: Collection[str], signal: Mapping[str, float], population: int | None = None
    ) -> None:
        """Charge every sampled client for a whole round.

        Lost clients pay too, because their answer may have been seen.

        Args:
            number: The round.
            cohort: Clients that were sampled.
            signal: The server's signal to the plan.
            population: Number of clients that were available for sampling. If some were away, the others had a higher
                probability. Default: all clients.
        """
        self._charge(self.account, number, cohort, signal, population or len(self.sizes))

    def spent(self) -> float | None:
        """Return the epsilon spent so far, or None if a client's number of examples is unknown here.

        Raises:
            PrivacyError: If it exceeds the budget.
        """
        if not all(self.sizes.values()) and not self.account.of_clients:
            return None
        spent = self.account.epsilon()
        if self.privacy_config.epsilon is not None and spent > self.privacy_config.epsilon:
            raise PrivacyError(
                f"epsilon has reached {spent:.4g}, beyond the budget of {self.privacy_config.epsilon:g}: clients "
                "were sampled more often than planned; the run stops here"
            )
        return spent

    def epsilon_after(self, number: int, clients: Sequence[str], signal: Mapping[str, float]) -> float:
        """Return the epsilon that would be spent after one more round. The round is not charged.

        Args:
            number: The round.
            clients: The available clients.
            signal: The server's signal to the plan.
        """
        account = replace(self.account, bills={client: bill.copy() for client, bill in self.account.bills.items()})
        self._charge(account, number, self.run.draw_cohort(number, clients), signal, len(clients))
        return account.epsilon()

    def forecast(self, rounds: int) -> PrivacySpending:
        """Return the spending of the first rounds. The run's key fixes all cohorts, so they are known in advance."""
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
        # Lazily: the client-level bill needs plans only to see whether one of them keeps parameters.
        plans = (plan_for(run.method.plan, self.model, RoundInfo(number, run.rounds, name, signal)) for name in cohort)
        if account.of_clients:
            transform: Any = run.method.transforms[0]
            share = 1.0 if _keeps_state(run.method, plans) else len(cohort) / population
            account.charge(ANY_CLIENT, [PrivacyRelease(TRAINING, transform.noise, share)])
            return
        for client, plan in zip(cohort, plans, strict=True):
            account.charge(client, releases_of(run, plan, self.sizes[client]))

    def about(self) -> dict[str, Any]:
        """Return the privacy settings and the disclosure lists for the run's record."""
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
    """Find the noise for the planned rounds, cohorts and steps, and make the run's method private.

    Args:
        run: The run without privacy.
        model: The model.
        sizes: Training examples by client; 0 if unknown here.
        privacy_config: The settings. Missing noise and delta are filled in.

    Raises:
        PrivacyError: If the noise cannot be found, or is too small for the budget.
        MethodError: If the method cannot be made private.
    """
    of_clients = privacy_config.unit == "client"
    _check_sampling(run.sampling, of_clients)
    cohort = run.cohort_size(len(sizes))
    units = len(sizes) if of_clients else max(sizes.values())
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
            "privacy.epsilon needs the number of examples of every client, which is not known here; find the noise "
            "with 'partita budget', and set privacy.noise"
        )

    def under(noise: float) -> Run:
        if of_clients:
            method = protect_clients(run.method, privacy_config.clip, noise, cohort, run.secret)
            # Drift is off because it is measured on updates before the noise.
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
    if of_clients and cohort < len(sizes) and any(release.share == 1 for release in ahead.bills[ANY_CLIENT]):
        warnings.warn(
            f"{run.method.name}: clients keep state between rounds, so epsilon is charged as if every client took part "
            "in every round; a method without such state needs less noise",
            stacklevel=2,
        )
    noise = privacy_config.noise
    if noise is None:
        assert privacy_config.epsilon is not None
        noise = find_noise(ahead, privacy_config.epsilon)
    planned = ahead.with_noise(noise).epsilon() if known else None
    if planned is not None and privacy_config.epsilon is not None and planned > privacy_config.epsilon:
        raise PrivacyError(
            f"with privacy.noise {noise:g}, {run.rounds} rounds cost epsilon {planned:.4g}, but privacy.epsilon is "
            f"{privacy_config.epsilon:g}; remove privacy.noise to have it computed"
        )
    resolved = replace(privacy_config, noise=noise, delta=delta)
    return PrivacyGuard(under(noise), model, resolved, sizes, planned, PrivacySpending(delta, by, of_clients))


def _check_sampling(rule: Uniform, of_clients: bool) -> None:
    """Refuse sampling rules for which the accounting does not hold."""
    if rule.uses_losses:
        raise PrivacyError(
            f"sampling.name = '{rule.name}' reads the clients' training losses, which a private run withholds; use "
            "'uniform'"
        )
    if of_clients and type(rule) is not Uniform:
        raise PrivacyError(
            f"sampling.name = '{rule.name}' does not draw all clients with the same probability, which the epsilon of "
            "client-level privacy assumes; use 'uniform', or privacy.unit = 'example'"
        )


def _keeps_state(method: Method, plans: Iterable[Plan]) -> bool:
    """Whether a client's update can depend on the rounds in which it took part before.

    Amplification by sampling needs a round that depends on its own cohort and on what was published. The state of other
    clients depends on earlier cohorts. Cohorts have a fixed size, so it also reveals whether the protected client was
    in them. Such a round is charged without amplification.
    """
    rules_or_transforms: tuple[ClientRule | UpdateTransform, ...] = (*method.client_rules, *method.transforms)
    remembers = any(part.slots for part in rules_or_transforms)
    return remembers or method.carry_optimizer or any(plan.keep for plan in plans)


def _delta(privacy_config: PrivacyConfig, units: int) -> float:
    """Delta must be well below 1 / units: at 1 / units, releasing one unit in full would be allowed."""
    if privacy_config.delta is None:
        return min(1e-5, 0.1 / max(1, units))
    if privacy_config.delta * units >= 1:
        raise PrivacyError(
            f"privacy.delta is {privacy_config.delta:g}, but with {units} {privacy_config.unit}s it must be well "
            f"below {1 / units:g}; otherwise one of them could be released in full"
        )
    return privacy_config.delta
