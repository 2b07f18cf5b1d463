"""Checks of layer choices by noisy scores: the scores that clients report must have the noise that was charged.

Clients report only the direction of the noisy sum. The audit therefore uses examples with known scores: each is far
above the clip and points at the first layer. The angle of the reported direction then reveals the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from evidence import Array, Check, chance_of_cosine
from mechanism import LARGE_FACTOR, altered
from scipy.stats import ks_2samp

from partita.core.client import ClientState, begin_round
from partita.core.client_rule import ClientRule, PrivacyRelease
from partita.core.data import Batch, Examples, Population
from partita.core.model import Model, TokenChoice, layer_tags
from partita.core.rounds import make_job
from partita.core.server_rule import Server
from partita.core.settings import Run

CHOICES = 400  # number of noisy choices
REFERENCE = 20_000  # number of simulated honest choices for comparison


@dataclass(frozen=True)
class Repeated:
    """`count` copies of the first example."""

    examples: Examples
    count: int

    def __len__(self) -> int:
        return self.count

    def take(self, indices: torch.Tensor) -> Batch:
        return self.examples.take(torch.zeros_like(indices))


def releasing(run: Run) -> list[tuple[ClientRule, PrivacyRelease]]:
    """Return the client rules that use data and declare a release."""
    return [(rule, rule.release) for rule in run.method.client_rules if rule.uses_data and rule.release is not None]


def check_choice(run: Run, model: Model, population: Population, server: Server) -> list[Check]:
    """Check the noise of the scores by which clients choose layers.

    Returns:
        The checks. Empty if nothing or only a single score is released.
    """
    checks: list[Check] = []
    for rule, release in releasing(run):
        single_rule_run = replace(run, method=replace(run.method, client_rules=(rule,)))
        rounds = range(0, run.rounds, rule.release_every)
        scores = _collect_scores(single_rule_run, model, population, server, release, rounds)
        if scores.shape[1] > 1:
            checks += [_check_bias(scores, release), *_check_repeats(scores, len(rounds))]
    return checks


def _copies(release: PrivacyRelease, layers: int) -> int:
    """Return a number of examples whose sum is about as long as the noise, where the direction is most informative."""
    return max(2, round(release.noise * math.sqrt(layers) / release.share))


def _collect_scores(
    run: Run, model: Model, population: Population, server: Server, release: PrivacyRelease, rounds: Sequence[int]
) -> Array:
    """Collect reported unit vectors, (choice, layer). Choices come from artificial clients, each with its own draws."""
    layers, boosted_layer = layer_tags(model), ""

    def attention(params: object, batch: Batch, tokens: TokenChoice) -> dict[str, torch.Tensor]:
        zero = torch.zeros(len(batch.targets), 1)
        return {layer: zero + LARGE_FACTOR * (layer == boosted_layer) for layer in layers}

    known_model, client = altered(model, attention=attention), population.clients[0]
    examples = Repeated(population[client].train, _copies(release, len(layers)))

    def reported(number: int) -> dict[str, float]:
        job, _ = make_job(run, known_model, server, rounds[number % len(rounds)], client)
        job = replace(job, client=f"{client} {number // len(rounds)}")
        return dict(begin_round(run, known_model, job, ClientState(), examples).metrics)

    names = sorted(reported(0))
    if not names:
        return np.zeros((0, 0))
    boosted_layer = names[0].partition("/")[2]
    answers = [reported(number) for number in range(CHOICES)]
    return np.array([[answer[name] for name in names] for answer in answers], float)


def _check_bias(scores: Array, release: PrivacyRelease) -> Check:
    """Compare the cosine with the layer that all examples point at to its distribution under honest draws."""
    draw = np.random.default_rng(0)
    sums = release.noise * draw.standard_normal((REFERENCE, scores.shape[1]))
    sums[:, 0] += draw.binomial(_copies(release, scores.shape[1]), release.share, REFERENCE)
    honest = sums[:, 0] / np.linalg.norm(sums, axis=1)
    what = "layer choice: cosine of noisy scores with the true ones"
    chance = float(ks_2samp(scores[:, 0], honest).pvalue)
    return Check(what, float(honest.mean()), float(scores[:, 0].mean()), chance, len(scores))


def _check_repeats(scores: Array, rounds: int) -> list[Check]:
    """Check that the noise of two choices is uncorrelated in the layers that have no signal."""
    checks = []
    for what, rows in (("rounds", scores if rounds > 1 else scores[:0]), ("clients", scores[::rounds])):
        noise = rows[:, 1:] / np.maximum(np.linalg.norm(rows[:, 1:], axis=1, keepdims=True), 1e-300)
        pairs = len(noise) // 2
        if pairs > 1:
            one, two = noise[: 2 * pairs : 2].ravel(), noise[1::2].ravel()
            cosine = np.array(one @ two / np.sqrt((one @ one) * (two @ two)))
            chance = float(chance_of_cosine(cosine, np.array(len(one))))
            name = f"layer choice: correlation of noise between {what}"
            checks.append(Check(name, 0.0, float(cosine), chance, len(one)))
    return checks
