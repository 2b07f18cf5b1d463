"""FedOpt: Adam, Yogi or Adagrad at the server, with the mean update as pseudo-gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.options import NotNegative, PartialShare, Positive, Share
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Slots, zeros_like
from partita.core.update import Aggregate

# (second moment, squared delta) -> second moment
Square: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"


@dataclass(frozen=True)
class FedOptServer(ServerRule):
    """Server step w + lr · first / (sqrt(second) + tau).

    The age of a parameter counts only the rounds in which it was sent.

    Attributes:
        lr: The server learning rate.
        beta1: The decay of the first moment.
        tau: Added to the square root of the second moment.
        square: Returns the new second moment from the old one and the squared mean update.
        debias: The decay of the second moment, to correct both moments for their start at zero; None for no correction.
    """

    lr: float
    beta1: float
    tau: float
    square: Square
    debias: float | None = None

    def init(self, model: Model) -> Slots:
        start = {name: torch.full_like(value, self.tau**2) for name, value in model.initial.items()}
        ages = {name: torch.tensor(0) for name in model.initial}
        zeros = zeros_like(model.initial)
        return {"first": zeros, "second": start if self.debias is None else zeros, "age": ages}

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        state, delta = {slot: dict(part) for slot, part in server.state.items()}, {}
        for name, value in aggregate.delta.items():
            first = state["first"][name] = self.beta1 * state["first"][name] + (1 - self.beta1) * value
            second = state["second"][name] = self.square(state["second"][name], value * value)
            age = state["age"][name] = state["age"][name] + 1
            if self.debias is not None:
                first, second = first / (1 - self.beta1 ** int(age)), second / (1 - self.debias ** int(age))
            delta[name] = self.lr * first / (second.sqrt() + self.tau)
        return replace(super().apply(server, replace(aggregate, delta=delta)), state=state)


def fedadam(
    lr: NotNegative = 0.01,
    beta1: PartialShare = 0.9,
    beta2: PartialShare = 0.99,
    tau: Positive = 0.001,
    debias: bool = True,
) -> Method:
    """Build FedAdam.

    Args:
        lr: Server learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        tau: Added to the square root of the second moment.
        debias: Correct both moments for their start at zero, as in torch.optim.Adam.
    """
    _check(tau, beta1, beta2)
    rule = FedOptServer(lr, beta1, tau, lambda old, new: beta2 * old + (1 - beta2) * new, beta2 if debias else None)
    return Method("fedadam", server_rule=rule)


def fedyogi(lr: NotNegative = 0.01, beta1: PartialShare = 0.9, beta2: Share = 0.99, tau: Positive = 0.001) -> Method:
    """Build FedYogi: Adam with a second moment that shrinks no faster than it grows.

    Args:
        lr: Server learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        tau: Added to the square root of the second moment.
    """
    _check(tau, beta1, beta2)
    rule = FedOptServer(lr, beta1, tau, lambda old, new: old - (1 - beta2) * new * torch.sign(old - new))
    return Method("fedyogi", server_rule=rule)


def fedadagrad(lr: NotNegative = 0.01, beta1: PartialShare = 0.0, tau: Positive = 0.001) -> Method:
    """Build FedAdagrad: the second moment is the sum of all squared mean updates.

    Args:
        lr: Server learning rate.
        beta1: Decay of the first moment.
        tau: Added to the square root of the second moment.
    """
    _check(tau, beta1)
    return Method("fedadagrad", server_rule=FedOptServer(lr, beta1, tau, torch.add))


def _check(tau: float, beta1: float, beta2: float = 0.0) -> None:
    if not (0 <= beta1 < 1 and 0 <= beta2 <= 1 and tau > 0):
        raise MethodError(
            f"method.beta1 is {beta1}, beta2 {beta2}, tau {tau}; betas must be between 0 and 1, tau above 0"
        )
