"""Error feedback against the published recursion and its theorems, and the residual's way through runs.

Client i compresses p = d + e of its delta d and its residual e, sends C(p), and keeps e' = p - C(p).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compression_fixtures import FOUR, WIDE_MODEL, make_update, random_normal
from helpers import Clients, ScriptedEngine, final_params, play, toy_model, toy_run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import partita.compression.prune as pruning
from partita.compression.error_feedback import RESIDUAL, ErrorFeedback
from partita.compression.prune import MIN_ELEMENTS, TopKMagnitude, prune
from partita.compression.quantize import Int8Quantizer, quantize
from partita.core import tensors
from partita.core.client import ClientError, ClientState, Job, begin_round, finish_round
from partita.core.compose import compose
from partita.core.data import Batch, ClientData
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model, Output
from partita.core.optim import Schedule
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job, rounds
from partita.core.settings import Run
from partita.core.tensors import Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.core.update_transform import UpdateTransform
from partita.engines.availability import Availability
from partita.engines.simulation import SimulationEngine
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen
from partita.privacy.client_level import protect_clients
from partita.storage.client_store import DiskStore, MemoryStore
from partita.testing.conformance import check_method
from partita.testing.trial import states_of
from partita.training.local_training import train_clients

KEEP = 0.02
fed_back = partial(prune, error_feedback=True)


def top_k(value: np.ndarray, keep: float) -> np.ndarray:
    """The published operator, by sorting: tensors up to MIN_ELEMENTS elements stay whole."""
    count = math.ceil(keep * value.size)
    if value.size <= max(pruning.MIN_ELEMENTS, count):
        return value
    largest = np.argsort(-np.abs(value).ravel(), kind="stable")[:count]
    kept = np.zeros_like(value).ravel()
    kept[largest] = value.ravel()[largest]
    return kept.reshape(value.shape)


def step(transform: UpdateTransform, delta: Tensors, memory: Slots, key: Key = Key(0)) -> tuple[Tensors, Slots]:  # noqa: B008
    """One round of a client: (what arrives, its memory)."""
    sent, remembered = transform.encode(make_update(delta), memory, key)
    return dict(transform.decode_update(sent).delta), {**memory, **remembered}


# ---- the recursion


def test_runs_follow_the_published_recursion() -> None:
    """Six rounds of three of four clients, some of whom drop out; in NumPy, from the deltas of plain training."""
    run = toy_run(fed_back(keep=KEEP), 6, cohort=3, seed=11)
    engine = SimulationEngine(run, WIDE_MODEL, FOUR, availability=Availability(client_dropout=0.2))
    plain = replace(run, method=fedavg())
    server, residuals = initial_server(run, WIDE_MODEL), {client: dict[str, np.ndarray]() for client in FOUR.clients}
    answered: list[set[str]] = []
    for result in rounds(run, WIDE_MODEL, engine):
        clients = list(result.sent)
        answered.append(set(clients))
        jobs = [make_job(plain, WIDE_MODEL, server, result.number, client)[0] for client in clients]
        total, sums = 0.0, {name: np.zeros(value.shape) for name, value in WIDE_MODEL.initial.items()}
        for update in SimulationEngine(plain, WIDE_MODEL, FOUR).train(jobs):
            assert isinstance(update, Update)
            total += update.weight
            for name, delta in update.delta.items():
                p = delta.numpy() + residuals[update.client].get(name, np.float32(0.0))
                arrives = top_k(p, KEEP)
                residuals[update.client][name] = p - arrives
                sums[name] += update.weight * arrives.astype(np.float64)
        for name, value in result.server.params.items():
            expected = server.params[name].double().numpy() + sums[name] / total
            np.testing.assert_allclose(value.numpy(), expected, rtol=1e-6, atol=1e-7)
        for client, expected_residuals in residuals.items():
            memory = engine.store.load(client, result.number + 1).memory.get(RESIDUAL, {})
            for name, expected in expected_residuals.items():
                assert np.array_equal(memory[name].numpy() if name in memory else 0 * expected, expected)
        server = result.server
    assert len(set(map(frozenset, answered))) > 2, "clients miss rounds, and keep their residual meanwhile"
    assert all(residual["layers.0.query.weight"].any() for residual in residuals.values())


def test_without_error_feedback_it_is_plain_top_k() -> None:
    delta = {"w": random_normal(1, 40, 50), "b": random_normal(2, 50)}
    arrives, memory = step(TopKMagnitude(KEEP), delta, {})
    assert memory == {}
    assert all(np.array_equal(arrives[name].numpy(), top_k(value.numpy(), KEEP)) for name, value in delta.items())
    first, _ = step(ErrorFeedback(TopKMagnitude(KEEP)), delta, {})
    assert tensors.equal(first, arrives), "the first round has no residual"


# ---- theorems

SIZES = st.integers(MIN_ELEMENTS + 1, 3000)


@settings(max_examples=15, deadline=None)
@given(SIZES, st.floats(0.001, 1.0), st.integers(0, 99), st.integers(1, 6))
def test_what_arrived_and_the_residual_sum_to_all_deltas(size: int, keep: float, seed: int, count: int) -> None:
    transform, memory, arrived = ErrorFeedback(TopKMagnitude(keep)), {}, torch.zeros(size, dtype=torch.float64)
    deltas = [random_normal(100 * seed + number, size).double() ** 3 for number in range(count)]
    for delta in deltas:
        before = memory.get(RESIDUAL, {}).get("w", torch.zeros(size))
        arrives, memory = step(transform, {"w": delta}, memory)
        left = memory.get(RESIDUAL, {}).get("w", torch.zeros(size))
        assert torch.equal(arrives["w"] + left, delta + before), "each round exactly"
        arrived += arrives["w"]
    torch.testing.assert_close(arrived + left, torch.stack(deltas).sum(0), rtol=1e-12, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(SIZES, st.floats(0.001, 0.999), st.integers(0, 99), st.sampled_from([0, 1, 3]))
def test_the_residual_is_a_contraction(size: int, keep: float, seed: int, power: int) -> None:
    """|p - C(p)|^2 <= (1 - k / d) |p|^2, with equality if all elements have the same magnitude (power 0)."""
    p = (random_normal(seed, size).double() ** 3).sign() * random_normal(seed, size).double().abs() ** power
    count = math.ceil(keep * size)
    _, memory = step(ErrorFeedback(TopKMagnitude(keep)), {"w": p}, {})
    left = memory[RESIDUAL]["w"].square().sum() if memory.get(RESIDUAL) else torch.zeros(())
    bound = (1 - count / size) * p.square().sum()
    assert float(left) <= float(bound) * (1 + 1e-12)
    if power == 0:
        assert float(left) == pytest.approx(float(bound), rel=1e-12, abs=1e-12)


class Point(Model):
    """A vector w of which client i wants its own a_i: f_i(w) = 1/2 |w - a_i|^2."""

    name = "point"
    tags = {"w": frozenset({"head"})}  # noqa: RUF012
    initial = {"w": torch.zeros(2048, dtype=torch.float64)}  # noqa: RUF012

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output((params["w"] - inputs["a"]).square().sum(-1, keepdim=True) / 2)

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return out.logits.squeeze(-1)


@dataclass(frozen=True)
class Wish:
    a: Tensor

    def __len__(self) -> int:
        return 1

    def take(self, indices: Tensor) -> Batch:
        return Batch({"a": self.a.expand(len(indices), -1)}, torch.zeros(len(indices)))


class Opposed:
    """Two clients that agree on the first half of w and pull harder, in opposite ways, on the second."""

    clients = ("a", "b")
    agreed = 0.5 + torch.rand(1024, dtype=torch.float64, generator=Key(2).generator())

    def __getitem__(self, client: str) -> ClientData:
        part = Wish(torch.cat([self.agreed, torch.full((1024,), 2.0 if client == "a" else -2.0).double()]))
        return ClientData(part, part, part)


@pytest.mark.slow
def test_on_a_quadratic_where_plain_top_k_never_moves_error_feedback_finds_the_optimum() -> None:
    """The optimum is the mean of the two wishes. Half of the elements are sent: those on which they disagree."""

    def end(method: Method, count: int) -> tuple[float, float]:
        run = toy_run(method, count, lr=0.2, schedule=Schedule("cosine"), drift=False)
        agreed, opposed = final_params(play(run, Point(), Opposed()))["w"].split(1024)
        return float((agreed - Opposed.agreed).abs().max()), float(opposed.abs().max())

    worst = float(Opposed.agreed.max())
    assert end(prune(keep=0.5), 40) == (worst, 0.0), "not a bit of the agreed half has moved"
    assert max(end(fed_back(keep=0.5), 80)) < 0.04 * worst


@pytest.mark.parametrize("rest", ["fedavg", "scaffold"])
def test_keeping_all_changes_nothing_bit_for_bit(rest: str) -> None:
    base = build(rest)
    runs = [toy_run(method, 3, cohort=2) for method in (base, compose(base, fed_back(keep=1.0)))]
    engines = [SimulationEngine(run, WIDE_MODEL, FOUR) for run in runs]
    one, two = (list(rounds(run, WIDE_MODEL, engine)) for run, engine in zip(runs, engines, strict=True))
    assert tensors.equal(final_params(one), final_params(two))
    assert [each.traffic for each in one] == [each.traffic for each in two]
    states = [states_of(run, engine) for run, engine in zip(runs, engines, strict=True)]
    assert all(tensors.equal(states[0][client], states[1][client]) for client in FOUR.clients), "nothing to remember"


# ---- the residual


def test_only_what_is_not_sent_whole_has_a_residual_and_it_is_zero_where_something_was_sent() -> None:
    delta = {"w": random_normal(1, 40, 50), "b": random_normal(2, MIN_ELEMENTS)}
    arrives, memory = step(ErrorFeedback(TopKMagnitude(KEEP)), delta, {})
    assert memory[RESIDUAL].keys() == {"w"}
    assert bool((memory[RESIDUAL]["w"].ne(0) ^ arrives["w"].ne(0)).all())


def test_a_residual_that_is_sent_whole_is_gone() -> None:
    """As if `keep` had been smaller in an earlier round."""
    before = {RESIDUAL: {"w": random_normal(3, 40, 50)}}
    arrives, memory = step(ErrorFeedback(TopKMagnitude(1.0)), {"w": random_normal(1, 40, 50)}, before)
    assert torch.equal(arrives["w"], random_normal(1, 40, 50) + random_normal(3, 40, 50))
    assert not bool(memory[RESIDUAL]["w"].any())


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_does_not_spoil_the_residual(odd: float) -> None:
    """The server refuses it. With it in the residual, all later updates of the client would be refused too."""
    transform, value = ErrorFeedback(TopKMagnitude(KEEP)), random_normal(1, 40, 50)
    _, before = step(transform, {"w": value}, {})
    spoilt = value.clone()
    spoilt[3, 4] = odd
    arrives, after = step(transform, {"w": spoilt}, before)
    assert not bool(arrives["w"].isfinite().all())
    assert tensors.equal(after[RESIDUAL], before[RESIDUAL])


def test_a_name_that_is_not_sent_keeps_its_residual() -> None:
    """Query and key train in the first two of four rounds; their residual then stays to the bit."""
    run = toy_run(compose(fedfrozen(warmup=2), fed_back(keep=KEEP)), 4)
    engine, seen = SimulationEngine(run, WIDE_MODEL, FOUR), []
    for result in rounds(run, WIDE_MODEL, engine):
        seen.append(engine.store.load("a", result.number + 1).memory[RESIDUAL])
    kernel = {name for name in WIDE_MODEL.names("query", "key") if WIDE_MODEL.initial[name].numel() > MIN_ELEMENTS}
    assert kernel < seen[1].keys()
    for name in seen[1]:
        assert torch.equal(seen[1][name], seen[3][name]) == (name in kernel)


def test_the_residual_of_a_refused_update_stays_and_what_was_sent_is_lost() -> None:
    """A client does not learn what the server makes of its update."""
    run = toy_run(fed_back(keep=KEEP), 2, skip_failed_clients=True, max_examples=100)
    honest, spoilt = (SimulationEngine(run, WIDE_MODEL, FOUR) for _ in range(2))

    class Spoiling(SimulationEngine):
        def train(self, jobs: Any) -> Any:
            for reply in super().train(jobs):
                yield replace(reply, weight=-1.0) if reply.client == "a" and reply.round == 0 else reply

    spoilt = Spoiling(run, WIDE_MODEL, FOUR)
    one, two = (next(iter(rounds(run, WIDE_MODEL, engine))) for engine in (honest, spoilt))
    assert [lost.client for lost in two.lost] == ["a"]
    assert not tensors.equal(one.server.params, two.server.params)
    states = [engine.store.load("a", 1).memory[RESIDUAL] for engine in (honest, spoilt)]
    assert tensors.equal(*states)


# ---- runs


def residuals_of(run: Run, engine: SimulationEngine) -> dict[str, Tensors]:
    states = states_of(run, engine)
    assert any(name.startswith(RESIDUAL) for state in states.values() for name in state)
    return states


def engine_of(store: Any = None, block: int = 1) -> SimulationEngine:
    run = toy_run(compose(fed_back(keep=KEEP), quantize()), 5, cohort=3)
    return SimulationEngine(run, WIDE_MODEL, FOUR, block, store=store, availability=Availability(client_dropout=0.2))


def test_a_run_resumes_in_the_middle_bit_for_bit(tmp_path: Path) -> None:
    whole = engine_of()
    run = whole.run
    played = list(rounds(run, WIDE_MODEL, whole))
    first = engine_of(MemoryStore(DiskStore(tmp_path)))
    stream = rounds(run, WIDE_MODEL, first)
    server = [next(stream).server for _ in range(3)][-1]
    first.store.commit(3)
    again = engine_of(DiskStore(tmp_path))
    resumed = list(rounds(run, WIDE_MODEL, again, server, 3))
    assert tensors.equal(final_params(resumed), final_params(played))
    one, two = residuals_of(run, whole), residuals_of(run, again)
    assert all(tensors.equal(one[client], two[client]) for client in FOUR.clients)


def test_a_residual_does_not_travel() -> None:
    """Nothing of it is in an honest update, and the server takes none."""
    method = fed_back(keep=KEEP)
    run = toy_run(method, 1)

    def answer(job: Job) -> Update:
        each = begin_round(run, WIDE_MODEL, job, ClientState(), FOUR[job.client].train)
        update, state = finish_round(run, each, train_clients(run, [each])[0])
        assert RESIDUAL in state.memory
        assert RESIDUAL not in update.slots
        return replace(update, slots={**update.slots, RESIDUAL: state.memory[RESIDUAL]})

    with pytest.raises(ClientError, match="client 'a': sent the slot 'residual', which prune does not have"):
        next(iter(rounds(run, WIDE_MODEL, ScriptedEngine(answer))))


CONFORMING = {
    "alone": ("prune", {}),
    "before quantize": ("prune+quantize", {}),
    "with scaffold": ("scaffold+prune", {}),
    "with fedfrozen": ("fedfrozen+prune", {"warmup": 2}),
    "after a choice of layers": ("safl+prune", {"k": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind != "before quantize" else []) for kind in CONFORMING]
)
def test_error_feedback_conforms(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "MIN_ELEMENTS", 8)  # so that a small model has residuals
    name, options = CONFORMING[kind]
    method = build(name, {"keep": 0.3, "error_feedback": True, **options})
    check_method(method, toy_model(), Clients(c0=3, c1=9, c2=12, c3=6), tolerance=1e-4)


# ---- what it goes with


def test_quantization_comes_after_it_and_its_own_error_is_not_fed_back() -> None:
    after = compose(fed_back(keep=KEEP), quantize())
    run = toy_run(after, 2)
    engine = SimulationEngine(run, WIDE_MODEL, FOUR)
    plain = SimulationEngine(toy_run(fed_back(keep=KEEP), 2), WIDE_MODEL, FOUR)
    for each in (engine, plain):
        next(iter(rounds(each.run, WIDE_MODEL, each)))
    one, two = (each.store.load("a", 1).memory for each in (engine, plain))
    assert tensors.equal(one[RESIDUAL], two[RESIDUAL])
    with pytest.raises(MethodError, match=r"compose 'prune\+quantize'"):
        play(toy_run(compose(quantize(), fed_back()), 1), WIDE_MODEL, FOUR)


def test_any_transform_without_memory_can_be_fed_back() -> None:
    """Of rounding to eight bits too: what has arrived after n rounds is off by one step, not by sqrt(n) or n."""
    transform, value, memory = ErrorFeedback(Int8Quantizer()), random_normal(4, 30, 40), {}
    arrived = torch.zeros(30, 40)
    for number in range(50):
        arrives, memory = step(transform, {"w": value}, memory, Key(0) / number)
        arrived += arrives["w"]
    torch.testing.assert_close(arrived + memory[RESIDUAL]["w"], 50 * value, rtol=0, atol=1e-3)
    assert float((arrived - 50 * value).abs().max()) < 2 * float(value.abs().max()) / 127 + 1e-3


@dataclass(frozen=True)
class Late(UpdateTransform):
    def decode_aggregate(self, aggregate: Aggregate, key: Key) -> Aggregate:
        return aggregate


@pytest.mark.parametrize("inner", [ErrorFeedback(TopKMagnitude(KEEP)), Late()], ids=["memory", "late"])
def test_a_transform_whose_result_the_client_cannot_know_is_refused(inner: UpdateTransform) -> None:
    with pytest.raises(MethodError, match=f"error feedback of {type(inner).__name__}: it has memory of its own or"):
        ErrorFeedback(inner)


def test_two_residuals_are_refused() -> None:
    with pytest.raises(MethodError, match="ErrorFeedback and ErrorFeedback use the slot 'residual'; use one of them"):
        compose(fed_back(), fed_back())


# ---- privacy


def test_under_client_level_privacy_the_server_clips_what_the_residual_adds() -> None:
    """So one client moves the sum by at most the clip in any round, whatever it remembers."""
    method = protect_clients(fed_back(keep=KEEP), 0.1, 0.0, 4)
    run = toy_run(method, 1)
    huge = {RESIDUAL: {name: 1e3 * random_normal(1, *value.shape) for name, value in WIDE_MODEL.initial.items()}}
    job, _ = make_job(run, WIDE_MODEL, initial_server(run, WIDE_MODEL), 0, "a")
    each = begin_round(run, WIDE_MODEL, job, ClientState(memory=huge), FOUR["a"].train)
    update, _ = finish_round(run, each, train_clients(run, [each])[0])
    for transform in reversed(method.transforms):
        update = transform.decode_update(update)
    assert float(tensors.norm(dict(update.delta))) == pytest.approx(0.1, rel=1e-5)


def test_under_example_level_privacy_the_residual_is_made_of_noisy_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is post-processing: with the same noise, p - C(p) of the noisy delta, and nothing else."""
    monkeypatch.setattr(pruning, "MIN_ELEMENTS", 8)
    model, private = toy_model(), PrivacySettings(clip=1.0, noise=1.0)
    runs = [toy_run(replace(method, privacy=private), 1) for method in (fedavg(), fed_back(keep=0.3))]
    engines = [SimulationEngine(run, model, FOUR) for run in runs]
    job, _ = make_job(runs[0], model, initial_server(runs[0], model), 0, "a")
    noisy, _ = (next(iter(engine.train([job]))) for engine in engines)
    assert isinstance(noisy, Update)
    residual = engines[1].store.load("a", 1).memory[RESIDUAL]
    assert "head.weight" in residual
    for name, value in residual.items():
        assert np.array_equal(value.numpy(), noisy.delta[name].numpy() - top_k(noisy.delta[name].numpy(), 0.3))
