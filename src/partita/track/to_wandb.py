"""Weights & Biases: online if the user is logged in or sets WANDB_MODE, else a folder for `wandb sync`."""

from __future__ import annotations

import netrc
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from partita.track import Table, TrackedRun


class Wandb:
    """Logs to a run whose id stays the same when the run is resumed."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.wandb = wandb
        mode = os.environ.get("WANDB_MODE") or ("online" if is_logged_in() else "offline")
        run.folder.mkdir(parents=True, exist_ok=True)
        for old in run.folder.glob(f"wandb/offline-run-*-{run.id}"):
            # A killed process may not have written all of it, and an offline run cannot be continued. All rounds are
            # logged again, so that the newest folder holds the whole run.
            shutil.rmtree(old)
        self.run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            group=run.group or None,
            config=dict(run.settings),
            allow_val_change=True,
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            dir=str(run.folder),
            reinit="create_new",
            settings=_only_what_is_logged(wandb),
        )
        for link in run.folder.glob("wandb/*/logs/*"):  # to a log in the user's cache; a run folder holds no links
            if link.is_symlink():
                link.unlink()
        self.first = self.run.step  # the server knows; 0 if offline

    def log(self, round: int, scalars: Mapping[str, float], tables: Mapping[str, Table]) -> None:
        """Log a round."""
        shown = {
            name: self.wandb.Table(columns=list(table[0]), data=[list(line.values()) for line in table])
            for name, table in tables.items()
        }
        self.run.log({**scalars, **shown}, step=round, commit=True)

    def close(self, finished: bool) -> None:
        """Upload or write the rest."""
        self.run.finish(exit_code=0 if finished else 1)


def open_run(run: TrackedRun) -> Wandb:
    """Open a run."""
    return Wandb(run)


def is_logged_in() -> bool:
    """Whether there is a key for the W&B server: in the environment or in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    files = [Path(given)] if (given := os.environ.get("NETRC")) else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        try:
            if host in netrc.netrc(file).hosts:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _only_what_is_logged(wandb: Any) -> Any:
    """Turn off what wandb collects itself: output, code, git, packages, command, host and use of the machine."""
    return wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        symlink=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
