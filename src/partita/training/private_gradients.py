"""Gradients of DP-SGD: gradients of examples or groups, clipped and summed, with Gaussian noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partita.core.data import Batch
from partita.core.dp_settings import DPSGDSettings
from partita.core.noise import add_noise, gaussian_noise
from partita.core.tensors import Slots, Tensors
from partita.training.client_axis import ClientAxis, ClientVmap, VmapError
from partita.training.dp_sgd import Loss, NoiseSource, clipped_sum, unit_mask
from partita.training.ghost_clipping import CHECKED_EXAMPLES, GhostError, check_norms, ghost_sum
from partita.training.objective import Objective, masked_mean, rule_batch

# With clipping = "auto", try ghost clipping if a batch's per-example gradients have more elements than this (1 GiB).
GHOST_THRESHOLD = 2**28


class PrivateGradients:
    """The noisy gradient of DP-SGD, with the gradient of penalties that read no examples.

    Args:
        objective: What each client minimizes.
        axis: The clients.
        dp_settings: Clip, noise and how to clip.
        noise_sources: The noise source of each client.

    Raises:
        VmapError: If ghost clipping is required but not possible.
    """

    def __init__(
        self, objective: Objective, axis: ClientAxis, dp_settings: DPSGDSettings, noise_sources: Sequence[NoiseSource]
    ) -> None:
        self.objective, self.axis, self.dp_settings, self.noise_sources = objective, axis, dp_settings, noise_sources
        self.ghost = self._ghost_possible()
        self.steps = 0  # each step has its own noise
        self.one_by_one = False  # whether the model's gradients are computed example by example
        remedy = (
            "set training.precision = 'float32'"
            if not objective.full_precision
            else "set engine.clients_per_block = 1 to train clients one by one"
            if axis.many
            else "use another model, or no privacy"
        )
        over = "clients and, for privacy, over examples"
        self.lift = ClientVmap(axis, str(objective), over, remedy, checked=True)

    def __call__(
        self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any], count: int
    ) -> tuple[Tensors, Tensor]:
        sources = self.noise_sources[:count]
        std = self.dp_settings.noise * self.dp_settings.clip
        if not self.steps and not self.axis.many:
            inputs: Tensors = values[-3]
            if self.dp_settings.groups:
                inputs = {name: value.flatten(0, 1) for name, value in inputs.items()}  # (member of any group, ...)
            self.one_by_one = bool(self.objective.model.why_one_by_one(inputs))
            if self.dp_settings.clipping == "auto":
                self.ghost = self.ghost and not self.one_by_one  # it checks its norms with torch.vmap
        with torch.no_grad():
            sums, grads, task = self.lift(self._clipped, dims)(trainable, *values)
            noisy = self._noisy(sums, sources, std) if self.dp_settings.noise else sums
            batch_sizes = [torch.tensor(float(source.batch), device=task.device) for source in sources]
            shares = 1 / self.axis.stack(batch_sizes)
            self.steps += 1
            return {
                name: value * self.axis.broadcast(shares, value) + grads[name] for name, value in noisy.items()
            }, task

    def _noisy(self, sums: Tensors, noise_sources: Sequence[NoiseSource], std: float) -> Tensors:
        one = {name: value[0] if self.axis.many else value for name, value in sums.items()}
        noises = [gaussian_noise(one, noise_source.key / self.steps, std) for noise_source in noise_sources]
        return {
            name: add_noise(value, self.axis.stack([noise[name] for noise in noises]), std)
            for name, value in sums.items()
        }

    def _clipped(
        self, trainable: Tensors, frozen: Tensors, anchor: Tensors, sent: Slots, memory: Slots,
        inputs: Tensors, targets: Tensor, mask: Tensor | None,
    ) -> tuple[Tensors, Tensors, Tensor]:  # fmt: skip
        """The sum of clipped gradients, the gradient of penalties that read no examples, and the task's loss."""
        model, ctx = self.objective.model, self.objective.context(anchor, sent, memory)

        def of_one(
            trainable: Tensors, inputs: Tensors, targets: Tensor, members: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            """The loss of one example, or the mean loss of a group's members."""
            params = {**frozen, **trainable}
            with self.objective.autocast(cache=False):  # only here: norms, sums and noise stay in float32
                out = model(params, inputs).with_logits()
                task = masked_mean(self.objective.losses(out, targets), members)
                unit = rule_batch(inputs, targets, members)
                penalties = self.objective.penalties(out, params, unit, ctx, per_example=True)
                return sum(penalties, start=task), task

        def of_none(trainable: Tensors) -> Tensor:
            """Penalties that do not depend on examples need neither clipping nor noise."""
            penalties = self.objective.penalties(None, {**frozen, **trainable}, None, ctx, per_example=False)
            return sum(penalties, start=next(iter(trainable.values())).new_zeros(()))

        total, losses = self._clipped_sum(of_one, trainable, frozen, Batch(inputs, targets, mask))
        return total, torch.func.grad(of_none)(trainable), masked_mean(losses, unit_mask(mask, self.dp_settings))

    def _clipped_sum(self, of_one: Loss, trainable: Tensors, frozen: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
        elements = len(batch.targets) * sum(value.numel() for value in trainable.values())
        if self.ghost and (self.dp_settings.clipping == "ghost" or elements > GHOST_THRESHOLD):
            try:
                total, losses, norms = self._ghost_sum(trainable, frozen, batch)
                if bool(torch.isfinite(norms).all()):
                    return total, losses
            except GhostError as error:
                if self.dp_settings.clipping == "ghost":
                    raise VmapError(
                        f"privacy.clipping is 'ghost', but {self.objective} does not support it: {error}; set it to "
                        "'direct', or train other parts of the model"
                    ) from error
                self.ghost = False
        return clipped_sum(
            of_one, trainable, batch.inputs, batch.targets, batch.mask, self.dp_settings, self.one_by_one
        )

    def _ghost_sum(self, trainable: Tensors, frozen: Tensors, batch: Batch) -> tuple[Tensors, Tensor, Tensor]:
        model = self.objective.model

        def of_all(trainable: Tensors, inputs: Tensors, targets: Tensor) -> Tensor:
            return self.objective.losses(model({**frozen, **trainable}, inputs).with_logits(), targets)

        if not self.steps:
            few = {name: value[:CHECKED_EXAMPLES] for name, value in batch.inputs.items()}
            check_norms(of_all, trainable, few, batch.targets[:CHECKED_EXAMPLES], self.dp_settings)
        with self.objective.autocast(cache=False):
            return ghost_sum(
                lambda trainable: of_all(trainable, batch.inputs, batch.targets),
                trainable,
                batch.mask,
                len(batch.targets),
                self.dp_settings,
            )

    def _ghost_possible(self) -> bool:
        """Whether ghost clipping is possible: not for a block, and not if a rule has a per-example penalty."""
        clipping, many = self.dp_settings.clipping, self.axis.many
        if clipping == "direct" or self.dp_settings.groups:  # the norms are those of single examples
            return False
        possible = not many and not any(rule.per_example for rule in self.objective.run.method.client_rules)
        if clipping == "ghost" and not possible:
            remedy = "set engine.clients_per_block = 1" if many else "set privacy.clipping = 'direct'"
            raise VmapError(
                f"privacy.clipping = 'ghost' supports one client at a time and the task's loss only; {remedy}"
            )
        return possible
