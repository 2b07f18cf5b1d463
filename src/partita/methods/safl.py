"""SAFL: each client trains and sends only the layers that pay most attention to the tokens its task turns on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from partita.core.method import Aggregate, Method, MethodError, PrivacyRelease, Server, ServerRule, Update, average
from partita.core.model import Model, layer_tags
from partita.core.options import Count, NotNegative, Positive, PositiveShare
from partita.core.plan import NO_NAMES, Plan, RoundInfo, share
from partita.core.tensors import Names
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
)

Select = Literal["attention", "gradient", "random", "static", "round-robin"]


def safl(
    k: Count | PositiveShare = 0.33,
    select: Select = "attention",
    tokens: str = "auto",
    probe: Count | PositiveShare = 32,
    every: Count = 1,
    capacity: dict[str, Count | PositiveShare] | None = None,
    depth: dict[str, Count] | None = None,
    embeddings: bool = False,
    average_over: Literal["senders", "cohort"] = "senders",
    noise: NotNegative = 0.0,
    clip: Positive = 1.0,
) -> Method:
    """`k` layers a client, as a number or a fraction; `capacity` says otherwise for single clients.

    Clients named in `depth` have so many of the model's layers, spread evenly over it from first to last, and run it
    without the others. Layers are ranked anew `every` so many rounds, by attention to `tokens` on a `probe` of so many
    examples or of such a fraction. With `noise`, the ranking is differentially private, its deviation in multiples of
    `clip`; the probe is then a fraction, with which each example takes part.
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
        raise MethodError(f"method.noise is for select = 'attention', whose scores are bounded, not for '{select}'")
    if noise and not isinstance(probe, float):
        raise MethodError(
            f"method.probe is {probe} examples, but with noise each takes part by a lot of its own; give a fraction "
            "such as 0.1"
        )
    selectors: dict[Select, Selector] = {
        "attention": Attention(tokens, probe, noise, clip),
        "gradient": Gradient(probe),
        "random": Random(),
        "static": Static(),
        "round-robin": RoundRobin(),
    }
    layers = TopLayers(
        selectors[select],
        k,
        tuple(sorted((capacity or {}).items())),
        embeddings,
        every,
        slots=frozenset({ROUND, HEADS} if every > 1 else ()),
        uses_data=select in ("attention", "gradient"),
        release=PrivacyRelease("layer choice", noise, float(probe)) if noise else None,
    )
    named = frozenset({*(capacity or {}), *(depth or {})})
    method = Method(
        "safl",
        client_rules=(layers,),
        server_rule=CohortMean() if average_over == "cohort" else ServerRule(),
        clients=named,
    )
    if not depth:
        return method
    some = DepthPlan(tuple(sorted(depth.items())))
    return replace(method, plan=some.plan, shape=some.shape)


@dataclass(frozen=True)
class DepthPlan:
    """Clients with fewer layers than the model: what they lack never comes down to them."""

    depth: tuple[tuple[str, int], ...]  # by client

    def plan(self, model: Model, round_info: RoundInfo) -> Plan:
        held = model.all_names() - (
            model.names(*lacking) if (lacking := self.lacking(model, round_info.client)) else NO_NAMES
        )
        return share(held, down=held)

    def shape(self, model: Model, round_info: RoundInfo) -> Model:
        lacking = self.lacking(model, round_info.client)
        return _without(model, lacking) if lacking else model

    def lacking(self, model: Model, client: str) -> Names:
        layers = layer_tags(model)
        count = dict(self.depth).get(client, len(layers))
        if not 1 <= count <= len(layers):
            raise MethodError(f"method.depth gives '{client}' {count} layers, but {model.name} has {len(layers)}")
        last = len(layers) - 1
        held = {layers[round(place * last / max(1, count - 1))] for place in range(count)}
        return frozenset(layers) - held


@lru_cache(maxsize=32)
def _without(model: Model, layers: Names) -> Model:
    """One object for all clients of a depth, who can then train side by side."""
    return model.skip_layers(layers)


@dataclass(frozen=True)
class CohortMean(ServerRule):
    """A layer moves less the fewer clients sent it: the others count as if they had left it where it was."""

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        return average(updates, over="cohort")
