"""A frozen base: how it is loaded, what it holds, and the words that freeze it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from base_fixtures import KEY, frozen_weights, load, save_llama
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from partita.core import memory, tensors
from partita.core.memory import SizeError
from partita.core.rng import seeded
from partita.models import ModelError
from partita.tasks import TEXT


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [("base",), ("embedding", "query"), ()], ids=str)
def test_frozen_weights_load_in_bfloat16_and_others_exactly(
    stored: torch.dtype, frozen: tuple[str, ...], tmp_path: Path
) -> None:
    """Loading rounds what is frozen, and not a bit of what trains."""
    whole, half = load(path := save_llama(tmp_path, stored)), load(path, frozen=frozen, dtype="bfloat16")
    assert tensors.equal(half.initial, tensors.select(whole.initial, half.initial))
    expected = {name: whole.initial[name].to(torch.bfloat16) for name in whole.initial.keys() - half.initial.keys()}
    assert tensors.equal(frozen_weights(half), expected)
    assert bool(expected) == bool(frozen)


def test_new_head_over_a_bfloat16_base_is_drawn_in_float32(tmp_path: Path) -> None:
    path = save_llama(tmp_path, torch.bfloat16)
    half = load(path, TEXT, frozen=("base",), dtype="bfloat16")
    assert half.initial.keys() == {"score.weight"}
    assert tensors.same(half.initial["score.weight"], load(path, TEXT).initial["score.weight"])


@pytest.mark.parametrize("frozen", ["query", "value"])
def test_projection_that_is_half_frozen_loads_exactly(frozen: str, tmp_path: Path) -> None:
    """GPT-2 stores query, key and value as one tensor, which must not be rounded if one of them trains."""
    with seeded(KEY):
        GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=32, n_positions=8)).save_pretrained(
            tmp_path
        )
    whole, half = load(str(tmp_path)), load(str(tmp_path), frozen=(frozen,), dtype="bfloat16")
    assert tensors.equal(half.initial, tensors.select(whole.initial, half.initial))
    assert {value.dtype for value in frozen_weights(half).values()} == {torch.bfloat16}


def test_loading_leaves_the_class_of_transformers_as_it_was(tmp_path: Path) -> None:
    load(save_llama(tmp_path), frozen=("base",), dtype="bfloat16")
    assert "_get_dtype_plan" not in vars(LlamaForCausalLM)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the mapped files")
def test_bfloat16_weights_of_a_base_are_not_copied(tmp_path: Path) -> None:
    """They are views of the file, so processes share them and no float32 copy ever exists."""
    model = load(save_llama(tmp_path, torch.bfloat16), frozen=("base",), dtype="bfloat16")
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".safetensors")]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if str(tmp_path) in line]
    for value in frozen_weights(model).values():
        assert any(start <= value.data_ptr() < end for start, end in ranges)


def test_base_is_all_but_an_untied_head(tmp_path: Path) -> None:
    untied, tied = save_llama(tmp_path / "untied"), save_llama(tmp_path / "tied", tie_word_embeddings=True)
    assert load(untied, frozen=("base",)).initial.keys() == {"lm_head.weight"}
    assert not load(tied, frozen=("base",)).initial  # an adapter may follow
    assert not load(untied, frozen=("all",)).initial
    with pytest.raises(ModelError, match="no parameter of llama is left to train; freeze fewer tags"):
        load(tied, frozen=("embedding", "layer.0", "layer.1", "norm"))
    with pytest.raises(ModelError, match="named or tagged 'bass'; did you mean 'base'"):
        load(tied, frozen=("bass",))


def test_model_too_large_is_refused_by_what_it_would_hold(tmp_path: Path) -> None:
    path = save_llama(tmp_path)
    size = sum(value.numel() for value in load(path).initial.values())
    with patch.object(memory, "available", lambda: 3 * size):
        with pytest.raises(SizeError, match=r"in float32 would take .*; model.dtype = 'bfloat16' halves a frozen"):
            load(path, frozen=("all",))
        load(path, frozen=("all",), dtype="bfloat16")
    with (
        patch.object(memory, "available", lambda: size),
        pytest.raises(SizeError, match="with its frozen weights in bfloat16 would take"),
    ):
        load(path, frozen=("all",), dtype="bfloat16")
