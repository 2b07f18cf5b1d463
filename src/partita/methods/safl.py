"""SAFL: each client trains and sends only the layers that pay most attention to the tokens its task turns on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from partita.core.method import Aggregate, Method, MethodError, Release, Rule, Server, Update, average
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
    how_many,
)

Select = Literal["attention", "gradient", "random", "static", "round-robin"]


def safl(
    k: int | float = 0.33,
    select: Select = "attention",
    tokens: str = "auto",
    probe: int | float = 32,
    every: int = 1,
    capacity: dict[str, float] | None = None,
    embeddings: bool = False,
    over: Literal["senders", "cohort"] = "senders",
    noise: float = 0.0,
    clip: float = 1.0,
) -> Method:
    """`k` layers a client, as a number or a fraction; `capacity` says otherwise for single clients.

    Layers are ranked anew `every` so many rounds, by attention to `tokens` on a `probe` of so many examples or of such
    a fraction. With `noise`, the ranking is differentially private, its deviation in multiples of `clip`; the probe is
    then a fraction, with which each example takes part.
    """
    for count in (k, *(capacity or {}).values()):
        how_many(count, 1)
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
        looks=select in ("attention", "gradient"),
        release=Release("layer choice", noise, float(probe)) if noise else None,
    )
    return Method("safl", local=(layers,), server=OverCohort() if over == "cohort" else Rule())


@dataclass(frozen=True)
class OverCohort(Rule):
    """A layer moves less the fewer clients sent it: the others count as if they had left it where it was."""

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        return average(updates, over="cohort")
