"""Run experiments and read recorded runs from Python."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.core.options import OptionError, closest_match
from partita.record import file_names
from partita.record.row import Row, numbers
from partita.report.load import RunRecord, load_runs, read_metric
from partita.report.load import load_run as load_record

if TYPE_CHECKING:
    from partita.core.given import Given
    from partita.core.model import Model
    from partita.core.tensors import Tensors
    from partita.experiment.config import Config
    from partita.experiment.progress_file import OnReply
    from partita.experiment.recorded_model import RoundChoice

SHOWN_ROUNDS, SHOWN_METRICS = 5, 3  # in the table of a notebook


@dataclass(frozen=True, repr=False)
class Fitted:
    """A run in its folder. Reading it runs no code of the folder; only `model` and `export` do.

    Attributes:
        record: What the folder holds, as the report reads it.
        held: The objects that were handed over for it.
    """

    record: RunRecord
    held: tuple[Given, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, folder: Path, held: tuple[Given, ...] = ()) -> Fitted:
        """Read a run folder."""
        return cls(load_record(folder), held)

    def __repr__(self) -> str:
        record, count = self.record, len(self.rows)
        parts = [f"{count} round{'' if count == 1 else 's'}"]
        if self.scores:
            metric = read_metric(self.folder)
            parts.append(f"{metric.name} {metric.show(self.scores.get(metric.name))}")
        sent = sum((row.get("bytes") or {}).get("up", 0) for row in self.rows)
        parts += [f"{sent / 1e6:.3g} MB up"] if sent else []
        parts += [] if self.finished else ["unfinished"]
        return f"Fitted({record.label}, {', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Show the last rounds as a small table in a notebook."""
        metrics = [metric for metric in self.record.metrics if metric.name in self.scores][:SHOWN_METRICS]
        head = ["round", *(metric.name for metric in metrics), "MB up"]
        lines = [head]
        for row in self.rows[-SHOWN_ROUNDS:]:
            scores, sent = row.get("test") or {}, (row.get("bytes") or {}).get("up", 0)
            lines.append(
                [
                    str(row["round"] + 1),
                    *(metric.show(scores.get(metric.name)) for metric in metrics),
                    f"{sent / 1e6:.3g}",
                ]
            )
        cells = [
            "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line)
            for tag, line in zip(["th"] + ["td"] * len(lines), lines, strict=False)
        ]
        return f"<p>{escape(repr(self))}</p><table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.record.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """The config with all defaults, as nested dicts."""
        return self.record.config

    @property
    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """One row for each finished round."""
        return self.record.rows

    @property
    def plan(self) -> tuple[Mapping[str, Any], ...]:
        """The plan of the first client, by stage: which parameters train, go up, come down and stay."""
        return self.record.plan

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self.record.finished

    @cached_property
    def scores(self) -> Mapping[str, float]:
        """The scores of the last tested round on the central test set, by metric; empty if there are none."""
        return next((row["test"] for row in reversed(self.rows) if row.get("test")), {})

    @cached_property
    def personal_scores(self) -> Mapping[str, Mapping[str, float]]:
        """The last scores of clients' models on their own test sets, by metric and client; empty if there are none."""
        return next((row["personal"] for row in reversed(self.rows) if row.get("personal")), {})

    def model(self, client: str | None = None, trust_code: bool = False, round: RoundChoice = "last") -> Any:
        """Return a new module with the trained weights, of the library that the model is from.

        Args:
            client: The client whose own model to return: with the parameters that it keeps. Default: the server's.
            trust_code: Run the own code in the folder even if this user has not started the run.
            round: "best" on validation examples, "last", or a number of finished rounds.

        Raises:
            CodeError: If the run uses own code that this user has not run before.
            ModelError: If the model is none of transformers, PEFT or the user's own.
        """
        from partita.experiment.export import without_copies
        from partita.experiment.recorded_model import load_recorded_model
        from partita.models.trained import trained_module

        recorded = load_recorded_model(self.folder, round, trust_code)
        path = recorded.experiment.config.model.get("path")
        return trained_module(*without_copies(recorded.experiment.model, recorded.params(client)), path)

    def functional(
        self, client: str | None = None, trust_code: bool = False, round: RoundChoice = "last"
    ) -> tuple[Model, Tensors]:
        """Build the model as a function and read its parameters from a checkpoint.

        This loads the data and everything else that the config names. The arguments are those of `model`.

        Returns:
            `(model, parameters)`, for `partita.score` or `model(parameters, inputs)`.
        """
        from partita.experiment.recorded_model import load_model

        return load_model(self.folder, client, trust_code, round)

    def export(
        self,
        folder: Path | str,
        round: RoundChoice = "last",
        client: str | None = None,
        merge: bool = False,
        trust_code: bool = False,
    ) -> Path:
        """Write the model as a folder that loads without partita, with a model card, as `partita export` does.

        Args:
            folder: The folder to write. It must not exist.
            round: "best" on validation examples, "last", or a number of finished rounds.
            client: The client whose own model to write. Default: the server's.
            merge: Write a folder that needs no other: with the adapter added to its base, or the towers of prompts.
            trust_code: Run the own code in the folder even if this user has not started the run.

        Returns:
            The folder.

        Raises:
            ExportError: If the folder exists, or the model cannot be written like this.
        """
        from partita.experiment.export import export_model
        from partita.experiment.recorded_model import load_recorded_model

        export_model(load_recorded_model(self.folder, round, trust_code), Path(folder), client, merge)
        return Path(folder)

    def evaluate(self, data: Any = None, **options: Any) -> dict[str, Any]:
        """Evaluate the model on the run's own test set or on other data, as `partita evaluate` does.

        Args:
            data: File, folder or Hub id, or rows with the columns of the run's data: a `datasets.Dataset`, a pandas
                DataFrame or a list of dicts. Default: the run's central test set.
            **options: The fields of `partita.experiment.evaluate.Options`: `split`, `round`, `client`, `all_clients`,
                `by`, `groups`, `bootstrap`, `seed`, `least`, `unknown_labels` and `trust_code`.

        Returns:
            "scores" with "value", "low" and "high" of each metric; "by", "confusion", "calibration" and more. Docs:
            docs/guide/results.md.

        Raises:
            ValueError: If the data does not fit the model.
        """
        from partita.experiment.evaluate import Options, evaluate_folder, with_options

        _check_names(options, Options)
        given = None
        if data is not None and not isinstance(data, str | Path):
            from partita.data.objects import hand_over_rows

            given = hand_over_rows(data)
            data = given.name
        return evaluate_folder(self.folder, with_options(data=None if data is None else str(data), **options))

    def predict(self, data: Any, **options: Any) -> list[dict[str, Any]]:
        """Predict rows that need no labels, as `partita predict` does.

        Args:
            data: A file, or rows: a `datasets.Dataset`, a pandas DataFrame, a list of dicts, or a list of texts.
            **options: The fields of `partita.experiment.predict.Options`, such as `round`, `client` and `batch_size`.

        Returns:
            One dict for each row, in order.

        Raises:
            ValueError: If the data does not fit the model.
        """
        from partita.experiment.predict import Options, predict_file

        _check_names(options, Options)
        if isinstance(data, str | Path):
            data = Path(data)
        elif not isinstance(data, Iterable):
            raise OptionError(
                f"data is of type {type(data).__name__}; give a file, a datasets.Dataset, a pandas DataFrame, a list "
                "of dicts, or a list of texts"
            )
        else:
            data = data.to_dict("records") if hasattr(data, "to_dict") and hasattr(data, "iloc") else list(data)
        return list(predict_file(self.folder, data, Options(**options)))

    def resume(self, rounds: int | None = None, progress: bool = True) -> Fitted:
        """Continue a run that was stopped, or extend it to more rounds, and return the longer run.

        Args:
            rounds: The total number of rounds. Default: those of its config.
            progress: Whether to show the progress.
        """
        from partita.experiment.config import load_recorded

        config = load_recorded(self.folder)
        follow_run(config, self.folder, resume=True, overwrite=False, progress=progress, rounds=rounds)
        return Fitted.read(self.folder, self.held)

    def report(self, out: Path | str | None = None) -> Path:
        """Write the HTML report of this run.

        Args:
            out: The file. Default: report.html in the run folder.

        Returns:
            The file.
        """
        from partita import report

        return report.page([self.record], Path(out) if out else self.folder / "report.html")

    @cached_property
    def frame(self) -> Any:
        """The rows as a pandas DataFrame; see `partita.to_frame`."""
        return _frame([self.record])

    def to_frame(self) -> Any:
        """Return `frame`. This old name goes in the next release."""
        warnings.warn(
            "Fitted.to_frame() is Fitted.frame since 0.2; the old name goes in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.frame

    @cached_property
    def by_client(self) -> Any:
        """The last scores of clients' models on their own test sets, as a pandas DataFrame with a row for each."""
        return _pandas().DataFrame(dict(self.personal_scores)).rename_axis("client")


def run(
    config: Config | Mapping[str, Any] | Path | str,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Fitted:
    """Run an experiment and record it, as `partita run` does.

    Args:
        config: A config file, a config as nested dicts, or a `Config`.
        folder: The run folder. Default: runs/LABEL-seed-N.
        resume: If the folder holds this very run, continue it instead of failing.
        overwrite: Delete the run in the folder first.

    Raises:
        OptionError: If the config is invalid.
        RunFolderError: If the folder already holds a run.
    """
    from partita.experiment.config import load, parse

    if isinstance(config, str | Path):
        config = load(Path(config))
    elif isinstance(config, Mapping):
        config = parse(config)
    return load_run(follow_run(config, folder, resume=resume, overwrite=overwrite, progress=False))


def follow_run(
    config: Config,
    folder: Path | str | None,
    *,
    resume: bool,
    overwrite: bool,
    progress: bool,
    rounds: int | None = None,
) -> Path:
    """Run an experiment to its end, and show its progress if asked for.

    Args:
        config: The experiment.
        folder: The run folder. Default: runs/LABEL-seed-N.
        resume: If the folder holds this very run, continue it instead of failing.
        overwrite: Delete the run in the folder first.
        progress: Whether to show the progress.
        rounds: Total number of rounds to which a recorded run is extended.

    Returns:
        The run folder.
    """
    from partita.cli.progress import Verbosity, follow
    from partita.experiment import run_folder, runner
    from partita.experiment.run_names import default_folder

    if resume and overwrite:
        raise OptionError("resume continues a run and overwrite deletes it; choose one")
    config = config if rounds is None else replace(config, rounds=rounds)
    place = Path(folder) if folder else default_folder(config.label, config.seed)
    done = run_folder.saved_rounds(place) if resume and (place / file_names.CONFIG).exists() else None

    def begin(on_reply: OnReply | None) -> Iterator[Row]:
        if resume:
            return runner.start_or_resume(config, place, on_reply)
        return runner.start(config, place, overwrite, on_reply)

    if progress:
        follow(begin, config, place, done, Verbosity.NORMAL)
    else:
        deque(begin(None), maxlen=0)
    return place


def load_run(folder: Path | str, *, model: Any = None, data: Any = None, loss: Any = None) -> Fitted:
    """Read a recorded run. Only files in the folder are read, and none of its code is run.

    Args:
        folder: The run folder.
        model: The model that was handed over to `fit`, if its weights are needed: to resume, evaluate or export.
        data: The data that was handed over to `fit`, if it is needed.
        loss: The loss that was handed over with the model.

    Raises:
        ReportError: If it is not a run folder, or if a file in it does not have the expected content.
        OptionError: If the objects are not those with which the run began.
    """
    record = load_record(folder)
    if model is None and data is None:
        return Fitted(record)
    from partita.experiment.handing_over import hand_over_again

    return Fitted(record, hand_over_again(record.config, model, data, loss))


def to_frame(folders: Path | str | Iterable[Path | str]) -> Any:
    """Return all runs at or below some folders as one pandas DataFrame, with one row per run and round.

    Columns are `label`, `seed`, `folder`, `round`, and all recorded numbers, with the names that trackers get and dots:
    `test.METRIC`, `validation.METRIC`, `personal.METRIC.mean` and `personal.METRIC.worst_tenth` over clients,
    `bytes.up`, `clients.sampled`, `clients.lost`, `drift.TAG.MEASURE`, `privacy.epsilon` and others.

    Raises:
        ReportError: If there is no run, or a run cannot be read.
        ImportError: If pandas is not installed.
    """
    return _frame(load_runs([folders] if isinstance(folders, str | Path) else folders))


def _check_names(given: Mapping[str, Any], options: type) -> None:
    """Refuse options that there are not."""
    known = [each.name for each in fields(options)]
    for name in given:
        if name not in known:
            raise OptionError(f"there is no option '{name}'; {closest_match(name, known)}")


def _pandas() -> Any:
    try:
        return import_module("pandas")
    except ImportError as error:
        raise ImportError("data frames need the package 'pandas': pip install pandas") from error


def _frame(records: Iterable[RunRecord]) -> Any:
    return _pandas().DataFrame([_flat(record, row) for record in records for row in record.rows])


def _flat(record: RunRecord, row: Row) -> dict[str, Any]:
    cells: dict[str, Any] = {".".join(path): value for path, value in numbers(row, record.metrics)}
    return {"label": record.label, "seed": record.seed, "folder": str(record.folder), **cells}
