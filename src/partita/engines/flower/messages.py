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
from partita.core.safe_text import clean
from partita.core.tensors import Slots, Tensors

FORMAT = "safetensors"
LONGEST = 500  # characters of any text from the other side that is shown or recorded


class MessageError(ValueError):
    """A message that cannot be read, or that holds what it must not."""


def plain(text: object) -> str:
    """A text from the other side, fit for a terminal, a log, a row and a report: one short line, all of it visible."""
    line = clean(str(text)[: LONGEST + 1])
    return line if len(line) <= LONGEST else line[: LONGEST - 4] + " ..."


@dataclass(frozen=True)
class Ticket:
    """Which job a message is about. A reply repeats the ticket of its job, so that no other reply passes for it."""

    round: int
    client: str
    session: str  # a server's life: what a site was sent in another one it no longer holds


@dataclass(frozen=True)
class Order:
    """A job as a site sees it: of its parameters only what travelled, and the seal of all that it should now hold."""

    ticket: Ticket
    sent: Tensors
    slots: Slots
    signal: Mapping[str, float]
    seal: str
    config: str  # the digest of the config that server and sites share
    void: int  # of this round and those after it, the site's own state is void: no answer of theirs reached the server
    settled: int  # no checkpoint can go back behind this round


@dataclass(frozen=True)
class Refusal:
    """Why a site has no answer."""

    reason: str
    fault: bool = False  # something went wrong, as opposed to a client that was to drop out
    empty: bool = False  # it does not hold what the server believes


def of_job(job: Job, seal: str, session: str, config: str, void: int, settled: int) -> RecordDict:
    ticket = asdict(Ticket(job.round, job.client, session))
    about: dict[str, Any] = {"seal": seal, "config": config, "void": void, "settled": settled}
    return RecordDict(
        {
            "job": ConfigRecord({**ticket, **about}),
            "signal": MetricRecord(dict(job.signal)),
            "tensors": _blob({"params": tensors.select(job.params, job.stale), **job.slots}),
        }
    )


def to_order(content: RecordDict) -> Order:
    only(content, ("job", "signal", "tensors"))
    job, slots = _record(content, "job", ConfigRecord), _slots(content)
    return Order(
        to_ticket(content, "job"),
        slots.pop("params", {}),
        slots,
        _numbers(content, "signal"),
        _entry(job, "seal", str),
        _entry(job, "config", str),
        _entry(job, "void", int),
        _entry(job, "settled", int),
    )


def stamped(answer: RecordDict, asked: RecordDict) -> RecordDict:
    """The answer with the ticket of what was asked, if that can be read."""
    try:
        ticket = to_ticket(asked, "job")
    except MessageError:
        return answer
    return RecordDict({**answer, "ticket": ConfigRecord(asdict(ticket))})


def to_ticket(content: RecordDict, name: str = "ticket") -> Ticket:
    record = _record(content, name, ConfigRecord)
    return Ticket(_entry(record, "round", int), _entry(record, "client", str), _entry(record, "session", str))


def of_update(update: Update) -> RecordDict:
    numbers: dict[str, Any] = {"weight": update.weight} | ({} if update.loss is None else {"loss": update.loss})
    return RecordDict(
        {
            "numbers": MetricRecord(numbers),
            "steps": MetricRecord(dict(update.steps)),
            "told": MetricRecord(dict(update.told)),
            "tensors": _blob({"delta": update.delta, **update.slots}),
        }
    )


def to_update(content: RecordDict, ticket: Ticket, limit: int) -> Update:
    """The answer to the ticket's job. `limit` is the most bytes that an honest one can have."""
    only(content, ("ticket", "numbers", "steps", "told", "tensors"))
    numbers = _record(content, "numbers", MetricRecord)
    steps: Any = dict(_record(content, "steps", MetricRecord))  # the rounds look whether they are whole numbers
    slots = _slots(content, limit)
    loss = _entry(numbers, "loss", float) if "loss" in numbers else None
    weight, told = _entry(numbers, "weight", float), _numbers(content, "told")
    return Update(ticket.client, slots.pop("delta", {}), slots, weight, steps, loss, told, round=ticket.round)


def of_scores(scores: Mapping[str, float]) -> RecordDict:
    return RecordDict({"scores": MetricRecord(dict(scores))})


def to_scores(content: RecordDict) -> dict[str, float]:
    only(content, ("ticket", "scores"))
    return _numbers(content, "scores")


def of_name(client: str) -> RecordDict:
    return RecordDict({"site": ConfigRecord({"client": client})})


def to_name(content: RecordDict) -> str:
    return _entry(_record(content, "site", ConfigRecord), "client", str)


def of_refusal(refusal: Refusal) -> RecordDict:
    return RecordDict({"refusal": ConfigRecord({**asdict(refusal), "reason": plain(refusal.reason)})})


def to_refusal(content: RecordDict) -> Refusal | None:
    if "refusal" not in content:
        return None
    record = _record(content, "refusal", ConfigRecord)
    return Refusal(plain(_entry(record, "reason", str)), _entry(record, "fault", bool), _entry(record, "empty", bool))


def stray(given: Iterable[str], known: Container[str]) -> str | None:
    """The first name that is not among the known, which may be the empty text."""
    return next((name for name in given if name not in known), None)


def only(content: RecordDict, names: tuple[str, ...]) -> None:
    if (strange := stray(content, names)) is not None:
        raise MessageError(f"it has a record '{plain(strange)}'; is partita of one version on both sides?")


def is_answer(reply: object) -> bool:
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
        serialization.count(slots)
    except Exception as error:  # bytes made up by somebody else make safetensors and torch fail in any way they can
        raise MessageError(f"its tensors cannot be read ({plain(error)}); were they cut short on the way?") from error
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
        raise MessageError(f"'{plain(name)}' is missing from it, or is no {kind.__name__}")
    return record[name]
