"""Local optimizers as functions of tensors.

They are element-wise, so a block of clients with a leading client dimension steps exactly as each client alone. The
operations and their order are those of torch.optim, so one client matches a plain PyTorch loop bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch

from partita.core import torch_private
from partita.core.tensors import Slots, Tensors, zeros_like


@runtime_checkable
class Optimizer(Protocol):
    """A local optimizer."""

    @property
    def name(self) -> str:
        """The name that rules list in `optimizers`."""
        ...

    @property
    def uses_step_count(self) -> bool:
        """Whether a step depends on the number of earlier steps. If so, a block only has clients with equal counts."""
        ...

    def init(self, params: Tensors) -> dict[str, Tensors]:
        """Return the initial state by slot, for these parameters."""
        ...

    def without_weight_decay(self) -> Optimizer:
        """Return the same optimizer without weight decay; its state has the same slots."""
        ...

    def step(self, params: Tensors, grads: Tensors, state: Slots, lr: float, step_counts: Mapping[str, int]) -> None:
        """Update `params` and `state` in place, for the names in `grads`.

        Args:
            params: The parameters.
            grads: Their gradients.
            state: The optimizer state by slot.
            lr: The learning rate.
            step_counts: The number of steps by name, including this one.
        """
        ...

    def capturable_step(
        self, params: Tensors, grads: Tensors, state: Slots, lr: torch.Tensor, step_counts: Tensors
    ) -> None:
        """Like `step` up to rounding, with `lr` and `step_counts` as tensors, so that a CUDA graph can capture it.

        Args:
            params: The parameters.
            grads: Their gradients.
            state: The optimizer state by slot.
            lr: The learning rate, a scalar on the device.
            step_counts: The number of steps by name, including this one; scalars on the device.
        """
        ...


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD, without dampening.

    Attributes:
        momentum: The momentum factor; 0 for none.
        weight_decay: The L2 penalty, added to the gradient.
        nesterov: Whether to use Nesterov momentum.
        uses_step_count: False: a step does not depend on the number of earlier steps.

    Raises:
        ValueError: If `nesterov` is set without momentum.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    uses_step_count: bool = False

    @property
    def name(self) -> str:
        """With momentum the name differs: rules derived for plain SGD are not valid with momentum."""
        return "sgd with momentum" if self.momentum else "sgd"

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("training.nesterov needs training.momentum above 0")

    def init(self, params: Tensors) -> dict[str, Tensors]:
        return {"momentum": zeros_like(params)} if self.momentum else {}

    def without_weight_decay(self) -> SGD:
        return replace(self, weight_decay=0.0)

    def step(self, params: Tensors, grads: Tensors, state: Slots, lr: float, step_counts: Mapping[str, int]) -> None:
        values, gradients = self._gradients(params, grads, state)
        torch_private.foreach_add_(values, gradients, alpha=-lr)

    def capturable_step(
        self, params: Tensors, grads: Tensors, state: Slots, lr: torch.Tensor, step_counts: Tensors
    ) -> None:
        values, gradients = self._gradients(params, grads, state)
        torch_private.foreach_sub_(values, torch_private.foreach_mul(gradients, lr))

    def _gradients(
        self, params: Tensors, grads: Tensors, state: Slots
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        values, gradients = [params[name] for name in grads], list(grads.values())
        if self.weight_decay:
            gradients = list(torch_private.foreach_add(gradients, values, alpha=self.weight_decay))
        if self.momentum:
            moments = [state["momentum"][name] for name in grads]
            torch_private.foreach_mul_(moments, self.momentum)
            torch_private.foreach_add_(moments, gradients)
            gradients = (
                list(torch_private.foreach_add(gradients, moments, alpha=self.momentum)) if self.nesterov else moments
            )
        return values, gradients


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW.

    Attributes:
        beta1: The decay of the first moment.
        beta2: The decay of the second moment.
        eps: Added to the denominator.
        weight_decay: The decoupled weight decay.
        name: The name that rules list in `optimizers`.
        uses_step_count: True: the bias correction depends on the number of earlier steps.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    name: str = "adamw"
    uses_step_count: bool = True

    def init(self, params: Tensors) -> dict[str, Tensors]:
        return {"first": zeros_like(params), "second": zeros_like(params)}

    def without_weight_decay(self) -> AdamW:
        return replace(self, weight_decay=0.0)

    def step(self, params: Tensors, grads: Tensors, state: Slots, lr: float, step_counts: Mapping[str, int]) -> None:
        values, gradients = [params[name] for name in grads], list(grads.values())
        first, second = ([state[slot][name] for name in grads] for slot in ("first", "second"))
        torch_private.foreach_mul_(values, 1 - lr * self.weight_decay)
        torch_private.foreach_lerp_(first, gradients, 1 - self.beta1)
        torch_private.foreach_mul_(second, self.beta2)
        torch_private.foreach_addcmul_(second, gradients, gradients, value=1 - self.beta2)
        spread = list(torch_private.foreach_sqrt(second))
        torch_private.foreach_div_(spread, [(1 - self.beta2 ** step_counts[name]) ** 0.5 for name in grads])
        torch_private.foreach_add_(spread, self.eps)
        torch_private.foreach_addcdiv_(
            values, first, spread, [-lr / (1 - self.beta1 ** step_counts[name]) for name in grads]
        )

    def capturable_step(
        self, params: Tensors, grads: Tensors, state: Slots, lr: torch.Tensor, step_counts: Tensors
    ) -> None:
        torch_private.fused_adamw_(
            [params[name] for name in grads],
            [gradient.contiguous() for gradient in grads.values()],
            [state["first"][name] for name in grads],
            [state["second"][name] for name in grads],
            [],
            [step_counts[name] for name in grads],
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule over rounds. After the warmup, `kind` says how the factor changes."""

    kind: Literal["constant", "cosine", "linear", "step"] = "constant"
    warmup: int = 0  # rounds of linear warmup
    floor: float = 0.0  # final factor of "cosine" and "linear"
    every: int = 10  # rounds between drops of "step"
    gamma: float = 0.1  # factor of each drop of "step"

    def factor(self, round: int, rounds: int) -> float:
        """Return the factor on the learning rate in a round, from 0, of a run of `rounds` rounds."""
        if round < self.warmup:
            return (round + 1) / (self.warmup + 1)
        done = (round - self.warmup) / max(1, rounds - self.warmup)
        match self.kind:
            case "constant":
                return 1.0
            case "cosine":
                return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
            case "linear":
                return 1.0 - (1 - self.floor) * done
            case "step":
                return float(self.gamma ** ((round - self.warmup) // self.every))


def warmup_factor(step: int, steps: int) -> float:
    """Return the factor on the learning rate at `step`, from 0, of a linear warm-up over `steps` steps."""
    return min(1.0, (step + 1) / (steps + 1))


def clip_gradients(grads: Tensors, norm: torch.Tensor, limit: float) -> Tensors:
    """Scale gradients of total norm `norm` to at most `limit`, as torch.nn.utils.clip_grad_norm_ does.

    Returns:
        New tensors; `grads` does not change.
    """
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return {name: grad * factor for name, grad in grads.items()}
