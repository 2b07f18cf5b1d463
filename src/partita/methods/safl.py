"""SAFL: each client trains and sends only the layers that pay most attention to the tokens relevant to its task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from partita.core.client_rule import PrivacyRelease
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model, layer_tags
from partita.core.options import Count, NotNegative, Positive, PositiveShare, Whole
from partita.core.plan import NO_NAMES, Plan, RoundInfo, share
from partita.core.server_rule import Server, ServerRule, average
from partita.core.tensors import Names
from partita.core.update import Aggregate, Update
from partita.methods.layer_votes import AgreedLayers, AgreedPlan, LayerVote
from partita.methods.selectors import (
    HEADS,
    ROUND,
    Attention,
    Gradient,
    Random,
    RoundRobin,
    Selector,
    Static,
    TopLayers,
    resolve_count,
    spread_evenly,
)

Select = Literal["attention", "gradient", "random", "static", "round-robin"]


def safl(
    k: Count | PositiveShare = 0.33,
    select: Select = "attention",
    tokens: str | tuple[str, ...] = "auto",
    probe: Count | PositiveShare = 32,
    every: Count = 1,
    capacity: dict[str, Count | PositiveShare] | None = None,
    depth: dict[str, Count] | None = None,
    embeddings: bool = False,
    average_over: Literal["senders", "cohort"] = "senders",
    noise: NotNegative = 0.0,
    clip: Positive = 1.0,
    agree: bool | Literal["votes", "scores"] = False,
    common: bool = False,
    layers: tuple[Whole, ...] | None = None,
) -> Method:
    """Build SAFL.

    Args:
        k: Layers per client, as a number or a fraction.
        select: How layers are ranked.
        tokens: The tokens whose attention is measured, or a list of words of the texts.
        probe: Examples used for the ranking, as a number or a fraction. With `noise` it must be a fraction: the
            probability with which each example is sampled.
        every: Rounds between two rankings. With `noise`, all clients rank in rounds 0, `every`, 2 `every` and so on.
        capacity: Replaces `k` for single clients.
        depth: Number of layers of single clients. They hold that many layers, spread evenly from first to last, and
            run the model without the others.
        embeddings: Also train and send the parameters before the first layer.
        average_over: Average a layer over the clients that sent it, or over the whole cohort.
        noise: Standard deviation of the noise on the scores, in multiples of `clip`. Makes the ranking differentially
            private.
        clip: L2 norm to which each example's scores are clipped.
        agree: Clients vote on layers, and all clients train and send the layers with most votes in the round before.
            True is "votes". With "scores" they send the scores of all layers instead.
        common: With select = "random", draw the same layers for all clients of a round.
        layers: With select = "static", numbers of the layers to train, which replace `k`. Default: the topmost.

    Raises:
        MethodError: If an option is out of range, if `noise` is set without attention scores or without a fraction as
            `probe`, if `agree` is set with an option that lets clients differ, or if `common` or `layers` is set for
            another `select`.
    """
    for count in (k, *(capacity or {}).values()):
        resolve_count(count, 1)
    if every < 1 or not probe > 0 or (isinstance(probe, float) and probe > 1):
        raise MethodError(
            f"method.every and probe are {every} and {probe}; give at least one round, and a number of examples from 1 "
            "up or a fraction above 0.0 and up to 1.0"
        )
    if noise < 0 or not clip > 0:
        raise MethodError(f"method.noise and clip are {noise} and {clip}; give 0 or more, and a number above 0")
    if noise and select != "attention":
        raise MethodError(f"method.noise needs bounded scores, and only select = 'attention' has them, not '{select}'")
    if noise and not isinstance(probe, float):
        raise MethodError(
            f"method.probe is {probe} examples, but with noise each example is sampled independently; give a fraction "
            "such as 0.1"
        )
    k = _check_fixed(k, select, common, layers, capacity)
    selectors: dict[Select, Selector] = {
        "attention": Attention(tokens, probe, noise, clip),
        "gradient": Gradient(probe),
        "random": Random(common, every if common else 1),
        "static": Static(layers or ()),
        "round-robin": RoundRobin(),
    }
    release = PrivacyRelease("layer choice", noise, float(probe)) if noise else None
    if agree:
        _check_agreement(select, capacity, depth, average_over)
        return Method(
            "safl",
            plan=AgreedPlan(k, embeddings).plan,
            client_rules=(
                LayerVote(selectors[select], k, every, release=release, by="scores" if agree == "scores" else "votes"),
            ),
            server_rule=AgreedLayers(k),
        )
    kept = 1 if common else every  # a common draw is a function of the round, so nothing is remembered
    rule = TopLayers(
        selectors[select],
        k,
        tuple(sorted((capacity or {}).items())),
        embeddings,
        kept,
        slots=frozenset({ROUND, HEADS} if kept > 1 else ()),
        uses_data=select in ("attention", "gradient"),
        release=release,
        release_every=every if noise else 1,
    )
    named = frozenset({*(capacity or {}), *(depth or {})})
    method = Method(
        "safl",
        client_rules=(rule,),
        server_rule=CohortMean() if average_over == "cohort" else ServerRule(),
        clients=named,
    )
    if not depth:
        return method
    depth_plan = DepthPlan(tuple(sorted(depth.items())))
    return replace(method, plan=depth_plan.plan, shape=depth_plan.shape)


def _check_fixed(
    k: int | float, select: Select, common: bool, layers: tuple[int, ...] | None, capacity: object
) -> int | float:
    """Check `common` and `layers`, and return the number of layers to train."""
    if common and select != "random":
        raise MethodError(f"method.common is about layers drawn at random, but select = '{select}'; leave it out")
    if layers is None:
        return k
    if select != "static":
        raise MethodError(f"method.layers is for select = 'static', not '{select}'; leave one of them out")
    if not layers or len(set(layers)) < len(layers) or min(layers) < 0:
        raise MethodError(f"method.layers is {list(layers)}; give different numbers of layers, from 0 up")
    if capacity:
        raise MethodError("method.layers names the layers of all clients, but method.capacity does not; leave one out")
    return len(layers)


def _check_agreement(select: Select, capacity: object, depth: object, average_over: str) -> None:
    for key, value in (("capacity", capacity), ("depth", depth)):
        if value:
            raise MethodError(
                f"method.agree gives all clients the same layers, but method.{key} does not; leave one out"
            )
    if average_over != "senders":
        raise MethodError(
            "with method.agree all clients send the same layers, so method.average_over has no effect; leave it out"
        )
    if select not in ("attention", "gradient"):
        raise MethodError(
            f"method.agree lets clients vote by their data, but select = '{select}' does not read it; use 'attention' "
            "or 'gradient', or leave method.agree out"
        )


@dataclass(frozen=True)
class DepthPlan:
    """Plan for clients with fewer layers than the model. The server never sends them the missing layers."""

    depth: tuple[tuple[str, int], ...]  # (client, number of layers)

    def plan(self, model: Model, round_info: RoundInfo) -> Plan:
        """The planner: the client trains, sends and receives the layers that it has."""
        missing = self.missing_layers(model, round_info.client)
        held = model.all_names() - (model.names(*missing) if missing else NO_NAMES)
        return share(held, down=held)

    def shape(self, model: Model, round_info: RoundInfo) -> Model:
        """Return the model without the layers that the client does not have."""
        missing = self.missing_layers(model, round_info.client)
        return _without(model, missing) if missing else model

    def missing_layers(self, model: Model, client: str) -> Names:
        """Return the tags of the layers that the client does not have.

        Raises:
            MethodError: If `depth` gives the client no layers, or more than the model has.
        """
        layers = layer_tags(model)
        count = dict(self.depth).get(client, len(layers))
        if not 1 <= count <= len(layers):
            raise MethodError(f"method.depth gives '{client}' {count} layers, but {model.name} has {len(layers)}")
        return frozenset(layers).difference(spread_evenly(layers, count))


@lru_cache(maxsize=32)
def _without(model: Model, layers: Names) -> Model:
    """Cached, so that all clients of one depth share a model object and can train in one block."""
    return model.skip_layers(layers)


@dataclass(frozen=True)
class CohortMean(ServerRule):
    """Average over the whole cohort. Clients that did not send a layer count as a zero update of it."""

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        return average(updates, over="cohort")
