"""Gradients of a training step: the contract, and its implementation without privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from partita.core import tensors
from partita.core.settings import Training
from partita.core.tensors import Tensors
from partita.training.client_axis import ClientAxis, ClientVmap
from partita.training.objective import TINY, Objective, example_weights

Lift = Callable[[Callable[..., Any], Sequence[Any]], Callable[..., Any]]  # (function of one client, dims) -> of a block


class GradientEstimator(Protocol):
    """Computes the gradient of one step for all clients of a block."""

    def __call__(
        self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any], count: int
    ) -> tuple[Tensors, torch.Tensor]:
        """Return the gradient by name and the task's loss of each client.

        Args:
            trainable: The trained parameters of the clients that take the step.
            values: The other arguments of `Objective.loss`, in order.
            dims: The client dimension of each argument of `Objective.loss`, as `in_dims` of `torch.vmap`.
            count: The number of clients that take the step: the leading ones.
        """
        ...


class PlainGradients:
    """The gradient of the mean loss.

    Clients do not interact, so the gradient of the sum of their losses contains each client's own gradient. Therefore
    only the forward pass needs `vmap`, and one ordinary backward pass serves the whole block.

    Args:
        objective: What each client minimizes.
        axis: The clients.
        lift: Turns the loss of one client into that of a block; None for `torch.vmap`.
    """

    def __init__(self, objective: Objective, axis: ClientAxis, lift: Lift | None = None) -> None:
        self.objective, self.lift = objective, lift or ClientVmap(axis, str(objective))

    def __call__(
        self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any], count: int
    ) -> tuple[Tensors, torch.Tensor]:
        return self.at(trainable, list(trainable), values, dims)

    def at(
        self, point: Tensors, names: Sequence[str], values: Sequence[Any], dims: Sequence[Any]
    ) -> tuple[Tensors, torch.Tensor]:
        """Return the gradient at a point for some names, and the task's loss there.

        Args:
            point: The trained parameters, and any others that differ from those in `values`.
            names: The names in `point` for which to return the gradient. Those that the loss ignores are left out.
            values: As in `__call__`.
            dims: As in `__call__`.
        """
        point = {name: value.detach() for name, value in point.items()}
        trainable = [point[name].requires_grad_() for name in names]
        with self.objective.autocast():
            total, task = self.lift(self.objective.loss, dims)(point, *values)
        grads = torch.autograd.grad(total.sum(), trainable, allow_unused=True)
        return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}, task

    def task_losses(self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any]) -> torch.Tensor:
        """Return the task's loss of each client, without a gradient. The arguments are those of `__call__`."""
        with torch.no_grad(), self.objective.autocast():
            task: torch.Tensor = self.lift(self.objective.loss, dims)(trainable, *values)[1]
        return task


class AccumulatedGradients:
    """The gradient of a step in several batches, one after another, so that only one of them needs memory at a time.

    It is the mean over all examples or tokens of the step, up to rounding that of one large batch.

    Args:
        gradients: Computes the gradient of one batch.
        axis: The clients.
        training: The settings, with the largest number of examples per batch.
    """

    def __init__(self, gradients: GradientEstimator, axis: ClientAxis, training: Training) -> None:
        self.gradients, self.axis, self.training = gradients, axis, training
        self.batch_size = training.batch_size

    def __call__(
        self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any], count: int
    ) -> tuple[Tensors, torch.Tensor]:
        *fixed, inputs, targets, mask = values
        dim = int(self.axis.many)  # of the examples
        # The clients of a block can have different numbers of examples, which the mask says.
        weights = example_weights(self.training, targets, mask, self.axis.many)
        counted = torch.ones(targets.shape[: dim + 1], device=targets.device) if weights is None else weights
        shares = [part.sum(dim) / counted.sum(dim).clamp(min=TINY) for part in counted.split(self.batch_size, dim)]
        columns = {name: value.split(self.batch_size, dim) for name, value in inputs.items()}
        answers = targets.split(self.batch_size, dim)
        masks = [None] * len(answers) if mask is None else mask.split(self.batch_size, dim)
        grads: Tensors = {}
        loss: torch.Tensor | None = None
        for place, (share, answer, own_mask) in enumerate(zip(shares, answers, masks, strict=True)):
            batch = {name: parts[place] for name, parts in columns.items()}
            found, task = self.gradients(trainable, [*fixed, batch, answer, own_mask], dims, count)
            scaled = {name: grad * self.axis.broadcast(share, grad) for name, grad in found.items()}
            grads = tensors.add(scaled, grads)
            loss = share * task if loss is None else loss + share * task
        assert loss is not None
        return grads, loss
