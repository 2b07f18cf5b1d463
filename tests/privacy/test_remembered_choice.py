"""A remembered layer choice is charged when it is made: never more often, and never less, whatever a client forgets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import pld
from helpers import Clients, play, toy_run
from mechanism_choice import check_choice
from torch import Tensor

from partita.core.client import ClientState
from partita.core.client_rule import Context, PrivacyRelease
from partita.core.data import Batch, Population
from partita.core.dp_settings import PrivacySettings
from partita.core.model import TokenChoice, layer_tag
from partita.core.plan import RoundInfo, share_everything
from partita.core.rng import Key
from partita.core.rounds import initial_server
from partita.core.settings import Run
from partita.core.tensors import Tensors
from partita.methods.safl import safl
from partita.methods.selectors import ROUND, Random, TopLayers, spread_evenly
from partita.privacy.accountant import INTERVAL
from partita.privacy.guard import PrivacyGuard, make_private
from partita.storage.client_store import MemoryStore
from partita.testing.toy import ToyTransformer

FOUR = Clients(a=5, b=6, c=7, d=8)
SIZES = {client: len(FOUR[client].train) for client in FOUR.clients}
CHOICE = PrivacyRelease("layer choice", 2.0, 0.5)
ROUNDS, BATCH, NOISE, DELTA = 15, 4, 1.5, 1e-4


@dataclass
class Asked(ToyTransformer):
    """Counts the rounds in which a client of a certain size ranks its layers."""

    asked: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__(width=4, layers=4)

    def attention(self, params: Tensors, batch: Batch, tokens: TokenChoice) -> dict[str, Tensor]:
        self.asked["rankings"] += 1
        return super().attention(params, batch, tokens)


class Forgetful(MemoryStore):
    """Loses what clients remember."""

    def load(self, client: str, round: int) -> ClientState:
        return ClientState()


def guarded(every: int, agree: Any = False, rounds: int = ROUNDS, probe: float = 0.5, **more: Any) -> PrivacyGuard:
    run = toy_run(safl(k=1, noise=2.0, probe=probe, every=every, agree=agree), rounds, batch_size=BATCH, **more)
    return make_private(run, Asked(), SIZES, PrivacySettings(noise=NOISE, delta=DELTA))


def epsilon_of_library(rankings: int, steps: int, examples: int) -> float:
    accountant = pld.PLDAccountant(value_discretization_interval=INTERVAL)
    training = dp_accounting.GaussianDpEvent(NOISE)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(BATCH / examples, training), steps)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(2.0)), rankings)
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("agree", [False, "votes", "scores"])
@pytest.mark.parametrize(("every", "rankings"), [(15, 1), (1, 15), (4, 4), (100, 1)])
def test_epsilon_is_that_of_the_rankings_made(agree: Any, every: int, rankings: int) -> None:
    guard = guarded(every, agree)
    spending = guard.forecast(ROUNDS)
    bill = spending.bills["a"]
    assert bill[CHOICE] == rankings
    [(training, steps)] = [(release, count) for release, count in bill.items() if release != CHOICE]
    assert training.noise == NOISE
    assert spending.only("a").epsilon() == pytest.approx(epsilon_of_library(rankings, steps, SIZES["a"]), rel=1e-9)


def count_rankings(run: Run, store: Any, rounds_of: dict[str, set[int]]) -> Counter[str]:
    """Play rounds with chosen cohorts, and return how often each client ranked its layers."""
    from partita.core.client import begin_round
    from partita.core.rounds import make_job

    found = Counter[str]()
    for client, numbers in rounds_of.items():
        state = ClientState()
        for number in sorted(numbers):
            model = Asked()
            job, _ = make_job(run, model, initial_server(run, model), number, client)
            each = begin_round(run, model, job, ClientState() if store == "forgets" else state, FOUR[client].train)
            [rule] = run.method.client_rules
            _, remembered = rule.finish({}, {}, each.ctx)
            kept = {slot: {n: v for n, v in part.items() if n in each.plan.train} for slot, part in remembered.items()}
            state = ClientState({}, {slot: {**state.memory.get(slot, {}), **part} for slot, part in kept.items()})
            found[client] += model.asked["rankings"]
    return found


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("memory", ["remembers", "forgets"])
@pytest.mark.parametrize("every", [1, 3, 15])
def test_no_client_ranks_more_often_than_it_is_charged(memory: str, every: int) -> None:
    """A client from the start, one that joins later, one that misses rounds, and one that comes once."""
    guard = guarded(every, probe=1.0)  # so that every ranking runs the model
    rounds_of = {"a": set(range(ROUNDS)), "b": set(range(7, ROUNDS)), "c": {0, 2, 6, 11, 12}, "d": {4}}
    for number in range(ROUNDS):
        cohort = [client for client, numbers in rounds_of.items() if number in numbers]
        guard.charge(number, cohort, {})
    charged = {client: bill[PrivacyRelease("layer choice", 2.0, 1.0)] for client, bill in guard.account.bills.items()}
    ranked = count_rankings(guard.run, memory, rounds_of)
    assert ranked == charged, "neither more, so that epsilon is a bound, nor fewer"
    assert charged == {client: sum(n % every == 0 for n in numbers) for client, numbers in rounds_of.items()}


@pytest.mark.slow
def test_a_client_that_joins_later_trains_spread_layers_until_the_next_ranking() -> None:
    model = Asked()
    run = toy_run(safl(k=2, noise=2.0, probe=1.0, every=4), 9)
    rule = run.method.client_rules[0]
    assert isinstance(rule, TopLayers)
    assert rule.release_every == 4
    layers = [f"layer.{number}" for number in range(4)]
    sent = [_layers(model, each.sent["a"]) for each in play(run, model, FOUR, store=Forgetful())]
    for number in (1, 2, 3, 5, 6, 7):
        assert sent[number] == set(spread_evenly(layers, 2))
    remembered = [_layers(model, each.sent["a"]) for each in play(run, model, FOUR)]
    assert remembered[0] == remembered[1] == remembered[3] == sent[0]
    assert remembered[4] == remembered[7]


def test_a_choice_lasts_until_the_client_takes_part_in_a_round_with_rankings() -> None:
    """It missed round 4, so in rounds 5 to 7 it trains what it chose in round 0, which costs nothing."""
    run = toy_run(safl(k=1, noise=2.0, probe=1.0, every=4), 9)
    assert count_rankings(run, "remembers", {"a": {0, 5, 7, 8}}) == {"a": 2}
    [rule] = run.method.client_rules
    assert isinstance(rule, TopLayers)
    model = Asked()
    names = model.names("layer.2")  # not the layer that a client without a choice trains
    plan = share_everything(model, RoundInfo(0, 9, "a"))
    ctx = Context(model, plan, model.initial, {}, {ROUND: {name: torch.tensor(0) for name in names}}, 0.1, {})
    for number in (1, 5, 7):
        chosen = rule.narrow(plan, FOUR["a"].train, replace(ctx, round_info=RoundInfo(number, 9, "a")), Key(0))
        assert _layers(model, chosen.names) == {"layer.2"}
    assert model.asked["rankings"] == 0


def test_without_noise_clients_choose_when_they_come() -> None:
    run = toy_run(safl(k=1, probe=1.0, every=4), 9)
    assert count_rankings(run, "remembers", {"a": {1, 3, 5, 6}}) == {"a": 2}
    assert count_rankings(run, "forgets", {"a": {1, 3, 5, 6}}) == {"a": 4}


@pytest.mark.slow
def test_audit_of_the_choice_uses_the_rounds_in_which_it_is_made() -> None:
    population: Population = FOUR
    model = Asked()
    run = toy_run(safl(k=1, noise=2.0, probe=0.5, every=4), 9)
    checks = check_choice(run, model, population, initial_server(run, model))
    assert [check.what.partition(":")[0] for check in checks] == ["layer choice"] * 3
    assert all(check.p > 1e-6 for check in checks)
    common = toy_run(safl(k=1, select="random", common=True, every=4), 9)
    assert check_choice(common, model, population, initial_server(common, model)) == []
    assert isinstance(common.method.client_rules[0].select, Random)  # type: ignore[attr-defined]


def _layers(model: ToyTransformer, names: frozenset[str]) -> set[str]:
    return {layer for name in names if (layer := layer_tag(model.tags[name]))}
