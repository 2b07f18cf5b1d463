"""Memory and speed of data from disk: images decoded on demand, texts tokenized into memory-mapped files.

Each measurement runs in its own process, which reports its largest resident memory. Images and texts are synthetic. The
images repeat a few hundred distinct JPEG files, which are decoded every time.

    python benchmarks/large_data.py --out benchmarks/results/large_data.json
    python benchmarks/large_data.py --images 5000 --tokens 1000000
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SIDE, DISTINCT, BATCH = 224, 500, 64
WORDS_PER_TEXT = 200
TRAINED = 4000  # images or texts that are read in batches to measure the speed


def make_images(folder: Path, count: int) -> None:
    """Write Parquet shards of JPEG images with two classes."""
    import datasets
    from PIL import Image

    draws, encoded = np.random.default_rng(0), []
    for _ in range(DISTINCT):
        coarse = Image.fromarray(draws.integers(0, 256, (28, 28, 3), np.uint8)).resize((SIDE, SIDE))
        noisy = np.clip(np.asarray(coarse) + draws.normal(0, 8, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
        target = io.BytesIO()
        Image.fromarray(noisy).save(target, "JPEG", quality=85)
        encoded.append(target.getvalue())
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
    shard = 20_000
    for part, rows in ("train", count), ("test", 500):
        total = -(-rows // shard)
        for number in range(total):
            places = range(number * shard, min(rows, (number + 1) * shard))
            columns = {
                "image": [{"bytes": encoded[place % DISTINCT], "path": None} for place in places],
                "label": [place % 2 for place in places],
            }
            table = datasets.Dataset.from_dict(columns, features=features)
            table.to_parquet(folder / f"{part}-{number:05d}-of-{total:05d}.parquet")


def make_texts(folder: Path, tokens: int) -> None:
    """Write JSON lines with a class, and a tokenizer of their words."""
    from transformers import BertTokenizer

    draws = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(5000)])
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: place for place, word in enumerate([*special, *words.tolist()])}
    BertTokenizer(vocab=vocabulary, model_max_length=512).save_pretrained(folder / "tokenizer")
    for part, rows in ("train", tokens // WORDS_PER_TEXT), ("test", 100):
        with (folder / f"{part}.jsonl").open("w") as file:
            for row in range(rows):
                text = " ".join(words[draws.integers(0, len(words), WORDS_PER_TEXT)].tolist())
                file.write(json.dumps({"text": text, "label": "ab"[row % 2]}) + "\n")


def measure(kind: str, folder: str, where: str) -> dict[str, float | str]:
    """Load a task and read batches in random order. Runs in a process of its own."""
    import torch

    from partita.core.batch_schedule import BatchSchedule
    from partita.core.rng import Key
    from partita.data import load, split, takes
    from partita.training.batching import iterate_batches

    before = resident()
    options = {"path": folder, **({"tokenizer": f"{folder}/tokenizer"} if kind == "text" else {})}
    if takes(kind, "memory"):  # earlier versions keep all in memory
        options["memory"] = {"memory": 1000.0, "disk": 0.0}[where]
    clock = time.perf_counter()
    task = load(kind, Key(0), **options)
    loaded = time.perf_counter() - clock
    federation = split(task, "iid", clients=1, key=Key(1))
    examples = federation[federation.clients[0]].train
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[:TRAINED]
    clock, count, tokens = time.perf_counter(), 0, 0
    schedule = BatchSchedule(order, (BATCH,) * (len(order) // BATCH))
    for batch in iterate_batches([examples], [schedule], torch.device("cpu")):
        count += len(batch.targets)
        tokens += int(batch.inputs["attention_mask"].sum()) if kind == "text" else 0
    seconds = time.perf_counter() - clock
    return {
        "rows": len(task.train),
        "where": where,
        "imports_gib": before,
        "peak_gib": resident("VmHWM"),
        "load_seconds": round(loaded, 2),
        "rows_per_second": round(count / seconds, 1),
        **({"tokens_per_second": round(tokens / seconds)} if kind == "text" else {}),
    }


def resident(line: str = "VmRSS") -> float:
    """Return the resident memory of this process in GiB; "VmHWM" for its largest value so far."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(line):
            return round(int(text.split()[1]) / 2**20, 3)
    raise RuntimeError("the system does not report resident memory")


def in_process(kind: str, folder: Path, where: str, cache: Path) -> dict[str, float | str]:
    """Measure in a new process."""
    command = [sys.executable, __file__, "--measure", kind, str(folder), where]
    done = subprocess.run(command, env={**os.environ, "PARTITA_CACHE": str(cache)}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    print(f"{kind}, {where}: {found}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument(
        "--in-memory", type=int, default=10_000, help="images of the comparison that keeps all in memory"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(measure(*chosen.measure)))
        return
    import datasets

    datasets.disable_progress_bars()
    results: dict[str, list[dict[str, float | str]]] = {"images": [], "text": []}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for count, where, times in (chosen.in_memory, "memory", 1), (chosen.images, "disk", 2):
            folder = root / f"images-{where}"
            folder.mkdir()
            make_images(folder, count)
            results["images"] += [in_process("images", folder, where, root / "cache") for _ in range(times)]
        folder = root / "texts"
        folder.mkdir()
        make_texts(folder, chosen.tokens)
        for where in ("memory", "disk", "disk"):
            results["text"].append(in_process("text", folder, where, root / "cache"))
    text = json.dumps(results, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
