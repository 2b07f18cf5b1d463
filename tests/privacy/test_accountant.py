"""Epsilon of releases, against dp-accounting and closed forms."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace

import dp_accounting as library
import pytest
from dp_accounting import pld, rdp
from scipy.optimize import brentq
from scipy.stats import norm

from partita.core.client_rule import PrivacyRelease
from partita.core.dp_settings import PrivacyError
from partita.privacy import accountant
from partita.privacy.accountant import INTERVAL, ORDERS, _event, epsilon
from partita.privacy.spending import TRAINING

STEPS = PrivacyRelease(TRAINING, noise=1.2, share=0.2, count=30)
CHOICE = PrivacyRelease("layers", noise=4.0, share=1.0, count=3)


def epsilon_of_library(accountant: library.PrivacyAccountant) -> float:
    """Epsilon of the same releases, written as events of dp-accounting."""
    accountant.compose(library.PoissonSampledDpEvent(0.2, library.GaussianDpEvent(1.2)), 30)
    accountant.compose(library.GaussianDpEvent(4.0), 3)
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.slow
def test_epsilon_matches_dp_accounting() -> None:
    bill = Counter({STEPS: 1, CHOICE: 1})
    assert epsilon(bill, 1e-5) == epsilon_of_library(pld.PLDAccountant(value_discretization_interval=INTERVAL))
    assert epsilon(bill, 1e-5) == pytest.approx(epsilon_of_library(pld.PLDAccountant()), rel=1e-3)
    assert epsilon(bill, 1e-5, "rdp") == pytest.approx(epsilon_of_library(rdp.RdpAccountant(ORDERS)), rel=1e-12)
    assert epsilon(bill, 1e-5, "rdp") > epsilon(bill, 1e-5)


def gaussian_epsilon(noise: float, delta: float) -> float:
    """The exact curve of the Gaussian mechanism (Balle and Wang 2018)."""

    def excess(eps: float) -> float:
        near, far = 0.5 / noise - eps * noise, -0.5 / noise - eps * noise
        return float(norm.cdf(near) - math.exp(eps) * norm.cdf(far) - delta)

    return float(brentq(excess, 0, 100))


@pytest.mark.parametrize(("noise", "times"), [(1.0, 1), (3.0, 20)])
def test_epsilon_of_gaussian_releases_matches_the_closed_form(noise: float, times: int) -> None:
    wanted = gaussian_epsilon(noise / math.sqrt(times), 1e-5)
    assert epsilon({PrivacyRelease(TRAINING, noise, 1.0, times): 1}, 1e-5) == pytest.approx(wanted, rel=1e-3)
    # Replacing a client moves a sum by twice the clip.
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


def test_epsilon_is_zero_without_releases_and_infinite_without_noise() -> None:
    assert epsilon({}, 1e-5) == epsilon({}, 1e-5, "rdp") == 0
    assert epsilon({PrivacyRelease(TRAINING, 0.0, 0.1): 1}, 1e-5) == math.inf


def test_error_names_the_extra_when_dp_accounting_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(PrivacyError, match=r"pip install 'partita\[privacy\]'"):
        epsilon({STEPS: 1}, 1e-5)


@pytest.mark.parametrize("share", [1.0, 2 / 5])
def test_client_level_epsilon_matches_dp_accounting_when_one_client_is_replaced(share: float) -> None:
    whole = library.GaussianDpEvent(3.0)
    event = whole if share == 1 else library.SampledWithoutReplacementDpEvent(5, 2, whole)
    theirs = rdp.RdpAccountant(ORDERS, library.NeighboringRelation.REPLACE_ONE).compose(event, 10)
    found = epsilon({PrivacyRelease(TRAINING, 6.0, share, 5): 2}, 1e-5, "rdp", of_clients=True)
    assert found == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-12)


def test_pld_is_refused_when_a_cohort_of_fixed_size_is_sampled() -> None:
    sampled = PrivacyRelease(TRAINING, 20.0, 0.5)
    with pytest.raises(PrivacyError, match=r"fixed size; set privacy\.accountant = 'rdp'"):
        epsilon({sampled: 1, CHOICE: 1}, 1e-5, of_clients=True)
    assert epsilon({sampled: 1}, 1e-5) < epsilon({replace(sampled, share=1.0): 1}, 1e-5, of_clients=True)


def test_epsilon_is_the_rdp_bound_when_that_is_above_20(monkeypatch: pytest.MonkeyPatch) -> None:
    loose, tight = ({PrivacyRelease(TRAINING, noise, 1.0): 1} for noise in (0.2, 0.4))
    assert epsilon(loose, 1e-5) == epsilon(loose, 1e-5, "rdp") > 20
    exact, bound = epsilon(tight, 1e-5), epsilon(tight, 1e-5, "rdp")
    assert exact < bound < 20
    monkeypatch.setattr(accountant, "MAX_EXACT_EPSILON", bound)
    assert epsilon(tight, 1e-5) == exact
