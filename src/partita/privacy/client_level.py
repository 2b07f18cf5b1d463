"""Client-level privacy: whole updates are clipped, all count alike, and a trusted server adds noise to their sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from partita.core import tensors
from partita.core.dp_settings import PrivacyError
from partita.core.method import Aggregate, Method, MethodError, Server, ServerRule, Update, UpdateTransform
from partita.core.model import Model
from partita.core.noise import add_noise, gaussian_noise
from partita.core.rng import Key
from partita.core.tensors import Mean, Names, Slots, Tensors


@dataclass(frozen=True)
class ClippedUpdates(UpdateTransform):
    """An update's delta and slots together are at most `clip` long; noise is in multiples of that, on the sum."""

    hides = True
    clip: float
    noise: float
    cohort: int
    secret: Key | None = None  # what the server draws by if clients know the run's key

    def __post_init__(self) -> None:
        if not self.clip > 0 or (self.noise and self.clip == float("inf")):
            raise PrivacyError(f"privacy.clip is {self.clip}; it must be a number above 0")
        if not 0 <= self.noise < float("inf"):
            raise PrivacyError(f"privacy.noise is {self.noise}; it must be a number from 0 up")

    def encode(self, update: Update, key: Key) -> Update:
        return self._clipped(update)

    def decode_update(self, update: Update) -> Update:
        """Once more where it counts: what a client or a transform did in between is not to be relied on."""
        return self._clipped(update)

    def decode_aggregate(self, aggregate: Aggregate, key: Key) -> Aggregate:
        if not self.noise:
            return aggregate
        key = key if self.secret is None else Key(self.secret.root, (*self.secret.path, *key.path))
        std = self.noise * self.clip / self.cohort

        def noisy(part: Tensors, slot: str) -> Tensors:
            noise = gaussian_noise(part, key / slot, std)
            return {name: add_noise(value, noise[name], std) for name, value in part.items()}

        slots = {slot: noisy(part, slot) for slot, part in aggregate.slots.items()}
        return replace(aggregate, delta=noisy(aggregate.delta, "delta"), slots=slots)

    def _clipped(self, update: Update) -> Update:
        """The loss, the weight and the numbers told by rules tell of a client too."""
        parts = [update.delta, *(update.slots[slot] for slot in sorted(update.slots))]
        # Sorted, since names come off the wire in another order, and a sum must not depend on it.
        norm = torch.linalg.vector_norm(torch.stack([tensors.norm(tensors.select(part, part)) for part in parts]))
        factor = (self.clip / norm).clamp(max=1.0)
        slots = {slot: tensors.scale(part, factor) for slot, part in update.slots.items()}
        return replace(
            update, delta=tensors.scale(update.delta, factor), slots=slots, weight=1.0, loss=None, metrics={}
        )


@dataclass(frozen=True)
class OverCohort(ServerRule):
    """A rule whose mean is taken over a cohort of fixed size, whoever answers, and in which all count alike."""

    inner: ServerRule
    cohort: int

    def init(self, model: Model) -> Slots:
        return self.inner.init(model)

    def signal(self, server: Server) -> Mapping[str, float]:
        return self.inner.signal(server)

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        return self.inner.send(server, client, names)

    def affected_names(self, model: Model, trained: Names) -> Names:
        return self.inner.affected_names(model, trained)

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        delta, slots, names, count = Mean(), dict[str, Mean](), dict[str, Names](), 0
        for update in updates:
            count += 1
            sent = {"delta": frozenset(update.delta), **{slot: frozenset(part) for slot, part in update.slots.items()}}
            if (names := names or sent) != sent:
                raise MethodError(
                    f"{update.client} sends other names than the client before it, so that the names alone tell who "
                    "took part; under client-level privacy all clients of a round need the same plan"
                )
            delta.add(update.delta, 1.0)
            for slot, part in update.slots.items():
                slots.setdefault(slot, Mean()).add(part, 1.0)
        return Aggregate(delta.over(self.cohort), {slot: mean.over(self.cohort) for slot, mean in slots.items()}, count)

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        return self.inner.apply(server, aggregate)


def protect_clients(method: Method, clip: float, noise: float, cohort: int, secret: Key | None = None) -> Method:
    """The method under client-level privacy, or the reason why it cannot be."""
    rule = method.server_rule
    if method.pool:
        raise MethodError(f"{method.name} has one client, which client-level privacy cannot hide; use unit = 'example'")
    if type(rule).reduce is not ServerRule.reduce:
        raise MethodError(
            f"{method.name}: {type(rule).__name__} takes a mean of its own over clients, whose weights or number may "
            "tell of one of them; client-level privacy is for servers that start from the plain mean, such as fedavg's"
        )
    if looking := [type(each).__name__ for each in method.client_rules if each.uses_data]:
        raise MethodError(
            f"{method.name}: with {looking[0]} each client chooses what it sends by its data, so that names alone "
            "tell of it; under client-level privacy leave it out"
        )
    if turning := [
        type(each).__name__
        for each in method.transforms
        if type(each).decode_aggregate is not UpdateTransform.decode_aggregate
    ]:
        raise MethodError(
            f"{method.name}: {turning[0]} changes the sum of updates, so that noise in proportion to the clip may be "
            "too little; under client-level privacy leave it out"
        )
    # First: it is then the last to open an update and to touch their sum.
    channel = (ClippedUpdates(clip, noise, cohort, secret), *method.transforms)
    return replace(method, transforms=channel, server_rule=OverCohort(rule, cohort))
