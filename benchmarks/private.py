"""DP-SGD against plain training: ghost clipping in blocks and with CUDA graphs, direct clipping, and Opacus.

Work "bert" trains all parameters of a text classifier; work "lora" trains LoRA on a model of LLaMA's shape. Weights and
texts are random. A round is `--clients` clients, each with `--steps` AdamW steps. Private sides clip at 1 and add noise
with multiplier 1. All sides draw shuffled batches of equal size, except "Poisson".

Opacus trains one client after another. For each client it loads the global parameters and makes a new optimizer. Its
noise is float32 numbers of torch's generator; partita's are float64 from a stream cipher, rounded to a grid.

Times are of whole rounds, in turn over the sides. The peak memory is that of building a side and of its first round,
over what was allocated before; it is only measured on a GPU. A side that fails is reported, and the others go on.

    python benchmarks/private.py --out private-gpu.json                        # on a GPU: both works
    python benchmarks/private.py --small                                       # on a CPU, in a minute or two
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from environment import environment, now
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from works import chosen_works, work_options

from partita import Key, Run, SimulationEngine, Training, data, methods
from partita.core.dp_settings import PrivacySettings
from partita.core.model import Model
from partita.core.optim import AdamW
from partita.core.rounds import initial_server, rounds
from partita.data import Federation, Table, Task
from partita.engines.autotune import configure_backends
from partita.models.hugging_face import from_module
from partita.tasks import LM, TEXT
from partita.training.cuda_capture import CudaRecorder
from partita.training.cuda_graphs import GraphCache

GIB = 2**30
LR = 1e-4
CLASSES = 4
# layers, width, words, clients, steps, batch, tokens
SIZES: dict[tuple[str, bool], dict[str, int]] = {
    ("bert", False): {
        "layers": 6,
        "width": 384,
        "words": 30522,
        "clients": 10,
        "steps": 10,
        "batch": 32,
        "tokens": 128,
    },
    ("bert", True): {"layers": 2, "width": 128, "words": 1000, "clients": 4, "steps": 4, "batch": 16, "tokens": 32},
    ("lora", False): {
        "layers": 30,
        "width": 576,
        "words": 49152,
        "clients": 4,
        "steps": 10,
        "batch": 16,
        "tokens": 256,
    },
    ("lora", True): {"layers": 2, "width": 128, "words": 1000, "clients": 4, "steps": 4, "batch": 8, "tokens": 32},
}
Side = Callable[[], float | None]  # trains one round and returns the mean loss of its clients, unless it is private


def main() -> None:
    options = work_options(__doc__, SIZES, repeats=5)
    options.add_argument("--rank", type=int, default=8)
    chosen, works = chosen_works(options, SIZES)
    device, onednn = torch.device(chosen.device), configure_backends("auto")
    text = f"{works}, {chosen.precision}, rank {chosen.rank}; median of {chosen.repeats} rounds, sides in turn"
    about = environment(device, onednn, text)
    print(f"{text}; {about['device']}, {about['threads']} threads, torch {about['torch']}", flush=True)
    results: list[dict[str, Any]] = []
    for work, sizes in works.items():
        rows = measure(work, sizes, chosen, device)
        report(work, rows)
        results += rows
        if chosen.out:  # after each work: a later one may end the process
            chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def measure(work: str, sizes: dict[str, int], chosen: Any, device: torch.device) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ready: list[tuple[dict[str, Any], Side]] = []
    for name, make in sides(work, sizes, chosen, device).items():
        if chosen.sides and not any(word in name for word in chosen.sides):
            continue
        row: dict[str, Any] = {"work": work, "side": name, "seconds": []}
        rows.append(row)
        gc.collect()
        before = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        with Reported(row):
            side = make()
            start = now(device)
            row["loss"] = side()
            row["seconds of the first round"] = now(device) - start
            if device.type == "cuda":
                row["peak GiB"] = (torch.cuda.max_memory_allocated(device) - before) / GIB
            ready.append((row, side))
    for _ in range(chosen.repeats):
        for row, side in ready:
            if "error" not in row:
                with Reported(row):
                    start = now(device)
                    side()
                    row["seconds"].append(now(device) - start)
    for row in rows:
        if row["seconds"] and "error" not in row:
            row["median"] = statistics.median(row["seconds"])
            row["ratio"] = row["median"] / rows[0].get("median", float("nan"))
    return rows


class Reported:
    """Notes an exception in the row of a side and goes on."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if kind is None or not issubclass(kind, Exception):
            return False
        traceback.print_exception(kind, error, trace, limit=-4, file=sys.stderr)
        self.row["error"] = f"{kind.__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}"
        return True


def report(work: str, rows: list[dict[str, Any]]) -> None:
    print(f"{work:42} {'first s':>8} {'ms/round':>10} {'spread':>17} {'ratio':>7} {'GiB':>6} {'loss':>7}")
    for row in rows:
        if "median" not in row:
            print(f"{row['side']:42} {row.get('error', 'not run')}", flush=True)
            continue
        low, high = 1000 * min(row["seconds"]), 1000 * max(row["seconds"])
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        memory = f"{row['peak GiB']:.2f}" if "peak GiB" in row else ""
        print(
            f"{row['side']:42} {row['seconds of the first round']:>8.1f} {1000 * row['median']:>10.1f} "
            f"{low:>8.0f}-{high:<8.0f} {row['ratio']:>6.2f}x {memory:>6} {loss:>7}",
            flush=True,
        )


def sides(work: str, sizes: dict[str, int], chosen: Any, device: torch.device) -> dict[str, Callable[[], Side]]:
    """The first one is what the others are compared with."""
    clients, cuda = sizes["clients"], device.type == "cuda"

    def partita(block: int, clipping: str | None, graphs: bool, sampling: str = "shuffle") -> Callable[[], Side]:
        private = clipping and PrivacySettings(clip=1.0, noise=1.0, sampling=sampling, clipping=clipping)  # type: ignore[arg-type]
        return lambda: partita_round(work, sizes, chosen, device, block, private or None, graphs)

    found = {f"plain, {clients} together": partita(clients, None, False)}
    if cuda:
        found |= {
            f"plain, {clients} together, graphs": partita(clients, None, True),
            f"ghost, {clients} together, graphs": partita(clients, "ghost", True),
            f"ghost, {clients} together, graphs, Poisson": partita(clients, "ghost", True, "poisson"),
            "ghost, one by one, graphs": partita(1, "ghost", True),
        }
    return {
        **found,
        f"ghost, {clients} together": partita(clients, "ghost", False),
        "ghost, one by one": partita(1, "ghost", False),
        f"direct, {clients} together": partita(clients, "direct", False),
        "direct, one by one": partita(1, "direct", False),
        "plain, one by one": partita(1, None, False),
        "Opacus, ghost, one by one": lambda: opacus_round(work, sizes, chosen, device),
    }


# ---- the same module and texts for all sides


def new_module(work: str, sizes: dict[str, int], device: torch.device) -> Any:
    width = sizes["width"]
    shape: dict[str, Any] = {
        "hidden_size": width, "num_hidden_layers": sizes["layers"], "vocab_size": sizes["words"], "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    if work == "bert":
        config = BertConfig(
            **shape, num_attention_heads=width // 32, intermediate_size=4 * width, num_labels=CLASSES,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            max_position_embeddings=max(512, sizes["tokens"]),
        )  # fmt: skip
        return BertForSequenceClassification(config).to(device)
    heads = width // 64
    groups = heads // 3 if heads % 3 == 0 else heads
    config = LlamaConfig(
        **shape, num_attention_heads=heads, num_key_value_heads=groups, intermediate_size=8 * width // 3,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


def texts(work: str, sizes: dict[str, int]) -> Federation:
    """Random texts without padding, so many that all batches are full: a part of them is for testing."""
    count, draw = 2 * sizes["clients"] * sizes["steps"] * sizes["batch"], (Key(0) / "texts").generator()
    ids = torch.randint(1, sizes["words"], (count, sizes["tokens"] + 1), generator=draw)
    targets = ids[:, 1:].contiguous() if work == "lora" else torch.randint(CLASSES, (count,), generator=draw)
    table = Table({"input_ids": ids[:, :-1].contiguous()}, targets)
    kind, classes = (LM, ()) if work == "lora" else (TEXT, tuple(map(str, range(CLASSES))))
    task = Task("texts", table, table, classes, kind=kind)
    return data.split(task, "iid", clients=sizes["clients"], key=Key(0))


# ---- partita


def partita_round(
    work: str, sizes: dict[str, int], chosen: Any, device: torch.device,
    block: int, private: PrivacySettings | None, graphs: bool,
) -> Side:  # fmt: skip
    model, method = partita_model(work, sizes, chosen, device)
    training = Training(
        LR, AdamW(weight_decay=0.0), batch_size=sizes["batch"], steps=sizes["steps"], precision=chosen.precision
    )
    run = Run(replace(method, privacy=private), training, rounds=1, key=Key(0), drift=False)
    cache = GraphCache(CudaRecorder()) if graphs else None
    model.to(device)
    engine = SimulationEngine(run, model, texts(work, sizes).to(device), block, device, graphs=cache)

    def play() -> float | None:
        [played] = rounds(run, model, engine, initial_server(run, model))
        return played.loss

    return play


def partita_model(work: str, sizes: dict[str, int], chosen: Any, device: torch.device) -> tuple[Model, Any]:
    module = new_module(work, sizes, device)
    if work == "bert":
        return from_module("bert", module, kind=TEXT), methods.build("fedavg", {})
    frozen = ("embedding", *(f"layer.{layer}" for layer in range(sizes["layers"])))
    base = from_module("llama", module, frozen, kind=LM)
    method = methods.build("lora", {"rank": chosen.rank, "alpha": 2.0 * chosen.rank, "roles": ("query", "value")})
    assert method.extend is not None
    return method.extend(base, Key(0) / "extend"), method


# ---- Opacus


def opacus_round(work: str, sizes: dict[str, int], chosen: Any, device: torch.device) -> Side:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    module = new_module(work, sizes, device)
    if work == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=chosen.rank, lora_alpha=2 * chosen.rank, target_modules=["q_proj", "v_proj"], lora_dropout=0.0
        )
        module = get_peft_model(module, config)
    trained = [value for value in module.parameters() if value.requires_grad]
    server = [value.detach().clone() for value in trained]
    private = GradSampleModuleFastGradientClipping(module.train(), max_grad_norm=1.0, loss_reduction="mean")
    federation = texts(work, sizes).to(device)
    half = torch.autocast(device.type, torch.bfloat16, enabled=chosen.precision == "bfloat16")

    def play() -> float:
        losses, sent = [], []
        for client in federation.clients:
            with torch.no_grad():
                for value, start in zip(trained, server, strict=True):
                    value.copy_(start)
            optimizer = DPOptimizerFastGradientClipping(
                torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=device.type == "cuda"),
                noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=sizes["batch"], loss_reduction="mean",
            )  # fmt: skip
            criterion = DPLossFastGradientClipping(private, optimizer, nn.CrossEntropyLoss(), loss_reduction="mean")
            rows = federation[client].train
            for step in range(sizes["steps"]):
                batch = rows.take(torch.arange(step * sizes["batch"], (step + 1) * sizes["batch"]))
                ids, targets = batch.inputs["input_ids"].to(device), batch.targets.to(device)
                # Opacus needs the example as first dimension of every input, also of positions.
                positions = torch.arange(ids.shape[1], device=device).expand(ids.shape).contiguous()
                with half:
                    logits = private(input_ids=ids, position_ids=positions).logits.float()
                optimizer.zero_grad()
                if work == "lora":
                    loss = criterion(logits.flatten(0, 1), targets.flatten(), shape=logits.shape)
                else:
                    loss = criterion(logits, targets)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.item()))
            sent.append([value.detach().clone() for value in trained])
        for column in zip(*sent, strict=True):
            torch.stack(column).mean(0)
        return statistics.mean(losses)

    return play


if __name__ == "__main__":
    main()
