"""Client sampling: the probabilities of each rule, power of choice by hand, weights, and refusals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations
from typing import ClassVar

import pytest
from helpers import Clients, ScriptedEngine, toy_model, toy_run

from partita.core import tensors
from partita.core.client import Job
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.core.sampling import SAMPLING, BySize, ClientInfo, PowerOfChoice, Uniform, build_sampling, sample_by_size
from partita.core.settings import Run, RunError
from partita.core.update import Update
from partita.engines.simulation import SimulationEngine
from partita.methods.fedavg import fedavg

SIZES = {"a": 1, "b": 2, "c": 3, "d": 6}
NAMES = list(SIZES)
DRAWS = 6000


def run_with(rule: Uniform, cohort: int = 2, count: int = 6, **more: object) -> Run:
    return toy_run(fedavg(), count, cohort=cohort, sampling=rule, examples=SIZES, **more)


def chance(order: Sequence[str]) -> float:
    """The probability of drawing these clients in this order, one by one without replacement."""
    left, found = sum(SIZES.values()), 1.0
    for client in order:
        found *= SIZES[client] / left
        left -= SIZES[client]
    return found


# ---- the draws


def test_uniform_draws_are_those_of_the_key_path() -> None:
    run = run_with(Uniform())
    wanted = [(run.key / "round" / number / "cohort").sample(NAMES, 2) for number in range(20)]
    assert [run.draw_cohort(number, NAMES) for number in range(20)] == wanted
    assert wanted == [run_with(Uniform(equal_weights=True)).draw_cohort(number, NAMES) for number in range(20)]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_by_size_draws_every_ordered_cohort_with_its_exact_probability(size: int) -> None:
    """Within four standard deviations of the frequency, over 6000 draws with a fixed seed."""
    run = run_with(BySize(), size)
    seen = Counter(tuple(run.draw_cohort(number, NAMES)) for number in range(DRAWS))
    wanted = {order: chance(order) for order in permutations(NAMES, size)}
    assert sum(wanted.values()) == pytest.approx(1)
    for order, probability in wanted.items():
        deviation = math.sqrt(probability * (1 - probability) / DRAWS)
        assert abs(seen[order] / DRAWS - probability) <= 4 * deviation, order


def test_by_size_is_a_function_of_key_and_sizes() -> None:
    run = run_with(BySize(), 3)
    drawn = [run.draw_cohort(number, NAMES) for number in range(30)]
    assert drawn == [run.draw_cohort(number, NAMES, {"a": 9.0}) for number in range(30)], "losses have no influence"
    assert drawn != [replace(run, key=Key(8)).draw_cohort(number, NAMES) for number in range(30)]
    secret = replace(run, secret=Key(99), hidden_cohorts=True)
    assert [secret.draw_cohort(number, NAMES) for number in range(30)] != drawn
    assert {len(cohort) for cohort in drawn} == {3}


def test_power_of_choice_takes_the_candidates_with_the_highest_losses() -> None:
    info = ClientInfo(SIZES, {"a": 0.1, "b": 0.4, "c": 0.3, "d": 0.2})
    every, key = PowerOfChoice(candidates=4), Key(5)
    assert every.draw(key, 0, NAMES, 2, info) == ["b", "c"]
    assert every.draw(key, 0, NAMES, 3, info) == ["b", "c", "d"]
    for number in range(50):
        candidates = sample_by_size(key / number, NAMES, 3, info)
        wanted = sorted(candidates, key=lambda client: -info.losses[client])[:2]
        assert PowerOfChoice(candidates=3).draw(key / number, 0, NAMES, 2, info) == wanted
        as_many = PowerOfChoice(candidates=2).draw(key / number, 0, NAMES, 2, info)
        assert set(as_many) == set(candidates[:2]), "with as many candidates as places, losses do not choose"


def test_power_of_choice_asks_clients_without_a_loss_first_in_the_order_of_the_draw() -> None:
    rule, key = PowerOfChoice(candidates=4), Key(5)
    assert set(rule.draw(key, 0, NAMES, 2, ClientInfo(SIZES, {"b": 9.0, "c": 8.0}))) == {"a", "d"}
    assert rule.draw(key, 0, NAMES, 3, ClientInfo(SIZES, {"a": 1.0, "b": 9.0, "c": 8.0})) == ["d", "b", "c"]
    drawn = sample_by_size(key, NAMES, 4, ClientInfo(SIZES))
    assert rule.draw(key, 0, NAMES, 4, ClientInfo(SIZES)) == drawn
    assert rule.draw(key, 0, NAMES, 4, ClientInfo(SIZES, dict.fromkeys(NAMES, 0.5))) == drawn, "equal losses"


def test_power_of_choice_draws_twice_the_cohort_by_default_and_never_more_than_there_are() -> None:
    losses = {client: float(size) for client, size in SIZES.items()}
    for number in range(40):
        key, info = Key(1) / number, ClientInfo(SIZES, losses)
        assert PowerOfChoice().draw(key, 0, NAMES, 1, info) == PowerOfChoice(candidates=2).draw(key, 0, NAMES, 1, info)
        assert PowerOfChoice().draw(key, 0, NAMES, 3, info) == ["d", "c", "b"]
        assert PowerOfChoice(candidates=4).draw(key, 0, NAMES[:2], 1, info) == ["b"]


# ---- in a run


POPULATION = Clients(a=5, b=6, c=12, d=9, e=20)


def by_loss(count: int = 6) -> Run:
    sizes = {client: len(POPULATION.parts[client]) for client in POPULATION.clients}
    return toy_run(fedavg(), count, cohort=2, sampling=PowerOfChoice(candidates=4), examples=sizes)


def test_rounds_draw_by_the_losses_that_clients_reported_last() -> None:
    run, model = by_loss(), toy_model()
    known: dict[str, float] = {}
    for result in rounds(run, model, SimulationEngine(run, model, POPULATION)):
        assert list(result.cohort) == run.draw_cohort(result.number, POPULATION.clients, known)
        assert result.losses.keys() == set(result.cohort)
        known |= result.losses
    assert known.keys() == set(POPULATION.clients), "clients without a loss came first"


def test_rounds_resume_exactly_from_the_recorded_losses() -> None:
    run, model = by_loss(), toy_model()
    whole = list(rounds(run, model, SimulationEngine(run, model, POPULATION)))
    for stop in range(1, 6):
        known: dict[str, float] = {}
        for result in whole[:stop]:
            known |= result.losses
        given = dict(known)
        rest = rounds(run, model, SimulationEngine(run, model, POPULATION), whole[stop - 1].server, stop, given)
        for one, two in zip(whole[stop:], rest, strict=True):
            assert one.cohort == two.cohort
            assert tensors.equal(one.server.params, two.server.params)
        assert given == known, "the caller's losses are not changed"


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [(Uniform(), 38 / 12), (Uniform(equal_weights=True), 2.5), (BySize(), 2.5), (BySize(False), 38 / 12)],
)
def test_equal_weights_count_every_update_alike(rule: Uniform, wanted: float) -> None:
    """Deltas 1, 2, 3, 4 of clients with 1, 2, 3 and 6 examples: the weighted mean is 38 / 12, the plain one 2.5."""
    model = toy_model()
    name = sorted(model.initial)[0]

    def answer(job: Job) -> Update:
        delta = {each: value * 0 + NAMES.index(job.client) + 1.0 for each, value in job.params.items()}
        return Update(job.client, delta, {}, SIZES[job.client], dict.fromkeys(delta, 1), 0.5 * SIZES[job.client])

    [result] = islice(rounds(run_with(rule, 4), model, ScriptedEngine(answer, NAMES)), 1)
    moved = (result.server.params[name] - model.initial[name]).mean()
    assert moved == pytest.approx(wanted, rel=1e-5)
    assert result.loss == pytest.approx(0.5 * sum(size**2 for size in SIZES.values()) / 12), "examples weight the loss"


# ---- refusals


@pytest.mark.parametrize("rule", [BySize(), PowerOfChoice()])
@pytest.mark.parametrize("sizes", [None, {"a": 1, "b": 2, "c": 0, "d": 6}, {"a": 1, "b": 2, "d": 6}])
def test_rules_by_size_need_the_size_of_every_client(rule: Uniform, sizes: dict[str, int] | None) -> None:
    run = replace(run_with(rule), examples=sizes)
    unknown = "a" if sizes is None else "c"
    said = rf"sampling\.name = '{rule.name}' needs the number of examples of every client, and that of '{unknown}'"
    with pytest.raises(OptionError, match=said):
        run.check_sampling(NAMES)
    run_with(rule).check_sampling(NAMES)


@pytest.mark.parametrize("candidates", [1, 5])
def test_candidates_are_from_the_cohort_to_all_clients(candidates: int) -> None:
    with pytest.raises(OptionError, match=rf"sampling\.candidates is {candidates}; it must be from 2, .*, to 4"):
        run_with(PowerOfChoice(candidates=candidates)).check_sampling(NAMES)
    for fits in (2, 4, None):
        run_with(PowerOfChoice(candidates=fits)).check_sampling(NAMES)


@pytest.mark.parametrize("name", [name for name in SAMPLING if name != "available"])  # which is a function
def test_a_rule_is_built_with_checked_options(name: str) -> None:
    assert build_sampling({"name": name, "equal_weights": True}).equal_weights
    with pytest.raises(OptionError, match=r"^sampling.equal_weights is 1; it must be true or false$"):
        build_sampling({"name": name, "equal_weights": 1})
    with pytest.raises(OptionError, match=r"^unknown key 'sampling.weights'; .* 'partita options sampling"):
        build_sampling({"name": name, "weights": 1})


def test_sampling_check_refuses_a_cohort_that_does_not_fit() -> None:
    with pytest.raises(RunError, match=r"federation\.cohort is 5, but there are 4 clients"):
        run_with(Uniform(), 5).check_sampling(NAMES)


@dataclass(frozen=True)
class Fixed(Uniform):
    """A rule that always asks the same clients."""

    cohort: tuple[str, ...] = ()
    name: ClassVar[str] = "fixed"

    def draw(self, key: Key, round: int, clients: Sequence[str], size: int, info: ClientInfo) -> list[str]:
        return list(self.cohort)


@pytest.mark.parametrize("cohort", [(), ("a", "a"), ("a", "b", "c"), ("a", "x")])
def test_cohorts_that_break_the_contract_are_refused(cohort: tuple[str, ...]) -> None:
    with pytest.raises(RunError, match=r"sampling 'fixed' drew .* in round 3; it must draw from 1 to 2 different"):
        run_with(Fixed(cohort=cohort)).draw_cohort(3, NAMES)
    assert run_with(Fixed(cohort=("d", "a"))).draw_cohort(3, NAMES) == ["d", "a"]
    assert run_with(Fixed(cohort=("b",))).draw_cohort(3, NAMES) == ["b"], "fewer than asked for"
