"""Local optimizers as functions of tensors: element-wise, so a block of clients steps as each would alone.

The operations and their order are those of torch.optim, so that one client equals a plain loop bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from partita.core.tensors import Slots, Tensors, zeros_like


class Optimizer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def ages(self) -> bool:
        """Whether a step depends on how many came before; clients of different ages are then not put in one block."""
        ...

    def init(self, params: Tensors) -> dict[str, Tensors]: ...

    def step(self, params: Tensors, grads: Tensors, state: Slots, lr: float, ages: Mapping[str, int]) -> None:
        """Moves params and state in place; ages counts this step too."""
        ...

    def step_by_tensors(self, params: Tensors, grads: Tensors, state: Slots, lr: Tensor, ages: Tensors) -> None:
        """The same to rounding, where the rate and the ages are tensors: nothing is looked up while a GPU works."""
        ...


@dataclass(frozen=True)
class SGD:
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    ages: bool = False

    @property
    def name(self) -> str:
        """Momentum is a name of its own: rules derived for plain SGD are wrong with it."""
        return "sgd with momentum" if self.momentum else "sgd"

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("training.nesterov needs training.momentum above 0")

    def init(self, params: Tensors) -> dict[str, Tensors]:
        return {"momentum": zeros_like(params)} if self.momentum else {}

    def step(self, params: Tensors, grads: Tensors, state: Slots, lr: float, ages: Mapping[str, int]) -> None:
        values, slopes = self._slopes(params, grads, state)
        torch._foreach_add_(values, slopes, alpha=-lr)

    def step_by_tensors(self, params: Tensors, grads: Tensors, state: Slots, lr: Tensor, ages: Tensors) -> None:
        values, slopes = self._slopes(params, grads, state)
        torch._foreach_sub_(values, torch._foreach_mul(slopes, lr))

    def _slopes(self, params: Tensors, grads: Tensors, state: Slots) -> tuple[list[Tensor], list[Tensor]]:
        values, slopes = [params[name] for name in grads], list(grads.values())
        if self.weight_decay:
            slopes = list(torch._foreach_add(slopes, values, alpha=self.weight_decay))
        if self.momentum:
            moments = [state["momentum"][name] for name in grads]
            torch._foreach_mul_(moments, self.momentum)
            torch._foreach_add_(moments, slopes)
            slopes = list(torch._foreach_add(slopes, moments, alpha=self.momentum)) if self.nesterov else moments
        return values, slopes


@dataclass(frozen=True)
class AdamW:
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    name: str = "adamw"
    ages: bool = True

    def init(self, params: Tensors) -> dict[str, Tensors]:
        return {"first": zeros_like(params), "second": zeros_like(params)}

    def step(self, params: Tensors, grads: Tensors, state: Slots, lr: float, ages: Mapping[str, int]) -> None:
        values, slopes = [params[name] for name in grads], list(grads.values())
        first, second = ([state[slot][name] for name in grads] for slot in ("first", "second"))
        torch._foreach_mul_(values, 1 - lr * self.weight_decay)
        torch._foreach_lerp_(first, slopes, 1 - self.beta1)
        torch._foreach_mul_(second, self.beta2)
        torch._foreach_addcmul_(second, slopes, slopes, value=1 - self.beta2)
        spread = list(torch._foreach_sqrt(second))
        torch._foreach_div_(spread, [(1 - self.beta2 ** ages[name]) ** 0.5 for name in grads])
        torch._foreach_add_(spread, self.eps)
        torch._foreach_addcdiv_(values, first, spread, [-lr / (1 - self.beta1 ** ages[name]) for name in grads])

    def step_by_tensors(self, params: Tensors, grads: Tensors, state: Slots, lr: Tensor, ages: Tensors) -> None:
        torch._fused_adamw_(
            [params[name] for name in grads],
            [slope.contiguous() for slope in grads.values()],
            [state["first"][name] for name in grads],
            [state["second"][name] for name in grads],
            [],
            [ages[name] for name in grads],
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
    """The learning rate by round, as a factor on the given rate."""

    kind: Literal["constant", "cosine", "linear", "step"] = "constant"
    warmup: int = 0  # rounds of linear rise
    floor: float = 0.0  # where cosine and linear end
    every: int = 10  # step: rounds between drops
    gamma: float = 0.1  # step: factor of a drop

    def factor(self, round: int, rounds: int) -> float:
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


def clip(grads: Tensors, norm: Tensor, limit: float) -> Tensors:
    """Scale to at most the limit, as torch.nn.utils.clip_grad_norm_ does."""
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return {name: grad * factor for name, grad in grads.items()}
