"""Epsilon of releases, computed by the accountants of Google's dp-accounting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from partita.core.client_rule import PrivacyRelease
from partita.core.dp_settings import PrivacyError

Accountant = Literal["pld", "rdp"]
# How often each release was made for the same unit. It multiplies the release's own count.
PrivacyEvents = Mapping[PrivacyRelease, int]

INTERVAL = 1e-3  # grid of the privacy loss. A coarser grid errs on the safe side; this one by less than 0.1%
# If the RDP bound exceeds this epsilon, it is returned as it is: the guarantee is useless, and a PLD takes long.
MAX_EXACT_EPSILON = 20.0
# Lower orders are only optimal where epsilon is too large to be useful, and some of their series do not converge.
ORDERS = (
    *(half / 2 for half in range(4, 16)),
    *range(8, 16),
    *range(16, 32, 2),
    32,
    40,
    48,
    64,
    96,
    128,
    192,
    256,
    512,
)


def epsilon(bill: PrivacyEvents, delta: float, by: Accountant = "pld", of_clients: bool = False) -> float:
    """Return the epsilon of all releases together, for one example or group, or for one client of a fixed-size cohort.

    Args:
        bill: Releases and how often each was made.
        delta: Delta of the guarantee.
        by: "pld" for privacy loss distributions, "rdp" for Rényi divergences.
        of_clients: Client-level privacy: the neighboring relation replaces one client.

    Raises:
        PrivacyError: If "pld" is used for a sampled cohort of fixed size.
    """
    if not bill:
        return 0.0
    if any(not release.noise for release in bill):
        return math.inf
    bound = _by_rdp(bill, delta, of_clients)
    if by == "rdp" or bound > MAX_EXACT_EPSILON:
        return bound
    if of_clients and any(release.share < 1 for release in bill):
        raise PrivacyError("'pld' cannot account for a cohort of fixed size; set privacy.accountant = 'rdp'")
    accountant = _need().pld.PLDAccountant(value_discretization_interval=INTERVAL)
    for release, times in bill.items():
        accountant.compose(_event(release, of_clients), release.count * times)
    return float(accountant.get_epsilon(delta))


def epsilon_of_runs(runs: Sequence[Sequence[PrivacyEvents]], delta: float, by: Accountant = "pld") -> float:
    """Return the epsilon of several runs on the same data, for one example or group.

    In each run, the example or group is at one client, and nobody knows at which.

    Args:
        runs: For each run, the releases of each client.
        delta: Delta of the guarantee.
        by: "pld" is used if the clients of each run have the same releases, and otherwise "rdp".
    """
    if any(not release.noise for bills in runs for bill in bills for release in bill):
        return math.inf
    if by == "pld" and all(len(bills) == 1 for bills in runs):
        together = Counter[PrivacyRelease]()
        for [bill] in runs:
            together.update(bill)
        return epsilon(together, delta, by)
    worst = [np.max([_rdp_of(bill, of_clients=False) for bill in bills], axis=0) for bills in runs if any(bills)]
    return float(_need().rdp.compute_epsilon(ORDERS, sum(worst), delta)[0]) if worst else 0.0


def _by_rdp(bill: PrivacyEvents, delta: float, of_clients: bool) -> float:
    return float(_need().rdp.compute_epsilon(ORDERS, _rdp_of(bill, of_clients), delta)[0])


def _rdp_of(bill: PrivacyEvents, of_clients: bool) -> np.ndarray[Any, Any]:
    """Return the Rényi divergence of all releases of a bill at each order."""
    total = np.zeros(len(ORDERS))
    for release, times in bill.items():
        total = total + _curve(release.noise, release.share, of_clients) * (release.count * times)
    return total


@lru_cache(maxsize=4096)
def _curve(noise: float, share: float, of_clients: bool) -> np.ndarray[Any, Any]:
    """Return the Rényi divergences of one release. They add up over repetitions, so one cached curve is enough."""
    library = _need()
    relation = library.NeighboringRelation
    accountant = library.rdp.RdpAccountant(ORDERS, relation.REPLACE_ONE if of_clients else relation.ADD_OR_REMOVE_ONE)
    accountant.compose(_event(PrivacyRelease("", noise, share), of_clients))
    return np.asarray(accountant.rdp)


def _event(release: PrivacyRelease, of_clients: bool) -> Any:
    library = _need()
    if of_clients:
        # Replacing one client's update by another's moves the sum by up to twice the clip.
        gaussian = library.GaussianDpEvent(release.noise / 2)
        share = Fraction(release.share).limit_denominator(10**9)
        if share == 1:
            return gaussian
        return library.SampledWithoutReplacementDpEvent(share.denominator, share.numerator, gaussian)
    gaussian = library.GaussianDpEvent(release.noise)
    return gaussian if release.share >= 1 else library.PoissonSampledDpEvent(release.share, gaussian)


def _need() -> Any:
    try:
        import dp_accounting
        from dp_accounting import pld, rdp  # noqa: F401
    except ModuleNotFoundError as error:
        raise PrivacyError("privacy needs dp-accounting; pip install 'partita[privacy]'") from error
    return dp_accounting
