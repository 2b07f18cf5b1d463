"""Tests of fedexample. Run them with: python -m pytest test_fedexample.py"""

from __future__ import annotations

import torch
from fedexample import fedexample

from partita import Key, Method, Run, SimulationEngine, Training, check_method, methods, rounds
from partita.core.tensors import Tensors
from partita.testing.toy import ToyPopulation, ToyTransformer


def final_params(method: Method) -> Tensors:
    """The global model after three rounds on a toy federation."""
    run = Run(method, Training(lr=0.1, optimizer="sgd", batch_size=4), rounds=3, key=Key(0))
    model = ToyTransformer()
    *_, last = rounds(run, model, SimulationEngine(run, model, ToyPopulation()))
    return last.server.params


def test_keeps_all_promises() -> None:
    check_method(fedexample())


def test_without_the_pull_it_is_fedavg() -> None:
    ours, fedavg = final_params(fedexample(pull=0)), final_params(methods.build("fedavg"))
    assert all(torch.equal(ours[name], fedavg[name]) for name in fedavg)


def test_the_pull_keeps_the_model_near() -> None:
    start, free, pulled = ToyTransformer().initial, final_params(fedexample(pull=0)), final_params(fedexample(pull=3))
    moved = [sum(float((after[name] - start[name]).norm()) for name in start) for after in (free, pulled)]
    assert moved[1] < moved[0]
