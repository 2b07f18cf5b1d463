"""Per-example gradients, clipped and summed, as DP-SGD needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.core.dp_settings import DPSGDSettings
from partita.core.rng import Key
from partita.core.tensors import Tensors

# (parameters, inputs and targets of a batch of one) -> (what is differentiated, the task's loss)
Loss = Callable[[Tensors, Tensors, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class NoiseSource:
    """Where one client's noise comes from, and the batch size that it expects, by which a sum becomes a mean."""

    key: Key
    batch: int


def clipped_sum(
    loss: Loss, trainable: Tensors, inputs: Tensors, targets: Tensor, mask: Tensor | None, dp_settings: DPSGDSettings
) -> tuple[Tensors, Tensor]:
    """The sum over examples of gradients that are at most `clip` long over all names together, and each one's loss."""
    total: Tensors = {}
    losses: list[Tensor] = []
    size = dp_settings.microbatch or len(targets)
    for start in range(0, len(targets), size):
        here = slice(start, start + size)
        grads, norms, found = per_example_gradients(
            loss, trainable, {k: value[here] for k, value in inputs.items()}, targets[here]
        )
        # One that is no number is left out: it must not tell of its example by breaking the sum.
        out = ~torch.isfinite(norms) if mask is None else ~torch.isfinite(norms) | (mask[here] == 0)
        shares = (dp_settings.clip / norms).clamp(max=1.0).masked_fill(out, 0.0)
        for name, grad in grads.items():
            whole = grad.flatten(1).masked_fill(out.unsqueeze(1), 0.0)  # (example, number)
            part = (shares.to(whole) @ whole).view(grad.shape[1:])
            total[name] = total[name] + part if name in total else part
        losses.append(found)
    return total, torch.cat(losses)


def per_example_gradients(
    loss: Loss, trainable: Tensors, inputs: Tensors, targets: Tensor
) -> tuple[Tensors, Tensor, Tensor]:
    """Each example's gradient, (example, ...) by name, with its norm over all names, and its loss."""

    def one(trainable: Tensors, inputs: Tensors, target: Tensor) -> tuple[Tensor, Tensor]:
        return loss(trainable, {name: value.unsqueeze(0) for name, value in inputs.items()}, target.unsqueeze(0))

    grads, losses = torch.vmap(torch.func.grad(one, has_aux=True), in_dims=(None, 0, 0))(trainable, inputs, targets)
    squares = [grad.flatten(1).square().sum(1) for grad in grads.values()]
    return grads, torch.stack(squares).sum(0).sqrt(), losses
