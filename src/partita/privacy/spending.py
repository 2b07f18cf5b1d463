"""What each client released, what that costs the worst placed of them, and how much noise a budget asks for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from partita.core.batch_schedule import count_steps
from partita.core.dp_settings import PrivacyError
from partita.core.method import PrivacyRelease
from partita.core.plan import Plan
from partita.core.settings import Run
from partita.privacy.accountant import Accountant, PrivacyEvents, epsilon

TRAINING = "training"  # the releases whose noise is privacy.noise
MAX_NOISE = 1000.0  # a noise beyond which nothing is learned
DIGITS = 3  # of a noise that was found, rounded up


def releases_of(run: Run, plan: Plan, examples: int) -> list[PrivacyRelease]:
    """All that one client of so many examples gives away of them in one round in which it is asked."""
    private = run.method.privacy
    found = [rule.release for rule in run.method.client_rules if rule.uses_data and rule.release is not None]
    if private is None or not examples:
        return found
    for phase in plan.phases:
        steps = count_steps(examples, run.training, phase.epochs)
        if private.sampling == "poisson":
            share = min(1.0, run.training.batch_size / examples)
            found.append(PrivacyRelease(TRAINING, private.noise, share, steps))
        else:
            # Every example once in an epoch, in batches that have no other in common: no gain is claimed for chance.
            epochs = -(-steps // -(-examples // run.training.batch_size))
            found.append(PrivacyRelease(TRAINING, private.noise, 1.0, epochs))
    return found


@dataclass
class PrivacySpending:
    """Bills by client. Clients have no examples in common, so a run costs what it costs the worst placed client."""

    delta: float
    by: Accountant = "pld"
    of_clients: bool = False
    bills: dict[str, Counter[PrivacyRelease]] = field(default_factory=dict)

    def charge(self, client: str, releases: Iterable[PrivacyRelease]) -> None:
        bill = self.bills.setdefault(client, Counter())
        for release in releases:
            bill[replace(release, count=1)] += release.count

    def epsilon(self) -> float:
        return self.worst()[1]

    def worst(self) -> tuple[str | None, float]:
        """(client, epsilon). Rényi's bound is cheap and never below: where it is lower than what was found, stop."""
        owners = {frozenset(bill.items()): client for client, bill in self.bills.items()}
        bounds = {key: self._cost(dict(key), "rdp") for key in owners}
        found: tuple[str | None, float] = (None, 0.0)
        for key in sorted(owners, key=lambda key: (-bounds[key], owners[key])):
            if bounds[key] <= found[1]:
                break
            cost = bounds[key] if self.by == "rdp" else self._cost(dict(key), self.by)
            if cost > found[1]:
                found = owners[key], cost
        return found

    def with_noise(self, noise: float) -> PrivacySpending:
        """The same training under another noise."""

        def changed(bill: Mapping[PrivacyRelease, int]) -> Counter[PrivacyRelease]:
            return Counter(
                {replace(each, noise=noise) if each.what == TRAINING else each: times for each, times in bill.items()}
            )

        bills = {client: changed(bill) for client, bill in self.bills.items()}
        return PrivacySpending(self.delta, self.by, self.of_clients, bills)

    def only(self, client: str) -> PrivacySpending:
        return PrivacySpending(self.delta, self.by, self.of_clients, {client: self.bills[client]})

    def _cost(self, bill: PrivacyEvents, by: Accountant) -> float:
        return epsilon(bill, self.delta, by, self.of_clients)


def find_noise(account: PrivacySpending, target: float) -> float:
    """The least noise, to three digits, with which the account costs no more than the target."""
    if not 0 < target < math.inf:
        raise PrivacyError(f"privacy.epsilon is {target}; it must be a number above 0")
    beside = {
        client: Counter({r: n for r, n in bill.items() if r.what != TRAINING}) for client, bill in account.bills.items()
    }
    if (cost := replace(account, bills=beside).epsilon()) > target:
        raise PrivacyError(
            f"what clients tell beside their training costs epsilon {cost:.4g} alone, and privacy.epsilon is "
            f"{target:g}; give those releases more noise, or train fewer rounds"
        )
    noise = 0.0
    while True:
        # Noise enough for the worst placed client is most often enough for all, and only one is searched for.
        client, cost = account.with_noise(noise or 1.0).worst()
        if client is None or (noise and cost <= target):
            return noise
        noise = max(noise, _search(account.only(client), target))


def _search(account: PrivacySpending, target: float) -> float:
    """Epsilon falls almost as a power of the noise, so a search by logarithms takes few steps."""
    from scipy.optimize import brentq  # slow to import, and most runs search for no noise

    def excess(log_noise: float) -> float:
        cost = account.with_noise(math.exp(log_noise)).epsilon()
        return math.log(cost / target) if cost > 0 else -math.inf

    low, high = -1.0, 1.0
    while excess(high) > 0:
        low, high = high, high + 2
        if high > math.log(MAX_NOISE):
            raise PrivacyError(
                f"no noise up to {MAX_NOISE:g} keeps epsilon at {target:g}; allow more, or train fewer rounds or epochs"
            )
    while excess(low) < 0:
        low -= 1
    noise = round_up(math.exp(brentq(excess, low, high, xtol=1e-4)))
    while account.with_noise(noise).epsilon() > target:
        noise = round_up(noise * 1.0002)
    return noise


def round_up(noise: float) -> float:
    """To a few significant digits, so that it can be written in a config, and never down."""
    scale: float = 10.0 ** (DIGITS - math.floor(math.log10(noise)))
    return math.ceil(noise * scale - 1e-9) / scale
