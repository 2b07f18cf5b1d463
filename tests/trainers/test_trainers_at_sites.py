"""A file with a Trainer at sites: each trains its own, and all give what one process with all Trainers gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flower_fixtures import FakeGrid, task_identity
from flwr.app import Context, Message, RecordDict
from helpers import max_difference, server_in
from trainer_file_fixtures import FEDERATE, PATCH, SITES, federated, write_party, write_rows
from trainer_fixtures import values_of

import partita
from partita.core import tensors
from partita.core.client import ClientError
from partita.engines.flower.local_deployment import deploy_locally
from partita.experiment import flower_app
from partita.experiment.builder import build
from partita.experiment.config import load
from partita.record import file_names
from partita.site.doctor.rehearsal import check_rehearsal

pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
__all__ = ["task_identity"]
pytestmark = pytest.mark.filterwarnings("ignore:the number of examples of client")  # a server does not know it
QUICK = {"deadline": 5.0, "clients": 3}


def write_parties(folder: Path, text: str = PATCH, changes: Any = ()) -> Path:
    """Write the folders of the server and of all sites. All have the config that the server's file makes."""
    file = write_party(folder / "server", text)
    with chdir(file.parent):
        experiment = load(file, changes).to_toml(file.parent)
    for party in ("server", *SITES):
        write_party(folder / party, text, "" if party == "server" else party)
        if "trainers = {" in text and party != "server":
            write_rows(folder / party / f"{party}.jsonl", party)
        (folder / party / "experiment.toml").write_text(experiment)
    return folder


def site_of(folder: Path, client: str) -> Callable[[Message], Message]:
    """Every message builds the site anew, as in a separate process."""

    def answer(message: Message) -> Message:
        context = Context(1, message.metadata.dst_node_id, {}, RecordDict(), {})
        context.node_config = {"client": client, "folder": str(folder / client / "state")}
        with chdir(folder / client):
            return flower_app.client(folder / client / "experiment.toml")(message, context)

    return answer


def rounds(folder: Path, run: str = "run", session: str = "1") -> Iterator[dict[str, Any]]:
    """Start the server, to which all sites are connected, or let it go on; yield the rows."""
    grid = FakeGrid({place: site_of(folder, client) for place, client in enumerate(SITES, 10)})
    with chdir(folder / "server"):
        config = load(folder / "server" / "experiment.toml")
        yield from flower_app.serve(grid, config, {"folder": str(folder / run), **QUICK}, session)


def serve(folder: Path) -> list[dict[str, Any]]:
    """Run the server to its end."""
    return list(rounds(folder))


def digest(folder: Path) -> str:
    return str(json.loads((folder / file_names.RESULT).read_text())["digest"])


@pytest.mark.parametrize("text", [PATCH, FEDERATE], ids=["patch", "federate"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.fast_cases("1-patch")
def test_sites_give_the_digest_of_one_process(count: int, text: str, tmp_path: Path) -> None:
    write_parties(tmp_path / "sites", text, [f"rounds={count}", "evaluate.personal_every=0"])
    serve(tmp_path / "sites")
    north = values_of(federated(tmp_path / "one", rounds=count, evaluate={"personal_every": 0})["north"])
    assert tensors.equal(server_in(tmp_path / "sites" / "run").params, north)
    assert digest(tmp_path / "sites" / "run") == digest(tmp_path / "one" / "run")


def call(**more: Any) -> str:
    """The text of the file, whose call has more arguments."""
    method = repr(more.pop("method", "fedavg"))
    said = "".join(f"{name}={value!r}, " for name, value in more.items())
    return PATCH.replace('"fedavg", ', f"{method}, {said}")


@pytest.mark.slow
def test_the_central_test_is_the_servers(tmp_path: Path) -> None:
    write_parties(tmp_path, call().replace("rounds=2", "rounds=2, test=score"), ["evaluate.personal_every=1"])
    rows = serve(tmp_path)
    assert rows[1]["test"].keys() == {"norm", "loss"}
    assert rows[1]["personal"].keys() == {"loss"}
    assert rows[1]["personal"]["loss"].keys() == {*SITES}
    north = federated(tmp_path / "one")["north"]
    assert north.model is not None
    assert rows[1]["test"]["norm"] == pytest.approx(float(north.model.classifier.weight.detach().norm()))
    assert rows[1]["personal"]["loss"]["north"] == pytest.approx(north.evaluate()["eval_loss"])
    run = partita.load_run(tmp_path / "run")
    assert torch.equal(run.model().classifier.weight, north.model.classifier.weight.cpu())
    with pytest.raises(ValueError, match=r"belongs to a Trainer; save the copy that partita\.load_run"):
        run.export(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("case", [{"method": {"name": "fedper", "finetune": 0}}, {"training": {"keep_optimizer": True}},
    {"privacy": {"unit": "client", "noise": 0.5, "clip": 0.1, "repeatable": True}}],
    ids=["personal", "optimizer", "private"])  # fmt: skip
def test_state_of_a_site_is_kept_between_messages(case: dict[str, Any], tmp_path: Path) -> None:
    """A digest has the states of clients, which a server does not have: rounds and scores tell."""
    write_parties(tmp_path, call(**case), [] if "privacy" in case else ["evaluate.personal_every=1"])
    rows = serve(tmp_path)
    federated(tmp_path / "one", **case)
    alone = [json.loads(line) for line in (tmp_path / "one" / "run" / file_names.ROWS).read_text().splitlines()]
    assert [row["train_loss"] for row in rows] == [row["train_loss"] for row in alone]
    assert [row["personal"] for row in rows] == [row["personal"] for row in alone]


@pytest.mark.slow
def test_the_doctor_rehearses_with_the_trainer(tmp_path: Path) -> None:
    write_parties(tmp_path)
    with chdir(tmp_path / "north"):
        _, own = flower_app.site_settings(tmp_path / "north" / "experiment.toml", "north", (), ())
        experiment = flower_app.site_experiment("north", own)
        site: Any = SimpleNamespace(name="north", state_folder=tmp_path)
        outcome = check_rehearsal(SimpleNamespace(experiment=experiment, site=site))  # type: ignore[arg-type]
    assert outcome.status == "ok", outcome.sentence


@pytest.mark.slow
def test_masked_updates_give_the_same_to_rounding(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"secure_aggregation": {"collusion": 0.0}, "federation": {"max_examples": 50}}
    write_parties(tmp_path, call(**tables))
    serve(tmp_path)
    north = values_of(federated(tmp_path / "one", **tables)["north"])
    assert max_difference(server_in(tmp_path / "run").params, north) < 1e-3


LOOP = PATCH.replace("    client = ", "    for _ in range(2):\n        client = ").partition("    while")[0]
STREAM = PATCH.replace("train_dataset=rows", "train_dataset=Rows()").replace("num_train_epochs", "max_steps")
STREAM = STREAM.replace("def make", "class Rows(torch.utils.data.IterableDataset):\n    __iter__ = None\n\n\ndef make")
REFUSED: dict[str, tuple[str, tuple[str, ...], str]] = {
    # name: (file, changes, sentence)
    "no clients": (PATCH.replace(", clients=", ", label='x', sampling={'name': 'uniform'}) #"), (),
        r"OptionError: patch does not say which sites take part; add clients=\['north', 'south'\]"),
    "two calls": (f"{PATCH}    partita.patch(trainer, rounds=1, clients=['north'])\n", (),
        "federation.py calls patch more than once; leave one call"),
    "two functions": (f"{PATCH}    partita.fit(trainer, [])\n", (),
        "federation.py calls fit and patch; leave one call"),
    "a stream": (STREAM, (), "train_dataset of .*federation.py:trainer' is a stream, which a site cannot"),
    "a loop": (LOOP, (), "federation.py calls patch more than once; leave one call"),
    "no guard": (PATCH.replace('if __name__ == "__main__":', "if True:"), (),
        "CodeError: the file calls patch when it is loaded; put the call under"),
    "no name": (PATCH.replace("partita.patch(trainer", "partita.patch(make()"), (),
        "patch gets Trainers under no name of .*federation.py, so no other process can find it; give it a name"),
    "method": (PATCH.replace('"fedavg"', '"moon"'), (), "MethodError: moon cannot run on a Trainer, because Moon"),
    "privacy": (call(privacy={"noise": 1.0}), (), "OptionError: privacy.unit is 'example', which needs the gradient"),
    "test": (call().replace("rounds=2", "rounds=2, test=lambda module: {}"), (), "has no function '<lambda>'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.fast_cases("no clients", "two calls")
def test_wrong_files_are_refused_in_one_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, changes, sentence = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=sentence) as error:
        build(load(write_party(tmp_path, text), changes))
    assert "\n" not in str(error.value)


OF_THE_CONFIG = {
    "training.lr=0.5": "training.lr differs in the config and in the Trainer of the server",
    "method.name=moon": "moon cannot run on a Trainer",
    "method.name=scaffold": "ScaffoldClient is derived for sgd",
    "method.name=fedrep": "fedrep",
    "federation.attackers=1": "federation.attackers does not reach into a Trainer",
    "evaluate.every=1": "evaluate.every needs a central test",
    "evaluate.samples=2": "evaluate.samples",
    "evaluate.validation_every=1": "no client has validation examples",
    "privacy={noise = 1.0}": "privacy.unit is 'example'",
    "engine.cache_frozen=true": "cache",
    "training.group_by_length=true": "length",
    "split.client=east": "'east', which is not in split.sites",
    "model.adapter.rank=2": "adapter",
    "split.test=0.2": "split.test does not reach into a Trainer",
    "split={name = 'iid', clients = 2, test = 0.0, validation = 0.0}": "need 2, but trainer has 0",
}


@pytest.mark.slow
@pytest.mark.parametrize("change", OF_THE_CONFIG)
def test_settings_that_do_not_reach_a_trainer_are_refused(change: str, tmp_path: Path) -> None:
    write_party(tmp_path)
    with chdir(tmp_path), pytest.raises(ValueError, match=OF_THE_CONFIG[change]) as error:
        build(load(tmp_path / "federation.py", [change]))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_flower_deployment_gives_the_digest_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sites find their rows beside the file by their names, because they share a machine and its folder."""
    write_party(tmp_path, FEDERATE)
    for site in SITES:
        write_rows(tmp_path / f"{site}.jsonl", site)
    monkeypatch.chdir(tmp_path)
    app = flower_app.init(tmp_path / "app", tmp_path / "federation.py")
    assert tuple(flower_app.population(app)) == SITES
    with deploy_locally(SITES, tmp_path / "federation", flower_app.modules(app)) as federation:
        federation.run(app, f'deadline=300.0 folder="{tmp_path / "there"}"')
    north = values_of(federated(tmp_path / "one")["north"])
    assert tensors.equal(server_in(tmp_path / "there").params, north)
    assert digest(tmp_path / "there") == digest(tmp_path / "one" / "run")


@pytest.mark.slow
def test_an_error_in_the_file_is_not_quoted(tmp_path: Path) -> None:
    text = FEDERATE.replace("    torch.manual_seed(0)\n", "    for row in rows:\n        raise KeyError('patient 7')\n")
    write_parties(tmp_path, text)
    with pytest.raises(ClientError, match="failed with CodeError; see the log") as error:
        serve(tmp_path)
    assert "patient" not in str(error.value)


@pytest.mark.slow
def test_a_killed_server_goes_on(tmp_path: Path) -> None:
    case = {"training": {"keep_optimizer": True}}
    write_parties(tmp_path, call(**case))
    killed = rounds(tmp_path)
    next(killed)
    killed.close()
    assert [row["round"] for row in rounds(tmp_path, session="2")] == [1]
    north = federated(tmp_path / "one", **case)["north"]
    assert tensors.equal(server_in(tmp_path / "run").params, values_of(north))
