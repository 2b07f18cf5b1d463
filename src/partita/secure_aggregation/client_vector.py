"""The vector that a client masks: its update in fixed point, and its share of the noise if clients add it."""

from __future__ import annotations

import math

import numpy as np
import torch

from partita.core import chacha
from partita.core.client_noise import ClientNoise
from partita.core.discrete_gaussian import discrete_gaussian
from partita.core.dp_settings import PrivacyError
from partita.core.rng import Key
from partita.core.settings import Run
from partita.core.update import Update
from partita.secure_aggregation.fixed_point import NUMBERS, FixedPoint
from partita.secure_aggregation.round_setup import RoundSetup

NOISE_ROOM = 10  # standard deviations of the noise on a sum that the fixed-point format has room for
SLACK = 1e-9  # relative distance to a bound that covers all errors of float64


def check_room(client_noise: ClientNoise, fixed_point: FixedPoint) -> None:
    """Check that values and noise fit. A sum that wraps around is as private, but useless.

    Raises:
        PrivacyError: If they do not.
    """
    clients = fixed_point.clients
    spread = NOISE_ROOM * client_noise.noise * math.sqrt(clients / client_noise.honest)
    needed = client_noise.clip * (1 + spread / clients)
    if needed > fixed_point.max_value:
        raise PrivacyError(
            f"secure_aggregation.max_value is {fixed_point.max_value:g}, but clipped values and noise need "
            f"{needed:.3g}; raise it, or lower privacy.clip"
        )


def client_vector(run: Run, setup: RoundSetup, update: Update, attempt: str | None = None) -> torch.Tensor:
    """Return the vector of a client's update, with the client's noise if the run has any.

    Args:
        run: The settings, with the client's own secret.
        setup: The public facts of the round.
        update: The client's encoded update.
        attempt: Names the attempt at this round; None for the session of `setup`. Two attempts with equal noise and
            different clients would reveal a client: in the difference of the two sums, the noise of the others cancels.
            So attempts may have the same name only if no second sum of the round can become known.

    Raises:
        OutOfRange: If a number is not finite or too large.
        PrivacyError: If the run has noise and the update is not one of client-level privacy.
    """
    vector = setup.fixed_point.encode(update, setup.layout)
    if run.client_noise is None:
        return vector
    if update.round is None or update.weight != 1 or setup.layout.with_loss:
        raise PrivacyError(
            "with noise at the clients, an update names its round and has weight 1 and no loss; this one does not"
        )
    key = (run.secret or run.key) / "round" / update.round / "client" / update.client / "noise"
    key /= setup.context.hex() if attempt is None else attempt
    vector[NUMBERS:] = add_noise(vector[NUMBERS:], run.client_noise, setup.fixed_point, key)
    return vector


def add_noise(values: torch.Tensor, client_noise: ClientNoise, fixed_point: FixedPoint, key: Key) -> torch.Tensor:
    """Return the values of a clipped update with noise, modulo 2**bits.

    Args:
        values: Integers of the fixed-point format.
        client_noise: The clip and the noise.
        fixed_point: The format.
        key: The client's secret key. Use it for one draw only.
    """
    bounded = bound_norm(values, client_noise.clip * fixed_point.scale + math.sqrt(len(values)) / 2)
    noise = discrete_gaussian(key.digest(chacha.KEY_BYTES), len(values), client_noise.variance(fixed_point.scale))
    wrapped = noise if fixed_point.bits == 64 else noise.astype(np.int32)
    return bounded + torch.from_numpy(wrapped)


def bound_norm(values: torch.Tensor, limit: float) -> torch.Tensor:
    """Return integers with an L2 norm of at most `limit`: the values themselves, or scaled towards 0.

    Updates are clipped before, in float32. This makes the bound exact.
    """
    norm = float(torch.linalg.vector_norm(values.double()))
    if norm <= limit * (1 - SLACK):
        return values
    return (values.double() * (limit * (1 - SLACK) / norm)).trunc().to(values.dtype)
