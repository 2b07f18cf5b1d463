"""Small federations for a check: the first whose model a method accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from partita.core.data import Population
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model, TagError
from partita.core.plan import RoundInfo
from partita.core.rng import Key
from partita.testing.toy import ToyPopulation, ToyTransformer


@dataclass(frozen=True)
class SmallFederation:
    """A model and its clients.

    Attributes:
        about: What they are, in a few words.
        model: The model, before a method extends it.
        population: The clients.
    """

    about: str
    model: Model
    population: Population


def federation_for(method: Method) -> SmallFederation:
    """Return the smallest federation whose model the method accepts.

    They are tried in this order: a toy Transformer, a small ViT (it supports adapters), the same with a LoRA adapter,
    and a random CLIP (it supports prompts).

    Raises:
        MethodError: If the method accepts none of the models.
    """
    makers: tuple[Callable[[], SmallFederation], ...] = (_toy, _vit, _adapted_vit, _clip)
    reasons = []
    for make in makers:
        federation = make()
        try:
            model = method.extend(federation.model, Key(5)) if method.extend else federation.model
            method.plan(model, RoundInfo(0, 1, federation.population.clients[0]))
        except TagError as error:
            reasons.append(str(error))
            continue
        return federation
    raise MethodError(
        f"{method.name} accepts none of the small models for a check: {reasons[0]}; check it on its own model in "
        "Python: partita.check_method(method, model, population)"
    )


def _toy() -> SmallFederation:
    return SmallFederation("a toy Transformer and six clients", ToyTransformer(), ToyPopulation())


def _images() -> tuple[object, Population]:
    from partita import data

    task = data.load("synthetic", Key(1), examples=60, test_examples=3, classes=3, size=2)
    return task, data.split(task, "quantity", 6, key=Key(2), alpha=1.0, min_examples=4, validation=0.0, test=0.0)


def _vit() -> SmallFederation:
    from partita.models.vit import vit

    task, population = _images()
    model = vit(task, Key(1), layers=2, width=16, heads=2, mlp_ratio=1, patch=1)  # type: ignore[arg-type]
    return SmallFederation("a small ViT and six clients", model, population)


def _adapted_vit() -> SmallFederation:
    plain = _vit()
    model = plain.model.adapted("lora", Key(3), rank=2)
    return SmallFederation("a small ViT with a LoRA adapter and six clients", model, plain.population)


def _clip() -> SmallFederation:
    from partita.models.prompts.clip import clip

    task, population = _images()
    # In float64, so that blocks can be compared beyond the rounding of float32.
    model = clip(task, Key(1), shape="tiny", dtype="float64")  # type: ignore[arg-type]
    return SmallFederation("a small random CLIP and six clients", model, population)
