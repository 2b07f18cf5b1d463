"""Runs of Trainers: their records, how they continue, and how the rounds take turns with the user's loop."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import max_difference
from torch import Tensor
from trainer_fixtures import clients, make_trainer, values_of
from transformers import Trainer, TrainerCallback

import partita
from partita.cli.listing import list_runs
from partita.core.settings import RunError
from partita.experiment.config import load
from partita.report import page
from partita.storage.atomic_files import read_json

pytest.importorskip("accelerate", reason="transformers.Trainer needs it")


PRIVATE = {"unit": "client", "noise": 0.5, "clip": 0.1}


def rounds_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "partita rounds"]


class FailsInRound(TrainerCallback):
    def __init__(self, call: int) -> None:
        self.left = call

    def on_train_begin(self, *args: Any, **rest: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def size_of_classifier(module: Any) -> dict[str, float]:
    assert not module.training
    return {"size": float(module.classifier.weight.detach().norm())}


@pytest.mark.slow
def test_the_record_is_like_every_other(tmp_path: Path) -> None:
    trainers = clients(tmp_path, 2, evaluates=True)
    run = partita.federate(trainers, "fedavg", rounds=2, folder=tmp_path / "run", test=size_of_classifier)
    assert run.finished
    assert run.folder == tmp_path / "run"
    assert [row["test"].keys() for row in run.rows] == [{"size"}, {"size"}]
    assert run.rows[1]["test"]["size"] == pytest.approx(size_of_classifier(trainers["site 1"].model.eval())["size"])  # type: ignore[union-attr]
    assert run.rows[1]["personal"].keys() == {"loss"}
    assert run.rows[1]["personal"]["loss"].keys() == trainers.keys()
    assert run.rows[1]["personal"]["loss"]["site 0"] == pytest.approx(trainers["site 0"].evaluate()["eval_loss"])
    assert run.config["data"]["clients"]["site 1"]["examples"] == 7
    assert "training" not in run.config
    assert read_json(run.folder / "split.json")["clients"][1]["train"] == 7
    assert {row["name"] for row in run.plan[0]["rows"]} == values_of(trainers["site 0"]).keys()
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir() if path.is_file())
    page([run.record], tmp_path / "report.html")
    assert "fedavg" in (tmp_path / "report.html").read_text()
    assert [row["rounds"] for row in list_runs(tmp_path)] == ["2/2"]
    with pytest.raises(ValueError, match="are Trainers that a script handed to partita; run that script again"):
        load(run.folder / "config.toml")


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"privacy": PRIVATE}], ids=["plain", "private"])
def test_a_killed_run_continues(more: dict[str, Any], tmp_path: Path) -> None:
    """Here it is exact: the seed of each round comes from the run, and a round starts with a new optimizer."""
    args: dict[str, Any] = {"method": "scaffold", "rounds": 3, "sampling": {"name": "uniform", "equal_weights": True}}
    args = {**args, "method": "fedavg"} if more else args
    folder, shuffled = tmp_path / "run", {"train_sampling_strategy": "random"}
    straight = clients(tmp_path, 2, **shuffled)
    partita.federate(straight, folder=tmp_path / "straight", **args)
    killed = clients(tmp_path, 2, **shuffled)
    killed["site 1"].add_callback(FailsInRound(2))
    with pytest.raises(KeyboardInterrupt):
        partita.federate(killed, folder=folder, **args, **more)
    again = clients(tmp_path, 2, **shuffled)
    run = partita.federate(again, folder=folder, resume=True, **args, **more)
    assert [row["round"] for row in run.rows] == [0, 1, 2]
    if not more:
        assert max_difference(values_of(again["site 0"]), values_of(straight["site 0"])) < 1e-6
    finished = clients(tmp_path, 2, **shuffled)
    partita.federate(finished, folder=folder, resume=True, **args, **more)
    assert max_difference(values_of(finished["site 1"]), values_of(again["site 1"])) == 0
    other = clients(tmp_path, 2, **shuffled, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"holds another run: \[data\]"):
        partita.federate(other, folder=folder, resume=True, **args, **more)
    with pytest.raises(ValueError, match="already holds"):
        partita.federate(clients(tmp_path, 2, **shuffled), folder=folder, **args, **more)


def test_train_is_called_once_in_every_round(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with partita.patch(trainer, rounds=2) as client:
        assert client.round()
        with pytest.raises(RunError, match="has not trained; call its train"):
            client.round()
        trainer.train()
        assert client.round()
        trainer.train()
        trainer.train()
        with pytest.raises(RunError, match="trained 2 times; call train"):
            client.round()
    assert not rounds_threads()
    assert not client.round()


@pytest.mark.slow
def test_nothing_is_left_when_the_loop_is_left(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    client = partita.patch(trainer, rounds=3, folder=tmp_path / "run")
    assert client.round()
    assert len(rounds_threads()) == 1
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    assert not rounds_threads()
    client = partita.patch(make_trainer(tmp_path), rounds=3)
    folder = client.folder
    assert client.round()
    assert folder.exists()
    client.close()
    assert not folder.exists()
    assert not rounds_threads()


@pytest.mark.slow
def test_an_interrupt_comes_out_and_the_run_continues(tmp_path: Path) -> None:
    def play(trainer: Trainer, **more: Any) -> dict[str, Tensor]:
        with partita.patch(trainer, rounds=3, folder=tmp_path / "run", **more) as client:
            while client.round():
                trainer.train()
        return values_of(trainer)

    trainer = make_trainer(tmp_path)
    before = list(trainer.callback_handler.callbacks)
    trainer.add_callback(FailsInRound(1))
    with pytest.raises(KeyboardInterrupt):
        play(trainer)
    assert not rounds_threads()
    trainer.remove_callback(FailsInRound)
    with torch.no_grad():
        for value, start in zip(trainer.model.parameters(), make_trainer(tmp_path).model.parameters(), strict=True):  # type: ignore[union-attr]
            value.copy_(start)
    resumed = play(trainer, resume=True)
    assert trainer.callback_handler.callbacks == before
    other = make_trainer(tmp_path)
    with partita.patch(other, rounds=3) as client:
        while client.round():
            other.train()
    assert max_difference(resumed, values_of(other)) < 1e-6


@pytest.mark.slow
def test_an_error_of_the_server_comes_out_in_the_loop(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with partita.patch(trainer, rounds=2) as client:
        assert client.round()
        trainer.train()
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(float("nan"))  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match=r"client 'client': .*not finite"):
            client.round()
    assert not rounds_threads()


@pytest.mark.slow
def test_a_lost_client_is_recorded(tmp_path: Path) -> None:
    trainers = clients(tmp_path, 3)
    trainers["site 1"].args.max_steps = 0
    trainers["site 1"].args.num_train_epochs = 0
    run = partita.federate(
        trainers, "fedavg", rounds=1, folder=tmp_path / "run", federation={"skip_failed_clients": True}
    )
    assert run.rows[0]["lost"].keys() == {"site 1"}
    assert "took no optimizer step" in run.rows[0]["lost"]["site 1"]


@pytest.mark.slow
def test_the_table_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path)
    with partita.patch(trainer, {"name": "fedper", "finetune": 0}) as client:
        assert client.plan in capsys.readouterr().out
        assert "up, bytes" in client.plan
        assert client.round()
        trainer.train()
        assert not client.round()
        assert client.plan not in capsys.readouterr().out
