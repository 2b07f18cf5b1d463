"""What both engines need for secure aggregation: the setup of a round from its jobs, and the result from its sum."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from partita.core import serialization
from partita.core.client import Job
from partita.core.model import Model
from partita.core.plan import RoundInfo, plan_for
from partita.core.settings import Run
from partita.core.update import SecureSum, Update
from partita.engines.dry_run import null_update
from partita.secure_aggregation.client_vector import client_vector
from partita.secure_aggregation.costs import client_costs
from partita.secure_aggregation.eligibility import check_plans, counts_alike, fixed_point_of
from partita.secure_aggregation.encoding import ProtocolError
from partita.secure_aggregation.fixed_point import cast_like, layout_of
from partita.secure_aggregation.neighbors import count_neighbors, describe, group_threshold, threshold_of
from partita.secure_aggregation.round_setup import RoundSetup
from partita.secure_aggregation.server import SecureServer

# Only one sum of a round can become known, however often it is started: its clients confirm one. It repeats its noise.
ONE_SUM = "one sum"
# What a run without single updates cannot have. The row of a round says so.
OFF = ("drift", "norms of updates", "losses of clients", "metrics of clients", "checks of updates")


def round_setup(run: Run, model: Model, job: Job, clients: int, session: bytes) -> RoundSetup:
    """Return the setup of a round. Any client's job gives the same one.

    Args:
        run: The run.
        model: The model.
        job: A job of the round.
        clients: The size of the round's cohort.
        session: Bytes that only this start of the run has.
    """
    assert run.secure_aggregation is not None
    sent = null_update(run, model, job)
    layout = layout_of(sent.delta, sent.slots, sent.loss is not None)
    round_id = session + f"/round {job.round}".encode()
    return RoundSetup(run.secure_aggregation, round_id, layout, fixed_point_of(run, clients))


def protection(run: Run, clients: int) -> str:
    """Say with how many of its clients a server opens no smaller sum of a round; see `describe`."""
    assert run.secure_aggregation is not None
    return describe(run.secure_aggregation, clients)


def check_cohort(run: Run, model: Model, jobs: Sequence[Job]) -> None:
    """Check that all clients of a round send the same names.

    Raises:
        MethodError: If they do not.
    """
    plans = (
        (job.client, plan_for(run.method.plan, model, RoundInfo(job.round, run.rounds, job.client, job.signal)))
        for job in jobs
    )
    check_plans(run, jobs[0].round, plans)


def encode(run: Run, setup: RoundSetup, update: Update, attempt: str | None = None) -> torch.Tensor:
    """Return a client's vector, with its noise if clients add it.

    Args:
        run: The run, with the client's own secret.
        setup: The setup of the round.
        update: The client's update.
        attempt: See `client_vector`.

    Raises:
        OutOfRange: If a number of the update does not fit; the message names it.
    """
    weighted = replace(update, weight=1.0) if counts_alike(run) else update
    return client_vector(run, setup, weighted, attempt)


def finish(
    run: Run,
    setup: RoundSetup,
    server: SecureServer,
    like: Mapping[str, torch.Tensor],
    seconds: dict[str, float],
    failure: str | None = None,
) -> SecureSum:
    """Return what the server learns of a round.

    Args:
        run: The run.
        setup: The setup of the round.
        server: The server's side of the protocol, after the last stage.
        like: The server's parameters, for the types and devices of the mean.
        seconds: The time that each side took so far: "clients", all together, and "server".
        failure: Why the protocol ended early; None if it did not.
    """
    count, mean, started = len(server.survivors), None, time.perf_counter()
    if failure is None:
        try:
            divisor = run.method.server_rule.divisor
            mean = setup.fixed_point.decode(server.sum(), setup.layout, count, divisor)
        except ProtocolError as error:
            failure = str(error)
    seconds["server"] += time.perf_counter() - started
    up = Counter[str]()
    for _, name, shape in setup.layout.entries:
        up[name] += count * shape_bytes(shape, setup)
    up[serialization.HEADER] = sum(server.up.values()) - sum(up.values())
    cohort = setup.fixed_point.clients
    needed = threshold_of(setup.settings, cohort)
    facts = {
        "clients": count,
        "recovered": len(server.dropped),
        "threshold": group_threshold(setup.settings, cohort),
        "neighbors": count_neighbors(setup.settings, cohort),
        "bits": setup.settings.bits,
        "resolution": mean.resolution if mean else None,
        "bytes": {"up": dict(server.up), "down": dict(server.down)},
        "seconds": {side: round(spent, 4) for side, spent in seconds.items()},
        "off": list(OFF),
    }
    aggregate = cast_like(mean.aggregate, like) if mean else None
    return SecureSum(aggregate, mean.loss if mean else None, failure, needed, up, sum(server.down.values()), facts)


def bytes_up(run: Run, model: Model, job: Job, clients: Sequence[str]) -> int:
    """Return the bytes that a client sends up for a job, masked or in clear.

    Args:
        run: The run.
        model: The model.
        job: The job.
        clients: The cohort of the round.
    """
    if run.secure_aggregation is None:
        update = null_update(run, model, job)
        return sum(serialization.byte_counts({"delta": update.delta, **update.slots}).values())
    costs = client_costs(round_setup(run, model, job, len(clients), b""), clients, job.client)
    return costs.vector + costs.up


def shape_bytes(shape: Sequence[int], setup: RoundSetup) -> int:
    """Return the bytes of a tensor of this shape in a masked vector."""
    size = setup.dtype.itemsize
    for length in shape:
        size *= length
    return size
