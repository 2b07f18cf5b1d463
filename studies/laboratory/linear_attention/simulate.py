"""Simulate FedFrozen's two stages for a batch of federations: full-batch gradient steps, all clients in every round.

The leading dimension (run, ...) is the batch of federations, and clients are one more dimension, so that one step of
all of them is a few batched products. A frozen round is an affine map of the value weights and is applied as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from linear_attention.synthetic import Federation
from linear_attention.theory import Data, Features, Kernel, Moments, loss, moments, round_map
from partita.methods.auto_warmup import SMOOTHING, default_threshold

DIVERGED = 1e6


@dataclass(frozen=True)
class Setting:
    """Hyperparameters of a simulation."""

    lr: float | torch.Tensor  # one for all runs, or (run,)
    steps: int  # a client's gradient steps per round
    rounds: int  # number of rounds
    ridge: float = 0.01  # ridge penalty of the loss


def step_size(federation: Federation, rate: float, features: Features) -> torch.Tensor:
    """Return `rate` divided by the largest initial curvature of any client, (run,), to make settings comparable."""
    gram = moments(federation.data, federation.kernel, features).gram
    curvature = torch.linalg.eigvalsh(gram)  # (run, client, width)
    return rate / curvature[..., -1].amax(-1)


@dataclass(frozen=True)
class Trace:
    """Weights of a run that never freezes, before the first round and after each, (round + 1, run, ...)."""

    kernel: Kernel
    value: torch.Tensor  # value weights, (round + 1, run, width, output)
    spread: torch.Tensor  # (round, run): weighted mean squared distance of clients' kernel updates from their mean

    def kernel_at(self, round: int) -> Kernel:
        """Return the kernel after `round` rounds."""
        return Kernel(self.kernel.query[round], self.kernel.key[round])


def warm_up(federation: Federation, setting: Setting, features: Features) -> Trace:
    """Run FedAvg with all weights trained in every round."""
    columns = Columns(federation.data)
    kernels, values, spreads = [federation.kernel], [federation.value], []
    for _ in range(setting.rounds):
        before = (*kernels[-1], values[-1])
        after = _local(columns, before, setting, features)
        deltas = [end - start.unsqueeze(-3) for end, start in zip(after, before, strict=True)]  # (run, client, ...)
        share = federation.data.weight[..., None, None]
        steps = [(share * delta).sum(-3) for delta in deltas]
        deviation = torch.cat(
            [delta - step.unsqueeze(-3) for delta, step in zip(deltas[:2], steps[:2], strict=True)], -1
        )
        spreads.append((federation.data.weight * deviation.square().sum((-1, -2))).sum(-1))
        query, key, value = (start + step for start, step in zip(before, steps, strict=True))
        kernels.append(Kernel(query, key))
        values.append(value)
    kernel = Kernel(*(torch.stack(sides) for sides in zip(*kernels, strict=True)))
    return Trace(kernel, torch.stack(values), torch.stack(spreads))


def _local(
    columns: Columns, before: Sequence[torch.Tensor], setting: Setting, features: Features
) -> Sequence[torch.Tensor]:
    """Return each client's query, key and value weights after its local steps, (run, client, ...)."""
    sizes = [weights.shape[-1] for weights in before]
    clients = columns.share.shape[-2]
    # Concatenate the weights, so that one product with the inputs serves all three.
    joined = torch.cat(list(before), -1)  # (run, width, 2 rank + output)
    current = joined.unsqueeze(-3).repeat_interleave(clients, -3)  # (run, client, width, 2 rank + output)
    lr = setting.lr[..., None, None, None] if isinstance(setting.lr, torch.Tensor) else setting.lr
    for _ in range(setting.steps):
        leaf = current.detach().requires_grad_()
        residual = columns.targets - columns.attention_output(leaf, sizes, features)
        value = leaf[..., -sizes[2] :]
        total = (residual.square().sum((-2, -3)) * columns.share).sum() / 2 + setting.ridge * value.square().sum() / 2
        # Clients are independent, so the gradient of the sum is each client's own gradient.
        [grad] = torch.autograd.grad(total, [leaf])
        current = current - lr * grad
    return current.split(sizes, -1)


class Columns:
    """The data with examples in the last dimension.

    Long contiguous rows are faster than computing Z, which would need many tiny matrix products.
    """

    def __init__(self, data: Data) -> None:
        self.tokens, self.share = data.inputs.shape[-2], data.share
        self.inputs = data.inputs.movedim(-3, -1).transpose(-3, -2).flatten(-2, -1).contiguous()  # (.., width, column)
        self.targets = data.targets.movedim(-3, -1).transpose(-3, -2).contiguous()  # (..., output, token, example)

    def attention_output(self, weights: torch.Tensor, sizes: Sequence[int], features: Features) -> torch.Tensor:
        """Return Z W, computed as φ(H Q) (φ(H K)ᵀ H W), (..., output, token, example).

        Args:
            weights: Query, key and value weights side by side, (..., width, column).
            sizes: The number of columns of each.
            features: Feature map of the attention.
        """
        query, key, value = (weights.transpose(-1, -2) @ self.inputs).split(list(sizes), -2)  # (..., rank, column)
        query, key = (features(part.transpose(-1, -2)).transpose(-1, -2) for part in (query, key))
        query, key, value = (part.unflatten(-1, (self.tokens, -1)) for part in (query, key, value))
        stored = (key.unsqueeze(-3) * value.unsqueeze(-4)).sum(-2)  # (..., feature, output, example)
        return (query.unsqueeze(-3) * stored.unsqueeze(-2)).sum(-4)


def frozen_stage(means: Moments, value: torch.Tensor, setting: Setting, rounds: int) -> torch.Tensor:
    """Return the value weights after a number of rounds with a fixed kernel, (..., width, output).

    Args:
        means: Moments of the data under the kernel.
        value: Value weights before the first of these rounds, (..., width, output).
        setting: Hyperparameters.
        rounds: Number of rounds.
    """
    matrix, constant = round_map(means, setting.ridge, setting.lr, setting.steps)
    for _ in range(rounds):
        value = matrix @ value + constant
    return value


def losses_by_warmup(federation: Federation, trace: Trace, setting: Setting, features: Features) -> torch.Tensor:
    """Return the final loss for each warm-up from 0 to all rounds, (warm-up, run), from a run that never freezes."""
    final = []
    for warmup in range(setting.rounds + 1):
        means = moments(federation.data, trace.kernel_at(warmup), features)
        value = frozen_stage(means, trace.value[warmup], setting, setting.rounds - warmup)
        final.append(loss(means, value, setting.ridge))
    return torch.stack(final)


def sharpness(federation: Federation, trace: Trace, setting: Setting, features: Features) -> torch.Tensor:
    """Return the largest learning rate times curvature over all clients and all kernels of the run, (run,).

    Below 2, every frozen stage converges, whenever it starts.
    """
    top = []
    for round in range(setting.rounds + 1):
        gram = moments(federation.data, trace.kernel_at(round), features).gram
        # eigvalsh needs finite values. A run that diverged is far above 2 in any case.
        curvature = torch.linalg.eigvalsh(gram.nan_to_num(DIVERGED).clamp(-DIVERGED, DIVERGED))
        top.append(curvature[..., -1].amax(-1) + setting.ridge)
    return torch.stack(top).amax(0) * setting.lr


def threshold_by_clients(weight: torch.Tensor) -> torch.Tensor:
    """Return the default threshold of `fedfrozen(warmup="auto")`, (run,), for the clients' weights (run, client)."""
    effective = 1 / weight.square().sum(-1)
    return torch.tensor([default_threshold(float(clients)) for clients in effective], dtype=weight.dtype)


def automatic_warmup(trace: Trace, threshold: float | torch.Tensor, patience: int) -> torch.Tensor:
    """Return the warm-up that `fedfrozen(warmup="auto")` would choose, (run,), from a run that never freezes.

    Args:
        trace: The run.
        threshold: Threshold of the rule, one for all runs or (run,), such as `threshold_by_clients`.
        patience: Patience of the rule.
    """
    weights = torch.cat(trace.kernel, -1)  # (round + 1, run, width, 2 rank)
    moves = weights[1:] - weights[:-1]
    progress, spread = torch.zeros_like(moves[0]), torch.zeros_like(trace.spread[0])
    streak = torch.zeros_like(spread)
    chosen = torch.full(spread.shape, len(moves))
    for round, (move, variance) in enumerate(zip(moves, trace.spread, strict=True)):
        progress = SMOOTHING * progress + (1 - SMOOTHING) * move
        spread = SMOOTHING * spread + (1 - SMOOTHING) * variance
        correction = 1 - SMOOTHING ** (round + 1)
        above = spread * correction > threshold**2 * progress.square().sum((-1, -2))
        streak = torch.where(above, streak + 1, 0.0)
        chosen = torch.where((streak >= patience) & (chosen == len(moves)), round + 1, chosen)
    return chosen
