"""Base-to-new tests: prompts that are trained on some classes are tested on others, by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.core.model import TagError
from partita.core.rng import Key
from partita.data import load
from partita.data.task import Table
from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.experiment.round_log import base_to_new
from partita.experiment.runner import start
from partita.models import ModelError
from partita.models import build as build_model
from partita.models.prompts.prompts import PromptModel

PROMPTS = {
    "zero-shot": {},
    "promptfl": {"text_tokens": 2},
    "coop": {"text_tokens": 2},
    "fedclip": {},
    "fedpgp": {"text_tokens": 2, "rank": 1},
    "fedotp": {"text_tokens": 2, "iterations": 5},
    "vpfl": {"vision_tokens": 2},
    "pfeddc": {"text_tokens": 2, "vision_tokens": 2},
}
DATA = {"name": "synthetic", "examples": 60, "test_examples": 40, "classes": 5, "size": 4}


def config(method: str, new: float | None = 0.5, **more: Any) -> dict[str, Any]:
    return {
        "rounds": 1,
        "data": {**DATA, **({"new_classes": new} if new else {})},
        "split": {"name": "iid", "clients": 3},
        "model": {"name": "clip", "shape": "tiny"},
        "training": {"lr": 0.1, "batch_size": 8},
        "method": {"name": method, **PROMPTS.get(method, {})},
        **more,
    }


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", PROMPTS)
def test_a_model_for_new_classes_is_the_model_of_all_classes_seen_at_them(method: str) -> None:
    """The towers are the same, so the logits of a class depend on nothing but its own text."""
    part, whole = build(parse(config(method))), build(parse(config(method, None)))
    new = part.federation.task.new
    assert new is not None
    inputs = {"pixel_values": torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))}
    all_logits = whole.model(whole.model.initial, inputs).logits
    base = part.model(whole.model.initial, inputs).logits
    others = part.model.for_classes(new.classes)(whole.model.initial, inputs).logits
    torch.testing.assert_close(torch.cat([base, others], 1), all_logits)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", ["promptfl", "coop", "promptfl+ditto"])
def test_rows_have_the_scores_on_base_and_new_classes(method: str, tmp_path: Path) -> None:
    [row] = start(parse(config(method, evaluate={"personal_every": 0})), tmp_path / "run")
    base, new, both = (row["test"][name] for name in ("accuracy", "new_accuracy", "harmonic_mean"))
    assert 0 <= new <= 1
    recorded = json.loads((tmp_path / "run" / "plan.json").read_text())["metrics"]
    assert row["test"].keys() <= {metric["name"] for metric in recorded}
    assert both == pytest.approx(2 * base * new / (base + new) if base + new else 0)


def test_cached_features_give_the_same_scores(tmp_path: Path) -> None:
    rows = [
        next(iter(start(parse(config("promptfl", engine={"cache_frozen": cached})), tmp_path / str(cached))))
        for cached in (False, True)
    ]
    assert rows[0]["test"] == pytest.approx(rows[1]["test"], abs=1e-4)


def test_harmonic_mean_by_hand() -> None:
    assert base_to_new("accuracy", {"accuracy": 0.75}, {"accuracy": 0.5}) == {
        "new_accuracy": 0.5,
        "harmonic_mean": pytest.approx(0.6),
    }
    assert base_to_new("accuracy", {"accuracy": 0.0}, {"accuracy": 0.0})["harmonic_mean"] == 0
    assert base_to_new("accuracy", {"accuracy": 0.5}, {}) == {}


def test_models_with_a_head_for_each_class_are_refused_before_training() -> None:
    raw = config("fedavg") | {"model": {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 2}}
    with pytest.raises(
        TagError, match=r"cannot predict classes that it was not trained on; .*'clip'.*data\.new_classes"
    ):
        build(parse(raw))


def test_names_that_are_too_long_with_the_context_are_refused() -> None:
    task = load("synthetic", Key(0), **{key: value for key, value in DATA.items() if key != "name"})
    assert isinstance(task.train, Table)
    towers = build_model("clip", task, Key(0), shape="tiny")
    for kind, tokens, fits in (("none", 35, True), ("none", 40, False), ("mean", 40, True)):
        model = towers.prompted("prompts", Key(0), text_tokens=tokens, owners=("global", "local"), fusion="mean")
        assert isinstance(model, PromptModel)
        object.__setattr__(model, "fusion", kind)
        if fits:
            model.for_classes(("class0", "class1"))
        else:
            with pytest.raises(ModelError, match="use a shorter context"):
                model.for_classes(("class0", "class1"))
