"""What it costs to profile attention: time against a forward pass, and memory against the length of a text.

Prints ratios from one run: absolute times depend on the machine. On a CPU, they are the processor's own, of one thread.
Memory is the most that torch had allocated for one text beyond the model; beside it stands what the map of attention of
a single layer would take.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import accumulate
from pathlib import Path

import torch
from environment import environment, now
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from partita.core.data import Batch
from partita.core.rng import Key, seeded
from partita.engines.autotune import configure_backends
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module

LAYERS, WIDTH, HEADS, WORDS, LONGEST = 6, 384, 6, 1000, 4096
BATCH, TOKENS = 8, 128
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": WORDS}
SIZES |= {"intermediate_size": 4 * WIDTH, "max_position_embeddings": LONGEST, "pad_token_id": 0}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    torch.set_num_threads(1)
    onednn = configure_backends("auto")
    times = [compare(kind, device, chosen.repeats) for kind in ("bert", "llama")]
    memory = [remember(kind, length, device) for kind in ("bert", "llama") for length in chosen.lengths]
    about = environment(
        device,
        onednn,
        f"{LAYERS} layers of width {WIDTH}, {HEADS} heads; time: {BATCH} texts of {TOKENS} tokens, half of them "
        f"padded, median of {chosen.repeats}, sides in turn; memory: one text",
    )
    print(f"{about['work']}; {about['device']}, {about['threads']} thread, torch {about['torch']}")
    for row in times:
        print(
            f"{row['model']:6} forward {row['forward']:.3f} s, profile {row['profile']:.3f} s, ratio {row['ratio']:.2f}"
        )
    print(f"{'':6} {'tokens':>7} {'forward':>10} {'profile':>10} {'one map':>10}   MiB")
    for row in memory:
        mib = [row[side] / 2**20 for side in ("forward", "profile", "map")]
        print(f"{row['model']:6} {row['tokens']:>7} {mib[0]:>10.1f} {mib[1]:>10.1f} {mib[2]:>10.1f}")
    if chosen.out:
        chosen.out.write_text(json.dumps({"environment": about, "time": times, "memory": memory}, indent=1) + "\n")


def model_of(kind: str, device: torch.device) -> FunctionalModel:
    with seeded(Key(0)):
        module = (
            BertForSequenceClassification(BertConfig(**SIZES))
            if kind == "bert"
            else LlamaForSequenceClassification(LlamaConfig(**SIZES, num_key_value_heads=HEADS))
        )
    model = from_module(kind, module)
    model.to(device)
    return model


def texts(count: int, tokens: int, padded: bool, device: torch.device) -> Batch:
    ids = torch.randint(3, WORDS, (count, tokens), generator=Key(1).generator())
    mask = torch.ones_like(ids)
    if padded:
        mask[::2, tokens // 2 :] = 0
    return Batch({"input_ids": ids.to(device), "attention_mask": mask.to(device)}, torch.zeros(count).long().to(device))


def compare(kind: str, device: torch.device, repeats: int) -> dict[str, object]:
    model, batch = model_of(kind, device), texts(BATCH, TOKENS, True, device)
    seconds: dict[str, list[float]] = {"forward": [], "profile": []}
    for _ in range(repeats + 1):
        for side, kept in seconds.items():
            start = now(device)
            run(model, side, batch)
            kept.append(now(device) - start)
    medians = {side: statistics.median(kept[1:]) for side, kept in seconds.items()}
    ratio = statistics.median(
        two / one for one, two in zip(seconds["forward"][1:], seconds["profile"][1:], strict=True)
    )
    return {"model": kind, **medians, "ratio": ratio}


def run(model: FunctionalModel, side: str, batch: Batch) -> None:
    with torch.no_grad():
        if side == "forward":
            model(model.initial, batch.inputs)
        else:
            model.attention(model.initial, batch, "auto")


def remember(kind: str, tokens: int, device: torch.device) -> dict[str, object]:
    """Without a mask on both sides, as profiling leaves out one that hides nothing."""
    model, batch = model_of(kind, device), texts(1, tokens, False, device)
    del batch.inputs["attention_mask"]
    row: dict[str, object] = {"model": kind, "tokens": tokens, "map": 4 * HEADS * tokens**2}
    return {**row, **{side: peak(model, side, batch, device) for side in ("forward", "profile")}}


def peak(model: FunctionalModel, side: str, batch: Batch, device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(model, side, batch)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(model, side, batch)
    found = profiler.profiler.kineto_results.events()
    moves = sorted((each.start_ns(), each.nbytes()) for each in found if each.name() == "[memory]")
    return max(accumulate(size for _, size in moves))


if __name__ == "__main__":
    main()
