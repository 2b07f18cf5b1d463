"""The frozen base of a run: in no file and no message, and the same from the first round to the last."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from flower_fixtures import FakeGrid
from flower_fixtures import task_identity as task_identity
from flwr.app import Context, Message, RecordDict
from helpers import SMALL_TASK
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import ViTConfig, ViTForImageClassification

import partita
from partita.core import tensors
from partita.core.rng import Key, seeded
from partita.core.settings import RunError
from partita.experiment import flower_app, runner
from partita.experiment.audit import audit
from partita.experiment.builder import build
from partita.experiment.config import Config, load
from partita.record import file_names

WEIGHTS = "model.safetensors"
EXPERIMENT = """
rounds = 2
[federation]
min_updates = 0
skip_failed_clients = true
[method]
name = "lora"
rank = 2
[model]
name = "pretrained"
path = {path}
frozen = ["base"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a pretrained model, beside a config that trains an adapter of it."""
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=4, patch_size=2
    )
    config.num_channels, config.num_labels = 1, 4
    with seeded(Key(1)):
        ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    text = EXPERIMENT.format(path=json.dumps(str(tmp_path / "vit"))) + SMALL_TASK
    (tmp_path / "experiment.toml").write_text(text + "test_examples = 20\nclasses = 4")
    return tmp_path / "vit"


def config_beside(folder: Path, *changes: str) -> Config:
    return load(folder.parent / "experiment.toml", changes)


def change_weights(folder: Path) -> None:
    values = load_file(folder / WEIGHTS)
    name = next(name for name in values if "layer" in name and name.endswith("weight"))
    values[name][0] += 1
    (folder / WEIGHTS).unlink()  # a run may still read the old file
    save_file(values, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:bfloat16 is about")
def test_digest_is_a_sha256_of_the_frozen_weights(folder: Path) -> None:
    experiment = build(config_beside(folder))
    weights = experiment.model.frozen_weights()
    assert not weights.keys() & experiment.model.initial.keys()
    assert {name.rpartition(".")[2] for name in weights} == {"weight", "bias", "cls_token", "position_embeddings"}
    digests = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in weights.items()}
    lines = [f"{name}|{weights[name].dtype}|{tuple(weights[name].shape)}|{digests[name]}\n" for name in sorted(weights)]
    assert experiment.base_digest == hashlib.sha256("".join(lines).encode()).hexdigest()
    plain = build(config_beside(folder, "method={name='fedavg'}"))
    assert plain.base_digest == experiment.base_digest, "an adapter leaves the base as it is"
    assert build(config_beside(folder, "model.dtype=bfloat16")).base_digest != experiment.base_digest
    assert build(config_beside(folder, "model.frozen=[]", "method={name='fedavg'}")).base_digest == ""


@pytest.mark.slow
def test_resumed_run_refuses_a_changed_base(folder: Path, tmp_path: Path) -> None:
    place, config = tmp_path / "run", config_beside(folder)
    rows = runner.start(config, place)
    next(rows)
    rows.close()
    recorded = json.loads((place / file_names.ENVIRONMENT).read_text())["base_digest"]
    assert recorded == build(config).base_digest
    change_weights(folder)
    with pytest.raises(RunError, match=rf"the frozen weights in '{folder}' have changed since the run in {place} beg"):
        next(runner.resume(config, place))


@pytest.mark.slow
def test_finished_run_refuses_a_changed_base(folder: Path, tmp_path: Path) -> None:
    run = partita.run(config_beside(folder), tmp_path / "run")
    run.functional()
    change_weights(folder)
    with pytest.raises(RunError, match=r"the frozen weights in .* have changed"):
        run.functional()
    with pytest.raises(RunError, match=r"the frozen weights in .* have changed"):
        audit(run.folder)


@pytest.mark.slow
def test_run_without_a_recorded_digest_can_be_read(folder: Path, tmp_path: Path) -> None:
    run = partita.run(config_beside(folder, "model.frozen=[]", "method={name='fedavg'}"), tmp_path / "run")
    assert "base_digest" not in json.loads((run.folder / file_names.ENVIRONMENT).read_text())
    run.functional()


def test_base_is_in_no_checkpoint_state_message_or_adapter(folder: Path, tmp_path: Path) -> None:
    changes = ("method.rank=1", "training.keep_optimizer=true", "training.optimizer=adamw")
    run = partita.run(config_beside(folder, *changes), tmp_path / "run")
    model, params = run.functional()
    model.save_pretrained(params, tmp_path / "adapter")  # type: ignore[attr-defined]
    held = set()
    for path in [*run.folder.rglob("*.safetensors"), *(tmp_path / "adapter").rglob("*.safetensors")]:
        with safe_open(path, "pt") as file:
            held |= {name.rpartition("/")[2].removeprefix("base_model.model.") for name in file.keys()}  # noqa: SIM118
    assert {name for name in held if "." in name} == params.keys(), "the adapter and the head"
    sent = run.rows[0]["bytes"]["up"] / 3
    own = sum(4 * value.numel() for value in params.values())
    assert own < sent < own + 1000, "their values and a header"


def serve(folder: Path, place: Path, change: bool) -> dict[str, Any]:
    config = folder.parent / "experiment.toml"
    settings: dict[str, Any] = {"folder": str(place), "deadline": 60.0, "clients": 1}
    own = {"client": "c0", "folder": str(folder.parent / "sites")}
    seen = []

    def site(message: Message) -> Message:
        if change and not seen:
            seen.append(change_weights(folder))
        return flower_app.client(config)(message, Context(1, 1, own, RecordDict(), settings))  # type: ignore[arg-type]

    rows = flower_app.serve(FakeGrid({1: site}), load(config), settings, place.name)
    return deque(rows, maxlen=1)[0]


@pytest.mark.slow
def test_site_with_another_base_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    assert serve(folder, tmp_path / "same", change=False)["lost"] == {}
    [(client, reason)] = serve(folder, tmp_path / "other", change=True)["lost"].items()
    assert client == "c0"
    assert reason.startswith("the frozen weights of vit have the digest '")
    assert "copy the files of model.path from the server to the site" in reason


@pytest.mark.slow
def test_site_hashes_its_base_once_in_a_session(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def count(values: tensors.Tensors) -> str:
        hashed.append(values)
        return "digest"

    monkeypatch.setattr(tensors, "sha256", count)
    assert serve(folder, tmp_path / "run", change=False)["round"] == 1
    assert len(hashed) == 2, "once by the server and once by the site, in two rounds"


def test_frozen_model_without_an_adapter_is_refused(folder: Path) -> None:
    with pytest.raises(RunError, match=r"model.frozen leaves no parameter to train; freeze fewer tags, or train an ad"):
        build(config_beside(folder, "method={name='fedavg'}", "model.frozen=['all']"))
