"""`partita model`: tables from the config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from base_fixtures import frozen_weights, load, save_llama
from transformers import BertConfig, FalconConfig, GPT2Config, MPNetConfig, SwinConfig, T5Config, ViTConfig
from typer.testing import CliRunner

from partita.cli.main import app
from partita.core.rng import Key
from partita.experiment.model_table import model_table
from partita.models import ModelError
from partita.models.quantization import Mode

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 50}

IMAGES = {name: size for name, size in SMALL.items() if name != "vocab_size"}


def save(config: object, folder: Path) -> str:
    config.save_pretrained(folder)  # type: ignore[attr-defined]
    assert [file.name for file in folder.iterdir()] == ["config.json"], "there are no weights to load"
    return str(folder)


def test_roles_layers_and_costs_are_those_of_the_model(tmp_path: Path) -> None:
    table = model_table(save(BertConfig(**SMALL), tmp_path))
    assert (table.model_type, table.kind, table.layers, table.blocks) == ("bert", "text", 2, True)
    rows = {row.role: row for row in table.roles}
    assert (rows["query"].layers, rows["query"].tensors, rows["query"].parameters) == (2, 4, 2 * (16 * 16 + 16))
    assert rows["head"].layers == 0
    every = sum(row.parameters for row in table.roles)
    kernel = rows["query"].parameters + rows["key"].parameters
    costs = {row.method: row for row in table.methods}
    assert (costs["fedavg"].trains, costs["fedavg"].up, costs["fedavg"].down) == (every, 4 * every, 4 * every)
    assert costs["fedavg"].memory == 16 * every
    assert costs["fedfrozen"].up == 4 * (every - kernel)
    assert costs["fedfrozen"].memory == 16 * (every - kernel) + 4 * kernel
    assert 0 < costs["safl"].up < costs["fedavg"].up
    assert costs["lora"].up < costs["fedper"].up < costs["fedavg"].up


@pytest.mark.slow
def test_type_without_blocks_says_why(tmp_path: Path) -> None:
    swin = model_table(save(SwinConfig(embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=7), tmp_path / "swin"))
    assert swin.blocks is False
    assert "client by client" in swin.why
    mpnet = model_table(save(MPNetConfig(**SMALL), tmp_path / "mpnet"))
    assert (mpnet.blocks, mpnet.why) == (None, "a run tries it when it starts")


@pytest.mark.slow
def test_method_that_does_not_fit_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    path = save(FalconConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50), tmp_path)
    result = CliRunner().invoke(app, ["model", path])
    assert result.exit_code == 0, result.output
    assert "fedfrozen: no parameter of falcon is tagged 'query'; it has: embedding, head" in result.output
    assert "query_key_value.weight', are tagged 'other'" in result.output
    assert "other" in {
        row["role"] for row in json.loads(CliRunner().invoke(app, ["model", path, "--json"]).output)["roles"]
    }


def test_task_is_that_of_the_checkpoint_unless_given(tmp_path: Path) -> None:
    path = save(BertConfig(**SMALL, architectures=["BertForTokenClassification"]), tmp_path / "bert")
    assert model_table(path).kind == "tokens"
    assert model_table(path, "text").kind == "text"
    with pytest.raises(ModelError, match=r"no kind of task 'tokns'; did you mean 'tokens'"):
        model_table(path, "tokns")
    t5 = save(T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=50), tmp_path / "t5")
    with pytest.raises(ModelError, match=r"is a 't5', for which transformers has no AutoModelForImageClassification"):
        model_table(t5, "image")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("storage", "dtype", "quantize"),
    [("float32", "float32", None), ("bfloat16", "bfloat16", None), *((m, "bfloat16", m) for m in ("8bit", "4bit"))],
)
def test_memory_of_a_frozen_base_is_that_of_a_real_one(
    storage: str, dtype: str, quantize: Mode | None, tied: bool, tmp_path: Path
) -> None:
    path = save_llama(tmp_path, tie_word_embeddings=tied)
    table = model_table(path, "lm", rank=2, clients=3, batch_size=2, tokens=5).adapter
    assert table is not None
    model = load(path, frozen=("all",), dtype=dtype, quantize=quantize)
    row = next(row for row in table.storages if row.storage == storage)
    assert row.base == sum(value.nbytes for value in frozen_weights(model).values())
    own = model.adapted("lora", Key(0), rank=2).initial.values()
    assert len(own) == 8
    assert table.trains == sum(value.numel() for value in own)
    assert table.up == table.checkpoint == sum(value.nbytes for value in own)
    units = 2 * 5 * 16 * (2 if dtype == "float32" else 1)
    activations = 34 * 2 * units
    once = row.base + 2**29  # and a chunk of logits
    assert row.training == once + 3 * (16 * table.trains + activations)
    assert row.recomputing == once + 3 * (16 * table.trains + (2 * 2 + 34) * units)
    if storage == "bfloat16":
        assert table.activations == activations


@pytest.mark.slow
def test_model_without_linear_weights_shows_what_can_be_stored(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=32, n_positions=8)
    output = CliRunner().invoke(app, ["model", save(config, tmp_path), "--task", "lm"]).output
    assert "LoRA of rank 8 on query and value over a frozen base: 256 parameters train" in output
    llama = CliRunner().invoke(app, ["model", save_llama(tmp_path / "llama"), "--rank", "99"]).output
    assert "LoRA over a frozen base: rank is 99, but" in llama


def test_frozen_base_is_shown_for_the_options_of_the_command(tmp_path: Path) -> None:
    path = save_llama(tmp_path, torch.bfloat16)
    shown = CliRunner().invoke(app, ["model", path, "--rank", "4", "--clients", "3", "--batch-size", "2"]).output
    assert "LoRA of rank 4 on query and value over a frozen base: " in shown
    assert "training 3 clients, MiB" in shown
    assert "in batches of 2 x 512 tokens" in shown
    vit = model_table(save(ViTConfig(image_size=32, patch_size=8, **IMAGES), tmp_path / "vit")).adapter
    assert vit is not None
    assert vit.tokens == 16
