"""What a budget asks for before anything is run: the noise, how the cost grows, and what other choices would change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from partita.core.dp_settings import PrivacyError
from partita.core.method import PrivacyRelease
from partita.privacy.guard import PrivacyGuard
from partita.privacy.spending import TRAINING, PrivacySpending, find_noise

DELTA = 1e-5


@dataclass(frozen=True)
class Forecast:
    """`after` is epsilon by rounds; `instead` the noise that the same budget would ask for under other choices."""

    unit: str
    noise: float
    delta: float
    epsilon: float
    after: Mapping[int, float]
    instead: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
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
    """One client that is asked in every round."""

    examples: int
    batch: int
    rounds: int
    epochs: int = 1

    def bill(self, rounds: int, delta: float) -> PrivacySpending:
        account = PrivacySpending(delta)
        steps = self.epochs * -(-self.examples // self.batch)
        account.charge("client", [PrivacyRelease(TRAINING, 1.0, min(1.0, self.batch / self.examples), steps * rounds)])
        return account


def forecast_client(client: Client, epsilon: float | None, noise: float | None, delta: float | None) -> Forecast:
    for what, number in asdict(client).items():
        if number < 1:
            raise PrivacyError(f"--{what} is {number}; it must be at least 1")
    delta = min(DELTA, 0.1 / client.examples) if delta is None else delta
    other = {
        "twice the rounds": replace(client, rounds=2 * client.rounds),
        "half the batch": replace(client, batch=max(1, client.batch // 2)),
        "twice the examples": replace(client, examples=2 * client.examples),
    }
    bills = {what: each.bill(each.rounds, delta) for what, each in other.items()}
    return _forecast("example", lambda rounds: client.bill(rounds, delta), client.rounds, epsilon, noise, bills)


def forecast_run(guard: PrivacyGuard) -> Forecast:
    """Of a whole run: the worst placed of its clients decides."""
    run, privacy_config = guard.run, guard.privacy_config
    if guard.planned is None:
        raise PrivacyError("the number of examples is not known for every client here; give --examples instead")
    longer = replace(guard, run=replace(run, rounds=2 * run.rounds))
    bills = {"twice the rounds": longer.forecast(2 * run.rounds)}
    if privacy_config.unit == "example":
        half = replace(run.training, batch_size=max(1, run.training.batch_size // 2))
        bills["half the batch"] = replace(guard, run=replace(run, training=half)).forecast(run.rounds)
    return _forecast(
        privacy_config.unit, guard.forecast, run.rounds, privacy_config.epsilon, privacy_config.noise, bills
    )


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
            raise PrivacyError("say --epsilon, for which the noise is found, or --noise, for which epsilon is")
        noise = find_noise(bill(rounds), epsilon)
    quarters = sorted({max(1, -(-rounds * part // 4)) for part in (1, 2, 3, 4)})
    after = {quarter: bill(quarter).with_noise(noise).epsilon() for quarter in quarters}
    reached = after[rounds]
    instead = {what: find_noise(account, reached) for what, account in other.items() if noise}
    if noise:
        instead["half the epsilon"] = find_noise(bill(rounds), reached / 2)
    return Forecast(unit, noise, bill(rounds).delta, reached, after, instead)
