"""The memory of a LoRA round over a frozen base of LLaMA's shape, by the number of clients and how they train.

Each run is a whole `partita.run` in a process of its own: it loads the base from its files, hashes it, trains one step
per client, and writes a checkpoint. Its peak is the most that the process had in memory, mapped files included. The
weights are random and in bfloat16 on disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from environment import environment
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

GIB = 2**30
SHAPES: dict[str, dict[str, int]] = {
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
    | {"num_key_value_heads": 8, "vocab_size": 32_000},
    "100m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}
    | {"num_key_value_heads": 4, "vocab_size": 32_000},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    | {"num_key_value_heads": 2, "vocab_size": 256},
}
STORAGES = ("bfloat16", "8bit", "4bit")
WAYS = ((1, 1), (4, 1), (4, 4))  # clients, and how many of them train together


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--size", choices=SHAPES, default="1b")
    options.add_argument("--storages", nargs="*", choices=STORAGES, default=STORAGES)
    options.add_argument("--tokens", type=int, default=16)
    options.add_argument("--folder", type=Path, help="where the model is written, and kept; default: a temporary one")
    options.add_argument("--out", type=Path)
    options.add_argument("--child", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.child:
        print(json.dumps(train(json.loads(chosen.child))))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = chosen.folder or Path(place)
        weights = write_model(folder / "base", SHAPES[chosen.size], chosen.tokens)
        write_texts(folder / "texts", max(clients for clients, _ in WAYS), chosen.tokens)
        rows = [
            measure(folder, storage, clients, block, chosen.tokens)
            for storage in chosen.storages
            for clients, block in WAYS
        ]
    about = environment(torch.device("cpu"), "auto", f"LoRA of rank 8, one step of batch 1 x {chosen.tokens} tokens")
    print(f"{chosen.size}: {weights / GIB:.2f} GiB of bfloat16 weights; {about['work']}")
    for row in rows:
        limit = 1.2 * weights + GIB
        print(
            f"{row['storage']}, {row['clients']} clients, blocks of {row['block']}: peak {row['peak'] / GIB:.2f} GiB, "
            f"limit {limit / GIB:.2f}; its own {row['own'] / GIB:.2f} GiB at the end; {row['seconds']:.0f} s"
        )
    if chosen.out:
        chosen.out.write_text(json.dumps({"environment": about, "weights": weights, "results": rows}, indent=1) + "\n")


def measure(folder: Path, storage: str, clients: int, block: int, tokens: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "rounds": 1,
        "data": {"name": "lm", "path": str(folder / "texts"), "group": "author", "block_size": tokens, "test": 0.25},
        "split": {"name": "by_column", "column": "author"},
        "model": {"name": "pretrained", "path": str(folder / "base"), "frozen": ["base"], "dtype": "bfloat16"},
        "method": {"name": "lora"},
        "training": {"optimizer": "adamw", "lr": 1e-3, "batch_size": 1, "steps": 1},
        "federation": {"cohort": clients},
        "engine": {"clients_per_block": block, "device": "cpu"},
    }
    if storage != "bfloat16":
        config["model"]["quantize"] = storage
    with tempfile.TemporaryDirectory() as place:
        child = json.dumps({"config": config, "folder": place})
        done = subprocess.run([sys.executable, __file__, "--child", child], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {"storage": storage, "clients": clients, "block": block, **json.loads(done.stdout.splitlines()[-1])}


def train(job: dict[str, Any]) -> dict[str, Any]:
    import warnings

    import partita

    warnings.simplefilter("ignore")  # bfloat16 is slow on many CPUs, and it is memory that is measured
    start = time.perf_counter()
    run = partita.run(job["config"], Path(job["folder"]) / "run")
    saved = sum(path.stat().st_size for path in (run.folder / "checkpoints").rglob("*.safetensors"))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts in KiB
        "own": int(status["RssAnon"].split()[0]) * 1024,
        "checkpoints": saved,
        "bytes": run.rows[0]["bytes"],
        "seconds": round(time.perf_counter() - start, 1),
    }


def write_model(folder: Path, shape: dict[str, int], tokens: int) -> int:
    """Write a random model in bfloat16, a file per layer, unless it is there; return the bytes of its weights."""
    config = LlamaConfig(**shape, tie_word_embeddings=True, max_position_embeddings=max(tokens, 64))
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    shapes = {name: value.shape for name, value in module.named_parameters()}
    size = sum(2 * value.numel() for value in shapes.values())
    if (folder / "config.json").exists():
        return size
    folder.mkdir(parents=True)
    files: dict[str, dict[str, torch.Size]] = {}
    for name, value in shapes.items():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = value
    draw = torch.Generator().manual_seed(1)
    for file, named in files.items():
        values = {
            name: torch.ones(size) if len(size) == 1 else torch.empty(size).normal_(std=0.02, generator=draw)
            for name, size in named.items()
        }
        save_file({name: value.bfloat16() for name, value in values.items()}, folder / file, {"format": "pt"})
    index = {name: file for file, named in files.items() for name in named}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    words = {f"w{number}": number for number in range(200)} | {"[END]": 200}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[END]", pad_token="[END]").save_pretrained(folder)
    config.save_pretrained(folder)  # last: it says that the folder is complete
    return size


def write_texts(folder: Path, clients: int, tokens: int) -> None:
    """Write two blocks of random words for each client, in four texts, of which the test takes one."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(2)
    rows = [
        {
            "author": f"a{client}",
            "text": " ".join(f"w{int(word)}" for word in torch.randint(200, (tokens,), generator=draw)),
        }
        for client in range(clients)
        for _ in range(4)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
