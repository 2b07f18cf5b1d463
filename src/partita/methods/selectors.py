"""Choose the layers that a client trains: by attention, by gradients, at random, in turn, or always the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from partita.core import tensors
from partita.core.client_rule import ClientRule, Context, LayerSelection, PrivacyRelease
from partita.core.data import Batch, Examples
from partita.core.method_error import MethodError
from partita.core.model import ATTENTION, TokenChoice, input_side_names, layer_number, layer_tag, layer_tags
from partita.core.noise import add_noise, gaussian_noise
from partita.core.plan import NO_NAMES, Plan
from partita.core.rng import Key
from partita.core.tensors import Names, Slots, Tensors

PROBE_BATCH = 64  # examples per forward pass
ROUND, HEADS = "layers_round", "layers_heads"  # slots in which a client stores a choice for later rounds

Count = int | float  # a number, or a fraction of the total
T = TypeVar("T")


@dataclass(frozen=True)
class Ranking:
    """Scores of layers.

    Attributes:
        scores: Score by layer. Higher scores rank first.
        reported: Whether the scores are reported as metrics. True if they depend on data.
        heads: Scores of the heads by layer, (head,). May be empty.
    """

    scores: Mapping[str, float]
    reported: bool = False
    heads: Tensors = field(default_factory=dict)


class Selector(Protocol):
    """Ranks the layers for one client in one round. The caller takes the first `count`."""

    @property
    def name(self) -> str:
        """The value of `method.select`, and the prefix of the metrics."""
        ...

    def rank(self, layers: Sequence[str], count: int, examples: Examples, ctx: Context, key: Key) -> Ranking:
        """Score the layers.

        Args:
            layers: The layer tags to rank, from the input to the output.
            count: How many layers the client trains.
            examples: The client's training examples.
            ctx: The context of `ClientRule.narrow`.
            key: The random key of this rule, client and round.
        """
        ...


@dataclass(frozen=True)
class Attention:
    """Rank by the fraction of attention that goes to the chosen tokens, averaged over a probe of the client's examples.

    With noise, the probe is a Poisson sample and each example's scores are clipped to an L2 norm of `clip`. Only the
    direction of their noisy sum is used, because its length would reveal the size of the sample.
    """

    tokens: TokenChoice = "auto"
    probe: Count = 32
    noise: float = 0.0
    clip: float = 1.0
    name: str = "attention"

    def rank(self, layers: Sequence[str], count: int, examples: Examples, ctx: Context, key: Key) -> Ranking:
        attention = self._attention_scores(layers, examples, ctx, key)  # by layer, (example, head)
        scores = torch.stack([attention[layer].mean(1) for layer in layers], 1)  # (example, layer)
        if self.noise:
            total, std = clip_rows(scores.double(), self.clip).sum(0).cpu(), self.noise * self.clip
            noisy = add_noise(total, gaussian_noise({"scores": total}, key / "noise", std)["scores"], std)
            return Ranking(_named(layers, noisy / noisy.norm().clamp(min=1e-12)), reported=True)
        mean = scores.mean(0)
        for informative, fault in ((mean > 0, "has a token of"), (mean < 1 - 1e-6, "has a token outside")):
            if not bool(informative.any()):
                chosen = f"'{self.tokens}'" if isinstance(self.tokens, str) else list(self.tokens)
                raise MethodError(
                    f"none of the {len(scores)} examples in a client's probe {fault} method.tokens = {chosen}, "
                    "so all layers have the same score; increase method.probe or choose other tokens"
                )
        heads = {layer: attention[layer].mean(0) for layer in layers}
        return Ranking(_named(layers, mean), reported=True, heads=heads)

    def _attention_scores(self, layers: Sequence[str], examples: Examples, ctx: Context, key: Key) -> Tensors:
        count = len(examples)
        places = (key / "probe").poisson(count, self.probe) if self.noise else sample(count, self.probe, key)
        parts = [
            ctx.model.attention(ctx.anchor, batch, self.tokens) for batch in _batches(examples, places, ctx.anchor)
        ]
        if not parts:  # a Poisson sample may be empty
            return {layer: torch.zeros(0, 1) for layer in layers}
        if missing := set(layers) - parts[0].keys():
            raise MethodError(f"{ctx.model.name} returns no attention for {min(missing)}; choose another method.select")
        return {layer: torch.cat([part[layer] for part in parts]) for layer in layers}


@dataclass(frozen=True)
class Gradient:
    """Rank by the gradient norm of the mean loss on a probe of the client's examples."""

    probe: Count = 32
    name: str = "gradient"

    def rank(self, layers: Sequence[str], count: int, examples: Examples, ctx: Context, key: Key) -> Ranking:
        names = sorted(ctx.plan.train & ctx.model.names(*layers))
        total = tensors.zeros_like(tensors.select(ctx.anchor, names))
        places = sample(len(examples), self.probe, key)
        for batch in _batches(examples, places, ctx.anchor):
            live = {name: ctx.anchor[name].detach().requires_grad_() for name in names}
            losses = ctx.model.losses(ctx.model({**ctx.anchor, **live}, batch.inputs), batch.targets)
            grads = torch.autograd.grad(losses.sum() / len(places), list(live.values()), allow_unused=True)
            total = tensors.add(total, {n: grad for n, grad in zip(names, grads, strict=True) if grad is not None})
        norms = [tensors.norm(tensors.select(total, ctx.model.names(layer) & total.keys())) for layer in layers]
        return Ranking(_named(layers, torch.stack(norms)), reported=True)


@dataclass(frozen=True)
class Random:
    """Rank at random, with a new draw for each client and round.

    With `common`, the draw is the same for all clients, and holds for `every` rounds from rounds 0, `every`, 2 `every`
    and so on.
    """

    common: bool = False
    every: int = 1
    name: str = "random"

    def rank(self, layers: Sequence[str], count: int, examples: Examples, ctx: Context, key: Key) -> Ranking:
        if self.common:
            assert ctx.shared_key is not None
            key = ctx.shared_key / "layers" / (ctx.round_info.round // self.every)
        return Ranking({layer: (key / layer).uniform() for layer in layers})


@dataclass(frozen=True)
class Static:
    """Rank the same layers first in every round: the given ones, or the topmost."""

    layers: tuple[int, ...] = ()  # numbers of layers; empty for the topmost
    name: str = "static"

    def rank(self, layers: Sequence[str], count: int, examples: Examples, ctx: Context, key: Key) -> Ranking:
        known = layer_tags(ctx.model)
        if wrong := [number for number in self.layers if f"layer.{number}" not in known]:
            raise MethodError(
                f"method.layers names layer {wrong[0]}, but {ctx.model.name} has {len(known)}, from 0 to "
                f"{len(known) - 1}"
            )
        first = {f"layer.{number}" for number in self.layers}
        return Ranking({layer: place + len(layers) * (layer in first) for place, layer in enumerate(layers)})


@dataclass(frozen=True)
class RoundRobin:
    """Advance by `count` layers per round, from the lowest layer up, and wrap around."""

    name: str = "round-robin"

    def rank(self, layers: Sequence[str], count: int, examples: Examples, ctx: Context, key: Key) -> Ranking:
        first = ctx.round_info.round * count
        return Ranking({layer: -((place - first) % len(layers)) for place, layer in enumerate(layers)})


@dataclass(frozen=True)
class TopLayers(ClientRule):
    """Train and send the layers that rank highest on this client, and always the parameters after the last layer.

    Only layers that the incoming plan trains are candidates.

    Without a release, a client ranks its layers when it has no choice, or one that is `every` rounds old. With one, the
    rounds in which it ranks must not depend on what it remembers, because each ranking is charged: they are 0,
    `release_every`, 2 `release_every` and so on. In other rounds it uses its last choice. A client that has none,
    because it joined later or lost its memory, trains layers spread evenly from the first to the last.
    """

    select: Selector
    k: Count  # layers per client, as a number or a fraction
    capacity: tuple[tuple[str, Count], ...] = ()  # (client, count): replaces k
    embeddings: bool = False  # also train the parameters before the first layer
    every: int = 1  # rounds for which a choice is kept
    slots: Names = NO_NAMES
    uses_data: bool = False
    release: PrivacyRelease | None = None
    release_every: int = 1

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        round, client = ctx.round_info.round, ctx.round_info.client
        inside: dict[str, set[str]] = {}
        for name in plan.train:
            if layer := layer_tag(ctx.model.tags[name]):
                inside.setdefault(layer, set()).add(name)
        always = plan.train.difference(*inside.values(), NO_NAMES if self.embeddings else input_side_names(ctx.model))
        if not inside:
            return LayerSelection(always)
        layers = sorted(inside, key=layer_number)
        chosen, made, metrics, heads = self._remembered(layers, round, ctx)
        count = resolve_count(dict(self.capacity).get(client, self.k), len(layer_tags(ctx.model)))
        if not chosen and round % self.release_every:
            others = spread_evenly(layers, min(count, len(layers)))
            return LayerSelection(always.union(*(inside[layer] for layer in others)))
        if not chosen:
            ranking = self.select.rank(layers, count, probe, ctx, key)
            chosen, made, heads = (
                sorted(layers, key=lambda layer: -ranking.scores[layer])[:count],
                round,
                ranking.heads,
            )
            metrics = (
                {f"{self.select.name}/{layer}": ranking.scores[layer] for layer in layers} if ranking.reported else {}
            )
        names = frozenset[str]().union(*(inside[layer] for layer in chosen))
        notes: Slots = {
            ATTENTION: heads,
            ROUND: {name: torch.tensor(made) for name in names},
            HEADS: {name: heads[layer] for layer in chosen if layer in heads for name in inside[layer]},
        }
        return LayerSelection(always | names, notes, metrics)

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        return {}, {slot: ctx.notes[slot] for slot in self.slots if slot in ctx.notes}

    def _remembered(
        self, layers: Sequence[str], round: int, ctx: Context
    ) -> tuple[list[str], int, dict[str, float], Tensors]:
        """Return the stored choice while it is valid: layers, round of the choice, metrics (none), head scores."""
        tags = ctx.model.tags
        made = {
            name: int(value) for name, value in ctx.memory.get(ROUND, {}).items() if layer_tag(tags[name]) in layers
        }
        last = max(made.values(), default=-self.every)
        due = round % self.release_every == 0 if self.release_every > 1 else round - last >= self.every
        if due or not made:
            return [], round, {}, {}
        names = [name for name, when in made.items() if when == last]
        known = ctx.memory.get(HEADS, {})
        heads = {layer: known[name] for name in names if name in known and (layer := layer_tag(tags[name]))}
        return [layer for layer in layers if any(layer in tags[name] for name in names)], last, {}, heads


def resolve_count(count: Count, layers: int) -> int:
    """Convert a number or fraction of layers to a number from 1 to `layers`.

    Raises:
        MethodError: If `count` is not above 0, or is a fraction above 1.
    """
    if not count > 0 or (isinstance(count, float) and count > 1):
        raise MethodError(
            f"method.k is {count}; give a number of layers from 1 up, or a fraction above 0.0 and up to 1.0"
        )
    return min(layers, max(1, round(count * layers) if isinstance(count, float) else count))


def spread_evenly(items: Sequence[T], count: int) -> list[T]:
    """Return `count` items, evenly spread from the first to the last."""
    last = len(items) - 1
    return [items[round(place * last / max(1, count - 1))] for place in range(count)]


def sample(examples: int, probe: Count, key: Key) -> torch.Tensor:
    """Draw a probe: a number of examples, or a fraction of them, at least one.

    Args:
        examples: The number of examples to draw from.
        probe: How many to draw, as a number or a fraction.
        key: The random key.

    Returns:
        Example indices, of shape (drawn,).
    """
    size = max(1, round(probe * examples)) if isinstance(probe, float) else probe
    return (key / "probe").permutation(examples)[:size]


def clip_rows(rows: torch.Tensor, norm: float) -> torch.Tensor:
    """Scale rows down to at most the given L2 norm, and return them in the same shape, (example, layer)."""
    lengths: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows * (norm / lengths.clamp(min=norm))


def _batches(examples: Examples, places: torch.Tensor, anchor: Tensors) -> Iterator[Batch]:
    device = next(iter(anchor.values())).device
    for chunk in torch.split(places, PROBE_BATCH) if len(places) else ():
        batch = examples.take(chunk)
        yield Batch(tensors.to(batch.inputs, device), batch.targets.to(device))


def _named(layers: Sequence[str], scores: torch.Tensor) -> dict[str, float]:
    return dict(zip(layers, scores.tolist(), strict=True))
