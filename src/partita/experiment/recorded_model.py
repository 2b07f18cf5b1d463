"""The model of a recorded run, from its newest checkpoint."""

from __future__ import annotations

from pathlib import Path

from partita.core.client import client_params
from partita.core.model import Model
from partita.core.rounds import initial_server, make_job
from partita.core.settings import RunError
from partita.core.tensors import Tensors
from partita.experiment import run_folder
from partita.experiment.base_digest import check_base
from partita.experiment.builder import build
from partita.experiment.config import load_recorded
from partita.storage import checkpoint
from partita.storage.client_store import DiskStore


def load_model(folder: Path, client: str | None = None, trust_code: bool = False) -> tuple[Model, Tensors]:
    """Build the model of a run and read its parameters.

    Args:
        folder: The run folder.
        client: The client whose own model to return; None for the server's.
        trust_code: Run own code in the folder even if this user has not run it before.

    Raises:
        RunError: If there is no checkpoint, or no such client.
    """
    identity = run_folder.verify(folder)
    experiment = build(load_recorded(folder, trust_code))
    check_base(experiment, folder)
    run, model = experiment.run, experiment.model
    first = initial_server(run, model)
    saved = checkpoint.newest(
        folder / run_folder.CHECKPOINTS, identity, first, experiment.device, experiment.initial_values
    )
    if not saved.done:
        raise RunError(f"{folder} has no checkpoint yet; wait for one, or continue the run: partita resume {folder}")
    model.to(experiment.device)
    if client is None:
        return model, saved.server.params
    if client not in experiment.federation.clients:
        raise RunError(f"{folder} has no client '{client}'; clients are {', '.join(experiment.federation.clients[:3])}")
    state = DiskStore(folder / run_folder.CLIENTS, experiment.device, saved.states).load(client, saved.done)
    job, _ = make_job(run, model, saved.server, saved.done - 1, client)
    return model, model.personal(client_params(run, model, job, state)[1])
