"""FedALA: before training, each client mixes the received model into its own, with weights learned on its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev

import torch

from partita.core.client_rule import ClientRule, Context, GradientAt
from partita.core.data import Batch, Examples
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import input_side_names, layer_tag, layer_tags
from partita.core.options import Count, NotNegative, PositiveShare, Whole
from partita.core.personal_copy import PlanWithCopy, add_personal_copy, copy_name, personal_values
from partita.core.rng import Key
from partita.core.tensors import Slots, Tensors, equal, select, to

WINDOW = 10  # the weights have converged when the losses of so many passes hardly differ
WEIGHTS = "mixing"  # the slot of the weights


@dataclass(frozen=True)
class FedALAClient(ClientRule):
    """Training starts from own + (received - own) * W in the top layers, and from the received values below them.

    The client's own model is the personal copy. It starts where the shared model starts and takes the same steps, so
    after the round it is the trained model, while the shared parameters go up as a delta to what the client received.

    Attributes:
        layers: How many of the topmost layers are mixed, besides all parameters after the last layer.
        eta: The learning rate of W.
        share: The share of the client's examples on which W is learned.
        batch_size: The examples of one step of W.
        passes: The most passes over these examples when a client learns W for the first time.
        threshold: The standard deviation of the losses of the last passes below which it stops earlier.
    """

    layers: int
    eta: float
    share: float
    batch_size: int
    passes: int
    threshold: float
    slots = frozenset({WEIGHTS})
    uses_data = True

    def start(self, params: Tensors, examples: Examples, ctx: Context, key: Key) -> tuple[Tensors, Slots]:
        own = personal_values(params)
        if frozen := {copy_name(name) for name in own} - ctx.plan.train:
            raise MethodError(
                f"fedala: '{min(frozen)}' does not train in this round, so the client's own model would mix values of "
                "different rounds; use a plan that trains all parameters in every round"
            )
        received = select(params, own)
        mixed, notes = received, {}
        if not equal(own, received):  # otherwise, as in the first round, there is nothing to mix
            notes = {WEIGHTS: self._learn(own, received, examples, ctx, key)}
            mixed = {**received, **_mix(own, received, notes[WEIGHTS])}
        return {**mixed, **{copy_name(name): value for name, value in mixed.items()}}, notes

    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        return _copied(gradient_at({}), ctx)

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        return _copied(grads, ctx)  # with the corrections of the rules before this one

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        return {}, {WEIGHTS: weights} if (weights := ctx.notes.get(WEIGHTS)) else {}

    def _learn(self, own: Tensors, received: Tensors, examples: Examples, ctx: Context, key: Key) -> Tensors:
        """Learn W by gradient descent on the loss of the mixed model; one pass, or several for the first time."""
        names = self._mixed_names(ctx)
        first = WEIGHTS not in ctx.memory
        weights = {name: torch.ones_like(received[name]) for name in names} if first else ctx.memory[WEIGHTS]
        batches = self._batches(examples, key, next(iter(received.values())).device)
        losses: list[float] = []
        while True:
            for batch in batches:
                loss, grads = _gradient({**received, **_mix(own, received, weights)}, names, batch, ctx)
                weights = {
                    name: (weight - self.eta * grads[name] * (received[name] - own[name])).clamp(0.0, 1.0)
                    for name, weight in weights.items()
                }
            losses.append(loss)
            converged = len(losses) > WINDOW and pstdev(losses[-WINDOW:]) < self.threshold
            if not first or converged or len(losses) >= self.passes:
                return weights

    def _mixed_names(self, ctx: Context) -> list[str]:
        """The shared parameters of the topmost layers, and those after the last layer."""
        below = layer_tags(ctx.model)
        below = below[: max(0, len(below) - self.layers)]
        shared = (ctx.plan.down & ctx.plan.train) - input_side_names(ctx.model)
        return sorted(name for name in shared if layer_tag(ctx.model.tags[name]) not in below)

    def _batches(self, examples: Examples, key: Key, device: torch.device) -> list[Batch]:
        count = max(1, int(self.share * len(examples)))
        parts = torch.split((key / "sample").permutation(len(examples))[:count], self.batch_size)
        batches = [examples.take(part) for part in parts]
        return [Batch(to(batch.inputs, device), batch.targets.to(device)) for batch in batches]


def _mix(own: Tensors, received: Tensors, weights: Tensors) -> Tensors:
    # lerp returns exactly `received` where the weight is 1.
    return {name: torch.lerp(own[name], received[name], weight) for name, weight in weights.items()}


def _gradient(params: Tensors, names: Sequence[str], batch: Batch, ctx: Context) -> tuple[float, Tensors]:
    live = {name: params[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        loss = ctx.model.losses(ctx.model({**params, **live}, batch.inputs), batch.targets).mean()
    grads: Sequence[torch.Tensor] = torch.autograd.grad(loss, list(live.values()), materialize_grads=True)
    return float(loss.detach()), dict(zip(names, grads, strict=True))


def _copied(grads: Tensors, ctx: Context) -> Tensors:
    copies = {copy: grad for name, grad in grads.items() if (copy := copy_name(name)) in ctx.plan.train}
    return {**grads, **copies}


def fedala(
    layers: Whole = 1,
    eta: NotNegative = 1.0,
    share: PositiveShare = 0.8,
    batch_size: Count = 32,
    passes: Count = 50,
    threshold: NotNegative = 0.1,
) -> Method:
    """Build FedALA.

    Args:
        layers: How many of the topmost layers are mixed, besides the head. Those below are as received.
        eta: Learning rate of the mixing weights. 0: they stay at 1, and training starts from the received model.
        share: Share of the client's training examples on which the weights are learned.
        batch_size: Examples of one step of the weights.
        passes: Most passes over these examples when a client learns its weights for the first time. Later: one.
        threshold: Standard deviation of the losses of the last ten passes below which it stops earlier.

    Raises:
        MethodError: If an option is out of its range.
    """
    if min(layers, eta, threshold) < 0 or not 0 < share <= 1 or min(batch_size, passes) < 1:
        raise MethodError(
            f"method.layers is {layers}, eta {eta}, share {share}, batch_size {batch_size}, passes {passes} and "
            f"threshold {threshold}; give 0 or more for layers, eta and threshold, a share above 0 and up to 1, and 1 "
            "or more for the others"
        )
    return Method(
        "fedala",
        plan=PlanWithCopy(),
        client_rules=(FedALAClient(layers, eta, share, batch_size, passes, threshold),),
        extend=lambda model, key: add_personal_copy(model),
    )
