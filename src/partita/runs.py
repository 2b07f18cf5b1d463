"""Run experiments and read recorded runs from Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.record.row import Row, numbers
from partita.report.load import RunRecord, load_runs
from partita.report.load import load_run as load_record

if TYPE_CHECKING:
    from partita.core.model import Model
    from partita.core.tensors import Tensors
    from partita.experiment.config import Config
    from partita.experiment.recorded_model import RoundChoice


@dataclass(frozen=True)
class RecordedRun:
    """A run in its folder. Reading it runs no code of the folder; only `model` and `export` do.

    Attributes:
        record: What the folder holds, as the report reads it.
    """

    record: RunRecord

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

    def model(
        self, client: str | None = None, trust_code: bool = False, round: RoundChoice = "last"
    ) -> tuple[Model, Tensors]:
        """Build the model and read its parameters from a checkpoint.

        This loads the data and everything else that the config names.

        Args:
            client: The client whose own model to return: with the parameters that it keeps. Default: the server's.
            trust_code: Run the own code in the folder even if this user has not started the run.
            round: "best" on validation examples, "last", or a number of finished rounds.

        Returns:
            `(model, parameters)`, for `partita.score` or `model(parameters, inputs)`.

        Raises:
            CodeError: If the run uses own code that this user has not run before.
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

    def evaluate(self, data: Path | str | None = None, **options: Any) -> dict[str, Any]:
        """Evaluate the model on the run's own test set or on other data, as `partita evaluate` does.

        Args:
            data: File, folder or Hub id. Default: the run's central test set.
            **options: The fields of `partita.experiment.evaluate.Options`: `split`, `round`, `client`, `all_clients`,
                `by`, `groups`, `bootstrap`, `seed`, `least`, `unknown_labels` and `trust_code`.

        Returns:
            "scores" with "value", "low" and "high" of each metric; "by", "confusion", "calibration" and more. Docs:
            docs/guide/results.md.

        Raises:
            ValueError: If the data does not fit the model.
        """
        from partita.experiment.evaluate import evaluate_folder, with_options

        return evaluate_folder(self.folder, with_options(data=None if data is None else str(data), **options))

    def to_frame(self) -> Any:
        """Return the rows as a pandas DataFrame; see `to_frame`."""
        return _frame([self.record])


def run(
    config: Config | Mapping[str, Any] | Path | str,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> RecordedRun:
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
    from partita.core.options import OptionError
    from partita.experiment import runner
    from partita.experiment.config import load, parse
    from partita.experiment.run_names import default_folder

    if resume and overwrite:
        raise OptionError("resume continues a run and overwrite deletes it; choose one")
    if isinstance(config, str | Path):
        config = load(Path(config))
    elif isinstance(config, Mapping):
        config = parse(config)
    place = Path(folder) if folder else default_folder(config.label, config.seed)
    rows = runner.start_or_resume(config, place) if resume else runner.start(config, place, overwrite)
    deque(rows, maxlen=0)
    return load_run(place)


def load_run(folder: Path | str) -> RecordedRun:
    """Read a recorded run. Only files in the folder are read, and none of its code is run.

    Raises:
        ReportError: If it is not a run folder, or if a file in it does not have the expected content.
    """
    return RecordedRun(load_record(folder))


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


def _frame(records: Iterable[RunRecord]) -> Any:
    try:
        pandas = import_module("pandas")
    except ImportError as error:
        raise ImportError("data frames need the package 'pandas': pip install pandas") from error
    return pandas.DataFrame([_flat(record, row) for record in records for row in record.rows])


def _flat(record: RunRecord, row: Row) -> dict[str, Any]:
    cells: dict[str, Any] = {".".join(path): value for path, value in numbers(row, record.metrics)}
    return {"label": record.label, "seed": record.seed, "folder": str(record.folder), **cells}
