"""Messages between server and site: tensors as one safetensors blob, the rest as typed records. Nothing is pickled.

`core/serialization.py` packs the blob and counts its bytes, so the byte counts in a row are those of the blob.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from partita.core import serialization, tensors
from partita.core.client import Job
from partita.core.tensors import Slots, Tensors
from partita.core.update import Update
from partita.storage.safe_text import printable

FORMAT = "safetensors"
PARTS = ("test", "validation")
Part = Literal["test", "validation"]
JOB = ("round", "client", "session", "seal", "config", "base", "void", "settled", "part")  # entries of a job
SAME_VERSION = "do both sides run the same partita version?"
MAX_NUMBERS = 20_000  # of a record; more would take seconds to read
MAX_TEXT = 500  # maximum length of a text from the other side that is shown or recorded


class MessageError(ValueError):
    """A message cannot be read or holds forbidden content."""


def printable_line(text: object) -> str:
    """Make untrusted text safe for terminals, logs, rows and reports: one short line of printable characters."""
    line = printable(str(text)[: MAX_TEXT + 1])
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 4] + " ..."


@dataclass(frozen=True)
class Size:
    """How large the tensors of an honest message are at most. More is refused before anything is decoded.

    Attributes:
        bytes: All bytes.
        header: Those that name the tensors; they bound the number of tensors.
    """

    bytes: int
    header: int


@dataclass(frozen=True)
class JobId:
    """Identifies the job of a message. A reply repeats it, so that a reply to another job is not accepted.

    Attributes:
        round: The round, from 0.
        client: The client's name.
        session: One per start of the server. A site discards its copies from other sessions.
    """

    round: int
    client: str
    session: str


@dataclass(frozen=True)
class SiteRequest:
    """A job as a site receives it.

    Attributes:
        job_id: Identifies the job.
        sent: The parameters that the site does not hold yet.
        slots: `Job.slots`.
        signal: `Job.signal`.
        fingerprint: The fingerprint of all parameters that the site should hold now.
        config: The digest of the config that server and sites share.
        base: The digest of the server's frozen weights; "" if it has none.
        void: The site's state of this round and later is void, because no such answer reached the server.
        settled: No checkpoint of the server is older than this round.
        part: The client's examples that an evaluation is on.
    """

    job_id: JobId
    sent: Tensors
    slots: Slots
    signal: Mapping[str, float]
    fingerprint: str
    config: str
    base: str
    void: int
    settled: int
    part: Part = "test"


@dataclass(frozen=True)
class ErrorReply:
    """A site's reply without a result.

    Attributes:
        reason: Why there is no result.
        fault: Whether it is an error, as opposed to a simulated dropout.
        empty: Whether the site does not hold the parameters that the server assumes.
    """

    reason: str
    fault: bool = False
    empty: bool = False


def encode_job(
    job: Job, fingerprint: str, session: str, config: str, base: str, void: int, settled: int, part: Part = "test"
) -> RecordDict:
    """Encode a job. `SiteRequest` and `JobId` explain all arguments but `job`."""
    job_id = asdict(JobId(job.round, job.client, session))
    fields: dict[str, Any] = {"seal": fingerprint, "config": config, "base": base, "void": void, "settled": settled}
    fields["part"] = part
    return RecordDict(
        {
            "job": ConfigRecord({**job_id, **fields}),
            "signal": MetricRecord(dict(job.signal)),
            "tensors": _tensor_record({"params": tensors.select(job.params, job.stale), **job.slots}),
        }
    )


def decode_job(content: RecordDict, most: Size) -> SiteRequest:
    """Decode a job at the site.

    Args:
        content: The message.
        most: The largest tensors of an honest job.

    Raises:
        MessageError: If the job cannot be read, or it is too large.
    """
    check_records(content, ("job", "signal", "tensors"))
    job, slots = _record(content, "job", ConfigRecord), _slots(content, most)
    if (unknown := first_unknown(job, JOB)) is not None:
        raise MessageError(f"its job has an entry '{printable_line(unknown)}'; {SAME_VERSION}")
    part: Any = _entry(job, "part", str)
    if part not in PARTS:
        raise MessageError(
            f"it asks for the part '{printable_line(part)}' of a client's examples, which does not exist"
        )
    return SiteRequest(
        decode_job_id(content, "job"),
        slots.pop("params", {}),
        slots,
        _numbers(content, "signal"),
        _entry(job, "seal", str),
        _entry(job, "config", str),
        _entry(job, "base", str),
        _entry(job, "void", int),
        _entry(job, "settled", int),
        part,
    )


def with_job_id(answer: RecordDict, request: RecordDict) -> RecordDict:
    """Add the job id of the request to an answer, if it can be read."""
    try:
        job_id = decode_job_id(request, "job")
    except MessageError:
        return answer
    return RecordDict({**answer, "job_id": ConfigRecord(asdict(job_id))})


def decode_job_id(content: RecordDict, name: str = "job_id") -> JobId:
    """Read the job id from the record `name` of a message.

    Raises:
        MessageError: If the job id cannot be read.
    """
    record = _record(content, name, ConfigRecord)
    return JobId(_entry(record, "round", int), _entry(record, "client", str), _entry(record, "session", str))


def encode_update(update: Update) -> RecordDict:
    """Encode an update, without its job id."""
    numbers: dict[str, Any] = {"weight": update.weight} | ({} if update.loss is None else {"loss": update.loss})
    return RecordDict(
        {
            "numbers": MetricRecord(numbers),
            "steps": MetricRecord(dict(update.steps)),
            "metrics": MetricRecord(dict(update.metrics)),
            "tensors": _tensor_record({"delta": update.delta, **update.slots}),
        }
    )


def decode_update(content: RecordDict, job_id: JobId, most: Size) -> Update:
    """Decode an update at the server.

    Args:
        content: The reply.
        job_id: The job that it answers.
        most: The largest tensors of an honest update.

    Raises:
        MessageError: If the reply cannot be read, or it is too large.
    """
    check_records(content, ("job_id", "numbers", "steps", "metrics", "tensors"))
    numbers = _record(content, "numbers", MetricRecord)
    steps: Any = dict(_record(content, "steps", MetricRecord))  # core/update_checks.py checks that they are integers
    slots = _slots(content, most)
    loss = _entry(numbers, "loss", float) if "loss" in numbers else None
    weight, metrics = _entry(numbers, "weight", float), _numbers(content, "metrics")
    return Update(job_id.client, slots.pop("delta", {}), slots, weight, steps, loss, metrics, round=job_id.round)


def encode_scores(scores: Mapping[str, float]) -> RecordDict:
    """Encode a client's scores."""
    return RecordDict({"scores": MetricRecord(dict(scores))})


def decode_scores(content: RecordDict) -> dict[str, float]:
    """Decode a client's scores and return them by metric.

    Raises:
        MessageError: If the scores cannot be read.
    """
    check_records(content, ("job_id", "scores"))
    return _numbers(content, "scores")


def encode_name(client: str) -> RecordDict:
    """Encode a client's name."""
    return RecordDict({"site": ConfigRecord({"client": client})})


def decode_name(content: RecordDict) -> str:
    """Decode a client's name.

    Raises:
        MessageError: If the name cannot be read.
    """
    return _entry(_record(content, "site", ConfigRecord), "client", str)


def encode_error(refusal: ErrorReply) -> RecordDict:
    """Encode an error reply."""
    return RecordDict({"refusal": ConfigRecord({**asdict(refusal), "reason": printable_line(refusal.reason)})})


def decode_error(content: RecordDict) -> ErrorReply | None:
    """Decode an error reply, or return None if the reply holds a result."""
    if "refusal" not in content:
        return None
    record = _record(content, "refusal", ConfigRecord)
    return ErrorReply(
        printable_line(_entry(record, "reason", str)), _entry(record, "fault", bool), _entry(record, "empty", bool)
    )


def first_unknown(given: Iterable[str], known: Container[str]) -> str | None:
    """Return the first name of `given` that is not in `known`, or None. A name may be the empty string."""
    return next((name for name in given if name not in known), None)


def check_records(content: RecordDict, names: tuple[str, ...]) -> None:
    """Raise a MessageError if a message has a record whose name is not in `names`."""
    if (unknown := first_unknown(content, names)) is not None:
        raise MessageError(f"it has a record '{printable_line(unknown)}'; {SAME_VERSION}")


def has_result(reply: object) -> bool:
    """Return whether a reply holds a result, as opposed to an error, an error reply, or nothing."""
    return isinstance(reply, Message) and reply.has_content() and "refusal" not in reply.content


def _tensor_record(slots: serialization.Message) -> ArrayRecord:
    if not any(slots.values()):
        return ArrayRecord()
    data = serialization.pack(slots)
    return ArrayRecord({"blob": Array("uint8", (len(data),), FORMAT, data)})


def _slots(content: RecordDict, most: Size) -> dict[str, Tensors]:
    record = _record(content, "tensors", ArrayRecord)
    if not record:
        return {}
    if list(record) != ["blob"] or record["blob"].stype != FORMAT:
        raise MessageError(f"its tensors are not one {FORMAT} blob; {SAME_VERSION}")
    data = record["blob"].data
    if len(data) > most.bytes:
        raise MessageError(f"it has {len(data):,} bytes of tensors, but the plan sends at most {most.bytes:,}")
    if (header := serialization.header_bytes(data)) > most.header:
        raise MessageError(f"it names tensors in {header:,} bytes, but the plan needs at most {most.header:,}")
    try:
        slots = serialization.unpack(data)
        serialization.byte_counts(slots)
    except Exception as error:  # untrusted bytes can make safetensors and torch raise any exception
        raise MessageError(
            f"its tensors cannot be read ({printable_line(error)}); was the message truncated?"
        ) from error
    return slots


def _numbers(content: RecordDict, name: str) -> dict[str, float]:
    record = _record(content, name, MetricRecord)
    if len(record) > MAX_NUMBERS:
        raise MessageError(f"it has {len(record):,} numbers in '{name}'; at most {MAX_NUMBERS:,} are read")
    return {key: _entry(record, key, float) for key in record}


def _record(content: RecordDict, name: str, kind: type[Any]) -> Any:
    if not isinstance(content.get(name), kind):
        raise MessageError(f"it has no {kind.__name__} '{name}'; {SAME_VERSION}")
    return content[name]


def _entry(record: Any, name: str, kind: type[Any]) -> Any:
    if type(record.get(name)) is not kind:
        raise MessageError(f"'{printable_line(name)}' is missing, or its type is not {kind.__name__}")
    return record[name]
