"""Noise at the clients: what it is worth, against hand computations and exact divergences."""

from __future__ import annotations

import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp

from partita.core.client_noise import ClientNoise
from partita.core.client_rule import PrivacyRelease
from partita.core.dp_settings import PrivacyError
from partita.privacy.accountant import ORDERS, epsilon
from partita.privacy.guard import effective_noise, tau


def test_on_a_fine_grid_it_is_worth_as_much_as_noise_at_the_server() -> None:
    """Without rounding, the sum of the clients' noise has the standard deviation noise * clip."""
    for honest in (1, 3, 10):
        assert effective_noise(ClientNoise(0.5, 1.7, honest), 2.0**40, 10**6) == pytest.approx(1.7, rel=1e-7)


def test_epsilon_equals_the_hand_computation() -> None:
    clip, noise, honest, scale, values, rounds, delta = 2.0, 3.0, 4, 8.0, 400, 5, 1e-5
    std = noise * clip * scale / math.sqrt(honest)  # 24 grid points
    moved = 2 * (clip * scale + math.sqrt(values) / 2)
    far = 10 * sum(math.exp(-2 * math.pi**2 * std**2 * k / (k + 1)) for k in (1, 2, 3))
    concentrated = moved / (math.sqrt(honest) * std) + far * math.sqrt(values)
    accountant = rdp.RdpAccountant(ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(1 / concentrated), rounds)
    ours = effective_noise(ClientNoise(clip, noise, honest), scale, values)
    assert epsilon({PrivacyRelease("training", ours, 1.0): rounds}, delta, "rdp", of_clients=True) == pytest.approx(
        accountant.get_epsilon(delta), rel=1e-9
    )


def log_mass(variance: Fraction, clients: int, reach: int) -> np.ndarray:  # type: ignore[type-arg]
    """Logarithms of the probabilities of a sum of discrete Gaussians, from -reach to reach."""
    places = np.arange(-reach, reach + 1)
    one = np.exp(-(places.astype(np.longdouble) ** 2) / (2 * np.longdouble(variance)))  # the tails need its range
    one /= one.sum()
    total = one
    for _ in range(clients - 1):
        total = np.convolve(total, one)
    middle = len(total) // 2
    return np.log(total[middle - reach : middle + reach + 1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("honest", [1, 2, 5])
@pytest.mark.parametrize("std", [0.5, 0.7, 2.0])
def test_exact_divergence_of_one_value_is_below_what_is_charged(honest: int, std: float) -> None:
    """For one released value, the divergence of the sum is known exactly."""
    scale, moved = 1.0, 3  # clip * scale is 1, and half a point for the rounding, for both clients
    client_noise = ClientNoise(1.0, std * math.sqrt(honest) / scale, honest)
    assert float(client_noise.variance(scale)) == pytest.approx(std**2)
    charged = 2 / effective_noise(client_noise, scale, 1)
    mass = log_mass(client_noise.variance(scale), honest, 45)
    for order in (1.5, 2, 4, 8):
        terms = order * mass[moved:] + (1 - order) * mass[:-moved]
        exact = float(np.log(np.exp(terms - terms.max()).sum()) + terms.max()) / (order - 1)
        assert exact <= order * charged**2 / 2 * (1 + 1e-6)
        if std == 2.0:
            assert exact == pytest.approx(order * charged**2 / 2, rel=1e-6), "and equal to it on a fine grid"


def test_rounding_and_few_points_per_client_cost_privacy() -> None:
    fine, coarse = (effective_noise(ClientNoise(1.0, 1.0, 4), scale, 10_000) for scale in (2.0**30, 2.0**6))
    assert coarse == pytest.approx(fine / (1 + 50 / 64), rel=1e-3)
    assert tau(1, 0.5) == 0.0
    assert tau(2, 0.5) == pytest.approx(10 * math.exp(-(math.pi**2) / 4))
    assert tau(10, 3.0) < 1e-30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0.0, 1.0, 3), r"privacy\.clip is 0\.0"),
        ((math.inf, 1.0, 3), r"privacy\.clip is inf"),
        ((1.0, 0.0, 3), r"privacy\.noise is 0\.0"),
        ((1.0, 1.0, 0), r"secure_aggregation\.collusion leaves no honest client"),
    ],
)
def test_impossible_settings_are_refused(settings: tuple[float, float, int], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        ClientNoise(*settings)


def test_noise_below_the_grid_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"0\.25 points of the grid, and it must be at least 0\.5; set secure_agg"):
        ClientNoise(1.0, 1.0, 4).variance(0.5)
    assert ClientNoise(1.0, 1.0, 4).variance(1.0) == Fraction(1, 4)
