"""Built-in trackers. Each shows recorded rows in one library, under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from partita.core.options import OptionError

# Name of a tracker -> the function that opens it. The libraries have the same names.
TRACKERS: dict[str, str] = {
    "tensorboard": "partita.track.to_tensorboard:open_run",
    "wandb": "partita.track.to_wandb:open_run",
    "mlflow": "partita.track.to_mlflow:open_run",
    "trackio": "partita.track.to_trackio:open_run",
}
NEEDS: dict[str, tuple[str, ...]] = {name: (name,) for name in TRACKERS} | {
    "mlflow": ("mlflow", "alembic", "sqlalchemy")
}

Table = list[dict[str, Any]]  # one dict per line, all with the same keys


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker learns about a run when it opens.

    Attributes:
        id: Letters and digits that are unique to the run, and stay the same when it is resumed.
        project: The project that the run belongs to.
        name: The run's name.
        group: The comparison that the run belongs to; "" if there is none.
        settings: The settings by dotted key, without secrets and paths.
        folder: A folder in the run folder for files of this tracker. It may not exist yet.
    """

    id: str
    project: str
    name: str
    group: str
    settings: Mapping[str, Any]
    folder: Path


class Tracker(Protocol):
    """An open run in a tracking library.

    Attributes:
        first: The first round that the library does not have yet.
    """

    first: int

    def log(self, round: int, scalars: Mapping[str, float], tables: Mapping[str, Table]) -> None:
        """Record a round."""

    def close(self, finished: bool) -> None:
        """Write all that is still buffered, and say whether the run is finished."""


def check_installed(name: str) -> None:
    """Check that the library of a built-in tracker is installed. Other names pass.

    Raises:
        OptionError: If it is not.
    """
    if missing := [library for library in NEEDS.get(name, ()) if find_spec(library) is None]:
        raise OptionError(
            f"the tracker '{name}' needs {' and '.join(missing)}; install it with: pip install 'partita[track]'"
        )
