"""Whether a site's policy covers an experiment, a job, and a finished reply. What it does not cover is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from partita.core.client import ClientError
from partita.core.client_rule import PrivacyRelease
from partita.core.plan import Plan
from partita.engines import secure_setup
from partita.engines.flower.messages import SiteRequest
from partita.engines.flower.outgoing import Outgoing
from partita.engines.flower.site import JobKind
from partita.site.policy import UNITS, Policy
from partita.site.terms import Terms, count_releases

APPROVE = "to approve it, run 'partita site approve'"
LEFT = "left"  # kind of the log's lines for updates


class Refusal(ClientError):
    """The policy does not cover a job. The reason goes to the site's log only."""


@dataclass(frozen=True)
class Finding:
    """One line of the consent form.

    Attributes:
        what: What the line is about.
        value: What the experiment asks for.
        refusal: Why the policy does not cover it, with its key and a remedy; "" if it does.
    """

    what: str
    value: str
    refusal: str = ""


def review(policy: Policy, terms: Terms) -> Iterator[Finding]:
    """Check what is the same for all jobs of an experiment."""
    unread = f"experiments does not list it; read this page, and {APPROVE}"
    yield Finding("experiment", terms.digest, "" if terms.digest in policy.experiments else unread)
    unread = f"code does not list its digest; read the file, and {APPROVE}"
    for key, digest in terms.code.items():
        yield Finding(f"custom code {key}", digest, "" if digest in policy.code else unread)
    rounds, most = terms.experiment.run.rounds, policy.limits.rounds
    excess = f"limits.rounds is {most}; train fewer rounds, or raise it"
    yield Finding("rounds", str(rounds), excess if most is not None and rounds > most else "")
    yield from _privacy(policy, terms)
    yield _secure_aggregation(policy, terms)


def review_names(policy: Policy, terms: Terms, names: Iterable[str]) -> str:
    """Return why these parameters may not leave; "" if they may."""
    names = sorted(names)
    if personal := [name for name in names if name in terms.personal]:
        return f"{_some(personal)}: personal parameters never leave; use a method whose plan does not send them up"
    if forbidden := policy.leave.forbidden(names, terms.experiment.model):
        roles = ", ".join(f"'{role}'" for role in terms.by_role(forbidden))
        return f"{_some(forbidden)}: [leave] does not allow {roles}; to allow it, change leave.roles, names and never"
    return ""


def review_scores(policy: Policy) -> str:
    """Return why scores may not leave; "" if they may."""
    return "" if policy.leave.scores else "leave.scores is false; set evaluate.personal_every = 0, or allow scores"


@dataclass(frozen=True)
class History:
    """What left the site so far, from its log."""

    lines: Sequence[Mapping[str, Any]]

    @cached_property
    def left(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """The updates that left, by experiment and tensors. A server that starts again asks for the same ones again."""
        return {(line["experiment"], line["tensors"]): line for line in self.lines if line["kind"] == LEFT}

    @property
    def bytes(self) -> int:
        """The bytes of all updates that left. The same update counts once."""
        return sum(int(line["bytes"]) for line in self.left.values())

    def updates(self, digest: str) -> int:
        """Return how many different updates of an experiment left."""
        return sum(experiment == digest for experiment, _ in self.left)

    def answered(self, digest: str, number: int) -> bool:
        """Return whether an update of this round of an experiment left."""
        return any(experiment == digest and line.get("round") == number for (experiment, _), line in self.left.items())

    def unanswered(self, digest: str, rounds: Iterable[int]) -> int:
        """Return for how many of these rounds the site was asked for an update, and none left."""
        asked = {line.get("round") for line in self.lines if line.get("experiment") == digest}
        return sum(number in asked and not self.answered(digest, number) for number in rounds)

    def releases(self, unit: str) -> Counter[PrivacyRelease]:
        """Return what was released under privacy, by all experiments. The same tensors twice release nothing new."""
        counts: Counter[PrivacyRelease] = Counter()
        for line in self.left.values():
            if line["unit"] == unit:
                counts.update(count_releases([PrivacyRelease(*each) for each in line["releases"]]))
        return counts

    @property
    def unprotected(self) -> int:
        """How many updates left without noise."""
        return sum(line["kind"] == LEFT and line["unit"] == UNITS[0] for line in self.lines)


@dataclass(frozen=True)
class JobConsent:
    """Decides about the jobs of one experiment.

    Attributes:
        policy: The site's policy.
        terms: The experiment as the site sees it.
        history: What left so far.
        now: Returns the local time.
    """

    policy: Policy
    terms: Terms
    history: History
    now: Callable[[], datetime] = datetime.now

    def __call__(self, kind: JobKind, request: SiteRequest, plan: Plan) -> None:
        """Check a job before it is worked on.

        Raises:
            Refusal: If the policy does not cover it.
        """
        self._check(self._standing())
        if kind == "evaluate":
            self._check([review_scores(self.policy)])
            return
        self._check([review_names(self.policy, self.terms, plan.up)])
        number = request.job_id.round
        size = self.terms.update_bytes(number, request.signal)
        # A server that starts again asks for a round again. Whether the update is the same is seen when it is done.
        again = self.history.answered(self.terms.digest, number)
        self._check(self._spending(size or 0, plan, again, number))

    def check_update(self, update: Outgoing, plan: Plan, number: int = 0) -> dict[str, Any]:
        """Check a finished update before it leaves: the hours, and what it really holds.

        Args:
            update: The update.
            plan: The plan of the round.
            number: The round.

        Returns:
            What the log says about it: its unit, its releases and the epsilon with it.

        Raises:
            Refusal: If the policy does not cover it.
        """
        self._check(self._standing())
        self._check([review_names(self.policy, self.terms, update.names)])
        if extra := update.names - plan.up:
            self._check([f"{_some(sorted(extra))}: the plan of the round does not send this up"])
        again = (self.terms.digest, update.tensors) in self.history.left
        self._check(self._spending(update.bytes, plan, again, number))
        releases = self.releases(plan, number)
        return {
            "unit": self.terms.unit,
            "releases": [[each.what, each.noise, each.share, each.count] for each in releases],
            "epsilon": self.epsilon_with(plan, again, number),
        }

    def check_standing(self) -> None:
        """Check what holds for every reply: the experiment and the hours.

        Raises:
            Refusal: If the policy does not cover it.
        """
        self._check(self._standing())

    def check_scores(self) -> None:
        """Check finished scores before they leave.

        Raises:
            Refusal: If the policy does not cover them.
        """
        self._check([*self._standing(), review_scores(self.policy)])

    def releases(self, plan: Plan, number: int) -> list[PrivacyRelease]:
        """Return what an update of a round releases under privacy.

        A choice that a client remembers was charged with the update of the round in which it was made. If that update
        did not leave, the choice shows in a later one, so it is charged there.

        Args:
            plan: The plan of the round.
            number: The round.
        """
        found = self.terms.releases(plan, number)
        if self.terms.unit not in ("example", "group"):
            return found
        for rule in self.terms.experiment.run.method.client_rules:
            if rule.uses_data and rule.release is not None and number % rule.release_every:
                made = range(0, number, rule.release_every)
                found += [rule.release] * self.history.unanswered(self.terms.digest, made)
        return found

    def epsilon_with(self, plan: Plan, again: bool = False, number: int = 0) -> float | None:
        """Return the epsilon of everything that left and one more round; None if no noise is added here.

        Args:
            plan: The plan of the round.
            again: Whether the same update left before, so that it costs nothing more.
            number: The round.
        """
        if self.terms.unit == "none":
            return None
        spent = self.history.releases(self.terms.unit)
        return self.terms.epsilon(spent if again else spent + count_releases(self.releases(plan, number)))

    def _standing(self) -> Iterator[str]:
        for finding in review(self.policy, self.terms):
            if finding.refusal:
                yield f"{finding.what} {finding.value}: {finding.refusal}"
        now = self.now()
        if not self.policy.hours.open_at(now):
            yield f"it is {now:%a %H:%M}, and [hours] allows {self.policy.hours}"

    def _spending(self, size: int, plan: Plan, again: bool, number: int) -> Iterator[str]:
        limits, history = self.policy.limits, self.history
        if limits.bytes_per_round is not None and size > limits.bytes_per_round:
            yield f"the update has {size:,} bytes; limits.bytes_per_round is {limits.bytes_per_round:,}"
        if not again and limits.bytes_total is not None and (total := history.bytes + size) > limits.bytes_total:
            yield f"with this update, {total:,} bytes have left; limits.bytes_total is {limits.bytes_total:,}"
        if not again and limits.rounds is not None and (sent := history.updates(self.terms.digest)) >= limits.rounds:
            yield f"{sent} updates of this experiment have left; limits.rounds is {limits.rounds}"
        most = self.policy.privacy.max_epsilon
        if most is not None and not (spent := self.epsilon_with(plan, again, number) or 0.0) <= most:
            yield f"with this update, epsilon is {spent:.4g}; privacy.max_epsilon is {most:g}"

    def _check(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            if reason:
                raise Refusal(self.terms.client, reason)


def _privacy(policy: Policy, terms: Terms) -> Iterator[Finding]:
    wanted, guard = policy.privacy, terms.experiment.guard
    why = ""
    if UNITS.index(terms.unit) < UNITS.index(wanted.unit) or (wanted.required and terms.unit == "none"):
        why = f"[privacy] requires noise that hides at least one {wanted.unit if wanted.unit != 'none' else 'example'}"
        why += "; set [privacy] in the experiment"
        if guard is not None and terms.unit == "none":
            why += ", with [secure_aggregation]: without it the server adds the noise, after it has seen the update"
    yield Finding("noise added here hides", {"none": "nothing"}.get(terms.unit, f"one {terms.unit}"), why)
    if terms.unit == "none":
        return
    short = wanted.min_noise is not None and terms.noise < wanted.min_noise
    remedy = f"privacy.min_noise is {wanted.min_noise}; raise privacy.noise in the experiment"
    yield Finding("noise, in multiples of the clip", f"{terms.noise:g}", remedy if short else "")
    if terms.simulated:
        why = "privacy.repeatable: anyone can compute the noise and subtract it; leave it out of the experiment"
        yield Finding("noise drawn from", "the seed", why if wanted.required else "")
    planned, most = terms.planned_epsilon() or 0.0, wanted.max_epsilon
    over = most is not None and planned > most
    remedy = f"privacy.max_epsilon is {most}; train fewer rounds, or with more noise"
    rounds = f"{len(terms.rounds)} rounds for which this site is drawn"
    yield Finding("epsilon", f"{planned:.4g} for the {rounds}", remedy if over else "")


def _secure_aggregation(policy: Policy, terms: Terms) -> Finding:
    wanted, settings = policy.secure_aggregation, terms.secure_aggregation
    if settings is None:
        why = (
            "secure_aggregation.required is true; set [secure_aggregation] in the experiment" if wanted.required else ""
        )
        return Finding("the server sees", "this site's update by itself", why)
    least = int(settings.min_clients)
    short = wanted.required and least < wanted.min_clients
    why = f"secure_aggregation.min_clients is {wanted.min_clients}; raise it in the experiment" if short else ""
    run = terms.experiment.run
    known = secure_setup.protection(run, run.cohort_size(len(terms.experiment.federation.clients)))
    return Finding("the server sees", f"sums of at least {least} updates, {known}", why)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
