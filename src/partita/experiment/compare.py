"""Compare several methods over several seeds. Each run has its own folder; several run in parallel processes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from partita.core.options import format_value
from partita.experiment import run_folder
from partita.experiment.config import Config, ConfigError, load, settings_by_key
from partita.experiment.process_pool import run_in_processes
from partita.experiment.run_names import method_label, overrides_of, split_methods
from partita.record import file_names
from partita.storage.processes import this_process
from partita.storage.safe_text import label_folder

Planned = tuple[Path, Config]
MAX_SEEDS = 10_000


@dataclass(frozen=True)
class Status:
    """How far a comparison has come.

    Attributes:
        rounds: Rounds that all runs together have recorded.
        finished: The runs that finished since the last status.
    """

    rounds: int
    finished: tuple[Planned, ...] = ()


def expand(
    config: Path, changes: Iterable[str], methods: str, seeds: int, out: Path, overwrite: bool = False
) -> list[Planned]:
    """Expand a comparison into its runs. All are checked before the first one starts.

    Args:
        config: The base config file.
        changes: Overrides for every run.
        methods: Comma-separated methods with options, such as "fedavg,fedprox(mu=0.1)".
        seeds: Number of seeds, counting up from the config's seed.
        out: Parent folder of all runs.
        overwrite: Whether existing runs will be replaced.

    Returns:
        (run folder, config) of each run.

    Raises:
        ConfigError: If an argument cannot be read, or two runs would share a folder.
        RunFolderError: If a folder already holds another run; with `overwrite`, if one is not a run folder.
    """
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"--seeds is {seeds}; it must be from 1 to {MAX_SEEDS:,}")
    planned: list[Planned] = []
    for spec in split_methods(methods):
        settings = _grouped(load_method(config, changes, spec), out)
        for seed in range(settings.seed, settings.seed + seeds):
            folder = out / label_folder(settings.label) / f"seed-{seed}"
            planned.append((folder, replace(settings, seed=seed)))
    if shared := [folder for folder, times in Counter(folder for folder, _ in planned).items() if times > 1]:
        raise ConfigError(
            f"two of --methods {format_value(methods)} would share the folder {shared[0]}; remove one of them"
        )
    for folder, settings in planned:
        if overwrite:
            run_folder.refuse_others(folder)
        elif (folder / file_names.CONFIG).exists():
            from partita.experiment.runner import check_same_run

            check_same_run(settings, folder)
    return planned


def compare_all(planned: list[Planned], jobs: int, overwrite: bool = False) -> Iterator[Status]:
    """Run all planned runs, resuming those already started.

    Args:
        planned: The runs.
        jobs: Maximum number of runs in parallel.
        overwrite: Replace existing runs instead of resuming them.

    Yields:
        The status, every half second.

    Raises:
        OSError: If the process of a run died. Any other error of a run is raised again with its label and seed.
    """
    unfinished = [(folder, settings) for folder, settings in planned if overwrite or not run_folder.finished(folder)]
    if not unfinished:
        return
    jobs = min(jobs, len(unfinished))
    threads = max(1, (os.cpu_count() or 1) // jobs)
    stamps = {folder: run_folder.changed_at(folder) for folder, _ in planned} if overwrite else {}
    announced = announce(planned)
    tasks = {f"{settings.label}, seed {settings.seed}": (folder, settings) for folder, settings in unfinished}
    arguments = {name: (*run, threads, overwrite) for name, run in tasks.items()}
    try:
        for done in run_in_processes(_run_one, arguments, jobs):
            # The rows of runs that are still to be replaced do not count.
            counted = [
                folder for folder, _ in planned if not overwrite or run_folder.changed_at(folder) != stamps[folder]
            ]
            yield Status(sum(map(run_folder.count_rows, counted)), tuple(tasks[name] for name in done))
    finally:
        if announced:
            announced.unlink(missing_ok=True)


def announce(planned: list[Planned]) -> Path | None:
    """Write the list of all runs beside them, so that `partita watch` shows those that have not started.

    Returns:
        The file; None if there is a single run.
    """
    if len(planned) < 2:
        return None
    common = Path(os.path.commonpath([folder for folder, _ in planned]))
    runs = [
        {"folder": folder.relative_to(common).as_posix(), "label": each.label, "seed": each.seed, "rounds": each.rounds}
        for folder, each in planned
    ]
    run_folder.write_json(common / file_names.COMPARISON, {"process": this_process(), "runs": runs})
    return common / file_names.COMPARISON


def _run_one(folder: Path, settings: Config, threads: int, overwrite: bool) -> None:
    settings = replace(settings, engine=replace(settings.engine, threads=settings.engine.threads or threads))
    from partita.experiment.runner import start, start_or_resume

    for _ in start(settings, folder, overwrite=True) if overwrite else start_or_resume(settings, folder):
        pass


def load_method(config: Path, changes: Iterable[str], spec: str) -> Config:
    """Load the config with one method in place of its own. The label shows all that the method's options change.

    Args:
        config: The base config file.
        changes: Overrides of the file.
        spec: A method with options, such as "lora(rank=4, training.lr=0.1)".
    """
    own, other = overrides_of(spec)
    settings, old = load(config, [*changes, "method={}", *own, *other]), dict[str, str]()
    with suppress(ValueError):  # the other options may be needed to make the config valid; then the label shows all
        old = settings_by_key(load(config, [*changes, "method={}", *own])) if other else {}
    new = settings_by_key(settings)
    given = [option.partition("=")[0].strip() for option in other]
    # An option of a table inside a table, model.adapter.rank, may be set alone or with the whole table.
    keys = dict.fromkeys(
        key for option in given for key in new if f"{key}.".startswith(f"{option}.") or key == _key(option)
    )
    changed = {key: new[key] for key in keys if old.get(key) != new[key]}
    return replace(settings, label=method_label(settings.method, changed))


def _grouped(settings: Config, out: Path) -> Config:
    """Let trackers show the runs of a comparison together, under the name of its folder."""
    if not settings.track.to or settings.track.group:
        return settings
    return replace(settings, track=replace(settings.track, group=out.resolve().name))


def _key(option: str) -> str:
    """Return the key of a setting that an override changes, such as split.weights for split.weights.a."""
    return ".".join(option.split(".")[:2])
