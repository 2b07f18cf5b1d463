"""Private runs: find the noise for a privacy budget and track the epsilon that is spent."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from partita.core.client_noise import ClientNoise
from partita.core.client_rule import ClientRule, PrivacyRelease
from partita.core.dp_settings import PrivacyError, PrivacySettings
from partita.core.method import Method
from partita.core.model import Model
from partita.core.plan import Plan, RoundInfo, plan_for
from partita.core.rounds import initial_server
from partita.core.settings import Run
from partita.core.update_transform import UpdateTransform
from partita.privacy.client_level import protect_clients
from partita.privacy.disclosure import disclosed
from partita.privacy.spending import TRAINING, PrivacySpending, find_noise, releases_of
from partita.secure_aggregation.client_vector import check_room
from partita.secure_aggregation.eligibility import fixed_point_of
from partita.secure_aggregation.neighbors import check_size, colluding_clients, threshold_of


def protect_at_clients(run: Run, cohort: int, clip: float, noise: float) -> Run:
    """Return the run with clipping and noise at the clients and none at the server.

    The threshold of the protocol and the number of clients whose noise is counted are one number: `min_clients` of the
    returned run. All clients that confirm a sum are in it, and a client does not unmask a sum that fewer confirm,
    whatever the server says, also if clients were missing from the start. So those of them that do not collude all add
    their noise to it.

    Args:
        run: A run with secure aggregation.
        cohort: The number of clients per round.
        clip: Maximum L2 norm of an update.
        noise: Standard deviation of the noise on the smallest sum that is released, in multiples of the clip; 0 for
            none.

    Raises:
        MethodError: If the method cannot be made private.
        PrivacyError: If the noise does not fit the fixed-point format, or no honest client is left.
        TooFewClients: If a cohort is too small for secure aggregation.
    """
    settings = run.secure_aggregation
    assert settings is not None
    check_size(settings, cohort)
    needed = threshold_of(settings, cohort)
    settings = replace(settings, min_clients=needed)
    client_noise = ClientNoise(clip, noise, needed - colluding_clients(settings, cohort)) if noise else None
    method = protect_clients(run.method, clip, 0.0, cohort)
    noisy = replace(run, method=method, secure_aggregation=settings, client_noise=client_noise, drift=False)
    if client_noise:
        check_room(client_noise, fixed_point_of(noisy, cohort))
    return noisy


def count_values(run: Run, model: Model) -> int:
    """Return a bound on the number of values that a client releases in a round, delta and slots together."""
    slots = frozenset[str]().union(*(rule.slots for rule in run.method.client_rules))
    return (1 + len(slots)) * sum(value.numel() for value in model.initial.values())


def noise_in_effect(run: Run, model: Model, cohort: int) -> Callable[[float], float]:
    """Return the function from `privacy.noise` to the noise that the accountant is given.

    Args:
        run: A run from `protect_at_clients`.
        model: The model.
        cohort: The number of clients per round.
    """
    assert run.client_noise is not None
    scale = fixed_point_of(run, cohort).scale
    client_noise, values = run.client_noise, count_values(run, model)
    return lambda noise: effective_noise(replace(client_noise, noise=noise), scale, values) if noise else 0.0


def effective_noise(client_noise: ClientNoise, scale: float, values: int) -> float:
    """Return the noise of a Gaussian mechanism with the same guarantee, in multiples of the clip.

    A client scales its clipped update x to the grid, rounds it to the nearest integers and adds discrete Gaussian
    noise. The server sees the sum modulo 2**bits, which is post-processing of the sum.

    Sensitivity: rounding moves each of the d values by at most 1/2, so by the triangle inequality the integers have a
    norm of at most clip * scale + sqrt(d) / 2. Replacing a client moves the sum by at most twice that.

    Noise: the sum of the m = `honest` clients' noise, each of variance s^2, is not a discrete Gaussian, but close to
    one of variance m s^2. By Kairouz, Liu and Steinke (2021, theorem 1 and proposition 14), for s >= 1/2, the mechanism
    satisfies (eps^2 / 2)-concentrated privacy with

        eps = sensitivity / (sqrt(m) s) + tau sqrt(d),   tau = 10 sum_{k=1}^{m-1} exp(-2 pi^2 s^2 k / (k + 1)).

    A Gaussian mechanism with the multiplier 1 / eps has the same curve of Rényi divergences. Further clients add
    independent noise, which is post-processing.

    Args:
        client_noise: The clip, and the noise of the clients.
        scale: Grid points per unit.
        values: The number d of values that are released, or more.
    """
    std = math.sqrt(client_noise.variance(scale))  # of one client, in grid points
    sensitivity = client_noise.clip * scale + math.sqrt(values) / 2
    eps = 2 * sensitivity / (math.sqrt(client_noise.honest) * std) + tau(client_noise.honest, std) * math.sqrt(values)
    return 2 / eps  # `accountant` takes the noise in multiples of one client's share, and doubles the share itself


def tau(clients: int, std: float) -> float:
    """Return how far the sum of discrete Gaussians is from a discrete Gaussian.

    Args:
        clients: The number of summands.
        std: The standard deviation of each.
    """
    return 10 * math.fsum(math.exp(-2 * (math.pi * std) ** 2 * k / (k + 1)) for k in range(1, clients))


ANY_CLIENT = "any client"  # key of the client-level ledger, which is the same for all clients


@dataclass(frozen=True)
class PrivacyGuard:
    """A run with its noise and its privacy budget."""

    run: Run
    model: Model
    privacy: PrivacySettings  # with noise and delta filled in
    sizes: Mapping[str, int]  # training examples by client, or groups of them; 0: unknown here
    planned: float | None  # epsilon of all rounds with the cohorts as they will be drawn; None if a size is unknown
    account: PrivacySpending = field(repr=False, compare=False)  # what the clients have spent so far

    @property
    def noise_at_clients(self) -> float:
        """The noise on the smallest sum that clients release, in multiples of the clip; 0 if they add none."""
        return self.run.client_noise.noise if self.run.client_noise else 0.0

    @property
    def withholds_own_scores(self) -> bool:
        """Whether clients may not report scores of their own models: it covers those models or the test sets."""
        return self.privacy.unit == "client" or self.run.method.adapt is not None

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
        """Return the epsilon spent so far, or None if a client's number of examples or groups is unknown here.

        Raises:
            PrivacyError: If it exceeds the budget.
        """
        if not all(self.sizes.values()) and not self.account.of_clients:
            return None
        spent = self.account.epsilon()
        if self.privacy.epsilon is not None and spent > self.privacy.epsilon:
            raise PrivacyError(
                f"epsilon has reached {spent:.4g}, beyond the budget of {self.privacy.epsilon:g}: clients "
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
        if run.secure_aggregation is not None and account.of_clients:
            # The server asks the clients itself and is not trusted, so there is no amplification by sampling.
            for client in cohort:
                account.charge(client, [PrivacyRelease(TRAINING, self.noise_at_clients, 1.0)])
            return
        if account.of_clients:
            transform: Any = run.method.transforms[0]
            share = 1.0 if _keeps_state(run.method, plans) else len(cohort) / population
            account.charge(ANY_CLIENT, [PrivacyRelease(TRAINING, transform.noise, share)])
            return
        for client, plan in zip(cohort, plans, strict=True):
            account.charge(client, releases_of(run, plan, self.sizes[client], number))

    def _sampling(self) -> str:
        if self.privacy.unit != "client":
            return self.privacy.sampling
        return "known cohort" if self.run.secure_aggregation else "cohort"

    def planned_releases(self, rounds: int) -> Iterator[tuple[int, str, list[PrivacyRelease]]]:
        """Yield (round, client, releases) of the first rounds, with the cohorts that will be drawn."""
        run = self.run
        signal = run.method.server_rule.signal(initial_server(run, self.model))
        for number in range(rounds):
            for client in run.draw_cohort(number, list(self.sizes)):
                yield number, client, self.releases(number, client, signal)

    def releases(self, number: int, client: str, signal: Mapping[str, float]) -> list[PrivacyRelease]:
        """Return what a client releases in a round. Not for client-level privacy, where the server releases.

        Args:
            number: The round.
            client: The client.
            signal: The server's signal to the plan.
        """
        plan = plan_for(self.run.method.plan, self.model, RoundInfo(number, self.run.rounds, client, signal))
        return releases_of(self.run, plan, self.sizes[client], number)

    def about(self) -> dict[str, Any]:
        """Return the privacy settings and the disclosure lists for the run's record."""
        privacy = self.privacy
        return {
            "unit": privacy.unit,
            **({"group": privacy.group} if privacy.group else {}),
            "budget": privacy.epsilon,
            "delta": privacy.delta,
            "noise": privacy.noise,
            "clip": privacy.clip,
            "sampling": self._sampling(),
            "noise_added": _noise_added(self.run, privacy.unit),
            "accountant": self.account.by,
            "repeatable": privacy.repeatable,
            "planned": None if self.planned == math.inf else self.planned,
            **disclosed(privacy.unit, privacy.disclose_validation),
        }


def protect(run: Run, privacy: PrivacySettings, cohort: int) -> Run:
    """Return the run with its privacy.

    Args:
        run: The run without privacy.
        privacy: The settings. Their budget is not checked here.
        cohort: The number of clients per round.

    Raises:
        MethodError: If the method cannot be made private.
        PrivacyError: If the noise is not known, or does not fit the settings.
    """
    if privacy.unit == "client" and run.secure_aggregation is not None:
        return protect_at_clients(run, cohort, privacy.clip, privacy.known_noise)
    if privacy.unit == "client":
        method = protect_clients(run.method, privacy.clip, privacy.known_noise, cohort)
        # Drift is off because it is measured on updates before the noise.
        return replace(run, method=method, hidden_cohorts=True, drift=False)
    by_step = replace(privacy, noise=privacy.known_noise, epsilon=None)  # the guard keeps the budget
    return replace(run, method=replace(run.method, privacy=by_step))


def make_private(run: Run, model: Model, sizes: Mapping[str, int], privacy: PrivacySettings) -> PrivacyGuard:
    """Find the noise for the planned rounds, cohorts and steps, and make the run's method private.

    Args:
        run: The run without privacy.
        model: The model.
        sizes: Training examples by client, or groups of them under group-level privacy; 0 if unknown here.
        privacy: The settings. Missing noise and delta are filled in.

    Raises:
        PrivacyError: If the noise cannot be found, or is too small for the budget.
        MethodError: If the method cannot be made private.
    """
    of_clients = privacy.unit == "client"
    cohort = run.cohort_size(len(sizes))
    units = len(sizes) if of_clients else max(sizes.values())
    delta = _delta(privacy, units)
    at_clients = of_clients and run.secure_aggregation is not None
    if at_clients and privacy.accountant == "pld":  # a config with both is refused when it is read
        raise PrivacyError(
            "privacy.accountant is 'pld', but noise at the clients is a sum of discrete Gaussians, which only 'rdp' "
            "bounds; use that, or 'auto'"
        )
    by = (
        privacy.accountant
        if privacy.accountant != "auto"
        else "rdp"
        if at_clients or (of_clients and cohort < len(sizes))
        else "pld"
    )
    known = of_clients or all(sizes.values())
    if privacy.noise is None and not known:
        raise PrivacyError(
            f"privacy.epsilon needs the number of {privacy.unit}s of every client, which is not known here; "
            "find the noise with 'partita budget', and set privacy.noise"
        )

    resolved = replace(privacy, delta=delta)
    trial_run = protect(run, replace(resolved, noise=1.0) if resolved.noise is None else resolved, cohort)
    in_effect = noise_in_effect(trial_run, model, cohort) if trial_run.client_noise else None
    account = PrivacySpending(delta, by, of_clients, in_effect=in_effect)
    trial = PrivacyGuard(trial_run, model, resolved, sizes, None, account)
    ahead = trial.forecast(run.rounds if known else 0)
    if (
        of_clients
        and not at_clients
        and cohort < len(sizes)
        and any(release.share == 1 for release in ahead.bills[ANY_CLIENT])
    ):
        warnings.warn(
            f"{run.method.name}: clients keep state between rounds, so epsilon is charged as if every client took part "
            "in every round; a method without such state needs less noise",
            stacklevel=2,
        )
    if resolved.noise is None and resolved.epsilon is not None:
        resolved = replace(resolved, noise=find_noise(ahead, resolved.epsilon))
    noise = resolved.known_noise
    planned = ahead.with_noise(noise).epsilon() if known else None
    if planned is not None and privacy.epsilon is not None and planned > privacy.epsilon:
        raise PrivacyError(
            f"with privacy.noise {noise:g}, {run.rounds} rounds cost epsilon {planned:.4g}, but privacy.epsilon is "
            f"{privacy.epsilon:g}; remove privacy.noise to have it computed"
        )
    return PrivacyGuard(protect(run, resolved, cohort), model, resolved, sizes, planned, replace(account, bills={}))


def _noise_added(run: Run, unit: str) -> str:
    """Say who adds the noise, and so who must be trusted."""
    if unit != "client":
        return "at the clients, in training; the server is not trusted"
    if run.secure_aggregation is not None:
        return "at the clients, before secure aggregation; the server is not trusted"
    return "at the server, which is trusted"


def _keeps_state(method: Method, plans: Iterable[Plan]) -> bool:
    """Whether a client's update can depend on the rounds in which it took part before.

    Amplification by sampling needs a round that depends on its own cohort and on what was published. The state of other
    clients depends on earlier cohorts. Cohorts have a fixed size, so it also reveals whether the protected client was
    in them. Such a round is charged without amplification.
    """
    rules_or_transforms: tuple[ClientRule | UpdateTransform, ...] = (*method.client_rules, *method.transforms)
    remembers = any(part.slots for part in rules_or_transforms)
    return remembers or method.carry_optimizer or any(plan.keep for plan in plans)


def _delta(privacy: PrivacySettings, units: int) -> float:
    """Delta must be well below 1 / units: at 1 / units, releasing one unit in full would be allowed."""
    if privacy.delta is None:
        return min(1e-5, 0.1 / max(1, units))
    if privacy.delta * units >= 1:
        raise PrivacyError(
            f"privacy.delta is {privacy.delta:g}, but with {units} {privacy.unit}s it must be well "
            f"below {1 / units:g}; otherwise one of them could be released in full"
        )
    return privacy.delta
