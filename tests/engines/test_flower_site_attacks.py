"""Attacks on a Flower site by a hostile server, or with replayed or forged messages."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from flower_fixtures import ANY_SIZE, CPU, THREE, FakeGrid, through_bytes
from flower_fixtures import task_identity as task_identity
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from helpers import SMALL_TASK, SMALL_VIT, files_in, toy_model, toy_run

from partita.core import serialization, tensors
from partita.core.client import Job
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.settings import Run
from partita.core.update import Update
from partita.engines.availability import Availability
from partita.engines.flower import answered_rounds, client, messages
from partita.engines.flower.client import client_app
from partita.engines.flower.fingerprints import Fingerprints
from partita.engines.flower.message_checks import largest_job
from partita.engines.flower.site import Site
from partita.engines.simulation import SimulationEngine
from partita.evaluation import ACCURACY
from partita.experiment import flower_app
from partita.experiment.config import load, shared_digest
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.scaffold import scaffold
from partita.privacy.client_level import protect_clients
from partita.storage.safe_text import label_folder, path_component

LONG = "x" * 1_000_000
ODD = "\x1b[2J\r\n\u202e<script>alert(1)</script>"

# ---- a hostile server: orders


def site_at(folder: Path, run: Run, config: str = "") -> Site:
    return Site(run, toy_model(), "c1", THREE["c1"], folder, Availability(), CPU, ACCURACY, config)


def reply_of(site: Site, content: RecordDict, kind: str = "train") -> RecordDict:
    """The site's reply to a message that went through its serialized form."""
    message = through_bytes(Message(content, 1, kind))
    return client_app(lambda context: "c1", lambda context: site)(message, Context(1, 1, {}, RecordDict(), {})).content


def honest_order(run: Run, round: int = 0, change: Callable[[Job], Job] = lambda job: job, **more: Any) -> RecordDict:
    """An honest server's first message, with changes; `more` are entries of the job's record."""
    model = toy_model()
    job, _ = make_job(run, model, initial_server(run, model), round, "c1")
    about = {"session": "1", "config": "", "base": "", "void": 0, "settled": 0} | more
    job = change(job)
    return messages.encode_job(job, Fingerprints()(job.params), **about)  # type: ignore[arg-type]


def sent(**changes: torch.Tensor) -> Callable[[Job], Job]:
    """Add or replace parameters; a dot in a name is written as two underscores."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda job: replace(job, params={**job.params, **named}, stale=job.stale | named.keys())


def slot(name: str, part: dict[str, torch.Tensor]) -> Callable[[Job], Job]:
    return lambda job: replace(job, slots={**job.slots, name: {**job.slots.get(name, {}), **part}})


def signal(**numbers: float) -> Callable[[Job], Job]:
    return lambda job: replace(job, signal={**job.signal, **numbers})


HEAD = torch.zeros(3, 4)
AUTO = "fedfrozen"
ORDERS: dict[str, tuple[str, dict[str, Any], str]] = {  # kind -> (method, changes, expected reason)
    "round -1": ("fedavg", {"round": -1}, "was asked for round -1; this run has rounds 0 to 2"),
    "a round behind the last": ("fedavg", {"round": 3}, "was asked for round 3"),
    "round 2^62": ("fedavg", {"round": 2**62}, "was asked for round"),
    "void below 0": ("fedavg", {"void": -1}, "was sent void = -1"),
    "void beyond the round": ("fedavg", {"void": 2}, "was sent void = 2 in round 0"),
    "settled below 0": ("fedavg", {"settled": -5}, "was sent settled = -5"),
    "settled beyond the round": ("fedavg", {"settled": 10**9}, "was sent settled = 1000000000"),
    "a part of its data": ("fedavg", {"part": "train"}, "it asks for the part 'train' of a client's examples"),
    "a session of 1 MB": ("fedavg", {"session": LONG}, "was sent an invalid session"),
    "an odd session": ("fedavg", {"session": ODD}, "was sent an invalid session"),
    "no session": ("fedavg", {"session": ""}, "was sent an invalid session"),
    "another config": ("fedavg", {"config": "beef"}, "has the digest 'beef', but the site's has ''; run the same app"),
    "a config of 1 MB": ("fedavg", {"config": LONG}, "has the digest 'xxx"),
    "another base": ("fedavg", {"base": "beef" * 9}, "have the digest 'none' at the site and 'beefbeefbeef' at"),
    "an odd base": ("fedavg", {"base": ODD}, "have the digest 'none' at the site and '"),
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


@pytest.mark.fast_cases(14)
@pytest.mark.parametrize("asked", ["train", "evaluate"])
@pytest.mark.parametrize("kind", ORDERS)
def test_site_refuses_orders_outside_its_own_plan(kind: str, asked: str, tmp_path: Path) -> None:
    method, changes, reason = ORDERS[kind]
    run = toy_run(method_at_site(method), 3)
    site = site_at(tmp_path, run)
    before = reply_of(site, honest_order(run))
    assert "refusal" not in before
    files = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    if kind in ("round -1", "a round behind the last", "round 2^62"):
        forged = honest_order(run)
        forged["job"]["round"] = changes["round"]  # type: ignore[index]
    else:
        forged = honest_order(run, **changes)
    answer = reply_of(site, forged, asked)
    assert set(answer) <= {"refusal", "job_id"}
    refused = messages.decode_error(answer)
    assert refused
    assert reason in refused.reason
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == files, "its folder is unchanged"


def test_private_site_reports_no_scores_on_validation_examples(tmp_path: Path) -> None:
    private = replace(fedavg(), privacy=PrivacySettings(clip=1.0, noise=1.0))
    hidden = protect_clients(fedavg(), 1.0, 1.0, 1)
    for number, method in enumerate((fedavg(), private, hidden)):
        run = toy_run(method, 3)
        site = site_at(tmp_path / str(number), run)
        reply_of(site, honest_order(run))
        answers = [reply_of(site, honest_order(run, part=part), "evaluate") for part in ("test", "validation")]
        refused = [messages.decode_error(answer) for answer in answers]
        assert refused[0] is None
        assert (refused[1] is not None) == (number > 0)
        assert refused[1] is None or "does not report scores on validation examples" in refused[1].reason


NOISE = b"\xff" * 9
MALFORMED: dict[str, Callable[[RecordDict], dict[str, Any]]] = {
    "nothing": lambda content: {},
    "no job": lambda content: {name: part for name, part in content.items() if name != "job"},
    "no signal": lambda content: {name: part for name, part in content.items() if name != "signal"},
    "no tensors": lambda content: {name: part for name, part in content.items() if name != "tensors"},
    "a record more": lambda content: {**content, "more": ConfigRecord({"a": LONG})},
    "a text for a round": lambda content: {**content, "job": ConfigRecord({**content["job"], "round": "0"})},  # type: ignore[dict-item]
    "an entry more": lambda content: {**content, "job": ConfigRecord({**content["job"], "more": 1})},  # type: ignore[dict-item]
    "noise": lambda content: {**content, "tensors": ArrayRecord({"blob": Array("uint8", (9,), "safetensors", NOISE)})},
    "a pickle": lambda content: {**content, "tensors": ArrayRecord({"blob": Array("uint8", (9,), "pickle", NOISE)})},
}  # fmt: skip


@pytest.mark.parametrize("kind", MALFORMED)
def test_site_refuses_malformed_messages(kind: str, tmp_path: Path) -> None:
    run = toy_run(fedavg(), 3)
    answer = reply_of(site_at(tmp_path, run), RecordDict(MALFORMED[kind](honest_order(run))))
    refused = messages.decode_error(answer)
    assert refused
    assert refused.fault
    assert not files_in(tmp_path)


MANY = 100_000


def crowd(slot: Callable[[int], str]) -> ArrayRecord:
    """A message that names many tensors without bytes."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{slot(number)}/{number}": entry for number in range(MANY)}).encode()
    data = len(header).to_bytes(8, "little") + header
    return ArrayRecord({"blob": Array("uint8", (len(data),), messages.FORMAT, data)})


CROWDS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "tensors": (lambda: {"tensors": crowd(lambda number: "params")}, r"it names tensors in \d,\d+,\d+ bytes, but"),
    "slots": (lambda: {"tensors": crowd(str)}, r"it names tensors in \d,\d+,\d+ bytes, but"),
    "signals": (lambda: {"signal": MetricRecord(dict.fromkeys(map(str, range(20_001)), 0.0))}, "it has 20,001 numbers"),
}


@pytest.mark.parametrize("kind", CROWDS)
def test_crowd_of_names_is_refused_before_any_is_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message within the bytes of a large model, whose names take far longer to read than its bytes."""
    crowded, reason = CROWDS[kind]
    order = RecordDict({**honest_order(toy_run(fedavg(), 3)), **crowded()})
    monkeypatch.setattr(safetensors.torch, "load", lambda data: {} if len(data) < MANY else pytest.fail("it was read"))
    with pytest.raises(messages.MessageError, match=reason):
        messages.decode_job(order, messages.Size(10**9, 10**6))


def test_honest_job_of_a_method_with_slots_is_within_the_size_of_the_largest() -> None:
    run = toy_run(build("scaffold", {}), 3)
    data = honest_order(run)["tensors"]["blob"].data  # type: ignore[union-attr, index]
    most = largest_job(toy_model())
    assert most.header // 20 < serialization.header_bytes(data) <= most.header
    assert most.bytes // 20 < len(data) <= most.bytes


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", ["fedper", "fedrep", "scaffold", "fedfrozen", "local-only"])
def test_site_sends_only_what_the_plan_sends_up(name: str, tmp_path: Path) -> None:
    """Whatever the server claims is stale, the site sends only names of its own plan."""
    run, model = toy_run(method_at_site(name), 3), toy_model()
    _, plan = make_job(run, model, initial_server(run, model), 0, "c1")
    for forged in (
        honest_order(run),
        honest_order(run, change=lambda job: replace(job, stale=frozenset())),
        honest_order(run, void=0),
    ):
        answer = reply_of(site_at(tmp_path, run), forged)
        if "refusal" not in answer:
            update = messages.decode_update(answer, messages.JobId(0, "c1", ""), ANY_SIZE)
            assert update.delta.keys() <= plan.up
            assert all(part.keys() <= plan.up for part in update.slots.values())
            assert update.steps.keys() <= plan.train


def test_site_refuses_to_send_a_kept_parameter_leaked_by_a_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = toy_run(build("fedper"), 1)

    def leaky(self: SimulationEngine, jobs: Any) -> Iterator[Update]:
        yield Update("c1", {"head.weight": HEAD}, {}, 1.0, {"head.weight": 1}, None)

    monkeypatch.setattr(SimulationEngine, "train", leaky)
    refused = messages.decode_error(reply_of(site_at(tmp_path, run), honest_order(run)))
    assert refused
    assert "would send 'head.weight', which the plan of the round does not send up" in refused.reason


# ---- replayed messages


def test_site_refuses_old_rounds_and_ended_sessions(tmp_path: Path) -> None:
    run = toy_run(scaffold(), 4)
    site = site_at(tmp_path, run)
    asked = [honest_order(run, number, void=number) for number in range(3)]
    assert all("refusal" not in reply_of(site, content) for content in asked)
    files = files_in(tmp_path)
    refused = messages.decode_error(reply_of(site, asked[0]))
    assert refused
    assert "was asked for round 0 after round 2; this is an old message" in refused.reason
    assert "refusal" not in reply_of(site, honest_order(run, 1, void=1, session="2")), (
        "a server may resume from an older checkpoint"
    )
    refused = messages.decode_error(reply_of(site, asked[2]))
    assert refused
    assert "session '1' has ended here; this is an old message" in refused.reason
    assert files_in(tmp_path) < files, "the new session dropped the site's state of round 2"


def test_number_of_sessions_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answered_rounds, "SESSIONS_KEPT", 3)
    run = toy_run(fedavg(), 1)
    replies = [reply_of(site_at(tmp_path, run), honest_order(run, session=str(number))) for number in range(6)]
    assert ["refusal" in each for each in replies] == [False] * 3 + [True] * 3


# ---- noise


def private_run(method: Method | None = None, noise: float = 1.0) -> Run:
    run = toy_run(method or fedavg(), 3, steps=1, secret=Key(11))
    return replace(run, method=replace(run.method, privacy=PrivacySettings(clip=1.0, noise=noise)))


def shift_params(job: Job) -> Job:
    params = {name: value + 0.3 for name, value in job.params.items()}
    return replace(job, params=params, stale=frozenset(params))


def delta_of(answer: RecordDict) -> tensors.Tensors:
    return dict(messages.decode_update(answer, messages.JobId(0, "c1", ""), ANY_SIZE).delta)


REPEATED_ORDERS: dict[str, dict[str, Any]] = {
    "another model": {"change": shift_params},
    "another model in a new session": {"change": shift_params, "session": "2"},
    "one number changed": {"change": lambda job: sent(head__weight=job.params["head.weight"] + 1e-3)(job)},
    "settled and void as far as they go": {"change": shift_params, "session": "3", "void": 0, "settled": 0},
}


def test_two_replies_with_equal_noise_would_reveal_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Demonstrates the attack on a site that answers a round twice."""
    monkeypatch.setattr(answered_rounds, "claim", lambda *_: True)
    found = {}
    for noise in (1.0, 0.0):
        run, folder = private_run(noise=noise), tmp_path / str(noise)
        asked = honest_order(run), honest_order(run, change=shift_params)
        found[noise] = [delta_of(reply_of(site_at(folder, run), content)) for content in asked]
    apart = {noise: tensors.subtract(*two) for noise, two in found.items()}
    hidden = float(tensors.norm(tensors.subtract(found[1.0][0], found[0.0][0])))
    assert hidden > 0.05
    assert float(tensors.norm(tensors.subtract(apart[1.0], apart[0.0]))) < 1e-2 * hidden, "up to the grid"


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", REPEATED_ORDERS)
def test_private_round_is_answered_for_one_model_only(kind: str, tmp_path: Path) -> None:
    run = private_run()
    first = reply_of(site_at(tmp_path, run), honest_order(run))
    refused = messages.decode_error(reply_of(site_at(tmp_path, run), honest_order(run, **REPEATED_ORDERS[kind])))
    assert refused
    assert "round 0 was already answered for another model; answering again would reuse its noise" in refused.reason
    assert not refused.fault, "the server records the client as lost and continues"
    again = reply_of(site_at(tmp_path, run), honest_order(run, session="9"))
    assert tensors.equal(delta_of(first), delta_of(again)), "the same order gets the same reply"


def test_server_cannot_make_a_site_reuse_noise_by_dropping_its_state(tmp_path: Path) -> None:
    """The sent model is the same, but dropping the state of round 0 changes the site's personal head."""
    run = private_run(build("fedper", {"finetune": 0}))
    for number in range(2):
        assert "refusal" not in reply_of(site_at(tmp_path, run), honest_order(run, number, void=number))
    refused = messages.decode_error(reply_of(site_at(tmp_path, run), honest_order(run, 1, void=0, session="2")))
    assert refused
    assert "round 1 was already answered" in refused.reason


def test_answered_round_is_recorded_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = private_run()

    def dies(self: SimulationEngine, jobs: Any) -> Iterator[Update]:
        assert "0" in json.loads((tmp_path / client.ANSWERED).read_text())
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(SimulationEngine, "train", dies)
        assert "refusal" in reply_of(site_at(tmp_path, run), honest_order(run))
    assert "refusal" in reply_of(site_at(tmp_path, run), honest_order(run, change=shift_params))
    assert "refusal" not in reply_of(site_at(tmp_path, run), honest_order(run))


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"0": "'])
def test_site_with_a_damaged_answer_record_refuses(damage: bytes, tmp_path: Path) -> None:
    run = private_run()
    reply_of(site_at(tmp_path, run), honest_order(run))
    (tmp_path / client.ANSWERED).write_bytes(damage)
    refused = messages.decode_error(reply_of(site_at(tmp_path, run), honest_order(run, 1)))
    assert refused
    assert "answered.json in this site's folder is damaged; restore it from a copy" in refused.reason


@pytest.mark.slow
def test_only_one_of_concurrent_claims_wins_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = answered_rounds.read_record

    def slow(path: Path) -> Any:
        found = read(path)
        time.sleep(0.02)
        return found

    monkeypatch.setattr(answered_rounds, "read_record", slow)
    with ThreadPoolExecutor(8) as pool:
        won = list(
            pool.map(lambda number: answered_rounds.claim(tmp_path / "answered.json", 0, str(number)), range(32))
        )
    assert sum(won) == 1


def test_round_without_privacy_may_be_asked_again(tmp_path: Path) -> None:
    run = toy_run(fedavg(), 1)
    for content in (honest_order(run), honest_order(run, change=shift_params)):
        assert "refusal" not in reply_of(site_at(tmp_path, run), content)
    assert not (tmp_path / client.ANSWERED).exists()


def test_private_site_refuses_evaluation_that_adapts_without_noise(tmp_path: Path) -> None:
    run = private_run(build("fedper"))
    reply_of(site_at(tmp_path, run), honest_order(run))
    refused = messages.decode_error(reply_of(site_at(tmp_path, run), honest_order(run, void=1), "evaluate"))
    assert refused
    assert "adapts to training examples before it is scored" in refused.reason


# ---- the app


CONFIG = (
    """
rounds = 1
method = {name = "fedavg"}
[federation]
min_updates = 0
skip_failed_clients = true
"""
    + SMALL_TASK
    + "test_examples = 20"
    + SMALL_VIT
)


def serve_one_round(config: Path, folder: Path, here: list[str], there: list[str]) -> dict[str, Any]:
    """The row of a one-site run, with config overrides `here` for the server and `there` for the site."""
    (config.parent / "app").mkdir(parents=True, exist_ok=True)
    settings = {"folder": str(folder), "deadline": 60.0, "clients": 1, "set": " ".join(there)}
    own = {"client": "c0", "folder": str(config.parent / "sites")}

    def site(message: Message) -> Message:
        return flower_app.client(config)(message, Context(1, 1, own, RecordDict(), settings))  # type: ignore[arg-type]

    [row] = flower_app.serve(FakeGrid({1: site}), load(config, here), settings, folder.name)
    return row


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "experiment.toml").write_text(CONFIG)
    return tmp_path / "experiment.toml"


@pytest.mark.slow
def test_site_with_a_different_config_refuses(config: Path, tmp_path: Path) -> None:
    row = serve_one_round(config, tmp_path / "a", ["training.lr=0.5"], [])
    [reason] = row["lost"].values()
    assert reason.startswith("the server's config has the digest '")
    assert "run the same app with the same run config on both sides" in reason
    assert serve_one_round(config, tmp_path / "b", [], ["data.noise=2.0", "engine.threads=1"])["lost"] == {}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    "change",
    ["training.lr=0.5", "method.name=fedprox", "seed=1", "privacy.noise=2.0", "training.batch_size=8", "rounds=9",
     "model.width=16", "split.clients=4", "federation.client_dropout=0.5", "label=b"],
)  # fmt: skip
def test_shared_digest_covers_every_shared_setting(change: str, config: Path) -> None:
    plain, own = shared_digest(load(config)), ["data.noise=2.0", "engine.threads=1", "engine.client_state=disk"]
    assert shared_digest(load(config, [change])) != plain
    assert shared_digest(load(config, own)) == plain


PATHS = ["../x", "a/b", "/etc", ".", "..", "nul\0", "x" * 10_000, "a\\b", "~", "-rf", "ü/ä", "\ud800", "c:", " "]


@pytest.mark.parametrize("name", PATHS, ids=range(len(PATHS)))
def test_any_client_name_or_label_is_one_folder_component(name: str, tmp_path: Path) -> None:
    for part in (path_component(name), label_folder(name)):
        made = tmp_path / part
        made.mkdir(exist_ok=True)
        assert made.parent.resolve() == tmp_path.resolve() == made.resolve().parent
        assert len(part) < 200
    assert len({path_component(each) for each in PATHS}) == len(PATHS)


@pytest.mark.parametrize("label", ["../../x", "/etc/x", "a/b", "x" * 10_000])
def test_label_cannot_escape_the_folder(label: str, config: Path) -> None:
    name = flower_app._identity(replace(load(config), label=label))
    assert len(Path(name).parts) == 1
    assert len(name) < 200


def test_client_called_dots_gets_its_own_folder(config: Path, tmp_path: Path) -> None:
    settings = {"set": shlex.quote("split={name='site', sites=['..', 'north']}")}
    own: Any = {"client": "..", "folder": str(tmp_path / "sites")}
    site = flower_app._site(Context(1, 1, own, RecordDict(), settings), config)  # type: ignore[arg-type]
    assert site.folder.resolve().parent.parent == (tmp_path / "sites").resolve()
