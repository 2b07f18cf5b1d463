"""A policy that is proposed from a plan allows what the plan sends, and nothing else."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from partita.core.model import role_tag
from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.experiment.preview import preview_of
from partita.site.kit.plan_needs import by_role, needs_of

MODEL = {"name": "vit", "layers": 2, "width": 16, "patch": 4}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ({"name": "fedavg"}, set()),
        ({"name": "fedper"}, {"head"}),
        ({"name": "fedpart"}, set()),
        ({"name": "scaffold"}, set()),
        ({"name": "fedfrozen", "warmup": 1}, set()),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_roles_and_names_allow_exactly_what_is_sent(method: dict[str, object], kept: set[str]) -> None:
    optimizer = "sgd" if method["name"] == "scaffold" else "adamw"
    split = {"name": "iid", "clients": 3}
    config = {"method": method, "model": MODEL, "split": split, "rounds": 3, "training": {"optimizer": optimizer}}
    experiment = build(parse({**config, "federation": {"cohort": 1}}))
    run, model, clients = experiment.run, experiment.model, experiment.federation.clients
    needs = needs_of(run, model, clients)
    assert set(needs) == set(clients)
    found = needs[clients[1]]
    sizes = [preview_of(run, model, clients, number, clients[1]).bytes_up for number in range(3)]
    assert (found.bytes_per_round, found.bytes_total) == (max(sizes), sum(sizes)), "as if asked in every round"
    assert {role_tag(model.tags[name]) for name in found.kept} == kept
    roles, patterns = by_role(model, found.names)
    allowed = {
        name
        for name in model.initial
        if model.tags[name] & set(roles) or any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    assert allowed == found.names
    assert found.names == set(model.initial) - found.kept or method["name"] == "fedpart"


def test_client_that_chooses_from_its_data_may_send_all_that_it_can_choose() -> None:
    method = {"name": "safl", "select": "attention", "k": 1}
    experiment = build(parse({"method": method, "model": MODEL, "split": {"name": "iid", "clients": 2}, "rounds": 2}))
    run, model, clients = experiment.run, experiment.model, experiment.federation.clients
    found = needs_of(run, model, clients)[clients[0]]
    everything = build(parse({"method": {"name": "fedavg"}, "model": MODEL, "rounds": 2}))
    most = preview_of(everything.run, everything.model, everything.federation.clients)
    assert found.names == set(model.initial)
    assert found.bytes_per_round == most.bytes_up


def test_role_that_another_parameter_also_has_is_not_listed() -> None:
    experiment = build(parse({"method": {"name": "fedavg"}, "model": MODEL, "split": {"name": "iid", "clients": 2}}))
    model = experiment.model
    sent = {name for name in model.initial if "head" in model.tags[name] or "layer.1" in model.tags[name]}
    roles, patterns = by_role(model, sent)
    assert roles == ["head"]
    assert len(patterns) == len({name for name in sent if "head" not in model.tags[name]})
