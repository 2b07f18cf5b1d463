"""Checks of a choice by noisy scores: what clients tell of their layers has the noise that its release was charged for.

Only the direction of the noisy sum is told, so the audit asks on examples whose scores it knows: every one is far
beyond the clip and points at the first layer. How far the answers then lean to the other layers tells the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import ks_2samp
from torch import Tensor

from partita.core.client import ClientState, begin_round
from partita.core.data import Batch, Examples, Population
from partita.core.method import ClientRule, PrivacyRelease, Server
from partita.core.model import Model, layer_tags
from partita.core.rounds import make_job
from partita.core.settings import Run
from partita.privacy.evidence import Array, Check, chance_of_cosine
from partita.privacy.mechanism import LOUD, altered

ASKED = 400  # noisy choices
REFERENCE = 20_000  # honest ones that they are compared with


@dataclass(frozen=True)
class Repeated:
    """So many copies of one example."""

    examples: Examples
    count: int

    def __len__(self) -> int:
        return self.count

    def take(self, indices: Tensor) -> Batch:
        return self.examples.take(torch.zeros_like(indices))


def releasing(run: Run) -> list[tuple[ClientRule, PrivacyRelease]]:
    return [(rule, rule.release) for rule in run.method.client_rules if rule.uses_data and rule.release is not None]


def check_choice(run: Run, model: Model, population: Population, server: Server) -> list[Check]:
    """The noise of scores by which clients choose; empty where nothing is released, or nothing but a single score."""
    found: list[Check] = []
    for rule, release in releasing(run):
        alone = replace(run, method=replace(run.method, client_rules=(rule,)))
        told = _ask_often(alone, model, population, server, release)
        if told.shape[1] > 1:
            found += [_check_lean(told, release), *_check_repeats(told, run.rounds)]
    return found


def _copies(release: PrivacyRelease, layers: int) -> int:
    """Examples whose sum is about as long as the noise: there the direction tells most."""
    return max(2, round(release.noise * math.sqrt(layers) / release.share))


def _ask_often(run: Run, model: Model, population: Population, server: Server, release: PrivacyRelease) -> Array:
    """(choice, layer) Unit vectors. A choice is asked of made-up clients, so that each draws anew."""
    layers, loudest = layer_tags(model), ""

    def attention(params: object, batch: Batch, tokens: str) -> dict[str, Tensor]:
        zero = torch.zeros(len(batch.targets), 1, dtype=torch.float64)
        return {layer: zero + LOUD * (layer == loudest) for layer in layers}

    known, client = altered(model, attention=attention), population.clients[0]
    examples = Repeated(population[client].train, _copies(release, len(layers)))

    def tell(number: int) -> dict[str, float]:
        job, _ = make_job(run, known, server, number % run.rounds, client)
        job = replace(job, client=f"{client} {number // run.rounds}")
        return dict(begin_round(run, known, job, ClientState(), examples).metrics)

    names = sorted(tell(0))
    if not names:
        return np.zeros((0, 0))
    loudest = names[0].partition("/")[2]
    answers = [tell(number) for number in range(ASKED)]
    return np.array([[answer[name] for name in names] for answer in answers], float)


def _check_lean(told: Array, release: PrivacyRelease) -> Check:
    """The cosine with the layer that all examples point at, against that of honest draws."""
    draw = np.random.default_rng(0)
    sums = release.noise * draw.standard_normal((REFERENCE, told.shape[1]))
    sums[:, 0] += draw.binomial(_copies(release, told.shape[1]), release.share, REFERENCE)
    honest = sums[:, 0] / np.linalg.norm(sums, axis=1)
    what = "layer choice: cosine of noisy scores with the true ones"
    chance = float(ks_2samp(told[:, 0], honest).pvalue)
    return Check(what, float(honest.mean()), float(told[:, 0].mean()), chance, len(told))


def _check_repeats(told: Array, rounds: int) -> list[Check]:
    """Whether the noise of two choices points the same way, in the layers where there is nothing else."""
    found = []
    for what, rows in (("rounds", told if rounds > 1 else told[:0]), ("clients", told[::rounds])):
        noise = rows[:, 1:] / np.maximum(np.linalg.norm(rows[:, 1:], axis=1, keepdims=True), 1e-300)
        pairs = len(noise) // 2
        if pairs > 1:
            one, two = noise[: 2 * pairs : 2].ravel(), noise[1 : 2 * pairs : 2].ravel()
            cosine = np.array(one @ two / np.sqrt((one @ one) * (two @ two)))
            chance = float(chance_of_cosine(cosine, np.array(len(one))))
            name = f"layer choice: correlation of noise between {what}"
            found.append(Check(name, 0.0, float(cosine), chance, len(one)))
    return found
