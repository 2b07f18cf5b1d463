"""What a finished reply of a site holds, read from the reply itself just before it leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from partita.core import serialization
from partita.engines.flower import messages, secure_messages
from partita.engines.flower.messages import ErrorReply, MessageError

ReplyKind = Literal["update", "stage", "scores", "name", "error"]
# The records of each kind of reply. A reply with any other record does not leave.
RECORDS: Mapping[ReplyKind, Mapping[str, type]] = {
    "update": {"numbers": MetricRecord, "steps": MetricRecord, "metrics": MetricRecord, "tensors": ArrayRecord},
    "stage": {secure_messages.BYTES: ArrayRecord},
    "scores": {"scores": MetricRecord},
    "name": {"site": ConfigRecord},
    "error": {"refusal": ConfigRecord},
}
JOB_ID = "job_id"


@dataclass(frozen=True)
class Outgoing:
    """What a reply holds.

    Attributes:
        kind: What it is; "stage" for a message of secure aggregation.
        names: The parameters of which it holds tensors in clear.
        bytes: The bytes of all tensors with their header, as `partita plan` counts them, or of the stage's message.
        numbers: The names of the single numbers that it holds: losses, counts, scores.
        digest: SHA-256 of the reply's content, its object id in Flower.
        tensors: SHA-256 of its tensors alone, which do not name the session; "" if it has none.
        error: The error reply, if it is one.
    """

    kind: ReplyKind
    names: frozenset[str]
    bytes: int
    numbers: tuple[str, ...]
    digest: str
    tensors: str = ""
    error: ErrorReply | None = None


def read_reply(content: RecordDict) -> Outgoing:
    """Read what a reply holds.

    Raises:
        MessageError: If it is none of the replies of `RECORDS`.
    """
    records = set(content) - {JOB_ID}
    kind = next((each for each, known in RECORDS.items() if records == set(known)), None)
    if kind is None or not all(isinstance(content[name], RECORDS[kind][name]) for name in records):
        raise MessageError(f"the reply holds {', '.join(sorted(records)) or 'nothing'}, which is no reply of a site")
    numbers = [key for name in ("numbers", "metrics", "scores") if name in records for key in content[name]]
    blob = _blob(content) if kind == "update" else b""
    size = len(secure_messages.read_bytes(content)) if kind == "stage" else len(blob)
    names = frozenset(name for part in serialization.unpack(blob).values() for name in part) if blob else frozenset()
    return Outgoing(
        kind,
        names,
        size,
        tuple(sorted(map(str, numbers))),
        content.object_id,
        hashlib.sha256(blob).hexdigest() if blob else "",
        messages.decode_error(content) if kind == "error" else None,
    )


def refusal(message: Message, reason: str, like: ErrorReply | None = None) -> Message:
    """Return the reply that says no more than `reason`, which goes to the server.

    Args:
        message: The message that is refused.
        reason: The text.
        like: The error reply whose flags it has. Default: a fault.
    """
    flags = like or ErrorReply("", fault=True)
    content = messages.encode_error(ErrorReply(reason, flags.fault, flags.empty))
    asked = message.content if message.has_content() else RecordDict()
    return Message(messages.with_job_id(content, asked), reply_to=message)


def _blob(content: RecordDict) -> bytes:
    record: Any = content["tensors"]
    if record and list(record) != ["blob"]:
        raise MessageError("the reply's tensors are not one blob")
    return bytes(record["blob"].data) if record else b""
