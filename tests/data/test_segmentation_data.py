"""Reading images with their masks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from partita.core.rng import Key
from partita.data import DataError, Task, load
from partita.tasks import SEGMENTATION

datasets = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")
datasets.disable_progress_bars()

SIDE = 6


def pixels(number: int, side: int = SIDE) -> NDArray[np.uint8]:
    """An image whose first pixel says which one it is."""
    image = np.random.default_rng(number).integers(0, 256, (side, side, 3)).astype(np.uint8)
    image[0, 0] = number
    return image


def numbers(number: int, side: int = SIDE) -> NDArray[np.uint8]:
    """A mask of two classes and some pixels without a label."""
    mask = (np.random.default_rng(100 + number).random((side, side)) < 0.4).astype(np.uint8)
    mask[0, 1:3] = 255
    mask[0, 0], mask[1, 0] = 0, 1
    return mask


def write_folder(folder: Path, count: int = 10, parts: tuple[str, ...] = ("",)) -> Path:
    for part in parts:
        for name in ("images", "masks"):
            (folder / part / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(pixels(number)).save(folder / part / "images" / f"{number:02}.bmp")
            Image.fromarray(numbers(number)).save(folder / part / "masks" / f"{number:02}.png")
    return folder


def read(path: Path, **options: Any) -> Task:
    return load("segmentation", Key(0), path=str(path), **options)


def check(task: Task, parts: Any = None) -> None:
    """Each mask belongs to its image."""
    for part in parts or (task.train, task.test):
        batch = part.take(torch.arange(len(part)))
        for image, target in zip(batch.inputs["pixel_values"], batch.targets, strict=True):
            raw = ((image * 0.5 + 0.5) * 255).round().to(torch.uint8).numpy()
            number = int(raw[0, 0, 0])
            assert (raw == pixels(number).transpose(2, 0, 1)).all()
            expected = numbers(number).astype(np.int64)
            expected[expected == 255] = -100
            assert (target.numpy() == expected).all()


def test_folders_of_images_and_masks(tmp_path: Path) -> None:
    task = read(write_folder(tmp_path / "scans"))
    assert (task.name, task.kind, task.classes) == ("scans", SEGMENTATION, ("0", "1"))
    assert (task.channels, task.size, len(task.train), len(task.test)) == (3, SIDE, 8, 2)
    check(task)


def test_folders_with_parts(tmp_path: Path) -> None:
    task = read(write_folder(tmp_path, 4, ("train", "test")), classes=("ground", "cell"))
    assert (len(task.train), len(task.test), task.classes) == (4, 4, ("ground", "cell"))
    check(task)


def test_columns_of_images_and_masks(tmp_path: Path) -> None:
    features = datasets.Features(
        {"scan": datasets.Image(), "truth": datasets.Image(), "hospital": datasets.Value("string")}
    )
    rows = {
        "scan": [Image.fromarray(pixels(number)) for number in range(10)],
        "truth": [Image.fromarray(numbers(number)) for number in range(10)],
        "hospital": [f"h{number % 2}" for number in range(10)],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    task = read(tmp_path / "saved", image="scan", mask="truth")
    check(task)
    assert list(task.columns) == ["hospital"]
    assert len(read(tmp_path / "saved", image="scan", mask="truth", limit=3).train) == 3


def test_a_table_of_paths(tmp_path: Path) -> None:
    write_folder(tmp_path)
    lines = [f"images/{number:02}.bmp,masks/{number:02}.png,{number % 2}" for number in range(10)]
    (tmp_path / "scans.csv").write_text("\n".join(["image,mask,site", *lines]))
    task = read(tmp_path / "scans.csv")
    check(task)
    assert list(task.columns) == ["site"]


def test_masks_are_resized_to_the_nearest_pixel(tmp_path: Path) -> None:
    small = read(write_folder(tmp_path), size=3)
    batch = small.train.take(torch.arange(len(small.train)))
    assert batch.inputs["pixel_values"].shape[-2:] == batch.targets.shape[-2:] == (3, 3)
    assert set(batch.targets.unique().tolist()) <= {-100, 0, 1}


def test_a_palette_holds_class_numbers_and_255_can_be_a_class(tmp_path: Path) -> None:
    write_folder(tmp_path)
    for file in (tmp_path / "masks").iterdir():
        mask = Image.open(file)
        mask.putpalette([value for value in range(256) for _ in range(3)])
        assert mask.mode == "P"
        mask.save(file)
    check(read(tmp_path))
    classes = tuple(f"class{number}" for number in range(256))
    targets = read(tmp_path, ignore=None, classes=classes).train.take(torch.arange(8)).targets
    assert int(targets.max()) == 255
    assert int(targets.min()) == 0


def spoil(folder: Path, mask: NDArray[Any], name: str = "05") -> None:
    Image.fromarray(mask).save(folder / "masks" / f"{name}.png")


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (numbers(5, 4), {}, r"mask in row 5 of the train part .* is 4 by 4, but its image is 6 by 6; make the mask"),
        (numbers(5, 4), {"size": 4}, r"is 4 by 4, but its image is 6 by 6"),
        (np.full((6, 6), 7, np.uint8), {"classes": ("a", "b")}, r"row 5 .* has the class 7, but there are 2 classes"),
        (np.zeros((6, 6, 3), np.uint8), {}, r"row 5 .* is an image of mode RGB; save it with one channel"),
    ],
)
def test_wrong_masks_are_refused_by_row(
    mask: NDArray[Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_folder(tmp_path)
    spoil(tmp_path, mask)
    with pytest.raises(DataError, match=message):
        read(tmp_path, **options)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("masks/03.png", None, r"images/03\.bmp' has no file of the same name in '.*masks'; add it"),
        ("masks/03.png", b"no image", r"mask in row 3 of the train part .*03\.png'\) cannot be read"),
        ("masks/notes.txt", b"hello", r"notes\.txt' is not an image"),
    ],
)
def test_missing_broken_and_other_files_are_refused(
    file: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = write_folder(tmp_path) / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_masks_of_one_class_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    for number in range(10):
        spoil(tmp_path, np.zeros((6, 6), np.uint8), f"{number:02}")
    with pytest.raises(DataError, match=r"have the classes \[0\], so there is nothing to tell apart"):
        read(tmp_path)


def test_images_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    write_folder(tmp_path)
    Image.fromarray(pixels(5, 8)).save(tmp_path / "images" / "05.bmp")
    spoil(tmp_path, numbers(5, 8))
    with pytest.raises(DataError, match=r"is 8 by 8, the first is 6 by 6; set size to resize them"):
        read(tmp_path)
    with warnings.catch_warnings():
        assert read(tmp_path, size=4).size == 4
