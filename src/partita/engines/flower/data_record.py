"""A site's record of the data that it trains on. A site whose data has changed waits until its operator decides."""

from __future__ import annotations

import json
from pathlib import Path

from partita.core.client import ClientError
from partita.engines.flower.site_files import read_record
from partita.storage import atomic_files

FILE = "data.json"


def check_data(folder: Path, client: str, digest: str) -> None:
    """Record the digest of the site's data with its first job, and compare it in later jobs.

    Updates from changed data would mix two datasets in one run. Under privacy, a round that is asked again would get
    the same noise for other data, and the difference of the two replies would reveal the change.

    Args:
        folder: The site's folder of the experiment.
        client: The client's name.
        digest: Digest of its training examples; "" if unknown.

    Raises:
        ClientError: If the data differs from that of earlier jobs.
    """
    if not digest:
        return
    record = read_record(folder / FILE)
    if record is None:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_files.write(folder / FILE, json.dumps({"digest": digest}).encode())
    elif record.get("digest") != digest:
        raise ClientError(
            client,
            "its training data has changed since it joined the run; the site restores the data, or accepts the change: "
            f"it deletes {FILE} in its folder",
        )
