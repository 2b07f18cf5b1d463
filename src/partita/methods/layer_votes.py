"""Agree on the layers of a round: clients vote, and all clients of the next rounds train the layers with most votes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from partita.core.client_rule import ClientRule, Context, PrivacyRelease
from partita.core.data import Examples
from partita.core.method_error import MethodError
from partita.core.model import ATTENTION, Model, input_side_names, layer_tags
from partita.core.plan import NO_NAMES, Plan, RoundInfo, share, share_everything
from partita.core.rng import Key
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Names, Slots, Tensors
from partita.core.update import Aggregate
from partita.methods.selectors import Count, Selector, resolve_count, spread_evenly

VOTES, BALLOT = "layer_votes", "ballot"  # the slot that travels, and the note that fills it
AGREED = "agreed_layers"  # the server's state: 1 for each layer that trains, 0 for the others
DIGITS = 4  # digits of a share of votes that count; fewer than float32 and fixed point have, so that ties are ties


@dataclass(frozen=True)
class AgreedPlan:
    """Plan of the agreed layers and the parameters after the last layer. It is the same for all clients of a round."""

    k: Count  # number of layers, as a number or a fraction
    embeddings: bool = False  # also train the parameters before the first layer

    def plan(self, model: Model, round_info: RoundInfo) -> Plan:
        """The planner. Before the first votes are counted, the layers are spread evenly from first to last."""
        layers = layer_tags(model)
        agreed = {layer for layer in layers if round_info.signal.get(layer)}
        agreed = agreed or set(spread_evenly(layers, resolve_count(self.k, len(layers)) if layers else 0))
        others = set(layers) - agreed
        left_out = model.names(*others) if others else NO_NAMES
        everything = model.all_names()
        return share(
            everything.difference(left_out, NO_NAMES if self.embeddings else input_side_names(model)), down=everything
        )


@dataclass(frozen=True)
class LayerVote(ClientRule):
    """Vote for the layers that rank highest on this client, in rounds 0, `release_every`, 2 `release_every` ....

    A vote is a vector with 1 for each of these layers, 0 for the others, and 1 for the ballot itself, divided by the
    client's number of examples. The server weights updates by that number, so each client counts once.

    With `by = "scores"` the vector holds the scores of all layers, scaled to length 1, and the same 1 for the ballot.
    The noise of private scores then averages out over clients.

    The vector travels as a slot of the smallest parameter that has room for it. What a client sends has the same names
    and sizes whatever it votes for.
    """

    select: Selector
    k: Count  # number of layers, as a number or a fraction
    release_every: int = 1  # rounds for which a vote holds
    slots: Names = frozenset({VOTES})
    uses_data: bool = True
    release: PrivacyRelease | None = None
    by: Literal["votes", "scores"] = "votes"

    def start(self, params: Tensors, examples: Examples, ctx: Context, key: Key) -> tuple[Tensors, Slots]:
        layers = layer_tags(ctx.model)
        if ctx.round_info.round % self.release_every or not layers:
            return {}, {}
        count = resolve_count(self.k, len(layers))
        whole = replace(ctx, plan=share_everything(ctx.model, ctx.round_info))  # all layers stand for election
        ranking = self.select.rank(layers, count, examples, whole, key)
        best = sorted(layers, key=lambda layer: -ranking.scores[layer])[:count]
        vote = torch.tensor([*(float(layer in best) for layer in layers), 1.0], dtype=torch.float64)
        if self.by == "scores":
            scores = torch.tensor([ranking.scores[layer] for layer in layers], dtype=torch.float64)
            vote[:-1] = scores / scores.norm().clamp(min=1e-12)
        return {}, {VOTES: {BALLOT: vote / len(examples)}, ATTENTION: ranking.heads}

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        layers = layer_tags(ctx.model)
        if ctx.round_info.round % self.release_every or not layers:
            return {}, {}
        carrier = carrier_of(ctx.model, ctx.plan.up, len(layers) + 1)
        like = ctx.anchor[carrier]
        values = torch.zeros(like.numel(), dtype=torch.float64)
        if VOTES in ctx.notes:  # not in a dry run
            values[: len(layers) + 1] = ctx.notes[VOTES][BALLOT]
        return {VOTES: {carrier: values.view(like.shape).to(like)}}, {}


@dataclass(frozen=True)
class AgreedLayers(ServerRule):
    """FedAvg that counts votes and passes the layers with most of them to the plan."""

    k: Count  # number of layers, as a number or a fraction

    def init(self, model: Model) -> Slots:
        return {AGREED: {layer: torch.tensor(0.0) for layer in layer_tags(model)}}

    def signal(self, server: Server) -> Mapping[str, float]:
        return {layer: 1.0 for layer, agreed in server.state[AGREED].items() if agreed}

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        server = super().apply(server, aggregate)
        layers = list(server.state[AGREED])
        for counted in aggregate.slots.get(VOTES, {}).values():
            agreed = elect(layers, counted.flatten(), resolve_count(self.k, len(layers)))
            if agreed:
                state = {layer: torch.tensor(float(layer in agreed)) for layer in layers}
                server = replace(server, state={**server.state, AGREED: state})
        return server


def elect(layers: Sequence[str], counted: torch.Tensor, count: int) -> list[str]:
    """Return the layers with most votes or the highest scores. Of equal ones, those nearer to the input come first.

    Args:
        layers: The layers, from the input to the output.
        counted: The sum or mean of votes or scores, in the order of `layers`, and of the ballots after that.
        count: How many layers to elect.

    Returns:
        The layers; empty if there are no ballots, as in a dry run.
    """
    *votes, ballots = counted[: len(layers) + 1].tolist()
    if not ballots > 0:
        return []
    shares = {layer: round(vote / ballots, DIGITS) for layer, vote in zip(layers, votes, strict=True)}
    return sorted(layers, key=lambda layer: -shares[layer])[:count]


def carrier_of(model: Model, names: Names, length: int) -> str:
    """Return the parameter with the fewest values, but at least `length`.

    Raises:
        MethodError: If no parameter is that large.
    """
    sizes = sorted((model.initial[name].numel(), name) for name in names)
    if found := next((name for size, name in sizes if size >= length), None):
        return found
    raise MethodError(
        f"method.agree sends votes of {length} numbers in the shape of a trained parameter, and no such parameter of "
        f"{model.name} has that many; train more of the model, or leave method.agree out"
    )
