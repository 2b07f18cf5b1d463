"""FedAdamW: clients start AdamW from a common second moment, and follow the last global update in every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from partita.core.client_rule import ClientRule, Context
from partita.core.method import Method
from partita.core.model import Model
from partita.core.options import NotNegative
from partita.core.rng import Key
from partita.core.server_rule import Server, ServerRule, average
from partita.core.tensors import Names, Slots, Tensors, zeros_like
from partita.core.update import Aggregate, Update
from partita.core.update_transform import UpdateTransform

SECOND = "second"  # AdamW's second moment; one number per block at the server and on the way
AGE = "age"  # the number of steps that the second moment has seen
STEP = "step"  # the mean local step of the last round
STEPS = "steps"  # the mean number of local steps of a round


@dataclass(frozen=True)
class FedAdamWClient(ClientRule):
    """Start from the common second moment, and add `alpha` times the last round's mean step to every step.

    Attributes:
        alpha: The weight of the mean step.
        share_moments: Whether clients start from the common second moment.
    """

    alpha: float
    share_moments: bool
    slots: Names = frozenset({SECOND})
    optimizers: Names | None = frozenset({"adamw", "adamw with unequal learning rates"})

    def optimizer_state(self, ctx: Context) -> Slots:
        if not self.share_moments:
            return {}
        names = sorted(ctx.plan.train)
        ages = torch.stack([ctx.sent[AGE][name] for name in names]).tolist()  # reads a GPU once
        known = {name: age for name, age in zip(names, ages, strict=True) if age}
        second = {name: spread(ctx.sent[SECOND][name], ctx.anchor[name]) for name in known}
        return {SECOND: second, AGE: {name: torch.tensor(age) for name, age in known.items()}}

    def after_step(self, params: Tensors, ctx: Context) -> Tensors:
        if not self.alpha:
            return params
        return {name: value + self.alpha * ctx.sent[STEP][name] for name, value in params.items()}

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        if not self.share_moments:
            return {}, {}
        found = ctx.optimizer.get(SECOND, {})
        return {SECOND: {n: found[n] if n in found else torch.zeros_like(params[n]) for n in sorted(ctx.plan.up)}}, {}


@dataclass(frozen=True)
class BlockMeans(UpdateTransform):
    """Send one number per block of the second moment."""

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        return _with_second(update, lambda value, name: block_means(value)), {}

    def decode_update(self, update: Update) -> Update:
        return _with_second(update, lambda means, name: spread(means, update.delta[name]))


@dataclass(frozen=True)
class FedAdamWServer(ServerRule):
    """Average the second moments by block, and send them with the mean step.

    Attributes:
        alpha: The weight of the mean step; with 0 the step is not sent.
        share_moments: Whether to send the second moment.
    """

    alpha: float
    share_moments: bool

    def init(self, model: Model) -> Slots:
        ages = {name: torch.zeros((), dtype=torch.int64, device=value.device) for name, value in model.initial.items()}
        moments = {SECOND: {name: block_means(torch.zeros_like(v)) for name, v in model.initial.items()}, AGE: ages}
        return {**(moments if self.share_moments else {}), **({STEP: zeros_like(model.initial)} if self.alpha else {})}

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        return super().send(server, client, names)[0], server.state

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        steps, weights = Counter[str](), Counter[str]()

        def counted() -> Iterator[Update]:
            for update in updates:
                for name in update.delta:
                    steps[name] += update.weight * update.steps[name]  # type: ignore[assignment]
                    weights[name] += update.weight  # type: ignore[assignment]
                yield _with_second(update, lambda value, name: block_means(value))

        aggregate = average(counted())
        mean_steps = {name: torch.tensor(steps[name] / weights[name]) for name in steps}
        return replace(aggregate, slots={**aggregate.slots, STEPS: mean_steps})

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        state = {slot: dict(part) for slot, part in server.state.items()}
        for name, delta in aggregate.delta.items():
            steps = float(aggregate.slots[STEPS][name])
            if self.alpha:
                state[STEP][name] = delta / steps
            if self.share_moments:
                state[SECOND][name] = aggregate.slots[SECOND][name].clamp(min=0)  # a client can send anything
                state[AGE][name] = state[AGE][name] + round(steps)
        return replace(super().apply(server, aggregate), state=state)


def block_means(value: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row of a matrix, of shape (row,), or the mean of a vector, a scalar."""
    return value.flatten(1).mean(1) if value.ndim > 1 else value.mean()


def spread(means: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of the shape of `like` with the mean of its block in each place."""
    return means.view(-1, *[1] * (like.ndim - 1)).expand(like.shape) if like.ndim > 1 else means.expand(like.shape)


def fedadamw(alpha: NotNegative = 0.5, share_moments: bool = True) -> Method:
    """Build FedAdamW.

    Args:
        alpha: Weight of the last round's mean step in every local step; 0 for none.
        share_moments: Whether clients start from the common second moment, instead of zero.
    """
    return Method(
        "fedadamw",
        client_rules=(FedAdamWClient(alpha, share_moments),),
        transforms=(BlockMeans(),),
        server_rule=FedAdamWServer(alpha, share_moments),
    )


def _with_second(update: Update, change: Callable[[torch.Tensor, str], torch.Tensor]) -> Update:
    if SECOND not in update.slots:
        return update
    changed = {name: change(value, name) for name, value in update.slots[SECOND].items()}
    return replace(update, slots={**update.slots, SECOND: changed})
