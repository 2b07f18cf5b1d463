"""Tune several methods under one budget, on the clients' validation parts. Every trial is a recorded run.

A tuning folder holds:
    tune.json                           what was asked
    trials/METHOD/NUMBER/trial.json     what a trial tried, and its score
    trials/METHOD/NUMBER/seed-N         its run, one for each seed, without checkpoints once the trial has ended
    chosen.json, chosen/METHOD.toml     the best settings, once all trials have ended
"""

from __future__ import annotations

import math
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import tomli_w

from partita.core.client import ClientError
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.experiment import run_folder
from partita.experiment.builder import build
from partita.experiment.compare import MAX_SEEDS, load_method
from partita.experiment.config import NOT_THE_RUN, Config, ConfigError, settings_by_key
from partita.experiment.config_code import code_copies
from partita.experiment.early_stopping import validation_metric
from partita.experiment.process_pool import run_in_processes
from partita.experiment.run_folder import RunFolderError
from partita.experiment.run_names import split_methods
from partita.experiment.runner import start_or_resume
from partita.experiment.search_space import Space, check_methods, checked, parse_space, spaces_of, with_settings
from partita.experiment.trial_sampler import Outcome, Pruner, Sampler, Search
from partita.record import file_names
from partita.record.metric import Metric
from partita.storage.atomic_files import DamageError, LinkError, read_json
from partita.storage.safe_text import label_folder


def validation_only(config: Config, metric: str | None, disclose: bool) -> Config:
    """Return a config that is scored on validation and never touches a test set.

    Args:
        config: The config.
        metric: The validation metric. None: that of the config.
        disclose: Whether clients of a private run report their validation scores.
    """
    evaluate = replace(
        config.evaluate,
        every=0,
        personal_every=0,
        samples=0,
        subgroups=None,
        subgroup_min=None,
        validation_every=config.validation_every or 1,
        validation_metric=metric or config.evaluate.validation_metric,
    )
    privacy = config.privacy and replace(config.privacy, disclose_validation=disclose)
    return replace(config, evaluate=evaluate, privacy=privacy)


MAX_BUDGET = 10_000
FIRST_SEED = MAX_SEEDS  # added to the config's seed: a comparison counts up from there and never gets as far
State = Literal["running", "complete", "pruned", "failed"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """What a user asks of a tuning. Two starts with the same options and the same config continue the same tuning."""

    methods: str
    spaces: tuple[str, ...]
    budget: int = 20
    seeds: int = 1
    search: Search = "tpe"
    metric: str | None = None
    prune: bool = True
    seed: int = 0
    disclose_validation: bool = False


@dataclass(frozen=True)
class Trial:
    """One setting of a method, and what came of it.

    Attributes:
        number: Its number, from 0: the settings of the config.
        settings: What it tried: texts by key of the config. A key that the config leaves out is missing.
        state: "running", "complete", "pruned" (stopped, because it was worse than the median) or "failed".
        metric: The metric of the score.
        score: The final score on validation, mean over seeds; None if it is not complete.
        scores: (completed rounds of all its runs, score) of each validation.
        rounds: Rounds that it has trained, over all seeds.
        reason: Why it failed.
        epsilon: Under privacy, the epsilon that its runs have spent, added up; None if it is not known.
        delta: The delta of that epsilon.
    """

    number: int
    settings: Mapping[str, str]
    state: State = "running"
    metric: Mapping[str, Any] = field(default_factory=dict)
    score: float | None = None
    scores: tuple[tuple[int, float], ...] = ()
    rounds: int = 0
    reason: str = ""
    epsilon: float | None = None
    delta: float | None = None

    def outcome(self) -> Outcome:
        """Return what the sampler needs to know."""
        return Outcome(self.settings, self.scores if self.state != "failed" else (), self.score)


@dataclass(frozen=True)
class Study:
    """The tuning of one method.

    Attributes:
        spec: The method, with its options.
        config: The base config file.
        changes: Overrides for every trial.
        options: What was asked.
        spaces: What may be chosen.
        default: The config without any choice.
        folder: The folder of its trials.
    """

    spec: str
    config: Path
    changes: tuple[str, ...]
    options: Options
    spaces: tuple[Space, ...]
    default: Config
    folder: Path

    def load(self, settings: Mapping[str, str]) -> Config:
        """Load the config with these settings."""
        return load_method(self.config, self.changes, with_settings(self.spec, settings))

    def trials(self) -> list[Trial]:
        """Return all trials so far, in order."""
        found = []
        for number in range(self.options.budget):
            path = self.folder / f"{number:03}" / file_names.TRIAL
            if not os.path.lexists(path):
                break
            with run_folder.expect_format(path):
                stored = read_json(path)
                found.append(Trial(**{**stored, "scores": tuple((step, score) for step, score in stored["scores"])}))
        return found


def plan_tuning(config: Path, changes: Sequence[str], options: Options, out: Path) -> list[Study]:
    """Check everything that can be checked before the first run, and return the tuning of each method.

    Args:
        config: The base config file.
        changes: Overrides for every trial.
        options: What to tune.
        out: The tuning folder.

    Raises:
        OptionError: If an option or a space is wrong, or the config holds out no validation examples.
        RunFolderError: If the folder holds another tuning.
    """
    for name, value, high in (("budget", options.budget, MAX_BUDGET), ("seeds", options.seeds, MAX_SEEDS)):
        if not 1 <= value <= high:
            raise OptionError(f"--{name} is {value}; it must be from 1 to {high:,}")
    specs, spaces = split_methods(options.methods), [parse_space(text) for text in options.spaces]
    check_methods(specs, spaces)
    studies: list[Study] = []
    for spec in specs:
        default = load_method(config, changes, spec)
        folder = out / file_names.TRIALS / label_folder(default.label)
        if any(study.folder == folder for study in studies):
            raise ConfigError(f"two of --methods '{options.methods}' would share the folder {folder}; remove one")
        _check_validation(default, options)
        study = Study(spec, config, tuple(changes), options, (), default, folder)
        own = tuple(checked(space, study.load, default.label) for space in spaces_of(spec, spaces))
        studies.append(replace(study, spaces=own))
        if options.search == "grid":
            _sampler(studies[-1], higher_is_better=True).grid()
    _check_same(_asked(studies, options), out)
    return studies


def tune_all(studies: Sequence[Study], out: Path, jobs: int) -> Iterator[tuple[Study, ...]]:
    """Run all trials of all methods, continuing those already started, and write what was chosen.

    The trials of one method run one after the other, because each follows from those before. Methods run side by side.
    So the result does not depend on `jobs`.

    Args:
        studies: The methods.
        out: The tuning folder.
        jobs: Maximum number of methods at a time.

    Yields:
        The methods that finished since the last time, every half second.
    """
    with run_folder.lock(out):
        run_folder.write_json(out / file_names.TUNING, _asked(studies, studies[0].options))
        jobs = min(jobs, len(studies))
        threads = max(1, (os.cpu_count() or 1) // jobs)
        by_name = {study.default.label: study for study in studies}
        unfinished = {name: (study, threads) for name, study in by_name.items() if not _ended(study, study.trials())}
        for done in run_in_processes(tune_method, unfinished, jobs) if unfinished else ():
            yield tuple(by_name[name] for name in done)
        _write_chosen(studies, out)


def tune_method(study: Study, threads: int | None = None) -> None:
    """Run the trials of one method that are still to be run.

    Args:
        study: The method.
        threads: Number of torch threads, if the config does not set it.
    """
    done = study.trials()
    tuned = validation_only(study.default, study.options.metric, study.options.disclose_validation)
    # The direction of the metric is that of the task, which must be loaded for it. Errors in the config show here.
    metric = validation_metric(tuned, build(replace(tuned, seed=tuned.seed + FIRST_SEED)).evaluator)
    while not _ended(study, done):
        started = [trial for trial in done if trial.state == "running"]
        earlier = [trial for trial in done if trial.state != "running"]
        outcomes = [trial.outcome() for trial in earlier]
        if not started:
            settings = _sampler(study, metric.higher_is_better).propose(outcomes)
            if settings is None:
                return
            started = [Trial(len(earlier), settings, metric=asdict(metric))]
            _write(study, started[0])
        ended = _run_trial(study, started[0], outcomes, metric, threads)
        _write(study, ended)
        for folder in _runs(study, ended):  # only a run that goes on needs them, and they are large
            for name in (file_names.CHECKPOINTS, file_names.CLIENTS):
                shutil.rmtree(folder / name, ignore_errors=True)
        done = [*earlier, ended]


def chosen(study: Study) -> Trial:
    """Return the trial with the best score, the first of equal ones.

    Raises:
        OptionError: If no trial is complete.
    """
    complete = [trial for trial in study.trials() if trial.state == "complete"]
    if not complete:
        raise OptionError(
            f"no trial of {study.default.label} is complete, so there is nothing to choose; see 'reason' in the files "
            f"{study.folder}/*/{file_names.TRIAL}, and change --space or the config"
        )
    sign = 1 if complete[0].metric["higher_is_better"] else -1
    return max(complete, key=lambda trial: (sign * (trial.score or 0.0), -trial.number))


def chosen_methods(studies: Sequence[Study]) -> str:
    """Return the methods with their chosen settings, as `compare --methods` takes them."""
    return ",".join(with_settings(study.spec, _changed(study, chosen(study))) for study in studies)


def _changed(study: Study, trial: Trial) -> dict[str, str]:
    """Return the settings in which a trial differs from the config."""
    default = _default_settings(study)
    return {key: text for key, text in trial.settings.items() if default.get(key) != text}


def _run_trial(study: Study, trial: Trial, earlier: Sequence[Outcome], metric: Metric, threads: int | None) -> Trial:
    """Run a trial, or what is left of it, and return it with its outcome."""
    options, rounds = study.options, study.default.rounds
    pruner = Pruner(study.spaces, earlier, options.budget, rounds, metric.higher_is_better) if options.prune else None
    scores: list[tuple[int, float]] = []
    finals: list[float] = []
    trained = 0
    spent: dict[Path, Row] = {}

    def ended(state: State, score: float | None = None, reason: str = "") -> Trial:
        costs = [row["epsilon"] for row in spent.values()]
        return replace(
            trial,
            state=state,
            score=score,
            scores=tuple(scores),
            rounds=trained,
            reason=reason,
            epsilon=sum(costs) if costs and None not in costs else None,
            delta=sum(row["delta"] for row in spent.values()) if spent else None,
        )

    for place, folder in enumerate(_runs(study, trial)):
        last = math.nan
        try:
            config = _trial_config(study, trial, place, threads)
            for row in _rows(config, folder):
                trained += 1
                if "privacy" in row:
                    spent[folder] = row["privacy"]
                if "validation" not in row:
                    continue
                last = row["validation"].get(metric.name, math.nan)
                scores.append((place * rounds + row["round"] + 1, sum([*finals, last]) / (place + 1)))
                # The first trial is the config as it is: the reader wants its score in any case.
                if pruner and pruner.stops(*scores[-1]) and trial.number:
                    return ended("pruned")
        except (ClientError, ValueError) as error:
            if isinstance(error, RunFolderError | DamageError | LinkError):
                raise
            # If the config itself cannot be run, neither can the other trials. A client fails if training diverges.
            if not trial.number and not trained and not isinstance(error, ClientError):
                raise
            return ended("failed", reason=str(error))
        if not math.isfinite(last):
            return ended("failed", reason=f"{metric.name} on validation is not a number after the last round")
        finals.append(last)
    return ended("complete", sum(finals) / len(finals))


def _rows(config: Config, folder: Path) -> Iterator[Row]:
    """Yield all rows of a run: those that are saved, and then those of the rounds that are left."""
    saved = 0
    if (folder / file_names.CONFIG).exists():
        saved = run_folder.count_rows(folder) if run_folder.finished(folder) else run_folder.saved_rounds(folder)
    before = list(islice(run_folder.read_rows(folder), saved))
    return chain(before, start_or_resume(config, folder))


def _trial_config(study: Study, trial: Trial, place: int, threads: int | None) -> Config:
    changed = study.load(_changed(study, trial))
    config = validation_only(changed, study.options.metric, study.options.disclose_validation)
    engine = replace(config.engine, threads=config.engine.threads or threads)
    return replace(config, seed=study.default.seed + FIRST_SEED + place, engine=engine)


def _check_validation(config: Config, options: Options) -> None:
    if config.privacy and (config.privacy.unit == "client" or not options.disclose_validation):
        accept = "" if config.privacy.unit == "client" else ", or accept that with --disclose-validation"
        raise OptionError(
            "tuning reads exact scores on the clients' validation examples, which the guarantee of [privacy] does not "
            f"cover; tune on public data of the same kind{accept}"
        )
    if options.disclose_validation and not config.privacy:
        raise OptionError("--disclose-validation is for a config with a table [privacy]; leave it out")
    if not config.split["validation"]:
        raise OptionError(
            "split.validation is 0, so no client has validation examples to tune on; set it, e.g. with "
            "--set split.validation=0.1"
        )
    if config.validation_every > config.rounds:
        raise OptionError(
            f"evaluate.validation_every is {config.validation_every}, but there are only {config.rounds} rounds; "
            "lower it, or leave it out"
        )


def _sampler(study: Study, higher_is_better: bool) -> Sampler:
    options = study.options
    key = Key(options.seed) / "tune"
    return Sampler(study.spaces, options.search, _default_settings(study), options.budget, higher_is_better, key)


def _default_settings(study: Study) -> dict[str, str]:
    known = settings_by_key(study.default)
    return {space.key: known[space.key] for space in study.spaces if space.key in known}


def _runs(study: Study, trial: Trial) -> list[Path]:
    first = study.default.seed + FIRST_SEED
    folder = study.folder / f"{trial.number:03}"
    return [folder / f"seed-{seed}" for seed in range(first, first + study.options.seeds)]


def _write(study: Study, trial: Trial) -> None:
    path = study.folder / f"{trial.number:03}" / file_names.TRIAL
    path.parent.mkdir(parents=True, exist_ok=True)
    run_folder.write_json(path, asdict(trial))


def _ended(study: Study, trials: Sequence[Trial]) -> bool:
    return len(trials) == study.options.budget and trials[-1].state != "running"


def _asked(studies: Sequence[Study], options: Options) -> dict[str, Any]:
    """Return what a tuning is asked to do, by name. The settings of each method are those of the config."""
    methods = []
    for study in studies:
        settings = settings_by_key(study.default)
        known = {key: text for key, text in settings.items() if not key.startswith(NOT_THE_RUN)}
        methods.append(
            {
                "label": study.default.label,
                "folder": study.folder.name,
                "spaces": [space.text for space in study.spaces],
                "settings": known,
            }
        )
    first = studies[0].default
    return {
        "methods": methods,
        **{key: value for key, value in asdict(options).items() if key not in ("methods", "spaces")},
        "rounds": first.rounds,
        "first_seed": first.seed + FIRST_SEED,
    }


def _check_same(asked: Mapping[str, Any], out: Path) -> None:
    """Raise RunFolderError if the folder holds a tuning that was asked otherwise."""
    path = out / file_names.TUNING
    if not os.path.lexists(path):
        if os.path.lexists(out / file_names.TRIALS):
            raise RunFolderError(f"{out} holds trials but no {file_names.TUNING}; choose another folder with --out")
        return
    with run_folder.expect_format(path):
        there = read_json(path)
        differing = [
            f"--{key.replace('_', '-')} is {there.get(key)} there and {value} here"
            for key, value in asked.items()
            if key not in ("methods", "rounds", "first_seed") and there.get(key) != value
        ]
        left, right = ({each["label"]: each for each in side["methods"]} for side in (there, asked))
        if list(left) != list(right):
            differing.append(f"--methods is {','.join(left)} there and {','.join(right)} here")
        for label in [label for label in left if label in right]:
            one, other = (
                {**side[label]["settings"], "spaces": "; ".join(side[label]["spaces"])} for side in (left, right)
            )
            differing += [
                f"{key} of {label} is {one.get(key, 'not set')} there and {other.get(key, 'not set')} here"
                for key in {**one, **other}
                if one.get(key) != other.get(key)
            ]
    if differing:
        more = f" (and {len(differing) - 3} more)" if len(differing) > 3 else ""
        raise RunFolderError(
            f"{out} holds another tuning: {', '.join(differing[:3])}{more}; choose another folder with --out"
        )


def _write_chosen(studies: Sequence[Study], out: Path) -> None:
    """Write the best settings of each method, as a list and as configs."""
    folder, listed = out / "chosen", []
    folder.mkdir(exist_ok=True)
    for study in studies:
        best = chosen(study)
        config = study.load(_changed(study, best))
        raw = tomllib.loads(config.to_toml())
        raw.pop("code", None)  # digests, which would forbid the user to edit the code
        for name, text in code_copies(config.references()).items():
            (folder / name).parent.mkdir(exist_ok=True)
            run_folder.write(folder / name, text)
        run_folder.write(folder / f"{study.folder.name}.toml", tomli_w.dumps(raw).encode())
        listed.append({"method": study.default.label, "trial": best.number, "label": config.label})
    run_folder.write_json(out / file_names.CHOSEN, {"methods": listed})
