"""What all parties of one round know before it starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch

from partita.core.secure_settings import SecureAggregation
from partita.secure_aggregation.encoding import write_message
from partita.secure_aggregation.fixed_point import FixedPoint, Layout


@dataclass(frozen=True)
class RoundSetup:
    """The public facts of one round. Server and clients build it by themselves from the run that they agreed on.

    Attributes:
        settings: The settings of the run.
        round_id: Bytes that no other round has: of the run, the session and the round.
        layout: What a client's vector holds.
        fixed_point: How numbers become integers.
    """

    settings: SecureAggregation
    round_id: bytes
    layout: Layout
    fixed_point: FixedPoint

    @cached_property
    def context(self) -> bytes:
        """A digest of all the facts. Every key of the round depends on it."""
        facts = [repr(self.settings), repr(self.fixed_point), repr(self.layout.entries)]
        return hashlib.sha256(write_message("C", [self.round_id, *(fact.encode() for fact in facts)])).digest()

    @property
    def dtype(self) -> torch.dtype:
        """The type of a masked vector."""
        return self.fixed_point.dtype
