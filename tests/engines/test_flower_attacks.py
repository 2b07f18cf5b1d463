"""Attacks of a hostile site on the Flower server. test_flower_site_attacks.py has the attacks on a site."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fixtures import (
    ANY_SIZE,
    THREE,
    FakeGrid,
    Reply,
    Tamper,
    VirtualClock,
    blob,
    flower_engine,
    make_grid,
    records,
    rewrite,
    tamper_with,
)
from flower_fixtures import clock as clock
from flower_fixtures import task_identity as task_identity
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from google.protobuf.message import DecodeError
from helpers import final_params, toy_model, toy_run

from partita.core import tensors
from partita.core.client import ClientError
from partita.core.method import Method
from partita.core.model import Model
from partita.core.rounds import ClientFailure, initial_server, make_job, rounds
from partita.core.settings import Run
from partita.core.update import Update
from partita.engines.availability import Availability
from partita.engines.flower import messages
from partita.engines.flower.messages import MAX_TEXT, ErrorReply
from partita.engines.simulation import SimulationEngine
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.report.sections import lost_clients_data
from partita.report.templating import render
from partita.testing.toy import ToyTransformer

MANY = 3_000
WIDTH = 10
LONG = "x" * 1_000_000
ODD = "\x1b[2J\r\n\u202e<script>alert(1)</script>"

# ---- a hostile site: replies to a training job


@dataclass(frozen=True)
class Attack:
    tamper: Tamper
    reason: str  # part of the recorded reason; "" if the reply is plausible and counts
    method: str = "fedavg"
    kept: bool = False  # refused by the rounds, not by the engine, so the site keeps its new state


def numbers(**changes: Any) -> Tamper:
    """Change or add entries of the named MetricRecords."""

    def tamper(message: Message, reply: Message) -> Message:
        content = dict(reply.content)
        for name, entries in changes.items():
            content[name] = MetricRecord({**content[name], **entries})  # type: ignore[dict-item]
        return Message(RecordDict(content), reply_to=message)

    return tamper


def drop(name: str) -> Tamper:
    def tamper(message: Message, reply: Message) -> Message:
        return Message(RecordDict({k: v for k, v in reply.content.items() if k != name}), reply_to=message)

    return tamper


def job_id(**changes: Any) -> Tamper:
    def tamper(message: Message, reply: Message) -> Message:
        record = ConfigRecord({**reply.content["job_id"], **changes})  # type: ignore[dict-item]
        return Message(RecordDict({**reply.content, "job_id": record}), reply_to=message)

    return tamper


def refusal(reason: Any, **more: Any) -> Tamper:
    def tamper(message: Message, reply: Message) -> Message:
        record = ConfigRecord({"reason": reason, "fault": True, "empty": False} | more)
        return Message(RecordDict({"refusal": record, "job_id": reply.content["job_id"]}), reply_to=message)

    return tamper


def packed(header: Any, body: bytes = b"\0" * 48, length: int | None = None) -> Tamper:
    """A handmade safetensors file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return blob(lambda data: struct.pack("<Q", len(text) if length is None else length) + text + body)


def entry(kind: str = "F32", shape: Any = (3, 4), offsets: Any = (0, 48)) -> dict[str, Any]:
    return {"delta/head.weight": {"dtype": kind, "shape": shape, "data_offsets": offsets}}


def delta(change: Callable[[torch.Tensor], torch.Tensor], name: str = "head.weight") -> Tamper:
    return rewrite(delta=lambda found: {**found, name: change(found[name])})


def scales(change: Callable[[torch.Tensor], torch.Tensor]) -> Tamper:
    def changed(slots: Any) -> Any:
        return {slot: {name: change(value) for name, value in part.items()} for slot, part in slots.items()}

    return rewrite(slots=changed)


def extra(name: str) -> Tamper:
    return rewrite(delta=lambda found: {**found, name: torch.zeros(2)})


def reply_with_two_blobs(message: Message, reply: Message) -> Message:
    [whole] = reply.content["tensors"].values()  # type: ignore[union-attr]
    return Message(
        RecordDict({**reply.content, "tensors": ArrayRecord({"blob": whole, "more": whole})}), reply_to=message
    )


def of_error(reason: str) -> Tamper:
    return lambda message, reply: Message(Error(5, reason), reply_to=message)


def reply_to_another_message(message: Message, reply: Message) -> Message:
    """A reply to another message."""
    reply.metadata.__dict__["_reply_to_message_id"] = "another"
    return reply


def reply_without_content(message: Message, reply: Message) -> Message:
    """A reply with neither content nor error, which Flower cannot unpack."""
    reply.__dict__["_content"] = None
    return reply


NO_USE = "its answer cannot be used: "
UNREAD = "its tensors cannot be read"
ATTACKS: dict[str, Attack] = {
    **{f"no {name}": Attack(drop(name), f"Record '{name}'") for name in ("numbers", "steps", "metrics", "tensors")},
    **{
        f"a ConfigRecord as {name}": Attack(records(**{name: ConfigRecord({"a": 1})}), f"Record '{name}'")
        for name in ("numbers", "steps", "metrics", "tensors")
    },
    "no ticket": Attack(drop("job_id"), "no ConfigRecord 'job_id'"),
    "a ticket of numbers": Attack(records(job_id=MetricRecord({"round": 0})), "no ConfigRecord 'job_id'"),
    "a ticket of another round": Attack(job_id(round=1), "it answers round 1 of client 'c1'"),
    "a ticket of round -1": Attack(job_id(round=-1), "it answers round -1"),
    "a ticket of another client": Attack(job_id(client="c0"), "of client 'c0' in session"),
    "a ticket of another session": Attack(job_id(session="0"), "in session '0', not round 0"),
    "a ticket with a long name": Attack(job_id(client=LONG), "it answers round 0 of client 'xxx"),
    "a record of its own": Attack(records(more=ConfigRecord({"a": LONG * 10})), "it has a record 'more'"),
    "a record with an odd name": Attack(records(**{ODD: ConfigRecord()}), r"it has a record '\x1b[2J"),
    "an empty message": Attack(reply_without_content, "sent a message that cannot be unpacked"),
    "an answer to another message": Attack(reply_to_another_message, "sent an answer to another message"),
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
    "a list as weight": Attack(numbers(numbers={"weight": [1.0]}), "'weight' is missing, or its type is not float"),
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
    "many numbers told": Attack(numbers(metrics={f"n{i}": 1.0 for i in range(MANY)}), f"sent {MANY} metrics"),
    "a number told": Attack(numbers(metrics={"a": 1.0}), "sent 1 metrics; clients of fedavg send at most 0"),
    "a layer told of that is not there": Attack(numbers(metrics={"a/layer.9": 1.0}), "sent a metric of", "safl"),
    "a layer told of that is no number": Attack(numbers(metrics={"a/layer.x": 1.0}), "sent a metric of", "safl"),
    "an odd name told": Attack(numbers(metrics={ODD: 1.0}), "sent a metric named", "safl"),
    "a name of 1 MB told": Attack(numbers(metrics={LONG: 1.0}), "sent a metric named", "safl"),
    "1e308 told": Attack(numbers(metrics={"attention/layer.0": 1e308}), "sent 1e+308", "safl"),
    "nan told": Attack(numbers(metrics={"attention/layer.0": float("nan")}), "sent nan", "safl"),
    "two blobs": Attack(reply_with_two_blobs, "are not one safetensors blob"),
    "a pickle": Attack(blob(lambda data: data, "numpy.ndarray"), "are not one safetensors blob"),
    "no bytes": Attack(blob(lambda data: b""), UNREAD),
    "seven bytes": Attack(blob(lambda data: data[:7]), UNREAD),
    "cut short": Attack(blob(lambda data: data[:-1]), UNREAD),
    "bytes behind the end": Attack(blob(lambda data: data + b"\0" * 9), UNREAD),
    "a header of 1 TB": Attack(packed(entry(), length=2**40), "it names tensors in 1,099,511,627,776 bytes"),
    "a header of 2^63": Attack(packed(entry(), length=2**63), "it names tensors in 9,223,372,036,854,775,808 bytes"),
    "a header of nested lists": Attack(packed(b"[" * 3000), UNREAD),
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
    "a shape that overflows": Attack(
        packed(entry(shape=(2**62, 0, 2**62), offsets=(0, 0)), b""), f"of shape ({2**62}, 0"
    ),
    "a type that torch lacks": Attack(packed(entry("F8_E8M0", (48,))), NO_USE),
    "complex numbers": Attack(packed(entry("C64", (6,))), NO_USE),
    "no name": Attack(
        packed({"": {"dtype": "F32", "shape": (12,), "data_offsets": (0, 48)}}), "sent the slot ''"
    ),
    "steps of no name": Attack(numbers(steps={"": 1}), "sent steps of ''"),
    "a record of no name": Attack(records(**{"": ConfigRecord()}), "it has a record ''"),
    "too many bytes": Attack(delta(lambda value: torch.zeros(10**5)), "bytes of tensors"),
    "many names": Attack(rewrite(delta={f"n{i}": torch.zeros(0) for i in range(MANY)}), "bytes of tensors"),
    "a name of its own": Attack(extra("mine"), "sent 'mine', which its plan does not send up in round 0"),
    "an odd name": Attack(extra(ODD), r"sent '\x1b[2J"),
    "a name of 1 MB": Attack(extra(LONG), "bytes of tensors"),
    "a name that its plan keeps": Attack(extra("head.weight"), "sent 'head.weight', which", "fedper", kept=True),
    "another shape": Attack(delta(lambda value: value.T.contiguous()), "of shape (4, 3), not (3, 4)"),
    "a scalar": Attack(delta(lambda value: value[0, 0].clone()), "of shape (), not (3, 4)"),
    **{
        f"as {kind}": Attack(delta(lambda value, kind=kind: value.to(kind)), f"as {kind} on cpu, not torch.float32")
        for kind in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8)
    },
    **{
        f"the number {value}": Attack(delta(lambda found, value=value: torch.full_like(found, value)), "not finite")
        for value in (float("nan"), float("inf"), float("-inf"))
    },
    "a slot of its own": Attack(rewrite(slots={"mine": {"head.weight": torch.zeros(3, 4)}}), "sent the slot 'mine'"),
    "parameters for a slot": Attack(rewrite(slots={"params": {"head.weight": torch.zeros(3, 4)}}), "slot 'params'"),
    "a slot of another shape": Attack(
        rewrite(slots={"control": {"head.weight": torch.zeros(2)}}), "the slot 'control'", "scaffold", kept=True
    ),
    "a slot of whole numbers": Attack(
        rewrite(slots={"control": {"head.weight": torch.zeros(3, 4).long()}}),
        "the slot 'control' for 1 names",
        "scaffold",
        kept=True,
    ),
    "64 bits where 8 travel": Attack(
        delta(lambda value: value.double(), "embed.weight"), "as torch.float64 on cpu, not", "quantize"
    ),
    "scales of whole numbers": Attack(scales(lambda value: value.to(torch.int8)), "as torch.int8 on cpu", "quantize"),
    "scales of true and false": Attack(scales(lambda value: value.bool()), "as torch.bool on cpu, not", "quantize"),
    "scales of 64 bits": Attack(scales(lambda value: value.double()), "as torch.float64 on cpu, not", "quantize"),
    "scales of another shape": Attack(scales(lambda value: value[:1, None]), "cannot be decoded", "quantize"),
    "no scales": Attack(rewrite(slots={}), "cannot be decoded", "quantize"),
    "a slot beside the scales": Attack(
        rewrite(slots=lambda found: {**found, "mine": {"head.weight": torch.zeros(3, WIDTH)}}),
        "sent the slot 'mine'",
        "quantize",
    ),
    # An honest site could have sent these; only a robust aggregation helps.
    "a loss of its own": Attack(numbers(numbers={"loss": -7.0}), ""),
    "a million examples": Attack(numbers(numbers={"weight": 1e6}), ""),
    "a large update": Attack(delta(lambda value: value * 100), ""),
    "nothing learned": Attack(rewrite(delta={}), ""),
}  # fmt: skip


def build_method(name: str) -> Method:
    return build(name, {"k": 1} if name == "safl" else {})


def model_for(name: str) -> Model:
    """A wider model for quantize, which leaves small tensors unquantized."""
    return ToyTransformer(width=WIDTH, layers=1) if name == "quantize" else toy_model()


def run_for(attack: Attack, skip_failed_clients: bool) -> Run:
    return toy_run(build_method(attack.method), 2, skip_failed_clients=skip_failed_clients, drift=False)


@cache
def honest_digest(method: str, away: bool) -> str:
    run, model = toy_run(build_method(method), 2, drift=False), model_for(method)
    availability = Availability(trace={(0, "c1"): 0.0} if away else {})
    return tensors.digest(
        final_params(list(rounds(run, model, SimulationEngine(run, model, THREE, availability=availability))))
    )


def run_with_attack(attack: Attack, folder: Path, skip_failed_clients: bool = True) -> tuple[list[ClientFailure], str]:
    """Run with c1 attacking in round 0; return the lost clients and the digest of the final model."""
    run, model = run_for(attack, skip_failed_clients), model_for(attack.method)
    grid = make_grid(run, model, THREE, folder)
    tamper_with(grid, 11, attack.tamper)
    played = list(rounds(run, model, flower_engine(run, model, grid, THREE.clients, deadline=60.0)))
    return [lost for each in played for lost in each.lost], tensors.digest(final_params(played))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", ATTACKS)
def test_hostile_site_neither_ends_nor_steers_the_run(kind: str, tmp_path: Path) -> None:
    attack = ATTACKS[kind]
    lost, end = run_with_attack(attack, tmp_path)
    if not attack.reason:
        assert lost == []
        return
    assert [each.client for each in lost] == ["c1"]
    reason = lost[0].reason
    assert attack.reason in reason
    assert len(reason) <= MAX_TEXT
    assert reason.isprintable()
    assert attack.kept or end == honest_digest(attack.method, away=True)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    "kind", ["no ticket", "a ticket of another round", "a refusal of 10 MB", "steps of an odd name", "a header of 1 TB"]
)
def test_attack_ends_a_strict_run_naming_client_and_fault(kind: str, tmp_path: Path) -> None:
    attack = ATTACKS[kind]
    with pytest.raises(ClientError) as ended:
        run_with_attack(attack, tmp_path, skip_failed_clients=False)
    assert ended.value.client == "c1"
    assert attack.reason in ended.value.reason
    assert len(ended.value.reason) <= MAX_TEXT
    assert ended.value.reason.isprintable()


def test_replayed_and_borrowed_replies_are_refused(tmp_path: Path) -> None:
    """Client c1 sends the round 0 reply of c0 in round 1, and its own round 0 reply in round 2."""
    run, model = toy_run(fedavg(), 3, skip_failed_clients=True, drift=False), toy_model()
    grid = make_grid(run, model, THREE, tmp_path)
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
    played = list(rounds(run, model, flower_engine(run, model, grid, THREE.clients)))
    reasons = [[lost.reason for lost in each.lost] for each in played]
    assert [len(each) for each in reasons] == [0, 1, 1]
    assert "it answers round 0 of client 'c0'" in reasons[1][0]
    assert "it answers round 0 of client 'c1'" in reasons[2][0]


def test_duplicated_reply_counts_once(tmp_path: Path) -> None:
    class Echo(FakeGrid):
        def pull_messages(self, message_ids: Any) -> Iterator[Message]:
            for reply in super().pull_messages(message_ids):
                yield from (reply, reply)

    run, model = toy_run(fedavg(), 2, drift=False), toy_model()
    grid = make_grid(run, model, THREE, tmp_path)
    played = list(rounds(run, model, flower_engine(run, model, Echo(grid.nodes), THREE.clients)))
    assert tensors.digest(final_params(played)) == honest_digest("fedavg", away=False)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "kind", [IndexError, AttributeError, AssertionError, RecursionError, DecodeError, struct.error]
)
def test_unpackable_message_loses_only_its_site(kind: type[Exception], tmp_path: Path) -> None:
    run, model = toy_run(fedavg(), 2, skip_failed_clients=True, drift=False), toy_model()
    grid = make_grid(run, model, THREE, tmp_path)

    def breaks(reply: Message) -> None:
        if reply.metadata.src_node_id == 11 and reply.metadata.group_id == "0":
            raise kind("made up")

    grid.fetching = breaks
    played = list(rounds(run, model, flower_engine(run, model, grid, THREE.clients)))
    assert played[0].lost == (ClientFailure("c1", f"sent a message that cannot be unpacked ({kind.__name__})"),)


def test_report_escapes_failure_reasons() -> None:
    class Record:
        label, seed, rows = "run", 0, [{"round": 0, "lost": {"c1": messages.printable_line(ODD)}}]

    shown = render("lost", data=lost_clients_data([Record()]), styles={})  # type: ignore[list-item]
    assert "&lt;script&gt;alert" in shown
    assert "<script>" not in shown


def test_frozen_parameters_in_a_later_reply_are_refused(tmp_path: Path) -> None:
    """After the warm-up the kernel is frozen, so a reply that still holds it is refused."""
    run, model = toy_run(build("fedfrozen", {"warmup": 1}), 2, skip_failed_clients=True, drift=False), toy_model()
    grid = make_grid(run, model, THREE, tmp_path)
    kept: list[Update] = []

    def note(message: Message, reply: Message) -> Message:
        kept.append(messages.decode_update(reply.content, messages.decode_job_id(reply.content), ANY_SIZE))
        return reply

    tamper_with(grid, 11, note, when=0)
    tamper_with(grid, 11, lambda message, reply: rewrite(delta=kept[0].delta)(message, reply), when=1)
    played = list(rounds(run, model, flower_engine(run, model, grid, THREE.clients)))
    assert [[lost.client for lost in each.lost] for each in played] == [[], ["c1"]]
    assert "which its plan does not send up in round 1" in played[1].lost[0].reason


# ---- a hostile site: scores


def scored(scores: dict[str, Any]) -> Tamper:
    return records(scores=MetricRecord(scores))


SCORES: dict[str, tuple[Tamper, str]] = {
    **{f"accuracy {value}": (scored({"accuracy": value}), "for accuracy; it must be a number from 0 to 1")
       for value in (float("nan"), float("inf"), 1e308, -0.1, 1.01)},
    **{f"loss {value}": (scored({"loss": value}), "for loss; it must be a finite number")
       for value in (float("nan"), float("-inf"), 1e308)},
    "a list": (scored({"accuracy": [0.5]}), "'accuracy' is missing, or its type is not float"),
    "a whole number": (scored({"accuracy": 1}), "'accuracy' is missing, or its type is not float"),
    "a metric of its own": (scored({"mine": 0.5}), "for the unknown metric 'mine'; known metrics: accuracy, ece, loss"),
    "an odd metric": (scored({ODD: 0.5}), r"sent a score for the unknown metric '\x1b[2J"),
    "many metrics": (scored({f"m{i}": 0.5 for i in range(MANY)}), f"sent {MANY} scores; it must be at most 256"),
    "no scores": (drop("scores"), "no MetricRecord 'scores'"),
    "texts": (records(scores=ConfigRecord({"accuracy": "1"})), "no MetricRecord 'scores'"),
    "no ticket": (drop("job_id"), "no ConfigRecord 'job_id'"),
    "an old ticket": (job_id(round=7), "it answers round 7"),
    "an odd refusal": (refusal(ODD), "<script>"),
}  # fmt: skip


def evaluate_with(tamper: Tamper, folder: Path, skip_failed_clients: bool) -> list[tuple[str, dict[str, float]]]:
    run, model = toy_run(fedavg(), 1, skip_failed_clients=skip_failed_clients), toy_model()
    grid = make_grid(run, model, THREE, folder)
    honest = grid.nodes[11]

    def answer(message: Message) -> Message | None:
        reply = honest(message)
        return tamper(message, reply) if reply and message.metadata.message_type == "evaluate" else reply

    grid.nodes[11] = answer
    engine, server = flower_engine(run, model, grid, THREE.clients, deadline=60.0), initial_server(run, model)
    jobs = [make_job(run, model, server, 0, name)[0] for name in engine.clients()]
    return list(engine.evaluate(jobs))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", SCORES)
def test_impossible_scores_are_dropped_or_end_a_strict_run(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tamper, reason = SCORES[kind]
    found = evaluate_with(tamper, tmp_path / "a", skip_failed_clients=True)
    assert [name for name, _ in found] == ["c0", "c2"]
    assert reason in caplog.text
    assert len(caplog.records[-1].getMessage()) <= MAX_TEXT + 50
    with pytest.raises(ClientError, match="client 'c1'"):
        evaluate_with(tamper, tmp_path / "b", skip_failed_clients=False)


# ---- a hostile site: names


def reply_with_name(value: Any) -> Callable[[Message], Message]:
    return lambda message: Message(RecordDict({"site": ConfigRecord({"client": value})}), reply_to=message)


NAMES: dict[str, Callable[[Message], Message]] = {
    "a name of 1 MB": reply_with_name(LONG),
    "an odd name": reply_with_name(ODD),
    "a number": reply_with_name(7),
    "no name": lambda message: Message(RecordDict(), reply_to=message),
    "a refusal of 1 MB": lambda message: Message(messages.encode_error(ErrorReply(LONG)), reply_to=message),
    "an error of 1 MB": lambda message: Message(Error(5, LONG), reply_to=message),
    "an odd error": lambda message: Message(Error(5, ODD), reply_to=message),
}


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("kind", NAMES)
def test_node_with_a_bad_name_is_ignored(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, model = toy_run(fedavg(), 1), toy_model()
    grid = make_grid(run, model, THREE, tmp_path)
    grid.nodes[5] = NAMES[kind]
    engine = flower_engine(run, model, grid, THREE.clients)
    for _ in range(10):
        assert engine.clients() == ["c0", "c1", "c2"]
    assert 5 not in engine.nodes.values()
    assert 1 <= len(caplog.records) <= 3, "a node that always fails does not fill the log"
    assert all(len(each.getMessage()) <= MAX_TEXT + 100 for each in caplog.records)
    assert all(each.getMessage().isprintable() for each in caplog.records)


@pytest.mark.slow
def test_node_cannot_pose_as_one_client_after_another(tmp_path: Path, clock: VirtualClock) -> None:
    """It ignores its jobs, is asked for its name again, and gives a new name every time."""
    run, model = toy_run(fedavg(), 4, skip_failed_clients=True), toy_model()
    grid = make_grid(run, model, THREE, tmp_path)
    others = [f"d{number}" for number in range(100)]
    turns = iter(["c1", *others])

    def hostile(message: Message) -> Message | None:
        return reply_with_name(next(turns))(message) if message.metadata.message_type == "query" else None

    grid.nodes = {11: hostile, 10: grid.nodes[10], 12: grid.nodes[12]}
    engine = flower_engine(run, model, grid, [*THREE.clients, *others], deadline=0.3, wait_for=3)
    played = list(rounds(run, model, engine))
    assert [sorted(each.cohort) for each in played] == [["c0", "c1", "c2"], *[["c0", "c2"]] * 3]


# ---- all attacks


@pytest.mark.slow
def test_all_attacks_together_are_refused_unless_plausible(tmp_path: Path) -> None:
    """No attack ends a run that skips failed clients, and all but the plausible ones are refused."""
    tally = Counter[str]()
    for number, attack in enumerate(ATTACKS.values()):
        try:
            lost, _ = run_with_attack(attack, tmp_path / str(number))
        except Exception:
            tally["stopped"] += 1
        else:
            tally["refused" if lost else "accepted"] += 1
    plausible = sum(not attack.reason for attack in ATTACKS.values())
    assert tally == {"refused": len(ATTACKS) - plausible, "accepted": plausible}
