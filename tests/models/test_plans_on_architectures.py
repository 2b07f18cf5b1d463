"""SAFL conforms on every architecture; FedPer and FedFrozen conform on each kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from architecture_fixtures import CASE_NAMES, LAYERS, ThreeClients, make_case, make_model, perturbed

from partita.core.method import Method
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedper import fedper
from partita.methods.safl import safl
from partita.models.functional import FunctionalModel
from partita.testing.conformance import check_method

# SAFL reads the attention of every architecture. For the others the roles count, which test_architectures.py checks,
# and what trains: FedPer keeps the head of each kind of task. FedFrozen conforms on more architectures there, and every
# type in test_model_types.py plays a round of it.
CASES = {
    "safl": [
        "vit-image", "deit-image", "dinov2-image", "dinov2_with_registers-image", "bert-text", "roberta-text",
        "electra-text", "distilbert-tokens", "gpt2-text", "llama-text", "mistral-lm", "qwen2-lm", "qwen3-lm",
        "clip-image", "clip-towers",
    ],
    "fedper": ["vit-image", "bert-tokens", "distilbert-text", "gpt2-lm", "clip-towers"],
    "fedfrozen": ["dinov2-image", "llama-lm"],
}  # fmt: skip
METHODS = {"safl": safl(k=1), "fedper": fedper(), "fedfrozen": fedfrozen(2)}


def model_off_zero(case: str) -> FunctionalModel:
    """A model with non-zero biases: a zero key bias would move by rounding alone, which cannot be compared."""
    model = make_model(case)
    if case.endswith("-tokens"):
        model.module.config.label2id = {"O": 0, "B-x": 1, "I-x": 2}
    return replace(model, initial=perturbed(model.initial))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), [(case, name) for name, cases in CASES.items() for case in cases])
def test_methods_conform_on_every_architecture(case: str, name: str) -> None:
    method: Method = METHODS[name]
    found = check_method(method, model_off_zero(case), ThreeClients(make_case(case)), tolerance=2e-5)
    assert found.bytes_up > 0


def test_cases_cover_every_architecture() -> None:
    assert {case.partition("-")[0] for case in CASES["safl"]} == {name.partition("-")[0] for name in CASE_NAMES}
    assert {case.rpartition("-")[2] for case in CASES["fedper"]} == {name.rpartition("-")[2] for name in CASE_NAMES}
    assert LAYERS == 2, "of which safl takes one"
