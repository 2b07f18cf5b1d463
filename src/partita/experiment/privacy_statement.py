"""Collect what a privacy statement needs, from a config or from a run folder."""

from __future__ import annotations

from pathlib import Path

from partita.core.dp_settings import PrivacyError
from partita.experiment import run_folder
from partita.experiment.builder import build
from partita.experiment.config import Config, load_recorded
from partita.privacy.ledger import Ledger
from partita.privacy.statement import Subject, statement
from partita.record import file_names
from partita.storage.atomic_files import read_json


def statement_of_config(config: Config, ledger: Path | None = None) -> str:
    """Return the statement about a run that is planned.

    Args:
        config: The experiment.
        ledger: The site's ledger. Default: the one of `engine.ledger`.

    Raises:
        PrivacyError: If the experiment has no guarantee.
    """
    guard = build(config).guard
    if guard is None:
        raise PrivacyError("the config has no [privacy] table, so there is no guarantee to state; add one")
    return statement(
        Subject(
            config.label,
            guard.about(),
            guard.planned,
            config.rounds,
            secret_file=config.engine.secret_file is not None,
            ledger=_ledger(config, ledger),
        )
    )


def statement_of_run(folder: Path, ledger: Path | None = None) -> str:
    """Return the statement about a run, for the rounds that are done.

    Args:
        folder: The run folder.
        ledger: The site's ledger. Default: the one of `engine.ledger`.

    Raises:
        PrivacyError: If the run has no guarantee, or has not finished a round.
    """
    run_folder.verify(folder)
    config = load_recorded(folder)
    if config.privacy is None:
        raise PrivacyError(f"{folder} is not a private run, so there is no guarantee to state")
    rows = list(run_folder.read_rows(folder))
    if not rows:
        raise PrivacyError(f"{folder} has no finished round; finish it with 'partita resume {folder}'")
    about = read_json(folder / file_names.PRIVACY)
    audit = read_json(folder / file_names.AUDIT) if (folder / file_names.AUDIT).is_file() else {}
    same_unit = audit.get("group", about.get("group")) == about.get("group")  # an audit may attack other units
    return statement(
        Subject(
            config.label,
            about,
            rows[-1]["privacy"]["epsilon"],
            len(rows),
            finished=True,
            secret_file=config.engine.secret_file is not None,
            bound=audit.get("bound") if same_unit else None,
            ledger=_ledger(config, ledger),
        )
    )


def _ledger(config: Config, given: Path | None) -> Ledger | None:
    path = given or (None if config.engine.ledger is None else Path(config.engine.ledger))
    return None if path is None else Ledger.load(path)
