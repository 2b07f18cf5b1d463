"""Attacks on the Flower engine, on the server by a hostile site and on a site by a hostile server."""

from __future__ import annotations

import json
import shlex
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from google.protobuf.message import DecodeError
from grids import CPU, THREE, Reply, Tamper, Wire, blob, carried, flower, records, rewritten, tampered, wired
from grids import one_task as one_task
from helpers import SMALL_TASK, SMALL_VIT, files_in, last, run_of, small

from partita import flower_app
from partita.config import load
from partita.core import tree
from partita.core.learn import ClientFault, Job
from partita.core.method import Method, Update
from partita.core.private import Private
from partita.core.rng import Key
from partita.core.rounds import Lost, ask, begin, rounds
from partita.core.run import Run
from partita.core.text import component, label_folder
from partita.engines.embedded import Embedded
from partita.engines.faults import Faults
from partita.engines.flower import client, history, messages
from partita.engines.flower.client import Site, client_app
from partita.engines.flower.messages import LONGEST, Refusal
from partita.engines.flower.seals import Seals
from partita.evaluate import ACCURACY
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.scaffold import scaffold
from partita.report.page import _lost as lost_table

MANY = 3_000
LONG = "x" * 1_000_000
ODD = "\x1b[2J\r\n\u202e<script>alert(1)</script>"

# ---- a hostile site: its answer to a training job


@dataclass(frozen=True)
class Attack:
    tamper: Tamper
    reason: str  # part of what is recorded; "" where the answer counts, since nothing tells it from an honest one
    method: str = "fedavg"
    kept: bool = False  # refused by the rounds and not by the engine: the site itself goes on from what it learned


def numbers(**changes: Any) -> Tamper:
    """MetricRecords and others beside the tensors, each with entries changed or added."""

    def tamper(message: Message, reply: Message) -> Message:
        content = dict(reply.content)
        for name, entries in changes.items():
            content[name] = MetricRecord({**content[name], **entries})  # type: ignore[dict-item]
        return Message(RecordDict(content), reply_to=message)

    return tamper


def without(name: str) -> Tamper:
    def tamper(message: Message, reply: Message) -> Message:
        return Message(RecordDict({k: v for k, v in reply.content.items() if k != name}), reply_to=message)

    return tamper


def ticket(**changes: Any) -> Tamper:
    def tamper(message: Message, reply: Message) -> Message:
        record = ConfigRecord({**reply.content["ticket"], **changes})  # type: ignore[dict-item]
        return Message(RecordDict({**reply.content, "ticket": record}), reply_to=message)

    return tamper


def refusal(reason: Any, **more: Any) -> Tamper:
    def tamper(message: Message, reply: Message) -> Message:
        record = ConfigRecord({"reason": reason, "fault": True, "empty": False} | more)
        return Message(RecordDict({"refusal": record, "ticket": reply.content["ticket"]}), reply_to=message)

    return tamper


def packed(header: Any, body: bytes = b"\0" * 48, length: int | None = None) -> Tamper:
    """A safetensors file made by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return blob(lambda data: struct.pack("<Q", len(text) if length is None else length) + text + body)


def entry(kind: str = "F32", shape: Any = (3, 4), offsets: Any = (0, 48)) -> dict[str, Any]:
    return {"delta/head.weight": {"dtype": kind, "shape": shape, "data_offsets": offsets}}


def delta(change: Callable[[torch.Tensor], torch.Tensor], name: str = "head.weight") -> Tamper:
    return rewritten(delta=lambda found: {**found, name: change(found[name])})


def extra(name: str) -> Tamper:
    return rewritten(delta=lambda found: {**found, name: torch.zeros(2)})


def two_blobs(message: Message, reply: Message) -> Message:
    [whole] = reply.content["tensors"].values()  # type: ignore[union-attr]
    return Message(
        RecordDict({**reply.content, "tensors": ArrayRecord({"blob": whole, "more": whole})}), reply_to=message
    )


def of_error(reason: str) -> Tamper:
    return lambda message, reply: Message(Error(5, reason), reply_to=message)


def elsewhere(message: Message, reply: Message) -> Message:
    """In answer to another message."""
    reply.metadata.__dict__["_reply_to_message_id"] = "another"
    return reply


def empty(message: Message, reply: Message) -> Message:
    """Neither content nor error, which Flower cannot unpack."""
    reply.__dict__["_content"] = None
    return reply


NO_USE = "its answer is of no use: "
UNREAD = "its tensors cannot be read"
ATTACKS: dict[str, Attack] = {
    **{f"no {name}": Attack(without(name), f"Record '{name}'") for name in ("numbers", "steps", "told", "tensors")},
    **{
        f"a ConfigRecord as {name}": Attack(records(**{name: ConfigRecord({"a": 1})}), f"Record '{name}'")
        for name in ("numbers", "steps", "told", "tensors")
    },
    "no ticket": Attack(without("ticket"), "no ConfigRecord 'ticket'"),
    "a ticket of numbers": Attack(records(ticket=MetricRecord({"round": 0})), "no ConfigRecord 'ticket'"),
    "a ticket of another round": Attack(ticket(round=1), "it answers round 1 of client 'c1'"),
    "a ticket of round -1": Attack(ticket(round=-1), "it answers round -1"),
    "a ticket of another client": Attack(ticket(client="c0"), "of client 'c0' in session"),
    "a ticket of another session": Attack(ticket(session="0"), "in session '0', not round 0"),
    "a ticket with a long name": Attack(ticket(client=LONG), "it answers round 0 of client 'xxx"),
    "a record of its own": Attack(records(more=ConfigRecord({"a": LONG * 10})), "it has a record 'more'"),
    "a record with an odd name": Attack(records(**{ODD: ConfigRecord()}), r"it has a record '\x1b[2J"),
    "an empty message": Attack(empty, "sent a message that cannot be unpacked"),
    "an answer to another message": Attack(elsewhere, "sent an answer to another message"),
    "an error of 1 MB": Attack(of_error(LONG), "could not answer: xxx"),
    "an odd error": Attack(of_error(ODD), r"could not answer: \x1b[2J"),
    "a refusal of 10 MB": Attack(refusal(LONG * 10), "xxx"),
    "an odd refusal": Attack(refusal(ODD), "<script>"),
    "a refusal with a number": Attack(refusal(3), "'reason' is missing"),
    "a refusal with a text for fault": Attack(refusal("r", fault="yes"), "'fault' is missing"),
    **{
        f"the weight {value}": Attack(numbers(numbers={"weight": value}), "sent the weight")
        for value in (float("nan"), float("inf"), -1.0, 1e308, 2e12)
    },
    "a list as weight": Attack(numbers(numbers={"weight": [1.0]}), "'weight' is missing from it, or is no float"),
    **{
        f"the loss {value}": Attack(numbers(numbers={"loss": value}), "sent the loss")
        for value in (float("nan"), float("-inf"), 1e308)
    },
    "steps of a name of its own": Attack(numbers(steps={"mine": 1}), "sent steps of 'mine'"),
    "steps of an odd name": Attack(numbers(steps={ODD: 1}), r"sent steps of '\x1b[2J"),
    "steps of a name of 1 MB": Attack(numbers(steps={LONG: 1}), "sent steps of 'xxx"),
    "steps of many names": Attack(numbers(steps={f"n{i}": 1 for i in range(MANY)}), "sent steps of 'n0'"),
    "a list as steps": Attack(numbers(steps={"head.weight": [1, 2]}), "after [1, 2] steps"),
    "no steps at all": Attack(numbers(steps={"head.weight": 0}), "after 0 steps"),
    "many numbers told": Attack(numbers(told={f"n{i}": 1.0 for i in range(MANY)}), f"told {MANY} numbers"),
    "a number told": Attack(numbers(told={"a": 1.0}), "told 1 numbers, and fedavg tells at most 0"),
    "a layer told of that is not there": Attack(numbers(told={"a/layer.9": 1.0}), "told a number of", "safl"),
    "a layer told of that is no number": Attack(numbers(told={"a/layer.x": 1.0}), "told a number of", "safl"),
    "an odd name told": Attack(numbers(told={ODD: 1.0}), "told a number of", "safl"),
    "a name of 1 MB told": Attack(numbers(told={LONG: 1.0}), "told a number of", "safl"),
    "1e308 told": Attack(numbers(told={"attention/layer.0": 1e308}), "told 1e+308", "safl"),
    "nan told": Attack(numbers(told={"attention/layer.0": float("nan")}), "told nan", "safl"),
    "two blobs": Attack(two_blobs, "are not one safetensors blob"),
    "a pickle": Attack(blob(lambda data: data, "numpy.ndarray"), "are not one safetensors blob"),
    "no bytes": Attack(blob(lambda data: b""), UNREAD),
    "seven bytes": Attack(blob(lambda data: data[:7]), UNREAD),
    "cut short": Attack(blob(lambda data: data[:-1]), UNREAD),
    "bytes behind the end": Attack(blob(lambda data: data + b"\0" * 9), UNREAD),
    "a header of 1 TB": Attack(packed(entry(), length=2**40), UNREAD),
    "a header of 2^63": Attack(packed(entry(), length=2**63), UNREAD),
    "a header of nested lists": Attack(packed(b"[" * 4000), UNREAD),
    "a header that is no object": Attack(packed([1]), UNREAD),
    "a name that is not UTF-8": Attack(
        packed(b'{"delta/\xff\xfe":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'), UNREAD
    ),
    "offsets of gigabytes": Attack(packed(entry(shape=(2**31,), offsets=(0, 2**33))), UNREAD),
    "offsets that overlap": Attack(
        packed({**entry(), "delta/embed.weight": {"dtype": "F32", "shape": (3, 4), "data_offsets": (0, 48)}}), UNREAD
    ),
    "offsets back to front": Attack(packed(entry(offsets=(48, 0))), UNREAD),
    "a negative shape": Attack(packed(entry(shape=(-3, -4))), UNREAD),
    "a shape that overflows": Attack(packed(entry(shape=(2**62, 0, 2**62), offsets=(0, 0)), b""), f"of shape ({2**62}, 0"),
    "a type that torch lacks": Attack(packed(entry("F8_E8M0", (48,))), NO_USE),
    "complex numbers": Attack(packed(entry("C64", (6,))), NO_USE),
    "no name": Attack(packed({"": {"dtype": "F32", "shape": (12,), "data_offsets": (0, 48)}}), "sent the slot ''"),
    "too many bytes": Attack(delta(lambda value: torch.zeros(10**5)), "bytes of tensors"),
    "many names": Attack(rewritten(delta={f"n{i}": torch.zeros(0) for i in range(MANY)}), "bytes of tensors"),
    "a name of its own": Attack(extra("mine"), "sent 'mine', which its plan does not send up in round 0"),
    "an odd name": Attack(extra(ODD), r"sent '\x1b[2J"),
    "a name of 1 MB": Attack(extra(LONG), "bytes of tensors"),
    "a name that its plan keeps": Attack(extra("head.weight"), "sent 'head.weight', which its plan", "fedper"),
    "another shape": Attack(delta(lambda value: value.T.contiguous()), "of shape (4, 3), not (3, 4)"),
    "a scalar": Attack(delta(lambda value: value[0, 0].clone()), "of shape (), not (3, 4)"),
    **{
        f"as {kind}": Attack(delta(lambda value, kind=kind: value.to(kind)), f"as {kind}, not torch.float32")
        for kind in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8)
    },
    **{
        f"the number {value}": Attack(delta(lambda found, value=value: torch.full_like(found, value)), "not finite")
        for value in (float("nan"), float("inf"), float("-inf"))
    },
    "a slot of its own": Attack(rewritten(slots={"mine": {"head.weight": torch.zeros(3, 4)}}), "sent the slot 'mine'"),
    "parameters for a slot": Attack(rewritten(slots={"params": {"head.weight": torch.zeros(3, 4)}}), "slot 'params'"),
    "a slot of another shape": Attack(
        rewritten(slots={"control": {"head.weight": torch.zeros(2)}}), "of shape (2,), not", "scaffold", kept=True
    ),
    "a slot of whole numbers": Attack(
        rewritten(slots={"control": {"head.weight": torch.zeros(3, 4).long()}}), "as torch.int64, not", "scaffold"
    ),
    "64 bits where 8 travel": Attack(
        delta(lambda value: value.double(), "embed.weight"), "as torch.float64, not", "quantise"
    ),
    # What an honest site could have sent: only a method that does not trust single updates helps.
    "a loss of its own": Attack(numbers(numbers={"loss": -7.0}), ""),
    "a million examples": Attack(numbers(numbers={"weight": 1e6}), ""),
    "a large update": Attack(delta(lambda value: value * 100), ""),
    "nothing learned": Attack(rewritten(delta={}), ""),
}  # fmt: skip


def method_of(name: str) -> Method:
    options = {"safl": {"k": 1}}.get(name, {})
    return build(name, options)


def run_under(attack: Attack, tolerate: bool) -> Run:
    return run_of(method_of(attack.method), 2, tolerate=tolerate, drift=False)


@cache
def honest_end(method: str, away: bool) -> str:
    run, model = run_of(method_of(method), 2, drift=False), small()
    faults = Faults(trace={(0, "c1"): 0.0} if away else {})
    return tree.digest(last(list(rounds(run, model, Embedded(run, model, THREE, faults=faults)))))


def strike(attack: Attack, folder: Path, tolerate: bool = True) -> tuple[list[Lost], str]:
    """Whom the server lost in a run in which c1 attacks in the first round, and the digest of the model."""
    run, model = run_under(attack, tolerate), small()
    grid = wired(run, model, THREE, folder)
    tampered(grid, 11, attack.tamper)
    played = list(rounds(run, model, flower(run, model, grid, THREE.clients, deadline=60.0)))
    return [lost for each in played for lost in each.lost], tree.digest(last(played))


@pytest.mark.parametrize("kind", ATTACKS)
def test_no_answer_of_a_site_ends_a_run_or_leaves_a_trace_in_it(kind: str, tmp_path: Path) -> None:
    attack = ATTACKS[kind]
    lost, end = strike(attack, tmp_path)
    if not attack.reason:
        assert lost == []
        return
    assert [each.client for each in lost] == ["c1"]
    reason = lost[0].reason
    assert attack.reason in reason
    assert len(reason) <= LONGEST
    assert reason.isprintable()
    assert attack.kept or end == honest_end(attack.method, away=True)


@pytest.mark.parametrize(
    "kind", ["no ticket", "a ticket of another round", "a refusal of 10 MB", "steps of an odd name", "a header of 1 TB"]
)
def test_a_run_that_does_not_tolerate_faults_ends_with_the_client_and_the_fault(kind: str, tmp_path: Path) -> None:
    attack = ATTACKS[kind]
    with pytest.raises(ClientFault) as ended:
        strike(attack, tmp_path, tolerate=False)
    assert ended.value.client == "c1"
    assert attack.reason in ended.value.reason
    assert len(ended.value.reason) <= LONGEST
    assert ended.value.reason.isprintable()


def test_an_old_answer_and_an_answer_of_another_do_not_pass(tmp_path: Path) -> None:
    """Client c1 sends in round 1 what c0 sent, and in round 2 what it sent itself in round 0."""
    run, model = run_of(fedavg(), 3, tolerate=True, drift=False), small()
    grid = wired(run, model, THREE, tmp_path)
    sent: dict[tuple[int, str], RecordDict] = {}
    honest = {node: grid.nodes[node] for node in (11, 12)}

    def noting(node: int) -> Reply:
        def answer(message: Message) -> Message | None:
            reply = honest[node](message)
            assert reply
            if message.metadata.message_type == "train":
                sent[node, message.metadata.group_id] = reply.content
                old = {(11, "1"): (12, "0"), (11, "2"): (11, "0")}.get((node, message.metadata.group_id))
                return Message(sent[old], reply_to=message) if old else reply
            return reply

        return answer

    grid.nodes |= {node: noting(node) for node in (11, 12)}
    played = list(rounds(run, model, flower(run, model, grid, THREE.clients)))
    reasons = [[lost.reason for lost in each.lost] for each in played]
    assert [len(each) for each in reasons] == [0, 1, 1]
    assert "it answers round 0 of client 'c0'" in reasons[1][0]
    assert "it answers round 0 of client 'c1'" in reasons[2][0]


def test_an_answer_counts_once_though_it_comes_twice(tmp_path: Path) -> None:
    class Echo(Wire):
        def pull_messages(self, message_ids: Any) -> Iterator[Message]:
            for reply in super().pull_messages(message_ids):
                yield from (reply, reply)

    run, model = run_of(fedavg(), 2, drift=False), small()
    grid = wired(run, model, THREE, tmp_path)
    played = list(rounds(run, model, flower(run, model, Echo(grid.nodes), THREE.clients)))
    assert tree.digest(last(played)) == honest_end("fedavg", away=False)


@pytest.mark.parametrize(
    "kind", [IndexError, AttributeError, AssertionError, RecursionError, DecodeError, struct.error]
)
def test_a_message_that_flower_cannot_unpack_loses_its_site_alone(kind: type[Exception], tmp_path: Path) -> None:
    run, model = run_of(fedavg(), 2, tolerate=True, drift=False), small()
    grid = wired(run, model, THREE, tmp_path)

    def breaks(reply: Message) -> None:
        if reply.metadata.src_node_id == 11 and reply.metadata.group_id == "0":
            raise kind("made up")

    grid.fetching = breaks
    played = list(rounds(run, model, flower(run, model, grid, THREE.clients)))
    assert played[0].lost == (Lost("c1", f"sent a message that cannot be unpacked ({kind.__name__})"),)


def test_the_report_shows_a_reason_as_text() -> None:
    class Record:
        label, seed, rows = "run", 0, [{"round": 0, "lost": {"c1": messages.plain(ODD)}}]

    assert "<script>" not in lost_table([Record()])  # type: ignore[list-item]


def test_the_limit_is_that_of_the_round(tmp_path: Path) -> None:
    """After the warm-up the kernel is frozen; a site that still sends it sends too much."""
    run, model = run_of(build("fedfrozen", {"warmup": 1}), 2, tolerate=True, drift=False), small()
    grid = wired(run, model, THREE, tmp_path)
    kept: list[Update] = []

    def note(message: Message, reply: Message) -> Message:
        kept.append(messages.to_update(reply.content, "c1", 10**9))
        return reply

    tampered(grid, 11, note, when=0)
    tampered(grid, 11, lambda message, reply: rewritten(delta=kept[0].delta)(message, reply), when=1)
    played = list(rounds(run, model, flower(run, model, grid, THREE.clients)))
    assert [[lost.client for lost in each.lost] for each in played] == [[], ["c1"]]
    assert "which its plan does not send up in round 1" in played[1].lost[0].reason


# ---- a hostile site: its scores


def scored(scores: dict[str, Any]) -> Tamper:
    return records(scores=MetricRecord(scores))


SCORES: dict[str, tuple[Tamper, str]] = {
    **{f"accuracy {value}": (scored({"accuracy": value}), "for accuracy; it must be a share from 0 to 1")
       for value in (float("nan"), float("inf"), 1e308, -0.1, 1.01)},
    **{f"loss {value}": (scored({"loss": value}), "for loss; it must be a finite number")
       for value in (float("nan"), float("-inf"), 1e308)},
    "a list": (scored({"accuracy": [0.5]}), "'accuracy' is missing from it, or is no float"),
    "a whole number": (scored({"accuracy": 1}), "'accuracy' is missing from it, or is no float"),
    "a metric of its own": (scored({"mine": 0.5}), "sent a score of 'mine'; there are only: accuracy, loss"),
    "an odd metric": (scored({ODD: 0.5}), r"sent a score of '\x1b[2J"),
    "many metrics": (scored({f"m{i}": 0.5 for i in range(MANY)}), "sent a score of 'm0'"),
    "no scores": (without("scores"), "no MetricRecord 'scores'"),
    "texts": (records(scores=ConfigRecord({"accuracy": "1"})), "no MetricRecord 'scores'"),
    "no ticket": (without("ticket"), "no ConfigRecord 'ticket'"),
    "an old ticket": (ticket(round=7), "it answers round 7"),
    "an odd refusal": (refusal(ODD), "<script>"),
}  # fmt: skip


def evaluated(tamper: Tamper, folder: Path, tolerate: bool) -> list[tuple[str, dict[str, float]]]:
    run, model = run_of(fedavg(), 1, tolerate=tolerate), small()
    grid = wired(run, model, THREE, folder)
    honest = grid.nodes[11]

    def answer(message: Message) -> Message | None:
        reply = honest(message)
        return tamper(message, reply) if reply and message.metadata.message_type == "evaluate" else reply

    grid.nodes[11] = answer
    engine, server = flower(run, model, grid, THREE.clients, deadline=60.0), begin(run, model)
    jobs = [ask(run, model, server, 0, name)[0] for name in engine.clients()]
    return list(engine.evaluate(jobs))


@pytest.mark.parametrize("kind", SCORES)
def test_scores_that_nobody_could_have_measured_are_left_out(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tamper, reason = SCORES[kind]
    found = evaluated(tamper, tmp_path / "a", tolerate=True)
    assert [name for name, _ in found] == ["c0", "c2"]
    assert reason in caplog.text
    assert len(caplog.records[-1].getMessage()) <= LONGEST + 50
    with pytest.raises(ClientFault, match="client 'c1'"):
        evaluated(tamper, tmp_path / "b", tolerate=False)


# ---- a hostile site: its name


def named(value: Any) -> Callable[[Message], Message]:
    return lambda message: Message(RecordDict({"site": ConfigRecord({"client": value})}), reply_to=message)


NAMES: dict[str, Callable[[Message], Message]] = {
    "a name of 1 MB": named(LONG),
    "an odd name": named(ODD),
    "a number": named(7),
    "no name": lambda message: Message(RecordDict(), reply_to=message),
    "a refusal of 1 MB": lambda message: Message(messages.of_refusal(Refusal(LONG)), reply_to=message),
    "an error of 1 MB": lambda message: Message(Error(5, LONG), reply_to=message),
    "an odd error": lambda message: Message(Error(5, ODD), reply_to=message),
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_node_with_a_bad_name_is_left_out(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, model = run_of(fedavg(), 1), small()
    grid = wired(run, model, THREE, tmp_path)
    grid.nodes[5] = NAMES[kind]
    engine = flower(run, model, grid, THREE.clients)
    for _ in range(10):
        assert engine.clients() == ["c0", "c1", "c2"]
    assert 5 not in engine.nodes.values()
    assert 1 <= len(caplog.records) <= 3, "a node that fails for ever does not fill the log"
    assert all(len(each.getMessage()) <= LONGEST + 100 for each in caplog.records)
    assert all(each.getMessage().isprintable() for each in caplog.records)


def test_a_node_cannot_be_one_client_after_another(tmp_path: Path) -> None:
    """It leaves jobs unanswered, so it is asked for its name again, and says another every time."""
    run, model = run_of(fedavg(), 4, tolerate=True), small()
    grid = wired(run, model, THREE, tmp_path)
    turns = iter(["c1", "c0", "c2", *(f"n{i}" for i in range(1000))])

    def hostile(message: Message) -> Message | None:
        return named(next(turns))(message) if message.metadata.message_type == "query" else None

    grid.nodes = {11: hostile, 10: grid.nodes[10], 12: grid.nodes[12]}
    played = list(rounds(run, model, flower(run, model, grid, THREE.clients, deadline=0.3)))
    assert [sorted(each.cohort) for each in played] == [["c0", "c1", "c2"], *[["c0", "c2"]] * 3]


# ---- a hostile server: what it asks of a site


def site_at(folder: Path, run: Run, config: str = "") -> Site:
    return Site(run, small(), "c1", THREE["c1"], folder, Faults(), CPU, ACCURACY, config)


def answer_of(site: Site, content: RecordDict, kind: str = "train") -> RecordDict:
    """As from a process of its own."""
    message = carried(Message(content, 1, kind))
    return client_app(lambda context: "c1", lambda context: site)(message, Context(1, 1, {}, RecordDict(), {})).content


def order(run: Run, round: int = 0, change: Callable[[Job], Job] = lambda job: job, **more: Any) -> RecordDict:
    """What an honest server sends before its first round, with changes; `more` are entries of the job's record."""
    model = small()
    job, _ = ask(run, model, begin(run, model), round, "c1")
    about = {"session": "1", "config": "", "void": 0, "settled": 0} | more
    job = change(job)
    return messages.of_job(job, Seals()(job.params), **about)  # type: ignore[arg-type]


def sent(**changes: torch.Tensor) -> Callable[[Job], Job]:
    """Parameters beside the honest ones, or in their place; a dot in a name is written as two underscores."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda job: replace(job, params={**job.params, **named}, stale=job.stale | named.keys())


def slot(name: str, part: dict[str, torch.Tensor]) -> Callable[[Job], Job]:
    return lambda job: replace(job, slots={**job.slots, name: {**job.slots.get(name, {}), **part}})


def signal(**numbers: float) -> Callable[[Job], Job]:
    return lambda job: replace(job, signal={**job.signal, **numbers})


HEAD = torch.zeros(3, 4)
AUTO = "fedfrozen"
ORDERS: dict[str, tuple[str, dict[str, Any], str]] = {  # kind -> (method, what is changed, the reason)
    "round -1": ("fedavg", {"round": -1}, "was asked for round -1; this run has rounds 0 to 2"),
    "a round behind the last": ("fedavg", {"round": 3}, "was asked for round 3"),
    "round 2^62": ("fedavg", {"round": 2**62}, "was asked for round"),
    "void below 0": ("fedavg", {"void": -1}, "was told void = -1"),
    "void beyond the round": ("fedavg", {"void": 2}, "was told void = 2 in round 0"),
    "settled below 0": ("fedavg", {"settled": -5}, "was told settled = -5"),
    "settled beyond the round": ("fedavg", {"settled": 10**9}, "was told settled = 1000000000"),
    "a session of 1 MB": ("fedavg", {"session": LONG}, "a session that is no short text"),
    "an odd session": ("fedavg", {"session": ODD}, "a session that is no short text"),
    "no session": ("fedavg", {"session": ""}, "a session that is no short text"),
    "another config": ("fedavg", {"config": "beef"}, "has the digest 'beef' and the one here ''; run the same app"),
    "a config of 1 MB": ("fedavg", {"config": LONG}, "has the digest 'xxx"),
    "another client": ("fedavg", {"change": lambda job: replace(job, client="c0")}, "this site is 'c1'"),
    "a kept parameter": ("fedper", {"change": sent(head__weight=HEAD)}, "'head.weight', which the plan of round 0"),
    "a parameter of its own": ("fedavg", {"change": sent(mine=HEAD)}, "and here it does not exist"),
    "another shape": ("fedavg", {"change": sent(head__weight=HEAD.T.contiguous())}, "is (4, 3) and here it is (3, 4)"),
    "another type": ("fedavg", {"change": sent(head__weight=HEAD.double())}, "is torch.float64 and here it is"),
    "whole numbers": ("fedavg", {"change": sent(head__weight=HEAD.long())}, "is torch.int64 and here it is"),
    "not finite": ("fedavg", {"change": sent(head__weight=HEAD / 0)}, "has values that are not finite"),
    "infinite": ("fedavg", {"change": sent(head__weight=HEAD + float("inf"))}, "has values that are not finite"),
    "a slot": ("fedavg", {"change": slot("control", {"head.weight": HEAD})}, "slot 'control', which fedavg does not"),
    "another slot": ("scaffold", {"change": slot("mine", {"head.weight": HEAD})}, "slot 'mine', which scaffold does"),
    "a personal slot": ("fedavg", {"change": slot("personal", {"head.weight": HEAD})}, "slot 'personal'"),
    "a slot of another shape": ("scaffold", {"change": slot("control", {"head.weight": HEAD[0]})}, "is (4,) and here"),
    "a slot of another type": ("scaffold", {"change": slot("control", {"head.weight": HEAD.half()})}, "torch.float16"),
    "a slot that is not finite": ("scaffold", {"change": slot("control", {"head.weight": HEAD / 0})}, "not finite"),
    "a slot of a strange name": ("scaffold", {"change": slot("control", {"mine": HEAD})}, "does not exist"),
    "a signal": ("fedavg", {"change": signal(frozen=1.0)}, "the signal 'frozen', which fedavg does not know"),
    "another signal": (AUTO, {"change": signal(mine=1.0)}, "the signal 'mine', which fedfrozen does not know"),
    "a signal of nan": (AUTO, {"change": signal(frozen=float("nan"))}, "was sent nan as the signal 'frozen'"),
    "a signal of infinity": (AUTO, {"change": signal(frozen=float("inf"))}, "was sent inf as the signal"),
    "a signal of 1e308": (AUTO, {"change": signal(frozen=1e308)}, "was sent 1e+308 as the signal"),
}  # fmt: skip


def method_at_site(name: str) -> Method:
    return build(name, {"warmup": "auto"} if name == AUTO else {})


@pytest.mark.parametrize("asked", ["train", "evaluate"])
@pytest.mark.parametrize("kind", ORDERS)
def test_a_site_refuses_what_its_own_plan_does_not_say(kind: str, asked: str, tmp_path: Path) -> None:
    method, changes, reason = ORDERS[kind]
    run = run_of(method_at_site(method), 3)
    site = site_at(tmp_path, run)
    before = answer_of(site, order(run))
    assert "refusal" not in before
    files = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    if kind in ("round -1", "a round behind the last", "round 2^62"):
        forged = order(run)
        forged["job"]["round"] = changes["round"]  # type: ignore[index]
    else:
        forged = order(run, **changes)
    answer = answer_of(site, forged, asked)
    assert set(answer) <= {"refusal", "ticket"}
    refused = messages.to_refusal(answer)
    assert refused
    assert reason in refused.reason
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == files, "its folder is untouched"


NOISE = b"\xff" * 9
MALFORMED: dict[str, Callable[[RecordDict], dict[str, Any]]] = {
    "nothing": lambda content: {},
    "no job": lambda content: {name: part for name, part in content.items() if name != "job"},
    "no signal": lambda content: {name: part for name, part in content.items() if name != "signal"},
    "no tensors": lambda content: {name: part for name, part in content.items() if name != "tensors"},
    "a record more": lambda content: {**content, "more": ConfigRecord({"a": LONG})},
    "a text for a round": lambda content: {**content, "job": ConfigRecord({**content["job"], "round": "0"})},  # type: ignore[dict-item]
    "noise": lambda content: {**content, "tensors": ArrayRecord({"blob": Array("uint8", (9,), "safetensors", NOISE)})},
    "a pickle": lambda content: {**content, "tensors": ArrayRecord({"blob": Array("uint8", (9,), "pickle", NOISE)})},
}  # fmt: skip


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_site_refuses_what_it_cannot_read(kind: str, tmp_path: Path) -> None:
    run = run_of(fedavg(), 3)
    answer = answer_of(site_at(tmp_path, run), RecordDict(MALFORMED[kind](order(run))))
    refused = messages.to_refusal(answer)
    assert refused
    assert refused.fault
    assert not files_in(tmp_path)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "scaffold", "fedfrozen", "local-only"])
def test_nothing_but_what_the_plan_sends_up_leaves_a_site(name: str, tmp_path: Path) -> None:
    """Whatever the server claims to need: the seal of the plan's own parameters is the only one that fits."""
    run, model = run_of(method_at_site(name), 3), small()
    _, plan = ask(run, model, begin(run, model), 0, "c1")
    for forged in (order(run), order(run, change=lambda job: replace(job, stale=frozenset())), order(run, void=0)):
        answer = answer_of(site_at(tmp_path, run), forged)
        if "refusal" not in answer:
            update = messages.to_update(answer, "c1", 10**9)
            assert update.delta.keys() <= plan.up
            assert all(part.keys() <= plan.up for part in update.slots.values())
            assert update.steps.keys() <= plan.train


def test_a_leak_in_a_method_does_not_leave_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(build("fedper"), 1)

    def leaky(self: Embedded, jobs: Any) -> Iterator[Update]:
        yield Update("c1", {"head.weight": HEAD}, {}, 1.0, {"head.weight": 1}, None)

    monkeypatch.setattr(Embedded, "train", leaky)
    refused = messages.to_refusal(answer_of(site_at(tmp_path, run), order(run)))
    assert refused
    assert "would send 'head.weight', which the plan of the round does not send up" in refused.reason


# ---- old messages


def test_an_old_message_does_not_take_a_site_back(tmp_path: Path) -> None:
    run = run_of(scaffold(), 4)
    site = site_at(tmp_path, run)
    asked = [order(run, number, void=number) for number in range(3)]
    assert all("refusal" not in answer_of(site, content) for content in asked)
    files = files_in(tmp_path)
    refused = messages.to_refusal(answer_of(site, asked[0]))
    assert refused
    assert "was asked for round 0 after round 2; this is an old message" in refused.reason
    assert "refusal" not in answer_of(site, order(run, 1, void=1, session="2")), "a server may go back to a checkpoint"
    refused = messages.to_refusal(answer_of(site, asked[2]))
    assert refused
    assert "session '1' has ended here; this is an old message" in refused.reason
    assert files_in(tmp_path) < files, "of round 2 the site's state was dropped by the new session"


def test_sessions_cannot_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SESSIONS", 3)
    run = run_of(fedavg(), 1)
    replies = [answer_of(site_at(tmp_path, run), order(run, session=str(number))) for number in range(6)]
    assert ["refusal" in each for each in replies] == [False] * 3 + [True] * 3


# ---- noise


def private(method: Method | None = None, noise: float = 1.0) -> Run:
    run = run_of(method or fedavg(), 3, steps=1, secret=Key(11))
    return replace(run, method=replace(run.method, privacy=Private(1.0, noise)))


def other_model(job: Job) -> Job:
    params = {name: value + 0.3 for name, value in job.params.items()}
    return replace(job, params=params, stale=frozenset(params))


def deltas(answer: RecordDict) -> tree.Tensors:
    return dict(messages.to_update(answer, "c1", 10**9).delta)


AGAIN: dict[str, dict[str, Any]] = {
    "another model": {"change": other_model},
    "another model in a new session": {"change": other_model, "session": "2"},
    "one number changed": {"change": lambda job: sent(head__weight=job.params["head.weight"] + 1e-3)(job)},
    "settled and void as far as they go": {"change": other_model, "session": "3", "void": 0, "settled": 0},
}


def test_two_answers_with_the_same_noise_would_show_what_it_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack, against a site that answers a round twice."""
    monkeypatch.setattr(history, "claim", lambda *_: True)
    found = {}
    for noise in (1.0, 0.0):
        run, folder = private(noise=noise), tmp_path / str(noise)
        asked = order(run), order(run, change=other_model)
        found[noise] = [deltas(answer_of(site_at(folder, run), content)) for content in asked]
    apart = {noise: tree.subtract(*two) for noise, two in found.items()}
    hidden = float(tree.norm(tree.subtract(found[1.0][0], found[0.0][0])))
    assert hidden > 0.05
    assert float(tree.norm(tree.subtract(apart[1.0], apart[0.0]))) < 1e-5 * hidden


@pytest.mark.parametrize("kind", AGAIN)
def test_under_privacy_a_round_is_answered_for_one_model_only(kind: str, tmp_path: Path) -> None:
    run = private()
    first = answer_of(site_at(tmp_path, run), order(run))
    refused = messages.to_refusal(answer_of(site_at(tmp_path, run), order(run, **AGAIN[kind])))
    assert refused
    assert "round 0 was already answered for another model; answering again would reuse its noise" in refused.reason
    assert not refused.fault, "the server records the client as lost, and goes on"
    again = answer_of(site_at(tmp_path, run), order(run, session="9"))
    assert tree.equal(deltas(first), deltas(again)), "the same question has the same answer"


def test_a_server_cannot_change_a_sites_own_state_to_draw_noise_twice(tmp_path: Path) -> None:
    """The model that is sent is the same, but with the state of round 0 dropped the site's own head is another."""
    run = private(build("fedper", {"finetune": 0}))
    for number in range(2):
        assert "refusal" not in answer_of(site_at(tmp_path, run), order(run, number, void=number))
    refused = messages.to_refusal(answer_of(site_at(tmp_path, run), order(run, 1, void=0, session="2")))
    assert refused
    assert "round 1 was already answered" in refused.reason


def test_the_round_is_on_disk_before_it_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = private()

    def dies(self: Embedded, jobs: Any) -> Iterator[Update]:
        assert "0" in json.loads((tmp_path / client.ANSWERED).read_text())
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Embedded, "train", dies)
        assert "refusal" in answer_of(site_at(tmp_path, run), order(run))
    assert "refusal" in answer_of(site_at(tmp_path, run), order(run, change=other_model))
    assert "refusal" not in answer_of(site_at(tmp_path, run), order(run))


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"0": "'])
def test_a_site_that_cannot_read_what_it_answered_answers_nothing(damage: bytes, tmp_path: Path) -> None:
    run = private()
    answer_of(site_at(tmp_path, run), order(run))
    (tmp_path / client.ANSWERED).write_bytes(damage)
    refused = messages.to_refusal(answer_of(site_at(tmp_path, run), order(run, 1)))
    assert refused
    assert "answered.json in this site's folder is damaged; restore it from a copy" in refused.reason


def test_of_several_at_a_time_one_draws_the_noise(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: history.claim(tmp_path / "answered.json", 0, str(number)), range(32)))
    assert sum(won) == 1


def test_without_privacy_a_round_may_be_asked_again(tmp_path: Path) -> None:
    run = run_of(fedavg(), 1)
    for content in (order(run), order(run, change=other_model)):
        assert "refusal" not in answer_of(site_at(tmp_path, run), content)
    assert not (tmp_path / client.ANSWERED).exists()


def test_under_privacy_no_scores_are_made_by_training_without_noise(tmp_path: Path) -> None:
    run = private(build("fedper"))
    answer_of(site_at(tmp_path, run), order(run))
    refused = messages.to_refusal(answer_of(site_at(tmp_path, run), order(run, void=1), "evaluate"))
    assert refused
    assert "adapts to training examples before it is scored" in refused.reason


# ---- the app


CONFIG = (
    """
rounds = 1
method = {name = "fedavg"}
[federation]
minimum = 0
tolerate = true
"""
    + SMALL_TASK
    + "test_examples = 20"
    + SMALL_VIT
)


def served(config: Path, folder: Path, here: list[str], there: list[str], secret: Path | None = None) -> dict[str, Any]:
    """The row of a run with one site, by a server with these changes to the config and a site with those."""
    (config.parent / "app").mkdir(parents=True, exist_ok=True)
    settings = {"folder": str(folder), "deadline": 60.0, "clients": 1, "set": " ".join(there)}
    own = {"client": "c0", "folder": str(config.parent / "sites")} | ({"engine.secret": str(secret)} if secret else {})

    def site(message: Message) -> Message:
        return flower_app.client(config)(message, Context(1, 1, own, RecordDict(), settings))  # type: ignore[arg-type]

    [row] = flower_app.serve(Wire({1: site}), load(config, here), settings, folder.name)
    return row


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "experiment.toml").write_text(CONFIG)
    return tmp_path / "experiment.toml"


def test_a_site_with_another_config_refuses_and_says_so(config: Path, tmp_path: Path) -> None:
    row = served(config, tmp_path / "a", ["training.lr=0.5"], [])
    [reason] = row["lost"].values()
    assert reason.startswith("the config of the server has the digest '")
    assert "run the same app with the same run config on both sides" in reason
    assert served(config, tmp_path / "b", [], ["data.noise=2.0", "engine.threads=1"])["lost"] == {}


@pytest.mark.parametrize(
    "change",
    ["training.lr=0.5", "method.name=fedprox", "seed=1", "privacy.noise=2.0", "training.batch_size=8", "rounds=9",
     "model.width=16", "split.clients=4", "federation.dropout=0.5", "label=b"],
)  # fmt: skip
def test_whatever_both_sides_must_agree_on_is_in_the_digest(change: str, config: Path) -> None:
    plain, own = flower_app._digest(load(config)), ["data.noise=2.0", "engine.threads=1", "engine.secret=s"]
    assert flower_app._digest(load(config, [change])) != plain
    assert flower_app._digest(load(config, own)) == plain


def test_a_second_experiment_does_not_draw_the_noise_of_the_first_again(config: Path, tmp_path: Path) -> None:
    """Noise follows from secret, round and client, so that another run with the same secret would repeat it."""
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    private = ["privacy.noise=1.0"]
    assert served(config, tmp_path / "a", private, private, tmp_path / "secret")["lost"] == {}
    assert served(config, tmp_path / "b", private, private, tmp_path / "secret")["lost"] == {}, "it is the same run"
    other = [*private, "training.lr=0.5"]
    row = served(config, tmp_path / "c", other, other, tmp_path / "secret")
    assert "round 0 was already answered for another model" in row["lost"]["c0"]
    (tmp_path / "another").write_bytes(bytes(range(1, 33)))
    assert served(config, tmp_path / "d", other, other, tmp_path / "another")["lost"] == {}


PATHS = ["../x", "a/b", "/etc", ".", "..", "nul\0", "x" * 10_000, "a\\b", "~", "-rf", "ü/ä", "\ud800", "c:", " "]


@pytest.mark.parametrize("name", PATHS, ids=range(len(PATHS)))
def test_a_name_is_one_folder_inside_the_folder(name: str, tmp_path: Path) -> None:
    for part in (component(name), label_folder(name)):
        made = tmp_path / part
        made.mkdir(exist_ok=True)
        assert made.parent.resolve() == tmp_path.resolve() == made.resolve().parent
        assert len(part) < 200
    assert len({component(each) for each in PATHS}) == len(PATHS)


@pytest.mark.parametrize("label", ["../../x", "/etc/x", "a/b", "x" * 10_000])
def test_a_label_does_not_lead_out_of_the_folder(label: str, config: Path) -> None:
    name = flower_app._identity(replace(load(config), label=label))
    assert len(Path(name).parts) == 1
    assert len(name) < 200


def test_a_client_called_dots_has_a_folder_of_its_own(config: Path, tmp_path: Path) -> None:
    settings = {"set": shlex.quote("split={kind='site', sites=['..', 'north']}")}
    own: Any = {"client": "..", "folder": str(tmp_path / "sites")}
    site = flower_app._site(Context(1, 1, own, RecordDict(), settings), config)  # type: ignore[arg-type]
    assert site.folder.resolve().parent.parent == (tmp_path / "sites").resolve()


# ---- all of them


@pytest.mark.slow
def test_the_tally_of_attacks(tmp_path: Path) -> None:
    """On the server, by answers: with faults tolerated none ends the run, and all but the plausible are refused."""
    tally = Counter[str]()
    for number, attack in enumerate(ATTACKS.values()):
        try:
            lost, _ = strike(attack, tmp_path / str(number))
        except Exception:
            tally["stopped"] += 1
        else:
            tally["refused" if lost else "accepted"] += 1
    plausible = sum(not attack.reason for attack in ATTACKS.values())
    assert tally == {"refused": len(ATTACKS) - plausible, "accepted": plausible}
