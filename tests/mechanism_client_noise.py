"""Checks of noise at the clients: replay rounds of the run's own clients up to the vector that they mask."""

from __future__ import annotations

import math
from dataclasses import replace

from evidence import Check
from mechanism import Stream, check_noise, stream_of
from mechanism_clients import ROUNDS

from partita.core.model import Model
from partita.core.rounds import Engine, make_job
from partita.core.server_rule import Server
from partita.core.settings import Run
from partita.core.update import Update
from partita.secure_aggregation.client_vector import client_vector
from partita.secure_aggregation.eligibility import fixed_point_of
from partita.secure_aggregation.fixed_point import NUMBERS, layout_of
from partita.secure_aggregation.round_setup import RoundSetup

CLIENTS = 3  # clients of each round to replay


def check_client_noise(run: Run, model: Model, engine: Engine, server: Server) -> list[Check]:
    """Check the noise that clients add, in units of their part of what was charged.

    Args:
        run: The run, with noise at the clients.
        model: The model.
        engine: Trains the run's clients and returns their updates in clear.
        server: The state that the replayed rounds start from.
    """
    assert run.client_noise is not None
    clients = engine.clients()
    streams = []
    for number in range(min(ROUNDS, run.rounds)):
        cohort = run.draw_cohort(number, clients)
        jobs = [make_job(run, model, server, number, client)[0] for client in cohort[:CLIENTS]]
        for reply in engine.train(jobs):
            if isinstance(reply, Update):
                streams.append(_stream(run, reply, len(cohort)))
    return check_noise(streams, run.client_noise.noise) if streams else []


def _stream(run: Run, update: Update, cohort: int) -> Stream:
    """Return the noise of one client, which is what its vector has beyond its update in fixed point."""
    assert run.client_noise is not None
    assert run.secure_aggregation is not None
    fixed_point = fixed_point_of(run, cohort)
    layout = layout_of(update.delta, update.slots, with_loss=False)
    setup = RoundSetup(run.secure_aggregation, b"audit", layout, fixed_point)
    vectors = [client_vector(each, setup, update) for each in (run, replace(run, client_noise=None))]
    unit = 1 / math.sqrt(run.client_noise.variance(fixed_point.scale))
    drawn = (vectors[0] - vectors[1])[NUMBERS:].double() * unit
    assert update.round is not None
    return stream_of(update.client, update.round, (0, 0), {"all values": drawn})
