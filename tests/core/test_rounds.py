"""The round loop: cohorts, traffic, failures, refused updates, aggregation, streaming and resuming."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import (
    KERNEL,
    Clients,
    ScriptedEngine,
    final_params,
    max_difference,
    play,
    toy_model,
    toy_run,
    with_federation,
)
from torch import Tensor

from partita.core import serialization, tensors
from partita.core.client import ClientError, ClientRound, Job, LocalResult
from partita.core.client_rule import ClientRule, Context, LayerSelection
from partita.core.data import Examples
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.optim import SGD, AdamW
from partita.core.plan import Plan, RoundInfo, share, share_everything
from partita.core.rng import Key
from partita.core.rounds import ClientFailure, RoundResult, initial_server, make_job, rounds
from partita.core.server_rule import Server, ServerRule
from partita.core.settings import Run, RunError
from partita.core.tensors import Names, Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.core.update_transform import UpdateTransform
from partita.engines.availability import Availability
from partita.engines.dry_run import DryRunEngine
from partita.engines.simulation import SimulationEngine
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen
from partita.methods.local_only import local_only
from partita.methods.scaffold import scaffold
from partita.testing.toy import ToyExamples
from partita.training.local_training import start_training
from partita.training.phase_trainer import PhaseTrainer

FOUR = Clients(a=5, b=6, c=7, d=8)
MODEL = toy_model()
BYTES = {name: value.numel() * value.element_size() for name, value in MODEL.initial.items()}
EVERY = MODEL.all_names()


def constant_delta(job: Job, by: float = 1.0) -> Tensors:
    return {name: torch.full_like(value, by) for name, value in job.params.items()}


def make_update(job: Job, delta: Tensors | None = None, weight: float = 1.0, slots: Slots | None = None) -> Update:
    return Update(
        job.client,
        constant_delta(job) if delta is None else delta,
        slots or {},
        weight,
        dict.fromkeys(job.params, 1),
        0.5,
    )


# ---- bytes


def test_bytes_fall_by_exactly_the_kernel_after_warmup() -> None:
    warmup = 2
    played = play(toy_run(fedfrozen(warmup), 5, AdamW(weight_decay=0.1)), MODEL, FOUR)
    for each in played:
        up, down = each.traffic.up, each.traffic.down
        for name in EVERY:
            trains = each.number < warmup or name not in KERNEL
            assert up[name] == (4 * BYTES[name] if trains else 0)
            # The kernel of the last warm-up round still has to be sent down once.
            assert down[name] == (4 * BYTES[name] if trains or each.number == warmup else 0)
    for early, late in ((1, 2), (1, 4)):
        saved = sum(played[early].traffic.up.values()) - sum(played[late].traffic.up.values())
        headers = played[early].traffic.up[serialization.HEADER] - played[late].traffic.up[serialization.HEADER]
        assert saved - headers == 4 * sum(BYTES[name] for name in KERNEL)
        assert headers > 0


@pytest.mark.parametrize("engine", [{}, {"wire": True}, {"block": 3}], ids=["plain", "wire", "block"])
def test_client_that_missed_the_last_warmup_round_gets_the_final_kernel_once(engine: dict[str, Any]) -> None:
    """Client c is absent in the last warm-up round and in the first round after it."""
    availability = Availability(trace={(1, "c"): 0.0, (2, "c"): 0.0})
    played = play(toy_run(fedfrozen(2), 6), MODEL, FOUR, availability=availability, **engine)
    for name in KERNEL:
        sent = [each.traffic.down[name] // BYTES[name] for each in played]
        # Asking c in rounds 1 and 2 costs bytes too; in round 3 only c lacks the kernel.
        assert sent == [4, 4, 4, 1, 0, 0]
    assert [[lost.client for lost in each.lost] for each in played] == [[], ["c"], ["c"], [], [], []]


def test_downloads_under_partial_participation_match_a_version_ledger() -> None:
    warmup, run = 3, toy_run(fedfrozen(3), 14, cohort=2, min_updates=0)
    made, held = 0, dict[str, int]()  # the kernel's version, and the version each client holds
    late = 0
    for each in rounds(
        replace(run, drift=False), MODEL, DryRunEngine(run, MODEL, FOUR.clients, Availability(client_dropout=0.3))
    ):
        outdated = [client for client in each.cohort if held.get(client) != made]
        for name in KERNEL:
            assert each.traffic.down[name] == BYTES[name] * len(outdated)
        here = set(each.cohort) - {lost.client for lost in each.lost}
        held |= dict.fromkeys(here, made)
        made = each.number + 1 if here and each.number < warmup else made
        late += len(outdated) if each.number > warmup else 0
    assert 0 < late < 10  # some clients got the final kernel late, and later rounds did not send it


def test_preloaded_clients_are_not_sent_the_initial_model() -> None:
    first, second = play(toy_run(fedfrozen(0), 2, clients_have_initial_model=True), MODEL, FOUR)
    assert sum(first.traffic.down.values()) == 0
    assert {name for name, size in second.traffic.down.items() if size and name} == EVERY - KERNEL
    first, _ = play(toy_run(fedfrozen(0), 2), MODEL, FOUR)
    assert all(first.traffic.down[name] == 4 * BYTES[name] for name in EVERY)


def test_recorded_traffic_equals_the_size_of_packed_messages() -> None:
    run = toy_run(fedfrozen(1), 3)
    engine = SimulationEngine(run, MODEL, FOUR)
    seen: list[tuple[int, int]] = []

    class Scales:
        def clients(self) -> Sequence[str]:
            return engine.clients()

        def evaluate(self, jobs: Iterable[Job]) -> Iterator[tuple[str, dict[str, float]]]:
            return engine.evaluate(jobs)

        def train(self, jobs: Iterable[Job]) -> Iterator[Update | ClientFailure]:
            down = up = 0
            for job in jobs:
                stale = tensors.select(job.params, job.stale)
                down += len(serialization.pack({"params": stale})) if stale else 0
                for reply in engine.train([job]):
                    assert isinstance(reply, Update)
                    up += len(serialization.pack({"delta": reply.delta}))
                    yield reply
            seen.append((down, up))

    played = list(rounds(run, MODEL, Scales()))
    assert seen == [(sum(each.traffic.down.values()), sum(each.traffic.up.values())) for each in played]


def test_local_only_sends_nothing() -> None:
    for each in play(toy_run(local_only(), 2), MODEL, FOUR):
        assert not each.traffic.up
        assert not each.traffic.down
        assert tensors.equal(each.server.params, MODEL.initial)
        assert each.loss is not None


def test_kernel_does_not_change_after_warmup() -> None:
    played = play(toy_run(fedfrozen(2), 6, AdamW(weight_decay=0.3)), MODEL, FOUR)
    still = played[1].server.params
    assert not any(torch.equal(still[name], MODEL.initial[name]) for name in KERNEL)
    for each in played[2:]:
        for name in EVERY:
            same = torch.equal(each.server.params[name], still[name])
            assert same == (name in KERNEL)


# ---- server rules that send their own tensors


@dataclass(frozen=True)
class DoubleHeadForOneClient(ServerRule):
    """In one round client a gets a doubled head; otherwise every client gets the server's tensors."""

    when: int

    def init(self, model: Model) -> Slots:
        return {"round": {"head.weight": torch.zeros(())}}

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        params, slots = super().send(server, client, names)
        if client == "a" and int(server.state["round"]["head.weight"]) == self.when:
            params["head.weight"] = params["head.weight"] * 2
        return params, slots

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        server = super().apply(server, aggregate)
        return replace(server, state={"round": {"head.weight": server.state["round"]["head.weight"] + 1}})


@dataclass(frozen=True)
class SendSlotForEveryName(ServerRule):
    """Sends a slot for every name, whatever is requested, to all clients but one."""

    but: str = ""

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        params, _ = super().send(server, client, names)
        return params, {} if client == self.but else {
            "beside": {name: value + 1 for name, value in server.params.items()}
        }


@pytest.mark.parametrize(("but", "times"), [("", 2), ("a", 1), ("b", 1)])
def test_server_slots_are_sent_for_trained_names_and_counted(but: str, times: int) -> None:
    method = Method("generous", fedfrozen(0).plan, server_rule=SendSlotForEveryName(but))
    engine = ScriptedEngine(lambda job: make_update(job, {}))
    played = list(rounds(toy_run(method, 2, clients_have_initial_model=True), MODEL, engine))
    assert {frozenset(job.slots["beside"]) for job in engine.jobs if job.client != but} == {EVERY - KERNEL}
    for each in played:
        assert all(each.traffic.down[name] == (0 if name in KERNEL else times * BYTES[name]) for name in EVERY)


@dataclass(frozen=True)
class SendDifferentSizes(ServerRule):
    """Sends some clients a head of another type, and some a slot of another size; all others get the server's."""

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        params, _ = super().send(server, client, names)
        if kind := {"b": torch.float16, "d": torch.float64}.get(client):
            params["head.weight"] = params["head.weight"].to(kind)
        size = {"c": 3, "f": 5}.get(client)
        return params, {"beside": {"head.weight": torch.zeros(size)}} if size else {}


@pytest.mark.parametrize("order", ["abcdef", "fedcba"])
def test_traffic_counts_what_each_client_is_sent(order: str) -> None:
    engine = ScriptedEngine(lambda job: make_update(job, {}), names=tuple(order))
    run = toy_run(Method("sizes", server_rule=SendDifferentSizes()), 1)
    [played] = rounds(run, MODEL, engine)
    messages = [serialization.byte_counts({"params": job.params, **job.slots}) for job in engine.jobs]
    assert len(messages) == 6
    assert played.traffic.down == serialization.total_bytes(messages)


def share_all_but_head(model: Model, round_info: RoundInfo) -> Plan:
    plan = share_everything(model, round_info)
    return plan.narrow(model.all_names() - {"head.weight"})


@pytest.mark.parametrize(("when", "times"), [(0, [4, 1, 0, 0]), (1, [4, 1, 1, 0])])
def test_client_sent_a_personal_tensor_is_sent_the_server_tensor_later(when: int, times: list[int]) -> None:
    """The head never changes, so a client that got another head once must be sent the server's head afterwards."""
    run = toy_run(Method("favour", share_all_but_head, server_rule=DoubleHeadForOneClient(when)), 4)
    plain, packed = (play(run, MODEL, FOUR, wire=wire) for wire in (False, True))
    assert tensors.equal(final_params(plain), final_params(packed))
    sent = [each.traffic.down["head.weight"] // BYTES["head.weight"] for each in plain]
    assert sent == times


# ---- cohorts and failures


def test_cohort_is_reproducible_and_has_the_requested_size() -> None:
    run = toy_run(fedavg(), 8, cohort=0.5)
    engine = ScriptedEngine(make_update, tuple("abcdef"))
    cohorts = [each.cohort for each in rounds(run, MODEL, engine)]
    assert {len(set(cohort)) for cohort in cohorts} == {3}
    assert len(set(cohorts)) > 3
    assert cohorts == [each.cohort for each in rounds(run, MODEL, ScriptedEngine(make_update, tuple("abcdef")))]
    assert [job.client for job in engine.jobs[:3]] == list(cohorts[0])
    with pytest.raises(RunError, match=r"federation.cohort is 7, but there are 6 clients"):
        next(rounds(with_federation(run, cohort=7), MODEL, engine))


def test_unsupported_optimizer_is_refused_before_the_run() -> None:
    with pytest.raises(MethodError, match="is derived for sgd, not for adamw"):
        toy_run(scaffold(), optimizer=AdamW())


def test_failed_client_is_recorded_and_sent_everything_again() -> None:
    def answer(job: Job) -> Update | ClientFailure:
        return ClientFailure("b", "the battery died") if job.client == "b" and job.round < 2 else make_update(job, {})

    engine = ScriptedEngine(answer)
    run = toy_run(fedavg(), 4)
    for each in rounds(run, MODEL, engine):
        assert each.lost == ((ClientFailure("b", "the battery died"),) if each.number < 2 else ())
        assert set(each.cohort) == {"a", "b"}
    stale = {(job.round, job.client): job.stale for job in engine.jobs}
    assert [len(stale[number, "a"]) for number in range(4)] == [len(EVERY), 0, 0, 0]
    assert [len(stale[number, "b"]) for number in range(4)] == [len(EVERY)] * 3 + [0]


def test_too_few_updates_raise_an_error_with_reasons() -> None:
    def answer(job: Job) -> Update | ClientFailure:
        return ClientFailure(job.client, "is asleep") if job.client != "a" else make_update(job)

    run = toy_run(fedavg(), 1, min_updates=2)
    with pytest.raises(
        RunError, match=r"only 1 of 3 clients answered in round 0 and federation.min_updates is 2 \(.*is asleep"
    ):
        next(rounds(run, MODEL, ScriptedEngine(answer, "abc")))
    assert next(rounds(with_federation(run, min_updates=1), MODEL, ScriptedEngine(answer, "abc")))


def test_min_updates_above_the_cohort_is_refused() -> None:
    with pytest.raises((ClientError, RunError), match=r"federation.min_updates is 3"):
        next(rounds(toy_run(fedavg(), 1, min_updates=3), MODEL, ScriptedEngine(make_update)))


def clients_with_nan_data() -> Clients:
    bad = Clients(a=5, b=6, c=7)
    bad.parts["b"] = ToyExamples(bad.parts["b"].x * float("nan"), bad.parts["b"].y)
    return bad


@pytest.mark.parametrize("block", [1, 3])
def test_client_with_nan_loss_ends_the_run_or_is_skipped(block: int) -> None:
    run = toy_run(fedavg(), 2)
    with pytest.raises(ClientError, match="client 'b': the loss is nan at step 1 of 2 in round 0"):
        play(run, MODEL, clients_with_nan_data(), block=block)
    tolerant = with_federation(run, skip_failed_clients=True)
    played = play(tolerant, MODEL, clients_with_nan_data(), block=block)
    assert [[lost.client for lost in each.lost] for each in played] == [["b"], ["b"]]
    assert "the loss is nan" in played[0].lost[0].reason
    assert all(bool(torch.isfinite(value).all()) for value in final_params(played).values())
    if block == 1:
        away = Availability(trace={(0, "b"): 0.0, (1, "b"): 0.0})
        assert tensors.equal(
            final_params(played), final_params(play(run, MODEL, Clients(a=5, b=6, c=7), availability=away))
        )


BAD_DELTAS: dict[str, tuple[Any, str]] = {
    "another name": (
        lambda job: {"nowhere": torch.zeros(2)},
        "sent 'nowhere', which its plan does not send up in round 0",
    ),
    "a frozen name": (
        lambda job: {sorted(KERNEL)[0]: torch.zeros(4)},
        "sent 'layers.0.key.bias', which its plan does not send up in round 0",
    ),
    "another shape": (
        lambda job: {"head.weight": torch.zeros(4, 3)},
        r"sent 'head.weight' of shape \(4, 3\), not \(3, 4\)",
    ),
    "nan": (
        lambda job: {"head.weight": torch.full((3, 4), float("nan"))},
        "sent 'head.weight' with values that are not finite",
    ),
    "infinity": (
        lambda job: {"head.weight": torch.full((3, 4), float("inf"))},
        "sent 'head.weight' with values that are not finite; lower training.lr",
    ),
}


@pytest.mark.parametrize("kind", BAD_DELTAS)
def test_bad_delta_is_refused_and_its_client_named(kind: str) -> None:
    make, message = BAD_DELTAS[kind]

    def answer(job: Job) -> Update:
        return make_update(job, make(job) if job.client == "b" else {"head.weight": torch.ones(3, 4)})

    run = toy_run(fedfrozen(0), 2)
    with pytest.raises(ClientError, match=f"client 'b': {message}"):
        next(rounds(run, MODEL, ScriptedEngine(answer)))
    engine = ScriptedEngine(answer)
    played = list(rounds(with_federation(run, skip_failed_clients=True), MODEL, engine))
    assert [lost.client for lost in played[0].lost] == ["b"]
    assert torch.equal(final_params(played)["head.weight"], MODEL.initial["head.weight"] + 1 + 1)
    assert [job.stale for job in engine.jobs if job.client == "b"][1] == EVERY


def test_undeclared_slot_is_refused() -> None:
    for part in ({"nowhere": torch.zeros(2)}, {"head.weight": torch.zeros(3, 4)}):
        engine = ScriptedEngine(lambda job, part=part: make_update(job, {}, slots={"slot": part}), "a")  # type: ignore[misc]
        with pytest.raises(ClientError, match="client 'a': sent the slot 'slot', which fedavg does not have"):
            next(rounds(toy_run(fedavg(), 1), MODEL, engine))


class FarSteps(SGD):
    def step(self, params: Tensors, grads: Tensors, state: Slots, lr: float, step_counts: Mapping[str, int]) -> None:
        super().step(params, grads, state, 1e30, step_counts)


@pytest.mark.parametrize("block", [1, 3])
def test_non_finite_delta_is_refused_even_when_losses_are_finite(block: int) -> None:
    far = Clients(a=5, b=6, c=7)
    far.parts["b"] = ToyExamples(far.parts["b"].x * 1e9, far.parts["b"].y)
    run = toy_run(fedavg(), 1, FarSteps(), steps=1, min_updates=0)
    with pytest.raises(ClientError, match=r"norm .* is implausible"):
        play(run, MODEL, far, block=block)
    [played] = play(with_federation(run, skip_failed_clients=True), MODEL, far, block=block)
    reasons = {lost.client: lost.reason for lost in played.lost}
    assert "with values that are not finite; lower training.lr" in reasons.pop("b")
    assert [reason.partition(" of ")[0] for reason in reasons.values()] == ["sent an update"] * 2
    assert tensors.equal(played.server.params, MODEL.initial)


def test_finiteness_is_checked_once_per_block_and_once_for_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One check per block of two and one for the server, each of all parameters; norms cover the rest."""
    looks, largest = [], tensors.max_abs
    monkeypatch.setattr(tensors, "max_abs", lambda part: looks.append(frozenset(part)) or largest(part))
    for real in (False, True):
        looks.clear()
        play(toy_run(fedavg(), 1), MODEL, FOUR, block=2, wire=real)
        assert looks == [MODEL.all_names()] * (2 + 1)


@dataclass(frozen=True)
class Spoil(UpdateTransform):
    """Replaces one number in the update of client b."""

    by: float

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        if update.client != "b":
            return update, {}
        delta = {name: value.clone() for name, value in update.delta.items()}
        delta["head.weight"].view(-1)[-1] = self.by
        return replace(update, delta=delta), {}


@pytest.mark.parametrize("by", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_transform_output_is_refused(by: float) -> None:
    """Training measured a finite delta and its norm (without drift), and the transform has replaced it since."""
    run = toy_run(replace(fedavg(), transforms=(Spoil(by),)), 1, drift=False)
    with pytest.raises(ClientError, match=r"client 'b': sent 'head\.weight' with values that are not finite"):
        play(run, MODEL, FOUR, block=2)
    [played] = play(with_federation(run, skip_failed_clients=True), MODEL, FOUR, block=2)
    assert [lost.client for lost in played.lost] == ["b"]
    [others] = play(toy_run(fedavg(), 1), MODEL, Clients(a=5, c=7, d=8), block=1)
    assert max_difference(played.server.params, others.server.params) < 1e-6


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 0.0, 1e12])
def test_invalid_weight_is_refused(weight: float) -> None:
    def answer(job: Job) -> Update:
        return make_update(job, weight=weight if job.client == "b" else 1.0)

    with pytest.raises(ClientError, match="client 'b'"):
        next(rounds(toy_run(fedavg(), 1), MODEL, ScriptedEngine(answer)))


# ---- aggregation and transforms


def test_server_applies_the_weighted_mean_over_senders_of_each_name() -> None:
    def answer(job: Job) -> Update:
        names = {"a": ["embed.weight", "head.weight"], "b": ["head.weight"]}[job.client]
        delta = {name: torch.full_like(job.params[name], 1.0 if job.client == "a" else 4.0) for name in names}
        return make_update(job, delta, weight=1.0 if job.client == "a" else 2.0)

    [each] = rounds(toy_run(fedavg(), 1), MODEL, ScriptedEngine(answer))
    new = each.server.params
    torch.testing.assert_close(new["head.weight"], MODEL.initial["head.weight"] + 3.0)
    torch.testing.assert_close(new["embed.weight"], MODEL.initial["embed.weight"] + 1.0)
    assert all(new[name] is MODEL.initial[name] for name in EVERY - {"head.weight", "embed.weight"})
    assert {name for name, version in each.server.versions.current.items() if version} == {
        "head.weight",
        "embed.weight",
    }


def test_round_loss_is_weighted_by_examples() -> None:
    def answer(job: Job) -> Update:
        return (
            replace(make_update(job), weight=3.0, loss=1.0)
            if job.client == "a"
            else replace(make_update(job), loss=5.0)
        )

    [each] = rounds(toy_run(fedavg(), 1), MODEL, ScriptedEngine(answer))
    assert each.loss == pytest.approx(2.0)


@dataclass(frozen=True)
class Affine(UpdateTransform):
    """An affine map on the client, undone on each update or on the aggregate."""

    factor: float
    late: bool

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        return replace(update, delta={name: value * self.factor + 1 for name, value in update.delta.items()}), {}

    def decode_update(self, update: Update) -> Update:
        return update if self.late else replace(update, delta=self._undo(update.delta))

    def decode_aggregate(self, aggregate: Aggregate, key: Key) -> Aggregate:
        return replace(aggregate, delta=self._undo(aggregate.delta)) if self.late else aggregate

    def _undo(self, delta: Tensors) -> Tensors:
        return {name: (value - 1) / self.factor for name, value in delta.items()}


@pytest.mark.parametrize("late", [False, True])
def test_transforms_are_decoded_in_reverse_order(late: bool) -> None:
    plain, coded = (
        toy_run(Method("m", transforms=channel), 2) for channel in ((), (Affine(2.0, late), Affine(4.0, late)))
    )
    one, two = (final_params(play(run, MODEL, FOUR)) for run in (plain, coded))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-5)


@dataclass(frozen=True)
class AddKeyedNumber(UpdateTransform):
    """Adds a number drawn from its key."""

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        return replace(update, delta={name: value + key.uniform() for name, value in update.delta.items()}), {}


def test_transform_keys_differ_by_round_client_and_position() -> None:
    once, twice = (toy_run(Method("m", transforms=(AddKeyedNumber(),) * count), 2, lr=1e-30) for count in (1, 2))
    drawn = set()
    for run in (once, twice):
        engine = SimulationEngine(run, MODEL, FOUR)
        for number in range(2):
            jobs = [Job(number, client, MODEL.initial, frozenset()) for client in FOUR.clients]
            drawn |= {float(reply.delta["head.weight"][0, 0]) for reply in engine.train(jobs)}  # type: ignore[union-attr]
    assert len(drawn) == 16


@dataclass(frozen=True)
class SignalRoundsSeen(ServerRule):
    """Signals the number of rounds it has seen to the plan."""

    def init(self, model: Model) -> Slots:
        return {"seen": {"": torch.zeros(())}}

    def signal(self, server: Server) -> dict[str, float]:
        return {"seen": float(server.state["seen"][""])}

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        return replace(super().apply(server, aggregate), state={"seen": {"": server.state["seen"][""] + 1}})


def test_server_signal_reaches_the_plan() -> None:
    def plan(model: Model, round_info: RoundInfo) -> Plan:
        whole = share_everything(model, round_info)
        return whole if round_info.signal["seen"] < 2 else whole.narrow(model.all_names() - KERNEL)

    played = play(toy_run(Method("automatic", plan, server_rule=SignalRoundsSeen()), 4), MODEL, FOUR)
    sent = [bool(each.traffic.up[sorted(KERNEL)[0]]) for each in played]
    assert sent == [True, True, False, False]


# ---- streaming


class UpdateCountingEngine:
    """Counts how many of an engine's update tensors are alive whenever another update is yielded."""

    def __init__(self, engine: SimulationEngine) -> None:
        self.engine, self.most, self.handed = engine, 0, 0

    def clients(self) -> Sequence[str]:
        return self.engine.clients()

    def evaluate(self, jobs: Iterable[Job]) -> Iterator[tuple[str, dict[str, float]]]:
        return self.engine.evaluate(jobs)

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | ClientFailure]:
        alive: list[weakref.ref[Tensor]] = []
        for reply in self.engine.train(jobs):
            assert isinstance(reply, Update)
            alive.append(weakref.ref(reply.delta["head.weight"]))
            gc.collect(0)
            self.most = max(self.most, sum(each() is not None for each in alive))
            self.handed += 1
            yield reply


@pytest.mark.parametrize("block", [1, 2, 4])
def test_updates_are_streamed_not_collected(block: int) -> None:
    crowd = Clients(**{f"c{number}": 3 for number in range(12)})
    run = toy_run(fedavg(), 1, batch_size=3)
    counted = UpdateCountingEngine(SimulationEngine(run, MODEL, crowd, block=block))
    [each] = rounds(run, MODEL, counted)
    assert counted.handed == len(each.cohort) == 12
    assert counted.most <= block + 1


def test_rounds_are_lazy_and_do_not_mutate_the_server() -> None:
    run = toy_run(fedavg(), 3)
    engine = ScriptedEngine(make_update)
    start = initial_server(run, MODEL)
    stream = rounds(run, MODEL, engine, start)
    assert engine.jobs == []
    first: RoundResult = next(stream)
    assert len(engine.jobs) == 2
    kept = tensors.digest(first.server.params)
    list(stream)
    assert tensors.digest(first.server.params) == kept
    assert tensors.equal(start.params, MODEL.initial)
    assert start.versions.held == {}


def test_continuing_from_a_server_gives_the_remaining_rounds() -> None:
    run: Run = toy_run(fedavg(), 4, cohort=0.5)
    whole = play(run, MODEL, FOUR)
    rest = play(run, MODEL, FOUR, server=whole[1].server, start=2)
    assert [each.number for each in rest] == [2, 3]
    assert [each.cohort for each in rest] == [each.cohort for each in whole[2:]]
    assert [each.traffic for each in rest] == [each.traffic for each in whole[2:]]
    assert tensors.equal(final_params(rest), final_params(whole))


def test_a_block_that_does_not_fit_is_halved_and_the_round_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def small(run: Run, visits: Sequence[ClientRound], blocks: Callable[..., PhaseTrainer]) -> Any:
        sizes.append(len(visits))
        if len(visits) > 2:
            raise torch.OutOfMemoryError("none left")
        return start_training(run, visits, blocks)

    expected = play(toy_run(fedavg(), 2), MODEL, FOUR, block=2)
    monkeypatch.setattr("partita.engines.simulation.start_training", small)
    with pytest.warns(UserWarning, match="out of memory while training 4 clients together; from now on it is 2"):
        played = play(toy_run(fedavg(), 2), MODEL, FOUR, block=4)
    assert sizes == [4, 2, 2, 2, 2]
    assert tensors.equal(final_params(played), final_params(expected))
    assert [each.losses for each in played] == [each.losses for each in expected]


def test_a_client_that_does_not_fit_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: Run, visits: list[object], blocks: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr("partita.engines.simulation.start_training", full)
    with (
        pytest.warns(UserWarning, match="from now on it is one client"),
        pytest.raises(RunError, match=r"out of memory while training one client; lower training\.batch_size"),
    ):
        play(toy_run(fedavg(), 1), MODEL, FOUR, block=2)


@pytest.mark.parametrize(
    ("ahead", "said"),
    [(0, ["give a", "wait a", "give b", "wait b", "give c", "wait c"]),
     (1, ["give a", "give b", "wait a", "give c", "wait b", "wait c"]),
     # b fits alone only
     ("full", ["give a", "give b", "wait a", "give b", "wait b", "give c", "wait c"])],
)  # fmt: skip
def test_engine_queues_the_next_block_before_waiting_for_the_last(
    ahead: int | str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def watched(
        run: Run, visits: Sequence[ClientRound], blocks: Callable[..., PhaseTrainer]
    ) -> Callable[[], list[LocalResult]]:
        [client] = [each.job.client for each in visits]
        told.append(f"give {client}")
        if ahead == "full" and told == ["give a", "give b"]:
            raise torch.OutOfMemoryError("none left")
        wait = start_training(run, visits, blocks)
        return lambda: told.append(f"wait {client}") or wait()  # type: ignore[func-returns-value]

    monkeypatch.setattr("partita.engines.simulation.start_training", watched)
    run, clients = toy_run(fedavg(), 1), Clients(a=4, b=4, c=4)
    engine = SimulationEngine(run, MODEL, clients)
    assert engine.blocks_ahead == 0  # on a CPU
    engine.blocks_ahead = int(bool(ahead))
    jobs = [make_job(run, MODEL, initial_server(run, MODEL), 0, client)[0] for client in "abc"]
    assert [each.client for each in engine.train(jobs)] == ["a", "b", "c"]
    assert told == said


def test_nondeterministic_operation_error_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "blur_backward does not have a deterministic implementation, but you set 'x'. You can turn off"

    def fail(run: Run, visits: list[object], blocks: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr("partita.engines.simulation.start_training", fail)
    with pytest.raises(
        RunError, match=r"engine\.deterministic is true, but blur_backward has no deterministic kernel.*'auto'"
    ):
        play(toy_run(fedavg(), 1), MODEL, FOUR)
    said = "something else"
    with pytest.raises(RuntimeError, match="something else"):
        play(toy_run(fedavg(), 1), MODEL, FOUR)


def test_unrequested_reply_is_refused_or_dropped() -> None:
    run, engine = toy_run(fedavg(), 1), ScriptedEngine(lambda job: replace(make_update(job), client="b"), "ab")
    with pytest.raises(ClientError, match="client 'b': answered in round 0 without being asked, or twice"):
        next(rounds(run, MODEL, engine))
    [each] = rounds(with_federation(run, skip_failed_clients=True), MODEL, engine)
    assert each.sent.keys() == {"b"}
    assert [(lost.client, lost.reason) for lost in each.lost] == [("a", "gave no answer")]
    assert [lost.client for lost in each.refused] == ["b"]


# ---- found by mutation testing


@dataclass(frozen=True)
class RecordKeys(UpdateTransform):
    """Records the keys that the server draws from."""

    keys: list[Key]

    def decode_aggregate(self, aggregate: Aggregate, key: Key) -> Aggregate:
        self.keys.append(key)
        return aggregate


def test_server_transform_keys_differ_by_round_and_position() -> None:
    """Client-level noise comes from this key, so the same key in two rounds would repeat the noise."""
    keys: list[Key] = []
    run = toy_run(Method("noting", transforms=(RecordKeys(keys), RecordKeys(keys))), 2)
    list(rounds(run, MODEL, ScriptedEngine(make_update)))
    assert keys == [run.key / "round" / number / "channel" / index for number in range(2) for index in (1, 0)]


@pytest.mark.parametrize("drift", [True, False])
def test_drift_is_measured_only_when_enabled(drift: bool) -> None:
    [each] = rounds(toy_run(fedavg(), 1, drift=drift), MODEL, ScriptedEngine(make_update))
    assert bool(each.drift) == drift


def test_missing_updates_error_gives_three_reasons() -> None:
    def answer(job: Job) -> Update | ClientFailure:
        return ClientFailure(job.client, "is asleep")

    with pytest.raises(RunError) as caught:
        next(rounds(toy_run(fedavg(), 1), MODEL, ScriptedEngine(answer, "abcd")))
    assert str(caught.value).count("is asleep") == 3


def test_make_job_returns_the_job_and_its_plan() -> None:
    run = toy_run(fedavg(), 1)
    job, plan = make_job(run, MODEL, initial_server(run, MODEL), 0, "a")
    assert (job.client, plan.up) == ("a", EVERY)


def test_scaffold_slots_are_accepted() -> None:
    [each] = play(toy_run(scaffold(), 1), MODEL, Clients(a=5, b=6))
    assert each.lost == ()
    assert set(each.sent) == {"a", "b"}


def test_refused_and_absent_clients_are_distinguished() -> None:
    """An unusable reply must not end the run, but absent clients do if too few are left."""

    def answer(job: Job) -> Any:
        if job.client == "b":
            return make_update(job, weight=-1.0)
        return ClientFailure("c", "is asleep") if job.client == "c" else make_update(job)

    run = toy_run(fedavg(), 1, skip_failed_clients=True)
    [each] = rounds(run, MODEL, ScriptedEngine(answer, "abc"))
    assert {lost.client: lost.refused for lost in each.lost} == {"b": True, "c": False}
    [skipped] = rounds(with_federation(run, min_updates=2), MODEL, ScriptedEngine(answer, "abc"))
    assert skipped.skipped is not None
    with pytest.raises(RunError, match="only 1 of 3 clients answered"):
        list(rounds(with_federation(run, min_updates=3), MODEL, ScriptedEngine(answer, "abc")))


NAME_THAT_IS_NO_TEXT: Any = {"client": 7}


@pytest.mark.parametrize(
    "rubbish", [5, None, replace(make_update(Job(0, "b", {}, frozenset())), **NAME_THAT_IS_NO_TEXT)]
)
def test_reply_that_is_no_update_is_recorded_and_its_client_refused(rubbish: Any) -> None:
    run = toy_run(fedavg(), 1, skip_failed_clients=True)
    engine = ScriptedEngine(lambda job: rubbish if job.client == "b" else make_update(job))
    [each] = rounds(run, MODEL, engine)
    assert [(lost.client, lost.refused) for lost in each.refused] == [("unknown", True)]
    assert [(lost.client, lost.reason, lost.refused) for lost in each.lost] == [("b", "gave no answer", True)]
    with pytest.raises(ClientError, match=r"client 'b': sent a .* instead of an update with a client name"):
        next(
            rounds(with_federation(run, skip_failed_clients=False), MODEL, ScriptedEngine(lambda job: rubbish, ("b",)))
        )


@pytest.mark.parametrize(("claimed", "fine"), [(None, True), (0, True), (1, False), (False, False), (0.0, False)])
def test_reply_for_another_round_is_refused(claimed: Any, fine: bool) -> None:
    run = toy_run(fedavg(), 1, skip_failed_clients=True)
    engine = ScriptedEngine(lambda job: replace(make_update(job), round=claimed if job.client == "b" else None))
    [each] = rounds(run, MODEL, engine)
    assert ("b" in each.sent) == fine
    assert [lost.client for lost in each.refused] == ([] if fine else ["b"])


def test_long_reasons_and_client_names_are_shortened() -> None:
    def answer(job: Job) -> Any:
        return ClientFailure("b", "x" * 600) if job.client == "b" else replace(make_update(job), client="y" * 600)

    [each] = rounds(toy_run(fedavg(), 1, skip_failed_clients=True, min_updates=0), MODEL, ScriptedEngine(answer))
    assert {lost.client: len(lost.reason) for lost in each.lost} == {"b": 500, "a": 14}
    assert [len(lost.client) for lost in each.refused] == [500]


class SelectEverything(ClientRule):
    """Selects by data, so its clients may report scores."""

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        return LayerSelection(plan.train)


def test_a_round_records_norms_bounds_and_scores_by_client() -> None:
    def answer(job: Job) -> Update:
        delta = {"head.weight": torch.zeros(3, 4)}
        delta["head.weight"][0, 0] = 1.0 if job.client == "a" else 8.0
        return replace(make_update(job, delta), metrics={"score": 0.5} if job.client == "a" else {})

    run = toy_run(Method("scoring", client_rules=(SelectEverything(),)), 1, max_norm=2.0)
    [each] = rounds(run, MODEL, ScriptedEngine(answer))
    assert each.norms == {"a": 1.0, "b": 8.0}
    assert each.bounded == {"b"}
    assert each.metrics == {"a": {"score": 0.5}}
    assert each.population == 2


@pytest.mark.parametrize("empty", [False, True])
def test_client_that_lost_its_state_is_sent_everything_again(empty: bool) -> None:
    def answer(job: Job) -> Update | ClientFailure:
        return (
            ClientFailure("b", "was reinstalled", empty=empty)
            if job.client == "b" and job.round == 1
            else make_update(job, {})
        )

    engine = ScriptedEngine(answer)
    list(rounds(toy_run(fedavg(), 3), MODEL, engine))
    [stale] = [job.stale for job in engine.jobs if (job.round, job.client) == (2, "b")]
    assert stale == (EVERY if empty else frozenset())


class CountRounds(ServerRule):
    """Its state holds integers and an empty tensor, which count as finite."""

    def init(self, model: Model) -> Slots:
        return {"count": {"n": torch.tensor(0)}, "none": {"n": torch.empty(0)}}

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        state = {"count": {"n": server.state["count"]["n"] + 1}, "none": {"n": torch.empty(0)}}
        return replace(super().apply(server, aggregate), state=state)


def test_integer_and_empty_server_state_counts_as_finite() -> None:
    *_, each = rounds(toy_run(Method("counting", server_rule=CountRounds()), 2), MODEL, ScriptedEngine(make_update))
    assert each.server.state["count"]["n"].item() == 2
    assert each.skipped is None


def test_failure_of_an_unknown_client_is_recorded_as_refused() -> None:
    engine = ScriptedEngine(
        lambda job: ClientFailure("mallory", "is asleep") if job.client == "b" else make_update(job)
    )
    [each] = rounds(toy_run(fedavg(), 1, skip_failed_clients=True), MODEL, engine)
    assert [lost.client for lost in each.refused] == ["mallory"]


class MakeHeadInfinite(ServerRule):
    """Makes one parameter infinite."""

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        after = super().apply(server, aggregate)
        return replace(after, params={**after.params, "head.weight": torch.full((3, 4), float("inf"))})


def test_error_names_the_parameter_that_would_not_be_finite() -> None:
    with pytest.raises(RunError, match=r"would have made the server's 'head\.weight' not finite"):
        next(rounds(toy_run(Method("spoiling", server_rule=MakeHeadInfinite()), 1), MODEL, ScriptedEngine(make_update)))


@dataclass(frozen=True)
class WrongSend(ServerRule):
    """Sends one name that the plan keeps from clients, or leaves one out."""

    adds: bool

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        params, slots = super().send(server, client, names)
        if self.adds:
            return dict(server.params), slots
        return {name: value for name, value in params.items() if name != "embed.weight"}, slots


@pytest.mark.parametrize(("adds", "fault"), [(True, "adds 'head.weight'"), (False, "leaves out 'embed.weight'")])
def test_a_server_rule_that_sends_other_names_than_the_plan_is_refused(adds: bool, fault: str) -> None:
    def keep_head(model: Model, round_info: RoundInfo) -> Plan:
        head = frozenset({"head.weight"})
        return share(model.all_names(), down=model.all_names() - head, keep=head)

    method = Method("wrong", keep_head, server_rule=WrongSend(adds))
    with pytest.raises(MethodError, match=rf"wrong: WrongSend\.send {fault} for client 'a'"):
        next(rounds(toy_run(method, 1), MODEL, ScriptedEngine(make_update)))
