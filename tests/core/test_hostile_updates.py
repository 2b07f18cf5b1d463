"""No reply of one client stops a run that skips failed clients, and a refused reply does not change the result."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    SMALL_TASK,
    SMALL_VIT,
    Clients,
    ScriptedEngine,
    final_params,
    play,
    toy_model,
    toy_run,
    with_federation,
)
from hostile_updates import CASES, HOSTILE_CLIENT, HOSTILE_ROUND, Case, HostileEngine, Replies

from partita.core import tensors
from partita.core.client import ClientError, ClientState, Job
from partita.core.data import Examples
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import SGD, AdamW, Optimizer
from partita.core.rounds import ClientFailure, RoundResult, initial_server, rounds
from partita.core.server_rule import Server, ServerRule
from partita.core.settings import Run, RunError
from partita.core.tensors import Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.core.update_checks import MAX_NORM_RATIO
from partita.engines.availability import Availability
from partita.engines.simulation import SimulationEngine
from partita.experiment.alarms import check_round
from partita.experiment.builder import build as build_experiment
from partita.experiment.config import parse
from partita.experiment.runner import prepare
from partita.experiment.runner import run_rounds as play_rows
from partita.methods import INDEX, NEEDS_FACTORS, build
from partita.methods.fedavg import fedavg
from partita.privacy.client_level import protect_clients
from partita.report import load_run, page
from partita.storage.client_store import MemoryStore
from partita.testing.toy import ToyTransformer

SIZES = {"a": 5, "b": 6, "c": 7}
THREE_CLIENTS = Clients(**SIZES)
BRIEF: dict[str, dict[str, Any]] = {"fedrep": {"head_epochs": 2}}
WIDTH = {"quantize": 12, "prune": 36, "safl+prune+quantize": 36, "client-level, quantized": 12}  # else too few numbers
PRIVATE = {
    "client-level": lambda: protect_clients(fedavg(), 1.0, 0.1, 3),
    "client-level, fedadam": lambda: protect_clients(build("fedadam"), 1.0, 0.1, 3),
    "client-level, quantized": lambda: protect_clients(build("quantize"), 1.0, 0.1, 3),
    "client-level, narrowed": lambda: protect_clients(build("safl", {"select": "static"}), 1.0, 0.1, 3),
    "example-level": lambda: replace(fedavg(), privacy=PrivacySettings(clip=1.0, noise=1.0)),
}
COMPOSED = ("fedfrozen+scaffold", "fedper+moon+fedadam", "safl+prune+quantize")
# Without methods that extend the model, and without the one that pools all clients.
TOY_METHODS = [
    name for name in INDEX if not (made := build(name)).extend and not made.pool and name not in NEEDS_FACTORS
]
FEDERATIONS = (*TOY_METHODS, *COMPOSED, *PRIVATE)
# One of each way to read a reply: by the mean, with a slot, with slots and a state of the server, by another rule of
# aggregation, by fewer names than the model has, by what clients choose, decoded first, and clipped or without a trace.
KINDS = (
    "fedavg", "scaffold", "fedadamw", "fednova", "median", "krum", "fedper", "fedpart", "safl", "zero-shot",
    "safl+prune+quantize", "client-level, fedadam", "client-level, narrowed", "example-level",
)  # fmt: skip


@dataclass(frozen=True)
class FederationAfterOneRound:
    """A federation after round 0, and its final parameters if the hostile client is absent in round 1."""

    run: Run
    model: ToyTransformer
    server: Server
    states: dict[str, tuple[int, ClientState]]
    without: Tensors
    replies: Replies = field(default_factory=Replies)

    def engine(self, availability: Availability | None = None) -> SimulationEngine:
        store = MemoryStore()
        store.held = dict(self.states)
        return SimulationEngine(self.run, self.model, THREE_CLIENTS, store=store, availability=availability)

    def play(self, case: Case, place: int = 1, **settings: object) -> list[RoundResult] | None:
        """Play the remaining rounds; None if the case does not apply, such as a slot case without slots."""
        engine = HostileEngine(self.engine(), case, self.replies, place)
        try:
            played = list(rounds(with_federation(self.run, **settings), self.model, engine, self.server, HOSTILE_ROUND))  # type: ignore[arg-type]
        except Exception:
            if engine.possible:
                raise
            return None
        return played if engine.possible else None


@cache
def federation_after_one_round(name: str) -> FederationAfterOneRound:
    method = PRIVATE[name]() if name in PRIVATE else build(name, BRIEF.get(name, {}))
    optimizer: Optimizer = SGD() if method.supports_optimizer("sgd") else AdamW()
    run = toy_run(method, 3, optimizer, skip_failed_clients=True, drift=False, examples=SIZES)
    model = ToyTransformer(width=WIDTH.get(name, 4), layers=1)
    engine = SimulationEngine(run, model, THREE_CLIENTS)
    server = next(rounds(run, model, engine)).server
    assert isinstance(engine.store, MemoryStore)
    start = FederationAfterOneRound(run, model, server, engine.store.held, {})
    away = rounds(
        run, model, start.engine(Availability(trace={(HOSTILE_ROUND, HOSTILE_CLIENT): 0.0})), server, HOSTILE_ROUND
    )
    return replace(start, without=final_params(list(away)))


def was_refused(played: list[RoundResult]) -> bool:
    return HOSTILE_CLIENT in {lost.client for lost in played[0].lost}


def is_neutralized(name: str, case: Case) -> bool:
    """Whether the method's own transforms neutralize the case: client-level privacy clips and casts every update."""
    if name.startswith("client-level"):
        huge = any(word in case.name for word in ("3e38", "1e30", "1e12")) and "weight" not in case.name
        return huge or "as " in case.name
    return ("quantize" in name or "prune" in name) and ("as int8" in case.name or "slots" in case.name)


def outcome_of(name: str, case: Case, place: int = 1) -> str | None:
    """'refused' or 'accepted'; None if the case does not apply."""
    at = federation_after_one_round(name)
    played = at.play(case, place)
    if played is None:
        return None
    assert [each.number for each in played] == [HOSTILE_ROUND, HOSTILE_ROUND + 1]
    assert tensors.all_finite(final_params(played))
    assert all(tensors.all_finite(part) for part in played[-1].server.state.values() if _floats(part))
    if not was_refused(played):
        assert not case.refused or is_neutralized(name, case), "it was accepted"
        return "accepted"
    assert case.refused is not False, played[0].lost
    # b replies in the name of c, or of a if it comes first, whose own reply then comes second.
    if case.name not in ("client is the next", *["client is the last"][place:]):
        assert tensors.equal(final_params(played), at.without), "a refused reply left a trace"
    if case.name == "no reply":  # no client to blame
        assert tensors.equal(final_params(at.play(case, place, skip_failed_clients=False) or []), at.without)
        return "refused"
    with pytest.raises(ClientError) as caught:
        at.play(case, place, skip_failed_clients=False)
    assert caught.value.client in (HOSTILE_CLIENT, "a", "c", "mallory", "5", "")
    return "refused"


def _floats(part: Mapping[str, torch.Tensor]) -> bool:
    return bool(part) and all(value.is_floating_point() for value in part.values())


# ---- all cases


def _cases_over_federations() -> Iterator[Any]:
    """All cases, cycling over the federations; slot cases run on scaffold, which has slots."""
    others = [name for name in FEDERATIONS if name != "zero-shot"]
    for place, case in enumerate(CASES):
        name = "scaffold" if "slot" in case.name else others[place % len(others)]
        yield pytest.param(name, case, id=f"{name}: {case.name}")


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize(("name", "case"), list(_cases_over_federations()))
def test_hostile_reply_neither_stops_nor_steers_the_run(name: str, case: Case) -> None:
    outcome_of(name, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_no_hostile_reply_stops_any_kind_of_method(name: str) -> None:
    found = Counter(outcome_of(name, case) for case in CASES)
    assert found["refused"] > 100
    assert found["accepted"] >= 10


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 2], ids=["first", "last"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "client-level", "client-level, narrowed"])
def test_place_of_the_hostile_reply_does_not_matter(name: str, place: int) -> None:
    found = Counter(outcome_of(name, case, place) for case in CASES[place // 2 :: 2])  # of all, one half at each place
    assert found["refused"] > 50


def test_first_reply_does_not_decide_which_names_others_may_send() -> None:
    """The hostile client answers first, and leaves out a name."""
    case = next(case for case in CASES if case.name == "a name missing")
    played = federation_after_one_round("client-level, narrowed").play(case, place=0)
    assert played is not None
    assert [lost.client for lost in played[0].lost] == [HOSTILE_CLIENT]
    assert "under client-level privacy all clients of a round must send the same names" in played[0].lost[0].reason


# ---- norms


def engine_with_scaled_update(factor: float, names: str = "abc") -> ScriptedEngine:
    """All clients send equal updates, except the hostile one, whose update is `factor` times as large."""

    def answer(job: Job) -> Update:
        size = factor if job.client == HOSTILE_CLIENT else 1.0
        delta = {name: torch.full_like(value, 0.01 * size) for name, value in job.params.items()}
        return Update(job.client, delta, {}, 1.0, dict.fromkeys(delta, 1), 0.5)

    return ScriptedEngine(answer, names)


MODEL = toy_model()
NORM_OF_PLAIN_UPDATE = 0.01 * math.sqrt(sum(value.numel() for value in MODEL.initial.values()))


def test_implausible_update_is_refused_regardless_of_server_parameters() -> None:
    initial = math.sqrt(sum(float(value.square().sum()) for value in MODEL.initial.values()))
    most = MAX_NORM_RATIO * initial / NORM_OF_PLAIN_UPDATE
    run = toy_run(fedavg(), 1, skip_failed_clients=True)
    for server in (None, Server(tensors.scale(MODEL.initial, 1e6))):
        for factor, lost in ((0.99 * most, 0), (1.01 * most, 1)):
            [each] = rounds(run, MODEL, engine_with_scaled_update(factor), server)
            assert len(each.lost) == lost
    assert "is implausible" in each.lost[0].reason


def test_update_above_max_norm_is_scaled_down_and_recorded() -> None:
    run = toy_run(fedavg(), 1, max_norm=2 * NORM_OF_PLAIN_UPDATE)
    [each] = rounds(run, MODEL, engine_with_scaled_update(50.0))
    [same] = rounds(toy_run(fedavg(), 1), MODEL, engine_with_scaled_update(2.0))
    assert each.bounded == {HOSTILE_CLIENT}
    assert each.norms == pytest.approx(
        {"a": NORM_OF_PLAIN_UPDATE, "b": 50 * NORM_OF_PLAIN_UPDATE, "c": NORM_OF_PLAIN_UPDATE}
    )
    for name, value in final_params([same]).items():
        torch.testing.assert_close(final_params([each])[name], value)


def test_slots_are_scaled_down_with_the_delta() -> None:
    run = toy_run(build("scaffold"), 1)
    free = play(run, MODEL, THREE_CLIENTS)[0]
    bound = play(with_federation(run, max_norm=min(free.norms.values()) / 4), MODEL, THREE_CLIENTS)[0]
    assert bound.bounded == set("abc")
    for name, value in free.server.state["control"].items():
        assert float(bound.server.state["control"][name].norm()) < 0.5 * float(value.norm()) + 1e-9


def test_max_norm_with_client_level_privacy_is_refused() -> None:
    with pytest.raises(RunError, match=r"leave federation\.max_norm out"):
        toy_run(protect_clients(fedavg(), 1.0, 1.0, 3), 1, max_norm=1.0)


def test_norms_are_not_recorded_under_client_level_privacy() -> None:
    assert not any(
        each.norms for each in play(toy_run(protect_clients(fedavg(), 1.0, 1.0, 3), 2), MODEL, THREE_CLIENTS)
    )


# ---- weights


def test_weights_of_clients_of_unknown_size_are_capped_with_a_warning() -> None:
    run = toy_run(fedavg(), 2, examples={"a": 5}, max_examples=6, skip_failed_clients=True)
    with pytest.warns(UserWarning, match=r"weights are trusted up to federation\.max_examples = 6") as caught:
        played = play(run, MODEL, THREE_CLIENTS)
    assert len(caught) == 1, "one warning per run"
    assert [[lost.client for lost in each.lost] for each in played] == [["c"], ["c"]]
    assert "sent the weight 7.0" in played[0].lost[0].reason


# ---- skipped rounds


def test_round_with_too_few_usable_replies_is_skipped() -> None:
    def answer(job: Job) -> Update:
        delta = {"head.weight": torch.full((3, 4), math.nan if job.round == 1 else 1.0)}
        return Update(job.client, delta, {}, 1.0, {"head.weight": 1}, 0.5)

    run = toy_run(fedavg(), 3, min_updates=2, skip_failed_clients=True)
    played = list(rounds(run, MODEL, ScriptedEngine(answer)))
    assert [each.skipped is not None for each in played] == [False, True, False]
    assert "only 0 of 2 clients answered in round 1 and federation.min_updates is 2" in str(played[1].skipped)
    assert tensors.equal(final_params(played[:1]), final_params(played[:2]))
    assert torch.equal(final_params(played)["head.weight"], MODEL.initial["head.weight"] + 1 + 1)
    with pytest.raises(ClientError):
        list(rounds(with_federation(run, skip_failed_clients=False), MODEL, ScriptedEngine(answer)))


UNUSABLE_REPLIES = ("no update but text", "client is a stranger", "client is list", "round 0", "delta is None")


@pytest.mark.parametrize("case", [each for each in CASES if each.name in UNUSABLE_REPLIES], ids=lambda case: case.name)
def test_unusable_reply_skips_a_round_that_needs_it_without_ending_the_run(case: Case) -> None:
    at = federation_after_one_round("fedavg")
    played = at.play(case, min_updates=3)
    assert played
    assert [each.skipped is not None for each in played] == [True, False]
    assert tensors.equal(final_params(played[:1]), at.server.params)


def test_too_many_absent_clients_are_an_error_even_when_failures_are_skipped() -> None:
    run = toy_run(fedavg(), 1, min_updates=2, skip_failed_clients=True)
    with pytest.raises(RunError, match=r"only 0 of 2 clients answered"):
        list(rounds(run, MODEL, ScriptedEngine(lambda job: ClientFailure(job.client, "is asleep"))))


@dataclass(frozen=True)
class Explosive(ServerRule):
    """Makes its parameters, or its state, non-finite when the mean is 2."""

    state: bool

    def init(self, model: Model) -> Slots:
        return {"memory": {"head.weight": torch.zeros(3, 4), "age": torch.tensor(0)}}

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        value = aggregate.delta["head.weight"] / (aggregate.delta["head.weight"] != 2)
        memory = {**server.state["memory"], "head.weight": value} if self.state else server.state["memory"]
        delta = {} if self.state else {"head.weight": value}
        return replace(super().apply(server, replace(aggregate, delta=delta)), state={"memory": memory})


@pytest.mark.parametrize("state", [False, True])
def test_round_is_skipped_when_the_server_would_not_be_finite(state: bool) -> None:
    def answer(job: Job) -> Update:
        return Update(
            job.client, {"head.weight": torch.full((3, 4), 1.0 + job.round)}, {}, 1.0, {"head.weight": 1}, 0.5
        )

    run = toy_run(Method("explosive", server_rule=Explosive(state)), 3, skip_failed_clients=True)
    played = list(rounds(run, MODEL, ScriptedEngine(answer)))
    named = "memory/head.weight" if state else "head.weight"
    assert [each.skipped for each in played] == [
        None,
        f"round 1 would have made the server's '{named}' not finite",
        None,
    ]
    assert played[1].server.params["head.weight"] is played[0].server.params["head.weight"]
    assert tensors.equal(played[1].server.state["memory"], played[0].server.state["memory"])
    with pytest.raises(RunError, match=rf"round 1 would have made the server's '{named}' not finite; lower training"):
        list(rounds(with_federation(run, skip_failed_clients=False), MODEL, ScriptedEngine(answer)))


# ---- records


def round_with_norms(**norms: float) -> RoundResult:
    return replace(play(toy_run(fedavg(), 1), MODEL, THREE_CLIENTS)[0], norms=norms)


def test_update_far_above_the_median_norm_raises_an_alarm() -> None:
    [alarm] = check_round(round_with_norms(a=1.0, b=10.1, c=0.5, d=1.0), wanted=0)
    assert (alarm.kind, alarm.round) == ("outlying update", 0)
    assert "the update norm of b (10.1) is more than 10 times the round's median of 1;" in alarm.text
    for quiet in ({"a": 1.0, "b": 9.9, "c": 1.0}, {"a": 1.0, "b": 50.0}, {"a": 0.0, "b": 0.0, "c": 1.0}, {}):
        assert check_round(round_with_norms(**quiet), wanted=0) == []


@dataclass
class EngineWithLongUpdates:
    """An engine whose client c1 scales its update by 30, and replies twice in round 1."""

    engine: SimulationEngine

    def clients(self) -> Sequence[str]:
        return self.engine.clients()

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | ClientFailure]:
        for reply in self.engine.train(jobs):
            assert isinstance(reply, Update)
            if reply.client == "c1":
                reply = replace(reply, delta=tensors.scale(reply.delta, 30.0))
            yield reply
            if reply.client == "c1" and reply.round == 1:
                yield reply

    def evaluate(self, jobs: Iterable[Job], on: Examples | None = None) -> Iterator[tuple[str, dict[str, float]]]:
        return self.engine.evaluate(jobs, on)


@pytest.mark.parametrize("drift", [True, False])
def test_rows_and_report_show_outlying_bounded_and_refused_updates(drift: bool, tmp_path: Path) -> None:
    raw = tomllib.loads(SMALL_VIT + SMALL_TASK)
    raw |= {"rounds": 2, "method": {"name": "fedavg"}, "evaluate": {"drift": drift}}
    config = parse({**raw, "federation": {"skip_failed_clients": True, "max_norm": 1.0}})
    experiment, folder = build_experiment(config), tmp_path / "run"
    prepare(experiment, folder)
    store = MemoryStore()
    engine = EngineWithLongUpdates(
        SimulationEngine(experiment.run, experiment.model, experiment.federation, store=store)
    )
    rows = list(play_rows(experiment, folder, engine, store, initial_server(experiment.run, experiment.model), 0))
    assert all(row["alarms"].keys() == {"outlying update"} for row in rows)
    assert all(row["bounded"].keys() == {"c1"} for row in rows)
    assert [list(row.get("refused", {})) for row in rows] == [[], ["c1"]]
    assert not any("skipped" in row or row["lost"] for row in rows)
    text = page([load_run(folder)], tmp_path / "page.html").read_text()
    assert "outlying update, seed 0 in rounds 1 to 2</b>: the update norm of c1 (" in text


def test_skipped_round_raises_an_alarm() -> None:
    each = replace(round_with_norms(), skipped="only 0 of 2 clients answered")
    [alarm] = check_round(each, wanted=0)
    assert alarm.kind == "skipped round"
    assert alarm.text == "only 0 of 2 clients answered; the server state did not change"


def test_config_registers_the_size_of_every_client() -> None:
    experiment = build_experiment(parse({**tomllib.loads(SMALL_VIT + SMALL_TASK), "method": {"name": "fedavg"}}))
    assert experiment.run.examples is not None
    sizes = {client: len(experiment.federation[client].train) for client in experiment.federation.clients}
    assert dict(experiment.run.examples) == sizes
    assert all(sizes.values())
