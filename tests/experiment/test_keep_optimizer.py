"""`training.keep_optimizer`: clients keep AdamW's moments between rounds, also when a run is resumed."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from helpers import final_params, play, small_config

from partita.core import tensors
from partita.core.client import OPTIMIZER_PREFIX
from partita.core.method_error import MethodError
from partita.experiment.builder import build
from partita.experiment.config import Config
from partita.experiment.experiment import Experiment
from partita.experiment.runner import resume, start
from partita.storage.client_store import MemoryStore


def config(keep: bool, method: str = "fedavg", rounds: int = 3) -> Config:
    small = small_config(method, rounds, clients_per_block=1)
    return replace(small, training=replace(small.training, optimizer="adamw", lr=0.01, keep_optimizer=keep))


def end(experiment: Experiment, **engine: object) -> tensors.Tensors:
    return final_params(play(experiment.run, experiment.model, experiment.federation, **engine))


@pytest.mark.slow
def test_clients_keep_their_moments_as_if_the_method_did() -> None:
    kept, plain = (build(config(keep)) for keep in (True, False))
    store = MemoryStore()
    params = end(kept, store=store)
    carrying = replace(plain, run=replace(plain.run, method=replace(plain.run.method, carry_optimizer=True)))
    assert tensors.equal(params, end(carrying))
    assert not tensors.equal(params, end(plain))
    slots = {"first", "second", "age"}
    assert store.load(kept.federation.clients[0], 3).memory.keys() == {OPTIMIZER_PREFIX + slot for slot in slots}


@pytest.mark.slow
@pytest.mark.parametrize("state", ["memory", "disk"])
def test_resumed_run_goes_on_with_the_moments(state: str, tmp_path: Path) -> None:
    settings = config(keep=True)
    settings = replace(settings, engine=replace(settings.engine, client_state=state))  # type: ignore[arg-type]
    whole = list(start(settings, tmp_path / "whole"))
    assert len(list(islice(start(settings, tmp_path / "parts"), 2))) == 2
    rest = list(resume(settings, tmp_path / "parts"))
    assert rest
    for row, expected in zip(rest, whole[-len(rest) :], strict=True):
        assert (row["round"], row["train_loss"], row["test"]) == (
            expected["round"],
            expected["train_loss"],
            expected["test"],
        )


def test_method_that_sends_the_state_refuses_clients_that_keep_it() -> None:
    with pytest.raises(MethodError, match=r"fedadamw: .* leave out training\.keep_optimizer"):
        build(replace(config(keep=True), method={"name": "fedadamw"}))
