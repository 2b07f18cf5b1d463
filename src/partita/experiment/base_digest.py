"""The digest of a run's frozen base. The base is in no checkpoint, so its digest tells that it is still the same."""

from __future__ import annotations

from pathlib import Path

from partita.core.settings import RunError
from partita.experiment import run_folder
from partita.experiment.experiment import Experiment
from partita.record import file_names
from partita.storage.atomic_files import read_json

BASE_DIGEST = "base_digest"  # key in the environment of a run


def check_base(experiment: Experiment, folder: Path) -> None:
    """Check that the frozen weights are those with which a recorded run began.

    Raises:
        RunError: If they have changed. A run that recorded no digest is not checked.
    """
    path = folder / file_names.ENVIRONMENT
    with run_folder.expect_format(path):
        recorded = read_json(path).get(BASE_DIGEST)
    if recorded is not None and recorded != experiment.base_digest:
        place = experiment.config.model.get("path", experiment.config.model["name"])
        raise RunError(
            f"the frozen weights in '{place}' have changed since the run in {folder} began; restore the files of the "
            "model, or start a new run in another folder"
        )
