"""Federations of Trainers: each client's own Trainer trains, and a plan says what trains, travels and stays."""

from __future__ import annotations

from partita.trainers.federation import federate
from partita.trainers.patched import PatchedTrainer, patch

__all__ = ["PatchedTrainer", "federate", "patch"]
