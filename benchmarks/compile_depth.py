"""How long compiling takes by depth: the whole model, or each layer on its own.

Clients side by side: LLaMA with LoRA, or the encoders with all parameters. Prints, for each depth, the seconds of the
first step and the milliseconds of a later one. Each measurement is a process of its own. The first one has an empty
cache on disk, so its first step includes what the compiler does once per machine; "again" is the first step of a second
process with the cache of the first.
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
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from partita import Key
from partita.core.tensors import Tensors
from partita.engines.autotune import configure_backends
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module
from partita.tasks import LM
from partita.training.client_axis import ClientAxis, ClientVmap
from partita.training.compilation import CompiledLayers, CompiledVmap

WAYS = {"eager": None, "layers": CompiledLayers, "whole": CompiledVmap}
CLASSES, PATCH = 10, 4
ENCODERS: dict[str, tuple[Any, Any]] = {
    "bert": (BertConfig, BertForSequenceClassification),
    "vit": (ViTConfig, ViTForImageClassification),
    "dinov2": (Dinov2Config, Dinov2ForImageClassification),
    "clip": (CLIPConfig, CLIPForImageClassification),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--architecture", choices=["llama", *ENCODERS], default="llama")
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
    trained = "LoRA on query and value" if chosen.architecture == "llama" else "all parameters"
    work = (
        f"{chosen.architecture} of width {chosen.width}, {trained}; {chosen.clients} clients x batch {chosen.batch} x "
        f"{chosen.tokens} tokens; gradients of one step"
    )
    about = environment(device, onednn, work)
    print(f"{about['work']}; {about['device']}, {about['threads']} threads, torch {about['torch']}")
    print(f"{'layers':>6} {'way':8} {'first s':>8} {'again s':>8} {'later ms':>9}", flush=True)
    results: list[dict[str, Any]] = []
    for depth in chosen.depths:
        for way in chosen.ways:
            if way == "whole" and depth > chosen.whole_up_to:
                continue
            cold, warm = measurements(chosen, device, depth, way)
            row = {"layers": depth, "way": way, **cold, "again": warm["first"]}
            results.append(row)
            times = f"{row['first']:>8.1f} {row['again']:>8.1f} {1000 * row['later']:>9.1f}"
            print(f"{depth:>6} {way:8} {times}", flush=True)
            if chosen.out:
                chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def measurements(chosen: Any, device: torch.device, depth: int, way: str) -> list[dict[str, float]]:
    """Measure in a process with an empty cache, and in another one with its cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        results = []
        for _ in range(2):
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                results.append(pool.submit(measure, chosen, device, depth, way).result())
        return results


def new_model(chosen: Any, device: torch.device, depth: int) -> FunctionalModel:
    shape = {
        "hidden_size": chosen.width,
        "num_hidden_layers": depth,
        "num_attention_heads": max(1, chosen.width // 64),
        "intermediate_size": 2 * chosen.width,
    }
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cast = None if dtype == torch.float32 else dtype
    if chosen.architecture == "llama":
        shape |= {"num_key_value_heads": shape["num_attention_heads"], "vocab_size": chosen.words}
        module = new_module({**shape, "tie_word_embeddings": True}, dtype, device)
        frozen = ("embedding", *(f"layer.{layer}" for layer in range(depth)))
        return from_module("llama", module, frozen, kind=LM, dtype=cast).low_rank(8, 16.0, ("query", "value"), Key(0))
    images = {"image_size": _side(chosen), "patch_size": PATCH, "num_channels": 1}
    config, classifier = ENCODERS[chosen.architecture]
    if chosen.architecture == "bert":
        told = config(**shape, vocab_size=chosen.words, num_labels=CLASSES)
    elif chosen.architecture == "clip":
        texts = {**shape, "num_hidden_layers": 1, "vocab_size": chosen.words}
        told = config(text_config=texts, vision_config={**shape, **images}, num_labels=CLASSES)
    else:
        told = config(**shape, **images, mlp_ratio=2, num_labels=CLASSES)
    with torch.device(device):
        return from_module(chosen.architecture, classifier(told), dtype=cast)


def _side(chosen: Any) -> int:
    return PATCH * round(chosen.tokens**0.5)


def new_batch(chosen: Any, device: torch.device) -> tuple[Tensors, Tensor]:
    """Inputs and targets, (client, example, ...)."""
    many = chosen.clients, chosen.batch
    ids = torch.randint(chosen.words, (*many, chosen.tokens), device=device)
    if chosen.architecture == "llama":
        return {"input_ids": ids}, ids
    images = torch.rand(*many, 1, _side(chosen), _side(chosen), device=device)
    inputs = {"input_ids": ids} if chosen.architecture == "bert" else {"pixel_values": images}
    return inputs, torch.randint(CLASSES, many, device=device)


def measure(chosen: Any, device: torch.device, depth: int, way: str) -> dict[str, float]:
    configure_backends("auto")
    model = new_model(chosen, device, depth)
    axis = ClientAxis(chosen.clients)
    made = WAYS[way]
    lift = ClientVmap(axis, model.name) if made is None else made(axis, model.name, combine=False)
    leaves = {
        name: value.to(device).expand(chosen.clients, *value.shape).clone().requires_grad_()
        for name, value in model.initial.items()
    }
    inputs, targets = new_batch(chosen, device)

    def loss(params: Tensors, inputs: Tensors, targets: Tensor, mask: None) -> Tensor:
        return model.losses(model(params, inputs), targets).mean()

    def step() -> float:
        start = clock(device)
        losses = lift(loss, [0, 0, 0, None])(leaves, inputs, targets, None)
        torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        return clock(device) - start

    first = step()
    return {"first": first, "later": statistics.median(step() for _ in range(chosen.repeats))}


if __name__ == "__main__":
    main()
