"""Forecast a privacy budget before a run: the noise, how epsilon grows, and the effect of other choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from partita.core.client_rule import PrivacyRelease
from partita.core.dp_settings import PrivacyError
from partita.privacy.guard import PrivacyGuard
from partita.privacy.spending import TRAINING, PrivacySpending, find_noise

DELTA = 1e-5


@dataclass(frozen=True)
class Forecast:
    """The cost of a run before it is started."""

    unit: str  # "example", "group" or "client"
    noise: float  # standard deviation, in multiples of the clip
    delta: float  # delta of the guarantee
    epsilon: float  # cost of all rounds
    after: Mapping[int, float]  # epsilon by number of rounds
    instead: Mapping[str, float]  # noise for the same budget under other choices

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """Format the forecast as lines of text."""
        lines = [
            f"noise {self.noise:g} times the clip: epsilon {self.epsilon:.4g} at delta {self.delta:g}, by {self.unit}"
        ]
        lines += ["", "rounds  epsilon", *(f"{rounds:6}  {cost:.4g}" for rounds, cost in self.after.items())]
        if self.instead:
            width = max(map(len, self.instead))
            lines += ["", "for the same epsilon, the noise would be"]
            lines += [f"  {noise:8g}  with {what:{width}}".rstrip() for what, noise in self.instead.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Client:
    """A client that is sampled in every round."""

    examples: int  # number of training examples, or of groups
    batch: int  # expected batch size
    rounds: int  # rounds of the run
    epochs: int = 1  # epochs per round
    unit: str = "example"  # "group" if groups are drawn and hidden

    def bill(self, rounds: int, delta: float) -> PrivacySpending:
        """Return the spending of a number of rounds, with noise 1."""
        account = PrivacySpending(delta)
        steps = self.epochs * -(-self.examples // self.batch)
        account.charge("client", [PrivacyRelease(TRAINING, 1.0, min(1.0, self.batch / self.examples), steps * rounds)])
        return account


def forecast_client(client: Client, epsilon: float | None, noise: float | None, delta: float | None) -> Forecast:
    """Forecast one client. Give `epsilon` to find the noise, or `noise` to find epsilon.

    Args:
        client: The client.
        epsilon: The budget.
        noise: The noise in multiples of the clip.
        delta: Default: min(1e-5, 0.1 / examples or groups).

    Raises:
        PrivacyError: If a number of the client is below 1, or neither `epsilon` nor `noise` is given.
    """
    units = f"{client.unit}s"
    numbers = {units: client.examples, "batch": client.batch, "rounds": client.rounds, "epochs": client.epochs}
    for what, number in numbers.items():
        if number < 1:
            raise PrivacyError(f"--{what} is {number}; it must be at least 1")
    delta = min(DELTA, 0.1 / client.examples) if delta is None else delta
    other = {
        "twice the rounds": replace(client, rounds=2 * client.rounds),
        "half the batch": replace(client, batch=max(1, client.batch // 2)),
        f"twice the {units}": replace(client, examples=2 * client.examples),
    }
    bills = {what: variant.bill(variant.rounds, delta) for what, variant in other.items()}
    return _forecast(client.unit, lambda rounds: client.bill(rounds, delta), client.rounds, epsilon, noise, bills)


def forecast_run(guard: PrivacyGuard) -> Forecast:
    """Forecast a whole run. The worst-off client decides.

    Raises:
        PrivacyError: If the number of examples or groups is not known for every client.
    """
    run, privacy = guard.run, guard.privacy
    if guard.planned is None:
        raise PrivacyError(
            f"the number of {privacy.unit}s is not known for every client here; give --{privacy.unit}s instead"
        )
    longer = replace(guard, run=replace(run, rounds=2 * run.rounds))
    bills = {"twice the rounds": longer.forecast(2 * run.rounds)}
    if privacy.unit != "client":
        half = replace(run.training, batch_size=max(1, run.training.batch_size // 2))
        bills["half the batch"] = replace(guard, run=replace(run, training=half)).forecast(run.rounds)
    return _forecast(privacy.unit, guard.forecast, run.rounds, privacy.epsilon, privacy.noise, bills)


def _forecast(
    unit: str,
    bill: Callable[[int], PrivacySpending],
    rounds: int,
    epsilon: float | None,
    noise: float | None,
    other: Mapping[str, PrivacySpending],
) -> Forecast:
    if noise is None:
        if epsilon is None:
            raise PrivacyError(
                "give --epsilon, for which the noise is computed, or --noise, for which epsilon is computed"
            )
        noise = find_noise(bill(rounds), epsilon)
    quarters = sorted({max(1, -(-rounds * part // 4)) for part in (1, 2, 3, 4)})
    after = {quarter: bill(quarter).with_noise(noise).epsilon() for quarter in quarters}
    reached = after[rounds]
    instead = {what: find_noise(account, reached) for what, account in other.items() if noise}
    if noise:
        instead["half the epsilon"] = find_noise(bill(rounds), reached / 2)
    return Forecast(unit, noise, bill(rounds).delta, reached, after, instead)
