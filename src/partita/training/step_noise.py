"""Noise that is drawn before a step and used once, also if the step is replayed as a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from partita.core.noise import add_noise_once, block_noise
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.core.torch_private import foreach_copy_
from partita.training.client_axis import ClientAxis


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
