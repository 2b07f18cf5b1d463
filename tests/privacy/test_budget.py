"""Privacy accounting: spending, noise search and forecasts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import Clients, play, toy_model, toy_run

from partita.compression.prune import prune
from partita.core.client_rule import ClientRule, PrivacyRelease
from partita.core.dp_settings import PrivacyError, PrivacySettings
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.options import OptionError
from partita.core.plan import Phase, Plan, RoundInfo
from partita.experiment.config import parse
from partita.experiment.runner import resume, start
from partita.methods import build as method_of
from partita.methods.fedavg import fedavg
from partita.methods.fedper import fedper
from partita.methods.moon import moon
from partita.privacy import budget, spending
from partita.privacy.accountant import epsilon
from partita.privacy.budget import Client, forecast_client, forecast_run
from partita.privacy.guard import ANY_CLIENT, PrivacyGuard, make_private, protect
from partita.privacy.spending import TRAINING, PrivacySpending, find_noise, releases_of, round_up

STEPS = PrivacyRelease(TRAINING, noise=1.2, share=0.2, count=30)
CHOICE = PrivacyRelease("layers", noise=4.0, share=1.0, count=3)


def spending_of(**clients: tuple[float, int]) -> PrivacySpending:
    account = PrivacySpending(1e-5)
    for client, (share, count) in clients.items():
        account.charge(client, [PrivacyRelease(TRAINING, 1.0, share, count)])
    return account


@pytest.mark.parametrize(("target", "worst"), [(0.5, "b"), (20.0, "a")])
def test_find_noise_meets_the_budget_for_every_client(target: float, worst: str) -> None:
    """Which client is worst depends on the noise: sampling helps more with large noise than with small noise.

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


def test_run_epsilon_is_that_of_the_worst_client() -> None:
    account = spending_of(many=(0.02, 300), few=(0.2, 30), rare=(0.3, 4), same=(0.2, 30)).with_noise(5.0)
    costs = {client: epsilon(bill, 1e-5) for client, bill in account.bills.items()}
    client, cost = account.worst()
    assert cost == max(costs.values()) == costs[str(client)]
    assert client in ("few", "same")


def test_charging_twice_equals_charging_the_sum() -> None:
    account = PrivacySpending(1e-5)
    account.charge("a", [STEPS])
    account.charge("a", [replace(STEPS, count=10)])
    assert account.epsilon() == epsilon({replace(STEPS, count=40): 1}, 1e-5)


def test_find_noise_spends_the_budget_and_no_more() -> None:
    account = spending_of(few=(0.2, 30), many=(0.05, 120))
    noise = find_noise(account, 0.5)
    assert 0.5 * 0.995 < account.with_noise(noise).epsilon() <= 0.5
    spent = account.with_noise(9.0).epsilon()
    assert find_noise(account, spent) == pytest.approx(9.0, rel=2e-3)


@pytest.mark.slow
def test_layer_selection_is_charged_and_leaves_less_for_training() -> None:
    account = spending_of(a=(0.2, 30))
    alone = find_noise(account, 0.5)
    account.charge("a", [replace(CHOICE, noise=20.0)])
    assert find_noise(account, 0.5) > 1.05 * alone
    account.charge("a", [CHOICE])
    with pytest.raises(PrivacyError, match="besides their training costs epsilon"):
        find_noise(account, 0.5)
    with pytest.raises(PrivacyError, match="no noise up to"):
        find_noise(spending_of(a=(1.0, 10**7)), 1e-3)


class SelectionWithRelease(ClientRule):
    uses_data = True
    release = PrivacyRelease("layers", noise=4.0, share=1.0)


def test_releases_of_a_round_count_phases_steps_and_selection() -> None:
    poisson, shuffle = (
        replace(method_of("fedrep"), privacy=PrivacySettings(clip=1.0, noise=2.0, sampling=kind))
        for kind in ("poisson", "shuffle")
    )
    model = toy_model()
    run = toy_run(poisson, batch_size=4, epochs=2)
    plan = poisson.plan(model, RoundInfo(0, 3, "a"))
    assert len(plan.phases) == 2
    first, second = plan.phases
    epochs = [phase.epochs or 2 for phase in (first, second)]
    assert releases_of(run, plan, 10) == [PrivacyRelease(TRAINING, 2.0, 0.4, 3 * each) for each in epochs]
    assert releases_of(toy_run(shuffle, epochs=2), plan, 10) == [
        PrivacyRelease(TRAINING, 2.0, 1.0, each) for each in epochs
    ]
    some = toy_run(replace(fedavg(), privacy=PrivacySettings(clip=1.0, noise=2.0, sampling="shuffle")), steps=4)
    plain = fedavg().plan(model, RoundInfo(0, 3, "a"))
    assert releases_of(some, plain, 10) == [
        PrivacyRelease(TRAINING, 2.0, 1.0, 2)
    ]  # the fourth step belongs to a second epoch
    choosing = Method("choosing", client_rules=(SelectionWithRelease(),), privacy=PrivacySettings(clip=1.0, noise=2.0))
    assert releases_of(toy_run(choosing), plain, 3) == [
        SelectionWithRelease.release,
        PrivacyRelease(TRAINING, 2.0, 1.0, 1),
    ]


def make_guard(privacy: PrivacySettings, method: Method | None = None, **more: object) -> PrivacyGuard:
    return make_private(toy_run(method or fedavg(), **more), toy_model(), SIZES, privacy)  # type: ignore[arg-type]


SIZES = {"a": 12, "b": 40, "c": 20, "d": 16}


@pytest.mark.slow
def test_spent_epsilon_follows_the_plan_and_overspending_is_refused() -> None:
    guard = make_guard(PrivacySettings(epsilon=0.5), count=3, cohort=2)
    assert guard.planned is not None
    assert 0.49 < guard.planned <= 0.5
    spent = []
    for each in play(guard.run, toy_model(), Clients(**SIZES)):
        guard.charge(each.number, each.cohort, {})
        spent.append(guard.spent())
    assert spent == sorted(spent)
    assert spent[-1] == guard.planned
    assert guard.forecast(2).epsilon() == spent[1]
    for number in (3, 4):
        guard.charge(number, SIZES, {})
    with pytest.raises(PrivacyError, match=r"beyond the budget of 0\.5"):
        guard.spent()


def test_planned_epsilon_is_that_of_the_most_sampled_client() -> None:
    guard = make_guard(PrivacySettings(noise=5.0), count=6, cohort=1)
    asked = Counter(guard.run.draw_cohort(number, list(SIZES))[0] for number in range(6))
    assert max(asked.values()) < 6
    costs = {
        client: epsilon(dict.fromkeys(releases_of(guard.run, first_round_plan(guard), SIZES[client]), times), 1e-5)
        for client, times in asked.items()
    }
    assert guard.planned == pytest.approx(max(costs.values()))


def first_round_plan(guard: PrivacyGuard):  # type: ignore[no-untyped-def]
    return guard.run.method.plan(toy_model(), RoundInfo(0, 1, "a"))


@pytest.mark.parametrize(
    ("privacy", "said"),
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
def test_privacy_settings_without_a_guarantee_are_refused(privacy: dict[str, object], said: str) -> None:
    with pytest.raises((OptionError, PrivacyError), match=said):
        make_guard(PrivacySettings(**privacy))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "privacy",
    [PrivacySettings("client", noise=1.0), PrivacySettings(epsilon=2.0), PrivacySettings(epsilon=2.0, noise=9.0)],
    ids=["client", "budget", "budget and noise"],
)
def test_a_method_refuses_privacy_that_only_a_guard_can_keep(privacy: PrivacySettings) -> None:
    with pytest.raises(MethodError, match=r"m: .* 'client' or privacy\.epsilon, use make_private"):
        Method("m", privacy=privacy)


@pytest.mark.parametrize("unit", ["example", "group", "client"])
def test_a_run_is_not_protected_by_a_noise_that_is_not_known(unit: Any) -> None:
    privacy = PrivacySettings(unit, "patient" if unit == "group" else None, epsilon=2.0)
    with pytest.raises(PrivacyError, match=r"privacy\.noise is not known yet; make_private computes it"):
        protect(toy_run(fedavg()), privacy, 4)
    protect(toy_run(fedavg()), replace(privacy, noise=1.0), 4)


def test_training_uses_the_settings_of_the_guard_and_the_guard_those_it_was_given() -> None:
    given = PrivacySettings(
        epsilon=5.0, clip=0.3, sampling="shuffle", clipping="direct", microbatch=2, accountant="rdp"
    )
    guard = make_guard(given, count=1)
    assert guard.privacy == replace(given, noise=guard.privacy.known_noise, delta=1e-5)
    assert guard.run.method.privacy == replace(guard.privacy, epsilon=None)


STATEFUL = {
    "error feedback": prune(error_feedback=True),
    "a rule's memory": moon(),
    "personal parameters": fedper(),
    "a carried optimizer": replace(fedavg(), carry_optimizer=True),
}


@pytest.mark.parametrize("method", STATEFUL.values(), ids=STATEFUL)
def test_client_level_cost_of_stateful_clients_has_no_amplification_by_sampling(method: Method) -> None:
    """What other clients keep reveals earlier cohorts, and amplification needs those to be unknown."""
    of_clients = PrivacySettings("client", noise=20.0)
    with pytest.warns(UserWarning, match="clients keep state between rounds"):
        sampled = make_guard(of_clients, method, cohort=2)
    whole = make_guard(replace(of_clients, accountant="rdp"), method)
    assert sampled.planned == whole.planned
    stateless = make_guard(of_clients, prune(), cohort=2)
    assert stateless.planned is not None
    assert sampled.planned is not None
    assert stateless.planned < 0.9 * sampled.planned


def test_client_level_cost_of_a_round_has_no_amplification_when_one_client_keeps_state() -> None:
    """The other rounds are charged with amplification, and one such round is enough for the warning."""
    keeper, other = toy_run(fedavg(), cohort=2).draw_cohort(0, list(SIZES))

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        keep = model.names("head") if (round_info.round, round_info.client) == (0, keeper) else frozenset[str]()
        rest = model.all_names() - keep
        return Plan((Phase(model.all_names()),), up=rest, down=rest, keep=keep)

    of_clients = PrivacySettings("client", noise=20.0)
    with pytest.warns(UserWarning, match="clients keep state between rounds") as seen:
        guard = make_private(toy_run(Method("sometimes", plan), cohort=2), toy_model(), SIZES, of_clients)
    assert [each.filename for each in seen] == [__file__], "it names the line that makes the run private"
    for number in range(3):
        guard.charge(number, [keeper, other], {})
    whole, half = (PrivacyRelease(TRAINING, 20.0, each) for each in (1.0, 0.5))
    assert guard.account.bills == {ANY_CLIENT: {whole: 1, half: 2}}
    assert guard.planned == guard.spent()


def test_default_delta_shrinks_with_the_number_of_examples() -> None:
    assert make_guard(PrivacySettings(noise=5.0)).privacy.delta == 1e-5
    many = make_private(toy_run(fedavg()), toy_model(), {"a": 10**6}, PrivacySettings(noise=5.0))
    assert many.privacy.delta == pytest.approx(1e-7)


def test_unknown_client_sizes_allow_only_a_given_noise() -> None:
    sizes = {"here": 12, "there": 0}
    with pytest.raises(PrivacyError, match="find the noise with 'partita budget'"):
        make_private(toy_run(fedavg()), toy_model(), sizes, PrivacySettings(epsilon=1.0))
    guard = make_private(toy_run(fedavg()), toy_model(), sizes, PrivacySettings(noise=1.0))
    guard.charge(0, ["here", "there"], {})
    assert guard.planned is None
    assert guard.spent() is None


@pytest.mark.slow
def test_client_forecast_orders_costs_and_alternatives() -> None:
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
def test_run_forecast_matches_the_plan() -> None:
    guard = make_guard(PrivacySettings(noise=20.0), count=2, cohort=2)
    found = forecast_run(guard)
    assert found.after[2] == found.epsilon == guard.planned
    assert found.instead["twice the rounds"] > 20.0 > found.instead["half the batch"]
    unknown = make_private(toy_run(fedavg()), toy_model(), {"a": 0}, PrivacySettings(noise=1.0))
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


def test_private_run_records_epsilon_and_resumes(tmp_path: Path) -> None:
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


def test_unknown_privacy_key_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'privacy\.epsilom'; did you mean 'epsilon'"):
        parse({**CONFIG, "privacy": {"epsilom": 2.0}})
    assert parse({"method": {"name": "fedavg"}}).privacy is None


# ---- found by mutation testing


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("share", "count", "target"),
    [(0.01, 10, 3.0), (0.001, 1, 8.0), (0.0001, 1, 1e-3), (0.5, 400, 1.0)],
    ids=["below the clip", "far below it", "where epsilon falls to zero", "far above the clip"],
)
def test_find_noise_returns_the_least_sufficient_noise(share: float, count: int, target: float) -> None:
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
def test_noise_is_rounded_up_to_four_digits(noise: float, rounded: float) -> None:
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


def test_client_is_charged_for_its_steps_and_sampling_rate() -> None:
    [bill] = Client(examples=100, batch=30, rounds=6, epochs=2).bill(5, 1e-6).bills.values()
    assert bill == {PrivacyRelease(TRAINING, 1.0, 0.3): 2 * 4 * 5}
    account = Client(examples=10, batch=30, rounds=6).bill(6, 1e-6)
    assert account.bills == {"client": {PrivacyRelease(TRAINING, 1.0, 1.0): 6}}
    assert account.delta == 1e-6


@pytest.fixture
def linear_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace epsilon by steps times share over noise, so that the noise for an epsilon has a closed form."""

    def cost(account: PrivacySpending) -> float:
        return max(sum(r.share * n / r.noise for r, n in bill.items()) for bill in account.bills.values())

    monkeypatch.setattr(PrivacySpending, "epsilon", cost)
    monkeypatch.setattr(budget, "find_noise", lambda account, target: cost(account.with_noise(1.0)) / target)


@pytest.mark.usefixtures("linear_costs")
def test_client_forecast_matches_closed_form_costs() -> None:
    client = Client(examples=100, batch=10, rounds=6)  # ten steps per round, each with a tenth of the examples
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


@pytest.mark.usefixtures("linear_costs")
def test_forecast_alternatives_double_and_halve_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share times steps does not change with half the batch, so the charged releases are compared."""
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
    guard = make_guard(PrivacySettings(noise=20.0), count=3, batch_size=4, steps=2)
    forecast_run(guard)
    assert [max(sum(bill.values()) for bill in account.bills.values()) for account, _ in seen] == [12, 6, 6]
    half, whole = ({release.share for release in account.bills["b"]} for account, _ in seen[1:])
    assert (half, whole) == ({2 / 40}, {4 / 40})
    seen.clear()
    forecast_run(make_guard(PrivacySettings(noise=20.0), count=1, batch_size=1, steps=2))
    assert {release.share for release in seen[1][0].bills["b"]} == {1 / 40}, "a batch of one cannot be halved"
    seen.clear()
    forecast_client(Client(examples=12, batch=1, rounds=1), None, 2.0, None)
    assert dict(seen[1][0].bills["client"]) == {PrivacyRelease(TRAINING, 1.0, 1 / 12): 12}
    seen.clear()
    of_clients = forecast_run(
        make_guard(PrivacySettings(unit="client", noise=20.0, accountant="rdp"), count=2, cohort=2)
    )
    assert list(of_clients.instead) == ["twice the rounds", "half the epsilon"]


@pytest.mark.usefixtures("linear_costs")
def test_forecast_without_noise_has_no_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivacySpending, "epsilon", lambda account: math.inf)
    found = forecast_client(Client(examples=100, batch=10, rounds=6), None, 0.0, None)
    assert (found.epsilon, found.instead) == (math.inf, {})
    assert "for the same epsilon" not in found.to_text()


def test_only_declared_releases_of_data_dependent_rules_are_charged() -> None:
    """A rule is charged only if it uses data and declares a release."""
    plan = fedavg().plan(toy_model(), RoundInfo(0, 3, "a"))
    quiet = replace(fedavg(), client_rules=(ReleaseWithoutSelection(),))
    assert releases_of(toy_run(quiet), plan, 10) == []
    assert releases_of(toy_run(replace(fedavg(), client_rules=(SelectionWithoutRelease(),))), plan, 10) == [], (
        "it declares no release"
    )
    assert releases_of(toy_run(replace(fedavg(), client_rules=(SelectionWithRelease(),))), plan, 10) == [
        SelectionWithRelease.release
    ]
    private = replace(fedavg(), client_rules=(SelectionWithRelease(),), privacy=PrivacySettings(clip=1.0, noise=2.0))
    assert releases_of(toy_run(private), plan, 0) == [SelectionWithRelease.release], (
        "without examples nothing is trained"
    )


class SelectionWithoutRelease(ClientRule):
    uses_data = True


class ReleaseWithoutSelection(ClientRule):
    release = PrivacyRelease("layers", noise=4.0, share=1.0)


@pytest.mark.usefixtures("linear_costs")
def test_forecast_with_twice_the_rounds_uses_the_plan_of_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan trains one epoch per round of the run, so twice the rounds cost four times as much."""
    seen = []
    monkeypatch.setattr(budget, "find_noise", lambda account, target: seen.append(account) or 1.0)

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        return Plan((Phase(model.all_names(), epochs=round_info.rounds),), up=model.all_names(), down=model.all_names())

    run = toy_run(Method("growing", plan), 3, batch_size=40)
    forecast_run(make_private(run, toy_model(), {"b": 40}, PrivacySettings(noise=20.0)))
    assert [sum(account.bills["b"].values()) for account in seen] == [36, 18, 9]


@pytest.mark.slow
def test_guard_reports_resolved_noise_sampling_and_unit() -> None:
    found = make_guard(PrivacySettings(epsilon=2.0, accountant="rdp"), count=1)
    assert found.run.method.privacy is not None
    assert found.privacy.noise == found.about()["noise"] == found.run.method.privacy.noise
    assert (found.about()["sampling"], found.about()["delta"]) == ("poisson", 1e-5)
    of_clients = make_guard(PrivacySettings(unit="client", noise=3.0, accountant="rdp"), count=1, cohort=2)
    assert (of_clients.about()["sampling"], of_clients.about()["unit"]) == ("cohort", "client")
