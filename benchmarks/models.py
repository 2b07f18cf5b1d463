"""All parameters of real models in training: partita against a careful bare loop, and against the card's rate.

Works: a BERT of 6 layers x 384, ViT-B/16 at 224 px, and a LLaMA of 135M parameters, as transformers builds them. Their
weights and inputs are random. A round is `--clients` clients, each with `--steps` AdamW steps. The bare loop trains one
client after another with autocast and fused AdamW, also compiled.

Each side runs in a process of its own, with the compiler's cache on disk empty at the start of the work: the first
round of a compiled side is a cold start. "again" repeats that side in a new process with the cache that the first left.
Times are medians of whole rounds. A side that fails is reported, and the others go on.

    python benchmarks/models.py --out models-gpu.json      # on a GPU: about six minutes
    python benchmarks/models.py --small                    # on a CPU, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from environment import clock, environment
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from partita import Key, Run, SimulationEngine, Training, data, methods
from partita.core.optim import AdamW
from partita.core.rounds import initial_server, rounds
from partita.data import Federation, Table, Task
from partita.engines.autotune import choose_graphs, configure_backends
from partita.models.hugging_face import from_module
from partita.tasks import IMAGE, LM, TEXT

GIB = 2**30
DENSE_RATE = 989e12  # bfloat16 operations a second of an H200, without sparsity
LR = 1e-4
CLASSES = 10
KINDS = {"bert": TEXT, "vit": IMAGE, "llama": LM}
# layers, width, heads, words or pixels of a side, clients, steps, batch, tokens
SIZES = {
    "bert": (6, 384, 12, 30522, 10, 10, 32, 128),
    "vit": (12, 768, 12, 224, 10, 5, 32, 197),
    "llama": (30, 576, 9, 49152, 4, 5, 8, 512),
}
SMALL = {
    "bert": (2, 64, 2, 500, 2, 2, 4, 16),
    "vit": (2, 64, 2, 32, 2, 2, 4, 5),
    "llama": (2, 96, 3, 500, 2, 2, 2, 32),
}
NAMES = ("layers", "width", "heads", "words", "clients", "steps", "batch", "tokens")
SIDES = ("bare", "bare, compiled", "graphs", "compiled", "compiled, again", "graphs, one by one")
Round = Callable[[], float]  # trains one round and returns the mean loss


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--works", nargs="*", choices=SIZES, default=list(SIZES))
    options.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    options.add_argument("--small", action="store_true", help="small models, for a CPU")
    for name in NAMES[4:7]:
        options.add_argument(f"--{name}", type=int, help="instead of the work's own number")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--kernels", action="store_true", help="also profile one round: milliseconds by GPU kernel")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    works = {work: dict(zip(NAMES, (SMALL if chosen.small else SIZES)[work], strict=True)) for work in chosen.works}
    for sizes in works.values():
        sizes |= {name: vars(chosen)[name] for name in NAMES[4:7] if vars(chosen)[name]}
    about = environment(device, configure_backends("auto"), f"{works}; median of {chosen.repeats} rounds")
    print(f"{about['work']}; {about['device']}, {about['threads']} threads, torch {about['torch']}", flush=True)
    results: list[dict[str, Any]] = []
    for work, sizes in works.items():
        print(f"{work:24} {'first s':>8} {'ms/round':>10} {'ratio':>7} {'share':>6} {'GiB':>6} {'loss':>8}")
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            for side in chosen.sides:
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    row = pool.submit(measure, work, side, sizes, device, chosen.repeats, chosen.kernels).result()
                results.append(row)
                report(row, next(each for each in results if each["work"] == work))
                if chosen.out:
                    chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def report(row: dict[str, Any], first: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{row['side']:24} {row['error']}", flush=True)
        return
    ratio = first.get("ms", float("nan")) / row["ms"]
    share, memory = (f"{100 * row['share']:.1f}%", f"{row['GiB']:.1f}") if "share" in row else ("", "")
    print(
        f"{row['side']:24} {row['first s']:>8.1f} {row['ms']:>10.1f} {ratio:>6.2f}x {share:>6} {memory:>6} "
        f"{row['loss']:>8.4f}",
        flush=True,
    )


def measure(
    work: str, side: str, sizes: dict[str, int], device: torch.device, repeats: int, kernels: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {"work": work, "side": side}
    configure_backends("auto")
    try:
        make = bare_loop if side.startswith("bare") else partita
        play = make(work, side, sizes, device)
        start = clock(device)
        row["loss"] = play()
        row["first s"] = clock(device) - start
        row["each ms"] = []
        for _ in range(repeats):
            start = clock(device)
            play()
            row["each ms"].append(1000 * (clock(device) - start))
        if kernels:
            row["kernels"] = kernel_times(play, device)
    except Exception as error:  # out of memory, or something that does not compile
        return {**row, "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}
    row["ms"] = statistics.median(row["each ms"])
    if device.type == "cuda":
        row["share"] = operations(work, sizes) / row["ms"] * 1000 / DENSE_RATE
        row["GiB"] = torch.cuda.max_memory_allocated() / GIB
    return row


def kernel_times(play: Round, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of each GPU kernel in a round, by name, longest first."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        play()
        clock(device)
    on_gpu = [each for each in found.key_averages() if each.device_type == DeviceType.CUDA]
    times = {each.key: each.self_device_time_total / 1000 for each in on_gpu}
    return dict(sorted(times.items(), key=lambda pair: -pair[1]))


def operations(work: str, sizes: dict[str, int]) -> float:
    """Floating-point operations of a round: forward and backward passes through all matrices."""
    width, layers, tokens = sizes["width"], sizes["layers"], sizes["tokens"]
    if work == "llama":
        mlp, keys = 3 * width * (8 * width // 3), 2 * width * width // 3
        matrices = layers * (2 * width * width + keys + mlp) + width * sizes["words"]
    else:
        matrices = layers * 12 * width * width + (3 * 16 * 16 * width if work == "vit" else 0)
    examples = sizes["clients"] * sizes["steps"] * sizes["batch"]
    half = 2 if work == "llama" else 1  # causal attention computes half of the products
    return float(examples * tokens * (6 * matrices + 12 * layers * width * tokens / half))


def new_module(work: str, sizes: dict[str, int], device: torch.device) -> Any:
    torch.manual_seed(0)
    width = sizes["width"]
    shape: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
    }
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}
    with device:
        if work == "bert":
            return BertForSequenceClassification(
                BertConfig(**shape, **off, intermediate_size=4 * width, vocab_size=sizes["words"], pad_token_id=None)
            )
        if work == "vit":
            return ViTForImageClassification(
                ViTConfig(**shape, **off, intermediate_size=4 * width, image_size=sizes["words"])
            )
        return LlamaForCausalLM(
            LlamaConfig(
                **shape,
                num_key_value_heads=sizes["heads"] // 3,
                intermediate_size=8 * width // 3,
                vocab_size=sizes["words"],
                tie_word_embeddings=True,
            )
        )


def inputs(work: str, sizes: dict[str, int]) -> Federation:
    """Random inputs without padding, so many that all batches are full: a part of them is for testing."""
    clients, draw = sizes["clients"], (Key(0) / "inputs").generator()
    count = 3 * clients * sizes["steps"] * sizes["batch"] // 2
    classes = tuple(map(str, range(CLASSES)))
    if work == "vit":
        side = sizes["words"]
        # Few distinct images: the bytes of a round would not fit into the memory of a laptop.
        images = torch.randn(64, 3, side, side, generator=draw)[torch.arange(count) % 64]
        table = Table({"pixel_values": images}, torch.randint(CLASSES, (count,), generator=draw))
    else:
        ids = torch.randint(1, sizes["words"], (count, sizes["tokens"] + 1), generator=draw)
        labels = torch.randint(CLASSES, (count,), generator=draw) if work == "bert" else ids[:, 1:].contiguous()
        table = Table({"input_ids": ids[:, :-1].contiguous()}, labels)
    task = Task(work, table, table, () if work == "llama" else classes, kind=KINDS[work])
    return data.split(task, "iid", clients=clients, key=Key(0))


def partita(work: str, side: str, sizes: dict[str, int], device: torch.device) -> Round:
    model = from_module(work, new_module(work, sizes, device), kind=KINDS[work])
    precision = "bfloat16" if device.type == "cuda" else "float32"
    training = Training(
        LR, AdamW(weight_decay=0.0), batch_size=sizes["batch"], steps=sizes["steps"], precision=precision
    )
    run = Run(methods.build("fedavg", {}), training, rounds=1, key=Key(0), drift=False)
    graphs = choose_graphs(device.type == "cuda", side.startswith("compiled"), device)
    block = 1 if "one by one" in side else sizes["clients"]
    model.to(device)
    engine = SimulationEngine(run, model, inputs(work, sizes).to(device), block, device, graphs=graphs)

    def play() -> float:
        [played] = rounds(run, model, engine, initial_server(run, model))
        return float(played.loss)

    return play


def bare_loop(work: str, side: str, sizes: dict[str, int], device: torch.device) -> Round:
    module = new_module(work, sizes, device).train()
    params = list(module.parameters())
    server = [value.detach().clone() for value in params]
    federation = inputs(work, sizes).to(device)
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def loss_of(values: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        with half:
            logits = module(**values).logits
        return functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    if "compiled" in side:
        loss_of = torch.compile(loss_of)

    def play() -> float:
        losses, sent = [], []
        for client in federation.clients:
            with torch.no_grad():
                torch._foreach_copy_(params, server)
            optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=0.0, fused=device.type == "cuda")
            rows = federation[client].train
            for step in range(sizes["steps"]):
                batch = rows.take(torch.arange(step * sizes["batch"], (step + 1) * sizes["batch"]))
                loss = loss_of(dict(batch.inputs), batch.targets)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            sent.append([value.detach().clone() for value in params])
        for column in zip(*sent, strict=True):
            torch.stack(column).mean(0)
        return float(torch.stack(losses).mean())

    return play


if __name__ == "__main__":
    main()
