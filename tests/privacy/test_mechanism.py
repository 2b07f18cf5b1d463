"""The parts of the audit's mechanism checks, on numbers small enough to verify by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mechanism
import mechanism_choice
import mechanism_clients
import numpy as np
import pytest
import torch
from evidence import Array, Check, chance_of_cosine, check_counts, check_dispersion
from helpers import Clients, toy_model, toy_run
from mechanism import Stream
from scipy.stats import hypergeom, ks_2samp

from partita.core.batch_schedule import BatchSchedule
from partita.core.client_rule import PrivacyRelease
from partita.core.dp_settings import PrivacySettings
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.testing.toy import ToyExamples


def chance(cosine: float, length: int) -> float:
    return float(chance_of_cosine(np.array(cosine), np.array(length)))


def cosine(one: Array, two: Array) -> float:
    return float(one @ two / math.sqrt((one @ one) * (two @ two)))


def make_stream(client: str, number: int, step: int, seed: int, **sizes: int) -> Stream:
    draw = np.random.default_rng(seed)
    noise = {name: torch.from_numpy(draw.standard_normal(size)) for name, size in sizes.items()}
    return mechanism.stream_of(client, number, (0, step), noise)


# ---- noise


def test_stream_keeps_a_prefix_of_each_tensor_and_all_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanism, "PREFIX", 3)
    noise = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double(), "b": torch.tensor([5.0]).double()}
    stream = mechanism.stream_of("x", 2, (1, 4), noise)
    assert (stream.client, stream.round, stream.step) == ("x", 2, (1, 4))
    assert stream.squares == {"a": (30.0, 4), "b": (25.0, 1)}
    assert {name: value.tolist() for name, value in stream.noise.items()} == {"a": [1.0, 2.0, 3.0], "b": [5.0]}


def test_noise_deviation_pools_all_streams() -> None:
    streams = [make_stream("x", 0, 0, 1, a=20, b=30), make_stream("x", 0, 1, 2, a=20)]
    deviation, normality, *_ = mechanism.check_noise(streams, 0.7)
    every = np.concatenate([streams[0].noise["a"], streams[0].noise["b"], streams[1].noise["a"]])
    assert (deviation.charged, deviation.numbers, normality.numbers) == (0.7, 70, 70)
    assert deviation.found == pytest.approx(0.7 * math.sqrt(float(every @ every) / 70))
    again = mechanism.check_noise([streams[0], streams[0]], 0.7)[0]
    assert again.numbers == 100


def test_noise_correlation_is_checked_between_steps_rounds_and_clients() -> None:
    """Over all tensors that two steps share, and for each one; the p-value is that of the worst comparison."""
    streams = [
        make_stream("x", 0, 0, 1, a=8, b=5),
        make_stream("x", 0, 1, 2, a=8, b=5),
        make_stream("x", 1, 0, 3, a=8),
        make_stream("y", 1, 0, 4, a=8, b=5),
    ]
    found = {check.what.rpartition(" ")[2]: check for check in mechanism._check_streams(streams)}
    pairs = {"steps": [(1, 0)], "rounds": [(2, 0), (2, 1)], "clients": [(3, 0), (3, 1), (3, 2)]}
    assert {what: check.numbers for what, check in found.items()} == {what: len(two) for what, two in pairs.items()}
    for what, places in pairs.items():
        cosines, chances = [], []
        for one, two in places:
            shared = streams[one].noise.keys() & streams[two].noise.keys()
            each = {name: (streams[one].noise[name], streams[two].noise[name]) for name in sorted(shared)}
            whole = [np.concatenate(part) for part in zip(*each.values(), strict=True)]
            cosines.append(abs(cosine(*whole)))
            chances.append(chance(cosine(*whole), len(whole[0])))
            chances += [chance(cosine(*part), len(part[0])) for part in each.values()]
        assert found[what].found == pytest.approx(max(cosines))
        assert found[what].p == pytest.approx(min(1.0, min(chances) * len(places) * 3))
        assert found[what].charged == 0.0


def test_repeated_noise_in_one_small_tensor_is_found() -> None:
    one, two = make_stream("x", 0, 0, 1, a=500, b=30), make_stream("x", 0, 1, 2, a=500, b=30)
    [honest] = mechanism._check_streams([one, two])
    assert honest.p > 1e-3
    repeated = replace(two, noise={**two.noise, "b": one.noise["b"]})
    [lie] = mechanism._check_streams([one, repeated])
    assert lie.p < 1e-12
    two_numbers = make_stream("x", 0, 0, 1, a=2), make_stream("x", 0, 1, 2, a=2)
    assert [check.numbers for check in mechanism._check_streams(two_numbers)] == [1]
    single = make_stream("x", 0, 0, 1, a=1), make_stream("x", 0, 1, 2, a=1)
    assert mechanism._check_streams(single) == [], "a single number has no correlation"


def test_noise_correlation_is_checked_between_tensors_of_a_step() -> None:
    streams = [make_stream("x", 0, 0, 1, a=8, b=5, c=6), make_stream("x", 0, 1, 2, a=8, b=5)]
    [check] = mechanism._check_tensors(streams)
    cosines, chances = [], []
    for one, two in (("a", "b"), ("a", "c"), ("b", "c")):
        parts = []
        for stream in streams:
            if one in stream.noise and two in stream.noise:
                length = min(len(stream.noise[one]), len(stream.noise[two]))
                parts.append((stream.noise[one][:length], stream.noise[two][:length]))
        whole = [np.concatenate(part) for part in zip(*parts, strict=True)]
        cosines.append(abs(cosine(*whole)))
        chances.append(chance(cosine(*whole), len(whole[0])))
    assert check.found == pytest.approx(max(cosines))
    assert check.p == pytest.approx(min(1.0, 3 * min(chances)))
    assert (check.charged, check.numbers) == (0.0, 3)
    assert mechanism._check_tensors([make_stream("x", 0, 0, 1, a=8)]) == []


def test_two_tensors_with_the_same_noise_are_found() -> None:
    one, two, three = (np.random.default_rng(seed).standard_normal(12) for seed in range(3))
    [check] = mechanism._check_tensors([Stream("x", 0, (0, 0), {"a": one, "b": two, "c": np.append(one, three)}, {})])
    assert check.found == pytest.approx(1.0)
    assert check.p < 1e-6
    noise = {"a": one, "b": 0.8 * one + 0.6 * two}
    [some] = mechanism._check_tensors([Stream("x", 0, (0, 0), noise, {})])
    assert 0 < some.p < 0.1
    assert some.p == pytest.approx(chance(cosine(*noise.values()), 12))


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_correlations_do_not_depend_on_the_size_of_the_noise(scale: float) -> None:
    streams = [make_stream("x", 0, 0, 1, a=8, b=5), make_stream("x", 0, 1, 2, a=8, b=5)]
    scaled = [
        replace(stream, noise={name: scale * value for name, value in stream.noise.items()}) for stream in streams
    ]
    for check in (mechanism._check_streams, mechanism._check_tensors):
        [plain], [other] = check(streams), check(scaled)
        assert (other.found, other.p) == pytest.approx((plain.found, plain.p))


# ---- replayed clients


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"a": 5}, ["a"]),
        ({"a": 5, "b": 0, "c": 2}, ["c", "a"]),
        ({"a": 7, "b": 1, "c": 6, "d": 2, "e": 5, "f": 3, "g": 4}, ["b", "f", "e", "a"]),
    ],
)
def test_audited_clients_spread_from_smallest_to_largest(sizes: dict[str, int], wanted: list[str]) -> None:
    assert mechanism._spread(Clients(**sizes)) == wanted


def test_client_rounds_are_replicated_under_new_names_until_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanism, "INSPECTED_ROUNDS", 7)
    found = mechanism._replicas(toy_run(fedavg(), 2), ["a", "b"])
    assert found == [
        *[(0, "a", ""), (0, "b", ""), (1, "a", ""), (1, "b", "")],
        *[(0, "a", "a 1"), (0, "b", "b 1"), (1, "a", "a 1")],
    ]
    monkeypatch.setattr(mechanism, "INSPECTED_ROUNDS", 4)
    assert mechanism._replicas(toy_run(fedavg(), 2), ["a", "b"]) == found[:4]
    assert mechanism._replicas(toy_run(fedavg(), 9), ["a"]) == [(number, "a", "") for number in range(4)]


def test_dropping_the_first_example_shortens_every_batch() -> None:
    shorter = mechanism._without_first(BatchSchedule(torch.tensor([4, 2, 7, 5, 1]), (3, 0, 1, 1)))
    assert [indices.tolist() for indices in shorter] == [[2, 7], [], [], []]


def test_recorded_gradients_are_keyed_by_client_phase_and_step() -> None:
    """A block has one row per client, and in its last steps only rows of clients that still train."""
    tape = mechanism.GradientRecorder("sgd")
    tape.blocks = [
        (["a", "b"], [{"w": torch.tensor([[1.0], [2.0]])}, {"w": torch.tensor([[3.0]])}]),
        (["a"], [{"w": torch.tensor([4.0, 5.0])}]),
        (["b"], [{"w": torch.tensor(6.0)}]),
    ]
    found = {where: grads["w"].tolist() for where, grads in tape.gradients().items()}
    side_by_side = {("a", 0, 0): [1.0], ("b", 0, 0): [2.0], ("a", 0, 1): [3.0]}
    assert found == {**side_by_side, ("a", 1, 0): [4.0, 5.0], ("b", 2, 0): 6.0}


# ---- sampling


def make_visit(count: int, *batches: Sequence[int]) -> Any:
    return SimpleNamespace(examples=range(count), schedules=[[torch.tensor(batch) for batch in batches]])


def test_sampling_checks_cover_rate_variance_and_overlaps() -> None:
    run = toy_run(fedavg(), batch_size=4)
    visits = [
        make_visit(8, [0, 1, 2], [1, 2, 3, 4], [5]),
        make_visit(10, [9, 8], [7, 6, 5], [0]),
        make_visit(8, [0, 1], [2, 3], [5, 6]),
        make_visit(10, [9, 1], [7, 6], [4]),
    ]
    rate, variance, steps, rounds, clients = mechanism._check_sampling(run, visits, 2)
    assert rate == check_counts("sampling rate", {0.5: (14, 48), 0.4: (11, 60)})
    sizes = np.array([3, 4, 1, 2, 3, 1, 2, 2, 2, 2, 2, 1])
    counts = np.array([8, 8, 8, 10, 10, 10] * 2)
    assert variance == check_dispersion(sizes, counts, 4 / counts)
    what = "examples in common between batches of two"
    assert steps == check_counts(f"{what} steps", {0.25: (2, 16), 0.4 * 0.4: (0, 20)})
    assert rounds == check_counts(f"{what} rounds", {0.25: (2 + 2 + 1, 24), 0.4 * 0.4: (1 + 2 + 0, 30)})
    assert clients == check_counts(f"{what} clients", {0.5 * 0.4: (1, 48)})


def test_full_batches_are_checked_only_for_their_rate() -> None:
    """A client smaller than a batch uses all its examples in every step."""
    run = toy_run(fedavg(), batch_size=4)
    found = mechanism._check_sampling(run, [make_visit(3, [0, 1, 2], [0, 1, 2])] * 2, 1)
    assert [check.what for check in found] == ["sampling rate"]
    assert (found[0].charged, found[0].found, found[0].numbers) == (1.0, 1.0, 12)
    assert mechanism._check_sampling(run, [make_visit(3)], 1) == []
    alone = mechanism._check_sampling(run, [make_visit(8, [0], [1]), make_visit(8, [0], [1])], 1)
    assert [check.what.rpartition(" ")[2] for check in alone] == ["rate", "binomial", "steps", "rounds"]


def test_overlap_counts_examples_up_to_the_smaller_client() -> None:
    [check] = mechanism._check_overlap("clients", [(({0, 4, 5}, 6, 0.5), ({0, 4, 5}, 5, 0.2))])
    assert check == check_counts("examples in common between batches of two clients", {0.1: (2, 5)})
    assert mechanism._check_overlap("clients", [(({0}, 1, 1.0), ({0}, 1, 1.0))]) == []
    certain, likely = ({0, 1}, 2, 1.0), ({0}, 2, 0.4)
    for pair in ((certain, likely), (likely, certain)):
        [check] = mechanism._check_overlap("clients", [pair])
        assert (check.charged, check.found, check.numbers) == (0.4, 0.5, 2)


def test_expected_batch_size_is_at_most_the_number_of_examples() -> None:
    visits: Any = [
        SimpleNamespace(job=SimpleNamespace(client=name), examples=range(count)) for name, count in (("a", 3), ("b", 9))
    ]
    assert mechanism._sizes(toy_run(fedavg(), batch_size=4), visits) == {"a": 3, "b": 4}


# ---- clients


def test_cohort_size_check_finds_other_sizes_and_repeats() -> None:
    for cohorts, wanted in (
        ([["a", "b"], ["c", "d"]], Check("clients in a cohort", 2, 2, 1.0, 2)),
        ([["a", "b"], ["c", "d", "e"], ["a"]], Check("clients in a cohort", 2, 3, 0.0, 3)),
        ([["a", "a"]], Check("clients in a cohort", 2, 1, 0.0, 1)),
    ):
        assert mechanism_clients._check_cohorts(cohorts, 5, 2)[0] == wanted


def test_cohort_overlap_check_matches_the_hypergeometric() -> None:
    cohorts = [["a", "b"], ["a", "c"], ["d", "e"], ["d", "e"], ["a", "b"]]
    _, again = mechanism_clients._check_cohorts(cohorts, 5, 2)
    pmf = hypergeom.pmf([0, 1, 2], 5, 2, 2)
    above = 2 * pmf[1] * pmf[2] + pmf[2] ** 2  # an overlap of three or four over two pairs of rounds
    assert (again.charged, again.found, again.numbers) == (2 / 5, 3 / 4, 2)
    assert again.p == pytest.approx(min(1.0, 2 * above))
    _, apart = mechanism_clients._check_cohorts([["a", "b"], ["c", "d"]], 5, 2)
    assert (apart.found, apart.p) == (0.0, pytest.approx(min(1.0, 2 * pmf[0])))
    _, later = mechanism_clients._check_cohorts(
        [["a", "b"], ["c", "d"], ["c", "e"], ["a", "e"], ["b", "c"], ["b", "d"]], 5, 2
    )
    assert (later.found, later.numbers) == (2 / 6, 3), "rounds 1 and 2, 3 and 4, 5 and 6"
    _, third = mechanism_clients._check_cohorts([["a"], ["b"], ["c"], ["b"]], 5, 1)
    assert (third.found, third.numbers) == (0.0, 2)
    assert len(mechanism_clients._check_cohorts(cohorts[:1], 5, 2)) == 1, "one round has no next"
    assert len(mechanism_clients._check_cohorts(cohorts, 2, 2)) == 1, "where all are asked, nothing is drawn"


def test_flattened_aggregate_is_the_mean_times_the_cohort() -> None:
    found = mechanism_clients._flat({"delta": {"w": torch.tensor([1.5])}, "seen": {"w": torch.tensor([2.0])}}, 3)
    assert {name: value.tolist() for name, value in found.items()} == {"delta/w": [4.5], "seen/w": [6.0]}
    assert found["delta/w"].dtype == torch.float64


# ---- layer selection


@pytest.mark.parametrize(
    ("noise", "share", "layers", "copies"), [(3.0, 0.5, 4, 12), (0.1, 1.0, 1, 2), (1.0, 1.0, 9, 3), (2.0, 0.25, 1, 8)]
)
def test_number_of_copies_matches_the_noise(noise: float, share: float, layers: int, copies: int) -> None:
    assert mechanism_choice._copies(PrivacyRelease("layers", noise, share), layers) == copies


def test_selection_cosines_are_compared_with_honest_draws() -> None:
    release = PrivacyRelease("layers", 3.0, 0.5)
    scores = np.random.default_rng(5).standard_normal((300, 4))
    scores /= np.linalg.norm(scores, axis=1, keepdims=True)
    check = mechanism_choice._check_bias(scores, release)
    draw = np.random.default_rng(0)
    sums = draw.standard_normal((20_000, 4)) * 3.0
    sums[:, 0] = sums[:, 0] + draw.binomial(12, 0.5, 20_000)
    honest = sums[:, 0] / np.sqrt((sums**2).sum(axis=1))
    assert check.charged == pytest.approx(honest.mean())
    assert check.found == pytest.approx(scores[:, 0].mean())
    assert check.p == pytest.approx(ks_2samp(scores[:, 0], honest).pvalue, rel=1e-3)
    assert check.numbers == 300
    honest_check = mechanism_choice._check_bias(np.column_stack([honest[:300], scores[:, 1:]]), release)
    assert honest_check.p > 1e-3 > check.p


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_selection_noise_correlation_is_checked_between_rounds_and_clients(rounds: int) -> None:
    """Only layers that hold pure noise are compared, and each selection is in at most one pair."""
    scores = np.random.default_rng(6).standard_normal((13, 4))
    scores[3, 1:] = 0.0
    found = mechanism_choice._check_repeats(scores, rounds)
    assert [check.what.rpartition(" ")[2] for check in found] == (["clients"] if rounds == 1 else ["rounds", "clients"])
    for check, rows in zip(found[::-1], (scores[::rounds], scores), strict=False):
        noise = [row[1:] / (np.linalg.norm(row[1:]) or 1.0) for row in rows]
        pairs = len(noise) // 2
        one = np.concatenate([noise[2 * place] for place in range(pairs)])
        two = np.concatenate([noise[2 * place + 1] for place in range(pairs)])
        assert check.found == pytest.approx(cosine(one, two))
        assert check.p == pytest.approx(chance(cosine(one, two), 3 * pairs))
        assert (check.charged, check.numbers) == (0.0, 3 * pairs)
    assert mechanism_choice._check_repeats(scores[:3], 1) == [], "one pair is not enough"


def test_repeated_examples_are_copies_of_the_first() -> None:
    x = torch.arange(32.0).reshape(2, 4, 4)
    copies = mechanism_choice.Repeated(ToyExamples(x, torch.tensor([4, 5])), 7)
    assert len(copies) == 7
    assert copies.take(torch.tensor([1, 0, 6])).targets.tolist() == [4, 4, 4]


def test_only_rules_with_a_declared_release_are_audited() -> None:
    method = build("safl", {"k": 1, "noise": 3.0, "probe": 0.5})
    [rule] = method.client_rules
    run = toy_run(replace(method, privacy=PrivacySettings(clip=1.0, noise=1.0)))
    assert mechanism_choice.releasing(run) == [(rule, rule.release)]
    assert mechanism_choice.releasing(toy_run(fedavg())) == []
    unread = replace(method, client_rules=(replace(rule, uses_data=False), replace(rule, release=None)))  # type: ignore[type-var]
    assert mechanism_choice.releasing(toy_run(unread)) == []
    assert mechanism_choice.check_choice(toy_run(fedavg()), toy_model(), Clients(a=4), None) == []  # type: ignore[arg-type]
