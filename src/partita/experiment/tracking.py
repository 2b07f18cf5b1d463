"""Trackers: functions that receive every recorded row while a run goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.core.own_code import CodeError
from partita.core.registry import find_function

Row = Mapping[str, Any]
Track = Callable[[Row], None]

TRACKERS: dict[str, str] = {}  # built-in trackers


def open_trackers(names: Sequence[str], config: Mapping[str, Any], folder: Path) -> Track:
    """Return a function that passes each row to all trackers.

    A tracker is a function `(config, folder) -> (row) -> None`. It is called once at each start of the run, and what it
    returns for each recorded round. A round that a crash lost is run and passed again.

    Args:
        names: Names of trackers: "file.py:function", or names that packages register.
        config: The run's config, as nested dicts.
        folder: The run folder.

    Raises:
        CodeError: If a tracker does not return a function.
    """
    opened: dict[str, Track] = {}
    for name in names:
        track = find_function(TRACKERS, name, "tracker")(config, folder)
        if not callable(track):
            raise CodeError(
                f"the tracker '{name}' returned a {type(track).__name__}; it must return a function of a row"
            )
        opened[name] = track

    def track_all(row: Row) -> None:
        for name, track in opened.items():
            try:
                track(row)
            except Exception as error:  # a tracker that fails must not end a run that may have taken days
                warnings.warn(
                    f"the tracker '{name}' failed in round {row['round']}: {type(error).__name__}: {error}",
                    stacklevel=2,
                )

    return track_all
