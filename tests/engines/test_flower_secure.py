"""Secure aggregation over Flower: the sum of the embedded engine bit for bit, and sites that give nothing else away."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fixtures import FakeGrid, Reply, flower_engine, make_grid, through_bytes
from flower_fixtures import clock as clock
from flower_fixtures import task_identity as task_identity
from flwr.app import ConfigRecord, Context, Message, RecordDict
from helpers import SMALL_TASK, SMALL_VIT, Clients, server_in, toy_model, toy_run, with_federation
from secure_fixtures import write_ssh_keys

from partita.core import tensors
from partita.core.client import ClientError
from partita.core.rounds import RoundResult, rounds
from partita.core.secure_settings import SecureAggregation
from partita.core.settings import Run, RunError
from partita.core.update import Update
from partita.engines.availability import Availability
from partita.engines.flower import messages, secure_messages
from partita.engines.flower.secure_messages import Stage
from partita.engines.flower.secure_site import ROUND, STAGES, UNMASKED
from partita.engines.secure import SecureEngine
from partita.engines.simulation import SimulationEngine
from partita.experiment import flower_app, runner
from partita.experiment.config import load
from partita.methods import build
from partita.secure_aggregation.curve import new_number, public_point
from partita.secure_aggregation.eligibility import check_eligible, fixed_point_of
from partita.secure_aggregation.encoding import read_message, write_message
from partita.secure_aggregation.key_agreement import new_secret, public_key
from partita.secure_aggregation.messages import (
    Report,
    Stayed,
    UnmaskedShares,
    read_roster,
    write_roster,
    write_signatures,
)
from partita.secure_aggregation.server import SecureServer

# No site is lost because the machine is slow: time passes only while the server waits.
pytestmark = pytest.mark.usefixtures("clock")

FOUR = Clients(c0=3, c1=7, c2=9, c3=4)
FIVE = Clients(c0=3, c1=7, c2=9, c3=4, c4=5)
SETTINGS = SecureAggregation(threshold=0.5)  # three of four clients
BYTES, MESSAGE = secure_messages.BYTES, secure_messages.MESSAGE
Change = Callable[[Message, Reply], Message | None]  # (request, honest site) -> reply


def secure_run(name: str = "fedavg", count: int = 2, **more: Any) -> Run:
    settings = {"secure_aggregation": SETTINGS, "drift": False, "skip_failed_clients": True, **more}
    return toy_run(build(name), count, **settings)


def stage_of(message: Message) -> str:
    return message.metadata.message_type.partition(".")[2]


def data_of(content: RecordDict) -> bytes:
    record: Any = content[BYTES]
    return bytes(record[MESSAGE].data)


def with_data(message: Message, data: bytes) -> Message:
    """The server's message with other bytes, as a hostile server would send it."""
    job, _, clients = secure_messages.decode_request(message.content)
    content = secure_messages.encode_request(job, data, clients)
    return through_bytes(Message(content, message.metadata.dst_node_id, message.metadata.message_type))


def change_site(grid: FakeGrid, client: str, change: Change, population: Clients = FOUR) -> None:
    """Node 10 is the last client; `make_grid` numbers them in reverse."""
    node = 10 + list(reversed(population.clients)).index(client)
    honest = grid.nodes[node]
    grid.nodes[node] = lambda message: change(message, honest)


def at(stage: Stage, change: Change) -> Change:
    return lambda message, honest: change(message, honest) if stage_of(message) == stage else honest(message)


def play(run: Run, grid: FakeGrid, **more: Any) -> list[RoundResult]:
    model = toy_model()
    return list(rounds(run, model, flower_engine(run, model, grid, FOUR.clients, deadline=0.3, **more)))


def embedded(run: Run, availability: Availability | None = None) -> list[RoundResult]:
    model = toy_model()
    inner = SimulationEngine(run, model, FOUR, availability=availability)
    return list(rounds(run, model, SecureEngine(inner, run, model)))


def reason(content: RecordDict) -> str:
    refusal = messages.decode_error(content)
    assert refusal is not None, "the site answered"
    return refusal.reason


# ---- equality


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fedper", "fedpart"])
def test_flower_gives_the_tensors_of_the_embedded_engine_and_counts_its_messages(name: str, tmp_path: Path) -> None:
    run, model = secure_run(name, 3), toy_model()
    away = Availability(trace={(1, "c2"): 0.0})
    grid, sent = make_grid(run, model, FOUR, tmp_path, away), Counter[str]()

    def weigh(message: Message, honest: Reply) -> Message | None:
        if message.metadata.message_type.startswith("train"):
            sent["down"] += sum(len(array.data) for array in message.content["tensors"].values())  # type: ignore[union-attr]
            sent["down"] += len(data_of(message.content))
        reply = honest(message)
        if reply and BYTES in reply.content:
            sent["up"] += len(data_of(reply.content))
        return reply

    for client in FOUR.clients:
        change_site(grid, client, weigh)
    for one, two in zip(embedded(run, away), play(run, grid), strict=True):
        assert tensors.equal(one.server.params, two.server.params)
        assert (one.cohort, one.lost, one.loss, one.sent) == (two.cohort, two.lost, two.loss, two.sent)
        assert one.traffic.up == two.traffic.up
        assert one.secure is not None
        assert two.secure is not None
        assert [one.secure[key] for key in ("clients", "recovered")] == [
            two.secure[key] for key in ("clients", "recovered")
        ]
        sent.subtract(up=sum(two.traffic.up.values()), down=sum(two.traffic.down.values()))
    assert not any(sent.values()), "the rows count what was sent"


# ---- what the server sees


def test_no_update_reaches_the_server_in_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reply holds bytes of the protocol alone; neither the update nor its integers are among them."""
    run, model = secure_run(count=1), toy_model()
    updates: list[Update] = []
    train = SimulationEngine.train

    def keep(self: SimulationEngine, jobs: Any) -> Iterator[Any]:
        for reply in train(self, jobs):
            assert isinstance(reply, Update)
            updates.append(reply)
            yield reply

    monkeypatch.setattr(SimulationEngine, "train", keep)
    grid = make_grid(run, model, FOUR, tmp_path)
    seen: list[Message] = []
    grid.fetching = seen.append
    play(run, grid)
    stages = [reply for reply in seen if stage_of(reply)]
    assert len(stages) == 6 * len(FOUR.clients)
    assert all(set(reply.content) == {"job_id", BYTES} for reply in stages)
    everything = b"".join(data_of(reply.content) for reply in stages)
    assert len(updates) == len(FOUR.clients)
    scale = fixed_point_of(run, len(FOUR.clients)).scale
    for update in updates:
        for value in update.delta.values():
            assert value.numpy().tobytes() not in everything
            integers = (value.double().flatten() * update.weight * scale).round().long()
            assert integers.numpy().tobytes() not in everything


def test_site_gives_no_update_in_clear(tmp_path: Path) -> None:
    run, model = secure_run(), toy_model()
    clear = replace(run, secure_aggregation=None)
    grid = make_grid(run, model, FOUR, tmp_path)
    with pytest.raises(RunError, match=r"asked for an update in clear, but its experiment has \[secure_aggregation\]"):
        play(clear, grid)
    with pytest.raises(RunError, match=r"but its experiment has no \[secure_aggregation\]"):
        play(run, make_grid(clear, model, FOUR, tmp_path / "other"))


def test_out_of_range_error_does_not_quote_the_update(tmp_path: Path) -> None:
    run = secure_run(skip_failed_clients=False, secure_aggregation=SecureAggregation(max_value=1e-6))
    with pytest.raises(ClientError) as error:
        play(run, make_grid(run, toy_model(), FOUR, tmp_path))
    assert error.value.reason == "a number of its update is out of range; see the log of its SuperNode"


# ---- a hostile or restarted server, against one site


class Recorder:
    """The messages that an honest server sends to c1, by stage and round, and c1 itself."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder / "c1"
        self.sent: dict[tuple[str, str], Message] = {}
        self.before: Callable[[Message], None] = lambda message: None
        self.grid = make_grid(run, toy_model(), FOUR, folder)
        change_site(self.grid, "c1", self._answer)

    def _answer(self, message: Message, honest: Reply) -> Message | None:
        self.site = honest
        self.sent[stage_of(message), message.metadata.group_id] = message
        self.before(message)
        return honest(message)

    def ask(self, message: Message) -> RecordDict:
        reply = self.site(message)
        assert reply is not None
        return reply.content


def test_every_stage_is_answered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(secure_run(), tmp_path)
    repeated, trained, train = [], Counter[str](), SimulationEngine.train

    def count(self: SimulationEngine, jobs: Any) -> Iterator[Any]:
        for reply in train(self, jobs):
            trained[reply.client] += 1  # type: ignore[union-attr]
            yield reply

    monkeypatch.setattr(SimulationEngine, "train", count)

    def replay(message: Message) -> None:
        repeated.extend(reason(recorder.ask(old)) for old in list(recorder.sent.values())[:-1] if stage_of(old))

    recorder.before = replay
    played = play(recorder.run, recorder.grid)
    assert [each.lost for each in played] == [(), ()]
    assert len(repeated) == 66, "all earlier messages of both rounds, before each of the twelve"
    replay(next(iter(recorder.sent.values())))
    known = ("old message", "twice or too early", "each stage happens once")
    assert all(any(text in each for text in known) for each in repeated), repeated
    record = json.loads((recorder.folder / ROUND).read_text())
    assert record["state"] == "", "the secrets are gone"
    assert trained["c1"] == 2, "a repeated message does not make the site train again"


def test_secrets_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    recorder = Recorder(secure_run(count=1), tmp_path)
    modes = []

    def look(message: Message) -> None:
        if stage_of(message) in STAGES[1:]:
            modes.append((recorder.folder / ROUND).stat().st_mode & 0o777)

    recorder.before = look
    play(recorder.run, recorder.grid)
    assert modes == [0o600] * 5


@pytest.mark.slow
def test_only_one_of_two_requests_at_the_same_time_is_answered(tmp_path: Path) -> None:
    recorder, answers = Recorder(secure_run(count=1), tmp_path), []

    def twice(message: Message) -> None:
        if stage_of(message) == "mask":
            with ThreadPoolExecutor(2) as pool:
                answers.extend(pool.map(recorder.ask, [message, message]))

    recorder.before = twice
    play(recorder.run, recorder.grid)
    assert sorted("refusal" in each for each in answers) == [False, True]


HOSTILE: dict[str, tuple[Stage, Callable[[bytes], bytes], str]] = {
    "a stranger": (
        "share_keys",
        lambda data: write_roster(
            {(name if name != "c3" else "mallory"): replace(each, client=name if name != "c3" else "mallory")
             for name, each in read_roster(data).items()}
        ),
        "'mallory', which is not a client of the experiment",
    ),
    "too few": (
        "share_keys",
        lambda data: write_roster({name: each for name, each in read_roster(data).items() if name < "c2"}),
        "secure_aggregation.min_clients is 3",
    ),
    "other keys": (
        "share_keys",
        lambda data: write_roster(
            {name: replace(each, mask_key=public_point(new_number())) if name == "c1" else each
             for name, each in read_roster(data).items()}
        ),
        "does not have the keys that c1 advertised",
    ),
    "shares of others": ("check", lambda data: data.replace(b"c0", b"c1"), "shares of c1, which is not a neighbor"),
    "too few to mask with": (
        "mask",
        lambda data: Stayed(frozenset(("c0", "c1")), frozenset()).to_bytes(FOUR.clients),
        "the threshold is 3 of 4",
    ),
    "too few survivors": (
        "confirm",
        lambda data: Stayed(frozenset(FOUR.clients), frozenset(("c0", "c1"))).to_bytes(FOUR.clients),
        "the threshold is 3 of 4",
    ),
    "other dealers": (
        "confirm",
        lambda data: Stayed(frozenset(("c0", "c1", "c2")), frozenset(("c0", "c1", "c2"))).to_bytes(FOUR.clients),
        "says that c3 did not share its keys",
    ),
    "garbage": ("confirm", lambda data: b"\xff" * 40, "expected a message of kind 'L'"),
    "signatures of too few": ("unmask", lambda data: b"V\x01" + bytes(12), "there are 3 signatures of 4 clients"),
}  # fmt: skip


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", HOSTILE)
def test_site_refuses_a_server_that_breaks_the_protocol(kind: str, tmp_path: Path) -> None:
    stage, change, expected = HOSTILE[kind]
    recorder = Recorder(secure_run(count=1), tmp_path)
    refused = []

    def attack(message: Message) -> None:
        if stage_of(message) == stage:
            refused.append(reason(recorder.ask(with_data(message, change(data_of(message.content))))))

    recorder.before = attack
    [result] = play(recorder.run, recorder.grid)
    assert expected in refused[0]
    assert not result.lost, "a refused message changes nothing, so the honest one is answered"


@pytest.mark.slow
def test_difference_of_two_sums_would_reveal_an_update_so_the_second_is_refused(tmp_path: Path) -> None:
    """Without the record, a server that starts again without c3 learns c3's update exactly."""
    run, model = secure_run(count=1, min_updates=3), toy_model()
    grid = make_grid(run, model, FOUR, tmp_path)
    [first] = play(run, grid, session="1")
    c3 = grid.nodes.pop(10)
    again = {"session": "2", "wait_for": 3}
    with pytest.raises(RunError, match="has confirmed round 0 for other clients before"):
        _strict(with_federation(run, skip_failed_clients=False), grid, **again)
    for client in FOUR.clients:  # the attack works where sites do not remember
        (tmp_path / client / UNMASKED).unlink()
    [second] = play(run, grid, session="3", wait_for=3)
    alone = _update_of("c3", run)
    weights = {client: len(FOUR[client].train) for client in FOUR.clients}
    for name, value in alone.delta.items():
        total, rest = sum(weights.values()), sum(weights.values()) - weights["c3"]
        moved = [each.server.params[name] - model.initial[name] for each in (first, second)]
        stolen = (moved[0] * total - moved[1] * rest) / weights["c3"]
        assert torch.allclose(stolen, value, atol=1e-5)
    grid.nodes[10] = c3
    [third] = play(run, grid, session="4")
    assert third.skipped, "now the sites have unmasked for three"


@pytest.mark.slow
@pytest.mark.parametrize("neighbors", ["auto", 2])
def test_round_is_unmasked_again_for_the_same_clients(neighbors: Any, tmp_path: Path) -> None:
    """In a new session: also a site that shares masks with its neighbors only sees who is in the sum."""
    run = secure_run(count=1, secure_aggregation=replace(SETTINGS, neighbors=neighbors, threshold=1.0, collusion=0.0))
    grid = make_grid(run, toy_model(), FOUR, tmp_path)
    [first], [second] = play(run, grid, session="1"), play(run, grid, session="2")
    assert (first.skipped, second.skipped) == (None, None)
    assert tensors.equal(first.server.params, second.server.params)


def _strict(run: Run, grid: FakeGrid, **more: Any) -> None:
    try:
        play(run, grid, **more)
    except ClientError as error:
        raise RunError(error.reason) from error


def _update_of(client: str, run: Run) -> Update:
    found: list[Update] = []
    clear, model = replace(run, secure_aggregation=None, rounds=1), toy_model()
    inner = SimulationEngine(clear, model, FOUR)

    class Kept:
        clients, evaluate = inner.clients, inner.evaluate

        def train(self, jobs: Any) -> Iterator[Any]:
            for reply in inner.train(jobs):
                found.append(reply)  # type: ignore[arg-type]
                yield reply

    list(rounds(clear, model, Kept()))  # type: ignore[arg-type]
    return next(each for each in found if each.client == client)


@pytest.mark.slow
def test_round_is_masked_for_one_model_only(tmp_path: Path) -> None:
    run, model = secure_run(count=1), toy_model()
    grid = make_grid(run, model, FOUR, tmp_path)
    play(run, grid)
    shifted = toy_model()
    shifted.initial = {name: value + 1 for name, value in shifted.initial.items()}
    with pytest.raises(RunError, match="round 0 was already answered for another model"):
        list(rounds(run, shifted, flower_engine(run, shifted, grid, FOUR.clients, session="2")))


# ---- signed keys


def signed_run(keys: Path, **more: Any) -> Run:
    settings = replace(SETTINGS, signers=write_ssh_keys(keys, FOUR.clients, "p384"))
    return secure_run(count=1, secure_aggregation=settings, **more)


@pytest.mark.slow
def test_server_in_the_middle_is_refused_if_sites_sign_their_keys(tmp_path: Path) -> None:
    """A server that puts its own cipher key in place of c3's could read the shares for c3."""
    own = public_key(new_secret())

    def swap(message: Message, honest: Reply) -> Message | None:
        roster = read_roster(data_of(message.content))
        false = write_roster({**roster, "c3": replace(roster["c3"], cipher_key=own)})
        reply = honest(with_data(message, false))
        assert reply
        return Message(reply.content, reply_to=message)

    run = signed_run(tmp_path, skip_failed_clients=False)
    grid = make_grid(run, toy_model(), FOUR, tmp_path / "signed", keys=tmp_path)
    [result] = play(run, grid)
    assert tensors.equal(result.server.params, embedded(run)[0].server.params)
    grid = make_grid(run, toy_model(), FOUR, tmp_path / "attacked", keys=tmp_path)
    change_site(grid, "c0", at("share_keys", swap))
    with pytest.raises(ClientError, match="the keys of c3 in the roster are not signed by it"):
        play(run, grid)
    unsigned = secure_run(count=1)
    grid = make_grid(unsigned, toy_model(), FOUR, tmp_path / "unsigned")
    change_site(grid, "c0", at("share_keys", swap))
    seen: list[Message] = []
    grid.fetching = seen.append
    [result] = play(unsigned, grid)
    [lost] = result.lost
    assert (lost.client, "shares other secrets" in lost.reason) == ("c0", True), "by the keys that the others have"
    assert not any("refusal" in reply.content for reply in seen if stage_of(reply) == "share_keys"), "c0 believed it"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("signed", [True, False])
def test_server_that_tells_each_site_another_list_opens_no_update_if_sites_sign(
    signed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cuts c0 off: its masks are those with c1 and c2, and the others hear that these dropped out."""
    monkeypatch.setattr(SecureServer, "_check_signature", lambda *what: None)  # it goes on in any case
    settings = SecureAggregation(threshold=0.6, collusion=0.0)  # three of five
    if signed:
        settings = replace(settings, signers=write_ssh_keys(tmp_path, FIVE.clients, "ed25519"))
    told = {"c0": "012", "c1": "013", "c2": "023", "c3": "034", "c4": "034"}  # whose vectors arrived
    released: dict[str, UnmaskedShares] = {}
    refused: dict[str, str] = {}

    def lie(client: str) -> Change:
        def change(message: Message, honest: Reply) -> Message | None:
            if not (stage := stage_of(message)):
                return honest(message)
            data = data_of(message.content)
            if stage == "mask" and client == "c0":
                data = Stayed(frozenset(("c0", "c1", "c2")), frozenset()).to_bytes(FIVE.clients)
            elif stage == "confirm":
                shared = frozenset(("c0", "c1", "c2") if client == "c0" else FIVE.clients)
                data = Stayed(shared, frozenset(f"c{place}" for place in told[client])).to_bytes(FIVE.clients)
            elif stage == "unmask":
                data = write_signatures(dict(zip(FIVE.clients, read_message("V", data), strict=True)), told_to(client))
            reply = honest(with_data(message, data))
            assert reply
            if stage == "unmask" and "refusal" in reply.content:
                refused[client] = reason(reply.content)
            elif stage == "unmask":
                released[client] = UnmaskedShares.from_bytes(data_of(reply.content))
            return Message(reply.content, reply_to=message)

        return change

    def told_to(client: str) -> list[str]:
        return [f"c{place}" for place in told[client]]

    run, model = secure_run(count=1, secure_aggregation=settings), toy_model()
    grid = make_grid(run, model, FIVE, tmp_path / "sites", keys=tmp_path if signed else None)
    for client in FIVE.clients:
        change_site(grid, client, lie(client), FIVE)
    [result] = rounds(run, model, flower_engine(run, model, grid, FIVE.clients, deadline=0.3))
    assert result.skipped
    if signed:
        assert not released
        assert set(refused) == set(FIVE.clients)
        assert all("confirmed who is in the sum" in why for why in refused.values())
    else:
        assert sum("c0" in each.seeds for each in released.values()) >= 3, "the mask of c0 alone"
        assert all(sum(peer in each.keys for each in released.values()) >= 3 for peer in ("c1", "c2")), "and with both"


def test_site_without_its_listed_key_says_so(tmp_path: Path) -> None:
    run = signed_run(tmp_path, skip_failed_clients=False)
    with pytest.raises(ClientError, match="add key=PATH to its node config"):
        play(run, make_grid(run, toy_model(), FOUR, tmp_path / "none"))
    write_ssh_keys(tmp_path, ["c1"], "p384")
    with pytest.raises(ClientError, match="its private key is not the one in secure_aggregation"):
        play(run, make_grid(run, toy_model(), FOUR, tmp_path / "other", keys=tmp_path))
    settings = run.secure_aggregation
    assert settings is not None
    assert settings.signers is not None
    lacking = {name: line for name, line in settings.signers.items() if name != "c2"}
    with pytest.raises(RunError, match="signers has no key of 'c2'"):
        check_eligible(replace(run, secure_aggregation=replace(settings, signers=lacking)), toy_model(), FOUR.clients)


# ---- sites that fail or cheat


def silent(message: Message, honest: Reply) -> Message | None:
    return None


def garbage(message: Message, honest: Reply) -> Message | None:
    content = secure_messages.encode_reply(b"\x00garbage")
    return Message(messages.with_job_id(content, message.content), reply_to=message)


def far_too_much(message: Message, honest: Reply) -> Message | None:
    content = secure_messages.encode_reply(bytes(100_000))
    return Message(messages.with_job_id(content, message.content), reply_to=message)


def extra_record(message: Message, honest: Reply) -> Message | None:
    reply = honest(message)
    assert reply
    return Message(RecordDict({**reply.content, "more": ConfigRecord({"x": 1})}), reply_to=message)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("change", [silent, garbage, far_too_much, extra_record])
def test_client_that_fails_in_a_stage_is_lost_and_the_others_are_summed(
    stage: Stage, change: Change, tmp_path: Path
) -> None:
    run = secure_run(count=1)
    grid = make_grid(run, toy_model(), FOUR, tmp_path)
    change_site(grid, "c1", at(stage, change))
    [result] = play(run, grid)
    away = Availability(trace={(0, "c1"): 0.0})
    [expected] = embedded(run, None if stage in ("confirm", "unmask") else away)
    assert result.skipped is None
    assert tensors.equal(result.server.params, expected.server.params)
    assert [lost.client for lost in result.lost] == ([] if stage in ("confirm", "unmask") else ["c1"])
    assert result.secure is not None
    assert result.secure["recovered"] == (stage == "mask")


def undecryptable(message: Message, honest: Reply) -> Message | None:
    """Shares that nobody can open, with hashes and a proof that are right."""
    reply = honest(message)
    assert reply
    fields = read_message("E", data_of(reply.content))
    spoiled = [bytes(len(field)) if place >= 2 and place % 3 == 1 else field for place, field in enumerate(fields)]
    content = secure_messages.encode_reply(write_message("E", spoiled))
    return Message(messages.with_job_id(content, message.content), reply_to=message)


def reports_all(message: Message, honest: Reply) -> Message | None:
    content = secure_messages.encode_reply(Report(frozenset(FOUR.clients) - {"c1"}).to_bytes())
    return Message(messages.with_job_id(content, message.content), reply_to=message)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("stage", "change", "why"),
    [
        ("share_keys", undecryptable, "3 clients cannot use the shares"),
        ("check", reports_all, "cannot use the shares of 3 clients"),
    ],
)
def test_site_that_shares_garbage_is_lost_and_named_and_the_others_are_summed(
    stage: Stage, change: Change, why: str, tmp_path: Path
) -> None:
    run = secure_run(count=1)
    for strict in (False, True):
        grid = make_grid(run, toy_model(), FOUR, tmp_path / str(strict))
        change_site(grid, "c1", at(stage, change))
        if strict:
            with pytest.raises(ClientError, match=f"'c1': .*{why}"):
                play(with_federation(run, skip_failed_clients=False), grid)
            continue
        [result] = play(run, grid)
        assert result.skipped is None
        assert [lost.client for lost in result.lost] == ["c1"]
        assert why in result.lost[0].reason
        [expected] = embedded(run, Availability(trace={(0, "c1"): 0.0}))
        assert tensors.equal(result.server.params, expected.server.params)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("stage", STAGES)
def test_too_few_honest_clients_end_the_run_and_hostile_ones_skip_the_round(stage: Stage, tmp_path: Path) -> None:
    run, model = secure_run(count=1), toy_model()
    for change, ends in ((silent, stage not in ("confirm", "unmask")), (garbage, False)):
        grid = make_grid(run, model, FOUR, tmp_path / change.__name__)
        for client in ("c1", "c2"):
            change_site(grid, client, at(stage, change))
        if ends:
            with pytest.raises(RunError, match="cannot be unmasked"):
                play(run, grid)
        else:
            [result] = play(run, grid)
            assert result.skipped is not None
            assert tensors.equal(result.server.params, model.initial)


# ---- a server that dies in mid-round

CONFIG = (
    """
rounds = 3
method = {name = "fedper", finetune = 0}
[secure_aggregation]
[federation]
min_updates = 2
[engine]
clients_per_block = 1
"""
    + SMALL_TASK
    + "test_examples = 20"
    + SMALL_VIT
)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["mask", "confirm", "unmask"])
def test_server_killed_in_any_stage_starts_the_round_over_with_new_keys(stage: Stage, tmp_path: Path) -> None:
    config = tmp_path / "app" / "experiment.toml"
    config.parent.mkdir()
    config.write_text(CONFIG)
    for _ in runner.start(load(config), tmp_path / "here"):
        pass
    settings: dict[str, Any] = {
        "folder": str(tmp_path / "there"),
        "deadline": 60.0,
        "clients": 3,
        "set": shlex.join([]),
    }
    keys: list[bytes] = []

    def site(name: str) -> Reply:
        def reply(message: Message) -> Message:
            own = {"client": name, "folder": str(tmp_path / "sites")}
            answer = flower_app.client(config)(message, Context(1, 1, own, RecordDict(), settings))
            if stage_of(message) == "advertise" and name == "c0":
                keys.append(data_of(answer.content))
            return answer

        return reply

    grid = FakeGrid({node: site(f"c{node}") for node in range(3)})
    served = flower_app.serve(grid, load(config), settings, "1")
    next(served)

    def dies(reply: Message) -> None:
        if stage_of(reply) == stage:
            raise ConnectionError("killed")

    grid.fetching = dies
    with pytest.raises(ConnectionError):
        next(served)
    grid.fetching = lambda reply: None
    for row in flower_app.serve(grid, load(config), settings, "2"):
        assert not row["lost"]
    assert tensors.equal(*(server_in(tmp_path / side).params for side in ("here", "there")))
    assert len(keys) == len(set(keys)) == 4, "the second round was begun twice, with new keys"


NOISY = (
    """
rounds = 2
method = {name = "fedavg"}
[secure_aggregation]
collusion = 0.0
[privacy]
unit = "client"
noise = 1.0
[engine]
clients_per_block = 1
"""
    + SMALL_TASK
    + "test_examples = 20"
    + SMALL_VIT
)


@pytest.mark.slow
def test_round_that_is_started_again_has_the_same_noise_and_is_one_release(tmp_path: Path) -> None:
    """Other noise on the same clients would be a second release of the round, which nobody charges."""
    config = tmp_path / "app" / "experiment.toml"
    config.parent.mkdir()
    config.write_text(NOISY)

    def first_mean(session: str, sites: str) -> tensors.Tensors:
        settings: dict[str, Any] = {"folder": str(tmp_path / session), "deadline": 60.0, "clients": 3, "set": ""}

        def site(name: str) -> Reply:
            own = {"client": name, "folder": str(tmp_path / sites)}
            return lambda message: flower_app.client(config)(message, Context(1, 1, own, RecordDict(), settings))

        grid = FakeGrid({node: site(f"c{node}") for node in range(3)})
        served = flower_app.serve(grid, load(config), settings, session)
        assert next(served)["secure"]["clients"] == 3
        served.close()
        return server_in(tmp_path / session).params

    once = first_mean("1", "sites")
    assert tensors.equal(once, first_mean("2", "sites"))
    assert not tensors.equal(once, first_mean("3", "other")), "sites with other secrets draw other noise"
