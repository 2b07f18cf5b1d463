"""Client-level privacy: updates are clipped and weighted equally, and a trusted server adds noise to their sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from partita.core import tensors
from partita.core.client_rule import overrides
from partita.core.dp_settings import PrivacyError
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.noise import add_noise, gaussian_noise
from partita.core.rng import Key
from partita.core.server_rule import Server, ServerRule, average
from partita.core.tensors import Names, Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.core.update_transform import UpdateTransform


@dataclass(frozen=True)
class ClippedUpdates(UpdateTransform):
    """Clip each update, delta and slots together, and add noise to the sum.

    Raises:
        PrivacyError: If the clip is not above 0, the noise is negative or infinite, or there is noise without a clip.
    """

    hides = True
    clip: float  # maximum L2 norm of an update
    noise: float  # standard deviation of the noise on the sum, in multiples of the clip
    cohort: int  # number of clients per round

    def __post_init__(self) -> None:
        if not self.clip > 0 or (self.noise and self.clip == float("inf")):
            raise PrivacyError(f"privacy.clip is {self.clip}; it must be a number above 0")
        if not 0 <= self.noise < float("inf"):
            raise PrivacyError(f"privacy.noise is {self.noise}; it must be a number from 0 up")

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        return self._clipped(update), {}

    def decode_update(self, update: Update) -> Update:
        """Clip again at the server: clients and the transforms in between are not trusted."""
        return self._clipped(update)

    def decode_aggregate(self, aggregate: Aggregate, key: Key) -> Aggregate:
        if not self.noise:
            return aggregate
        std = self.noise * self.clip / self.cohort

        def noisy(part: Tensors, slot: str) -> Tensors:
            noise = gaussian_noise(part, key / slot, std)
            return {name: add_noise(value, noise[name], std) for name, value in part.items()}

        slots = {slot: noisy(part, slot) for slot, part in aggregate.slots.items()}
        return replace(aggregate, delta=noisy(aggregate.delta, "delta"), slots=slots)

    def _clipped(self, update: Update) -> Update:
        """Clip the update. Also drop its loss, weight and metrics, because they reveal information about the client."""
        parts = [update.delta, *(update.slots[slot] for slot in sorted(update.slots))]
        # Sorted, so that the sum does not depend on the order of names in a message.
        norm = torch.linalg.vector_norm(torch.stack([tensors.norm(tensors.select(part, part)) for part in parts]))
        factor = (self.clip / norm).clamp(max=1.0)
        slots = {slot: tensors.scale(part, factor) for slot, part in update.slots.items()}
        return replace(
            update, delta=tensors.scale(update.delta, factor), slots=slots, weight=1.0, loss=None, metrics={}
        )


@dataclass(frozen=True)
class OverCohort(ServerRule):
    """Average without weights over a cohort of fixed size, however many clients answer. `inner` does the rest."""

    inner: ServerRule
    cohort: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "divisor", float(self.cohort))

    def init(self, model: Model) -> Slots:
        return self.inner.init(model)

    def signal(self, server: Server) -> Mapping[str, float]:
        return self.inner.signal(server)

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        return self.inner.send(server, client, names)

    def affected_names(self, model: Model, trained: Names) -> Names:
        return self.inner.affected_names(model, trained)

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        return average(_with_equal_names(updates), over=float(self.cohort), weigh=lambda update: 1.0)

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        return self.inner.apply(server, aggregate)


def _with_equal_names(updates: Iterable[Update]) -> Iterator[Update]:
    """Yield the updates unchanged, and raise MethodError if one has other names than the first."""
    names = dict[str, Names]()
    for update in updates:
        sent = {"delta": frozenset(update.delta), **{slot: frozenset(part) for slot, part in update.slots.items()}}
        if (names := names or sent) != sent:
            raise MethodError(
                f"{update.client} sends other names than the client before it, so the names alone reveal who "
                "took part; under client-level privacy all clients of a round need the same plan"
            )
        yield update


def protect_clients(method: Method, clip: float, noise: float, cohort: int) -> Method:
    """Return the method under client-level privacy. The noise is drawn with `Run.secret`; without it, with the seed.

    Args:
        method: The method to protect.
        clip: Maximum L2 norm of an update.
        noise: Standard deviation of the noise on the sum, in multiples of the clip.
        cohort: Number of clients per round.

    Raises:
        MethodError: If the method cannot be made private.
    """
    rule = method.server_rule
    if method.pool:
        raise MethodError(f"{method.name} has one client, which client-level privacy cannot hide; use unit = 'example'")
    if type(rule).reduce is not ServerRule.reduce:
        raise MethodError(
            f"{method.name}: {type(rule).__name__} computes its own mean over clients, and its weights or counts may "
            "reveal a client; client-level privacy needs a server that starts from the plain mean, such as fedavg's"
        )
    if data_rules := [
        type(rule).__name__ for rule in method.client_rules if rule.uses_data and overrides(rule, "narrow")
    ]:
        raise MethodError(
            f"{method.name}: with {data_rules[0]} each client chooses by its data what it sends, so the names alone "
            "reveal information; leave it out under client-level privacy"
        )
    if remembering := [type(rule).__name__ for rule in method.client_rules if rule.slots and overrides(rule, "narrow")]:
        raise MethodError(
            f"{method.name}: with {remembering[0]} each client remembers what it chose to send, which the server "
            "cannot check; under client-level privacy set method.every = 1, or leave it out"
        )
    if sum_transforms := [
        type(transform).__name__
        for transform in method.transforms
        if type(transform).decode_aggregate is not UpdateTransform.decode_aggregate
    ]:
        raise MethodError(
            f"{method.name}: {sum_transforms[0]} changes the sum of updates, so noise in proportion to the clip may be "
            "too small; leave it out under client-level privacy"
        )
    # It comes first, so that it is the last transform to decode an update and the last to change the sum.
    channel = (ClippedUpdates(clip, noise, cohort), *method.transforms)
    return replace(method, transforms=channel, server_rule=OverCohort(rule, cohort))
