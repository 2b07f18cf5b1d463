"""Per-example gradients, clipped and summed, for DP-SGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.core.dp_settings import DPSGDSettings
from partita.core.rng import Key
from partita.core.tensors import Tensors

# (parameters, inputs and targets of a batch of one example) -> (value to differentiate, the task's loss)
Loss = Callable[[Tensors, Tensors, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class NoiseSource:
    """The random key of one client's noise, and its expected batch size.

    Attributes:
        key: The key.
        batch: The expected batch size: the sum of gradients is divided by it, not by the actual batch size.
    """

    key: Key
    batch: int


def clipped_sum(
    loss: Loss, trainable: Tensors, inputs: Tensors, targets: Tensor, mask: Tensor | None, dp_settings: DPSGDSettings
) -> tuple[Tensors, Tensor]:
    """Sum per-example gradients, each clipped to norm `clip` over all names together.

    Args:
        loss: The loss of a batch of one example.
        trainable: The parameters to differentiate with respect to.
        inputs: The inputs of the batch, each of shape (example, ...).
        targets: The targets, of shape (example, ...).
        mask: Shape (example,), zero for examples to leave out; None if all count.
        dp_settings: The clip and the microbatch size.

    Returns:
        `(sum by name, losses)`; the losses have shape (example,).
    """
    total: Tensors = {}
    losses: list[Tensor] = []
    size = dp_settings.microbatch or len(targets)
    for start in range(0, len(targets), size):
        here = slice(start, start + size)
        grads, norms, task = per_example_gradients(
            loss, trainable, {k: value[here] for k, value in inputs.items()}, targets[here]
        )
        # Drop non-finite per-example gradients: a NaN in the sum would reveal that the example was present.
        out = ~torch.isfinite(norms) if mask is None else ~torch.isfinite(norms) | (mask[here] == 0)
        shares = (dp_settings.clip / norms).clamp(max=1.0).masked_fill(out, 0.0)
        for name, grad in grads.items():
            whole = grad.reshape(len(grad), -1).masked_fill(out.unsqueeze(1), 0.0)  # (example, element)
            part = (shares.to(whole) @ whole).view(grad.shape[1:])
            total[name] = total[name] + part if name in total else part
        losses.append(task)
    return total, torch.cat(losses)


def per_example_gradients(
    loss: Loss, trainable: Tensors, inputs: Tensors, targets: Tensor
) -> tuple[Tensors, Tensor, Tensor]:
    """Compute the gradient of each example.

    Args:
        loss: Returns `(loss, task's loss)` of a batch of one example, from the parameters, inputs and targets.
        trainable: The parameters, without a client dimension.
        inputs: The inputs by name, each of shape (example, ...).
        targets: The targets, of shape (example, ...).

    Returns:
        `(gradients by name, norms, losses)`: gradients of shape (example, ...), norms over all names of shape
        (example,), and losses of shape (example,).
    """

    def one(trainable: Tensors, inputs: Tensors, target: Tensor) -> tuple[Tensor, Tensor]:
        return loss(trainable, {name: value.unsqueeze(0) for name, value in inputs.items()}, target.unsqueeze(0))

    grads, losses = torch.vmap(torch.func.grad(one, has_aux=True), in_dims=(None, 0, 0))(trainable, inputs, targets)
    squares = [grad.reshape(len(grad), -1).square().sum(1) for grad in grads.values()]
    return grads, torch.stack(squares).sum(0).sqrt(), losses
