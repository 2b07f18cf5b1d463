"""FedFrozen's two stages for many federations at once: full-batch gradient steps, every client in every round.

The leading dimension (run, ...) holds federations side by side; clients are one more dimension, so that a step of all
of them is a few batched products. A frozen round is an affine map of the value weights, and is applied as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.lab.synthetic import Federation
from partita.lab.theory import Data, Features, Kernel, Moments, loss, moments, round_map
from partita.methods.auto_warmup import SMOOTHING

DIVERGED = 1e6


@dataclass(frozen=True)
class Setting:
    lr: float | Tensor  # one for all, or (run,)
    steps: int  # a client's gradient steps in a round
    rounds: int
    ridge: float = 0.01


def step_size(world: Federation, rate: float, features: Features) -> Tensor:
    """(run,): a rate relative to the steepest client's curvature at the start, so that settings can be compared."""
    curvature = torch.linalg.eigvalsh(moments(world.data, world.kernel, features).gram)  # (run, client, width)
    return rate / curvature[..., -1].amax(-1)


@dataclass(frozen=True)
class Trace:
    """A run that never freezes, before the first round and after each: (round + 1, run, ...)."""

    kernel: Kernel
    value: Tensor
    spread: Tensor  # (round, run), the weighted mean square distance of clients' kernel updates from their mean

    def kernel_at(self, round: int) -> Kernel:
        return Kernel(self.kernel.query[round], self.kernel.key[round])


def warm_up(world: Federation, setting: Setting, features: Features) -> Trace:
    """All weights train in every round."""
    columns = Columns(world.data)
    kernels, values, spreads = [world.kernel], [world.value], []
    for _ in range(setting.rounds):
        before = (*kernels[-1], values[-1])
        after = _local(columns, before, setting, features)
        deltas = [end - start.unsqueeze(-3) for end, start in zip(after, before, strict=True)]  # (run, client, ...)
        share = world.data.weight[..., None, None]
        steps = [(share * delta).sum(-3) for delta in deltas]
        apart = torch.cat([delta - step.unsqueeze(-3) for delta, step in zip(deltas[:2], steps[:2], strict=True)], -1)
        spreads.append((world.data.weight * apart.square().sum((-1, -2))).sum(-1))
        query, key, value = (start + step for start, step in zip(before, steps, strict=True))
        kernels.append(Kernel(query, key))
        values.append(value)
    kernel = Kernel(*(torch.stack(sides) for sides in zip(*kernels, strict=True)))
    return Trace(kernel, torch.stack(values), torch.stack(spreads))


def _local(columns: Columns, before: Sequence[Tensor], setting: Setting, features: Features) -> Sequence[Tensor]:
    """The query, key and value weights that each client holds after its steps: (run, client, ...)."""
    sizes = [each.shape[-1] for each in before]
    clients = columns.share.shape[-2]
    # Side by side in one tensor, so that one product with the inputs serves all three.
    joined = torch.cat(list(before), -1)  # (run, width, 2 rank + output)
    now = joined.unsqueeze(-3).repeat_interleave(clients, -3)  # (run, client, width, 2 rank + output)
    lr = setting.lr[..., None, None, None] if isinstance(setting.lr, Tensor) else setting.lr
    for _ in range(setting.steps):
        live = now.detach().requires_grad_()
        miss = columns.targets - columns.respond(live, sizes, features)
        value = live[..., -sizes[2] :]
        total = (miss.square().sum((-2, -3)) * columns.share).sum() / 2 + setting.ridge * value.square().sum() / 2
        # Clients share no arithmetic, so the slope of the sum is each one's own.
        [slope] = torch.autograd.grad(total, [live])
        now = now - lr * slope
    return now.split(sizes, -1)


class Columns:
    """The data with examples in the last dimension: long contiguous rows, where Z would be many tiny products."""

    def __init__(self, data: Data) -> None:
        self.tokens, self.share = data.inputs.shape[-2], data.share
        self.inputs = data.inputs.movedim(-3, -1).transpose(-3, -2).flatten(-2, -1).contiguous()  # (.., width, column)
        self.targets = data.targets.movedim(-3, -1).transpose(-3, -2).contiguous()  # (..., output, token, example)

    def respond(self, weights: Tensor, sizes: Sequence[int], features: Features) -> Tensor:
        """Z W as φ(H Q) (φ(H K)ᵀ H W): (..., output, token, example)."""
        query, key, value = (weights.transpose(-1, -2) @ self.inputs).split(list(sizes), -2)  # (..., rank, column)
        query, key = (features(each.transpose(-1, -2)).transpose(-1, -2) for each in (query, key))
        query, key, value = (each.unflatten(-1, (self.tokens, -1)) for each in (query, key, value))
        stored = (key.unsqueeze(-3) * value.unsqueeze(-4)).sum(-2)  # (..., feature, output, example)
        return (query.unsqueeze(-3) * stored.unsqueeze(-2)).sum(-4)


def frozen_stage(means: Moments, value: Tensor, setting: Setting, rounds: int) -> Tensor:
    """The value weights after so many rounds under a fixed kernel."""
    matrix, constant = round_map(means, setting.ridge, setting.lr, setting.steps)
    for _ in range(rounds):
        value = matrix @ value + constant
    return value


def losses_by_warmup(world: Federation, trace: Trace, setting: Setting, features: Features) -> Tensor:
    """(warm-up, run): the final loss for each warm-up from 0 to all rounds, from one run that never freezes."""
    final = []
    for warmup in range(setting.rounds + 1):
        means = moments(world.data, trace.kernel_at(warmup), features)
        value = frozen_stage(means, trace.value[warmup], setting, setting.rounds - warmup)
        final.append(loss(means, value, setting.ridge))
    return torch.stack(final)


def sharpness(world: Federation, trace: Trace, setting: Setting, features: Features) -> Tensor:
    """(run,): the largest step size times curvature that any client would meet under any kernel of the run.

    Below 2 every frozen stage converges, whenever it starts.
    """
    top = []
    for round in range(setting.rounds + 1):
        gram = moments(world.data, trace.kernel_at(round), features).gram
        # A run that blew up is far beyond 2 in any case, and eigvalsh takes only numbers.
        curvature = torch.linalg.eigvalsh(gram.nan_to_num(DIVERGED).clamp(-DIVERGED, DIVERGED))
        top.append(curvature[..., -1].amax(-1) + setting.ridge)
    return torch.stack(top).amax(0) * setting.lr


def automatic_warmup(trace: Trace, threshold: float, patience: int) -> Tensor:
    """(run,): the warm-up that `fedfrozen(warmup="auto")` would choose, from a run that never freezes."""
    weights = torch.cat(trace.kernel, -1)  # (round + 1, run, width, 2 rank)
    moves = weights[1:] - weights[:-1]
    progress, spread = torch.zeros_like(moves[0]), torch.zeros_like(trace.spread[0])
    streak = torch.zeros_like(spread)
    chosen = torch.full(spread.shape, len(moves))
    for round, (move, apart) in enumerate(zip(moves, trace.spread, strict=True)):
        progress = SMOOTHING * progress + (1 - SMOOTHING) * move
        spread = SMOOTHING * spread + (1 - SMOOTHING) * apart
        started = 1 - SMOOTHING ** (round + 1)
        above = spread * started > threshold**2 * progress.square().sum((-1, -2))
        streak = torch.where(above, streak + 1, 0.0)
        chosen = torch.where((streak >= patience) & (chosen == len(moves)), round + 1, chosen)
    return chosen
