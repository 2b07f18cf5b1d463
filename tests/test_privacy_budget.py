"""What privacy costs: the accountant against its library and closed forms, the ledger, and the noise for a budget."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import dp_accounting as library
import pytest
from dp_accounting import pld, rdp
from helpers import Clients, play, run_of, small
from scipy.optimize import brentq
from scipy.stats import norm

from partita.config import parse
from partita.core.method import Local, Method, Release
from partita.core.options import OptionError
from partita.core.plan import Turn
from partita.core.private import PrivacyError, Private
from partita.methods import build as method_of
from partita.methods.fedavg import fedavg
from partita.play import resume, start
from partita.privacy.accountant import INTERVAL, ORDERS, epsilon
from partita.privacy.budget import Client, forecast_client, forecast_run
from partita.privacy.guard import Guard, Terms, protect
from partita.privacy.ledger import TRAINING, Account, find_noise, releases_of

STEPS = Release(TRAINING, noise=1.2, share=0.2, count=30)
CHOICE = Release("layers", noise=4.0, share=1.0, count=3)


def theirs(accountant: library.PrivacyAccountant) -> float:
    """The same releases, written by hand as the library's events."""
    accountant.compose(library.PoissonSampledDpEvent(0.2, library.GaussianDpEvent(1.2)), 30)
    accountant.compose(library.GaussianDpEvent(4.0), 3)
    return float(accountant.get_epsilon(1e-5))


def test_epsilon_is_that_of_dp_accounting() -> None:
    bill = Counter({STEPS: 1, CHOICE: 1})
    assert epsilon(bill, 1e-5) == theirs(pld.PLDAccountant(value_discretization_interval=INTERVAL))
    assert epsilon(bill, 1e-5) == pytest.approx(theirs(pld.PLDAccountant()), rel=1e-3)
    assert epsilon(bill, 1e-5, "rdp") == pytest.approx(theirs(rdp.RdpAccountant(ORDERS)), rel=1e-12)
    assert epsilon(bill, 1e-5, "rdp") > epsilon(bill, 1e-5)


def gaussian_epsilon(noise: float, delta: float) -> float:
    """The exact curve of the Gaussian mechanism (Balle and Wang 2018)."""

    def excess(eps: float) -> float:
        near, far = 0.5 / noise - eps * noise, -0.5 / noise - eps * noise
        return float(norm.cdf(near) - math.exp(eps) * norm.cdf(far) - delta)

    return float(brentq(excess, 0, 100))


@pytest.mark.parametrize(("noise", "times"), [(1.0, 1), (3.0, 20)])
def test_gaussian_releases_have_a_closed_form(noise: float, times: int) -> None:
    wanted = gaussian_epsilon(noise / math.sqrt(times), 1e-5)
    assert epsilon({Release(TRAINING, noise, 1.0, times): 1}, 1e-5) == pytest.approx(wanted, rel=1e-3)
    # A client in another's place moves a sum by twice the clip.
    assert epsilon({Release(TRAINING, 2 * noise, 1.0): times}, 1e-5, of_clients=True) == pytest.approx(wanted, rel=1e-3)


def test_nothing_costs_nothing_and_no_noise_costs_everything() -> None:
    assert epsilon({}, 1e-5) == epsilon({}, 1e-5, "rdp") == 0
    assert epsilon({Release(TRAINING, 0.0, 0.1): 1}, 1e-5) == math.inf


def account_of(**clients: tuple[float, int]) -> Account:
    account = Account(1e-5)
    for client, (share, count) in clients.items():
        account.charge(client, [Release(TRAINING, 1.0, share, count)])
    return account


def test_a_run_costs_what_it_costs_the_worst_placed_client() -> None:
    account = account_of(many=(0.02, 300), few=(0.2, 30), rare=(0.3, 4), same=(0.2, 30)).with_noise(5.0)
    costs = {client: epsilon(bill, 1e-5) for client, bill in account.bills.items()}
    client, cost = account.worst()
    assert cost == max(costs.values()) == costs[str(client)]
    assert client in ("few", "same")


def test_charging_twice_is_charging_the_sum() -> None:
    account = Account(1e-5)
    account.charge("a", [STEPS])
    account.charge("a", [replace(STEPS, count=10)])
    assert account.epsilon() == epsilon({replace(STEPS, count=40): 1}, 1e-5)


def test_the_noise_that_is_found_costs_the_budget_and_no_more() -> None:
    account = account_of(few=(0.2, 30), many=(0.05, 120))
    noise = find_noise(account, 0.5)
    assert 0.5 * 0.995 < account.with_noise(noise).epsilon() <= 0.5
    spent = account.with_noise(9.0).epsilon()
    assert find_noise(account, spent) == pytest.approx(9.0, rel=2e-3)


def test_a_choice_is_charged_and_leaves_less_for_training() -> None:
    account = account_of(a=(0.2, 30))
    alone = find_noise(account, 0.5)
    account.charge("a", [replace(CHOICE, noise=20.0)])
    assert find_noise(account, 0.5) > 1.05 * alone
    account.charge("a", [CHOICE])
    with pytest.raises(PrivacyError, match="beside their training costs epsilon"):
        find_noise(account, 0.5)
    with pytest.raises(PrivacyError, match="no noise up to"):
        find_noise(account_of(a=(1.0, 10**7)), 1e-3)


class Choosing(Local):
    looks = True
    release = Release("layers", noise=4.0, share=1.0)


def test_what_a_client_releases_in_a_round() -> None:
    poisson, shuffle = (
        replace(method_of("fedrep"), privacy=Private(1.0, 2.0, kind)) for kind in ("poisson", "shuffle")
    )
    model = small()
    run = run_of(poisson, batch_size=4, epochs=2)
    plan = poisson.plan(model, Turn(0, 3, "a"))
    assert len(plan.phases) == 2
    first, second = plan.phases
    epochs = [phase.epochs or 2 for phase in (first, second)]
    assert releases_of(run, plan, 10) == [Release(TRAINING, 2.0, 0.4, 3 * each) for each in epochs]
    assert releases_of(run_of(shuffle, epochs=2), plan, 10) == [Release(TRAINING, 2.0, 1.0, each) for each in epochs]
    some = run_of(replace(fedavg(), privacy=Private(1.0, 2.0, "shuffle")), steps=4)
    plain = fedavg().plan(model, Turn(0, 3, "a"))
    assert releases_of(some, plain, 10) == [Release(TRAINING, 2.0, 1.0, 2)]  # the fourth step is of a second epoch
    choosing = Method("choosing", local=(Choosing(),), privacy=Private(1.0, 2.0))
    assert releases_of(run_of(choosing), plain, 3) == [Choosing.release, Release(TRAINING, 2.0, 1.0, 1)]


def guarded(terms: Terms, **more: object) -> Guard:
    return protect(run_of(fedavg(), **more), small(), SIZES, terms)  # type: ignore[arg-type]


SIZES = {"a": 12, "b": 40, "c": 20, "d": 16}


def test_a_budget_is_spent_as_planned() -> None:
    guard = guarded(Terms(epsilon=0.5), count=3, cohort=2)
    assert guard.planned is not None
    assert 0.49 < guard.planned <= 0.5
    spent = []
    for each in play(guard.run, small(), Clients(**SIZES)):
        guard.charge(each.number, each.cohort, {})
        spent.append(guard.spent())
    assert spent == sorted(spent)
    assert spent[-1] == guard.planned
    assert guard.ahead(2).epsilon() == spent[1]
    for number in (3, 4):
        guard.charge(number, SIZES, {})
    with pytest.raises(PrivacyError, match=r"beyond the budget of 0\.5"):
        guard.spent()


def test_whoever_is_asked_more_often_decides() -> None:
    guard = guarded(Terms(noise=5.0), count=6, cohort=1)
    asked = Counter(guard.run.draw_cohort(number, list(SIZES))[0] for number in range(6))
    assert max(asked.values()) < 6
    costs = {
        client: epsilon(dict.fromkeys(releases_of(guard.run, plan_of(guard), SIZES[client]), times), 1e-5)
        for client, times in asked.items()
    }
    assert guard.planned == pytest.approx(max(costs.values()))


def plan_of(guard: Guard):  # type: ignore[no-untyped-def]
    return guard.run.method.plan(small(), Turn(0, 1, "a"))


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({}, "neither epsilon nor noise"),
        ({"epsilon": 0.0}, r"privacy\.epsilon is 0"),
        ({"noise": 1.0, "delta": 0.0}, r"privacy\.delta is 0"),
        ({"noise": 1.0, "unit": "client", "sampling": "shuffle"}, r"privacy\.sampling is about"),
        ({"noise": 1.0, "unit": "client", "chunk": 2}, r"privacy\.chunk is about"),
        ({"noise": 1.0, "delta": 0.1}, r"must be well below 0\.025"),
        ({"noise": 0.1, "epsilon": 1.0}, "leave the noise out to have it found"),
    ],
)
def test_terms_that_promise_nothing_are_refused(terms: dict[str, object], said: str) -> None:
    with pytest.raises(PrivacyError, match=said):
        guarded(Terms(**terms))  # type: ignore[arg-type]


def test_delta_is_small_beside_the_examples() -> None:
    assert guarded(Terms(noise=5.0)).terms.delta == 1e-5
    many = protect(run_of(fedavg()), small(), {"a": 10**6}, Terms(noise=5.0))
    assert many.terms.delta == pytest.approx(1e-7)


def test_sizes_that_are_not_known_here() -> None:
    sizes = {"here": 12, "there": 0}
    with pytest.raises(PrivacyError, match="find the noise with 'partita budget'"):
        protect(run_of(fedavg()), small(), sizes, Terms(epsilon=1.0))
    guard = protect(run_of(fedavg()), small(), sizes, Terms(noise=1.0))
    guard.charge(0, ["here", "there"], {})
    assert guard.planned is None
    assert guard.spent() is None


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(PrivacyError, match=r"pip install 'partita\[privacy\]'"):
        epsilon({STEPS: 1}, 1e-5)


@pytest.mark.slow
def test_a_forecast_of_one_client() -> None:
    found = forecast_client(Client(examples=100, batch=10, rounds=6), 0.3, None, None)
    assert list(found.after) == [2, 3, 5, 6]
    assert found.after[6] == found.epsilon <= 0.3
    assert list(found.after.values()) == sorted(found.after.values())
    assert found.instead["twice the rounds"] > found.noise > found.instead["twice the examples"]
    assert found.instead["half the epsilon"] > 1.5 * found.noise
    assert f"noise {found.noise:g}" in found.to_text()
    with pytest.raises(PrivacyError, match="--epsilon, for which"):
        forecast_client(Client(100, 10, 6), None, None, None)
    with pytest.raises(PrivacyError, match="--batch is 0"):
        forecast_client(Client(100, 0, 6), 1.0, None, None)


@pytest.mark.slow
def test_a_forecast_of_a_run() -> None:
    guard = guarded(Terms(noise=20.0), count=2, cohort=2)
    found = forecast_run(guard)
    assert found.after[2] == found.epsilon == guard.planned
    assert found.instead["twice the rounds"] > 20.0 > found.instead["half the batch"]
    unknown = protect(run_of(fedavg()), small(), {"a": 0}, Terms(noise=1.0))
    with pytest.raises(PrivacyError, match="give --examples instead"):
        forecast_run(unknown)


CONFIG = {
    "method": {"name": "fedavg"},
    "split": {"kind": "iid", "clients": 3},
    "model": {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 4},
    "training": {"lr": 0.1, "optimizer": "sgd", "batch_size": 64, "steps": 1},
    "federation": {"cohort": 2},
    "evaluate": {"every": 9, "personal": 9, "drift": False},
    "privacy": {"noise": 2.0, "accountant": "rdp", "repeatable": True},
    "rounds": 2,
}


def test_a_run_records_what_it_spent_and_goes_on_from_there(tmp_path: Path) -> None:
    whole = list(start(parse(CONFIG), tmp_path / "whole"))
    assert [row["train_loss"] for row in whole] == [None] * 2
    spent = [row["privacy"]["epsilon"] for row in whole]
    assert spent == sorted(spent)
    about = json.loads((tmp_path / "whole" / "privacy.json").read_text())
    assert (about["planned"], about["noise"], about["unit"]) == (spent[-1], 2.0, "example")
    part = start(parse(CONFIG), tmp_path / "part")
    next(part)
    part.close()
    [again] = resume(parse(CONFIG), tmp_path / "part")
    assert again["privacy"] == whole[-1]["privacy"]
    assert (
        json.loads((tmp_path / "part" / "result.json").read_text())["digest"]
        == (json.loads((tmp_path / "whole" / "result.json").read_text())["digest"])
    )
    other = {**CONFIG, "privacy": {"noise": 3.0, "accountant": "rdp", "repeatable": True}}
    with pytest.raises(PrivacyError, match=r"begun with the noise 2, .* privacy\.noise = 2"):
        list(resume(parse(other), tmp_path / "part"))


def test_the_table_is_checked() -> None:
    with pytest.raises(OptionError, match=r"'privacy\.epsilom'; did you mean 'epsilon'"):
        parse({**CONFIG, "privacy": {"epsilom": 2.0}})
    assert parse({"method": {"name": "fedavg"}}).privacy is None
