"""LoRA on language models: partita, one by one and side by side, against a bare PEFT loop.

Every side trains the same factors on texts of the same shape: per client, 5 AdamW steps of a batch of 8 x 512 tokens.
Weights and texts are random. The base is in bfloat16, or in float32 with `--dtype float32`.

The bare loop loads the base once. For each client it copies the global factors into PEFT's layers, makes a fresh (on a
GPU fused) AdamW, trains, and copies the factors out; afterwards it averages them. Its factors have the dtype of the
base, which is the fastest choice: with float32 factors, PEFT computes their products in float32. partita's factors are
float32 and are cast in each step.

The rate counts 4 x weights x tokens, forward and backward without the gradient of frozen weights, and 6 x layers x
width x tokens x length for causal attention. Weights are those of all matrix products, the head's included. The
factors and whatever is recomputed count nothing. The share is that of the dense bfloat16 rate of an H100 or H200.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import clock, environment
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.initialization import no_init_weights

from partita import Key, Run, SimulationEngine, Training, data, methods
from partita.core.optim import AdamW
from partita.core.rounds import initial_server, rounds
from partita.core.settings import RunError
from partita.data import Federation, Table, Task
from partita.engines.autotune import choose_graphs, configure_backends
from partita.models.hugging_face import from_module
from partita.tasks import LM

DENSE_RATE = 989e12  # bfloat16 operations per second of an H100 or H200
GIB = 2**30
LR = 1e-3
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "135m": {  # SmolLM2-135M
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "1b": {  # Llama-3.2-1B
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}
Side = Callable[[], float]  # trains one round and returns the clients' mean loss


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", choices=SHAPES, default="135m")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, else float32")
    options.add_argument("--blocks", type=int, nargs="*", default=[1, 2, 4, 8, 16], help="clients side by side")
    options.add_argument("--modes", nargs="*", choices=["eager", "graphs", "compiled"], help="how partita runs steps")
    options.add_argument("--skip-bare", action="store_true")
    options.add_argument("--alone", type=int, default=2, help="clients of a round of the sides one by one")
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--rank", type=int, default=8)
    options.add_argument("--roles", nargs="*", default=["query", "value"])
    options.add_argument("--checkpointing", action="store_true", help="partita recomputes activations")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    if chosen.modes is None:
        chosen.modes = ["graphs", "compiled"] if device.type == "cuda" else ["eager", "compiled"]
    # A CPU without instructions for bfloat16 computes in it a hundred times slower.
    chosen.dtype = getattr(torch, chosen.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    onednn = configure_backends("auto")
    work = (
        f"LLaMA of shape {chosen.shape}, {chosen.dtype}; LoRA of rank {chosen.rank} on {' and '.join(chosen.roles)}; "
        f"a client's round is {chosen.steps} AdamW steps x batch {chosen.batch} x {chosen.tokens} tokens; median of "
        f"{chosen.repeats}"
    )
    about = environment(device, onednn, work)
    print(f"{about['work']}; {about['device']}, {about['threads']} threads, torch {about['torch']}", flush=True)
    print(
        f"{'side':28} {'first s':>8} {'ms/client':>10} {'ratio':>6} {'TFLOP/s':>8} {'share':>6} {'GiB':>6} {'loss':>7}"
    )
    results: list[dict[str, Any]] = []
    for name, clients, make in sides(chosen, device):
        row = measure(name, clients, make, chosen, device)
        results.append(row)
        report(row, results)
        if chosen.out:  # after each side: a later one may end the process
            chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def sides(chosen: Any, device: torch.device) -> list[tuple[str, int, Callable[[], Side]]]:
    """Name, clients of a round, and how to build it. The bare loop comes first and last, to see how times vary."""
    bare = lambda compiled: lambda: bare_loop(chosen, device, compiled)  # noqa: E731
    first: list[tuple[str, int, Callable[[], Side]]] = [
        ("bare PEFT loop", chosen.alone, bare(False)),
        ("bare PEFT loop, compiled", chosen.alone, bare(True)),
    ]
    ours: list[tuple[str, int, Callable[[], Side]]] = []
    for mode in chosen.modes:
        for block in chosen.blocks:
            clients = chosen.alone if block == 1 else block
            name = f"partita, {mode}, {'one by one' if block == 1 else f'{block} together'}"
            ours.append((name, clients, lambda block=block, mode=mode: partita(chosen, device, block, mode)))
    return ours if chosen.skip_bare else [*first, *ours, ("bare PEFT loop, again", chosen.alone, bare(False))]


def measure(name: str, clients: int, make: Callable[[], Side], chosen: Any, device: torch.device) -> dict[str, Any]:
    row: dict[str, Any] = {"side": name, "clients": clients}
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        side = make()
        start = clock(device)
        row["loss"] = side()
        row["seconds of the first round"] = clock(device) - start
        each = []
        for _ in range(chosen.repeats):
            start = clock(device)
            side()
            each.append(clock(device) - start)
    except (RunError, RuntimeError, ValueError) as error:  # out of memory, or something that does not compile
        return {**row, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    seconds = statistics.median(each) / clients
    rate = operations(chosen) / seconds
    row |= {"ms per client": 1000 * seconds, "each": each, "TFLOP/s": rate / 1e12}
    if device.type == "cuda":
        row |= {"share": rate / DENSE_RATE, "peak GiB": torch.cuda.max_memory_allocated(device) / GIB}
    else:
        row |= {"peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    return row


def report(row: dict[str, Any], results: list[dict[str, Any]]) -> None:
    if "error" in row:
        print(f"{row['side']:28} {row['error']}", flush=True)
        return
    ratio = results[0].get("ms per client", float("nan")) / row["ms per client"]
    share = f"{100 * row['share']:5.1f}%" if "share" in row else ""
    print(
        f"{row['side']:28} {row['seconds of the first round']:>8.1f} {row['ms per client']:>10.1f} {ratio:>5.2f}x "
        f"{row['TFLOP/s']:>8.2f} {share:>6} {row['peak GiB']:>6.1f} {row['loss']:>7.4f}",
        flush=True,
    )


def operations(chosen: Any) -> float:
    """Operations of a client's round."""
    shape = SHAPES[chosen.shape]
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]
    kv_width = width // shape["num_attention_heads"] * shape["num_key_value_heads"]
    per_layer = 2 * width * width + 2 * width * kv_width + 3 * width * shape["intermediate_size"]
    weights = layers * per_layer + width * shape["vocab_size"]
    tokens = chosen.steps * chosen.batch * chosen.tokens
    return float(4 * weights * tokens + 6 * layers * width * tokens * chosen.tokens)


def partita(chosen: Any, device: torch.device, block: int, mode: str) -> Side:
    module = new_module(SHAPES[chosen.shape], chosen.dtype, device)
    layers = SHAPES[chosen.shape]["num_hidden_layers"]
    frozen = ("embedding", *(f"layer.{layer}" for layer in range(layers)))
    dtype = None if chosen.dtype == torch.float32 else chosen.dtype
    base = from_module("llama", module, frozen, kind=LM, dtype=dtype, checkpointing=chosen.checkpointing)
    method = methods.build("lora", {"rank": chosen.rank, "alpha": 2.0 * chosen.rank, "roles": tuple(chosen.roles)})
    assert method.extend is not None
    model = method.extend(base, Key(0) / "extend")
    training = Training(LR, AdamW(weight_decay=0.0), batch_size=chosen.batch, steps=chosen.steps)
    run = Run(method, training, rounds=1, key=Key(0), drift=False)
    clients = chosen.alone if block == 1 else block
    graphs = None if mode == "eager" else choose_graphs(device.type == "cuda", mode == "compiled", device)
    engine = SimulationEngine(run, model, texts(chosen, clients).to(device), block, device, graphs=graphs)

    def play() -> float:
        [played] = rounds(run, model, engine, initial_server(run, model))
        return float(played.loss)

    return play


def bare_loop(chosen: Any, device: torch.device, compiled: bool) -> Side:
    from peft import LoraConfig, get_peft_model

    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    mlp = ["gate_proj", "up_proj", "down_proj"]
    targets = [name for role in chosen.roles for name in (mlp if role == "mlp" else [names[role]])]
    config = LoraConfig(r=chosen.rank, lora_alpha=2 * chosen.rank, target_modules=targets, lora_dropout=0.0)
    model = get_peft_model(
        new_module(SHAPES[chosen.shape], chosen.dtype, device), config, autocast_adapter_dtype=False
    ).train()
    factors = [value for value in model.parameters() if value.requires_grad]
    server = [value.detach().clone() for value in factors]
    table = texts(chosen, 1).task.train.to(device)

    def loss_of(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    loss_of = torch.compile(loss_of) if compiled else loss_of

    def play() -> float:
        losses, sent = [], []
        for _ in range(chosen.alone):
            with torch.no_grad():
                for value, start in zip(factors, server, strict=True):
                    value.copy_(start)
            optimizer = torch.optim.AdamW(factors, lr=LR, weight_decay=0.0, fused=device.type == "cuda")
            for step in range(chosen.steps):
                rows = torch.arange(step * chosen.batch, (step + 1) * chosen.batch, device=device)
                batch = table.take(rows)
                loss = loss_of(batch.inputs["input_ids"], batch.targets)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            sent.append([value.detach().clone() for value in factors])
        for column in zip(*sent, strict=True):
            torch.stack(column).mean(0)
        return float(torch.stack(losses).mean())

    return play


def new_module(shape: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    with torch.device(device), no_init_weights():
        module = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=dtype)
    module.tie_weights()
    draw = torch.Generator(device).manual_seed((Key(0) / "weights").seed() % 2**63)
    with torch.no_grad():
        for value in module.parameters():
            value.fill_(1.0) if value.ndim == 1 else value.normal_(std=0.02, generator=draw)
    return module


def texts(chosen: Any, clients: int) -> Federation:
    """Random texts without padding, so many that no client repeats one. They need no attention mask."""
    words, rows = SHAPES[chosen.shape]["vocab_size"], clients * chosen.steps * chosen.batch
    ids = torch.randint(words, (rows, chosen.tokens + 1), generator=(Key(0) / "texts").generator())
    table = Table({"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous())
    return data.split(Task("texts", table, table, (), kind=LM), "iid", clients=clients, key=Key(0))


if __name__ == "__main__":
    main()
