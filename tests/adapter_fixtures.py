"""Small models with an adapter, their clients, and the updates of one round."""

from __future__ import annotations

from typing import Any

from architecture_fixtures import Case, ThreeClients, kind_of, make_model, noise

from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.tensors import Tensors
from partita.engines.simulation import SimulationEngine
from partita.models.peft_adapters import AdaptedModel

ROLES = ("query", "key", "value")


def adapted(case: str, **options: Any) -> AdaptedModel:
    base = make_model(case)
    base.initial.update({name: value + 0.3 * noise(3, *value.shape) for name, value in base.initial.items()})
    model = base.adapted("lora", Key(1), **{"rank": 4, "alpha": 6.0, "roles": ROLES, **options})
    assert isinstance(model, AdaptedModel)
    # Away from B = 0, where A has no gradient but rounding errors.
    for name in model.names("lora_B"):
        model.initial[name] += 0.3 * noise(4, *model.initial[name].shape)
    return model


def clients(case: str) -> ThreeClients:
    return ThreeClients(Case(None, {}, None, kind_of(case)))  # type: ignore[arg-type]


def frozen_values(model: AdaptedModel) -> Tensors:
    return {name: value.clone() for name, value in model.module.named_parameters()}


def updates_of(run: Any, model: Any, population: Any) -> list[Any]:
    engine, server = SimulationEngine(run, model, population), initial_server(run, model)
    jobs = [make_job(run, model, server, 0, client)[0] for client in population.clients]
    return list(engine.train(jobs))
