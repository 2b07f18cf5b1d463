"""FedFrozen, SAFL and FedPer conform on every architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest
from architecture_fixtures import CASE_NAMES, LAYERS, SLOW_CASES, ThreeClients, make_case, make_model, perturbed

from partita.core.method import Method
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedper import fedper
from partita.methods.safl import safl
from partita.models.adapter import FunctionalModel
from partita.testing.conformance import check_method

FAST_CASES = ("distilbert-tokens", "llama-text")
CASES_TO_TEST = [name for name in CASE_NAMES if name not in SLOW_CASES]
METHODS = {"safl": safl(k=1), "fedper": fedper(), "fedfrozen": fedfrozen(2)}
CASES = [
    pytest.param(case, name, marks=() if case in FAST_CASES and name == "safl" else pytest.mark.slow)
    for case in CASES_TO_TEST
    for name in METHODS
]


def model_off_zero(case: str) -> FunctionalModel:
    """A model with non-zero biases: a zero key bias would move by rounding alone, which cannot be compared."""
    model = make_model(case)
    if case.endswith("-tokens"):
        model.module.config.label2id = {"O": 0, "B-x": 1, "I-x": 2}
    return replace(model, initial=perturbed(model.initial))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), CASES)
def test_methods_conform_on_every_architecture(case: str, name: str) -> None:
    method: Method = METHODS[name]
    found = check_method(method, model_off_zero(case), ThreeClients(make_case(case)), tolerance=2e-5)
    assert found.bytes_up > 0


def test_cases_cover_every_architecture() -> None:
    assert {case.partition("-")[0] for case in CASES_TO_TEST} == {name.partition("-")[0] for name in CASE_NAMES}
    assert LAYERS == 2, "of which safl takes one"
