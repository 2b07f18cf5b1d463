"""One round on a model of LLaMA's shape with a billion parameters: memory, bytes on the wire, and time.

FedAvg trains low-rank factors and the last norm. The weights are random and never in memory twice: what is frozen is
held once, however many clients there are.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from environment import environment
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.initialization import no_init_weights

from partita import Key, Run, SimulationEngine, Training, data, methods, rounds
from partita.core.optim import AdamW
from partita.core.serialization import HEADER
from partita.data import Federation, Table, Task
from partita.engines.autotune import configure_backends
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module
from partita.tasks import LM

WORDS, RANK = 32_000, 8
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": WORDS,
    "tie_word_embeddings": True,
}
GIB = 2**30


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, else float32")
    options.add_argument("--clients", type=int, default=2)
    options.add_argument("--steps", type=int, default=1)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--block", type=int, default=1, help="clients side by side")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    # A CPU without instructions for bfloat16 computes in it a hundred times slower.
    dtype = getattr(torch, chosen.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    onednn = configure_backends("auto")
    about = environment(
        device,
        onednn,
        f"{chosen.clients} clients x {chosen.steps} steps of batch 1 x {chosen.tokens} tokens, LoRA of rank "
        f"{RANK} on query and value, blocks of {chosen.block}",
    )
    training = Training(1e-3, AdamW(), batch_size=1, steps=chosen.steps)
    row = measure(device, dtype, training, texts(chosen.clients, chosen.tokens), chosen.block)
    print(f"{about['work']}; {about['device']}, {about['threads']} threads, torch {about['torch']}")
    for what, value in row.items():
        print(f"{what:28} {value:,}" if isinstance(value, int) else f"{what:28} {value}")
    if chosen.out:
        chosen.out.write_text(json.dumps({"environment": about, "results": [row]}, indent=1) + "\n")


def measure(
    device: torch.device, dtype: torch.dtype, training: Training, population: Federation, block: int
) -> dict[str, Any]:
    before, start = peak(), time.perf_counter()
    base = billion(device, dtype)
    held = sum(value.numel() for value in base.module.parameters()) + sum(v.numel() for v in base.initial.values())
    model = base.low_rank(RANK, 2.0 * RANK, ("query", "value"), Key(0) / "extend")
    run = Run(methods.build("fedavg"), training, rounds=1, key=Key(0))
    engine = SimulationEngine(run, model, population, block, device=device)
    built, built_peak = time.perf_counter() - start, peak()
    start = time.perf_counter()
    [played] = rounds(run, model, engine)
    loss, up, down = played.loss, played.traffic.up, played.traffic.down  # the loss is a number: a GPU has finished
    took = time.perf_counter() - start
    row: dict[str, Any] = {
        "parameters": held,
        "of them frozen, as": str(dtype).removeprefix("torch."),
        "trained parameters": sum(model.initial[name].numel() for name in up if name != HEADER),
        "bytes up": sum(up.values()),
        "bytes down": sum(down.values()),
        "loss": loss,
        "seconds to build": round(built, 2),
        "seconds of the round": round(took, 2),
        "peak GiB before": round(before / GIB, 2),
        "peak GiB once built": round(built_peak / GIB, 2),
        "peak GiB after the round": round(peak() / GIB, 2),
    }
    if device.type == "cuda":
        row["peak GiB on the GPU"] = round(torch.cuda.max_memory_allocated(device) / GIB, 2)
    return row


def billion(device: torch.device, dtype: torch.dtype) -> FunctionalModel:
    with torch.device(device), no_init_weights():
        module = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=dtype)
    module.tie_weights()
    draw = torch.Generator(device).manual_seed((Key(0) / "weights").seed() % 2**63)
    drawn: dict[torch.Size, torch.Tensor] = {}
    with torch.no_grad():
        for value in module.parameters():
            if value.ndim == 1:
                value.fill_(1.0)
                continue
            # What is alike in shape starts alike: it is time and memory that are measured.
            if value.shape not in drawn:
                value.normal_(std=0.02, generator=draw)
                drawn[value.shape] = value
            value.copy_(drawn[value.shape])
    frozen = ("embedding", *(f"layer.{layer}" for layer in range(SHAPE["num_hidden_layers"])))
    return from_module("llama", module, frozen, kind=LM, dtype=None if dtype == torch.float32 else dtype)


def texts(clients: int, tokens: int) -> Federation:
    """Four random ones for each client."""
    ids = torch.randint(WORDS, (4 * clients, tokens + 1), generator=(Key(0) / "texts").generator())
    inputs = {"input_ids": ids[:, :-1], "attention_mask": torch.ones_like(ids[:, :-1])}
    table = Table(inputs, ids[:, 1:])
    return data.split(Task("texts", table, table, (), kind=LM), "iid", clients=clients, key=Key(0))


def peak() -> int:
    """Bytes that this process has had in memory at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


if __name__ == "__main__":
    main()
