"""Tensors with their initial values are left out of checkpoints, and restored bit for bit or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from example_fixtures import EXAMPLES, write_encoder, write_notes
from helpers import Clients, play, toy_model, toy_run
from shell import Shell

from partita.core import tensors
from partita.core.method import Method
from partita.core.rounds import initial_server, rounds
from partita.core.server_rule import Server
from partita.core.versions import ParameterVersions
from partita.engines.simulation import SimulationEngine
from partita.experiment.config import load
from partita.experiment.runner import start
from partita.methods.fedavgm import fedavgm
from partita.methods.fedfrozen import fedfrozen
from partita.record import file_names
from partita.storage import checkpoint
from partita.storage.atomic_files import DamageError, list_checksummed
from partita.storage.initial_values import InitialValueError, InitialValues, flatten

SIZE = 1000


def make_server(base: float = 1.0, trained: float = 0.0) -> Server:
    """A large frozen tensor, a small trained one, and a state for both."""
    params = {"base": torch.full((SIZE,), base), "adapter": torch.full((2,), trained)}
    state = {"velocity": {"base": torch.zeros(SIZE), "adapter": torch.full((2,), trained)}, "empty": {}}
    return Server(params, state, ParameterVersions({"adapter": 0, "base": 0}))


def assert_same(one: Server, two: Server) -> None:
    assert tensors.equal(flatten(one), flatten(two))
    assert (list(one.params), list(one.state)) == (list(two.params), list(two.state))
    assert one.versions == two.versions


def test_unchanged_tensors_are_not_stored_and_come_back(tmp_path: Path) -> None:
    later = make_server(trained=2.0)  # equal tensors that are other objects
    path = checkpoint.save(tmp_path, 1, later, initial=InitialValues(make_server()))
    stored = {name for name in safetensors.torch.load(path.read_bytes()) if name.startswith(("params/", "state/"))}
    assert stored == {"params/adapter", "state/velocity/adapter"}
    assert path.stat().st_size < 2000
    assert_same(checkpoint.load(path, initial=InitialValues(make_server()))[1], later)


def test_negative_zero_is_a_change(tmp_path: Path) -> None:
    first, later = make_server(base=0.0), make_server(base=-0.0)
    back = checkpoint.load(
        checkpoint.save(tmp_path, 1, later, initial=InitialValues(first)), None, InitialValues(first)
    )
    assert_same(back[1], later)


def test_tensor_that_returns_to_its_initial_value_is_restored(tmp_path: Path) -> None:
    initial = InitialValues(make_server())
    for done, trained in enumerate((2.0, 0.0), start=1):
        path = checkpoint.save(tmp_path, done, make_server(trained=trained), initial=initial)
        assert_same(checkpoint.load(path, initial=InitialValues(make_server()))[1], make_server(trained=trained))


def test_each_unchanged_tensor_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    digest = tensors.digest
    monkeypatch.setattr(tensors, "digest", lambda part: (hashed.append(len(part)), digest(part))[1])
    initial = InitialValues(make_server())
    for trained in (1.0, 2.0, 3.0):
        changed, unchanged = initial.split(flatten(make_server(trained=trained)))
        assert (len(changed), len(unchanged)) == (2, 2)
    assert hashed == [1, 1]


@pytest.mark.parametrize("other", [make_server(base=2.0), Server({}, {}, ParameterVersions({}))], ids=["value", "name"])
def test_another_initial_model_is_refused(tmp_path: Path, other: Server) -> None:
    path = checkpoint.save(tmp_path, 1, make_server(trained=2.0), initial=InitialValues(make_server()))
    with pytest.raises(
        InitialValueError, match=rf"{path.name} was written with another initial value of 'params/base'"
    ):
        checkpoint.read(path, initial=InitialValues(other))
    with pytest.raises(InitialValueError, match="does not store 'params/base'"):
        checkpoint.read(path)
    with pytest.raises(DamageError, match="belongs to another run"):
        checkpoint.newest(tmp_path, "mine", make_server(), initial=InitialValues(other))


@pytest.mark.parametrize(
    "method", [fedfrozen(1), fedavgm(), Method("frozen", fedfrozen(0).plan, server_rule=fedavgm().server_rule)]
)
def test_run_resumes_bit_for_bit_from_what_changed(tmp_path: Path, method: Method) -> None:
    model, clients = toy_model(), Clients(a=5, b=6, c=7)
    run = toy_run(method, 4, cohort=2)
    whole = play(run, model, clients)
    initial = InitialValues(initial_server(run, model))
    stream = rounds(run, model, SimulationEngine(run, model, clients))
    for done in (1, 2):
        path = checkpoint.save(tmp_path, done, next(stream).server, initial=initial)
    saved = checkpoint.read(path, like=initial_server(run, model), initial=InitialValues(initial_server(run, model)))
    assert_same(play(run, model, clients, server=saved.server, start=2)[-1].server, whole[-1].server)


@pytest.mark.slow
def test_resume_with_other_weights_under_the_same_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    changes = [f"data.path={write_notes(tmp_path / 'notes')}", f"model.path={write_encoder(tmp_path / 'model')}"]
    config = load(EXAMPLES / "clinical.toml", [*changes, "rounds=2", 'method={name="flora", rank=2}'])
    run = start(config, tmp_path / "run")
    next(run)
    run.close()  # type: ignore[attr-defined]
    checkpoints = list_checksummed(tmp_path / "run" / file_names.CHECKPOINTS)
    weights = tmp_path / "model" / "model.safetensors"
    assert checkpoints[-1].stat().st_size < weights.stat().st_size
    stored = safetensors.torch.load(weights.read_bytes())
    stored["encoder.layer.1.attention.self.key.weight"][0, 0] += 1e-3
    weights.write_bytes(safetensors.torch.save(stored, {"format": "pt"}))
    code, _, err = Shell(monkeypatch, capsys)("resume", tmp_path / "run")
    assert code == 1
    assert "another initial value of 'params/bert.encoder.layer.1.attention.self.key.weight'" in err
    assert "model.path" in err
    assert list_checksummed(tmp_path / "run" / file_names.CHECKPOINTS) == checkpoints


def test_tensor_that_is_gone_is_not_among_the_unchanged() -> None:
    initial = InitialValues(make_server())
    later = {name: value for name, value in flatten(make_server()).items() if name != "params/base"}
    changed, unchanged = initial.split(later)
    assert not changed
    assert unchanged.keys() == later.keys()
