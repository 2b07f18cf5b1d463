"""The model of a recorded run, from one of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from partita.core.client import client_params
from partita.core.model import Model
from partita.core.rounds import initial_server, make_job
from partita.core.server_rule import Server
from partita.core.settings import RunError
from partita.core.tensors import Tensors
from partita.experiment import run_folder
from partita.experiment.base_digest import check_base
from partita.experiment.builder import build
from partita.experiment.config import load_recorded
from partita.experiment.experiment import Experiment
from partita.record import file_names
from partita.storage import checkpoint
from partita.storage.atomic_files import list_checksummed, number_in_name
from partita.storage.client_store import DiskStore

RoundChoice = int | Literal["best", "last"]  # a number of finished rounds, the best by validation, or the newest


@dataclass(frozen=True)
class RecordedModel:
    """The model of a run after some round.

    Attributes:
        folder: The run folder.
        identity: The identity of the run.
        experiment: The run's experiment.
        saved: The checkpoint.
    """

    folder: Path
    identity: str
    experiment: Experiment
    saved: checkpoint.Checkpoint

    def params(self, client: str | None = None) -> Tensors:
        """Return the parameters of the server's model, or of a client's own.

        If all data is pooled at one client, that client's model is the only one that was trained, and is returned.

        Raises:
            RunError: If there is no such client, or if nothing travels, so that the server's model is untrained.
        """
        experiment, done = self.experiment, self.saved.done
        run, model, clients = experiment.run, experiment.model, experiment.federation.clients
        if client is None and run.method.pool:
            [client] = clients
        if client is not None and client not in clients:
            raise RunError(f"{self.folder} has no client '{client}'; clients are {', '.join(clients[:3])}")
        job, plan = make_job(run, model, self.saved.server, done - 1, client if client is not None else clients[0])
        if client is None:
            if plan.keep and not plan.up:
                raise RunError(
                    f"nothing travels with '{run.method.name}', so the server's model is untrained; choose the model "
                    f"of a client: --client {clients[0]}"
                )
            return self.saved.server.params
        store = DiskStore(self.folder / file_names.CLIENTS, experiment.device, self.saved.states)
        return model.personal(client_params(run, model, job, store.load(client, done))[1])


def load_recorded_model(folder: Path, round: RoundChoice = "last", trust_code: bool = False) -> RecordedModel:
    """Build the model of a run and read a checkpoint.

    Args:
        folder: The run folder.
        round: Which checkpoint: after this many rounds, the best on validation, or the newest.
        trust_code: Run own code in the folder even if this user has not run it before.

    Raises:
        RunError: If there is no such checkpoint.
    """
    identity = run_folder.verify(folder)
    path = _find(folder, round)
    config = load_recorded(folder, trust_code)
    # The cache of frozen layers would replace the raw inputs of the examples, and the model's lowest layers.
    experiment = build(replace(config, engine=replace(config.engine, cache_frozen=False)))
    check_base(experiment, folder)
    first: Server = initial_server(experiment.run, experiment.model)
    remedy = checkpoint.BEST_REMEDY if path.parent.name == checkpoint.BEST else checkpoint.REMEDY
    saved = checkpoint.read(path, experiment.device, first, experiment.initial_values, identity or "", remedy)
    experiment.model.to(experiment.device)
    return RecordedModel(folder, identity or "", experiment, saved)


def load_model(
    folder: Path, client: str | None = None, trust_code: bool = False, round: RoundChoice = "last"
) -> tuple[Model, Tensors]:
    """Build the model of a run and read its parameters.

    Args:
        folder: The run folder.
        client: The client whose own model to return; None for the server's.
        trust_code: Run own code in the folder even if this user has not run it before.
        round: Which checkpoint: after this many rounds, the best on validation, or the newest.

    Raises:
        RunError: If there is no such checkpoint, or no such client.
    """
    recorded = load_recorded_model(folder, round, trust_code)
    return recorded.experiment.model, recorded.params(client)


def _find(folder: Path, round: RoundChoice) -> Path:
    """Return the file of a checkpoint, before anything else is loaded."""
    checkpoints = folder / file_names.CHECKPOINTS
    newest, best = list_checksummed(checkpoints), list_checksummed(checkpoints / checkpoint.BEST)
    if not newest:
        raise RunError(f"{folder} has no checkpoint yet; wait for one, or continue the run: partita resume {folder}")
    if round == "last":
        return newest[-1]
    if round == "best":
        if not best:
            raise RunError(
                f"{folder} has no best round, because it was not evaluated on validation examples; set "
                "evaluate.validation_every in a new run, or choose the last round"
            )
        return best[-1]
    by_round = {number_in_name(path): path for path in (*best, *newest)}
    if round not in by_round:
        kept = ", ".join(map(str, sorted(by_round)))
        raise RunError(
            f"{folder} has no checkpoint after {round} rounds, only after {kept}: a run keeps the newest "
            f"{checkpoint.CHECKPOINTS_KEPT} and the best; to stop at {round}, run it again: "
            f"partita run --config {folder / file_names.CONFIG} --rounds {round} --out FOLDER"
        )
    return by_round[round]
