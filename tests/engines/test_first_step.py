"""The first step of a run: what a device lacks is mended, told, or refused in one line."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_types import TwoClients, module_of

from partita.core.model import Output
from partita.core.rng import Key
from partita.core.settings import Run, Training
from partita.core.tensors import Tensors
from partita.engines.first_step import StepError, take_first_step
from partita.methods.fedavg import fedavg
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module
from partita.tasks import KINDS
from partita.testing.toy import ToyPopulation, ToyTransformer

HALF = Training(lr=0.1, optimizer="sgd", batch_size=2, precision="bfloat16")


def model_of(case: str) -> FunctionalModel:
    model_type, _, kind = case.rpartition("-")
    return from_module(model_type, module_of(case), kind=KINDS[kind])


def step_of(case: str, model: FunctionalModel, clients: int) -> list[str]:
    run = Run(fedavg(), HALF, rounds=1, key=Key(0))
    return take_first_step(run, model, TwoClients(case.rpartition("-")[2]), "a", clients)


@pytest.mark.parametrize(("case", "part"), [("fnet-text", "FNetBasicFourier"), ("deberta-text", "DisentangledSelf")])
def test_a_part_without_a_bfloat16_kernel_computes_in_float32(case: str, part: str) -> None:
    model = model_of(case)
    [finding] = step_of(case, model, 2)
    assert finding.startswith(part)
    assert "computes in float32, because in bfloat16" in finding
    assert step_of(case, model, 2) == [], "it is mended for good"
    assert step_of(case, model, 1) == []
    changed = {type(each).__name__ for each in model.module.modules() if "forward" in vars(each)}
    assert not changed & {"FNetModel", "DebertaModel", "Linear"}, "only the part itself"


@pytest.mark.parametrize("case", ["convnext-image", "segformer-image", "falcon-lm", "data2vec-vision-image"])
def test_blocks_in_bfloat16_need_no_float32(case: str) -> None:
    assert step_of(case, model_of(case), 2) == []


class Failing(ToyTransformer):
    """A model whose forward pass fails or warns."""

    def __init__(self, error: Exception | None = None, warning: str = "") -> None:
        super().__init__()
        self.error, self.warning = error, warning

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        if self.error:
            raise self.error
        warnings.warn(self.warning, stacklevel=1)
        return super().__call__(params, inputs)


def first_step(model: Any, precision: str = "float32") -> list[str]:
    run = Run(fedavg(), Training(lr=0.1, optimizer="sgd", batch_size=2), rounds=1, key=Key(0))
    run = replace(run, training=replace(run.training, precision=precision))
    population = ToyPopulation()
    return take_first_step(run, model, population, population.clients[0])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("CUDA error: misaligned\nmore\nlines"), "cannot train here: CUDA error: misaligned$"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory while training one client; lower training.batch"),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_that_fails_is_one_line(error: Exception, told: str, precision: str) -> None:
    with pytest.raises(StepError, match=told) as caught:
        first_step(Failing(error), precision)
    assert len(str(caught.value).splitlines()) == 1


def test_other_errors_of_a_model_are_not_changed() -> None:
    with pytest.raises(KeyError):
        first_step(Failing(KeyError("w")))


def test_other_warnings_of_the_first_step_are_kept() -> None:
    with pytest.warns(UserWarning, match="take care"):
        assert first_step(Failing(warning="take care")) == []
