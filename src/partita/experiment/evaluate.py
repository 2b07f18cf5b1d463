"""Evaluate the model of a run, or an exported one, on the run's test set or on other data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.client import client_model
from partita.core.data import Examples
from partita.core.model import Model
from partita.core.options import OptionError, closest_match
from partita.core.rng import Key
from partita.core.rounds import make_job
from partita.core.tensors import Tensors
from partita.data import Task
from partita.data.other_data import OtherData, Unknown, read_other
from partita.evaluation import Evaluator, outcomes_of
from partita.evaluation.answers import with_generation
from partita.evaluation.bootstrap import LEVEL, Interval, intervals
from partita.evaluation.evaluator import by_type, without_types
from partita.evaluation.outcomes import Outcomes
from partita.experiment import exported, run_folder
from partita.experiment.recorded_model import RecordedModel, RoundChoice, load_recorded_model
from partita.experiment.subgroups import MAX_GROUPS, MISSING
from partita.models.exported import adapter_base, load_exported
from partita.tasks import KINDS, TaskKind

CLASS, CLIENT = "class", "client"  # words of `by` that are no columns
LEAST = 10
RESAMPLES = 1000
NOT_COVERED = (
    "the run is private, but its epsilon does not cover this evaluation: the scores say something about the rows that "
    "they are computed on"
)


@dataclass(frozen=True)
class Options:
    """What to evaluate, and how.

    Attributes:
        data: File, folder or Hub id; None for the run's own test set.
        split: Part of the data. Default: "test" if there is one, or the only one.
        round: Which checkpoint of a run.
        client: The client whose own model to evaluate; None for the server's.
        all_clients: Evaluate the own model of every client.
        by: Columns to group rows by; "class" and "client" have a meaning of their own.
        groups: Column whose values are drawn together in the bootstrap, such as a patient. Default: what the data says.
        bootstrap: Number of resamples; 0 for no intervals.
        seed: Seed of the resamples.
        least: Groups with fewer examples are marked as small.
        unknown_labels: What to do with rows whose label the model does not know.
        base: Folder or Hub id of the model under an exported adapter or prompts.
        device: "cpu", "cuda" or "auto".
        trust_code: Run own code in the folder of a run even if this user has not run it before.
    """

    data: str | None = None
    split: str | None = None
    round: RoundChoice = "last"
    client: str | None = None
    all_clients: bool = False
    by: tuple[str, ...] = ()
    groups: str | None = None
    bootstrap: int = RESAMPLES
    seed: int = 0
    least: int = LEAST
    unknown_labels: Unknown = "error"
    base: str | None = None
    device: str = "auto"
    trust_code: bool = False


@dataclass(frozen=True)
class Source:
    """A trained model with what is needed to read data for it.

    Attributes:
        kind: Its kind of task.
        classes: The names of its outputs.
        reading: The keys of `[data]` that say how a row is read.
        tokenizer: Folder or Hub id of its tokenizer; None if it needs none.
        private: Whether it was trained with a privacy guarantee.
        about: What the result says about it.
        load: Builds the model for a task, and returns it with its parameters.
        evaluator: Its evaluator.
        recorded: The run, if the model is not an exported one.
        site_column: The column whose values were the clients, if there is one.
        group_column: The column whose rows belong together, if there is one.
    """

    kind: TaskKind
    classes: tuple[str, ...]
    reading: Mapping[str, Any]
    tokenizer: str | None
    private: bool
    about: Mapping[str, Any]
    load: Callable[[Task], tuple[Model, Tensors]]
    evaluator: Evaluator
    recorded: RecordedModel | None = None
    site_column: str | None = None
    group_column: str | None = None


def evaluate_folder(folder: Path, options: Options) -> dict[str, Any]:
    """Evaluate the model of a run folder or of an exported folder.

    Returns:
        "model" and "data": what was evaluated on what. "scores": each score with "value", "low" and "high". "by": the
        scores of groups, by column and value. "worst_tenth": the mean over the worst tenth of the clients. "confusion"
        and "calibration", if something is classified. "notes": what a reader should know.

    Raises:
        ValueError: If the folder, the data and the options do not fit each other.
    """
    if options.client is not None and options.all_clients:
        raise OptionError("--client is for one client and --all-clients for all; choose one")
    source = open_source(folder, options.round, options.client, options.base, options.device, options.trust_code)
    if options.all_clients and source.recorded is None:
        raise OptionError(f"--all-clients needs a run folder, but {folder} is an exported model; evaluate its run")
    other = None
    if options.data is not None:
        other = read_other(
            options.data,
            source.reading,
            source.kind,
            source.classes,
            source.tokenizer,
            options.split,
            options.unknown_labels,
        )
        task = other.task
    elif source.recorded is None:
        raise OptionError(f"{folder} is an exported model, which has no test set; name the data with --data")
    else:
        task = source.recorded.experiment.federation.task
    _check_by(options, source, task, other)
    model, params = source.load(task)
    return _Evaluation(options, source, task, other, model, params).result()


def open_source(
    folder: Path,
    round: RoundChoice = "last",
    client: str | None = None,
    base: str | None = None,
    device: str = "auto",
    trust_code: bool = False,
) -> Source:
    """Open a run folder or an exported folder.

    Raises:
        ValueError: If it is neither, or there is no such round or client.
    """
    run_folder.require_model(folder)
    if exported.holds_export(folder):
        if client is not None:
            raise OptionError(f"--client needs a run folder, but {folder} is an exported model; name its run")
        return _open_export(folder, base, _device(device))
    recorded = load_recorded_model(folder, round, trust_code)
    experiment, config = recorded.experiment, recorded.experiment.config
    task = experiment.federation.task
    reading = {key: value for key, value in config.data.items() if key not in exported.OF_THE_RUN}
    if task.kind.inputs == "image" and "size" in reading:
        reading["size"] = task.size
    split = config.split
    return Source(
        kind=task.kind,
        classes=task.classes,
        reading=reading,
        tokenizer=config.data.get("tokenizer") or config.model.get("path"),
        private=experiment.guard is not None,
        about={
            "folder": str(folder),
            "kind": task.kind.name,
            "method": config.method["name"],
            "round": recorded.saved.done,
            "client": client,
        },
        load=lambda _: client_and_params(recorded, client),
        evaluator=experiment.evaluator,
        recorded=recorded,
        site_column=split.get("column") if split.get("name") == "by_column" else None,
        group_column=split.get("column") if split.get("name") == "groups" else _group_column(config.data),
    )


def client_and_params(recorded: RecordedModel, client: str | None) -> tuple[Model, Tensors]:
    """Return the model as a client runs it, and its parameters; the server's if `client` is None."""
    experiment, params = recorded.experiment, recorded.params(client)
    if client is None:
        return experiment.model, params
    job, _ = make_job(experiment.run, experiment.model, recorded.saved.server, recorded.saved.done - 1, client)
    return client_model(experiment.run, experiment.model, job), params


def _open_export(folder: Path, base: str | None, device: torch.device) -> Source:
    export = exported.read_export(folder)
    kind = KINDS[export.kind]
    under = adapter_base(folder) if export.form == "adapter" and base is None else base
    reading = dict(export.data)
    if export.images is not None and reading:
        reading |= {"size": export.images.size, "channels": export.images.channels}
        if export.images.mean:
            reading |= {"mean": export.images.mean, "std": export.images.std}

    def load(task: Task) -> tuple[Model, Tensors]:
        model = load_exported(folder, export.form, task, export.model, under)
        model.to(device)
        return model, model.initial

    # The decoder's first token is in the config of a model, which the folder of an adapter does not have.
    needs_config = kind.head == "seq2seq" and export.form == "adapter"
    return Source(
        kind=kind,
        classes=export.labels,
        reading=reading or {"name": "own code"},
        tokenizer=under if needs_config else str(folder),
        private=export.privacy_unit is not None,
        about={
            "folder": str(folder),
            "kind": export.kind,
            "method": export.method,
            "round": export.round,
            "client": export.client,
        },
        load=load,
        evaluator=with_generation(kind.evaluator(export.labels), None, None),
        group_column=_group_column(reading),
    )


def _group_column(data: Mapping[str, Any]) -> str | None:
    """Return the column of rows that belong together: sentences of a document, or blocks of an author."""
    return "document" if data.get("name") in ("brat", "i2b2") else data.get("group")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device is 'cuda', but torch sees no GPU; use 'cpu'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _check_by(options: Options, source: Source, task: Task, other: OtherData | None) -> None:
    """Refuse columns that do not exist before anything runs."""
    columns = task.test_columns
    for name in (*options.by, *([options.groups] if options.groups else [])):
        if name == CLASS and name not in columns:
            if not source.classes:
                raise OptionError(f"--by class: a task of kind '{source.kind.name}' has no classes; leave it out")
        elif name == CLIENT and name not in columns:
            if other is not None and source.site_column is None and not options.all_clients:
                raise OptionError(
                    "--by client: the clients of the run were not made by a column, so other data has none; name a "
                    "column of the data, or use --all-clients"
                )
            if other is not None and source.site_column is not None and source.site_column not in columns:
                raise OptionError(f"--by client: the data has no column '{source.site_column}', which made the clients")
        elif name not in columns:
            hint = closest_match(name, columns) if columns else "the data has no columns of texts or integers"
            raise OptionError(f"--by or --groups names the column '{name}', which the data does not have; {hint}")
        elif name in options.by and (count := len(np.unique(columns[name]))) > MAX_GROUPS:
            raise OptionError(f"--by {name}: the column has {count} values; name one with at most {MAX_GROUPS}")


@dataclass(frozen=True)
class _Evaluation:
    options: Options
    source: Source
    task: Task
    other: OtherData | None
    model: Model
    params: Tensors

    def result(self) -> dict[str, Any]:
        options, task = self.options, self.task
        own_parts = options.all_clients and self.other is None
        unit = self._unit()
        result: dict[str, Any] = {"model": dict(self.source.about), "data": self._data(unit)}
        result["bootstrap"] = {
            "resamples": options.bootstrap,
            "seed": options.seed,
            "level": LEVEL,
            "unit": unit or "example",
        }
        primary = self.source.evaluator.primary
        result["primary"] = asdict(primary)
        result["fractions"] = sorted(
            {"ece", *(metric.name for metric in self.source.evaluator.metrics if metric.fraction)}
            | ({"macro_f1", "micro_f1", "auroc"} if task.kind.one_class else set())
        )
        by: dict[str, Any] = {}
        if not options.all_clients or self.other is not None:
            made = self._outcomes(self.model, self.params, task.test)
            groups = None if unit is None else task.test_columns[unit]
            scores = intervals(made, options.bootstrap, self._key("all"), groups)
            result["scores"] = _json(without_types(scores))  # type: ignore[arg-type]
            for name in options.by:
                if name == CLASS and name not in task.test_columns:
                    by[CLASS] = _classes(scores, made.classes)
                elif name != CLIENT or name in task.test_columns or self.other is not None:
                    column = name if name in task.test_columns else self.source.site_column
                    if column is not None:
                        by[name] = self._groups(made, name, task.test_columns[column], groups)
            result |= _confusion(made) | _calibration(made)
        if options.all_clients or (CLIENT in options.by and self.other is None and CLIENT not in task.test_columns):
            by[CLIENT] = self._clients(own=options.all_clients)
        if CLIENT in by:
            result |= self._over_clients(by[CLIENT], own_parts)
        result["by"] = by
        result["notes"] = self._notes()
        return result

    def _key(self, *path: str) -> Key:
        key = Key(self.options.seed) / "bootstrap"
        for step in path:
            key = key / step
        return key

    def _unit(self) -> str | None:
        if self.options.groups:
            return self.options.groups
        column = self.source.group_column
        return column if column is not None and column in self.task.test_columns else None

    def _data(self, unit: str | None) -> dict[str, Any]:
        other = self.other
        rows = next((len(self.task.test_columns[name]) for name in self.task.test_columns), len(self.task.test))
        return {
            "path": self.options.data,
            "part": other.part if other else "the run's test set",
            "rows": rows,
            "left_out": dict(other.left_out) if other else {},
            "groups": unit,
        }

    def _outcomes(self, model: Model, params: Tensors, examples: Examples) -> Outcomes:
        return outcomes_of(model, params, examples, self.source.evaluator, self.source.classes)

    def _groups(
        self, made: Outcomes, name: str, values: NDArray[Any], groups: NDArray[Any] | None
    ) -> dict[str, dict[str, Any]]:
        found = {}
        for value in np.unique(values):
            rows = np.flatnonzero(values == value)
            title = str(value).strip() or MISSING
            units = None if groups is None else groups[rows]
            found[title] = self._scored(made.select(rows), self._key(name, title), units)
        return found

    def _scored(self, made: Outcomes, key: Key, units: NDArray[Any] | None = None) -> dict[str, Any]:
        scores = without_types(intervals(made, self.options.bootstrap, key, units))  # type: ignore[arg-type]
        count = len(made)
        return {"examples": count, "small": count < self.options.least, "scores": _json(scores)}  # type: ignore[arg-type]

    def _clients(self, own: bool) -> dict[str, dict[str, Any]]:
        """Score each client's test part, or the other data, with the shared model or with the client's own."""
        recorded = self.source.recorded
        assert recorded is not None
        federation, found = recorded.experiment.federation, {}
        for client in federation.clients:
            examples = self.task.test if self.other is not None else federation[client].test
            if not len(examples):
                continue
            model, params = client_and_params(recorded, client) if own else (self.model, self.params)
            found[client] = self._scored(self._outcomes(model, params, examples), self._key(CLIENT, client))
        if not found:
            raise OptionError(
                "no client has test examples of its own; set split.test in a new run, or give other data with --data"
            )
        return found

    def _over_clients(self, clients: Mapping[str, Any], headline: bool) -> dict[str, Any]:
        """Return the mean and the worst tenth over clients, and the scores if there are no others."""
        names = dict.fromkeys(name for each in clients.values() for name in each["scores"])
        primary = self.source.evaluator.primary
        values = {
            name: [each["scores"][name]["value"] for each in clients.values() if name in each["scores"]]
            for name in names
        }
        over = {name: {"value": float(np.mean(own))} for name, own in values.items()}
        worst = primary.worst_tenth(values.get(primary.name, []))
        found: dict[str, Any] = {"clients": {"count": len(clients), "mean": over}}
        if worst:
            found["worst_tenth"] = {"metric": primary.name, "value": float(np.mean(worst)), "clients": len(worst)}
        return {**found, "scores": over} if headline else found

    def _notes(self) -> list[str]:
        notes = list(self.task.notes) if self.other is not None else []
        if self.source.private:
            notes.append(NOT_COVERED)
        recorded = self.source.recorded
        asked = self.options.client is not None or self.options.all_clients
        if recorded is not None and asked and recorded.experiment.run.method.adapt is not None:
            notes.append(
                f"{recorded.experiment.run.method.name} trains a client's model once more before a test; here it is "
                "evaluated without that"
            )
        return notes


def _json(scores: Mapping[str, Interval]) -> dict[str, dict[str, Any]]:
    return {name: score.to_json() for name, score in scores.items()}


def _classes(scores: Mapping[str, Interval], classes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the scores of each class, entity type or target."""
    split = by_type(scores)  # type: ignore[arg-type]
    counts = ("examples", "entities", "pixels")
    found: dict[str, dict[str, Any]] = {}
    for name in classes:
        own: dict[str, Interval] = split.get(name, {})  # type: ignore[assignment]
        number = {key: int(own[key].value) for key in counts if key in own}
        found[name] = {**number, "scores": _json({key: value for key, value in own.items() if key not in counts})}
    return found


def _confusion(made: Outcomes) -> dict[str, Any]:
    if made.confusion is None:
        return {}
    table = made.confusion
    return {"confusion": {"classes": list(table.classes), "counts": table.counts.tolist(), "unit": table.unit}}


def _calibration(made: Outcomes) -> dict[str, Any]:
    reliability = made.reliability()
    if reliability is None:
        return {}
    scores = made(np.ones((1, len(made))))
    found = {"ece": float(reliability.error()), "bins": reliability.table()}
    if "brier" in scores:
        found["brier"] = float(scores["brier"][0])
    return {"calibration": found}


def with_options(**given: Any) -> Options:
    """Return the options with some changed. Lists become tuples."""
    by = given.get("by", ())
    return replace(Options(), **{**given, "by": (by,) if isinstance(by, str) else tuple(by)})
