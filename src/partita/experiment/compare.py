"""Several methods over several seeds: a folder a run, several runs side by side in processes."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

from partita.core.options import format_value
from partita.core.safe_text import label_folder
from partita.engines.ipc import end_with_parent
from partita.experiment import run_folder
from partita.experiment.config import Config, ConfigError, load

Planned = tuple[Path, Config]
MOST_SEEDS = 10_000


def expand(config: Path, changes: Iterable[str], methods: str, seeds: int, out: Path) -> list[Planned]:
    """The runs of a comparison, all checked before the first starts."""
    if not 1 <= seeds <= MOST_SEEDS:
        raise ConfigError(f"--seeds is {seeds}; it must be from 1 to {MOST_SEEDS:,}")
    planned: list[Planned] = []
    for spec in _specs(methods):
        settings = load(config, [*changes, "method={}", *_said(spec)])
        for seed in range(settings.seed, settings.seed + seeds):
            folder = out / label_folder(spec) / f"seed-{seed}"
            planned.append((folder, replace(settings, seed=seed, label=spec)))
    if twice := [folder for folder, times in Counter(folder for folder, _ in planned).items() if times > 1]:
        raise ConfigError(f"two of --methods '{methods}' would share the folder {twice[0]}; leave one of them out")
    for folder, settings in planned:
        _check_same(folder, settings)
    return planned


def compare_all(planned: list[Planned], jobs: int) -> Iterator[int]:
    """Play all runs, going on with those begun before; yields the number of rounds done, now and then."""
    left = [(folder, settings) for folder, settings in planned if not run_folder.finished(folder)]
    if not left:
        return
    jobs = min(jobs, len(left))
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), end_with_parent)
    try:
        futures = {pool.submit(_play, folder, settings, threads): settings for folder, settings in left}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in done:
                try:
                    future.result()
                except BrokenProcessPool as error:
                    raise OSError(
                        "a run's process died (out of memory?); start the comparison again to go on"
                    ) from error
                except Exception as error:
                    settings = futures[future]
                    error.args = (f"{settings.label}, seed {settings.seed}: {error}", *error.args[1:])
                    raise
            yield sum(run_folder.count_rows(folder) for folder, _ in planned)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _play(folder: Path, settings: Config, threads: int) -> None:
    from partita.experiment.runner import resume, start

    settings = replace(settings, engine=replace(settings.engine, threads=settings.engine.threads or threads))
    begun = (folder / run_folder.CONFIG).exists()
    for _ in resume(load(folder / run_folder.CONFIG), folder) if begun else start(settings, folder):
        pass


def _check_same(folder: Path, settings: Config) -> None:
    """A run that is already there is kept, so it must be the same one; how it is computed may differ."""
    path = folder / run_folder.CONFIG
    if path.exists():
        run_folder.verify(folder)
        there = load(path)
        if replace(there, engine=settings.engine) != replace(settings, engine=settings.engine):
            raise run_folder.RunFolderError(f"{folder} holds another experiment; delete it or give another --out")


def _specs(methods: str) -> list[str]:
    """'fedavg, fedprox(mu=0.1, x=2)' by the commas outside brackets."""
    found = [each.strip() for each in re.findall(r"[^,()]+(?:\([^)]*\))?", methods)]
    if not found or "".join(found).count("(") != methods.count("("):
        raise ConfigError(f"cannot read --methods {format_value(methods)}; write it as in 'fedavg,fedprox(mu=0.1)'")
    return found


def _said(spec: str) -> list[str]:
    """Options are the method's, unless a dot says whose they are, as in 'lora(rank=4, training.lr=0.1)'."""
    name, _, options = spec.partition("(")
    given = [each.strip() for each in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", options.rstrip(")"))]
    own = [each if "." in each.partition("=")[0] else f"method.{each}" for each in given if each]
    return [f"method.name={name.strip()}", *own]
