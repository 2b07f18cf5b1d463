"""Compare several methods over several seeds. Each run has its own folder; several run in parallel processes."""

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
from partita.engines.ipc import end_with_parent
from partita.experiment import run_folder
from partita.experiment.config import Config, ConfigError, load
from partita.storage.safe_text import label_folder

Planned = tuple[Path, Config]
MAX_SEEDS = 10_000


def expand(config: Path, changes: Iterable[str], methods: str, seeds: int, out: Path) -> list[Planned]:
    """Expand a comparison into its runs. All are checked before the first one starts.

    Args:
        config: The base config file.
        changes: Overrides for every run.
        methods: Comma-separated methods with options, such as "fedavg,fedprox(mu=0.1)".
        seeds: Number of seeds, counting up from the config's seed.
        out: Parent folder of all runs.

    Returns:
        (run folder, config) of each run.

    Raises:
        ConfigError: If an argument cannot be read, or two runs would share a folder.
        RunFolderError: If a folder already holds another experiment.
    """
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"--seeds is {seeds}; it must be from 1 to {MAX_SEEDS:,}")
    planned: list[Planned] = []
    for spec in _specs(methods):
        settings = load(config, [*changes, "method={}", *_overrides(spec)])
        for seed in range(settings.seed, settings.seed + seeds):
            folder = out / label_folder(spec) / f"seed-{seed}"
            planned.append((folder, replace(settings, seed=seed, label=spec)))
    if shared := [folder for folder, times in Counter(folder for folder, _ in planned).items() if times > 1]:
        raise ConfigError(f"two of --methods '{methods}' would share the folder {shared[0]}; remove one of them")
    for folder, settings in planned:
        _check_same(folder, settings)
    return planned


def compare_all(planned: list[Planned], jobs: int) -> Iterator[int]:
    """Run all planned runs, resuming those already started.

    Args:
        planned: The runs.
        jobs: Maximum number of runs in parallel.

    Yields:
        The total number of finished rounds, every half second or when a run ends.

    Raises:
        OSError: If the process of a run died. Any other error of a run is raised again with its label and seed.
    """
    unfinished = [(folder, settings) for folder, settings in planned if not run_folder.finished(folder)]
    if not unfinished:
        return
    jobs = min(jobs, len(unfinished))
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), end_with_parent)
    try:
        futures = {pool.submit(_run_one, folder, settings, threads): settings for folder, settings in unfinished}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in done:
                try:
                    future.result()
                except BrokenProcessPool as error:
                    raise OSError(
                        "the process of a run died (out of memory?); start the comparison again to continue"
                    ) from error
                except Exception as error:
                    settings = futures[future]
                    error.args = (f"{settings.label}, seed {settings.seed}: {error}", *error.args[1:])
                    raise
            yield sum(run_folder.count_rows(folder) for folder, _ in planned)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_one(folder: Path, settings: Config, threads: int) -> None:
    from partita.experiment.runner import resume, start

    settings = replace(settings, engine=replace(settings.engine, threads=settings.engine.threads or threads))
    started = (folder / run_folder.CONFIG).exists()
    for _ in resume(load(folder / run_folder.CONFIG), folder) if started else start(settings, folder):
        pass


def _check_same(folder: Path, settings: Config) -> None:
    """Check that an existing run has the same config. Only the engine settings may differ."""
    path = folder / run_folder.CONFIG
    if path.exists():
        run_folder.verify(folder)
        recorded = load(path)
        if replace(recorded, engine=settings.engine) != replace(settings, engine=settings.engine):
            raise run_folder.RunFolderError(f"{folder} holds another experiment; delete it or choose another --out")


def _specs(methods: str) -> list[str]:
    """Split 'fedavg, fedprox(mu=0.1, x=2)' at the commas outside parentheses."""
    specs = [spec.strip() for spec in re.findall(r"[^,()]+(?:\([^)]*\))?", methods)]
    if not specs or "".join(specs).count("(") != methods.count("("):
        raise ConfigError(f"cannot read --methods {format_value(methods)}; write it as in 'fedavg,fedprox(mu=0.1)'")
    return specs


def _overrides(spec: str) -> list[str]:
    """Turn a spec into overrides. An option without a dot is the method's, as in 'lora(rank=4, training.lr=0.1)'."""
    name, _, options = spec.partition("(")
    given = [option.strip() for option in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", options.rstrip(")"))]
    overrides = [option if "." in option.partition("=")[0] else f"method.{option}" for option in given if option]
    return [f"method.name={name.strip()}", *overrides]
