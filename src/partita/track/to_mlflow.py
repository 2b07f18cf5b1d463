"""MLflow: the server in MLFLOW_TRACKING_URI, else a database in the run folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from partita.track import Table, TrackedRun

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

TAG = "partita.run"  # finds the run again, because MLflow chooses the ids of runs
MARK = "round"  # metric that every round has
MAX_METRICS, MAX_PARAMS, MAX_PARAM = 1000, 100, 6000  # per request, and characters of a parameter


class Mlflow:
    """Logs to the run that has the tag, and creates it if there is none."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self.make_metric, place = Metric, None
        if not (uri := os.environ.get("MLFLOW_TRACKING_URI")):
            run.folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
            place = (run.folder.resolve() / "artifacts").as_uri()
        # Unlike `mlflow.start_run`, the client adds no user name, command or git commit.
        for wait in (1, 2, 4, None):
            try:
                self.client = MlflowClient(tracking_uri=uri)
                experiment = _experiment(self.client, run.project, place)
                break
            except Exception:  # another process may be creating the tables of the same database
                if wait is None or not uri.startswith("sqlite:"):
                    raise
                time.sleep(wait)
        if found := self.client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1):
            self.id = found[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            steps = [metric.step for metric in self.client.get_metric_history(self.id, MARK)]
            self.first = max(steps, default=-1) + 1
        else:
            tags = {TAG: run.id, **({"partita.group": run.group} if run.group else {})}
            self.id = self.client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
            self.first = 0
            params = [Param(key, str(value)[:MAX_PARAM]) for key, value in run.settings.items() if str(value)]
            for start in range(0, len(params), MAX_PARAMS):
                self.client.log_batch(self.id, params=params[start : start + MAX_PARAMS])

    def log(self, round: int, scalars: Mapping[str, float], tables: Mapping[str, Table]) -> None:
        """Log a round. Its mark comes last, so that a round without a mark is logged again."""
        for name, table in tables.items():
            data = {"columns": list(table[0]), "data": [list(line.values()) for line in table]}
            self.client.log_dict(self.id, data, f"{name}/round-{round:06d}.json")
        now = int(time.time() * 1000)
        ordered = sorted(scalars.items(), key=lambda scalar: scalar[0] == MARK)
        metrics = [self.make_metric(name, float(value), now, round) for name, value in ordered]
        for start in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.id, metrics=metrics[start : start + MAX_METRICS])

    def close(self, finished: bool) -> None:
        """Set the status of the run."""
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


def open_run(run: TrackedRun) -> Mlflow:
    """Open a run."""
    return Mlflow(run)


def _experiment(client: MlflowClient, project: str, place: str | None) -> Any:
    """Return the id of the experiment with the project's name. Other processes may create it at the same time."""
    from mlflow.exceptions import MlflowException

    try:
        return client.create_experiment(project, artifact_location=place)
    except MlflowException:
        if (found := client.get_experiment_by_name(project)) is None:
            raise
        return found.experiment_id
