"""Saved models work in `transformers.pipeline` and predict what partita predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_fixtures import WORDS, write_encoder
from PIL import Image
from transformers import AutoTokenizer, pipeline

from partita import data, models
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.functional import FunctionalModel

TEXTS = [" ".join(WORDS[: 1 + place % len(WORDS)]) for place in range(20)]


def perturbed(params: Tensors) -> Tensors:
    draw = torch.Generator().manual_seed(1)
    return {name: value + 0.3 * torch.randn(value.shape, generator=draw) for name, value in params.items()}


def probabilities(model: FunctionalModel, params: Tensors, examples: Any) -> torch.Tensor:
    return model(params, examples.take(torch.arange(len(examples))).inputs).logits.softmax(-1)


def write_texts(folder: Path) -> Path:
    rows = [{"text": text, "label": ("calm", "ill")[place % 2]} for place, text in enumerate(TEXTS)]
    (folder / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "notes.jsonl"


def text_model(folder: Path) -> tuple[data.Task, FunctionalModel, Tensors]:
    encoder = write_encoder(folder / "encoder")
    task = data.load("text", Key(0), path=write_texts(folder), tokenizer=str(encoder), max_length=16)
    model: Any = models.build("pretrained", task, Key(0), path=str(encoder))
    return task, model, perturbed(model.initial)


def test_saved_text_model_predicts_the_same_in_a_pipeline(tmp_path: Path) -> None:
    task, model, params = text_model(tmp_path)
    model.save_pretrained(params, tmp_path / "saved")
    read = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert read(TEXTS[3])["input_ids"] == task.tokenizer(TEXTS[3])["input_ids"]
    classify = pipeline("text-classification", model=str(tmp_path / "saved"), top_k=None, device="cpu")
    ids = task.test.take(torch.arange(len(task.test))).inputs
    texts = task.tokenizer.batch_decode(ids["input_ids"], skip_special_tokens=True)
    assert all(texts)
    for row, found in zip(probabilities(model, params, task.test), classify(texts), strict=True):
        scores = {each["label"]: each["score"] for each in found}
        assert scores == pytest.approx(dict(zip(("calm", "ill"), row.tolist(), strict=True)), abs=1e-5)


def test_saved_adapter_has_the_tokenizer_too(tmp_path: Path) -> None:
    _, model, _ = text_model(tmp_path)
    adapted = model.low_rank(2, 2.0, ("query",), Key(0))
    adapted.save_pretrained(adapted.initial, tmp_path / "adapter")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "adapter")) == 5 + len(WORDS)


def test_saved_image_model_predicts_the_same_in_a_pipeline(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    files = []
    for place in range(12):
        files.append(tmp_path / "pictures" / ("cat", "dog")[place % 2] / f"{place}.png")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (11, 7, 3), np.uint8)).save(files[-1])
    task = data.load("images", Key(0), path=tmp_path / "pictures", size=8, mean=(0.4, 0.5, 0.6), std=(0.3,), test=0.5)
    model: Any = models.build("vit", task, Key(0), layers=1, width=8, heads=2, patch=4)
    params = perturbed(model.initial)
    model.save_pretrained(params, tmp_path / "saved")
    classify = pipeline("image-classification", model=str(tmp_path / "saved"), device="cpu")
    told = sorted(tuple(sorted((each["label"], round(each["score"], 4)) for each in classify(str(f)))) for f in files)
    ours = torch.cat([probabilities(model, params, part) for part in (task.train, task.test)]).tolist()
    expected = sorted(tuple(sorted(zip(("cat", "dog"), (round(v, 4) for v in row), strict=True))) for row in ours)
    for found, wanted in zip(told, expected, strict=True):
        assert dict(found) == pytest.approx(dict(wanted), abs=2e-4)


def test_model_whose_class_names_need_a_tokenizer_is_refused_without_one(tmp_path: Path) -> None:
    """transformers would build a tokenizer of special tokens only, for which all class names are alike."""
    import dual_encoder_fixtures

    source = Path(dual_encoder_fixtures.folder("clip"))
    (tmp_path / "clip").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "clip" / name).write_bytes((source / name).read_bytes())
    task = data.load("digits", Key(0))
    with pytest.raises(
        ModelError, match=r"has no tokenizer, but class names need one.*; copy the files of the original"
    ):
        models.build("clip", task, Key(0), path=str(tmp_path / "clip"))
