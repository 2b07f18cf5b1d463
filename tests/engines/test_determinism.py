"""What a run does where an operation has no deterministic kernel. On a CPU, torch has none for `put_`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from helpers import final_params, play, toy_run

from partita.cli.main import _told
from partita.core import tensors
from partita.core.model import Output
from partita.core.rng import Key
from partita.core.settings import Run, Training
from partita.core.tensors import Tensors
from partita.engines.determinism import NotDeterministicError, set_determinism
from partita.engines.first_step import take_first_step
from partita.methods.fedavg import fedavg
from partita.testing.toy import ToyPopulation, ToyTransformer

CLIENTS = ToyPopulation()


class Putting(ToyTransformer):
    """A model with `put_`, also one that the torch of a GPU only warns of."""

    def __init__(self, steps_before: int = 0) -> None:
        super().__init__()
        self.steps_before, self.warn_only = steps_before, list[bool]()

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        if not self.steps_before:
            self.warn_only.append(torch.is_deterministic_algorithms_warn_only_enabled())
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
            if torch.is_deterministic_algorithms_warn_only_enabled():
                warnings.warn("sort CUDA does not have a deterministic implementation, but you set", stacklevel=1)
        self.steps_before = max(0, self.steps_before - 1)
        return super().__call__(params, inputs)


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    yield
    set_determinism(False)


def first_step(model: ToyTransformer, wanted: bool | Literal["auto"]) -> list[str]:
    set_determinism(wanted)
    run = Run(fedavg(), Training(lr=0.1, optimizer="sgd", batch_size=2), rounds=1, key=Key(0))
    return take_first_step(run, model, CLIENTS, CLIENTS.clients[0])


def test_auto_goes_on_and_tells_once() -> None:
    model = Putting()
    findings = first_step(model, "auto")
    assert [each.partition(" has no deterministic kernel on")[0] for each in findings] == ["put_", "sort CUDA"]
    assert model.warn_only == [False, True], "strict first"
    with warnings.catch_warnings(record=True) as seen:
        for operation in ("put_", "sort CUDA"):
            warnings.filterwarnings("ignore", operation)  # as after the first step; catching resets it
        play(toy_run(fedavg(), 2), model, CLIENTS)
    assert model.warn_only[2:], "the model trains"
    assert all(model.warn_only[2:]), "no step is taken twice"
    assert not seen


def test_true_refuses_with_the_name_of_the_operation() -> None:
    with pytest.raises(NotDeterministicError, match=r"^engine\.deterministic is true, but put_ has no deterministic"):
        first_step(Putting(), True)


def test_false_says_nothing() -> None:
    assert first_step(Putting(), False) == []


def test_steps_are_strict_and_the_rest_is_not() -> None:
    """Otherwise fused attention would sum in any order on a GPU, also where all operations have a kernel."""
    strict: list[bool] = []

    class Watching(ToyTransformer):
        def __call__(self, params: Tensors, inputs: Tensors) -> Output:
            strict.append(not torch.is_deterministic_algorithms_warn_only_enabled())
            return super().__call__(params, inputs)

    assert first_step(Watching(), "auto") == []
    play(toy_run(fedavg(), 1), Watching(), CLIENTS)
    assert all(strict)
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_an_operation_of_a_later_step_repeats_that_step_only() -> None:
    set_determinism("auto")
    expected = play(toy_run(fedavg(), 3), ToyTransformer(), CLIENTS)
    with pytest.warns(UserWarning, match="deterministic") as seen:
        played = play(toy_run(fedavg(), 3), Putting(steps_before=7), CLIENTS)
    assert sum("has no deterministic kernel on this device" in str(each.message) for each in seen) == 1
    assert tensors.equal(final_params(played), final_params(expected))


def test_an_operation_outside_of_steps_is_one_line_for_the_user() -> None:
    set_determinism(True)
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    told = _told(caught.value)
    assert told is not None
    assert told.startswith("engine.deterministic is true, but put_ has no deterministic kernel on this device; set it")
    assert _told(RuntimeError("a fault")) is None
