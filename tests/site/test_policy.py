"""A policy is read strictly, and allows nothing that it does not name."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from helpers import toy_model

from partita.site.policy import DAYS, HoursTable, LeaveTable, Policy, load_policy, policy_digest
from partita.site.toml_tables import SiteError

WHOLE = """
experiments = ["aa"]
code = ["bb"]
[leave]
roles = ["head"]
names = ["encoder.layer.11.*"]
never = ["*.personal.*"]
scores = true
[limits]
bytes_per_round = 10_000_000
bytes_total = 1_000_000_000
rounds = 100
[privacy]
unit = "group"
max_epsilon = 8.0
min_noise = 0.5
[hours]
days = ["mon", "tue", "wed", "thu", "fri"]
from = "20:00"
to = "06:00"
[secure_aggregation]
required = true
min_clients = 3
"""
MONDAY = datetime(2026, 11, 16)


def policy_in(folder: Path, text: str) -> Policy:
    path = folder / "policy.toml"
    path.write_text(text, encoding="utf-8")
    return load_policy(path)


def test_every_key_is_read(tmp_path: Path) -> None:
    policy = policy_in(tmp_path, WHOLE)
    assert policy.experiments == ("aa",)
    assert policy.code == ("bb",)
    assert policy.leave == LeaveTable(("head",), ("encoder.layer.11.*",), ("*.personal.*",), True)
    assert (policy.limits.bytes_per_round, policy.limits.bytes_total, policy.limits.rounds) == (10**7, 10**9, 100)
    assert (policy.privacy.unit, policy.privacy.max_epsilon, policy.privacy.min_noise) == ("group", 8.0, 0.5)
    assert (policy.hours.days, policy.hours.from_, policy.hours.to) == (DAYS[:5], "20:00", "06:00")
    assert (policy.secure_aggregation.required, policy.secure_aggregation.min_clients) == (True, 3)


def test_what_is_left_out_is_not_allowed(tmp_path: Path) -> None:
    policy = policy_in(tmp_path, "[leave]\nroles = []\n")
    assert not policy.experiments
    assert not policy.code
    assert not policy.leave.scores
    assert not any(policy.leave.allows(name, tags) for name, tags in toy_model().tags.items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'leave' is missing; it must be a table, [leave]"),
        ("[leave]\n", "'leave.roles' is missing; it must be a list"),
        ("[leave]\nroles = 'head'\n", "leave.roles is 'head'; it must be a list"),
        (WHOLE.replace("max_epsilon", "epsilon"), "unknown key 'privacy.epsilon'; did you mean 'max_epsilon'?"),
        (WHOLE.replace("[limits]", "[limit]"), "unknown key 'limit'; did you mean 'limits'?"),
        (WHOLE.replace("from =", "form ="), "unknown key 'hours.form'; did you mean 'from'?"),
        (WHOLE.replace("from =", "from_ ="), "unknown key 'hours.from_'"),
        (WHOLE.replace('"20:00"', '"8 pm"'), "hours.from is '8 pm'; write hours and minutes"),
        (WHOLE.replace('"20:00"', '"24:00"'), "hours.from is '24:00'"),
        (WHOLE.replace('"06:00"', '"20:00"'), "hours.to is '20:00', as is from"),
        (WHOLE.replace('["mon", "tue", "wed", "thu", "fri"]', "[]"), "hours.days is empty"),
        (WHOLE.replace('"mon"', '"monday"'), "hours.days is ['monday'"),
        (WHOLE.replace('unit = "group"', 'unit = "patient"'), "privacy.unit is 'patient'"),
        (WHOLE.replace("bytes_total = 1_000_000_000", "bytes_total = -1"), "limits.bytes_total is -1"),
        (WHOLE.replace("max_epsilon = 8.0", "max_epsilon = nan"), "privacy.max_epsilon is nan"),
        (WHOLE.replace("min_clients = 3", "min_clients = 1"), "secure_aggregation.min_clients is 1"),
    ],
)
def test_error_names_key_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SiteError) as caught:
        policy_in(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'policy.toml'}: ")
    assert message in str(caught.value)


def test_parameters_leave_by_role_or_name_and_never_wins() -> None:
    leave = LeaveTable(("head",), ("encoder.layer.1.*",), ("*.personal.*", "head.bias"))
    head, query = frozenset({"head"}), frozenset({"query", "layer.1"})
    assert leave.allows("head.weight", head)
    assert leave.allows("encoder.layer.1.query", query)
    assert not leave.allows("encoder.layer.11.query", query)
    assert not leave.allows("head.bias", head)
    assert not leave.allows("encoder.layer.1.personal.query", query)
    assert not LeaveTable(("*",), (), ("head.*",)).allows("head.weight", head)
    assert LeaveTable(("*",)).allows("anything", frozenset())
    assert LeaveTable(("layer.1",)).allows("encoder.layer.1.query", query)


def test_unknown_parameter_may_not_leave() -> None:
    model = toy_model()
    assert LeaveTable(("*",)).forbidden([*model.initial, "mine"], model) == ["mine"]


def test_hours_over_midnight_belong_to_the_day_on_which_they_begin() -> None:
    hours = HoursTable(("mon",), "20:00", "06:00")  # type: ignore[arg-type]
    wanted = {(0, 20, 0), (0, 23, 59), (1, 0, 0), (1, 5, 59)}
    closed = {(0, 19, 59), (0, 3, 0), (1, 6, 0), (1, 20, 0), (6, 23, 0)}
    for day, hour, minute in wanted | closed:
        now = MONDAY + timedelta(days=day, hours=hour, minutes=minute)
        assert hours.open_at(now) == ((day, hour, minute) in wanted), now


def test_default_hours_are_always() -> None:
    assert all(HoursTable().open_at(MONDAY + timedelta(minutes=17 * step)) for step in range(700))


def test_a_minute_is_in_the_hours_or_in_their_complement() -> None:
    day, night = HoursTable(from_="06:00", to="20:00"), HoursTable(from_="20:00", to="06:00")
    for step in range(700):
        now = MONDAY + timedelta(minutes=17 * step)
        assert day.open_at(now) != night.open_at(now)


def test_digest_changes_with_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(WHOLE)
    before = policy_digest(path)
    path.write_text(WHOLE + "\n")
    assert policy_digest(path) != before
