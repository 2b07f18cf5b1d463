"""What an audit asks of the run's own code: which rounds, of whom, with which examples, and what is counted of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import mechanism
import mechanism_choice
import mechanism_clients
import numpy as np
import pytest
import torch
from evidence import Check
from helpers import Clients, ScriptedEngine, toy_model, toy_run

from partita.core.client import ClientRound, Job
from partita.core.client_rule import ClientRule, Context, LayerSelection, PrivacyRelease
from partita.core.data import Examples
from partita.core.dp_settings import PrivacySettings
from partita.core.plan import Plan
from partita.core.rng import Key
from partita.core.rounds import ClientFailure, initial_server
from partita.core.settings import Run
from partita.core.update import Update
from partita.core.update_transform import UpdateTransform
from partita.methods.fedavg import fedavg
from partita.privacy.client_level import ClippedUpdates, protect_clients
from partita.testing.toy import ToyTransformer
from partita.training import private_gradients
from partita.training.dp_sgd import clipped_sum

# ---- choices of layers


@pytest.fixture(autouse=True)
def few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanism_choice, "CHOICES", 5)


RELEASE = PrivacyRelease("layers", 2.0, 0.5)


@dataclass(frozen=True)
class Telling(ClientRule):
    """Reports the attention of its first example to some of the layers, and notes what it was asked with."""

    release: PrivacyRelease = RELEASE
    layers: tuple[str, ...] = ("layer.2", "layer.1", "layer.0")
    asked: list[tuple[int, str, int]] = field(default_factory=list)
    uses_data = True

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        self.asked.append((ctx.round_info.round, ctx.round_info.client, len(probe)))
        attention = ctx.model.attention(ctx.anchor, probe.take(torch.arange(len(probe))), "auto")
        assert all(value.shape == (len(probe), 1) for value in attention.values())
        assert attention.keys() == {"layer.0", "layer.1", "layer.2"}
        return LayerSelection(
            plan.train, {}, {f"{self.release}/{layer}": float(attention[layer][-1]) for layer in self.layers}
        )


def choosing(*rules: Telling, count: int = 2) -> list[str]:
    """What the checks of these rules say, with three layers."""
    run = toy_run(replace(fedavg(), client_rules=rules), count)
    model = ToyTransformer(width=4, layers=3)
    return [
        check.what for check in mechanism_choice.check_choice(run, model, Clients(a=8, b=3), initial_server(run, model))
    ]


def test_clients_are_asked_for_choices_with_examples_that_point_at_one_layer() -> None:
    """First once, to see which layers are reported. Then rounds are asked in turn, of one artificial client each."""
    rule, model = Telling(), ToyTransformer(width=4, layers=3)
    run = toy_run(replace(fedavg(), client_rules=(rule,)), 2)
    server = initial_server(run, model)
    scores = mechanism_choice._collect_scores(run, model, Clients(a=8, b=3), server, RELEASE, range(2))
    assert scores.tolist() == [[mechanism_choice.LARGE_FACTOR, 0.0, 0.0]] * 5
    copies = round(2.0 * math.sqrt(3) / 0.5)
    rounds = [(0, "a 0"), (0, "a 0"), (1, "a 0"), (0, "a 1"), (1, "a 1"), (0, "a 2")]
    assert rule.asked == [(number, client, copies) for number, client in rounds]


def test_each_rule_is_asked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanism_choice, "_check_bias", lambda scores, release: seen.append((scores, release)))
    monkeypatch.setattr(mechanism_choice, "_check_repeats", lambda scores, rounds: [rounds])
    seen: list[tuple[np.ndarray, PrivacyRelease]] = []  # type: ignore[type-arg]
    first, second = Telling(), Telling(replace(RELEASE, noise=1.0), layers=("layer.0", "layer.2"))
    run, model = toy_run(replace(fedavg(), client_rules=(first, second)), 2), ToyTransformer(width=4, layers=3)
    checks = mechanism_choice.check_choice(run, model, Clients(a=8), initial_server(run, model))
    assert checks == [None, 2, None, 2]
    assert [(scores.shape, release) for scores, release in seen] == [((5, 3), first.release), ((5, 2), second.release)]
    assert len(first.asked) == len(second.asked) == 6


def test_a_single_score_or_none_has_no_direction() -> None:
    single = Telling(layers=("layer.1",))
    assert choosing(single) == []
    none = Telling(layers=())
    assert choosing(none) == []
    assert len(none.asked) == 1


# ---- private clients

MODEL = toy_model()
SIZE = sum(value.numel() for value in MODEL.initial.values())
CLIP = 0.1


@dataclass(frozen=True)
class Halving(UpdateTransform):
    """Comes after the clip: the server gets half of what was sent."""

    def decode_update(self, update: Update) -> Update:
        return replace(update, delta={name: value / 2 for name, value in update.delta.items()})


def sending(norm: float, *names: str) -> ScriptedEngine:
    """An engine of clients whose updates all have this norm."""

    def answer(job: Job) -> Update:
        delta = {name: torch.full_like(value, norm / SIZE**0.5) for name, value in MODEL.initial.items()}
        return Update(job.client, delta, {}, 4.0, dict.fromkeys(delta, 1), 1.0, round=job.round)

    return ScriptedEngine(answer, names or ("a", "b", "c", "d", "e"))


def protected(noise: float = 0.7, cohort: int = 4, count: int = 9, seed: int = 7) -> Run:
    method = replace(fedavg(), transforms=(Halving(),))
    return toy_run(protect_clients(method, CLIP, noise, cohort), count, cohort=cohort, seed=seed)


def clip_of(run: Run) -> ClippedUpdates:
    [clip, _] = run.method.transforms
    assert isinstance(clip, ClippedUpdates)
    return clip


@pytest.mark.parametrize(("norm", "found"), [(CLIP / 20, 0.25), (CLIP, 1.0)], ids=["below the clip", "far above it"])
@pytest.mark.parametrize("cohort", [1, 4])
def test_a_client_is_left_out_to_see_what_it_contributes(norm: float, found: float, cohort: int) -> None:
    """Ten times its norm, halved on the way; at most three clients are left out."""
    run = protected(cohort=cohort)
    check = mechanism_clients._check_clip(run, MODEL, sending(norm), initial_server(run, MODEL), clip_of(run))
    assert check.found == pytest.approx(found, rel=1e-5)
    assert (check.charged, check.p, check.numbers) == (1.0, 1.0, min(3, cohort))


def test_a_client_that_contributes_more_than_the_clip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = protected()
    monkeypatch.setattr(ClippedUpdates, "decode_update", lambda self, update: update)

    def checked() -> Check:
        return mechanism_clients._check_clip(run, MODEL, sending(CLIP), initial_server(run, MODEL), clip_of(run))

    assert checked().found == pytest.approx(5.0, rel=1e-5)
    assert checked().p == 0.0
    monkeypatch.setattr(mechanism_clients, "OVER", checked().found)
    assert checked().p == 1.0


def test_those_who_are_left_out_are_of_the_first_cohort() -> None:
    """Whoever else is left out moves nothing."""
    for seed in range(6):
        run = protected(cohort=1, seed=seed)
        check = mechanism_clients._check_clip(run, MODEL, sending(CLIP), initial_server(run, MODEL), clip_of(run))
        assert check.found == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(("count", "noise"), [(1, 4.0), (9, 0.05)])
def test_the_noise_on_sums_is_what_differs_from_a_replay_without_it(count: int, noise: float) -> None:
    """Three rounds are replayed, however many the run has, each from the same server."""
    run, engine = protected(noise, count=count), sending(CLIP)
    streams = mechanism_clients._streams(run, MODEL, engine, initial_server(run, MODEL), clip_of(run))
    assert [(stream.client, stream.round, stream.step) for stream in streams] == [
        ("server", n, (0, 0)) for n in range(3)
    ]
    assert [job.round for job in engine.jobs] == [n for n in (0, 1, 2) for _ in range(4)] * 2
    assert {name for job in engine.jobs for name in job.params} <= MODEL.initial.keys()
    for stream in streams:
        assert stream.noise.keys() == {f"delta/{name}" for name in MODEL.initial}
        squares, counts = zip(*stream.squares.values(), strict=True)
        assert sum(counts) == SIZE
        assert sum(squares) / SIZE == pytest.approx(1.0, abs=5 * math.sqrt(2 / SIZE))


def test_the_clip_the_noise_and_the_cohorts_of_a_run_are_checked() -> None:
    noisy, quiet, cohorts = protected(), protected(noise=0.0), [["a", "b", "c", "d"]] * 2
    clip, deviation, *_, sizes, again = mechanism_clients.check_clients(
        noisy, MODEL, sending(CLIP), initial_server(noisy, MODEL), cohorts
    )
    assert [check.what for check in (clip, deviation, sizes, again)] == [
        "largest contribution of one client / clip",
        "noise multiplier",
        "clients in a cohort",
        "share of a cohort asked again in the next round",
    ]
    assert deviation.charged == 0.7
    assert (sizes.charged, again.charged) == (4, 4 / 5)
    without = mechanism_clients.check_clients(quiet, MODEL, sending(CLIP), initial_server(quiet, MODEL), cohorts)
    assert [check.what for check in without] == [check.what for check in (clip, sizes, again)]


def test_updates_are_made_ten_times_as_long_and_one_client_fails() -> None:
    one = {"w": torch.tensor([1.0, 2.0])}
    failure = ClientFailure("c", "no memory")
    replies = {
        "a": Update("a", one, {"s": one}, 1.0, {"w": 1}, None),
        "b": Update("b", one, {}, 1.0, {"w": 1}, None),
        "c": failure,
    }
    engine = ScriptedEngine(lambda job: replies[job.client], ("a", "b", "c"))
    scaled_updates = mechanism_clients.ScaledUpdatesEngine(engine, failing_client="b")
    jobs: Any = [SimpleNamespace(client=name) for name in replies]
    first, second, third = scaled_updates.train(jobs)
    assert isinstance(first, Update)
    assert first.delta["w"].tolist() == first.slots["s"]["w"].tolist() == [10.0, 20.0]
    assert isinstance(second, ClientFailure)
    assert second.client == "b"
    assert third is failure
    assert scaled_updates.clients() == ("a", "b", "c")


# ---- private examples


def private(noise: float = 0.8, sampling: str = "poisson", count: int = 5, clip: float = 0.5) -> Run:
    settings = PrivacySettings(clip=clip, noise=noise, sampling=sampling)  # type: ignore[arg-type]
    return toy_run(replace(fedavg(), privacy=settings), count, batch_size=4, epochs=2)


def settings_of(run: Run) -> PrivacySettings:
    assert run.method.privacy is not None
    return run.method.privacy


def client_rounds_of(run: Run, number: int = 1, **sizes: int) -> list[ClientRound]:
    clients, server = Clients(**sizes), initial_server(run, MODEL)
    return [mechanism._begin_client_round(run, MODEL, clients, server, number, client) for client in sizes]


def test_a_client_round_under_another_name_draws_other_batches_of_the_same_examples() -> None:
    run, clients = private(), Clients(a=9, b=9)
    server = initial_server(run, MODEL)
    plain, again, other = (
        mechanism._begin_client_round(run, MODEL, clients, server, 2, "a", name) for name in ("", "a", "a 1")
    )
    assert [client_round.job.client for client_round in (plain, again, other)] == ["a", "a", "a 1"]
    assert {client_round.job.round for client_round in (plain, again, other)} == {2}
    assert all(client_round.examples is clients["a"].train for client_round in (plain, again, other))
    drawn = [[batch.tolist() for batch in client_round.schedules[0]] for client_round in (plain, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_only_the_first_steps_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanism, "STEPS", 2)
    [client_round] = client_rounds_of(private(), a=9)
    [whole], [short] = client_round.schedules, mechanism._shortened(client_round).schedules
    assert len(whole.sizes) == 6
    assert [batch.tolist() for batch in short] == [batch.tolist() for batch in whole][:2]
    assert len(short.order) == sum(whole.sizes[:2])


def test_client_rounds_are_grouped_as_an_engine_groups_them() -> None:
    """So many neighbors at a time, and of these only those that can train side by side."""
    run = private()
    client_rounds = client_rounds_of(run, a=9, b=9, c=9, d=9, e=9)
    for block, wanted in ((1, ["a", "b", "c", "d", "e"]), (2, ["ab", "cd", "e"]), (5, ["abcde"])):
        groups = mechanism._grouped(run, client_rounds, block)
        assert ["".join(client_round.job.client for client_round in group) for group in groups] == wanted


@pytest.mark.parametrize(("block", "noise"), [(1, 4.0), (3, 0.01)])
def test_the_noise_of_steps_is_what_differs_from_a_replay_without_it(
    monkeypatch: pytest.MonkeyPatch, block: int, noise: float
) -> None:
    """In units of what was charged, for clients above and below the batch size."""
    monkeypatch.setattr(mechanism, "STEPS", 2)
    run = private(noise)
    client_rounds = [mechanism._shortened(client_round) for client_round in client_rounds_of(run, a=9, b=9, c=3)]
    groups = mechanism._grouped(run, client_rounds, block)
    streams = [stream for group in groups for stream in mechanism._streams(run, settings_of(run), group)]
    steps = {(stream.client, stream.round, stream.step) for stream in streams}
    assert steps == {(client, 1, (0, step)) for client in "abc" for step in (0, 1)}
    for stream in streams:
        assert stream.noise.keys() == MODEL.initial.keys()
        squares = sum(square for square, _ in stream.squares.values())
        assert squares / SIZE == pytest.approx(1.0, abs=5 * math.sqrt(2 / SIZE))


@pytest.mark.parametrize(("block", "clip"), [(1, 0.5), (2, 1000.0)])
def test_an_example_contributes_exactly_the_clip_when_the_loss_is_scaled_up(block: int, clip: float) -> None:
    """Also where no plain gradient would be as long."""
    run = private(clip=clip)
    groups = mechanism._grouped(
        run, [mechanism._shortened(client_round) for client_round in client_rounds_of(run, a=9, b=3)], block
    )
    [check] = mechanism._check_clip(run, settings_of(run), groups)
    assert check.found == pytest.approx(1.0, rel=1e-4)
    assert (check.charged, check.p, check.numbers) == (1.0, 1.0, 4 + 2)
    [none] = mechanism._check_clip(run, settings_of(run), [])
    assert (none.found, none.numbers) == (0.0, 0)


def test_an_example_that_contributes_more_than_the_clip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = private()
    monkeypatch.setattr(
        private_gradients,
        "clipped_sum",
        lambda *rest: clipped_sum(*rest[:5], replace(rest[5], clip=3 * rest[5].clip)),
    )
    [check] = mechanism._check_clip(run, settings_of(run), [client_rounds_of(run, a=3)])
    assert check.found == pytest.approx(3.0, rel=1e-4)
    assert check.p == 0.0
    monkeypatch.setattr(mechanism, "OVER", check.found)
    [check] = mechanism._check_clip(run, settings_of(run), [client_rounds_of(run, a=3)])
    assert check.p == 1.0


def test_which_rounds_and_clients_of_a_run_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two rounds and the last one, and for sampling as many as it takes."""
    monkeypatch.setattr(mechanism, "INSPECTED_ROUNDS", 12)
    monkeypatch.setattr(mechanism, "_check_clip", lambda run, settings, groups: [["clip", groups]])
    monkeypatch.setattr(mechanism, "_streams", lambda run, settings, group: group)
    monkeypatch.setattr(mechanism, "check_noise", lambda streams, noise: [["noise", streams, noise]])
    monkeypatch.setattr(
        mechanism, "_check_sampling", lambda run, client_rounds, clients, units: [["sampling", client_rounds, clients]]
    )

    def places(client_rounds: Sequence[ClientRound]) -> list[tuple[int, str]]:
        return [(client_round.job.round, client_round.job.client) for client_round in client_rounds]

    def found(run: Run, block: int = 1) -> dict[str, Any]:
        clients = Clients(a=9, b=9, c=3)
        checks: Any = mechanism.check_examples(run, MODEL, clients, initial_server(run, MODEL), block)
        return {name: rest for name, *rest in checks}

    for count, numbers in ((1, [0]), (2, [0, 1]), (5, [0, 1, 4])):
        checks = found(private(count=count))
        assert [places(group) for group in checks["clip"][0]] == [[(n, client)] for n in numbers for client in "cab"]
        assert all(len(client_round.schedules[0].sizes) <= mechanism.STEPS for [client_round] in checks["clip"][0])
        assert checks["noise"] == [[client_round for [client_round] in checks["clip"][0]], 0.8]
        assert places(checks["sampling"][0])[:3] == [(0, "c"), (0, "a"), (0, "b")]
        assert len(checks["sampling"][0]) == 12
        assert len({(client_round.job.round, client_round.job.client) for client_round in checks["sampling"][0]}) == 12
        assert checks["sampling"][1] == 3
    assert [len(group) for group in found(private(count=1), block=3)["clip"][0]] == [3]
    assert found(private(noise=0.0)).keys() == {"clip", "sampling"}
    assert found(private(sampling="shuffle")).keys() == {"clip", "noise"}
    monkeypatch.setattr(mechanism, "_streams", lambda run, settings, group: [])
    assert found(private()).keys() == {"clip", "sampling"}, "a plan may train nothing"


def test_replay_records_whole_gradients_of_parameters_with_unequal_rates() -> None:
    """One record per step, although the optimizer steps each layer by itself."""
    method = replace(fedavg(), privacy=PrivacySettings(clip=1.0, noise=1.0))
    clients, model = Clients(a=6), toy_model()
    named = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1}  # a gradient does not depend on them
    options: tuple[dict[str, Any], ...] = ({}, {"layer_decay": 0.5, "decay_norms_and_biases": False, **named})
    found = []
    for more in options:
        run = toy_run(method, 1, **more)
        server = initial_server(run, model)
        begun = mechanism._begin_client_round(run, model, clients, server, 0, "a")
        found.append(mechanism._replay(run, [begun]))
    assert found[0].keys() == found[1].keys()
    for step, grads in found[0].items():
        assert grads.keys() == found[1][step].keys() == model.initial.keys()
        assert all(torch.equal(grads[name], found[1][step][name]) for name in grads)
