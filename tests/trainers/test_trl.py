"""TRL's trainers: the base never travels, and their own losses and collators stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from base_fixtures import LLAMA
from torch import Tensor
from trainer_fixtures import arguments
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import partita
from partita.core.rng import Key, seeded

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl", reason="pip install trl")
datasets = pytest.importorskip("datasets")
WORDS = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(29))]


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def base() -> LlamaForCausalLM:
    with seeded(Key(7)):
        return LlamaForCausalLM(LlamaConfig(**LLAMA, pad_token_id=0, eos_token_id=1, bos_token_id=1))


def lora() -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def sentences(seed: int, count: int = 6) -> list[str]:
    draw = Key(seed).generator()
    rows = torch.randint(0, 29, (count, 5), generator=draw).tolist()
    return [" ".join(f"w{word}" for word in row) for row in rows]


def sft(folder: Path, seed: int = 0) -> Any:
    args = trl.SFTConfig(**arguments(folder), max_length=12, bf16=False)
    rows = datasets.Dataset.from_dict({"text": sentences(seed)})
    return trl.SFTTrainer(base(), args, train_dataset=rows, processing_class=tokenizer(), peft_config=lora())


def adapter_of(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in trainer.model.named_parameters() if "lora_" in name}


def payload(row: Any, way: str) -> int:
    return sum(count for name, count in row[way].items() if name)


def kept(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "factors"), [("fedavg", ("lora_A", "lora_B")), ("fedsa-lora", ("lora_A",))])
def test_only_the_adapter_travels(method: str, factors: tuple[str, ...], tmp_path: Path) -> None:
    trainers = {"a": sft(tmp_path, 0), "b": sft(tmp_path, 1)}
    whole = kept(dict(trainers["a"].model.named_parameters()))
    run = partita.federate(trainers, method, rounds=2, folder=tmp_path / "run")
    adapter = adapter_of(trainers["a"])
    sent = [value for name, value in adapter.items() if any(factor in name for factor in factors)]
    size = sum(value.numel() * value.element_size() for value in sent)
    assert payload(run.rows[0], "up") == 2 * size
    assert payload(run.rows[1], "down") == 2 * size
    assert {name.rpartition(".lora_")[2][:1] for name in run.rows[0]["up"] if name} == {
        factor[-1] for factor in factors
    }
    after = dict(trainers["a"].model.named_parameters())
    assert {name for name in whole if not torch.equal(whole[name], after[name])} <= adapter.keys()
    other = adapter_of(trainers["b"])
    shared = {name for name in adapter if torch.equal(adapter[name], other[name])}
    assert shared == {name for name in adapter if any(factor in name for factor in factors)}


@pytest.mark.slow
def test_one_client_is_sft_without_a_federation(tmp_path: Path) -> None:
    alone = sft(tmp_path)
    alone.train()
    trainer = sft(tmp_path)
    client = partita.patch(trainer, method="fedsa-lora")
    while client.round():
        trainer.train()
    left, right = adapter_of(trainer), adapter_of(alone)
    assert max(float((left[name] - right[name]).abs().max()) for name in left) < 1e-6


@pytest.mark.slow
def test_preferences(tmp_path: Path) -> None:
    def dpo() -> Any:
        rows = {"prompt": sentences(0), "chosen": sentences(1), "rejected": sentences(2)}
        args = trl.DPOConfig(**arguments(tmp_path, learning_rate=0.5), max_length=20, bf16=False)
        data = datasets.Dataset.from_dict(rows)
        return trl.DPOTrainer(base(), args=args, train_dataset=data, processing_class=tokenizer(), peft_config=lora())

    alone = dpo()
    start = kept(adapter_of(alone))
    alone.train()
    trainer = dpo()
    with partita.patch(trainer, method="fedavg") as client:
        while client.round():
            trainer.train()
    left, right = adapter_of(trainer), adapter_of(alone)
    assert max(float((left[name] - right[name]).abs().max()) for name in left) < 1e-6
    assert any(not torch.equal(start[name], left[name]) for name in start)
