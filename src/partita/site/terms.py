"""An experiment as a site sees it: what would leave in which rounds, how it is protected, and what it costs.

Everything is computed at the site, from its own copy of the experiment, its own data and its own plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from partita.core.client_rule import PrivacyRelease, overrides
from partita.core.model import role_tag
from partita.core.plan import Plan, RoundInfo, plan_for
from partita.core.rounds import initial_server, make_job
from partita.core.secure_settings import SecureAggregation
from partita.core.tensors import Names
from partita.engines.secure_setup import bytes_up
from partita.experiment.experiment import Experiment
from partita.privacy.spending import TRAINING, releases_of

NO_ROLE = "–"  # as `partita plan` prints it


@dataclass(frozen=True)
class Stage:
    """Consecutive rounds in which the same parameters leave.

    Attributes:
        first: The first round.
        last: The last round.
        plan: The plan of these rounds.
        bytes: The bytes of an update; None if the client's data decides.
    """

    first: int
    last: int
    plan: Plan
    bytes: int | None


@dataclass(frozen=True)
class Terms:
    """What an experiment asks of a site.

    Attributes:
        experiment: The experiment, built at the site.
        digest: The digest of what all parties share, by which experiments are approved.
        client: The site's name.
    """

    experiment: Experiment
    digest: str
    client: str

    @property
    def code(self) -> Mapping[str, str]:
        """The digests of own code that the experiment runs here."""
        return self.experiment.config.code

    @property
    def secure_aggregation(self) -> SecureAggregation | None:
        """The settings of secure aggregation; None if the server sees single updates."""
        return self.experiment.run.secure_aggregation

    @property
    def unit(self) -> str:
        """Whose presence is hidden by noise that is added at this site; "none" if no noise is."""
        guard = self.experiment.guard
        if guard is None or (guard.privacy.unit == "client" and self.secure_aggregation is None):
            return "none"  # the server would add the noise, after it has seen the update
        return guard.privacy.unit

    @property
    def noise(self) -> float:
        """The noise in multiples of the clip; 0 if none is added here."""
        guard = self.experiment.guard
        return 0.0 if guard is None or self.unit == "none" else guard.privacy.known_noise

    @property
    def simulated(self) -> bool:
        """Whether anyone who knows the config can compute the noise."""
        guard = self.experiment.guard
        return guard is not None and guard.privacy.repeatable

    @property
    def scores(self) -> bool:
        """Whether the server will ask for scores on this site's examples."""
        config = self.experiment.config
        return bool(config.evaluate.personal_every or config.validation_every)

    @cached_property
    def rounds(self) -> list[int]:
        """The rounds for which the client is drawn; all of them if that cannot be known."""
        run, clients = self.experiment.run, self.experiment.federation.clients
        if run.hidden_cohorts or run.sampling.uses_losses:
            return list(range(run.rounds))
        return [number for number in range(run.rounds) if self.client in run.draw_cohort(number, clients)]

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of the run, as the plan has them before the first round."""
        run = self.experiment.run
        found: list[Stage] = []
        for number in range(run.rounds):
            plan = self.plan(number)
            if found and found[-1].plan.up == plan.up and found[-1].plan.keep == plan.keep:
                found[-1] = replace(found[-1], last=number)
            else:
                found.append(Stage(number, number, plan, self.update_bytes(number)))
        return found

    @cached_property
    def personal(self) -> Names:
        """The parameters that the client keeps in any round. They may not leave in another one either."""
        return frozenset(name for stage in self.stages for name in stage.plan.keep)

    def plan(self, number: int, signal: Mapping[str, float] | None = None) -> Plan:
        """Return the site's plan of a round.

        Args:
            number: The round.
            signal: The server's signal. Default: that of a server before the first round.
        """
        run, model = self.experiment.run, self.experiment.model
        signal = self._signal if signal is None else signal
        return plan_for(run.method.plan, model, RoundInfo(number, run.rounds, self.client, signal))

    def update_bytes(self, number: int, signal: Mapping[str, float] | None = None) -> int | None:
        """Return the bytes of an update, masked or in clear; None if the client's data decides what it sends."""
        run, model = self.experiment.run, self.experiment.model
        if any(rule.uses_data and overrides(rule, "narrow") for rule in run.method.client_rules):
            return None
        job, _ = make_job(run, model, self._server, number, self.client)
        clients = self.experiment.federation.clients
        return bytes_up(run, model, job if signal is None else replace(job, signal=signal), clients)

    def by_role(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return parameters by the role that `partita plan` prints."""
        roles: dict[str, list[str]] = {}
        for name in sorted(names):
            roles.setdefault(role_tag(self.experiment.model.tags.get(name, frozenset())) or NO_ROLE, []).append(name)
        return roles

    def releases(self, plan: Plan, number: int = 0) -> list[PrivacyRelease]:
        """Return what a round releases under privacy. That the client was drawn at random is not counted on.

        Args:
            plan: The plan of the round.
            number: The round. In round 0 every rule releases what it ever does.
        """
        if self.unit == "none":
            return []
        if self.unit == "client":
            return [PrivacyRelease(TRAINING, self.noise, 1.0)]
        assert self.experiment.guard is not None
        return releases_of(self.experiment.run, plan, self.experiment.guard.sizes[self.client], number)

    def epsilon(self, releases: Mapping[PrivacyRelease, int]) -> float:
        """Return the epsilon of releases, at the experiment's delta."""
        guard = self.experiment.guard
        assert guard is not None
        account = replace(guard.account, bills={})
        account.charge(self.client, [replace(each, count=times) for each, times in releases.items()])
        return account.epsilon() if releases else 0.0

    def planned_epsilon(self) -> float | None:
        """Return the epsilon of all rounds for which the client is drawn; None if no noise is added here."""
        if self.unit == "none":
            return None
        bill: Counter[PrivacyRelease] = Counter()
        for number in self.rounds:
            bill.update(count_releases(self.releases(self.plan(number), number)))
        return self.epsilon(bill)

    @cached_property
    def _server(self) -> Any:
        return initial_server(self.experiment.run, self.experiment.model)

    @cached_property
    def _signal(self) -> Mapping[str, float]:
        return self.experiment.run.method.server_rule.signal(self._server)

    @property
    def follows_signal(self) -> bool:
        """Whether a signal of the server's can change the plan. Each job is then checked with its own signal."""
        return bool(self._signal)


def count_releases(releases: Sequence[PrivacyRelease]) -> Counter[PrivacyRelease]:
    """Return how often each release happens."""
    counts: Counter[PrivacyRelease] = Counter()
    for release in releases:
        counts[replace(release, count=1)] += release.count
    return counts
