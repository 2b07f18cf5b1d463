"""Gradients of single units, clipped and summed, for DP-SGD. A unit is an example or a group of examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from partita.core.dp_settings import PrivacySettings
from partita.core.rng import Key
from partita.core.tensors import Tensors

# (parameters, inputs and targets of a batch of one example) -> (value to differentiate, the task's loss).
# For a group: (parameters, inputs and targets of its members, their mask (member,)) -> the same, as means over members.
Loss = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class NoiseSource:
    """The random key of one client's noise, and its expected batch size.

    Attributes:
        key: The key.
        batch: The expected number of units: the sum of gradients is divided by it, not by the actual batch size.
    """

    key: Key
    batch: int


def clipped_sum(
    loss: Loss,
    trainable: Tensors,
    inputs: Tensors,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    dp_settings: PrivacySettings,
    one_by_one: bool = False,
) -> tuple[Tensors, torch.Tensor]:
    """Sum the gradients of units, each clipped to norm `clip` over all names together.

    Args:
        loss: The loss of one unit.
        trainable: The parameters to differentiate with respect to.
        inputs: The inputs of the batch, each of shape (example, ...), or (group, member, ...) for groups.
        targets: The targets, of shape (example, ...) or (group, member, ...).
        mask: Shape (example,), zero for examples to leave out; None if all count. For groups, (group, member).
        dp_settings: The clip and the microbatch size.
        one_by_one: Whether to run the loss once for each unit, for a model that `torch.vmap` does not support.

    Returns:
        `(sum by name, losses)`; the losses have shape (unit,).
    """
    total: Tensors = {}
    losses: list[torch.Tensor] = []
    size = 1 if one_by_one else dp_settings.microbatch or len(targets)
    gradients = gradient_of_one if one_by_one else per_example_gradients
    members = mask if dp_settings.group else None
    counts = unit_mask(mask, dp_settings)
    for start in range(0, len(targets), size):
        here = slice(start, start + size)
        part = {name: value[here] for name, value in inputs.items()}
        grads, norms, task = gradients(loss, trainable, part, targets[here], None if members is None else members[here])
        # Drop non-finite gradients: a NaN in the sum would reveal that the unit was present.
        out = ~torch.isfinite(norms) if counts is None else ~torch.isfinite(norms) | (counts[here] == 0)
        shares = (dp_settings.clip / norms).clamp(max=1.0).masked_fill(out, 0.0)
        for name, grad in grads.items():
            whole = grad.reshape(len(grad), -1).masked_fill(out.unsqueeze(1), 0.0)  # (example, element)
            added = (shares.to(whole) @ whole).view(grad.shape[1:])
            total[name] = total[name] + added if name in total else added
        losses.append(task)
    return total, torch.cat(losses)


def unit_mask(mask: torch.Tensor | None, dp_settings: PrivacySettings) -> torch.Tensor | None:
    """Return which units count, (..., unit): of groups, those with a member that counts. None if all count."""
    return mask if mask is None or not dp_settings.group else (mask != 0).any(-1).to(mask)


def per_example_gradients(
    loss: Loss, trainable: Tensors, inputs: Tensors, targets: torch.Tensor, members: torch.Tensor | None = None
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """Compute the gradient of each example, or of each group.

    Args:
        loss: Returns `(loss, task's loss)` of a batch of one example, from the parameters, inputs and targets.
        trainable: The parameters, without a client dimension.
        inputs: The inputs by name, each of shape (example, ...), or (group, member, ...).
        targets: The targets, of shape (example, ...) or (group, member, ...).
        members: Which members of each group count, (group, member); None if the units are examples.

    Returns:
        `(gradients by name, norms, losses)`: gradients of shape (example, ...), norms over all names of shape
        (example,), and losses of shape (example,).
    """

    def one(trainable: Tensors, inputs: Tensors, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return loss(trainable, {name: value.unsqueeze(0) for name, value in inputs.items()}, target.unsqueeze(0))

    if members is None:
        grads, losses = torch.vmap(torch.func.grad(one, has_aux=True), in_dims=(None, 0, 0))(trainable, inputs, targets)
    else:
        grads, losses = torch.vmap(torch.func.grad(loss, has_aux=True), in_dims=(None, 0, 0, 0))(
            trainable, inputs, targets, members
        )
    return grads, _norms(grads), losses


def gradient_of_one(
    loss: Loss, trainable: Tensors, inputs: Tensors, targets: torch.Tensor, members: torch.Tensor | None = None
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """Compute what `per_example_gradients` does for a batch of one unit, without `torch.vmap`."""
    leaves = {name: value.detach().requires_grad_() for name, value in trainable.items()}
    with torch.enable_grad():
        if members is None:
            value, task = loss(leaves, inputs, targets)
        else:
            value, task = loss(leaves, {name: part[0] for name, part in inputs.items()}, targets[0], members[0])
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    grads = {name: grad.unsqueeze(0) for name, grad in zip(leaves, found, strict=True)}
    return grads, _norms(grads), task.detach().unsqueeze(0)


def _norms(grads: Tensors) -> torch.Tensor:
    """Return the norm of each unit's gradient over all names, (unit,)."""
    squares = [grad.reshape(len(grad), -1).square().sum(1) for grad in grads.values()]
    return torch.stack(squares).sum(0).sqrt()
