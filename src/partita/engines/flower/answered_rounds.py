"""A site's record of the jobs it received. It rejects replayed messages and prevents the reuse of noise."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from partita.core.client import ClientError, ClientState, Job
from partita.engines.flower.fingerprints import Fingerprints
from partita.engines.flower.messages import JobId
from partita.engines.flower.site_files import lock, read_record
from partita.storage import atomic_files

SESSIONS_KEPT = 1000  # maximum number of sessions per run; each start of the server begins one


def register_job(path: Path, job_id: JobId, base: str = "") -> bool:
    """Record a job and check that it is not a replay.

    Rounds never decrease within a session, and a session that was replaced by another does not return. So a replayed
    message is refused and cannot make the site drop its state.

    Args:
        path: The site's session file.
        job_id: The job.
        base: Digest of the site's frozen weights.

    Returns:
        Whether the session is new.

    Raises:
        ClientError: If the message is an old one, or there were too many sessions.
    """
    record = read_record(path) or {"session": "", "round": 0, "ended": []}
    new = job_id.session != record["session"]
    if job_id.session in record["ended"]:
        raise ClientError(job_id.client, f"session '{job_id.session}' has ended here; this is an old message")
    if not new and job_id.round < record["round"]:
        raise ClientError(
            job_id.client, f"was asked for round {job_id.round} after round {record['round']}; this is an old message"
        )
    if new and record["session"]:
        record["ended"].append(record["session"])
    if len(record["ended"]) >= SESSIONS_KEPT:
        raise ClientError(
            job_id.client, f"has seen {SESSIONS_KEPT} sessions of this run; delete {path.name} to continue"
        )
    if new or job_id.round > record["round"]:
        record |= {"session": job_id.session, "round": job_id.round, "base": base}
        atomic_files.write(path, json.dumps(record).encode())
    return new


def base_in_session(path: Path, session: str) -> str | None:
    """Return the digest of the site's frozen weights as recorded in this session; None if it is a new one."""
    record = read_record(path) or {"session": ""}
    return record.get("base") if record["session"] == session else None


def claim(path: Path, round: int, request: str) -> bool:
    """Claim a round's noise for a request.

    The first request of a round gets the noise, and so does an identical repetition. The claim is on disk before this
    function returns, so before the answer is sent.

    Args:
        path: The site's record of answered rounds.
        round: The round.
        request: Fingerprint of the request.

    Returns:
        Whether noise may be drawn for this request.
    """
    with lock(path):
        answered = read_record(path) or {}
        claimed = answered.setdefault(str(round), request)
        if claimed == request:
            atomic_files.write(path, json.dumps(answered).encode())
    return bool(claimed == request)


def fingerprint(job: Job, state: ClientState, config: str, examples: int, data: str) -> str:
    """Hash everything a client's answer depends on, except its secret.

    The client's own state is included, because the server influences which of its states is used.

    Args:
        job: The job, with all parameters.
        state: The client's state before the round.
        config: The digest of the config that server and sites share.
        examples: The client's number of training examples.
        data: Digest of these examples; "" if unknown.
    """
    parts = {"params": job.params, "personal": state.personal}
    parts |= {f"slot.{slot}": part for slot, part in job.slots.items()}
    parts |= {f"memory.{slot}": part for slot, part in state.memory.items()}
    fingerprints = {name: Fingerprints()(part) for name, part in sorted(parts.items())}
    content = json.dumps([config, examples, data, fingerprints, sorted(job.signal.items())])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
