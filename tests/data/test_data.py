"""Tables, client parts, federations, and tasks."""

from __future__ import annotations

import ast
import pickle
import sys
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partita.data
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.data import INDEX, DataError, Federation, Subset, Table, Task, load, split
from partita.data.client_ids import NamedClients, NumberedClients
from partita.data.images import Normalize
from partita.data.partition import ClientSplit, Partition, group_by_client

quick = settings(max_examples=30, deadline=None)


def number_table(count: int, classes: int = 3) -> Table:
    return Table({"x": torch.arange(count)}, torch.arange(count) % classes)


def numbered_task(count: int) -> Task:
    return Task("numbers", number_table(count), number_table(7), ("a", "b", "c"))


def row_numbers(examples: Any) -> list[int]:
    rows: list[int] = examples.take(torch.arange(len(examples))).inputs["x"].tolist()
    return rows


def test_table_takes_rows_before_transforming_them() -> None:
    pixels = torch.randint(0, 256, (9, 3, 2, 2), dtype=torch.uint8)
    before = pixels.clone()
    table = Table({"pixel_values": pixels}, torch.arange(9), Normalize((0.5, 0.4, 0.3), (0.1, 0.2, 0.3)))
    picked = torch.tensor([4, 0, 4])
    batch = table.take(picked)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.1, 0.2, 0.3])
    wanted = (pixels[picked].float() / 255 - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(batch.inputs["pixel_values"], wanted)
    assert batch.targets.tolist() == [4, 0, 4]
    assert batch.mask is None
    assert torch.equal(pixels, before)


@given(st.data())
@quick
def test_subset_takes_the_rows_of_its_table(data: st.DataObject) -> None:
    table = number_table(20)
    chosen = data.draw(st.lists(st.integers(0, 19), min_size=1))
    picked = data.draw(st.lists(st.integers(0, len(chosen) - 1)))
    view = Subset(table, torch.tensor(chosen))
    batch = view.take(torch.tensor(picked, dtype=torch.int64))
    assert len(view) == len(chosen)
    assert batch.inputs["x"].tolist() == [chosen[i] for i in picked]
    assert batch.targets.tolist() == [chosen[i] % 3 for i in picked]


def test_inputs_targets_and_columns_must_have_equal_lengths() -> None:
    with pytest.raises(DataError, match="input 'x' has 3 rows, but there are 4 targets"):
        Table({"x": torch.zeros(3)}, torch.zeros(4))
    with pytest.raises(DataError, match="column 'domain' has 2 values for 5 train rows"):
        Task("toy", number_table(5), number_table(5), ("a",), {"domain": np.array(["a", "b"])})


shares = st.integers(0, 99).map(lambda percent: percent / 100)


@given(size=st.integers(1, 200), validation=shares, test=shares, seed=st.integers(0, 2**32))
@quick
def test_client_parts_have_exact_shares_and_train_gets_the_rest(
    size: int, validation: float, test: float, seed: int
) -> None:
    whole = Partition(np.arange(size) * 2, np.array([0, size]), NamedClients(["lone"]))
    fractions = Fraction(str(validation)), Fraction(str(test))
    if sum(fractions) >= 1:
        with pytest.raises(DataError, match="leave no training rows"):
            ClientSplit(whole, Key(seed), *fractions)
        return
    parts = ClientSplit(whole, Key(seed), *fractions)[0]
    percents = round(validation * 100), round(test * 100)
    assert [len(part) for part in parts[1:]] == [size * percent // 100 for percent in percents]
    assert len(parts[0]) >= 1
    assert sorted(torch.cat(parts).tolist()) == list(range(0, 2 * size, 2))


def test_shares_are_exact_decimals() -> None:
    lone = split(numbered_task(100), "iid", 1, key=Key(0), validation=0.29, test=0.57)["c0"]  # 0.29 * 100 < 29
    assert (len(lone.train), len(lone.validation), len(lone.test)) == (14, 29, 57)


def test_rows_are_grouped_by_owner() -> None:
    partition = group_by_client(np.array([1, -1, 0, 1, -1, 1]), NamedClients(["a", "b"]))
    assert [rows.tolist() for rows in np.split(partition.rows, partition.offsets[1:-1])] == [[2], [0, 3, 5]]
    with pytest.raises(DataError, match="client 'b' would get no examples; use fewer clients"):
        group_by_client(np.array([0, 2]), NamedClients(["a", "b", "c"]))


@pytest.mark.parametrize(("size", "lengths"), [(1, (1, 0, 0)), (4, (4, 0, 0)), (5, (4, 0, 1)), (10, (7, 1, 2))])
def test_small_clients_keep_rows_for_training_first(size: int, lengths: tuple[int, int, int]) -> None:
    lone = split(numbered_task(size), "iid", 1, key=Key(0))["c0"]
    assert (len(lone.train), len(lone.validation), len(lone.test)) == lengths


def test_negative_share_is_refused() -> None:
    with pytest.raises(DataError, match=r"test = -0\.1 is negative"):
        split(numbered_task(9), "iid", 1, key=Key(0), test=-0.1)


def test_client_parts_depend_only_on_key_name_and_rows() -> None:
    rows, shares = np.arange(30), (Fraction(1, 10), Fraction(1, 5))
    first = ClientSplit(Partition(rows, np.array([0, 10, 30]), NamedClients(["a", "b"])), Key(3), *shares)
    other = ClientSplit(Partition(rows[10:], np.array([0, 20]), NamedClients(["b"])), Key(3), *shares)
    renamed = ClientSplit(Partition(rows[10:], np.array([0, 20]), NamedClients(["c"])), Key(3), *shares)
    assert [part.tolist() for part in first[1]] == [part.tolist() for part in other[0]]
    assert [part.tolist() for part in first[1]] != [part.tolist() for part in renamed[0]]
    expected = torch.arange(10, 30)[(Key(3) / "b").permutation(20)]
    assert torch.equal(first[1][2], expected[: floor(20 * shares[1])])


def test_federation_gives_each_row_to_one_client_part() -> None:
    task = numbered_task(100)
    federation = split(task, "iid", 7, key=Key(1))
    parts = [(data.train, data.validation, data.test) for data in (federation[client] for client in federation.clients)]
    assert sorted(row for three in parts for part in three for row in row_numbers(part)) == list(range(100))
    assert row_numbers(federation["c3"].train) == row_numbers(split(task, "iid", 7, key=Key(1))["c3"].train)
    assert row_numbers(federation["c3"].train) != row_numbers(split(task, "iid", 7, key=Key(2))["c3"].train)
    assert federation.test is task.test
    assert federation.classes == ("a", "b", "c")


def test_pooling_joins_equal_parts() -> None:
    federation = split(numbered_task(100), "iid", 7, key=Key(1))
    pooled = federation.pooled()
    assert list(pooled.clients) == ["pooled"]
    for part in "train", "validation", "test":
        apart = [row_numbers(getattr(federation[client], part)) for client in federation.clients]
        assert row_numbers(getattr(pooled["pooled"], part)) == [row for rows in apart for row in rows]
    assert len(pooled["pooled"].test) > 0
    with pytest.raises(DataError, match="no client 'c0'"):
        pooled["c0"]


def test_large_federation_pickles_as_two_arrays() -> None:
    count, clients = 100_000, 50_000
    federation = split(numbered_task(count), "iid", clients, key=Key(0))
    held = pickle.dumps(federation.parts)
    assert len(held) < 8 * (count + clients) + 2_000
    last = federation.clients[-1]
    again = Federation(federation.task, federation.clients, pickle.loads(held))
    assert row_numbers(again[last].train) == row_numbers(federation[last].train)


@given(count=st.integers(1, 300), position=st.integers(-300, 299))
@quick
def test_numbered_clients_behave_like_named_clients(count: int, position: int) -> None:
    lazy, listed = NumberedClients(count), NamedClients(f"c{number}" for number in range(count))
    assert list(lazy) == list(listed)
    assert lazy[position // 2 :: 3] == listed[position // 2 :: 3]
    if -count <= position < count:
        assert lazy[position] == listed[position]
        assert lazy.index(lazy[position]) == listed.index(lazy[position]) == position % count
    else:
        with pytest.raises(IndexError):
            lazy[position]
    for strange in "c", "c01", "d1", f"c{count}", "c-1", "", "c²":
        for names in lazy, listed:
            if count > 1 or strange != "c01":
                assert strange not in names
            with pytest.raises(DataError, match="no client"):
                names.index(strange)


def test_duplicate_client_names_are_refused() -> None:
    with pytest.raises(DataError, match="two clients are named 'a'"):
        NamedClients(["a", "b", "a"])


def test_digits_match_scikit_learn() -> None:
    from sklearn.datasets import load_digits  # slow to import, and only here

    task, other = load("digits", Key(0)), load("digits", Key(1))
    pixels = torch.cat([task.train.inputs["pixel_values"], task.test.inputs["pixel_values"]])
    targets = torch.cat([task.train.targets, task.test.targets])
    assert pixels.shape == (1797, 1, 8, 8)
    assert pixels.min() == -1
    assert pixels.max() == 1
    bunch = load_digits()
    theirs = sorted(
        (*image.flatten().tolist(), int(label)) for image, label in zip(bunch.images, bunch.target, strict=True)
    )
    ours = sorted(
        (*image.flatten().tolist(), int(label)) for image, label in zip((pixels + 1) * 8, targets, strict=True)
    )
    assert ours == theirs
    share = torch.bincount(task.test.targets) / torch.bincount(targets)
    assert (abs(share - 0.2) < 0.005).all()
    assert not torch.equal(task.test.inputs["pixel_values"], other.test.inputs["pixel_values"])
    assert torch.equal(task.test.inputs["pixel_values"], load("digits", Key(0)).test.inputs["pixel_values"])
    assert task.classes == tuple("0123456789")
    assert (task.channels, task.size) == (1, 8)


def test_synthetic_images_are_class_plus_domain_plus_noise() -> None:
    options = {"examples": 240, "test_examples": 60, "classes": 4, "size": 3, "channels": 2, "domains": 3}
    still = load("synthetic", Key(0), **options, noise=0.0)
    pixels, domain = still.train.inputs["pixel_values"], still.columns["domain"]
    assert pixels.shape == (240, 2, 3, 3)
    assert torch.bincount(still.train.targets).tolist() == [60] * 4
    assert sorted(np.unique(domain, return_counts=True)[1]) == [80] * 3
    kinds = {
        (int(label), place): image for label, place, image in zip(still.train.targets, domain, pixels, strict=True)
    }
    assert len(kinds) == 12
    for label, place, image in zip(still.train.targets, domain, pixels, strict=True):
        assert torch.equal(image, kinds[int(label), place])
    step = kinds[0, "domain1"] - kinds[0, "domain0"]  # a domain moves every class alike
    torch.testing.assert_close(kinds[3, "domain1"] - kinds[3, "domain0"], step)
    assert step.abs().max() > 0.5
    alike = load("synthetic", Key(0), **options, noise=0.0, shift=0.0).train
    assert len(alike.inputs["pixel_values"].flatten(1).unique(dim=0)) == 4
    assert {tuple(image.flatten().tolist()) for image in still.test.inputs["pixel_values"]} <= {
        tuple(image.flatten().tolist()) for image in kinds.values()
    }
    noisy = load("synthetic", Key(0), **options, noise=0.5)
    spread = (noisy.train.inputs["pixel_values"] - pixels).std()
    assert 0.47 < spread < 0.53
    assert (noisy.channels, noisy.size) == (2, 3)
    with pytest.raises(OptionError, match=r"data\.classes is 0; "):
        load("synthetic", Key(0), classes=0)


def random_images(count: int, size: tuple[int, int] = (6, 6)) -> list[np.ndarray]:
    draws = np.random.default_rng(count)
    return [draws.integers(0, 256, (*size, 3), np.uint8) for _ in range(count)]


def write_images(
    folder: Path, part: str, images: list[np.ndarray], classes: tuple[str, ...] = ("cat", "dog"), **other: Any
) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    datasets.disable_progress_bars()
    count = len(images)
    columns: dict[str, Any] = {
        "image": [Image.fromarray(image) for image in images],
        "label": [row % 2 for row in range(count)],
        "domain": ["photo" if row % 3 else "sketch" for row in range(count)],
        "site": [row % 2 for row in range(count)],
        "weight": [0.5] * count,
    } | other
    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=list(classes)),
        domain=datasets.Value("string"),
        site=datasets.ClassLabel(names=["north", "south"]),
        weight=datasets.Value("float32"),
    )
    datasets.Dataset.from_dict(columns, features=features).to_parquet(folder / f"{part}.parquet")


def test_parquet_images_become_a_task(tmp_path: Path) -> None:
    train, test = random_images(8), random_images(4)
    write_images(tmp_path, "train", train)
    write_images(tmp_path, "test", test)
    task = load("images", Key(0), path=str(tmp_path))
    pixels = task.train.inputs["pixel_values"]
    assert pixels.dtype == torch.uint8
    assert np.array_equal(pixels.numpy(), np.stack(train).transpose(0, 3, 1, 2))
    assert np.array_equal(task.test.inputs["pixel_values"].numpy(), np.stack(test).transpose(0, 3, 1, 2))
    seen = task.train.take(torch.arange(8)).inputs["pixel_values"]
    torch.testing.assert_close(seen, pixels.float() / 127.5 - 1)
    assert task.train.targets.tolist() == [0, 1] * 4
    assert task.classes == ("cat", "dog")
    assert (task.channels, task.size) == (3, 6)
    assert {name: values.tolist() for name, values in task.columns.items()} == {
        "domain": ["photo" if row % 3 else "sketch" for row in range(8)],
        "site": ["north", "south"] * 4,
    }
    assert list(split(task, "by_column", key=Key(0), column="domain").clients) == ["photo", "sketch"]


def test_images_are_converted_to_gray_and_resized(tmp_path: Path) -> None:
    from PIL import Image

    train = random_images(2, (5, 9))
    write_images(tmp_path, "train", train)
    write_images(tmp_path, "test", random_images(2, (4, 4)))
    task = load("images", Key(0), path=tmp_path, size=4, channels=1, mean=[0.0], std=[1.0])
    expected = np.asarray(Image.fromarray(train[0]).convert("L").resize((4, 4)))
    assert np.array_equal(task.train.inputs["pixel_values"][0, 0].numpy(), expected)
    assert (task.channels, task.size) == (1, 4)
    assert task.train.take(torch.tensor([0])).inputs["pixel_values"].aminmax()[0] >= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "lable"}, "has no column 'lable'; did you mean 'label'"),
        ({"image": "domain"}, "'domain' .* holds no images"),
        ({"label": "domain"}, "'domain' .* has no class names"),
        ({"channels": 4}, "channels is 4; it must be 1 or 3"),
        ({"mean": [0.1, 0.2]}, "mean has 2 values for 3 channels"),
        ({"path": "nowhere"}, "no file or folder 'nowhere'; give a file"),
    ],
)
def test_invalid_image_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_images(tmp_path, "train", random_images(2))
    write_images(tmp_path, "test", random_images(2))
    with pytest.raises((DataError, OptionError), match=message):
        load("images", Key(0), **{"path": str(tmp_path), **options})


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ({"images": random_images(2, (4, 6))}, {"images": random_images(2)}, "is 6 by 4; set size"),
        (
            {"images": random_images(1) + random_images(1, (3, 3))},
            {"images": random_images(2)},
            "the image in row 1 of the train part .* is 3 by 3, .* 6 by 6; set size",
        ),
        (
            {"images": random_images(2)},
            {"images": random_images(2, (4, 4))},
            "differ in size between train and test; set size",
        ),
        (
            {"images": random_images(2), "label": [0, -1]},
            {"images": random_images(2)},
            "row 1 of the train part .* has no label",
        ),
        (
            {"images": random_images(2)},
            {"images": random_images(2), "classes": ("dog", "cat")},
            "name different classes in 'label'",
        ),
    ],
)
def test_inconsistent_image_parts_are_refused(tmp_path: Path, train: Any, test: Any, message: str) -> None:
    write_images(tmp_path, "train", **train)
    write_images(tmp_path, "test", **test)
    with pytest.raises(DataError, match=message):
        load("images", Key(0), path=tmp_path)


def write_class_folders(folder: Path, **counts: int) -> list[np.ndarray]:
    """Write one folder per class with the given number of images."""
    from PIL import Image

    shown = []
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number, image in enumerate(random_images(count)):
            Image.fromarray(image).save(folder / name / f"{number}.png")
            shown.append(image)
    return shown


def test_class_folders_become_a_task(tmp_path: Path) -> None:
    train, test = write_class_folders(tmp_path / "train", dog=2, cat=3), write_class_folders(tmp_path / "test", cat=1)
    (tmp_path / "train" / "cat" / ".hidden").write_text("left by a file manager")
    task = load("images", Key(0), path=tmp_path)
    assert task.classes == ("cat", "dog")
    assert task.train.targets.tolist() == [0, 0, 0, 1, 1]
    expected = np.stack(train[2:] + train[:2]).transpose(0, 3, 1, 2)
    assert np.array_equal(task.train.inputs["pixel_values"].numpy(), expected)
    assert np.array_equal(task.test.inputs["pixel_values"].numpy(), np.stack(test).transpose(0, 3, 1, 2))
    alone = load("images", Key(0), path=tmp_path / "train", test=0.4)
    assert (alone.classes, len(alone.train), len(alone.test)) == (("cat", "dog"), 3, 2)


def empty_file(folder: Path) -> None:
    (folder / "train" / "cat" / "1.png").write_bytes(b"")


def broken_file(folder: Path) -> None:
    file = folder / "train" / "cat" / "1.png"
    file.write_bytes(file.read_bytes()[:60])


def stray_text(folder: Path) -> None:
    (folder / "train" / "cat" / "notes.txt").write_text("nice cats")


def loose_image(folder: Path) -> None:
    (folder / "train" / "cat" / "1.png").rename(folder / "train" / "1.png")


def other_class(folder: Path) -> None:
    (folder / "test" / "cat").rename(folder / "test" / "cats")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (empty_file, r"the image in row 1 of the train part .*cat/1\.png'\) is empty; replace or remove it"),
        (broken_file, r"the image in row 1 of the train part .*cat/1\.png'\) cannot be read: .*; replace or remove it"),
        (stray_text, r"notes\.txt' is not an image"),
        (loose_image, r"train/1\.png' is not in a class folder"),
        (other_class, "cats' is a class that train lacks; did you mean 'cat'"),
    ],
)
def test_broken_class_folders_are_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", cat=3, dog=2)
    write_class_folders(tmp_path / "test", cat=1)
    spoil(tmp_path)
    with pytest.raises(DataError, match=message):
        load("images", Key(0), path=tmp_path)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"bytes": b"", "path": None}, "is empty"),
        (None, "is empty"),
        ({"bytes": b"no image", "path": None}, "cannot be read: cannot identify image file"),
    ],
)
def test_broken_image_in_a_table_is_named_by_its_row(kept: Any, message: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for part in "train", "test":
        write_images(tmp_path, part, random_images(2))
    write_class_folders(tmp_path, cat=1)
    good = {"bytes": (tmp_path / "cat" / "0.png").read_bytes(), "path": None}
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
    table = datasets.Dataset.from_dict({"image": [good, kept], "label": [0, 1]}, features=features)
    table.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(DataError, match=f"the image in row 1 of the train part .* {message}; replace or remove it"):
        load("images", Key(0), path=tmp_path)


@pytest.mark.parametrize("column", ["label", "site"])
def test_class_number_without_a_name_is_refused_by_its_row(column: str, tmp_path: Path) -> None:
    """A damaged file can hold any number. datasets checks it only when it looks the name up."""
    pytest.importorskip("datasets")
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part in "train", "test":
        write_images(tmp_path, part, random_images(4))
    table = pq.read_table(tmp_path / "train.parquet")
    place = table.column_names.index(column)
    table = table.set_column(place, table.schema.field(place), pa.array([0, 65537, 0, 1]))
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(DataError, match=rf"row 1 of the train part .* 65537 in '{column}', but .* only \d+ classes"):
        load("images", Key(0), path=tmp_path).columns["site"]


def test_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(DataError, match=r"holds no dataset that partita can read; give a file \(parquet"):
        load("images", Key(0), path=tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, "unknown data 'digit'; did you mean 'digits'"),
        ("digits", {"size": 3}, "unknown key 'data.size'"),
        ("synthetic", {"clases": 3}, "'data.clases'; did you mean 'classes'"),
        ("images", {}, "'data.path' is missing"),
        ("images", {"path": ".", "mean": 0.5}, "data.mean is 0.5; it must be a list"),
    ],
)
def test_invalid_task_names_and_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(name, Key(0), **options)


def test_missing_datasets_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package 'datasets': pip install 'partita\[data\]'"):
        load("images", Key(0), path="owner/name")


def test_data_modules_import_optional_packages_lazily() -> None:
    files = list(Path(partita.data.__path__[0]).glob("*.py"))
    assert {f"partita.data.{file.stem}" for file in files} >= {
        module.partition(":")[0] for name, module in INDEX.items() if name != "trainer"
    }
    for file in files:
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "numpy", "torch", "partita"}
