"""Ledger of each client's releases, their cost for the worst-off client, and the noise that a budget requires."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from partita.core.batch_schedule import count_steps
from partita.core.client_rule import PrivacyRelease
from partita.core.dp_settings import PrivacyError
from partita.core.plan import Plan
from partita.core.settings import Run
from partita.privacy.accountant import Accountant, PrivacyEvents, epsilon

TRAINING = "training"  # kind of the releases whose noise is privacy.noise
MAX_NOISE = 1000.0  # nothing is learned beyond this noise
DIGITS = 3  # significant digits after the first, to which a computed noise is rounded up


def releases_of(run: Run, plan: Plan, units: int, number: int = 0) -> list[PrivacyRelease]:
    """List everything that one client releases in a round for which it is sampled.

    Args:
        run: The run.
        plan: The client's plan.
        units: The client's number of training examples, or of groups under group-level privacy.
        number: The round.
    """
    private = run.method.privacy
    releases = [
        rule.release
        for rule in run.method.client_rules
        if rule.uses_data and rule.release is not None and number % rule.release_every == 0
    ]
    if private is None or not units:
        return releases
    for phase in plan.phases:
        steps = count_steps(units, run.training, phase.epochs)
        if private.sampling == "poisson":
            share = min(1.0, run.training.batch_size / units)
            releases.append(PrivacyRelease(TRAINING, private.known_noise, share, steps))
        else:
            # Each epoch uses every unit once, in disjoint batches. No amplification by shuffling is claimed.
            epochs = -(-steps // -(-units // run.training.batch_size))
            releases.append(PrivacyRelease(TRAINING, private.known_noise, 1.0, epochs))
    return releases


@dataclass
class PrivacySpending:
    """Ledger of releases by client.

    Clients share no examples, so the cost of a run is its cost for the worst-off client.
    """

    delta: float  # delta of the guarantee
    by: Accountant = "pld"
    of_clients: bool = False  # client-level privacy
    bills: dict[str, Counter[PrivacyRelease]] = field(default_factory=dict)  # client -> releases
    # What the noise of training is worth to the accountant, if that is not the noise itself.
    in_effect: Callable[[float], float] | None = None

    def charge(self, client: str, releases: Iterable[PrivacyRelease]) -> None:
        """Add releases to a client's bill."""
        bill = self.bills.setdefault(client, Counter())
        for release in releases:
            bill[replace(release, count=1)] += release.count

    def epsilon(self) -> float:
        """Return the epsilon of the worst-off client."""
        return self.worst()[1]

    def worst(self) -> tuple[str | None, float]:
        """Return (client, epsilon) of the worst-off client.

        The RDP bound is cheap and never too low. Clients are tried in its descending order until it falls to the
        largest epsilon so far.
        """
        owners = {frozenset(bill.items()): client for client, bill in self.bills.items()}
        bounds = {key: self._cost(dict(key), "rdp") for key in owners}
        worst: tuple[str | None, float] = (None, 0.0)
        for key in sorted(owners, key=lambda key: (-bounds[key], owners[key])):
            if bounds[key] <= worst[1]:
                break
            cost = bounds[key] if self.by == "rdp" else self._cost(dict(key), self.by)
            if cost > worst[1]:
                worst = owners[key], cost
        return worst

    def with_noise(self, noise: float) -> PrivacySpending:
        """Return the same spending with another noise for training."""

        def changed(bill: Mapping[PrivacyRelease, int]) -> Counter[PrivacyRelease]:
            return Counter(
                {
                    replace(release, noise=noise) if release.what == TRAINING else release: times
                    for release, times in bill.items()
                }
            )

        bills = {client: changed(bill) for client, bill in self.bills.items()}
        return replace(self, bills=bills)

    def only(self, client: str) -> PrivacySpending:
        """Return the spending of one client alone."""
        return replace(self, bills={client: self.bills[client]})

    def _cost(self, bill: PrivacyEvents, by: Accountant) -> float:
        if self.in_effect is not None:
            worth = {release.noise: self.in_effect(release.noise) for release in bill if release.what == TRAINING}
            bill = {
                replace(release, noise=worth[release.noise]) if release.what == TRAINING else release: times
                for release, times in bill.items()
            }
        return epsilon(bill, self.delta, by, self.of_clients)


def find_noise(account: PrivacySpending, target: float) -> float:
    """Find the smallest noise with which the spending costs at most epsilon `target`, rounded up.

    Args:
        account: The releases of the whole run.
        target: The budget.

    Raises:
        PrivacyError: If other releases already exceed the target, or no noise up to `MAX_NOISE` suffices.
    """
    if not 0 < target < math.inf:
        raise PrivacyError(f"privacy.epsilon is {target}; it must be a number above 0")
    other_releases = {
        client: Counter({r: n for r, n in bill.items() if r.what != TRAINING}) for client, bill in account.bills.items()
    }
    if (cost := replace(account, bills=other_releases).epsilon()) > target:
        raise PrivacyError(
            f"what clients release besides their training costs epsilon {cost:.4g} alone, but privacy.epsilon is "
            f"{target:g}; give those releases more noise, or train fewer rounds"
        )
    noise = 0.0
    while True:
        # Search for the worst-off client only: its noise usually suffices for all. Otherwise repeat.
        client, cost = account.with_noise(noise or 1.0).worst()
        if client is None or (noise and cost <= target):
            return noise
        noise = max(noise, _search(account.only(client), target))


def _search(account: PrivacySpending, target: float) -> float:
    """Search on log-log scale: epsilon is almost a power law of the noise, so few steps suffice."""
    from scipy.optimize import brentq  # slow to import, and most runs do not search

    def excess(log_noise: float) -> float:
        cost = account.with_noise(math.exp(log_noise)).epsilon()
        return math.log(cost / target) if cost > 0 else -math.inf

    low, high, highest = -1.0, 1.0, math.log(MAX_NOISE)
    while excess(high) > 0:
        if high >= highest:
            raise PrivacyError(
                f"no noise up to {MAX_NOISE:g} keeps epsilon at {target:g}; allow more, or train fewer rounds or epochs"
            )
        low, high = high, min(high + 2, highest)
    while excess(low) < 0:
        low -= 1
    noise = round_up(math.exp(brentq(excess, low, high, xtol=1e-4)))
    while account.with_noise(noise).epsilon() > target:
        noise = round_up(noise * 1.0002)
    return noise


def round_up(noise: float) -> float:
    """Round up to a few significant digits, short enough to write in a config."""
    scale: float = 10.0 ** (DIGITS - math.floor(math.log10(noise)))
    return math.ceil(noise * scale - 1e-9) / scale
