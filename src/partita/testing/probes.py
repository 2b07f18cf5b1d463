"""Probes: wrap a method's transforms and an engine, and record which promises are broken during a run."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import torch

from partita.core import serialization, tensors
from partita.core.client import ClientState, Job, client_params
from partita.core.model import Model
from partita.core.rng import Key
from partita.core.rounds import Listener, Reply, RoundResult
from partita.core.server_rule import Server
from partita.core.settings import Run
from partita.core.tensors import Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.core.update_transform import UpdateTransform
from partita.storage.initial_values import flatten

# Names of the promises that a run shows.
PURE_TRANSFORMS = "pure transforms"
OWN_SLOTS = "declared slots"
CLIENT_INPUTS = "client inputs unchanged"
SERVER_INPUTS = "server state unchanged"
KEPT_STAYS = "kept parameters stay"
ONLY_PLANNED = "only planned names travel"
FROZEN_STAYS = "frozen parameters stay"
NOT_COPIED = "nothing is sent twice"
NO_GLOBAL_RANDOM = "no global random state"


# Why a promise says nothing about a run in which it was never tested.
NOTHING_TO_TEST = {
    PURE_TRANSFORMS: "it has no transform",
    OWN_SLOTS: "it has no transform",
    KEPT_STAYS: "its plan keeps nothing with the clients",
    FROZEN_STAYS: "every parameter trains in every round",
    NOT_COPIED: "every parameter trains in every round",
}


class Violations(dict[str, str]):
    """The first violation of each promise, as a text. `tested` holds the promises that were tested."""

    def __init__(self) -> None:
        super().__init__()
        self.tested: set[str] = set()

    def require(self, promise: str, kept: bool, broken: str) -> None:
        """Record the text `broken` for the promise unless `kept`."""
        self.tested.add(promise)
        if not kept:
            self.setdefault(promise, broken)


class TransformProbe(UpdateTransform):
    """Wraps a transform and checks that `encode` is pure. Purity is hard to see in the result of a run with memory."""

    def __init__(self, inner: UpdateTransform, found: Violations) -> None:
        self.inner, self.slots, self.hides, self.found = inner, inner.slots, inner.hides, found

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        name = type(self.inner).__name__
        given: tuple[Slots, Slots] = {"delta": dict(update.delta), **update.slots}, memory
        held = [{slot: tensors.clone_all(part) for slot, part in slots.items()} for slots in given]
        sent, remembered = self.inner.encode(update, memory, key)
        for slots, before in zip(given, held, strict=True):
            self.found.require(
                PURE_TRANSFORMS,
                equal_slots(slots, before),
                f"{name}.encode modifies the update or the memory that it is given",
            )
        again, twice = self.inner.encode(update, memory, key)
        same = tensors.equal(sent.delta, again.delta) and equal_slots(sent.slots, again.slots)
        self.found.require(
            PURE_TRANSFORMS,
            same and equal_slots(remembered, twice),
            f"{name}.encode gives two results for the same update and memory",
        )
        stray = remembered.keys() - self.slots
        self.found.require(
            OWN_SLOTS, not stray, f"{name}.encode remembers '{first_of(stray)}', which is not in its slots"
        )
        return sent, remembered

    def decode_update(self, update: Update) -> Update:
        return self.inner.decode_update(update)

    def decode_aggregate(self, aggregate: Aggregate, key: Key) -> Aggregate:
        return self.inner.decode_aggregate(aggregate, key)


class RoundProbe(Listener):
    """Checks every job, every update and the server after every round."""

    def __init__(self, run: Run, model: Model, found: Violations) -> None:
        self.run, self.model, self.found = run, model, found
        self.server: Server | None = None
        self.trained: set[str] = set()
        self.jobs: dict[str, tuple[Job, Slots]] = {}  # with copies of what was sent
        self.before = {f"params/{name}": value for name, value in model.initial.items()}
        self.held = tensors.clone_all(self.before)  # copies of the server's tensors before the round

    def asks(self, job: Job) -> None:
        sent: Slots = {"params": job.params, **job.slots}
        self.jobs[job.client] = job, {slot: tensors.clone_all(part) for slot, part in sent.items()}

    def receives(self, reply: Reply) -> None:
        if isinstance(reply, Update):
            job, held = self.jobs.pop(reply.client)
            sent: Slots = {"params": job.params, **job.slots}
            self.found.require(CLIENT_INPUTS, equal_slots(held, sent), "it modifies the tensors it was sent")
            self._inspect(job, reply)

    def _inspect(self, job: Job, update: Update) -> None:
        plan, _ = client_params(self.run, self.model, job, ClientState())
        sent = serialization.unpack(serialization.pack({"delta": update.delta, **update.slots}))
        names = {name for part in sent.values() for name in part}
        if plan.keep:
            self.found.require(
                KEPT_STAYS,
                not names & plan.keep,
                f"'{first_of(names & plan.keep)}' is kept by the client, but is in its update",
            )
        self.found.require(
            ONLY_PLANNED,
            names <= plan.up,
            f"'{first_of(names - plan.up)}' is in an update, but the plan does not send it up",
        )
        self.trained |= plan.train

    def ends(self, result: RoundResult) -> None:
        # The round changed no tensor in place, and did not change or copy parameters that none trained.
        self.found.require(
            SERVER_INPUTS,
            tensors.equal(self.held, self.before),
            f"it modifies the server's tensors in place in round {result.number}, so no client is sent the change",
        )
        self.before = flatten(result.server)
        self.held = tensors.clone_all(self.before)
        before = self.model.initial if self.server is None else self.server.params
        untouched = result.server.params.keys() - self.run.method.server_rule.affected_names(
            self.model, frozenset(self.trained)
        )
        if untouched:
            self._inspect_untouched(untouched, before, result)
        self.server, self.trained = result.server, set()

    def _inspect_untouched(self, names: set[str], before: Tensors, result: RoundResult) -> None:
        after = result.server.params
        moved = {name for name in names if not torch.equal(before[name], after[name])}
        self.found.require(
            FROZEN_STAYS, not moved, f"'{first_of(moved)}' changed in round {result.number}, but no client trained it"
        )
        copied = {name for name in names - moved if before[name] is not after[name]}
        self.found.require(
            NOT_COPIED,
            not copied,
            f"'{first_of(copied)}' did not change in round {result.number}, but was copied, so it is sent to all "
            "clients",
        )


class RandomStates:
    """The global random states of torch, numpy and Python."""

    def __init__(self) -> None:
        kind, keys, *rest = np.random.get_state(legacy=True)
        self.states = {
            "torch's": torch.get_rng_state().tolist(),
            "numpy's": (kind, keys.tolist(), *rest),  # type: ignore[union-attr]
            "Python's": random.getstate(),
        }

    def used(self) -> list[str]:
        """Return whose state has changed since."""
        now = RandomStates().states
        return [owner for owner, state in self.states.items() if now[owner] != state]


def first_of(names: Iterable[str]) -> str:
    """Return the first name in alphabetical order; empty if there is none."""
    return next(iter(sorted(names)), "")


def equal_slots(one: Slots, two: Slots) -> bool:
    """Whether two sets of slots have the same names and values."""
    return one.keys() == two.keys() and all(tensors.equal(one[slot], two[slot]) for slot in one)
