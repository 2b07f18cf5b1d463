"""What cannot hold on a Trainer is refused by one sentence, before anything trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from trainer_fixtures import Texts, bert, gpt2, make_trainer

import partita
from partita.core.client_rule import ClientRule
from partita.core.data import Batch
from partita.core.model import Output

pytest.importorskip("accelerate", reason="transformers.Trainer needs it")

CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    # name: (method, tables, TrainingArguments, sentence)
    "privacy": ("fedavg", {"privacy": {"noise": 1.0}}, {}, "privacy.unit is 'example', which needs the gradient"),
    "groups": ("fedavg", {"privacy": {"unit": "group", "noise": 1.0}}, {}, "privacy.unit is 'group'"),
    "engine": ("fedavg", {"engine": {"clients_per_block": 2}}, {}, "engine is the Trainer's own here; leave it out"),
    "training": ("fedavg", {"training": {"lr": 0.1}}, {}, "training.lr does not reach into a Trainer"),
    "attackers": ("fedavg", {"federation": {"attackers": 1}}, {}, "federation.attackers does not reach into a Trainer"),
    "samples": ("fedavg", {"evaluate": {"samples": 2}}, {}, "evaluate.samples does not reach into a Trainer"),
    "step": ("fedsam", {}, {}, r"FedSAM\w* evaluates gradients at points of its own"),
    "examples": ("moon", {}, {}, r"Moon\w* reads the examples of a client or the output"),
    "select": ("safl", {}, {}, "reads the examples of a client|gives clients models of other shapes"),
    "extend": ("lora", {}, {}, "because it adds parameters to the model; add them before, with PEFT"),
    "prompts": ("promptfl", {}, {}, "promptfl cannot run on a Trainer, because it adds parameters"),
    "pool": ("centralized", {}, {}, "because it pools all data"),
    "adapt": ("fedper", {}, {}, "fine-tunes a copy for each test; set method.finetune = 0"),
    "phases": ({"name": "fedrep", "finetune": 0}, {}, {}, "fedrep: a round has 2 phases"),
    "moments": ("fedadamw", {}, {"optim": "adamw_torch"}, "starts from an optimizer state of the server"),
    "optimizer": ("scaffold", {}, {"optim": "adamw_torch"}, "derived for sgd, but .* steps with adamw"),
    "schedule": ("scaffold", {}, {"lr_scheduler_type": "linear"}, "steps with sgd with unequal learning rates"),
    "momentum": ("scaffold", {}, {"optim_args": "momentum=0.9"}, "steps with sgd with momentum"),
    "clip": ("scaffold", {}, {"max_grad_norm": 1.0}, "the Trainer of 'client' clips it; set max_grad_norm = 0"),
    "batch size": ("fedavg", {}, {"auto_find_batch_size": True}, "auto_find_batch_size trains a part of a round twice"),
    "order": ("fedavg", {}, {"data_seed": 3}, "data_seed gives every round the same order"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.fast_cases(2)
def test_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    method, tables, args, sentence = CASES[case]
    trainer = make_trainer(tmp_path, **args)
    with pytest.raises(ValueError, match=sentence) as raised:
        partita.patch(trainer, method, **tables)
    assert "\n" not in str(raised.value)


def test_fsdp1_and_parameters_on_the_cpu_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    for plugin, sentence in (
        (SimpleNamespace(fsdp_version=1, cpu_offload=None), r"use DDP, or FSDP2 with fsdp=True and fsdp_config={'ver"),
        (SimpleNamespace(fsdp_version=2, cpu_offload=CPUOffloadPolicy()), "to the CPU; leave cpu_offload out"),
    ):
        monkeypatch.setattr(trainer.accelerator.state, "fsdp_plugin", plugin, raising=False)
        with pytest.raises(ValueError, match=sentence):
            partita.patch(trainer)


@pytest.mark.slow
def test_a_fused_projection_is_not_frozen_in_part(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=gpt2())
    with pytest.raises(ValueError, match=r"round 1 treats queries, keys .*c_attn\.\w+' holds them in one parameter"):
        partita.patch(trainer, {"name": "fedfrozen", "warmup": 1}, rounds=2)


@pytest.mark.slow
def test_an_optimizer_that_was_handed_over_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    with pytest.raises(ValueError, match="has an optimizer or a scheduler already"):
        partita.patch(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (bert(num_labels=3), "'classifier.bias' is .* at 'b', but .* at 'a'"),
        (bert(num_hidden_layers=1), "is frozen at 'b', but .* at 'a'"),
        ("frozen", "the frozen weights of 'b' and 'a' differ"),
    ],
    ids=["shape", "names", "base"],
)
def test_clients_have_the_same_model(model: Any, sentence: str, tmp_path: Path) -> None:
    models = [bert(), bert() if model == "frozen" else model]
    if model == "frozen":
        for place, module in enumerate(models):
            module.bert.requires_grad_(False)
            torch.nn.init.constant_(module.bert.pooler.dense.bias, float(place))
    trainers = {name: make_trainer(tmp_path, model=module) for name, module in zip("ab", models, strict=True)}
    with pytest.raises(ValueError, match=sentence):
        partita.federate(trainers, "fedavg", rounds=1, folder=tmp_path / "run")


class ReadsOutput(ClientRule):
    def penalty(self, out: Output, params: Any, batch: Batch, ctx: Any) -> torch.Tensor:
        return out.logits.sum()


@pytest.mark.slow
def test_a_rule_that_reads_the_output_without_saying_so(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    client = partita.patch(trainer, partita.Method("mine", client_rules=(ReadsOutput(),)))
    assert client.round()
    with client, pytest.raises(ValueError, match="reads examples or the output of the model, which a Trainer keeps"):
        trainer.train()


@pytest.mark.slow
def test_a_test_returns_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="test returned good; it must return a dict of numbers"):
        partita.patch(make_trainer(tmp_path), test=lambda module: "good")  # type: ignore[arg-type,return-value]


def test_no_trainer_and_no_examples(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no Trainer"):
        partita.federate({}, "fedavg", rounds=1)
    trainer = make_trainer(tmp_path, Texts())
    trainer.train_dataset = None
    with pytest.raises(ValueError, match="it has no train_dataset"):
        partita.patch(trainer)
