"""Secure aggregation against updates in clear: difference, bytes and seconds of one round, without training.

Clients run one at a time, so memory does not grow with their number. Times are the processor's own, of one thread. A
round whose masks would take too long (50 clients with 100 MB) is measured for a few clients, and the rest is computed
from the time of one mask; such rows say "estimated".
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from environment import environment

from partita.core import serialization
from partita.core.secure_settings import SecureAggregation
from partita.core.tensors import Mean
from partita.core.update import Update
from partita.secure_aggregation.client import SecureClient
from partita.secure_aggregation.fixed_point import FixedPoint, layout_of
from partita.secure_aggregation.masks import add_mask
from partita.secure_aggregation.round_setup import RoundSetup
from partita.secure_aggregation.server import SecureServer

MEASURED = 2  # clients of an estimated round
MAX_MASKED = 30e9  # bytes of masks of a round that is run in full


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, nargs="*", default=[3, 10, 50])
    options.add_argument("--megabytes", type=float, nargs="*", default=[1, 100])
    options.add_argument("--dropouts", type=float, nargs="*", default=[0.0, 0.1, 0.3])
    options.add_argument("--bits", type=int, choices=[32, 64], default=64)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    about = environment(
        torch.device("cpu"), False, f"one round of secure aggregation with {chosen.bits} bits, without training"
    )
    print("clients  MB  dropped  difference  resolution  up/client  client s  server s  clear s  estimated")
    results = []
    for megabytes in chosen.megabytes:
        for clients in chosen.clients:
            for share in chosen.dropouts:
                row = measure(clients, int(megabytes * 1e6 / 4), round(share * clients), chosen.bits)
                results.append({"dropouts": share, "megabytes": megabytes, **row})
                shown = "        –           –" if row["difference"] is None else (
                    f"{row['difference']:>10.1e}  {row['resolution']:>10.1e}"
                )  # fmt: skip
                print(
                    f"{clients:>7} {megabytes:>3g} {row['dropped']:>8} {shown} {row['up per client']:>10}"
                    f" {row['client seconds']:>9.3f} {row['server seconds']:>9.3f} {row['clear seconds']:>8.3f}"
                    f"  {row['estimated']}",
                    flush=True,
                )
                if chosen.out:  # after every row: the last ones take minutes
                    chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def update_of(client: int, numbers: int) -> Update:
    """An update of a client, the same in every call."""
    values = torch.randn(numbers, generator=torch.Generator().manual_seed(client)) * 0.01
    return Update(f"client-{client:02}", {"w": values}, {}, 100.0 + client, {"w": 1}, 1.0)


def measure(clients: int, numbers: int, dropped: int, bits: int) -> dict[str, Any]:
    """One round."""
    settings = SecureAggregation(bits=bits, min_clients=2, collusion=0.0)  # type: ignore[arg-type]
    layout = layout_of({"w": torch.empty(numbers)}, {}, with_loss=True)
    max_weight = 10_000.0 if bits == 32 else 10_000_000.0
    settings = replace(settings, max_value=1.0) if bits == 32 else settings
    setup = RoundSetup(
        settings, b"benchmark", layout, FixedPoint(settings.bits, clients, max_weight, settings.max_value)
    )
    masks = (clients - dropped) * clients + dropped * (clients - dropped)
    if masks * numbers * bits / 8 > MAX_MASKED:
        return estimate(setup, clients, numbers, dropped)
    seconds: dict[str, float] = {}
    server, parties = share_keys(setup, clients, seconds)
    survivors = list(parties)[dropped:]
    exact = torch.zeros(numbers, dtype=torch.float64)
    for place, name in list(enumerate(parties))[dropped:]:
        update = update_of(place, numbers)
        exact += update.delta["w"].double() * update.weight
        clock = time.process_time()
        masked = parties[name].mask(server.present(), setup.fixed_point.encode(update, layout))
        seconds["client"], clock = seconds["client"] + time.process_time() - clock, time.process_time()
        server.add_masked(name, masked)
        seconds["server"] += time.process_time() - clock
    for name in survivors:
        clock = time.process_time()
        server.add_confirmed(name, parties[name].confirm(server.lists()))
        seconds["client"] += time.process_time() - clock
    for name in survivors:
        clock = time.process_time()
        shares = parties[name].unmask(server.signatures())
        seconds["client"], clock = seconds["client"] + time.process_time() - clock, time.process_time()
        server.add_unmasked(name, shares)
        seconds["server"] += time.process_time() - clock
    clock = time.process_time()
    mean = setup.fixed_point.decode(server.sum(), layout, len(survivors))
    seconds["server"] += time.process_time() - clock
    return {
        "clients": clients,
        "dropped": dropped,
        "difference": float((mean.aggregate.delta["w"] - exact / mean.weight).abs().max()),
        "resolution": mean.resolution,
        "up": dict(server.up),
        "down": dict(server.down),
        "up per client": sum(server.up.values()) // len(survivors),
        "clear up per client": sum(serialization.byte_counts({"delta": update_of(0, numbers).delta}).values()),
        "client seconds": seconds["client"] / clients,
        "server seconds": seconds["server"],
        "clear seconds": clear_seconds(clients - dropped, numbers),
        "estimated": False,
    }


def clear_seconds(clients: int, numbers: int) -> float:
    """The time of the mean in clear, without that of making the updates."""
    mean, seconds = Mean(), 0.0
    for place in range(clients):
        update = update_of(place, numbers)
        clock = time.process_time()
        mean.add(update.delta, update.weight)
        seconds += time.process_time() - clock
    return seconds


def share_keys(
    setup: RoundSetup, clients: int, spent: dict[str, float]
) -> tuple[SecureServer, dict[str, SecureClient]]:
    """The first three stages."""
    server = SecureServer(setup)
    parties = {f"client-{place:02}": SecureClient(setup, f"client-{place:02}") for place in range(clients)}
    clock = time.process_time()
    advertised = {name: party.advertise() for name, party in parties.items()}
    spent["client"] = time.process_time() - clock
    clock = time.process_time()
    for name, message in advertised.items():
        server.add_advertisement(name, message)
    rosters = [server.roster() for _ in parties]
    spent["server"] = time.process_time() - clock
    clock = time.process_time()
    shares = {name: party.share_keys(rosters[0]) for name, party in parties.items()}
    spent["client"] += time.process_time() - clock
    clock = time.process_time()
    for name, message in shares.items():
        server.add_shares(name, message)
    inboxes = {name: server.inbox(name) for name in parties}
    spent["server"] += time.process_time() - clock
    clock = time.process_time()
    reports = {name: party.check(inboxes[name]) for name, party in parties.items()}
    spent["client"] += time.process_time() - clock
    for name, message in reports.items():
        server.add_checked(name, message)
    return server, parties


def estimate(setup: RoundSetup, clients: int, numbers: int, dropped: int) -> dict[str, Any]:
    """Mask the vectors of a few clients, and compute the rest from the time of one mask."""
    spent: dict[str, float] = {}
    server, parties = share_keys(setup, clients, spent)
    stayed, seconds, adding = clients - dropped, 0.0, 0.0
    for place, name in list(enumerate(parties))[:MEASURED]:
        update = update_of(place, numbers)
        clock = time.process_time()
        masked = parties[name].mask(server.present(), setup.fixed_point.encode(update, setup.layout))
        seconds, clock = seconds + time.process_time() - clock, time.process_time()
        server.add_masked(name, masked)
        adding += time.process_time() - clock
    vector = torch.zeros(setup.layout.length, dtype=setup.dtype)
    clock = time.process_time()
    add_mask(vector, bytes(32), 1)
    one_mask = time.process_time() - clock
    return {
        "clients": clients,
        "dropped": dropped,
        "difference": None,
        "resolution": None,
        "up": dict(server.up),
        "down": dict(server.down),
        "up per client": len(masked) + (server.up["advertise"] + server.up["share_keys"]) // clients,
        "clear up per client": sum(serialization.byte_counts({"delta": update_of(0, numbers).delta}).values()),
        "client seconds": spent["client"] / clients + seconds / MEASURED,
        "server seconds": spent["server"] + adding / MEASURED * stayed + one_mask * stayed * (1 + dropped),
        "clear seconds": clear_seconds(MEASURED, numbers) / MEASURED * stayed,
        "estimated": True,
    }


if __name__ == "__main__":
    main()
