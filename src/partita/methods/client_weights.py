"""Means over all clients of which a round changes a few terms, with clients weighted alike or by their examples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch

from partita.core.server_rule import Server
from partita.core.tensors import Slots, Tensors, scale
from partita.core.update import Update

Weigh = Literal["clients", "examples"]

SIZES = "examples"  # the slot of the server with the number of examples of each client that has answered
TOTAL = "total"  # the slot with the number of examples of all clients, under the name SIZES


class PopulationWeights:
    """The weights of a round's updates in a mean over all clients, whether or not they take part in the round.

    A rule keeps such a mean as m = sum_i v_i x_i / V and changes it by v_i (x_i' - x_i) / V for the clients that
    answered. With "clients", v_i = 1 and V is the number of clients. With "examples", v_i = n_i, and V = sum_i n_i has
    terms that the server has not seen: clients tell their number of examples with their first update. Until all have
    answered, V is their mean number of examples times the number of clients, and the mean kept so far is rescaled
    whenever V changes (`rescaled`). Once all clients have answered, V and the mean are exact. With equal sizes all
    quotients are those of "clients".

    Args:
        weigh: How clients count.
        server: The server before the round.
    """

    def __init__(self, weigh: Weigh, server: Server) -> None:
        self.weigh = weigh
        self.known = dict(server.state.get(SIZES, {}))

    def add(self, update: Update) -> float:
        """Return the weight of an update."""
        if self.weigh == "clients":
            return 1.0
        self.known[update.client] = torch.tensor(update.weight, dtype=torch.float64)
        return update.weight

    def total(self, population: int) -> float:
        """Return the weight of all clients, given their number."""
        if self.weigh == "clients" or not self.known:
            return float(population)
        # A client that has answered and is not connected now still has its term in the mean.
        clients, examples = max(population, len(self.known)), math.fsum(size.item() for size in self.known.values())
        return examples * clients / len(self.known)

    def slots(self, population: int) -> dict[str, Tensors]:
        """Return what the server must remember, as slots of the aggregate."""
        if self.weigh == "clients":
            return {}
        return {SIZES: self.known, TOTAL: {SIZES: torch.tensor(self.total(population), dtype=torch.float64)}}


def rescaled(mean: Tensors, state: Slots, slots: Slots) -> Tensors:
    """Return a mean over all clients as it is with the total weight after the round.

    Args:
        mean: The mean before the round.
        state: The server's state before the round.
        slots: The slots of the round's aggregate.
    """
    if TOTAL not in state or TOTAL not in slots:
        return mean
    ratio = (state[TOTAL][SIZES] / slots[TOTAL][SIZES]).item()
    return mean if ratio == 1 else scale(mean, ratio)


def remembered(slots: Slots) -> Mapping[str, Tensors]:
    """Return the slots of an aggregate that the server keeps as its state."""
    return {slot: slots[slot] for slot in (SIZES, TOTAL) if slot in slots}
