"""Runs of LoRA over a quantized base: blocks of clients, resuming, and example-level privacy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import SMALL_TASK
from transformers import ViTConfig, ViTForImageClassification

import partita
from partita import models
from partita.core.rng import Key, seeded
from partita.core.settings import RunError
from partita.core.tensors import Tensors
from partita.experiment import run_folder, runner
from partita.experiment.builder import build
from partita.experiment.config import Config, load
from partita.models import ModelError
from partita.record import file_names

EXPERIMENT = """
rounds = 2
[method]
name = "fedavg"
[model]
name = "pretrained"
path = {path}
quantize = "4bit"
[model.adapter]
rank = 2
roles = ["query", "mlp"]
"""
PRIVATE = ("privacy={unit='example', clip=1.0, noise=1.0, delta=1e-3, repeatable=true}",)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(**sizes, image_size=4, patch_size=2, num_channels=1)
    with seeded(Key(1)):
        ViTForImageClassification(config).save_pretrained(folder / "vit")
    text = EXPERIMENT.format(path=json.dumps(str(folder / "vit"))) + SMALL_TASK + "test_examples = 20\nclasses = 4"
    (folder / "experiment.toml").write_text(text)
    return folder / "experiment.toml"


def config_of(experiment: Path, *changes: str) -> Config:
    return load(experiment, changes)


def trained(config: Config, folder: Path) -> Tensors:
    return partita.run(config, folder).functional()[1]


def apart(left: Tensors, right: Tensors) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["8bit", "4bit"])
@pytest.mark.parametrize("privacy", [(), PRIVATE], ids=["plain", "private"])
def test_block_equals_clients_one_by_one(mode: str, privacy: tuple[str, ...], experiment: Path, tmp_path: Path) -> None:
    changes = (f"model.quantize={mode}", "training.optimizer=adamw", "training.lr=0.01", *privacy)
    one, three = (
        trained(config_of(experiment, *changes, f"engine.clients_per_block={block}"), tmp_path / str(block))
        for block in (1, 3)
    )
    start = build(config_of(experiment, *changes)).model.initial
    assert apart(one, three) < 1e-5
    assert apart(one, start) > 1e-3, "the adapter has trained"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about itself
@pytest.mark.parametrize("mode", ["8bit", "4bit"])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_steps_captured_on_a_gpu_equal_those_of_a_cpu(
    mode: str, compiled: str, experiment: Path, tmp_path: Path
) -> None:
    changes = (f"model.quantize={mode}", "training.lr=0.01", "engine.clients_per_block=3")
    gpu = ("engine.device=cuda", "engine.cuda_graphs=true", f"engine.compile={compiled}")
    here, there = (
        trained(config_of(experiment, *changes, *more), tmp_path / str(len(more)))
        for more in (("engine.device=cpu",), gpu)
    )
    assert apart(here, {name: value.cpu() for name, value in there.items()}) < 1e-4


@pytest.mark.slow
def test_ghost_and_direct_clipping_agree(experiment: Path, tmp_path: Path) -> None:
    one, other = (
        trained(
            config_of(experiment, *PRIVATE, f"privacy.clipping={way}", "engine.clients_per_block=1"), tmp_path / way
        )
        for way in ("direct", "ghost")
    )
    assert apart(one, other) < 1e-5


@pytest.mark.slow
def test_run_resumes_bit_for_bit(experiment: Path, tmp_path: Path) -> None:
    config = config_of(experiment)
    partita.run(config, tmp_path / "whole")
    rows = runner.start(config, tmp_path / "parts")
    next(rows)
    rows.close()
    for _ in runner.resume(config, tmp_path / "parts"):
        pass
    digests = [(run_folder.finished(tmp_path / name) or {})["digest"] for name in ("whole", "parts")]
    assert digests[0] == digests[1]
    bases = [json.loads((tmp_path / name / file_names.ENVIRONMENT).read_text()) for name in ("whole", "parts")]
    assert bases[0]["base_digest"] == bases[1]["base_digest"]


@pytest.mark.slow
def test_quantized_base_is_held_once(experiment: Path) -> None:
    """The model with factors and the one without share every byte of the base."""
    config = config_of(experiment)
    options = {**config.model, "frozen": ("all",)}
    del options["adapter"], options["name"]
    base = models.build("pretrained", build(config).federation.task, Key(0), **options)
    model = base.adapted("lora", Key(1), rank=2, roles=("query", "mlp"))
    shared = {value.data_ptr() for value in base.module.parameters()}  # type: ignore[attr-defined]
    assert shared == {value.data_ptr() for value in model.module.parameters()}  # type: ignore[attr-defined]
    kinds = [value.dtype for value in model.module.parameters()]  # type: ignore[attr-defined]
    assert kinds.count(torch.uint8) == 12


@pytest.mark.slow
def test_quantized_base_needs_something_frozen_and_something_that_trains(experiment: Path) -> None:
    config = config_of(experiment)
    plain = {key: value for key, value in config.model.items() if key != "adapter"}
    with pytest.raises(ModelError, match=r"no linear weight of vit is frozen, .*; set \[model.adapter\], or remove"):
        build(replace(config, model=plain))
    with pytest.raises(
        RunError, match=r"model.frozen leaves no parameter to train; .* train an adapter: \[model.adapter\]"
    ):
        build(replace(config, model={**plain, "frozen": ("all",)}))
