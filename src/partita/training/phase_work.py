"""What a phase of local training starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from partita.core.client_rule import Context
from partita.core.dp_settings import PrivacySettings
from partita.core.plan import Phase
from partita.core.settings import Run
from partita.core.tensors import Slots, Tensors
from partita.training.client_axis import ClientAxis, stack_all, stack_or_share
from partita.training.dp_sgd import NoiseSource
from partita.training.objective import Objective

UNUSED: tuple[Any, Any] = ({}, None)  # an empty value, shared by all clients, for what no rule reads


@dataclass(frozen=True)
class PhaseWork:
    """One phase of one client, or of a block of clients, before the first step.

    Attributes:
        run: The settings.
        phase: The phase.
        contexts: The context of each client, in the order of their numbers of steps, most first.
        start_params: All parameters of each client at the start of the phase.
        moments: The optimizer state of each client by slot; empty to start with a new state.
        dp_settings: The DP-SGD settings; None for training without example-level privacy.
        noise_sources: The noise source of each client, with DP-SGD only.
    """

    run: Run
    phase: Phase
    contexts: Sequence[Context]
    start_params: Sequence[Tensors]
    moments: Sequence[Slots]
    dp_settings: PrivacySettings | None = None
    noise_sources: Sequence[NoiseSource] = ()

    @property
    def axis(self) -> ClientAxis:
        """The clients."""
        return ClientAxis(len(self.contexts))

    @property
    def objective(self) -> Objective:
        """What each client minimizes; the same for all clients of a block."""
        first = self.contexts[0]
        return Objective(self.run, first.model, first.plan, first.lr, self.device.type)

    @property
    def device(self) -> torch.device:
        """The device of all parameters."""
        return next(iter(self.start_params[0].values())).device

    @cached_property
    def names(self) -> list[str]:
        """The trained parameters."""
        return sorted(self.phase.names)

    @property
    def initial_steps(self) -> dict[str, int]:
        """The number of earlier optimizer steps by name; equal for all clients of a block."""
        step_counts = self.moments[0].get("age", {})
        return {name: int(step_counts[name]) if name in step_counts else 0 for name in self.names}

    @cached_property
    def anchor(self) -> tuple[Any, Any]:
        """The anchors, as `(value, dims)` of `stack_or_share`."""
        return self._stack([ctx.anchor for ctx in self.contexts])

    @cached_property
    def fixed(self) -> list[tuple[Any, Any]]:
        """What steps read and do not change: frozen parameters, anchor, sent slots and memory; each `(value, dims)`."""
        frozen = [name for name in self.start_params[0] if name not in self.phase.names]
        params = self._stack([{name: params[name] for name in frozen} for params in self.start_params])
        if not self.run.method.client_rules:  # only rules read the others
            return [params, UNUSED, UNUSED, UNUSED]
        sent, memory = ([getattr(ctx, part) for ctx in self.contexts] for part in ("sent", "memory"))
        return [params, self.anchor, stack_or_share(sent), stack_all(memory)]

    def _stack(self, parts: Sequence[Tensors]) -> tuple[Any, Any]:
        """Stack the clients' parameters, as `(value, dims)`. Those that clients keep are always stacked."""
        kept = self.contexts[0].plan.keep
        if kept.isdisjoint(parts[0]):
            return stack_or_share(parts)
        pairs = {
            name: (stack_all if name in kept else stack_or_share)([part[name] for part in parts]) for name in parts[0]
        }
        return {name: value for name, (value, _) in pairs.items()}, {name: dim for name, (_, dim) in pairs.items()}

    def stacked(self) -> tuple[Tensors, dict[str, Tensors]]:
        """Return copies of the trained parameters and of the optimizer state, which steps update in place."""
        axis = self.axis
        trainable = {name: axis.stack([params[name] for params in self.start_params]) for name in self.names}
        fresh = self.run.training.steps_by.init({name: self.start_params[0][name] for name in self.names})
        moments = {
            slot: {
                name: axis.stack([state.get(slot, start).get(name, start[name]) for state in self.moments])
                for name in self.names
            }
            for slot, start in fresh.items()
        }
        return trainable, moments
