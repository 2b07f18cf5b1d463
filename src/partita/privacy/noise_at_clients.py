"""What noise at the clients is worth: the multiplier of a Gaussian mechanism that is at least as private."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from partita.core.client_noise import ClientNoise
from partita.core.model import Model
from partita.core.settings import Run
from partita.privacy.client_level import protect_clients
from partita.secure_aggregation.client_vector import check_room
from partita.secure_aggregation.eligibility import fixed_point_of
from partita.secure_aggregation.neighbors import check_size, colluding_clients, threshold_of


def protect_at_clients(run: Run, cohort: int, clip: float, noise: float) -> Run:
    """Return the run with clipping and noise at the clients and none at the server.

    The threshold of the protocol and the number of clients whose noise is counted are one number: `min_clients` of the
    returned run. All clients that confirm a sum are in it, and a client does not unmask a sum that fewer confirm,
    whatever the server says, also if clients were missing from the start. So those of them that do not collude all add
    their noise to it.

    Args:
        run: A run with secure aggregation.
        cohort: The number of clients per round.
        clip: Maximum L2 norm of an update.
        noise: Standard deviation of the noise on the smallest sum that is released, in multiples of the clip; 0 for
            none.

    Raises:
        MethodError: If the method cannot be made private.
        PrivacyError: If the noise does not fit the fixed-point format, or no honest client is left.
        TooFewClients: If a cohort is too small for secure aggregation.
    """
    settings = run.secure_aggregation
    assert settings is not None
    check_size(settings, cohort)
    needed = threshold_of(settings, cohort)
    settings = replace(settings, min_clients=needed)
    client_noise = ClientNoise(clip, noise, needed - colluding_clients(settings, cohort)) if noise else None
    method = protect_clients(run.method, clip, 0.0, cohort)
    noisy = replace(run, method=method, secure_aggregation=settings, client_noise=client_noise, drift=False)
    if client_noise:
        check_room(client_noise, fixed_point_of(noisy, cohort))
    return noisy


def count_values(run: Run, model: Model) -> int:
    """Return a bound on the number of values that a client releases in a round, delta and slots together."""
    slots = frozenset[str]().union(*(rule.slots for rule in run.method.client_rules))
    return (1 + len(slots)) * sum(value.numel() for value in model.initial.values())


def noise_in_effect(run: Run, model: Model, cohort: int) -> Callable[[float], float]:
    """Return the function from `privacy.noise` to the noise that the accountant is given.

    Args:
        run: A run from `protect_at_clients`.
        model: The model.
        cohort: The number of clients per round.
    """
    assert run.client_noise is not None
    scale = fixed_point_of(run, cohort).scale
    client_noise, values = run.client_noise, count_values(run, model)
    return lambda noise: effective_noise(replace(client_noise, noise=noise), scale, values) if noise else 0.0


def effective_noise(client_noise: ClientNoise, scale: float, values: int) -> float:
    """Return the noise of a Gaussian mechanism with the same guarantee, in multiples of the clip.

    A client scales its clipped update x to the grid, rounds it to the nearest integers and adds discrete Gaussian
    noise. The server sees the sum modulo 2**bits, which is post-processing of the sum.

    Sensitivity: rounding moves each of the d values by at most 1/2, so by the triangle inequality the integers have a
    norm of at most clip * scale + sqrt(d) / 2. Replacing a client moves the sum by at most twice that.

    Noise: the sum of the m = `honest` clients' noise, each of variance s^2, is not a discrete Gaussian, but close to
    one of variance m s^2. By Kairouz, Liu and Steinke (2021, theorem 1 and proposition 14), for s >= 1/2, the mechanism
    satisfies (eps^2 / 2)-concentrated privacy with

        eps = sensitivity / (sqrt(m) s) + tau sqrt(d),   tau = 10 sum_{k=1}^{m-1} exp(-2 pi^2 s^2 k / (k + 1)).

    A Gaussian mechanism with the multiplier 1 / eps has the same curve of Rényi divergences. Further clients add
    independent noise, which is post-processing.

    Args:
        client_noise: The clip, and the noise of the clients.
        scale: Grid points per unit.
        values: The number d of values that are released, or more.
    """
    std = math.sqrt(client_noise.variance(scale))  # of one client, in grid points
    sensitivity = client_noise.clip * scale + math.sqrt(values) / 2
    eps = 2 * sensitivity / (math.sqrt(client_noise.honest) * std) + tau(client_noise.honest, std) * math.sqrt(values)
    return 2 / eps  # `accountant` takes the noise in multiples of one client's share, and doubles the share itself


def tau(clients: int, std: float) -> float:
    """Return how far the sum of discrete Gaussians is from a discrete Gaussian.

    Args:
        clients: The number of summands.
        std: The standard deviation of each.
    """
    return 10 * math.fsum(math.exp(-2 * (math.pi * std) ** 2 * k / (k + 1)) for k in range(1, clients))
