"""The consent form: what an experiment asks of a site, and which line the policy allows or refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partita.site.config import SiteConfig
from partita.site.consent import Finding, History, review, review_names, review_scores
from partita.site.policy import Policy
from partita.site.terms import Stage, Terms
from partita.storage.safe_text import printable

SHOWN = 4  # names of a role that are shown, unless all are


@dataclass(frozen=True)
class ConsentForm:
    """What an experiment asks of a site, line by line.

    Attributes:
        site: The site's settings.
        policy: The site's policy.
        terms: The experiment as the site sees it.
        history: What left the site so far.
        all_names: Whether to name every parameter.
    """

    site: SiteConfig
    policy: Policy
    terms: Terms
    history: History
    all_names: bool = False

    def findings(self) -> Iterator[Finding]:
        """Yield what the policy decides about, in the order of the page."""
        yield from review(self.policy, self.terms)
        for stage in self.terms.stages:
            yield from self._stage(stage)
        yield self._total()
        scores = "asked for" if self.terms.scores else "not asked for"
        yield Finding("scores on own examples", scores, review_scores(self.policy) if self.terms.scores else "")

    def refusals(self) -> list[str]:
        """Return what the policy refuses, one sentence each."""
        return [f"{each.what}: {each.refusal}" for each in self.findings() if each.refusal]

    def to_text(self) -> str:
        """Format the form as a page of text."""
        config, terms = self.terms.experiment.config, self.terms
        lines = [
            f"Consent form of site '{self.site.name}'",
            "",
            f"The experiment '{config.label}' ({self.site.experiment}), with the server {self.site.server.address}.",
            f"This site holds {len(terms.experiment.federation[terms.client].train):,} training examples.",
            "",
        ]
        for finding in self.findings():
            lines.append(f"{finding.what}: {finding.value}")
            lines.append(f"    REFUSED: {finding.refusal}" if finding.refusal else "    allowed")
        lines += ["", *self._notes()]
        refused = len(self.refusals())
        verdict = (
            f"REFUSED: the policy does not cover {refused} of these lines." if refused else "The policy covers all."
        )
        return "\n".join(map(printable, [*lines, "", verdict]))

    def _notes(self) -> Iterator[str]:
        terms, private = self.terms, self.terms.experiment.guard is not None
        loss = "" if private else ", the mean training loss"
        yield f"Also leave: the site's name, the number of its examples and steps{loss}, numbers of the method's rules."
        yield "Never leave: the data, the memory of rules and optimizers, the reason for a refusal or an error, and"
        kept = terms.by_role(terms.personal)
        yield "    " + ("; ".join(self._role(role, names) for role, names in kept.items()) or "no personal parameters")
        yield f"Hours: {self.policy.hours}."
        if terms.follows_signal:
            yield "The server's signal can change what leaves in a round; each job is checked with its own signal."
        yield f"So far {self.history.bytes:,} bytes have left; {self.history.unprotected} updates left without noise."

    def _stage(self, stage: Stage) -> Iterator[Finding]:
        rounds = f"round {stage.first}" if stage.first == stage.last else f"rounds {stage.first} to {stage.last}"
        for role, names in self.terms.by_role(stage.plan.up).items():
            yield Finding(f"{rounds} send", self._role(role, names), review_names(self.policy, self.terms, names))
        size, most = stage.bytes, self.policy.limits.bytes_per_round
        value = "not known before training; checked before it leaves" if size is None else f"{size:,}"
        over = size is not None and most is not None and size > most
        why = f"limits.bytes_per_round is {most:,}; send less, or raise it" if over else ""
        yield Finding(f"{rounds}, bytes of an update", value, why)

    def _total(self) -> Finding:
        most, digest = self.policy.limits.bytes_total, self.terms.digest
        sizes = {number: stage.bytes for stage in self.terms.stages for number in range(stage.first, stage.last + 1)}
        drawn = {number: sizes[number] for number in self.terms.rounds}
        if any(size is None for size in drawn.values()):
            return Finding("bytes in all", "not known before training; checked before each update leaves")
        value = f"{sum(size or 0 for size in drawn.values()):,} in the {len(drawn)} rounds for which this site is drawn"
        rest = sum(size or 0 for number, size in drawn.items() if not self.history.answered(digest, number))
        why = ""
        if most is not None and rest + self.history.bytes > most:
            why = f"limits.bytes_total is {most:,}, and {self.history.bytes:,} have left; send less, or raise it"
        return Finding("bytes in all", value, why)

    def _role(self, role: str, names: Sequence[str]) -> str:
        shown = names if self.all_names else names[:SHOWN]
        more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        return f"{role} ({', '.join(shown)}{more})"
