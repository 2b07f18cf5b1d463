"""What a client sends to the server, and what the server makes of all updates of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from partita.core.tensors import Slots, Tensors


@dataclass(frozen=True)
class DeltaFacts:
    """Facts about one delta. Only code of this process and its workers creates them; a message cannot carry them.

    Attributes:
        delta: The delta that was measured. The facts hold for this object only, not for a copy that a transform made.
        finite: Whether all values are known to be finite. If not, the norms are not valid.
        square: The squared norm over all names, if known.
        squares: The squared norm by name, if known.
    """

    delta: Mapping[str, torch.Tensor]
    finite: bool
    square: float | None = None
    squares: Mapping[str, float] | None = None


@dataclass(frozen=True)
class ComputedWork:
    """How much a client's training computed. Like `DeltaFacts`, it is created in this process or its workers only.

    Attributes:
        real: The tokens of texts, or otherwise the examples, that count.
        computed: The same with all padding.
    """

    real: int
    computed: int


@dataclass(frozen=True)
class Update:
    """What one client sends to the server.

    Attributes:
        client: The client's name.
        delta: Trained parameters minus the anchor, for the names in the client's narrowed `plan.up`.
        slots: The slots to send from `ClientRule.finish`, restricted to the narrowed `plan.up`.
        weight: The client's number of training examples.
        steps: For each trained name, the number of optimizer steps over all phases.
        loss: The mean training loss of the task; None if no loss is reported, as under example-level privacy.
        metrics: Numbers from the `LayerSelection.metrics` of the client's rules.
        round: The round that this update answers; None if the engine does not report it.
        facts: What training measured about its delta. Read it with `known_facts`.
        work: How much of the training's work was padding; None if that is not known, or is private.
    """

    client: str
    delta: Mapping[str, torch.Tensor]
    slots: Slots
    weight: float
    steps: Mapping[str, int]
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    round: int | None = None
    facts: DeltaFacts | None = None
    work: ComputedWork | None = None

    def known_facts(self) -> DeltaFacts | None:
        """Return the facts about the delta; None if there are none, or if the delta was replaced since."""
        return self.facts if self.facts is not None and self.facts.delta is self.delta else None


@dataclass(frozen=True)
class Aggregate:
    """The result of `ServerRule.reduce`.

    Attributes:
        delta: The combined deltas by parameter name.
        slots: The combined slots.
        cohort: The number of updates consumed.
    """

    delta: Tensors
    slots: Slots
    cohort: int


@dataclass(frozen=True)
class MaskedUpdate:
    """With secure aggregation, all that the server knows of one client's update: it arrived, masked.

    Attributes:
        client: The client's name.
    """

    client: str


@dataclass(frozen=True)
class SecureSum:
    """With secure aggregation, what the server learns of a round: the last of an engine's replies.

    Attributes:
        aggregate: The mean of the updates; None if it could not be unmasked.
        loss: The mean training loss, weighted as the updates; None if clients report none.
        failure: Why there is no aggregate; None if there is one.
        needed: How many clients must stay until the end of a round.
        up: Bytes from clients by parameter name, with keys and shares under `serialization.HEADER`.
        down: Bytes of the protocol to clients, besides the jobs.
        facts: What the row of the round says about it.
    """

    aggregate: Aggregate | None
    loss: float | None
    failure: str | None
    needed: int
    up: Mapping[str, int]
    down: int
    facts: Mapping[str, Any]
