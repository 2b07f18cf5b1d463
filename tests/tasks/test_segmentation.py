"""Segmentation models: loss, export and runs, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architecture_fixtures import perturbed
from torch import Tensor

from partita.core.data import IGNORE_INDEX
from partita.core.optim import SGD
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.core.settings import Run, Training
from partita.data import DataError, Table, Task, split
from partita.engines.simulation import SimulationEngine
from partita.experiment.config import parse
from partita.experiment.runner import resume, start
from partita.experiment.split_record import describe_split
from partita.methods.fedavg import fedavg
from partita.models import build
from partita.models.functional import FunctionalModel, without_logs
from partita.models.tiny_segformer import write_tiny_segformer
from partita.report.load import load_run
from partita.tasks import SEGMENTATION
from partita.tasks.losses import pixel_cross_entropy

CLASSES = ("ground", "disc", "ring")
SIDE = 16


@pytest.fixture(scope="module", params=["segformer", "beit"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "segformer":
        write_tiny_segformer(path, Key(0), width=8)
    else:
        write_beit(path)
    return str(path)


def write_beit(path: Path) -> None:
    from transformers import BeitConfig, BeitForSemanticSegmentation

    sizes = {"hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 8}
    options = {"out_indices": [1, 2, 3, 4], "pool_scales": [2], "use_auxiliary_head": False}
    config = BeitConfig(image_size=SIDE, patch_size=4, **sizes, **options)
    with without_logs():
        BeitForSemanticSegmentation(config).save_pretrained(path)


def scenes(count: int = 24) -> tuple[Tensor, Tensor]:
    """Bright discs and dark rings on a gray ground. The border of an image has no labels."""
    draws = np.random.default_rng(0)
    pixels, targets = torch.zeros(count, 3, SIDE, SIDE), torch.zeros(count, SIDE, SIDE, dtype=torch.int16)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for number in range(count):
        for kind in (1, 2):
            y, x = draws.integers(4, SIDE - 4, 2)
            distance = np.hypot(rows - y, columns - x)
            inside = torch.from_numpy(distance < 3 if kind == 1 else (distance > 2) & (distance < 4))
            pixels[number][:, inside] = 1.0 if kind == 1 else -1.0
            targets[number][inside] = kind
    targets[:, 0] = IGNORE_INDEX
    return pixels + 0.1 * torch.from_numpy(draws.normal(size=pixels.shape)).float(), targets


def task_of() -> Task:
    pixels, targets = scenes()
    table = Table({"pixel_values": pixels}, targets)
    return Task("scenes", table, table, CLASSES, channels=3, size=SIDE, kind=SEGMENTATION)


def model_of(folder: str, task: Task, **options: Any) -> FunctionalModel:
    model = build("pretrained", task, Key(0), path=folder, **options)
    assert isinstance(model, FunctionalModel)
    return model


@pytest.mark.fast_cases(1)
def test_logits_and_losses_are_those_of_transformers(folder: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSemanticSegmentation

    task = task_of()
    model = model_of(folder, task)
    params = perturbed(model.initial)
    model.save_pretrained(params, tmp_path / "saved")
    with without_logs():
        plain = AutoModelForSemanticSegmentation.from_pretrained(tmp_path / "saved").eval()
    assert plain.config.id2label == dict(enumerate(CLASSES))
    plain.config.semantic_loss_ignore_index = IGNORE_INDEX
    batch = task.train.take(torch.arange(4))
    out = model(params, batch.inputs)
    assert out.logits.shape == (4, len(CLASSES), SIDE, SIDE)
    losses = model.losses(out, batch.targets)
    for number, loss in enumerate(losses):
        one = batch.inputs["pixel_values"][[number]]
        expected = plain(one, labels=batch.targets[[number]].long()).loss
        torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)


def test_a_saved_model_works_in_a_pipeline_of_transformers(tmp_path: Path) -> None:
    from PIL import Image
    from transformers import pipeline

    write_tiny_segformer(tmp_path / "model", Key(0), width=8)
    task = replace(task_of(), normalization=((0.5,), (0.5,)))
    model = model_of(str(tmp_path / "model"), task)
    params = perturbed(model.initial)
    model.save_pretrained(params, tmp_path / "saved")
    raw = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
    pixels = torch.from_numpy(raw).permute(2, 0, 1)[None].float() / 127.5 - 1
    predicted = model(params, {"pixel_values": pixels}).logits.argmax(1)[0].numpy()
    with without_logs():
        segment = pipeline("image-segmentation", str(tmp_path / "saved"), device="cpu")
        found = {part["label"]: np.asarray(part["mask"]) > 0 for part in segment(Image.fromarray(raw))}
    assert found.keys() == {CLASSES[number] for number in np.unique(predicted)}
    for label, mask in found.items():
        assert (mask == (predicted == CLASSES.index(label))).all()


@pytest.mark.slow
def test_a_new_head_starts_with_scales_of_one_and_fresh_statistics(tmp_path: Path) -> None:
    """With scales of zero, no gradient would reach anything below the batch norm."""
    write_tiny_segformer(tmp_path, Key(0), width=8)
    task = task_of()
    model = model_of(str(tmp_path), task)
    norm = "decode_head.batch_norm"
    assert torch.equal(model.initial[f"{norm}.weight"], torch.ones(8))
    assert torch.equal(model.initial[f"{norm}.bias"], torch.zeros(8))
    buffers = dict(model.module.named_buffers())
    assert torch.equal(buffers[f"{norm}.running_mean"], torch.zeros(8))
    assert torch.equal(buffers[f"{norm}.running_var"], torch.ones(8))
    logits = model(model.initial, task.train.take(torch.arange(2)).inputs).logits
    assert float(logits.detach().std((2, 3)).min()) > 0
    again = model_of(str(tmp_path), task)
    assert all(torch.equal(value, again.initial[name]) for name, value in model.initial.items())


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    write_tiny_segformer(tmp_path, Key(0), width=8)
    task = task_of()
    inputs = task.train.take(torch.arange(2)).inputs
    full, half = (model_of(str(tmp_path), task, dtype=dtype) for dtype in ("float32", "bfloat16"))
    params = perturbed(full.initial)
    expected = full(params, inputs).logits
    assert (half(params, inputs).logits - expected).abs().max() < 0.1 * expected.abs().max()


def test_the_loss_is_a_mean_over_labeled_pixels_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 2, 2, generator=generator)
    targets = torch.tensor([[[0, 1], [2, IGNORE_INDEX]], [[IGNORE_INDEX] * 2] * 2], dtype=torch.int16)
    logs = logits[0].log_softmax(0)
    expected = -(logs[0, 0, 0] + logs[1, 0, 1] + logs[2, 1, 0]) / 3
    found = pixel_cross_entropy(logits, targets)
    torch.testing.assert_close(found, torch.stack([expected, torch.zeros(())]))


@pytest.mark.fast_cases(1)
def test_clients_train_in_a_block_as_alone(folder: str) -> None:
    task = task_of()
    model = model_of(folder, task)
    federation = split(task, "iid", 3, key=Key(0))
    run = Run(fedavg(), Training(0.1, SGD(), batch_size=3), 1, Key(0))
    alone, together = (
        next(iter(rounds(run, model, SimulationEngine(run, model, federation, block)))).server.params
        for block in (1, 3)
    )
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, atol=1e-5, rtol=0)
    assert any(not torch.equal(value, model.initial[name]) for name, value in alone.items())


def test_a_split_by_label_is_refused_and_the_record_counts_no_labels() -> None:
    task = task_of()
    with pytest.raises(DataError, match="needs exactly one class per example; use 'iid', 'quantity' or 'by_column'"):
        split(task, "dirichlet", 2, key=Key(0), alpha=0.5)
    record = describe_split(split(task, "iid", 3, key=Key(0)))
    assert record is not None
    assert "classes" not in record
    assert all("labels" not in client for client in record["clients"])


@pytest.mark.slow
def test_a_run_learns_resumes_and_reports(folder: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels, targets = scenes()
    for name in ("images", "masks"):
        (tmp_path / "data" / name).mkdir(parents=True)
    for number, (picture, mask) in enumerate(zip(pixels, targets, strict=True)):
        grey = ((picture.clamp(-1, 1) + 1) * 127.5).to(torch.uint8).permute(1, 2, 0).numpy()
        image.fromarray(grey).save(tmp_path / "data" / "images" / f"{number}.png")
        numbers = mask.where(mask >= 0, 255).to(torch.uint8).numpy()
        image.fromarray(numbers).save(tmp_path / "data" / "masks" / f"{number}.png")
    config = parse(
        {
            "rounds": 3,
            "data": {"name": "segmentation", "path": str(tmp_path / "data"), "classes": CLASSES},
            "split": {"name": "iid", "clients": 2, "test": 0.2},
            "model": {"name": "pretrained", "path": folder},
            "method": {"name": "fedavg"},
            "training": {"optimizer": "adamw", "lr": 1e-2, "batch_size": 4},
            "evaluate": {"personal_every": 3},
        }
    )
    rows = list(start(config, tmp_path / "whole"))
    scores = {"mean_iou", "dice", "accuracy", "loss"}
    assert rows[-1]["test"].keys() == rows[-1]["personal"].keys() == scores
    assert rows[-1]["test"]["loss"] < rows[0]["test"]["loss"]
    assert load_run(tmp_path / "whole").metric.name == "mean_iou"
    assert next(iter(start(config, tmp_path / "part")))["test"] == rows[0]["test"]
    assert list(resume(config, tmp_path / "part"))[-1]["test"] == rows[-1]["test"], "bit for bit"
