"""The choice for `engine.compile = "auto"`: compile if the run is long enough to win back the time it takes.

The choice follows from the run alone and measures nothing. Compiled steps round differently, so a choice by the clock
would make the last digits of a run depend on how busy the machine was.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch

from partita.core.client_rule import overrides
from partita.core.data import Population
from partita.core.model import Model
from partita.core.plan import RoundInfo, plan_for
from partita.core.settings import Run
from partita.engines.autotune import batch_operations, first_with_examples

# Measured on an H200 (docs/performance.md). On a slower GPU, training takes longer than estimated, and compiling pays
# earlier.
SECONDS_PER_STEP = 2e-3  # of a block, however small
RATES = (5e13, 3e14)  # FLOPs per second, in float32 and in bfloat16
GAINS = (0.15, 0.35)  # share of the training time that compiled steps save, likewise
COMPILE_SECONDS = 30.0  # for each plan; 13 to 21 were measured, with 16 cores
MARGIN = 2.0  # the gain must be this many times the cost
SAMPLED = 32  # rounds and clients whose plans and sizes are looked at


@dataclass(frozen=True)
class CompileChoice:
    """Whether to compile, and why.

    Attributes:
        compile: Whether to compile.
        reason: Why, as the end of a sentence; "" if the user chose.
    """

    compile: bool
    reason: str = ""


def choose_compile(
    run: Run,
    model: Model,
    population: Population,
    device: torch.device,
    block: int,
    workers: int = 1,
    half: bool = False,
) -> CompileChoice:
    """Choose whether to compile the steps of a run.

    Args:
        run: The run.
        model: The model, on the device.
        population: The clients' data.
        device: The device.
        block: Clients that train together.
        workers: Number of worker processes that share the cohort. Each compiles for itself.
        half: Whether steps compute in bfloat16.
    """
    if device.type == "cpu":
        return CompileChoice(False, "on a CPU, compiled steps are not always faster")
    client = first_with_examples(population)
    if client is None:
        return CompileChoice(False, "no client trains here")
    if run.method.privacy is not None:
        return CompileChoice(False, "private steps are not compiled")
    rules = run.method.client_rules
    if any(overrides(rule, "narrow") for rule in rules):
        return CompileChoice(False, "each client chooses what it trains, and each choice is compiled on its own")
    if rules and len({run.training.rates.factor(round, run.rounds) for round in range(run.rounds)}) > 1:
        return CompileChoice(False, "rules of the method are compiled again for each learning rate")
    plans = _count_plans(run, model, population)
    batches = _batches_per_round(run, population)
    cohort = -(-run.cohort_size(len(population.clients)) // workers)
    operations = batch_operations(run, model, population[client].train)
    each = -(-cohort // block) * SECONDS_PER_STEP + cohort * operations / RATES[half]
    saved, cost = GAINS[half] * run.rounds * batches * each, COMPILE_SECONDS * plans
    if saved < MARGIN * cost:
        return CompileChoice(False, f"it would take about {cost:,.0f} s and save about {saved:,.0f} s of training")
    return CompileChoice(True, f"it takes about {cost:,.0f} s and saves about {saved:,.0f} s of training")


def _count_plans(run: Run, model: Model, population: Population) -> int:
    """Count the sets of parameters that train together, in some rounds of one client and for some clients."""
    clients = list(islice(population.clients, SAMPLED))
    every = max(1, run.rounds // SAMPLED)
    asked = [RoundInfo(round, run.rounds, clients[0]) for round in {*range(0, run.rounds, every), run.rounds - 1}]
    asked += [RoundInfo(0, run.rounds, client) for client in clients]
    plans = [plan_for(run.method.plan, model, each) for each in asked]
    return len({phase.names for plan in plans for phase in plan.phases})


def _batches_per_round(run: Run, population: Population) -> int:
    """Return the number of batches of an average client in a round."""
    training = run.training
    if training.steps is not None:
        return training.steps * training.accumulate
    sizes = [len(population[client].train) for client in islice(population.clients, SAMPLED)]
    return training.epochs * max(1, sum(sizes) // (len(sizes) * training.batch_size))
