"""What privacy costs: the accountant against its library and closed forms, the ledger, and the noise for a budget."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import dp_accounting as library
import pytest
from dp_accounting import pld, rdp
from helpers import Clients, play, run_of, small
from scipy.optimize import brentq
from scipy.stats import norm

from partita.core.dp_settings import DPSGDSettings, PrivacyError
from partita.core.method import ClientRule, Method, PrivacyRelease
from partita.core.model import Model
from partita.core.options import OptionError
from partita.core.plan import Phase, Plan, RoundInfo
from partita.experiment.config import parse
from partita.experiment.runner import resume, start
from partita.methods import build as method_of
from partita.methods.fedavg import fedavg
from partita.privacy import budget, spending
from partita.privacy.accountant import INTERVAL, ORDERS, _event, epsilon
from partita.privacy.budget import Client, forecast_client, forecast_run
from partita.privacy.guard import PrivacyConfig, PrivacyGuard, make_private
from partita.privacy.spending import TRAINING, PrivacySpending, find_noise, releases_of, round_up

STEPS = PrivacyRelease(TRAINING, noise=1.2, share=0.2, count=30)
CHOICE = PrivacyRelease("layers", noise=4.0, share=1.0, count=3)


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
    assert epsilon({PrivacyRelease(TRAINING, noise, 1.0, times): 1}, 1e-5) == pytest.approx(wanted, rel=1e-3)
    # A client in another's place moves a sum by twice the clip.
    assert epsilon({PrivacyRelease(TRAINING, 2 * noise, 1.0): times}, 1e-5, of_clients=True) == pytest.approx(
        wanted, rel=1e-3
    )


def test_releases_are_events_of_the_library() -> None:
    gaussian = library.GaussianDpEvent
    assert _event(PrivacyRelease("", 2.0, 1.0), of_clients=False) == gaussian(2.0)
    assert _event(PrivacyRelease("", 2.0, 0.4), of_clients=False) == library.PoissonSampledDpEvent(0.4, gaussian(2.0))
    assert _event(PrivacyRelease("", 2.0, 1.0), of_clients=True) == gaussian(1.0)
    assert _event(PrivacyRelease("", 2.0, 2 / 5), of_clients=True) == library.SampledWithoutReplacementDpEvent(
        5, 2, gaussian(1.0)
    )
    once = replace(STEPS, count=1)
    assert epsilon({replace(STEPS, count=3): 2}, 1e-5, "rdp") == epsilon({once: 6}, 1e-5, "rdp")
    assert epsilon({once: 6}, 1e-5, "rdp") > epsilon({once: 5}, 1e-5, "rdp")


def test_nothing_costs_nothing_and_no_noise_costs_everything() -> None:
    assert epsilon({}, 1e-5) == epsilon({}, 1e-5, "rdp") == 0
    assert epsilon({PrivacyRelease(TRAINING, 0.0, 0.1): 1}, 1e-5) == math.inf


def account_of(**clients: tuple[float, int]) -> PrivacySpending:
    account = PrivacySpending(1e-5)
    for client, (share, count) in clients.items():
        account.charge(client, [PrivacyRelease(TRAINING, 1.0, share, count)])
    return account


@pytest.mark.parametrize(("target", "worst"), [(0.5, "b"), (20.0, "a")])
def test_the_noise_found_suffices_for_every_client(target: float, worst: str) -> None:
    """Who is worst off depends on the noise: sampling helps more against large noise than against small noise.

    Client a trains 200 steps with one example in twenty, client b one step with all of them.
    """
    account = PrivacySpending(
        1e-5,
        "rdp",
        False,
        {
            "a": Counter({PrivacyRelease(TRAINING, 1.0, 0.05): 200}),
            "b": Counter({PrivacyRelease(TRAINING, 1.0, 1.0): 1}),
        },
    )
    noise = find_noise(account, target)
    found = account.with_noise(noise)
    assert all(found.only(client).epsilon() <= target for client in ("a", "b"))
    assert noise == find_noise(account.only(worst), target)
    assert account.worst()[0] == "a"


def test_a_run_costs_what_it_costs_the_worst_placed_client() -> None:
    account = account_of(many=(0.02, 300), few=(0.2, 30), rare=(0.3, 4), same=(0.2, 30)).with_noise(5.0)
    costs = {client: epsilon(bill, 1e-5) for client, bill in account.bills.items()}
    client, cost = account.worst()
    assert cost == max(costs.values()) == costs[str(client)]
    assert client in ("few", "same")


def test_charging_twice_is_charging_the_sum() -> None:
    account = PrivacySpending(1e-5)
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
    with pytest.raises(PrivacyError, match="besides their training costs epsilon"):
        find_noise(account, 0.5)
    with pytest.raises(PrivacyError, match="no noise up to"):
        find_noise(account_of(a=(1.0, 10**7)), 1e-3)


class Choosing(ClientRule):
    uses_data = True
    release = PrivacyRelease("layers", noise=4.0, share=1.0)


def test_what_a_client_releases_in_a_round() -> None:
    poisson, shuffle = (
        replace(method_of("fedrep"), privacy=DPSGDSettings(1.0, 2.0, kind)) for kind in ("poisson", "shuffle")
    )
    model = small()
    run = run_of(poisson, batch_size=4, epochs=2)
    plan = poisson.plan(model, RoundInfo(0, 3, "a"))
    assert len(plan.phases) == 2
    first, second = plan.phases
    epochs = [phase.epochs or 2 for phase in (first, second)]
    assert releases_of(run, plan, 10) == [PrivacyRelease(TRAINING, 2.0, 0.4, 3 * each) for each in epochs]
    assert releases_of(run_of(shuffle, epochs=2), plan, 10) == [
        PrivacyRelease(TRAINING, 2.0, 1.0, each) for each in epochs
    ]
    some = run_of(replace(fedavg(), privacy=DPSGDSettings(1.0, 2.0, "shuffle")), steps=4)
    plain = fedavg().plan(model, RoundInfo(0, 3, "a"))
    assert releases_of(some, plain, 10) == [
        PrivacyRelease(TRAINING, 2.0, 1.0, 2)
    ]  # the fourth step is of a second epoch
    choosing = Method("choosing", client_rules=(Choosing(),), privacy=DPSGDSettings(1.0, 2.0))
    assert releases_of(run_of(choosing), plain, 3) == [Choosing.release, PrivacyRelease(TRAINING, 2.0, 1.0, 1)]


def guarded(privacy_config: PrivacyConfig, **more: object) -> PrivacyGuard:
    return make_private(run_of(fedavg(), **more), small(), SIZES, privacy_config)  # type: ignore[arg-type]


SIZES = {"a": 12, "b": 40, "c": 20, "d": 16}


def test_a_budget_is_spent_as_planned() -> None:
    guard = guarded(PrivacyConfig(epsilon=0.5), count=3, cohort=2)
    assert guard.planned is not None
    assert 0.49 < guard.planned <= 0.5
    spent = []
    for each in play(guard.run, small(), Clients(**SIZES)):
        guard.charge(each.number, each.cohort, {})
        spent.append(guard.spent())
    assert spent == sorted(spent)
    assert spent[-1] == guard.planned
    assert guard.forecast(2).epsilon() == spent[1]
    for number in (3, 4):
        guard.charge(number, SIZES, {})
    with pytest.raises(PrivacyError, match=r"beyond the budget of 0\.5"):
        guard.spent()


def test_whoever_is_asked_more_often_decides() -> None:
    guard = guarded(PrivacyConfig(noise=5.0), count=6, cohort=1)
    asked = Counter(guard.run.draw_cohort(number, list(SIZES))[0] for number in range(6))
    assert max(asked.values()) < 6
    costs = {
        client: epsilon(dict.fromkeys(releases_of(guard.run, plan_of(guard), SIZES[client]), times), 1e-5)
        for client, times in asked.items()
    }
    assert guard.planned == pytest.approx(max(costs.values()))


def plan_of(guard: PrivacyGuard):  # type: ignore[no-untyped-def]
    return guard.run.method.plan(small(), RoundInfo(0, 1, "a"))


@pytest.mark.parametrize(
    ("privacy_config", "said"),
    [
        ({}, "neither epsilon nor noise"),
        ({"epsilon": 0.0}, r"privacy\.epsilon is 0"),
        ({"noise": 1.0, "delta": 0.0}, r"privacy\.delta is 0"),
        ({"noise": 1.0, "unit": "client", "sampling": "shuffle"}, r"privacy\.sampling is about"),
        ({"noise": 1.0, "unit": "client", "microbatch": 2}, r"privacy\.microbatch is about"),
        ({"noise": 1.0, "delta": 0.1}, r"must be well below 0\.025"),
        ({"noise": 0.1, "epsilon": 1.0}, "remove privacy.noise to have it computed"),
    ],
)
def test_terms_that_promise_nothing_are_refused(privacy_config: dict[str, object], said: str) -> None:
    with pytest.raises(PrivacyError, match=said):
        guarded(PrivacyConfig(**privacy_config))  # type: ignore[arg-type]


def test_delta_is_small_beside_the_examples() -> None:
    assert guarded(PrivacyConfig(noise=5.0)).privacy_config.delta == 1e-5
    many = make_private(run_of(fedavg()), small(), {"a": 10**6}, PrivacyConfig(noise=5.0))
    assert many.privacy_config.delta == pytest.approx(1e-7)


def test_sizes_that_are_not_known_here() -> None:
    sizes = {"here": 12, "there": 0}
    with pytest.raises(PrivacyError, match="find the noise with 'partita budget'"):
        make_private(run_of(fedavg()), small(), sizes, PrivacyConfig(epsilon=1.0))
    guard = make_private(run_of(fedavg()), small(), sizes, PrivacyConfig(noise=1.0))
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
    guard = guarded(PrivacyConfig(noise=20.0), count=2, cohort=2)
    found = forecast_run(guard)
    assert found.after[2] == found.epsilon == guard.planned
    assert found.instead["twice the rounds"] > 20.0 > found.instead["half the batch"]
    unknown = make_private(run_of(fedavg()), small(), {"a": 0}, PrivacyConfig(noise=1.0))
    with pytest.raises(PrivacyError, match="give --examples instead"):
        forecast_run(unknown)


CONFIG = {
    "method": {"name": "fedavg"},
    "split": {"name": "iid", "clients": 3},
    "model": {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 4},
    "training": {"lr": 0.1, "optimizer": "sgd", "batch_size": 64, "steps": 1},
    "federation": {"cohort": 2},
    "evaluate": {"every": 9, "personal_every": 9, "drift": False},
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
    with pytest.raises(PrivacyError, match=r"started with noise 2, .* privacy\.noise = 2"):
        list(resume(parse(other), tmp_path / "part"))


def test_the_table_is_checked() -> None:
    with pytest.raises(OptionError, match=r"'privacy\.epsilom'; did you mean 'epsilon'"):
        parse({**CONFIG, "privacy": {"epsilom": 2.0}})
    assert parse({"method": {"name": "fedavg"}}).privacy is None


# ---- what a mutation check found untested


@pytest.mark.parametrize(
    ("share", "count", "target"),
    [(0.01, 10, 3.0), (0.001, 1, 8.0), (0.0001, 1, 1e-3), (0.5, 400, 1.0)],
    ids=["below the clip", "far below it", "where epsilon falls to zero", "far above the clip"],
)
def test_the_least_noise_is_found_wherever_it_lies(share: float, count: int, target: float) -> None:
    account = PrivacySpending(1e-5, "rdp")
    account.charge("a", [PrivacyRelease(TRAINING, 1.0, share, count)])
    noise = find_noise(account, target)
    assert account.with_noise(noise).epsilon() <= target < account.with_noise(0.99 * noise).epsilon()


@pytest.mark.parametrize(
    ("noise", "rounded"),
    [
        (1.2341, 1.235),
        (123.41, 123.5),
        (0.012341, 0.01235),
        (1.234, 1.234),
        (0.5, 0.5),
        (10.0, 10.0),
        (9.9991, 10.0),
        (0.1 + 0.2, 0.3),
    ],
)
def test_a_noise_is_rounded_up_to_four_digits(noise: float, rounded: float) -> None:
    assert round_up(noise) == rounded


def costing(monkeypatch: pytest.MonkeyPatch, cost: Callable[[float], float], *clients: str) -> PrivacySpending:
    """An account where epsilon is this function of the noise, and the same for all these clients."""
    monkeypatch.setattr(spending, "epsilon", lambda bill, *_: max((cost(release.noise) for release in bill), default=0))
    release = PrivacyRelease(TRAINING, 1.0, 1.0)
    return PrivacySpending(1e-5, bills={client: Counter({release: 1}) for client in clients})


@pytest.mark.parametrize("noise", [0.002, 0.5, 2.0, 30.0, 149.0, 999.0])
def test_a_noise_that_costs_the_budget_exactly_is_found(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    """It is on the grid of four digits, and as large as the noise may be."""
    assert find_noise(costing(monkeypatch, lambda other: 1 / other, "a", "b"), 1 / noise) == noise


def test_no_noise_above_the_largest_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PrivacyError, match=r"no noise up to 1000 keeps epsilon at 0\.000998"):
        find_noise(costing(monkeypatch, lambda noise: 1 / noise, "a"), 1 / 1002)


@pytest.mark.parametrize("step", [0.37051, 1.5001, 2.00101, 17.3302, 60.0901])
def test_the_noise_found_suffices_where_the_cost_falls_in_steps(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """A search by secants ends on either side of a step; below it, the noise is raised until it suffices."""
    account = costing(monkeypatch, lambda noise: 3.0 if noise < step else 1.0, "a")
    assert step <= find_noise(account, 2.0) <= round_up(1.0004 * step)


def test_who_releases_nothing_needs_no_noise() -> None:
    assert find_noise(PrivacySpending(1e-5), 1.0) == 0.0
    assert find_noise(PrivacySpending(1e-5, bills={"a": Counter()}), 1.0) == 0.0


def test_a_client_is_billed_for_its_steps_and_its_share() -> None:
    [bill] = Client(examples=100, batch=30, rounds=6, epochs=2).bill(5, 1e-6).bills.values()
    assert bill == {PrivacyRelease(TRAINING, 1.0, 0.3): 2 * 4 * 5}
    account = Client(examples=10, batch=30, rounds=6).bill(6, 1e-6)
    assert account.bills == {"client": {PrivacyRelease(TRAINING, 1.0, 1.0): 6}}
    assert account.delta == 1e-6


@pytest.fixture
def plain_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epsilon is steps times share over noise, and so the noise for an epsilon is known in closed form."""

    def cost(account: PrivacySpending) -> float:
        return max(sum(r.share * n / r.noise for r, n in bill.items()) for bill in account.bills.values())

    monkeypatch.setattr(PrivacySpending, "epsilon", cost)
    monkeypatch.setattr(budget, "find_noise", lambda account, target: cost(account.with_noise(1.0)) / target)


@pytest.mark.usefixtures("plain_costs")
def test_a_forecast_of_one_client_says_what_other_choices_would_change() -> None:
    client = Client(examples=100, batch=10, rounds=6)  # ten steps a round, each with a tenth of the examples
    found = forecast_client(client, None, 2.0, None)
    assert found.after == {2: 1.0, 3: 1.5, 5: 2.5, 6: 3.0}
    assert (found.unit, found.noise, found.epsilon, found.delta) == ("example", 2.0, 3.0, 1e-5)
    assert found.instead == pytest.approx(
        {"twice the rounds": 4.0, "half the batch": 2.0, "twice the examples": 2.0, "half the epsilon": 4.0}
    )
    assert found.to_text().splitlines() == [
        "noise 2 times the clip: epsilon 3 at delta 1e-05, by example",
        "",
        *["rounds  epsilon", "     2  1", "     3  1.5", "     5  2.5", "     6  3"],
        "",
        "for the same epsilon, the noise would be",
        "         4  with twice the rounds",
        "         2  with half the batch",
        "         2  with twice the examples",
        "         4  with half the epsilon",
    ]
    assert forecast_client(client, 1.5, None, None).noise == 4.0
    large = Client(examples=10**6, batch=10, rounds=1)
    assert forecast_client(large, None, 2.0, None).delta == pytest.approx(1e-7)
    assert forecast_client(large, None, 2.0, 1e-3).delta == 1e-3


@pytest.mark.usefixtures("plain_costs")
def test_the_other_choices_of_a_forecast_are_twice_and_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share times steps stays the same with half the batch, so the bills themselves are looked at."""
    seen = []
    monkeypatch.setattr(budget, "find_noise", lambda account, target: seen.append((account, target)) or 1.0)
    forecast_client(Client(examples=100, batch=10, rounds=6), None, 2.0, None)
    bills = [dict(account.bills["client"]) for account, _ in seen]
    assert bills == [
        {PrivacyRelease(TRAINING, 1.0, 0.1): 120},
        {PrivacyRelease(TRAINING, 1.0, 0.05): 120},
        {PrivacyRelease(TRAINING, 1.0, 0.05): 120},
        {PrivacyRelease(TRAINING, 1.0, 0.1): 60},
    ]
    assert [target for _, target in seen] == [3.0, 3.0, 3.0, 1.5]
    seen.clear()
    guard = guarded(PrivacyConfig(noise=20.0), count=3, batch_size=4, steps=2)
    forecast_run(guard)
    assert [max(sum(bill.values()) for bill in account.bills.values()) for account, _ in seen] == [12, 6, 6]
    half, whole = ({release.share for release in account.bills["b"]} for account, _ in seen[1:])
    assert (half, whole) == ({2 / 40}, {4 / 40})
    seen.clear()
    forecast_run(guarded(PrivacyConfig(noise=20.0), count=1, batch_size=1, steps=2))
    assert {release.share for release in seen[1][0].bills["b"]} == {1 / 40}, "a batch of one cannot be halved"
    seen.clear()
    forecast_client(Client(examples=12, batch=1, rounds=1), None, 2.0, None)
    assert dict(seen[1][0].bills["client"]) == {PrivacyRelease(TRAINING, 1.0, 1 / 12): 12}
    seen.clear()
    of_clients = forecast_run(guarded(PrivacyConfig(unit="client", noise=20.0, accountant="rdp"), count=2, cohort=2))
    assert list(of_clients.instead) == ["twice the rounds", "half the epsilon"]


@pytest.mark.usefixtures("plain_costs")
def test_without_noise_no_other_noise_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivacySpending, "epsilon", lambda account: math.inf)
    found = forecast_client(Client(examples=100, batch=10, rounds=6), None, 0.0, None)
    assert (found.epsilon, found.instead) == (math.inf, {})
    assert "for the same epsilon" not in found.to_text()


def test_what_is_charged_beside_training() -> None:
    """Only a rule that looks releases anything, and only as it says it does."""
    plan = fedavg().plan(small(), RoundInfo(0, 3, "a"))
    quiet = replace(fedavg(), client_rules=(Quiet(),))
    assert releases_of(run_of(quiet), plan, 10) == []
    assert releases_of(run_of(replace(fedavg(), client_rules=(Looking(),))), plan, 10) == [], (
        "it says nothing of a release"
    )
    assert releases_of(run_of(replace(fedavg(), client_rules=(Choosing(),))), plan, 10) == [Choosing.release]
    private = replace(fedavg(), client_rules=(Choosing(),), privacy=DPSGDSettings(1.0, 2.0))
    assert releases_of(run_of(private), plan, 0) == [Choosing.release], "of no examples nothing is trained"


class Looking(ClientRule):
    uses_data = True


class Quiet(ClientRule):
    release = PrivacyRelease("layers", noise=4.0, share=1.0)


@pytest.mark.usefixtures("plain_costs")
def test_a_plan_knows_of_twice_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains one epoch for every round of the run, so that twice the rounds cost four times as much."""
    seen = []
    monkeypatch.setattr(budget, "find_noise", lambda account, target: seen.append(account) or 1.0)

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        return Plan((Phase(model.all_names(), epochs=round_info.rounds),), up=model.all_names(), down=model.all_names())

    run = run_of(Method("growing", plan), 3, batch_size=40)
    forecast_run(make_private(run, small(), {"b": 40}, PrivacyConfig(noise=20.0)))
    assert [sum(account.bills["b"].values()) for account in seen] == [36, 18, 9]


def test_a_guard_says_what_it_resolved() -> None:
    found = guarded(PrivacyConfig(epsilon=2.0, accountant="rdp"), count=1)
    assert found.run.method.privacy is not None
    assert found.privacy_config.noise == found.about()["noise"] == found.run.method.privacy.noise
    assert (found.about()["sampling"], found.about()["delta"]) == ("poisson", 1e-5)
    of_clients = guarded(PrivacyConfig(unit="client", noise=3.0, accountant="rdp"), count=1, cohort=2)
    assert (of_clients.about()["sampling"], of_clients.about()["unit"]) == ("cohort", "client")
