"""Small JSON records in a site's folder, and their locks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from filelock import FileLock


class HistoryError(ValueError):
    """A site's record cannot be read. Continuing without it would be unsafe."""


def read_record(path: Path) -> dict[str, Any] | None:
    """Return a record of the site; None if there is none yet.

    Raises:
        HistoryError: If the file is damaged.
    """
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise HistoryError(f"{path.name} in this site's folder is damaged; restore it from a copy") from error
    if not isinstance(record, dict):
        raise HistoryError(f"{path.name} in this site's folder is damaged; restore it from a copy")
    return record


def lock(path: Path) -> FileLock:
    """Return the lock of a record. Without it, two processes that answer at the same time would read the same record.

    Args:
        path: The record. Its folder is created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_suffix(".lock"), poll_interval=0.01, fallback_to_soft=False)
