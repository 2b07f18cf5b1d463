"""Read what trackers recorded, each by its own library: (scalars by step, tables by step, settings)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Recorded = dict[str, list[tuple[int, float]]]  # name -> (step, value) in the order in which they were recorded
MULTIPLE = 32768  # block size of the log in a .wandb file


def read_tensorboard(folder: Path) -> tuple[Recorded, list[str]]:
    """Scalars, and each text with its tag and step."""
    from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    names = events.Tags()["scalars"]
    scalars = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
    pages = plugin_event_accumulator.EventAccumulator(str(folder))  # what TensorBoard's pages read
    pages.Reload()
    texts = [
        f"{tag} {event.step} {event.tensor_proto.string_val[0].decode()}"
        for tag in pages.Tags()["tensors"]
        if tag.endswith("/text_summary")
        for event in pages.Tensors(tag)
    ]
    for name, recorded in scalars.items():
        assert [event.step for event in pages.Tensors(name)] == [step for step, _ in recorded]
    return scalars, texts


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: blocks of 32 KiB with parts of records, as in LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = MULTIPLE - place % MULTIPLE
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if not kind:
            break
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def read_wandb(folder: Path) -> tuple[Recorded, dict[str, Any], list[Any]]:
    """Scalars, the run's header, and all records of the only offline run in the folder."""
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    records = list(wandb_records(file))
    scalars: Recorded = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                value = json.loads(item.value_json)
                name = item.key or "/".join(item.nested_key)
                described = len(item.nested_key) > 1  # a table: its file, and how many columns and rows it has
                if isinstance(value, int | float) and not name.startswith("_") and not described:
                    scalars.setdefault(name, []).append((record.history.step.num, value))
    [header] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    config = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in header.config.update}
    return scalars, {"id": header.run_id, "group": header.run_group, "config": config}, records


def read_mlflow(uri: str, project: str = "partita") -> tuple[Recorded, Any, Any]:
    """Scalars, the only run, and the client."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(project)
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    names = run.data.metrics
    return (
        {
            name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
            for name in names
        },
        run,
        client,
    )


def read_trackio(project: str = "partita") -> tuple[Recorded, Any, list[dict[str, Any]]]:
    """Scalars, the only run, and its logs."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    [run] = list(trackio.Api().runs(project))
    logs = SQLiteStorage.get_logs(project, run.name, run_id=run.id)
    scalars: Recorded = {}
    for log in logs:
        for name, value in log.items():
            if isinstance(value, int | float) and name != "step":
                scalars.setdefault(name, []).append((log["step"], value))
    return scalars, run, logs
