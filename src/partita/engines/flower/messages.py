"""What travels between server and site: tensors as one safetensors blob, the rest as typed records. Nothing is pickled.

The blob is what `core/serialization.py` packs and counts, so the bytes in a row are those of the blob.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from partita.core import serialization, tensors
from partita.core.client import Job
from partita.core.method import Update
from partita.core.safe_text import printable
from partita.core.tensors import Slots, Tensors

FORMAT = "safetensors"
MAX_TEXT = 500  # characters of any text from the other side that is shown or recorded


class MessageError(ValueError):
    """A message that cannot be read, or that holds what it must not."""


def printable_line(text: object) -> str:
    """A text from the other side, fit for a terminal, a log, a row and a report: one short line, all of it visible."""
    line = printable(str(text)[: MAX_TEXT + 1])
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 4] + " ..."


@dataclass(frozen=True)
class JobId:
    """Which job a message is about. A reply repeats the ticket of its job, so that no other reply passes for it."""

    round: int
    client: str
    session: str  # a server's life: what a site was sent in another one it no longer holds


@dataclass(frozen=True)
class SiteRequest:
    """A job as a site sees it: of its parameters only what travelled, and the seal of all that it should now hold."""

    job_id: JobId
    sent: Tensors
    slots: Slots
    signal: Mapping[str, float]
    fingerprint: str
    config: str  # the digest of the config that server and sites share
    void: int  # of this round and those after it, the site's own state is void: no answer of theirs reached the server
    settled: int  # no checkpoint can go back behind this round


@dataclass(frozen=True)
class ErrorReply:
    """Why a site has no answer."""

    reason: str
    fault: bool = False  # something went wrong, as opposed to a client that was to drop out
    empty: bool = False  # it does not hold what the server believes


def encode_job(job: Job, fingerprint: str, session: str, config: str, void: int, settled: int) -> RecordDict:
    job_id = asdict(JobId(job.round, job.client, session))
    about: dict[str, Any] = {"seal": fingerprint, "config": config, "void": void, "settled": settled}
    return RecordDict(
        {
            "job": ConfigRecord({**job_id, **about}),
            "signal": MetricRecord(dict(job.signal)),
            "tensors": _blob({"params": tensors.select(job.params, job.stale), **job.slots}),
        }
    )


def decode_job(content: RecordDict) -> SiteRequest:
    check_records(content, ("job", "signal", "tensors"))
    job, slots = _record(content, "job", ConfigRecord), _slots(content)
    return SiteRequest(
        decode_job_id(content, "job"),
        slots.pop("params", {}),
        slots,
        _numbers(content, "signal"),
        _entry(job, "seal", str),
        _entry(job, "config", str),
        _entry(job, "void", int),
        _entry(job, "settled", int),
    )


def with_job_id(answer: RecordDict, asked: RecordDict) -> RecordDict:
    """The answer with the ticket of what was asked, if that can be read."""
    try:
        job_id = decode_job_id(asked, "job")
    except MessageError:
        return answer
    return RecordDict({**answer, "job_id": ConfigRecord(asdict(job_id))})


def decode_job_id(content: RecordDict, name: str = "job_id") -> JobId:
    record = _record(content, name, ConfigRecord)
    return JobId(_entry(record, "round", int), _entry(record, "client", str), _entry(record, "session", str))


def encode_update(update: Update) -> RecordDict:
    numbers: dict[str, Any] = {"weight": update.weight} | ({} if update.loss is None else {"loss": update.loss})
    return RecordDict(
        {
            "numbers": MetricRecord(numbers),
            "steps": MetricRecord(dict(update.steps)),
            "metrics": MetricRecord(dict(update.metrics)),
            "tensors": _blob({"delta": update.delta, **update.slots}),
        }
    )


def decode_update(content: RecordDict, job_id: JobId, limit: int) -> Update:
    """The answer to the ticket's job. `limit` is the most bytes that an honest one can have."""
    check_records(content, ("job_id", "numbers", "steps", "metrics", "tensors"))
    numbers = _record(content, "numbers", MetricRecord)
    steps: Any = dict(_record(content, "steps", MetricRecord))  # the rounds look whether they are whole numbers
    slots = _slots(content, limit)
    loss = _entry(numbers, "loss", float) if "loss" in numbers else None
    weight, metrics = _entry(numbers, "weight", float), _numbers(content, "metrics")
    return Update(job_id.client, slots.pop("delta", {}), slots, weight, steps, loss, metrics, round=job_id.round)


def encode_scores(scores: Mapping[str, float]) -> RecordDict:
    return RecordDict({"scores": MetricRecord(dict(scores))})


def decode_scores(content: RecordDict) -> dict[str, float]:
    check_records(content, ("job_id", "scores"))
    return _numbers(content, "scores")


def encode_name(client: str) -> RecordDict:
    return RecordDict({"site": ConfigRecord({"client": client})})


def decode_name(content: RecordDict) -> str:
    return _entry(_record(content, "site", ConfigRecord), "client", str)


def encode_error(refusal: ErrorReply) -> RecordDict:
    return RecordDict({"refusal": ConfigRecord({**asdict(refusal), "reason": printable_line(refusal.reason)})})


def decode_error(content: RecordDict) -> ErrorReply | None:
    if "refusal" not in content:
        return None
    record = _record(content, "refusal", ConfigRecord)
    return ErrorReply(
        printable_line(_entry(record, "reason", str)), _entry(record, "fault", bool), _entry(record, "empty", bool)
    )


def first_unknown(given: Iterable[str], known: Container[str]) -> str | None:
    """The first name that is not among the known, which may be the empty text."""
    return next((name for name in given if name not in known), None)


def check_records(content: RecordDict, names: tuple[str, ...]) -> None:
    if (strange := first_unknown(content, names)) is not None:
        raise MessageError(f"it has a record '{printable_line(strange)}'; is partita of one version on both sides?")


def has_result(reply: object) -> bool:
    """Whether it is a reply with what was asked for, as opposed to an error, a refusal, or none."""
    return isinstance(reply, Message) and reply.has_content() and "refusal" not in reply.content


def _blob(slots: serialization.Message) -> ArrayRecord:
    if not any(slots.values()):
        return ArrayRecord()
    data = serialization.pack(slots)
    return ArrayRecord({"blob": Array("uint8", (len(data),), FORMAT, data)})


def _slots(content: RecordDict, limit: int | None = None) -> dict[str, Tensors]:
    record = _record(content, "tensors", ArrayRecord)
    if not record:
        return {}
    if list(record) != ["blob"] or record["blob"].stype != FORMAT:
        raise MessageError(f"its tensors are not one {FORMAT} blob; is partita of one version on both sides?")
    data = record["blob"].data
    if limit is not None and len(data) > limit:
        raise MessageError(f"it has {len(data):,} bytes of tensors, and all that a plan can send up fits in {limit:,}")
    try:
        slots = serialization.unpack(data)
        serialization.byte_counts(slots)
    except Exception as error:  # bytes made up by somebody else make safetensors and torch fail in any way they can
        raise MessageError(
            f"its tensors cannot be read ({printable_line(error)}); were they cut short on the way?"
        ) from error
    return slots


def _numbers(content: RecordDict, name: str) -> dict[str, float]:
    record = _record(content, name, MetricRecord)
    return {key: _entry(record, key, float) for key in record}


def _record(content: RecordDict, name: str, kind: type[Any]) -> Any:
    if not isinstance(content.get(name), kind):
        raise MessageError(f"it has no {kind.__name__} '{name}'; is partita of one version on both sides?")
    return content[name]


def _entry(record: Any, name: str, kind: type[Any]) -> Any:
    if type(record.get(name)) is not kind:
        raise MessageError(f"'{printable_line(name)}' is missing from it, or is no {kind.__name__}")
    return record[name]
