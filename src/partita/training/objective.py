"""What one client minimizes, written for one client without a client dimension."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from partita.core import tensors
from partita.core.client_rule import ClientRule, Context, ForbiddenData, overrides
from partita.core.data import EXAMPLE_SEEDS, IGNORE_INDEX, Batch
from partita.core.model import Model, Output
from partita.core.optim import clip_gradients
from partita.core.personal_copy import PERSONAL
from partita.core.plan import Plan
from partita.core.settings import Run, RunError, Training
from partita.core.tensors import Slots, Tensors

TINY = 1e-12  # a sum of weights is at least this, so that a batch without weight has loss 0 and not NaN


@dataclass(frozen=True)
class Objective:
    """The task's loss with the penalties of the client rules, and the rules' correction of its gradient.

    Attributes:
        run: The settings.
        model: The model as the clients run it.
        plan: The clients' narrowed plan.
        lr: The learning rate of the round.
        device_type: The type of the device, such as "cuda".
    """

    run: Run
    model: Model
    plan: Plan
    lr: float
    device_type: str

    def __str__(self) -> str:
        return f"{self.model.name} with {self.run.method.name}"

    @property
    def full_precision(self) -> bool:
        """Whether the forward pass runs in float32."""
        return self.run.training.precision == "float32"

    def autocast(self, cache: bool = True) -> torch.autocast:
        """Return the context for the forward pass.

        Args:
            cache: Whether to cache casts. A cast that is cached inside one functional transform is invalid in the next.
        """
        half = not self.full_precision
        return torch.autocast(self.device_type, torch.bfloat16, enabled=half, cache_enabled=cache)

    def context(self, anchor: Tensors, sent: Slots, memory: Slots) -> Context:
        """Return the context for the hooks of a step, with one client's `anchor`, `sent` and `memory`."""
        return Context(self.model, self.plan, anchor, sent, memory, self.lr)

    def loss(
        self, trainable: Tensors, frozen: Tensors, anchor: Tensors, sent: Slots, memory: Slots,
        inputs: Tensors, targets: torch.Tensor, mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return the loss with all penalties, and the task's loss alone, as means over the batch.

        Args:
            trainable: The parameters that train in this phase.
            frozen: All other parameters.
            anchor: All parameters at the start of the client's round.
            sent: The slots from the server.
            memory: The slots from the client's last round.
            inputs: The inputs of the batch by name, each of shape (example, ...).
            targets: The targets, of shape (example, ...).
            mask: Shape (example,), zero for padding; None if all examples count.

        Returns:
            `(loss, task's loss)`, two scalars.
        """
        params = {**frozen, **trainable}
        out = self.model(params, inputs)
        task = masked_mean(self.losses(out, targets), example_weights(self.run.training, targets, mask))
        if not self.run.method.client_rules:  # a compiled program must not depend on `lr` without need
            return task, task
        ctx = self.context(anchor, sent, memory)
        penalties = (
            rule.penalty(out, params, rule_batch(inputs, targets, mask), ctx) for rule in self.run.method.client_rules
        )
        return sum((penalty for penalty in penalties if penalty is not None), start=task), task

    def losses(self, out: Output, targets: torch.Tensor) -> torch.Tensor:
        """Return the task's training loss of each example, (example,).

        Args:
            out: The output of the forward pass.
            targets: The targets, of shape (example, ...).
        """
        training = self.run.training
        if not training.label_smoothing and not training.weights:
            return self.model.losses(out, targets)
        return self.model.class_losses(out, targets, training.label_smoothing, training.weights)

    def penalties(
        self, out: Any, params: Tensors, batch: Any, ctx: Context, per_example: bool
    ) -> Iterator[torch.Tensor]:
        """Yield the penalties that read examples, or those that must not read any.

        Args:
            out: The output of the forward pass; not used unless `per_example` is set.
            params: All parameters.
            batch: The batch; not used unless `per_example` is set.
            ctx: The context.
            per_example: Which rules to call: those that set `ClientRule.per_example`, or all others.
        """
        for rule in self.run.method.client_rules:
            seen: tuple[Any, Any] = (out, batch) if per_example else (ForbiddenData(rule), ForbiddenData(rule))
            if rule.per_example == per_example:
                penalty = rule.penalty(seen[0], params, seen[1], ctx)
                if penalty is not None:
                    yield penalty

    @property
    def step_rule(self) -> ClientRule | None:
        """The rule that computes the gradient of a step (`ClientRule.step_gradient`); None for the plain gradient."""
        return next((rule for rule in self.run.method.client_rules if overrides(rule, "step_gradient")), None)

    @property
    def corrects(self) -> bool:
        """Whether `correct` changes gradients at all."""
        corrected = any(overrides(rule, "gradient") for rule in self.run.method.client_rules)
        return corrected or self.run.training.clip is not None

    def correct(self, grads: Tensors, anchor: Tensors, sent: Slots, memory: Slots) -> Tensors:
        """Apply the rules' `gradient` in order, then `training.clip`.

        Args:
            grads: The gradient for the names that train in this phase.
            anchor: All parameters at the start of the client's round.
            sent: The slots from the server.
            memory: The slots from the client's last round.

        Returns:
            The gradient by name. It has no names that `grads` lacks, and it lacks names that a rule leaves out.
        """
        ctx = self.context(anchor, sent, memory)
        names = grads.keys()
        for rule in self.run.method.client_rules:
            grads = {name: grad for name, grad in rule.gradient(grads, ctx).items() if name in names}
        limit = self.run.training.clip
        if limit is None:
            return grads
        # A personal copy is a model of its own, so neither model's gradient changes the step of the other.
        copies = {name for name in grads if PERSONAL in self.model.tags[name]}
        models = ({name: grads[name] for name in grads if (name in copies) == own} for own in (False, True))
        clipped = (clip_gradients(part, tensors.norm(part), limit) for part in models if part)
        return {name: grad for part in clipped for name, grad in part.items()}

    @property
    def moves(self) -> bool:
        """Whether `move` changes parameters at all."""
        return any(overrides(rule, "after_step") for rule in self.run.method.client_rules)

    def move(self, params: Tensors, anchor: Tensors, sent: Slots, memory: Slots) -> Tensors:
        """Apply the rules' `after_step` in order.

        Args:
            params: The parameters that the optimizer stepped.
            anchor: All parameters at the start of the client's round.
            sent: The slots from the server.
            memory: The slots from the client's last round.
        """
        ctx = self.context(anchor, sent, memory)
        for rule in self.run.method.client_rules:
            params = rule.after_step(params, ctx)
        return params


def rule_batch(inputs: Tensors, targets: torch.Tensor, mask: torch.Tensor | None = None) -> Batch:
    """Return the batch that rules see. It has no seeds: forward passes of other parameters run without dropout."""
    return Batch({name: value for name, value in inputs.items() if name != EXAMPLE_SEEDS}, targets, mask)


def example_weights(
    training: Training, targets: torch.Tensor, mask: torch.Tensor | None, clients: bool = False
) -> torch.Tensor | None:
    """Return the weight of each example in the loss of a batch, (..., example); None if all examples count alike.

    Args:
        training: The settings. With `loss_average` "tokens", the weight is the sum over labeled tokens of their class
            weights. Otherwise it is the class weight of a single target, and 1 for an example of many tokens.
        targets: The targets, (..., example) or (..., example, token).
        mask: Shape (..., example), zero for padding; None if all examples count.
        clients: Whether the first dimension is the client.

    Raises:
        RunError: If `loss_average` is "tokens" and the targets are those of whole examples.
    """
    by_token = targets.ndim > 1 + clients
    if training.loss_average == "tokens" and not by_token:
        raise RunError("training.loss_average is 'tokens', but the task has no labels of tokens; leave it out")
    if training.loss_average == "examples" and (by_token or not training.weights):
        return mask
    weights = (targets != IGNORE_INDEX).float()
    if training.weights:
        weights = weights * tensors.constants(training.weights, weights)[targets.clamp(min=0)]
    weights = weights.sum(-1) if by_token else weights
    return weights if mask is None else weights * mask


def masked_mean(losses: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of the losses of shape (example,), weighted by the mask."""
    return losses.mean() if mask is None else (losses * mask).sum() / mask.sum().clamp(min=TINY)
