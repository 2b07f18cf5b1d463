"""A page in plain words about a run's privacy guarantee, for an ethics board. All numbers are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partita.core.dp_settings import PrivacyError
from partita.privacy.ledger import Ledger
from partita.storage.safe_text import printable

PRIORS = (0.01, 0.1, 0.5)  # how sure an attacker is beforehand
WEAK = 0.95  # if an attacker at 50% can become surer than this, the statement says that the bound is weak


@dataclass(frozen=True)
class Subject:
    """What the statement is about.

    Attributes:
        name: Name of the experiment.
        about: The guarantee, as in `privacy.json`.
        epsilon: Epsilon of the run.
        rounds: Number of rounds that it covers.
        finished: Whether the rounds are done. Otherwise they are planned.
        secret_file: Whether the secret of the noise comes from a file of the user.
        bound: The canary bound of an audit, as in `audit.json`; None if there was none.
        ledger: The site's ledger; None if there is none.
    """

    name: str
    about: Mapping[str, Any]
    epsilon: float | None
    rounds: int
    finished: bool = False
    secret_file: bool = False
    bound: Mapping[str, Any] | None = None
    ledger: Ledger | None = field(default=None, repr=False)


def posterior(prior: float, epsilon: float) -> float:
    """Return the largest probability that an attacker can reach from `prior` under pure epsilon."""
    odds = prior / (1 - prior) * math.exp(min(epsilon, 700.0))
    return odds / (1 + odds)


def statement(subject: Subject) -> str:
    """Return the statement as Markdown.

    Raises:
        PrivacyError: If the run has no finite epsilon, or if its noise can be recomputed.
    """
    about = subject.about
    if about["repeatable"]:
        raise PrivacyError(
            "privacy.repeatable draws noise that anyone can recompute, so there is no guarantee to state; leave it out"
        )
    if subject.epsilon is None or not math.isfinite(subject.epsilon):
        raise PrivacyError(
            "the run has no finite epsilon here, so there is no guarantee to state; add noise, or state it where the "
            "number of training examples or groups of every client is known"
        )
    return "\n".join(_lines(subject, subject.epsilon)) + "\n"


def _lines(subject: Subject, epsilon: float) -> Iterator[str]:
    about, unit = subject.about, _unit(subject.about)
    did = "covers the" if subject.finished else "is a plan for"
    yield f"# Privacy statement: {printable(subject.name)}"
    yield ""
    yield (
        f"This page {did} {subject.rounds} rounds of training. The guarantee is differential privacy with epsilon = "
        f"{epsilon:.3g} and delta = {about['delta']:.1g}, for each {unit.short}."
    )
    yield from ("", "## Who is protected", "", unit.protects)
    yield from ("", "## Against whom", "", _adversary(about))
    yield from ("", "## What the numbers mean", "")
    yield (
        f"An attacker tries to find out whether one {unit.short} took part. The attacker may know everything else, and "
        f"may have any computer. Apart from a chance of {about['delta']:.1g}, the attacker gets no surer than this:"
    )
    yield from ("", "| sure before | sure afterwards, at most |", "|---|---|")
    yield from (f"| {prior:.0%} | {_percent(posterior(prior, epsilon))} |" for prior in PRIORS)
    yield ""
    if posterior(0.5, epsilon) > WEAK:
        yield (
            "This bound is weak: it does not rule out that a strong attacker finds out. What protects beyond it, such "
            "as the limits of real attackers, is not part of the guarantee."
        )
        yield ""
    yield (
        f"The same holds for every other question about one {unit.short}. The guarantee does not say that nothing is "
        f"learned about people in general: that a {unit.short} took part hardly changes what the model has learned."
    )
    yield from ("", "## How it works", "", _mechanism(about, unit))
    yield from ("", "## What is assumed", "")
    yield from (f"- {text}" for text in _assumptions(subject, unit))
    yield from ("", "## What is not covered", "")
    yield from (f"- {printable(text)}" for text in about["not_covered"])
    yield from ("", "## Evidence", "", _evidence(subject, epsilon, unit))
    yield from ("", "## Other studies with the same data", "", _ledger_text(subject))


@dataclass(frozen=True)
class _UnitWords:
    short: str
    protects: str


def _unit(about: Mapping[str, Any]) -> _UnitWords:
    if about["unit"] == "client":
        return _UnitWords(
            "client",
            "Each client, with all its training data. A client is one of the organizations or devices that train "
            "together.",
        )
    if about["unit"] == "group":
        column = printable(str(about["group"]))
        return _UnitWords(
            "group",
            f"Each group of training records with the same value of the column `{column}`, for example all records of "
            "one patient, at one client. It does not matter how many records a group has. A group with records at "
            "several clients is protected at each of them, and the cost adds up over these clients.",
        )
    return _UnitWords(
        "record",
        "Each single training record. A person with several records is protected less: with k records, epsilon is up "
        "to k times as large. To protect persons, set privacy.unit = 'group'.",
    )


def _adversary(about: Mapping[str, Any]) -> str:
    if about["unit"] == "client":
        return (
            "Everyone who sees the models that the server publishes. The server itself sees the clients' clipped "
            "updates without noise and is trusted."
        )
    return (
        "Everyone outside the client that holds the data: the server, the other clients, everyone who reads the "
        "network, and everyone who gets a model. Nobody but the client itself is trusted with its data."
    )


def _mechanism(about: Mapping[str, Any], unit: _UnitWords) -> str:
    noise = f"Gaussian noise with a standard deviation of {about['noise']:.4g} times that limit"
    if about["unit"] == "client":
        return (
            f"The change that each client makes to the model is cut to a length of at most {about['clip']:g}. The "
            f"server adds {noise} to the sum over clients, and publishes nothing else."
        )
    drawn = (
        f"In each step of training, each {unit.short} is drawn independently by chance."
        if about["sampling"] == "poisson"
        else f"In each pass over the data, each {unit.short} is used once."
    )
    return (
        f"{drawn} What a {unit.short} contributes to the step is cut to a length of at most {about['clip']:g}, and the "
        f"client adds {noise} to the sum of contributions before anything leaves it. Epsilon is computed for all steps "
        f"together by Google's dp-accounting ({about['accountant']})."
    )


def _assumptions(subject: Subject, unit: _UnitWords) -> Sequence[str]:
    about = subject.about
    keeper = "the server" if about["unit"] == "client" else "each client"
    source = (
        "a secret of 256 bits from the operating system and a file that the operator provides"
        if subject.secret_file
        else "a secret of 256 bits that the operating system draws"
    )
    numbers = "groups" if about["unit"] == "group" else "training records"
    return [
        f"The noise comes from a stream cipher (ChaCha20) with {source}. Nobody else knows the secret of {keeper}.",
        "The software does what it says. It is open, and it is tested by attacks; it was not proved correct.",
        *(
            [f"The number of {numbers} of each client is public."]
            if about["unit"] != "client"
            else ["Nobody but the server knows which clients took part in which round."]
        ),
        *(
            ["The column names each person by one value, and different persons by different values."]
            if about["unit"] == "group"
            else []
        ),
        "The records are used in no other way: what other programs, reports or people disclose is not counted.",
    ]


def _evidence(subject: Subject, epsilon: float, unit: _UnitWords) -> str:
    if subject.bound is None:
        return "No attack on this run was recorded. 'partita audit' makes some."
    bound = subject.bound
    fits = "does not contradict" if bound["epsilon"] <= epsilon else "contradicts"
    return (
        f"Training was repeated with {bound['canaries']} marked {unit.short}s, and an attacker guessed which of them "
        f"took part. {bound['right']} of {bound['guesses']} guesses were right. So epsilon is at least "
        f"{bound['epsilon']:.3g}, with a confidence of {bound['confidence']:.0%}, which {fits} the guarantee. A low "
        "number does not prove privacy: a better attack may exist."
    )


def _ledger_text(subject: Subject) -> str:
    if subject.ledger is None:
        return (
            "None are counted here. If the same records are used in other studies, the epsilons of all of them add up; "
            "a privacy ledger keeps the sum."
        )
    ledger, limit = subject.ledger, subject.ledger.limit
    return (
        f"The privacy ledger of the site adds up all studies that were charged to it: epsilon {ledger.spent():.3g} of "
        f"{limit.epsilon:g} is spent at delta = {limit.delta:.1g}. A run that would exceed the limit is refused."
    )


def _percent(share: float) -> str:
    """Format a probability without rounding it up to certainty."""
    return f"{share:.1%}" if share < 0.9995 else f"{math.floor(share * 1e6) / 1e4:.4f}%" if share < 1 else "100%"
