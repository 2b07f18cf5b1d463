"""Gradients of DP-SGD: gradients of examples or groups, clipped and summed, with Gaussian noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.core.dp_settings import PrivacySettings
from partita.core.model import HeadOutput
from partita.core.noise import add_noise_once, block_noise
from partita.core.rng import Key
from partita.core.tensors import Slots, Tensors
from partita.core.torch_private import foreach_copy_, without_vmap
from partita.training.client_axis import ClientAxis, ClientVmap, VmapError, first_client
from partita.training.dp_sgd import NoiseSource, clipped_sum, unit_mask
from partita.training.ghost_clipping import CHECKED_EXAMPLES, check_norms, ghost_sum
from partita.training.ghost_layers import GhostError
from partita.training.objective import TINY, Objective, masked_mean, rule_batch


class StepNoise:
    """The noise of one step of a block, in tensors with fixed addresses.

    A captured step reads these tensors and then overwrites them with NaN, also in each replay. So a step whose noise
    was not drawn anew releases NaN, which ends the client's round with an error. It never releases old noise.

    Args:
        axis: The clients.
        std: The standard deviation.
    """

    def __init__(self, axis: ClientAxis, std: float) -> None:
        self.axis, self.std = axis, std
        self.held: Tensors = {}

    def draw(self, trainable: Tensors, keys: Sequence[Key]) -> None:
        """Draw the noise of the next step, for all clients in one call. Call it outside the captured step.

        Args:
            trainable: The parameters of the clients that take the step, whose shapes the noise takes.
            keys: The key of each of these clients for this step.
        """
        one = {name: value[0] if self.axis.many else value for name, value in trainable.items()}
        drawn = block_noise(one, keys, self.std)  # (client, ...)
        if not self.held:
            self.held = {
                name: torch.full((self.axis.count, *value.shape[1:]), math.nan, dtype=value.dtype, device=value.device)
                for name, value in drawn.items()
            }
        if drawn:
            foreach_copy_([self.held[name][: len(keys)] for name in drawn], list(drawn.values()))

    def add(self, sums: Tensors, count: int) -> Tensors:
        """Return the sums with the noise that was drawn. The noise is overwritten.

        Args:
            sums: The sums of the clients that take the step.
            count: The number of these clients, the leading ones.
        """
        noisy = {}
        for name, value in sums.items():
            noise = self.held[name][:count]
            noisy[name] = add_noise_once(value, noise if self.axis.many else noise[0], self.std)
            self.held[name][count:].fill_(math.nan)
        return noisy


# With clipping = "auto", try ghost clipping if a block's per-example gradients have more elements than this (64 MiB).
# Below, direct clipping is as fast (benchmarks/private.py).
GHOST_THRESHOLD = 2**24
HALF = (torch.bfloat16, torch.float16)
# Relative difference of ghost and direct norms in float32, and if the weights are in half precision.
CLOSE, CLOSE_IN_HALF = 1e-2, 0.1


class PrivateGradients:
    """The noisy gradient of DP-SGD, with the gradient of penalties that read no examples.

    Call `prepare` before each step. Only the rest of a step may be captured as a CUDA graph.

    Args:
        objective: What each client minimizes.
        axis: The clients.
        dp_settings: Clip, noise and how to clip.
        noise_sources: The noise source of each client.

    Raises:
        VmapError: If ghost clipping is required but not possible.
    """

    def __init__(
        self, objective: Objective, axis: ClientAxis, dp_settings: PrivacySettings, noise_sources: Sequence[NoiseSource]
    ) -> None:
        self.objective, self.axis, self.dp_settings = objective, axis, dp_settings
        self.one_by_one: bool | None = None  # whether gradients are computed example by example; None: not asked yet
        self.noise = StepNoise(axis, dp_settings.known_noise * dp_settings.clip) if dp_settings.noise else None
        self.shares: torch.Tensor | None = None
        remedy = (
            "set training.precision = 'float32'"
            if not objective.full_precision
            else "set engine.clients_per_block = 1 to train clients one by one"
            if axis.many
            else "use another model, or no privacy"
        )
        over = "clients and, for privacy, over examples"
        self.lift = ClientVmap(axis, str(objective), over, remedy, checked=True)
        self.begin(noise_sources)

    def begin(self, noise_sources: Sequence[NoiseSource]) -> None:
        """Start a phase. What an earlier one found about ghost norms is forgotten: a resumed run does not know it."""
        self.noise_sources = noise_sources
        self.ghost = self._ghost_possible()
        self.steps = 0  # each step has its own noise
        self.checked = False  # whether ghost norms were compared with direct ones in this phase

    def prepare(self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any], count: int) -> None:
        """Do what must happen anew before each step: draw its noise. Before the first steps, check the model.

        Args:
            trainable: As in `__call__`.
            values: As in `__call__`.
            dims: As in `__call__`.
            count: The number of clients that take the step. A client of the batch that has finished gets no noise: its
                parameters become NaN, and must not be released.
        """
        if not self.steps:
            self._set_shares(values[-2].device)
        if self.one_by_one is None:
            self._ask_model(values[-3])
        if self.noise is not None:
            self.noise.draw(trainable, [source.key / self.steps for source in self.noise_sources[:count]])
        if not self.checked and self._uses_ghost(trainable, values[-2]):
            self.checked = True
            try:
                self._check_norms(trainable, values, dims)
            except GhostError as error:
                self._give_up_ghost(error)
        self.steps += 1

    def __call__(
        self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any], count: int
    ) -> tuple[Tensors, torch.Tensor]:
        with torch.no_grad():
            sums, losses = self._clipped_sums(trainable, values, dims)
            noisy = sums if self.noise is None else self.noise.add(sums, count)
            assert self.shares is not None
            shares = self.axis.leading(self.shares, count)
            grads = {name: value * self.axis.broadcast(shares, value) for name, value in noisy.items()}
            if self.objective.run.method.client_rules:
                penalties = self.lift(self._penalty_gradients, dims[:5])(trainable, *values[:4])
                grads = {name: value + penalties[name] for name, value in grads.items()}
            return grads, _mean(losses, unit_mask(values[-1], self.dp_settings))

    def _set_shares(self, device: torch.device) -> None:
        """Set one over each client's expected batch size. The tensor stays the same in all phases.

        A later phase can have fewer clients. It must not use the shares of others, which become NaN.
        """
        sizes = [torch.tensor(float(source.batch)) for source in self.noise_sources]
        shares = (1 / self.axis.stack(sizes)).to(device)
        if self.shares is None:
            self.shares = shares
        else:
            self.shares.fill_(torch.nan)
            self.axis.leading(self.shares, len(sizes)).copy_(shares)

    def _ask_model(self, inputs: Tensors) -> None:
        self.one_by_one = False
        if self.axis.many:
            return
        if self.dp_settings.group:
            inputs = {name: value.flatten(0, 1) for name, value in inputs.items()}  # (member of any group, ...)
        self.one_by_one = bool(self.objective.model.why_one_by_one(inputs))
        self.ghost = self._ghost_possible()

    # ---- clipped sums

    def _clipped_sums(
        self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any]
    ) -> tuple[Tensors, torch.Tensor]:
        """The sum of clipped gradients by name, and the loss of each unit."""
        frozen, *_, inputs, targets, mask = values
        if self._uses_ghost(trainable, targets):
            try:
                losses_of = self._losses(frozen, inputs, targets, dims)
                return ghost_sum(losses_of, trainable, mask, self._units(targets), self.dp_settings)[:2]
            except GhostError as error:
                self._give_up_ghost(error)
        sums, losses = self.lift(self._direct_sum, dims)(trainable, *values)
        return sums, losses

    def _direct_sum(
        self, trainable: Tensors, frozen: Tensors, anchor: Tensors, sent: Slots, memory: Slots,
        inputs: Tensors, targets: torch.Tensor, mask: torch.Tensor | None,
    ) -> tuple[Tensors, torch.Tensor]:  # fmt: skip
        """The same of one client, from the gradient of each unit."""
        model, ctx = self.objective.model, self.objective.context(anchor, sent, memory)

        def of_one(
            trainable: Tensors, inputs: Tensors, targets: torch.Tensor, members: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """The loss of one example, or the mean loss of a group's members."""
            params = {**frozen, **trainable}
            with self.objective.autocast(cache=False):  # only here: norms, sums and noise stay in float32
                out = model(params, inputs).with_logits()
                task = masked_mean(self.objective.losses(out, targets), members)
                unit = rule_batch(inputs, targets, members)
                penalties = self.objective.penalties(out, params, unit, ctx, per_example=True)
                return sum(penalties, start=task), task

        return clipped_sum(of_one, trainable, inputs, targets, mask, self.dp_settings, bool(self.one_by_one))

    def _penalty_gradients(
        self, trainable: Tensors, frozen: Tensors, anchor: Tensors, sent: Slots, memory: Slots
    ) -> Tensors:
        """The gradient of penalties that do not depend on examples, which need neither clipping nor noise."""
        ctx = self.objective.context(anchor, sent, memory)

        def total(trainable: Tensors) -> torch.Tensor:
            penalties = self.objective.penalties(None, {**frozen, **trainable}, None, ctx, per_example=False)
            return sum(penalties, start=next(iter(trainable.values())).new_zeros(()))

        return torch.func.grad(total)(trainable)

    # ---- ghost clipping

    def _ghost_possible(self) -> bool:
        """Whether to try ghost clipping: not for groups, and not if a rule has a per-example penalty."""
        clipping = self.dp_settings.clipping
        if clipping == "direct" or self.dp_settings.group:  # the norms are those of single examples
            return False
        possible = not any(rule.per_example for rule in self.objective.run.method.client_rules)
        if clipping == "ghost" and not possible:
            raise VmapError(
                "privacy.clipping = 'ghost' supports the task's loss only, and a rule has a penalty per example; set "
                "privacy.clipping = 'direct'"
            )
        return possible and not (clipping == "auto" and self.one_by_one)

    def _uses_ghost(self, trainable: Tensors, targets: torch.Tensor) -> bool:
        """Whether a batch of this size is clipped by ghost norms."""
        elements = self._units(targets) * sum(value.numel() for value in trainable.values())
        return self.ghost and (self.dp_settings.clipping == "ghost" or elements > GHOST_THRESHOLD)

    def _give_up_ghost(self, error: GhostError) -> None:
        """Clip directly from now on; raise VmapError if ghost clipping is required."""
        if self.dp_settings.clipping == "ghost":
            raise VmapError(
                f"privacy.clipping is 'ghost', but {self.objective} does not support it: {error}; set it to "
                "'direct', or train other parts of the model"
            ) from error
        self.ghost = False

    def _losses(
        self, frozen: Tensors, inputs: Tensors, targets: torch.Tensor, dims: Sequence[Any]
    ) -> Callable[[Tensors], torch.Tensor]:
        """Return the function from trained parameters to the losses, (example,) or (client, example)."""
        lifted = self.lift(self._losses_of_one, [dims[0], dims[1], *dims[5:7]])

        def losses(trainable: Tensors) -> torch.Tensor:
            with self.objective.autocast(cache=False):
                found: torch.Tensor = lifted(trainable, frozen, inputs, targets)
            return found

        return losses

    def _losses_of_one(
        self, trainable: Tensors, frozen: Tensors, inputs: Tensors, targets: torch.Tensor
    ) -> torch.Tensor:
        out = self.objective.model({**frozen, **trainable}, inputs)
        # A head that trains must be recorded. The loss of a frozen one is computed without all logits.
        frozen_head = isinstance(out, HeadOutput) and not without_vmap(out.weight).requires_grad
        return self.objective.losses(out if frozen_head else out.with_logits(), targets)

    def _check_norms(self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any]) -> None:
        """Compare the ghost norms of the first client's first examples with those of their gradients, in float32."""
        frozen, *_, inputs, targets, _ = values
        few = (slice(None), slice(CHECKED_EXAMPLES)) if self.axis.many else (slice(CHECKED_EXAMPLES),)
        inputs, targets = {name: value[few] for name, value in inputs.items()}, targets[few]
        with torch.autocast(targets.device.type, enabled=False):
            lifted = self.lift(self._losses_of_one, [dims[0], dims[1], *dims[5:7]])
            norms = ghost_sum(
                lambda trainable: lifted(trainable, frozen, inputs, targets),
                trainable,
                None,
                self._units(targets),
                self.dp_settings,
            )[2]
        if self.axis.many:
            trainable, frozen, inputs, targets = (
                first_client(value, dim)
                for value, dim in zip((trainable, frozen, inputs, targets), (*dims[:2], *dims[5:7]), strict=True)
            )
            norms = norms[0]
        check_norms(
            lambda trainable, inputs, targets: self._losses_of_one(trainable, frozen, inputs, targets),
            trainable,
            inputs,
            targets,
            norms,
            CLOSE_IN_HALF if getattr(self.objective.model, "dtype", None) in HALF else CLOSE,
        )

    # ---- units

    def _units(self, targets: torch.Tensor) -> int:
        """The number of units of each client, padding included."""
        return targets.shape[int(self.axis.many)]


def _mean(losses: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean over the last dimension, of those that count."""
    return losses.mean(-1) if mask is None else (losses * mask).sum(-1) / mask.sum(-1).clamp(min=TINY)
