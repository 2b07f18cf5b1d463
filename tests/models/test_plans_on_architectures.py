"""FedFrozen, SAFL and FedPer conform on every architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest
from architecture_fixtures import KIN, LAYERS, NAMES, Few, adapted, made, moved

from partita.core.method import Method
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedper import fedper
from partita.methods.safl import safl
from partita.models.adapter import FunctionalModel
from partita.testing.conformance import check_method

QUICK = ("distilbert-tokens", "llama-text")
ONCE = [name for name in NAMES if name not in KIN]
METHODS = {"safl": safl(k=1), "fedper": fedper(), "fedfrozen": fedfrozen(2)}
CASES = [
    pytest.param(case, name, marks=() if case in QUICK and name == "safl" else pytest.mark.slow)
    for case in ONCE
    for name in METHODS
]


def model_of(case: str) -> FunctionalModel:
    """A model with non-zero biases: a zero key bias would move by rounding alone, which cannot be compared."""
    model = adapted(case)
    if case.endswith("-tokens"):
        model.module.config.label2id = {"O": 0, "B-x": 1, "I-x": 2}
    return replace(model, initial=moved(model.initial))


@pytest.mark.parametrize(("case", "name"), CASES)
def test_promises_are_kept(case: str, name: str) -> None:
    method: Method = METHODS[name]
    found = check_method(method, model_of(case), Few(made(case)), tolerance=2e-5)
    assert found.bytes_up > 0


def test_the_table_of_cases_has_every_architecture() -> None:
    assert {case.partition("-")[0] for case in ONCE} == {name.partition("-")[0] for name in NAMES}
    assert LAYERS == 2, "of which safl takes one"
