"""`[model.adapter]` in configs and in runs: filled, compared, checked, resumed, and exported from a run folder."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import SMALL_TASK, SMALL_VIT, max_difference, server_in
from peft import PeftModel
from transformers import ViTForImageClassification

from partita.core import tensors
from partita.core.method_error import MethodError
from partita.core.options import OptionError
from partita.experiment.builder import build
from partita.experiment.compare import load_method
from partita.experiment.config import apply_override, differences, parse, settings_by_key
from partita.experiment.recorded_model import load_model
from partita.experiment.runner import resume, start
from partita.models import ModelError
from partita.models.peft_adapters import AdaptedModel
from partita.record import file_names
from partita.storage.atomic_files import list_checksummed


def raw(adapter: dict[str, Any] | None = None, method: str = "fedavg", **tables: Any) -> dict[str, Any]:
    table = tomllib.loads(SMALL_VIT + SMALL_TASK)
    table["model"] |= {"adapter": {"rank": 4, **(adapter or {})}}
    return {**table, "method": {"name": method}, "rounds": 3, **tables}


def test_table_is_checked_filled_and_recorded() -> None:
    config = parse(raw({"ranks": {"c1": 2}}))
    assert config.model["adapter"] == {
        "kind": "lora",
        "rank": 4,
        "alpha": 16.0,
        "roles": ["query", "value"],
        "dropout": 0.0,
        "dora": False,
        "rslora": False,
        "head": True,
        "ranks": {"c1": 2},
    }
    again = parse(tomllib.loads(config.to_toml()))
    assert settings_by_key(again) == settings_by_key(config)
    assert settings_by_key(config)["model.adapter.rank"] == "4"
    given = raw()
    apply_override(given, "model.adapter.rank=2")
    apply_override(given, "model.adapter.kind=hra")
    assert parse(given).model["adapter"]["kind"] == "hra"
    assert "model.adapter.rank is 4 there and 2 here" in differences(parse(raw()), parse(given))
    assert not differences(parse(raw({"alpha": 16})), parse(raw())), "16 and 16.0 mean the same"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            raw({"rnak": 2}),
            r"unknown key 'model\.adapter\.rnak'; did you mean 'rank'\?.*partita options model\.adapter",
        ),
        (raw({"kind": "lara"}), r"model\.adapter\.kind is 'lara'; it must be 'lora' or "),
        (raw({"alpha": 0}), r"model\.adapter\.alpha is 0; it must be a number above 0"),
        ({**raw(), "model": {"name": "vit", "adapter": "lora"}}, r"it must be a table, \[model\.adapter\]"),
        ({**raw(), "model": {"name": "vit", "adaptor": {}}}, r"unknown key 'model\.adaptor'; did you mean 'adapter'"),
    ],
)
def test_wrong_tables_are_refused_when_the_config_is_read(table: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse(table)


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (raw(method="lora"), ModelError, r"vit already has an adapter; leave \[model\.adapter\] out, or use"),
        (raw(method="flora"), ModelError, r"vit already has an adapter; leave \[model\.adapter\] out, or use"),
        (raw({"rank": 9}), ModelError, r"rank is 9, but 'vit.layers.0.attention.q_proj' is 8 x 8"),
        ({**raw(), "model": {"name": "clip", "shape": "tiny", "adapter": {}}}, ValueError, "cannot get an adapter"),
        (raw({"ranks": {"c9": 2}}), OptionError, r"model\.adapter\.ranks names client 'c9', which does not exist"),
        (raw({"ranks": [2, 4]}, method="fedper"), MethodError, r"set method\.finetune = 0, or leave model\.adapter"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_before_it_starts(table: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        build(parse(table))


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter",
    [{}, {"dropout": 0.3}, {"ranks": [1, 4]}, {"kind": "lokr"}, {"dora": True}],
    ids=["lora", "dropout", "ranks", "lokr", "dora"],
)
def test_interrupted_run_continues_exactly_and_stores_only_the_adapter(adapter: dict[str, Any], tmp_path: Path) -> None:
    config = parse(raw(adapter, training={"optimizer": "adamw", "keep_optimizer": True}))
    for _ in start(config, tmp_path / "whole"):
        pass
    begun = start(config, tmp_path / "cut")
    next(begun)
    begun.close()  # type: ignore[attr-defined]
    for _ in resume(config, tmp_path / "cut"):
        pass
    one, two = (server_in(tmp_path / name) for name in ("whole", "cut"))
    assert tensors.equal(one.params, two.params)
    model = build(config).model
    assert one.params.keys() == model.initial.keys()
    assert all(model.tags[name] & {"lora", "lokr", "head"} for name in one.params)
    stored = safetensors.torch.load(list_checksummed(tmp_path / "cut" / file_names.CHECKPOINTS)[-1].read_bytes())
    frozen = {name.replace(".base_layer", "") for name, _ in model.module.named_parameters()}  # type: ignore[attr-defined]
    assert frozen == model.frozen_tags.keys()
    assert not any(name in key for key in stored for name in frozen)


@pytest.mark.slow
def test_blocks_of_clients_with_dropout_and_ranks_give_the_same_result(tmp_path: Path) -> None:
    found = []
    for block in (1, 3):
        table = raw({"dropout": 0.3, "ranks": [1, 4]}, engine={"clients_per_block": block})
        for _ in start(parse(table), tmp_path / str(block)):
            pass
        found.append(server_in(tmp_path / str(block)).params)
    assert max_difference(*found) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("client", [None, "c0"])
def test_model_of_a_run_folder_is_saved_for_peft(client: str | None, tmp_path: Path) -> None:
    given = raw({"ranks": [1, 4]})
    config = parse({**given, "training": {**given["training"], "weight_decay": 0.01}})
    for _ in start(config, tmp_path / "run"):
        pass
    model, params = load_model(tmp_path / "run", client)
    assert isinstance(model, AdaptedModel)
    inputs = build(config).federation.task.test.take(torch.arange(8)).inputs
    logits = model(params, inputs).logits
    model.save_pretrained(params, tmp_path / "adapter")
    plain = build(parse({**raw(), "model": tomllib.loads(SMALL_VIT)["model"]})).model
    plain.save_pretrained(plain.initial, tmp_path / "base")  # type: ignore[attr-defined]
    base = ViTForImageClassification.from_pretrained(tmp_path / "base").eval()
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.allclose(loaded(**inputs).logits, logits, rtol=0, atol=1e-5)
    beyond = [name for name in model.initial if ".rank4." in name]
    kept = [torch.equal(params[name], model.initial[name]) for name in beyond]
    assert all(kept) if client else not any(kept), "c0 has rank 1"


@pytest.mark.slow
def test_compared_methods_show_the_options_of_their_adapter(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(parse(raw()).to_toml().replace('label = "fedavg"\n', ""))
    labels = {
        "fedavg(model.adapter.rank=2)": "fedavg(model.adapter.rank=2)",
        "fedavg(model.adapter.rank=4)": "fedavg",
        "fedavg(model.adapter={rank=2, dora=true})": "fedavg(model.adapter.rank=2, model.adapter.dora=true)",
        "fedprox(mu=0.5, training.lr=0.3)": "fedprox(mu=0.5, training.lr=0.3)",
    }
    assert {spec: load_method(tmp_path / "c.toml", [], spec).label for spec in labels} == labels
