"""Rounds of one client, which one process trains, or several together with copies or with shards of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from base_fixtures import LLAMA
from torch import Tensor
from trainer_fixtures import Texts, WordRows, bert, make_trainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import partita
from partita.core.client_rule import ClientRule, Context
from partita.core.rng import Key, seeded
from partita.core.tensors import Tensors

Way = Literal["one", "ddp", "fsdp"]


class Pull(ClientRule):
    """Changes gradients and parameters, by their elements and by their norms."""

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        return {name: grad / (1 + grad.norm()) + 0.1 * ctx.anchor[name] for name, grad in grads.items()}

    def after_step(self, params: Tensors, ctx: Context) -> Tensors:
        return {name: value - 0.1 * value.mean() for name, value in params.items()}


ADAMW = {"optim": "adamw_torch", "adam_epsilon": 1e-3}  # biases of keys have no gradient
KEPT = {"tables": {"training": {"keep_optimizer": True}}, "arguments": ADAMW}
CASES: dict[str, dict[str, Any]] = {
    # The server's momentum gives the client other values than those that it has trained.
    "fedavgm": {"method": "fedavgm"},
    "fedprox": {"method": {"name": "fedprox", "mu": 2.0}},
    "feddyn": {"method": {"name": "feddyn", "alpha": 1.0}},
    "scaffold": {"method": "scaffold"},
    "fedfrozen": {"method": {"name": "fedfrozen", "warmup": 1}, "fsdp": {"activation_checkpointing": True}},
    # What never travels stays as it was loaded, in every round.
    "loaded once": {"method": "ffa-lora", "model": "lora", "fsdp": {"cpu_ram_efficient_loading": True}},
    "a rule": {"method": partita.Method("pull", client_rules=(Pull(),))},
    "a kept optimizer": {"method": "fedavg", **KEPT},
    "llama": {"method": "fedavgm", "model": "llama"},
    "fedsa-lora": {"method": "fedsa-lora", "model": "lora"},
}


def play(case: dict[str, Any], folder: Path, way: Way = "one") -> dict[str, Tensor]:
    """Train three rounds, and return all parameters, whole."""
    more: dict[str, Any] = {"per_device_train_batch_size": 4, **case.get("arguments", {})}
    if way != "one":  # BERT ignores the number of items, by which transformers would multiply the loss
        more |= {"ddp_backend": "gloo", "average_tokens_across_devices": False, "per_device_train_batch_size": 2}
    if way == "fsdp":
        # By default, accelerate 1.15 shards BERT's embeddings twice, which fails.
        layers = {} if case.get("model") else {"transformer_layer_cls_to_wrap": ["BertLayer"]}
        more |= {"fsdp": True, "fsdp_config": {"version": 2, **layers, **case.get("fsdp", {})}}
    model, data = module(case.get("model", "bert")), WordRows if case.get("model") else Texts
    trainer = make_trainer(folder, data(0, 16), model, **more)
    trainer.eval_dataset = data(99, 8)
    if way == "fsdp":
        shard(trainer)
        if case.get("fsdp", {}).get("cpu_ram_efficient_loading") and not trainer.is_world_process_zero():
            for value in model.parameters():  # as transformers leaves it in all processes but the first
                torch.nn.init.zeros_(value)
    row = {"input_ids": data(5, 1)[0]["input_ids"][None], "labels": data(5, 1)[0]["labels"][None]}
    assert trainer.model is not None
    client = partita.patch(
        trainer,
        case["method"],
        rounds=3,
        folder=folder / "run",
        test=lambda model: {"loss": float(model(**row).loss)},
        **case.get("tables", {}),
    )
    while client.round():
        if trainer.state.global_step:  # FSDP leaves some parameters whole after it
            trainer.evaluate()
            if case.get("calls"):
                trainer.model(**row)
        trainer.train()
    named = {name.replace("_checkpoint_wrapped_module.", ""): part for name, part in trainer.model.named_parameters()}
    return {name: getattr(part, "full_tensor", part.clone)().detach() for name, part in named.items()}


def module(kind: str) -> Any:
    """Return a small model."""
    if kind == "bert":
        return bert()
    with seeded(Key(7)):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA, pad_token_id=0, eos_token_id=1, bos_token_id=1))
    if kind == "llama":
        return model
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with seeded(Key(8)):
        return peft.get_peft_model(model, config)


def shard(trainer: Trainer) -> None:
    """Let a Trainer shard its model on the CPU, as it does on GPUs. Accelerate ignores FSDP on a CPU."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state: Any = trainer.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    state.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True
