"""FedNova: divide each update by its number of steps before averaging, so that fast clients do not dominate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from partita.core.method import Method
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Mean
from partita.core.update import Aggregate, Update
from partita.methods.scaffold import PLAIN_SGD


@dataclass(frozen=True)
class FedNovaServer(ServerRule):
    """Aggregate (sum p_i steps_i) · sum p_i (delta_i / steps_i), separately for each parameter.

    In the paper, a client's update is a sum of its gradients with coefficients a_i, and is divided by their sum. All
    coefficients are 1, and the sum is the number of steps, for plain SGD without clipping or a proximal term.
    """

    optimizers = PLAIN_SGD
    allows_clip = False
    counts_steps = True

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        direction, length, cohort = Mean(), Mean(), 0
        for update in updates:
            cohort += 1
            steps = {name: torch.tensor(float(update.steps[name]), dtype=torch.float64) for name in update.delta}
            direction.add({name: value / steps[name] for name, value in update.delta.items()}, update.weight)
            length.add(steps, update.weight)
        return Aggregate({name: value * length.value[name] for name, value in direction.value.items()}, {}, cohort)


def fednova() -> Method:
    """Build FedNova."""
    return Method("fednova", server_rule=FedNovaServer())
