"""Flower's simulation, two clients side by side, each on one core: play_flower.py WORK FINAL [test]."""

from __future__ import annotations

import sys

import flower_app
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from work import Told, load


def main() -> None:
    told, path, final = Told(), sys.argv[1], sys.argv[2]
    work = load(path)
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        told.ready(threads="2 x 1")
        played = flower_app.play(grid, path, len(work.parts), work.rounds, work.start)
        for _ in range(work.rounds):
            told.wait()
            mean = next(played)
            told.round()
        if "test" in sys.argv[3:]:
            print(f"accuracy {flower_app.accuracy(mean, path):.4f}", file=sys.stderr)
        told.done(mean, final)

    run_simulation(
        server, flower_app.client_app, num_supernodes=len(work.parts),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )  # fmt: skip


if __name__ == "__main__":
    main()
