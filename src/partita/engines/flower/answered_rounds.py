"""What a site remembers of what it was asked, so that no message can take it back or use its noise twice."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from partita.core import atomic_files
from partita.core.client import ClientError, ClientState, Job
from partita.engines.flower.fingerprints import Fingerprints
from partita.engines.flower.messages import JobId

SESSIONS_KEPT = 1000  # of one run, at most: a server starts one whenever it starts again


class HistoryError(ValueError):
    """A file of a site's past that cannot be read; going on without it would be unsafe."""


def enter(path: Path, job_id: JobId) -> bool:
    """Note the job, and say whether its session is a new one.

    Rounds of a session only go up, and a session that gave way to another does not return. So an old message that
    somebody sends again is refused, and cannot make the site drop its state.

    Raises:
        ClientFault: the message is an old one.
    """
    seen = _read(path) or {"session": "", "round": 0, "ended": []}
    new = job_id.session != seen["session"]
    if job_id.session in seen["ended"]:
        raise ClientError(job_id.client, f"session '{job_id.session}' has ended here; this is an old message")
    if not new and job_id.round < seen["round"]:
        raise ClientError(
            job_id.client, f"was asked for round {job_id.round} after round {seen['round']}; this is an old message"
        )
    if new and seen["session"]:
        seen["ended"].append(seen["session"])
    if len(seen["ended"]) >= SESSIONS_KEPT:
        raise ClientError(job_id.client, f"has seen {SESSIONS_KEPT} sessions of this run; delete {path.name} to go on")
    if new or job_id.round > seen["round"]:
        atomic_files.write(path, json.dumps({**seen, "session": job_id.session, "round": job_id.round}).encode())
    return new


def claim(path: Path, round: int, asked: str) -> bool:
    """Whether this round's noise may be drawn for what is asked: for the first that asks, and for the same again.

    It is on disk before this returns, and so before the answer leaves.
    """
    with _locked(path):
        answered = _read(path) or {}
        first = answered.setdefault(str(round), asked)
        if first == asked:
            atomic_files.write(path, json.dumps(answered).encode())
    return bool(first == asked)


def fingerprint(job: Job, state: ClientState, config: str, examples: int) -> str:
    """Of all that a client's answer depends on beside its secret and the contents of its examples.

    The client's own state is part of it, since a server has a say in which of its states counts.
    """
    parts = {"params": job.params, "personal": state.personal}
    parts |= {f"slot.{slot}": part for slot, part in job.slots.items()}
    parts |= {f"memory.{slot}": part for slot, part in state.memory.items()}
    fingerprints = {name: Fingerprints()(part) for name, part in sorted(parts.items())}
    whole = json.dumps([config, examples, fingerprints, sorted(job.signal.items())])
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise HistoryError(f"{path.name} in this site's folder is damaged; restore it from a copy") from error
    if not isinstance(found, dict):
        raise HistoryError(f"{path.name} in this site's folder is damaged; restore it from a copy")
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two processes that answer at the same time would both find the round free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
