"""partita, by its defaults: play_partita.py WORK FINAL [WORKERS]."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing

import torch
from deals import setting
from work import Told, load

from partita import SimulationEngine, rounds
from partita.core.rounds import Engine
from partita.engines.autotune import choose_block
from partita.engines.multiprocess import MultiprocessEngine


def main() -> None:
    told, path, final = Told(), sys.argv[1], sys.argv[2]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    work = load(path)
    run, model, federation = setting(work.shape, len(work.parts), work.rounds)
    block = choose_block(run, model, federation, torch.device("cpu"), workers=count)
    embedded = SimulationEngine(run, model, federation, block=block)
    with ExitStack() as stack:
        engine: Engine = embedded
        if count == 1:
            told.ready(block=block)
        else:
            engine = stack.enter_context(closing(MultiprocessEngine(embedded, count)))
            told.ready(threads=f"{count} x 1", block=block)
        played = rounds(run, model, engine)
        for _ in range(work.rounds):
            told.wait()
            params = next(played).server.params
            told.round()
        told.done(params, final)


if __name__ == "__main__":
    main()
