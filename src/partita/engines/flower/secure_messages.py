"""Messages of secure aggregation over Flower: a job's records, the size of the cohort, and bytes of the protocol.

A site answers with the bytes of the protocol alone: no number of an update is in any record beside them.
"""

from __future__ import annotations

from typing import Any, Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from partita.engines.flower.messages import SAME_VERSION, MessageError, check_records
from partita.secure_aggregation.encoding import write_message

Stage = Literal["advertise", "share_keys", "check", "mask", "confirm", "unmask"]
FORMAT = "partita.secure"
BYTES, COHORT, MESSAGE = "secure", "cohort", "message"  # names of records, and of the only array


def round_id(session: str, config: str, base: str) -> bytes:
    """Return bytes that only this session of this experiment has. Every key of a round depends on them.

    Args:
        session: Id of this start of the server.
        config: Digest of the config that server and sites share.
        base: Digest of the frozen weights.
    """
    return write_message("I", [session.encode(), config.encode(), base.encode()])


def encode_request(job: RecordDict, data: bytes, clients: int) -> RecordDict:
    """Add the server's bytes of a stage to a job.

    Args:
        job: The encoded job.
        data: The bytes; empty in the first stage.
        clients: The size of the round's cohort.
    """
    return RecordDict({**job, BYTES: _record(data), COHORT: ConfigRecord({"clients": clients})})


def decode_request(content: RecordDict) -> tuple[RecordDict, bytes, int]:
    """Return the job, the bytes and the size of the cohort.

    Raises:
        MessageError: If the message cannot be read.
    """
    job = RecordDict({name: record for name, record in content.items() if name not in (BYTES, COHORT)})
    cohort: Any = content.get(COHORT)
    clients = cohort.get("clients") if isinstance(cohort, ConfigRecord) else None
    if type(clients) is not int or not isinstance(content.get(BYTES), ArrayRecord):
        raise MessageError(f"it is not a message of secure aggregation; {SAME_VERSION}")
    return job, _data(content[BYTES]), clients


def encode_reply(data: bytes) -> RecordDict:
    """Encode a site's bytes of a stage."""
    return RecordDict({BYTES: _record(data)})


def decode_reply(content: RecordDict, limit: int) -> bytes:
    """Return a site's bytes of a stage.

    Args:
        content: The reply.
        limit: Maximum bytes of an honest reply.

    Raises:
        MessageError: If the reply cannot be read, holds anything else, or is too large.
    """
    check_records(content, ("job_id", BYTES))
    data = read_bytes(content)
    if len(data) > limit:
        raise MessageError(f"it has {len(data):,} bytes, but the stage needs at most {limit:,}")
    return data


def read_bytes(content: RecordDict) -> bytes:
    """Return the bytes of the protocol in a message.

    Raises:
        MessageError: If it has none.
    """
    if not isinstance(content.get(BYTES), ArrayRecord):
        raise MessageError(f"it has no bytes of secure aggregation; {SAME_VERSION}")
    return _data(content[BYTES])


def _record(data: bytes) -> ArrayRecord:
    return ArrayRecord({MESSAGE: Array("uint8", (len(data),), FORMAT, data)})


def _data(record: Any) -> bytes:
    if list(record) != [MESSAGE] or record[MESSAGE].stype != FORMAT:
        raise MessageError("its bytes are not one array of secure aggregation")
    return bytes(record[MESSAGE].data)
