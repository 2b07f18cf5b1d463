"""How long compiling takes by depth: the whole model, or each layer on its own.

A model of LLaMA's shape with LoRA, clients side by side. Prints, for each depth, the seconds of the first step and the
milliseconds of a later one. Each measurement is a process of its own with an empty cache on disk, so the first step
includes what the compiler does once per machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from environment import clock, environment
from language_models import new_module
from torch import Tensor

from partita import Key
from partita.core.tensors import Tensors
from partita.engines.autotune import configure_backends
from partita.models.adapter import from_module
from partita.tasks import LM
from partita.training.client_axis import ClientAxis, ClientVmap
from partita.training.compilation import CompiledLayers, CompiledVmap

WAYS = {"eager": None, "layers": CompiledLayers, "whole": CompiledVmap}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--depths", type=int, nargs="*", default=[6, 12, 24, 30])
    options.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    options.add_argument("--whole-up-to", type=int, default=12, help="deeper models are not compiled whole")
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--words", type=int, default=512)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--batch", type=int, default=2)
    options.add_argument("--clients", type=int, default=4)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device, onednn = torch.device(chosen.device), configure_backends("auto")
    work = (
        f"LLaMA of width {chosen.width}, LoRA on query and value; {chosen.clients} clients x batch {chosen.batch} x "
        f"{chosen.tokens} tokens; gradients of one step"
    )
    about = environment(device, onednn, work)
    print(f"{about['work']}; {about['device']}, {about['threads']} threads, torch {about['torch']}")
    print(f"{'layers':>6} {'way':8} {'first s':>8} {'later ms':>9}", flush=True)
    results: list[dict[str, Any]] = []
    for depth in chosen.depths:
        for way in chosen.ways:
            if way == "whole" and depth > chosen.whole_up_to:
                continue
            with tempfile.TemporaryDirectory() as folder:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    row = {"layers": depth, "way": way, **pool.submit(measure, chosen, device, depth, way).result()}
            results.append(row)
            print(f"{depth:>6} {way:8} {row['first']:>8.1f} {1000 * row['later']:>9.1f}", flush=True)
            if chosen.out:
                chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def measure(chosen: Any, device: torch.device, depth: int, way: str) -> dict[str, float]:
    configure_backends("auto")
    shape = {
        "hidden_size": chosen.width,
        "num_hidden_layers": depth,
        "num_attention_heads": max(1, chosen.width // 64),
        "num_key_value_heads": max(1, chosen.width // 64),
        "intermediate_size": 2 * chosen.width,
        "vocab_size": chosen.words,
        "tie_word_embeddings": True,
    }
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    module = new_module(shape, dtype, device)
    frozen = ("embedding", *(f"layer.{layer}" for layer in range(depth)))
    base = from_module("llama", module, frozen, kind=LM, dtype=None if dtype == torch.float32 else dtype)
    model = base.low_rank(8, 16.0, ("query", "value"), Key(0))
    axis = ClientAxis(chosen.clients)
    made = WAYS[way]
    lift = ClientVmap(axis, "llama") if made is None else made(axis, "llama", combine=False)
    leaves = {
        name: value.to(device).expand(chosen.clients, *value.shape).clone().requires_grad_()
        for name, value in model.initial.items()
    }
    ids = torch.randint(chosen.words, (chosen.clients, chosen.batch, chosen.tokens), device=device)

    def loss(params: Tensors, ids: Tensor, mask: None) -> Tensor:
        return model.losses(model(params, {"input_ids": ids}), ids).mean()

    def step() -> float:
        start = clock(device)
        losses = lift(loss, [0, 0, None])(leaves, ids, None)
        torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        return clock(device) - start

    first = step()
    return {"first": first, "later": statistics.median(step() for _ in range(chosen.repeats))}


if __name__ == "__main__":
    main()
