"""Data that is read from disk gives the batches, errors and runs of data in memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita.core.batch_schedule import BatchSchedule
from partita.core.data import Batch, Examples
from partita.core.rng import Key
from partita.data import DataError, Table, Task, dataset_files, image_reader, load, split
from partita.data import cache as data_cache
from partita.data.cache import CONTENTS, cache_folder, cached
from partita.data.image_reader import ImagesOnDisk, ReadAhead
from partita.data.image_source import MappedImages, RowImages
from partita.data.inspection import inspect_data
from partita.data.loading import load_dataset, open_parts
from partita.evaluation import score
from partita.experiment.config import differences, parse
from partita.experiment.runner import start
from partita.models import build
from partita.storage.atomic_files import read_json
from partita.training.batching import iterate_batches

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def take_all(examples: Examples) -> Batch:
    return examples.take(torch.arange(len(examples)))


# The cache


def test_cache_builds_once_and_again_if_damaged(own_cache: Path) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "numbers").write_bytes(bytes(range(100)))

    entry = cached("tokens", "abc", build)
    assert entry == own_cache / "tokens" / "abc"
    assert cached("tokens", "abc", build) == entry
    assert len(built) == 1
    for damage in (
        lambda: (entry / "numbers").write_bytes(bytes(100)),
        lambda: (entry / "numbers").unlink(),
        lambda: (entry / CONTENTS).write_text("[1]"),
    ):
        damage()
        with pytest.warns(UserWarning, match="the cached tokens in .*abc are damaged, so they are computed again"):
            cached("tokens", "abc", build)
        assert (entry / "numbers").read_bytes() == bytes(range(100))
    assert len(built) == 4
    assert sorted(path.name for path in entry.parent.iterdir()) == ["abc"]
    assert entry.stat().st_mode & 0o077 == 0


def test_faster_run_wins_and_both_use_its_entry() -> None:
    def slower(folder: Path) -> None:
        cached("tokens", "abc", lambda other: (other / "who").write_text("faster"))  # type: ignore[arg-type, return-value]
        (folder / "who").write_text("slower")

    entry = cached("tokens", "abc", slower)
    assert (entry / "who").read_text() == "faster"
    assert [path.name for path in entry.parent.iterdir()] == ["abc"]


def test_failed_build_leaves_nothing_and_abandoned_ones_are_removed(own_cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise DataError("no more")

    with pytest.raises(DataError, match="no more"):
        cached("tokens", "abc", fail)
    assert list((own_cache / "tokens").iterdir()) == []
    for name, age in ("old.1.part", 2 * data_cache.ABANDONED_AFTER), ("new.1.part", 0):
        (own_cache / "tokens" / name).mkdir()
        os.utime(own_cache / "tokens" / name, (time.time() - age,) * 2)
    cached("tokens", "abc", lambda folder: None)
    assert sorted(path.name for path in (own_cache / "tokens").iterdir()) == ["abc", "new.1.part"]


def test_cache_without_space_or_rights_is_refused(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"has .* free, but the tables need about .* EB; set PARTITA_CACHE"):
        cached("tables", "abc", lambda folder: None, size=10**19)
    monkeypatch.setenv("PARTITA_CACHE", "/dev/null/cache")
    with pytest.raises(DataError, match=r"cannot write to the cache folder /dev/null/cache: .*; set PARTITA_CACHE"):
        cached("tables", "abc", lambda folder: None)


def test_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARTITA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/partita")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "partita"


# Tables


def test_large_parquet_file_is_mapped_from_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"note {row}", "label": row % 3, "site": "ab"[row % 2]} for row in range(3000)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "all.parquet", batch_size=1000)
    small = load_dataset(tmp_path / "all.parquet", Key(0))
    assert not small.train.data.cache_files
    monkeypatch.setattr(dataset_files, "MAPPED_FROM", 0)
    for _ in range(2):
        large = load_dataset(tmp_path / "all.parquet", Key(0))
        [file] = large.train.data.cache_files
        assert Path(file["filename"]).is_relative_to(cache_folder() / "tables")
        assert large.train.data.features == small.train.data.features
        assert large.train.data[:] == small.train.data[:]
        assert large.test.data[:] == small.test.data[:]
    datasets.Dataset.from_list(rows[:10]).to_parquet(tmp_path / "all.parquet")
    assert len(load_dataset(tmp_path / "all.parquet", Key(0)).train.rows) == 8


def test_columns_are_read_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.Dataset.from_list([{"a": f"x{row}", "b": row} for row in range(10)]).to_parquet(tmp_path / "all.parquet")
    part = load_dataset(tmp_path / "all.parquet", Key(0)).train
    read: list[str] = []
    plain = type(part).values
    monkeypatch.setattr(type(part), "values", lambda self, name: read.append(name) or plain(self, name))
    columns = part.columns()
    Task("numbers", Table({}, torch.zeros(8)), Table({}, torch.zeros(2)), (), columns)
    assert (list(columns), read) == (["a", "b"], [])
    assert [columns["b"].tolist() for _ in range(2)] == [[str(row) for row in part.rows]] * 2
    assert read == ["b"]
    with pytest.raises(DataError, match="column 'a' has 8 values for 7 train rows"):
        Task("numbers", Table({}, torch.zeros(7)), Table({}, torch.zeros(2)), (), columns)


# Images


def pictures(count: int, side: int = 6) -> list[Any]:
    from PIL import Image

    draws = np.random.default_rng(count)
    return [Image.fromarray(draws.integers(0, 256, (side, side, 3), np.uint8)) for _ in range(count)]


def as_folder(folder: Path) -> Path:
    for part, count in ("train", 12), ("test", 4):
        for number, picture in enumerate(pictures(count)):
            file = folder / part / ("cat" if number % 2 else "dog") / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
    return folder


def image_dataset(count: int) -> Any:
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
    columns = {"image": pictures(count), "label": [row % 2 for row in range(count)]}
    return datasets.Dataset.from_dict(columns, features=features)


def as_parquet(folder: Path) -> Path:
    folder.mkdir()
    for part, count in ("train", 12), ("test", 4):
        image_dataset(count).to_parquet(folder / f"{part}.parquet")
    return folder


def as_saved(folder: Path) -> Path:
    parts = {part: image_dataset(count) for part, count in (("train", 12), ("test", 4))}
    datasets.DatasetDict(parts).save_to_disk(folder)
    return folder


def as_one_file(folder: Path) -> Path:
    folder.mkdir()
    image_dataset(20).save_to_disk(folder / "all", num_shards=3)
    return folder / "all"


def as_large_parquet(folder: Path) -> Path:
    return as_parquet(folder)


FORMATS = [as_large_parquet, as_folder, as_parquet, as_saved, as_one_file]


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("make", FORMATS)
@pytest.mark.parametrize("options", [{}, {"size": 4, "channels": 1}, {"limit": 6}], ids=str)
def test_images_on_disk_give_the_batches_of_images_in_memory(
    make: Callable[[Path], Path], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "data")
    if make is as_large_parquet:
        monkeypatch.setattr(dataset_files, "MAPPED_FROM", 0)
    memory, disk = (load("images", Key(3), path=path, memory=limit, **options) for limit in ("auto", 0))
    assert isinstance(memory.train, Table)
    assert isinstance(disk.train, ImagesOnDisk)
    assert isinstance(disk.test, ImagesOnDisk)
    in_files = make in (as_saved, as_one_file, as_large_parquet)
    assert isinstance(disk.train.reader.source, MappedImages if in_files else RowImages)
    assert (memory.size, memory.classes, memory.notes) == (disk.size, disk.classes, ())
    assert disk.notes == ("images are decoded on demand",)
    for one, other in (memory.train, disk.train), (memory.test, disk.test):
        for rows in (torch.arange(len(one)), torch.tensor([2, 0, 2, 1])):
            expected, found = one.take(rows), other.take(rows)
            assert torch.equal(expected.inputs["pixel_values"], found.inputs["pixel_values"])
            assert torch.equal(expected.targets, found.targets)


def test_regression_images_are_decoded_on_demand_too(tmp_path: Path) -> None:
    for number, picture in enumerate(pictures(10)):
        picture.save(tmp_path / f"{number}.png")
    lines = "".join(f"{number}.png,{number / 3}\n" for number in range(10))
    (tmp_path / "all.csv").write_text("image,target\n" + lines)
    memory, disk = (load("image_regression", Key(0), path=tmp_path / "all.csv", memory=limit) for limit in ("auto", 0))
    assert isinstance(disk.train, ImagesOnDisk)
    assert disk.notes
    one, other = take_all(memory.train), take_all(disk.train)
    assert torch.equal(one.inputs["pixel_values"], other.inputs["pixel_values"])
    assert torch.equal(one.targets, other.targets)


def test_looking_at_data_decodes_one_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_parquet(tmp_path / "data")
    decoded: list[Any] = []
    plain = datasets.Image.decode_example
    monkeypatch.setattr(datasets.Image, "decode_example", lambda self, *given: decoded.append(1) or plain(self, *given))
    assert inspect_data(path).size == (6, 6)
    assert len(decoded) == 1


def test_limit_of_memory_counts_both_parts(tmp_path: Path) -> None:
    path, size = as_folder(tmp_path / "data"), 16 * 3 * 6 * 6 / 2**30
    assert isinstance(load("images", Key(0), path=path, memory=size).train, Table)
    assert isinstance(load("images", Key(0), path=path, memory=size * 0.99).train, ImagesOnDisk)


def test_images_are_checked_once_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_folder(tmp_path / "data")
    decoded: list[int] = []
    plain = image_reader.ImageReader.decode

    def counting(self: Any, place: int) -> Any:
        decoded.append(place)
        return plain(self, place)

    monkeypatch.setattr(image_reader.ImageReader, "decode", counting)
    for expected in (16 + 2, 2):  # the first image of a part tells the size
        decoded.clear()
        load("images", Key(0), path=path, memory=0)
        assert len(decoded) == expected
    file = path / "train" / "cat" / "3.png"
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(
        DataError, match=r"the image in row .* of the train part .*cat/3\.png'\) cannot be read: .*; repl"
    ):
        load("images", Key(0), path=path, memory=0)
    file.unlink()
    pictures(1, 5)[0].save(file)
    with pytest.raises(DataError, match=r"cat/3\.png'\) is 5 by 5, the first is 6 by 6; set size to resize them"):
        load("images", Key(0), path=path, memory=0)


def test_image_that_breaks_during_a_run_is_named(tmp_path: Path) -> None:
    task = load("images", Key(0), path=as_folder(tmp_path / "data"), memory=0)
    (tmp_path / "data" / "train" / "cat" / "3.png").unlink()
    with pytest.raises(DataError, match=r"cat/3\.png'\) cannot be read: .*; replace or remove it"):
        take_all(task.train)


def test_next_batch_is_decoded_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[int]] = []
    plain = ReadAhead.start

    def recording(self: ReadAhead, reader: Any, rows: list[int]) -> None:
        started.append(rows)
        plain(self, reader, rows)

    monkeypatch.setattr(ReadAhead, "start", recording)
    path = as_folder(tmp_path / "data")
    batches: list[list[Batch]] = []
    for memory in ("auto", 0):
        federation = split(load("images", Key(0), path=path, memory=memory), "iid", clients=2, key=Key(1))
        for clients in (["0"], ["0", "1"]):
            names = [federation.clients[int(name)] for name in clients]
            parts = [federation[name].train for name in names]
            order = [torch.arange(len(part)) for part in parts]
            schedules = [BatchSchedule(rows, (2,) * (len(rows) // 2)) for rows in order]
            batches.append(list(iterate_batches(parts, schedules, torch.device("cpu"))))
    for expected, found in zip(batches[:2], batches[2:], strict=True):
        assert len(expected) == len(found) > 1
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one.inputs["pixel_values"], other.inputs["pixel_values"])
            assert torch.equal(one.targets, other.targets)
    steps = len(batches[0]) - 1, len(batches[1]) - 1
    assert [len(rows) for rows in started] == [2] * steps[0] + [4] * steps[1]
    assert not federation.task.train.ahead.rows, "all that was read ahead was taken"  # type: ignore[union-attr]


def test_read_ahead_is_bounded_and_ends_at_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = load("images", Key(0), path=as_folder(tmp_path / "data"), memory=0).train
    assert isinstance(table, ImagesOnDisk)
    monkeypatch.setattr(image_reader, "READ_AHEAD_BYTES", 4 * 3 * 6 * 6)
    table.prefetch(torch.arange(12))
    assert list(table.ahead.rows) == [8, 9, 10, 11]
    expected = take_all(table).inputs["pixel_values"]
    table.prefetch(torch.arange(4))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        found = pool.apply_async(_pixels_of, (pickle.dumps(table),)).get(60)
    assert np.array_equal(found, expected.numpy())
    table.ahead.process = -1  # as in a fork, where no thread would finish what the parent started
    table.ahead.rows[0] = Future()
    table.ahead.rows[0].set_result(np.zeros((3, 6, 6), np.uint8))
    assert torch.equal(take_all(table).inputs["pixel_values"], expected)


def _pixels_of(pickled: bytes) -> Any:
    return take_all(pickle.loads(pickled)).inputs["pixel_values"].numpy()


def image_config(path: Path, **options: Any) -> dict[str, Any]:
    return {
        "method": {"name": "fedavg"},
        "data": {"name": "images", "path": str(path), **options},
        "split": {"name": "iid", "clients": 2},
        "model": {"name": "vit", "patch": 3, "width": 8, "layers": 1, "heads": 2},
        "federation": {"cohort": 2},
        "rounds": 2,
    }


def test_runs_from_disk_and_from_memory_are_equal(tmp_path: Path) -> None:
    path = as_folder(tmp_path / "data")
    results, environments = [], []
    configs = [parse(image_config(path, memory=limit)) for limit in ("auto", 0)]
    assert differences(*configs) == []  # a run can continue on a machine with less memory
    for number, config in enumerate(configs):
        folder = tmp_path / f"run{number}"
        list(start(config, folder))
        results.append(read_json(folder / "result.json"))
        environments.append(read_json(folder / "environment.json")["data"])
    assert results[0]["digest"] == results[1]["digest"]
    assert results[0]["test"] == results[1]["test"]
    assert environments == ["in memory", "images are decoded on demand"]


def test_scores_from_disk_and_from_memory_are_equal(tmp_path: Path) -> None:
    tasks: list[Task] = [
        load("images", Key(0), path=as_folder(tmp_path / str(limit)), memory=limit) for limit in ("auto", 0)
    ]
    model = build("vit", tasks[0], Key(1), patch=3, width=8, layers=1, heads=2)
    one, other = (score(model, model.initial, task.train) for task in tasks)
    assert one == other


# JSON lines


LINES = {
    "plain": '{"text": "a", "label": 1}\n{"text": "b", "label": 2}\n',
    "dates": '{"text": "2020-01-01", "when": ["2020-01-01 10:00:00"], "in": {"day": "2020-01-01"}}\n' * 2,
    "missing keys": '{"text": "a"}\n{"text": "b", "label": null}\n{"label": 3}\n',
    "numbers": '{"x": 1, "y": 1.5, "z": true}\n{"x": 2.5, "y": 3, "z": null}\n',
    "lists": '{"tags": ["O"], "empty": []}\n{"tags": [], "empty": []}\n',
    "escapes": '{"text": "\\u00e9\\n\\"\\ud83d\\ude00"}\n{"text": "a\u2028b\u0085c"}\n',
    "blank lines": '\n{"text": "a"}\n\n   \n{"text": "b"}',
    "carriage returns": '{"text": "a"}\r\n{"text": "b"}\r\n',
    "not a number": '{"x": NaN}\n{"x": 1.0}\n',
    "twice": '{"x": 1, "x": 2}\n',
}


@pytest.mark.parametrize("name", LINES)
def test_json_lines_are_read_as_by_python(name: str, tmp_path: Path) -> None:
    import json

    (tmp_path / "a.jsonl").write_bytes(LINES[name].encode())
    wanted = [json.loads(line) for line in LINES[name].split("\n") if line.strip()]
    names = list(dict.fromkeys(key for row in wanted for key in row))
    found = open_parts(tmp_path / "a.jsonl")["train"].data
    (tmp_path / "b.json").write_text(json.dumps(wanted))
    other = open_parts(tmp_path / "b.json")["train"].data
    assert found.features == other.features
    assert {key: repr(found[key][:]) for key in names} == {key: repr(other[key][:]) for key in names}
    if name != "not a number":
        assert {key: found[key][:] for key in names} == {key: [row.get(key) for row in wanted] for key in names}
    assert sorted(found.column_names) == sorted(names)


def test_python_reads_json_only_if_pyarrow_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_files, "_records", lambda file: pytest.fail("read by Python"))
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 10)
    assert len(open_parts(tmp_path / "a.jsonl")["train"].rows) == 10
    monkeypatch.undo()
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 10 + '{"text": }\n' + '{"text": "b"}\n' * 5)
    with pytest.raises(DataError, match=r"line 11 of '.*a\.jsonl' is not JSON"):
        open_parts(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl' cannot be read: 'utf-8' codec"):
        open_parts(tmp_path / "a.jsonl")
    monkeypatch.setattr(dataset_files, "JSON_BLOCK", 64)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{"x" * size}"}}\n' for size in (5, 500, 5)))
    assert [len(text) for text in open_parts(tmp_path / "a.jsonl")["train"].texts("text")] == [5, 500, 5]
