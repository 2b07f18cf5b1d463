"""Clients of unequal sizes, and texts of unequal lengths, against equal ones, with CUDA graphs.

Work "bert" classifies texts, work "vit" classifies images; all parameters train. Weights and data are random. All sides
have the same number of examples in total. The sizes of unequal clients are drawn from a Dirichlet distribution, the
lengths of unequal texts from a log-normal one like that of medical abstracts. Equal texts have the mean length. Texts
that are "grouped" train with `group_by_length`. Steps are of one epoch, and all clients of a round train in one block,
or one by one.

A rate counts examples or tokens without padding. It is that of rounds after `--warmup` rounds, in which most graphs are
captured. "with captures" is the rate of all rounds. The ratio is that of tokens per second to equal clients with such
texts and as many clients in a round and in a block; "texts" is the ratio to equal clients with equal texts. Shapes,
captures and steps that were not replayed are those of all rounds. Sides are run one after another.

On a CPU, graphs are replaced by a recorder that runs the steps again: shapes, captures and padding are the same, times
say nothing about graphs.

    python benchmarks/unequal.py --out unequal-gpu.json                        # on a GPU: both works
    python benchmarks/unequal.py --small                                       # on a CPU, in a minute or two
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from environment import environment, now
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification
from works import chosen_works, work_options

from partita import FederationSettings, Key, Run, SimulationEngine, Training, methods
from partita.core.model import Model
from partita.core.optim import AdamW
from partita.core.rounds import RoundResult, rounds
from partita.data import Federation, Table, Task
from partita.data.client_ids import NamedClients
from partita.data.ragged import RaggedExamples
from partita.engines.autotune import configure_backends
from partita.models.hugging_face import from_module
from partita.tasks import IMAGE, TEXT
from partita.training.cuda_capture import CudaRecorder, Recorder, Replay
from partita.training.cuda_graphs import WARMUP_STEPS, GraphCache

CLASSES = 4
SPREAD = 0.6  # of the logarithm of a text's length
# layers, width, clients, steps of each client if all are equal, batch; tokens of the longest text, pixels of a side
SIZES: dict[tuple[str, bool], dict[str, int]] = {
    ("bert", False): {"layers": 6, "width": 384, "clients": 10, "steps": 10, "batch": 32, "extent": 256},
    ("bert", True): {"layers": 2, "width": 64, "clients": 4, "steps": 3, "batch": 8, "extent": 64},
    ("vit", False): {"layers": 12, "width": 384, "clients": 10, "steps": 10, "batch": 32, "extent": 224},
    ("vit", True): {"layers": 2, "width": 64, "clients": 4, "steps": 3, "batch": 8, "extent": 32},
}
Texts = Literal["equal", "unequal", "grouped"]
WORDS = {False: 30522, True: 1000}


@dataclass(frozen=True)
class Side:
    """One way of training.

    Attributes:
        alpha: The concentration of the Dirichlet distribution of the clients' sizes; None for equal clients.
        texts: Whether texts have one length or different ones, and whether these are grouped by length.
        block: The number of clients in a block.
        graphs: Whether steps are captured.
        clients: The number of clients of the federation.
        cohort: The number of clients of a round.
    """

    alpha: float | None
    texts: Texts
    block: int
    graphs: bool
    clients: int
    cohort: int

    def __str__(self) -> str:
        kind = "equal clients" if self.alpha is None else f"Dirichlet {self.alpha:g}"
        texts = {"equal": "", "unequal": ", unequal texts", "grouped": ", unequal texts, grouped"}[self.texts]
        some = "" if self.cohort == self.clients else f", {self.cohort} of {self.clients}"
        together = "one by one" if self.block == 1 else f"{self.block} together"
        return f"{kind}{texts}{some}, {together}{'' if self.graphs else ', eager'}"


class CountingRecorder:
    """Counts captures. Without a GPU, a replay runs the work again into the same tensors."""

    def __init__(self, device: torch.device) -> None:
        self.captures = 0
        self.recorder: Recorder = CudaRecorder() if device.type == "cuda" else run_again

    def __call__(self, work: Callable[[], Tensor]) -> Replay:
        self.captures += 1
        return self.recorder(work)


def run_again(work: Callable[[], Tensor]) -> Replay:
    result = torch.empty(0)

    def replay() -> None:
        found = work()
        result.resize_(found.shape).copy_(found)

    return replay, result


def main() -> None:
    options = work_options(__doc__, SIZES, repeats=8)
    options.add_argument("--warmup", type=int, default=4, help="rounds before the timed ones")
    chosen, works = chosen_works(options, SIZES)
    device, onednn = torch.device(chosen.device), configure_backends("auto")
    text = f"{works}, {chosen.precision}; {chosen.repeats} rounds after {chosen.warmup}"
    about = environment(device, onednn, text)
    print(f"{text}; {about['device']}, {about['threads']} threads, torch {about['torch']}", flush=True)
    results: list[dict[str, Any]] = []
    for work, sizes in works.items():
        print(
            f"{work:60} {'examples/s':>10} {'tokens/s':>10} {'spread':>13} {'ratio':>6} {'texts':>6} "
            f"{'with captures':>13} {'shapes':>6} {'captures':>8} {'eager':>11} {'padding':>7}"
        )
        equal: dict[tuple[int, Texts], float] = {}  # the rate of equal clients, by number per block and kind of texts
        for side in sides(work, sizes):
            if chosen.sides and not any(word in str(side) for word in chosen.sides):
                continue
            row: dict[str, Any] = {"work": work, "side": str(side)}
            results.append(row)
            try:
                row |= measure(work, sizes, side, chosen, device)
                rate = row["tokens/s"]
                if side.alpha is None:
                    equal[side.block, side.texts] = rate
                row["ratio"] = rate / equal.get((side.block, side.texts), float("nan"))
                row["texts"] = rate / equal.get((side.block, "equal"), float("nan"))
                report(row)
            except Exception as error:
                traceback.print_exc(limit=-4, file=sys.stderr)
                row["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
                print(f"{row['side']:60} {row['error']}", flush=True)
            if chosen.out:  # after each side: a later one may end the process
                chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def sides(work: str, sizes: dict[str, int]) -> list[Side]:
    """Equal clients come before the unequal ones that are compared with them."""
    count = sizes["clients"]
    few, part = max(2, 12 * count // 10), max(2, 3 * count // 10)
    lengths: list[Texts] = ["equal", "unequal"] if work == "bert" else ["equal"]
    grouped: list[Texts] = ["grouped"] if work == "bert" else []
    found = [Side(alpha, texts, count, True, count, count) for texts in lengths for alpha in (None, 1.0, 0.3)]
    found += [Side(alpha, texts, count, True, count, count) for texts in grouped for alpha in (None, 1.0)]
    found += [Side(alpha, texts, part, True, few, part) for texts in (*lengths, *grouped) for alpha in (None, 0.05)]
    found += [Side(alpha, texts, 1, True, count, count) for texts in lengths for alpha in (None, 0.3)]
    found.append(Side(0.3, lengths[-1], count, False, count, count))
    return found


def measure(work: str, sizes: dict[str, int], side: Side, chosen: Any, device: torch.device) -> dict[str, Any]:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    federation, tokens = made_federation(work, sizes, side, chosen.small)
    model = made_model(work, sizes, chosen.small, device)
    training = Training(
        1e-4,
        AdamW(weight_decay=0.0),
        batch_size=sizes["batch"],
        precision=chosen.precision,
        group_by_length=side.texts == "grouped",
    )
    run = Run(
        methods.build("fedavg", {}),
        training,
        rounds=chosen.warmup + chosen.repeats,
        key=Key(0),
        federation=FederationSettings(side.cohort),
        drift=False,
    )
    recorder = CountingRecorder(device)
    cache = CountingCache(recorder) if side.graphs else None
    engine = SimulationEngine(run, model, federation.to(device), side.block, device, graphs=cache)
    seconds, played = [], list[RoundResult]()
    start = now(device)
    for result in rounds(run, model, engine):
        seconds.append(now(device) - start)
        played.append(result)
        start = now(device)
    examples = [sum(len(federation[client].train) for client in each.cohort) for each in played]
    counted = [sum(tokens[client] for client in each.cohort) for each in played]
    timed = slice(chosen.warmup, None)
    steps = sum(-(-len(federation[client].train) // sizes["batch"]) for each in played for client in each.cohort)
    rates = [count / spent for count, spent in zip(counted[timed], seconds[timed], strict=True)]
    return {
        "seconds": seconds,
        "examples": examples,
        "tokens": counted,
        "loss": played[-1].loss,
        "client steps": steps,
        "examples/s": sum(examples[timed]) / sum(seconds[timed]),
        "tokens/s": sum(counted[timed]) / sum(seconds[timed]),
        "tokens/s, lowest and highest": [min(rates), max(rates)],
        "tokens/s, with captures": sum(counted) / sum(seconds),
        "captures": recorder.captures,
        **({} if cache is None else cache.counts()),
        "padding": sum(each.padding or 0.0 for each in played) / len(played),
    }


class CountingCache(GraphCache):
    """Counts shapes and steps, also those of trainers that the cache drops."""

    def __init__(self, recorder: CountingRecorder) -> None:
        super().__init__(recorder)
        self.trainers: list[Any] = []
        self.steps = 0

    def _trainer(self, work: Any) -> Any:
        trainer = super()._trainer(work)
        whole = trainer.run_step
        self.trainers.append(whole)

        def counted(*arguments: Any) -> Tensor:
            self.steps += 1
            return whole(*arguments)

        trainer.run_step = counted
        return trainer

    def counts(self) -> dict[str, int]:
        taken = [count for steps in self.trainers for count in steps.taken.values()]
        eager = sum(min(count, WARMUP_STEPS) for count in taken)
        return {"trainers": len(self.trainers), "shapes": len(taken), "eager steps": eager, "steps": self.steps}


def report(row: dict[str, Any]) -> None:
    low, high = (f"{rate / 1000:.0f}" for rate in row["tokens/s, lowest and highest"])
    eager = f"{row['eager steps']} of {row['steps']}" if "steps" in row else "all"
    print(
        f"{row['side']:60} {row['examples/s']:>10.0f} {row['tokens/s']:>10.0f} {low + '-' + high + 'k':>13} "
        f"{row['ratio']:>6.2f} {row['texts']:>6.2f} {row['tokens/s, with captures']:>13.0f} {row.get('shapes', ''):>6} "
        f"{row['captures']:>8} {eager:>11} {row['padding']:>7.1%}",
        flush=True,
    )


# ---- models and data


def made_model(work: str, sizes: dict[str, int], small: bool, device: torch.device) -> Model:
    torch.manual_seed(0)
    width, extent = sizes["width"], sizes["extent"]
    shape: dict[str, Any] = {
        "hidden_size": width, "num_hidden_layers": sizes["layers"], "num_attention_heads": width // 32,
        "intermediate_size": 4 * width, "num_labels": CLASSES, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    if work == "bert":
        config = BertConfig(**shape, vocab_size=WORDS[small], max_position_embeddings=max(512, extent))
        return from_module("bert", BertForSequenceClassification(config).to(device), kind=TEXT)
    config = ViTConfig(**shape, image_size=extent, patch_size=patch(extent))
    return from_module("vit", ViTForImageClassification(config).to(device), kind=IMAGE)


def patch(side: int) -> int:
    return side // 14 if side % 14 == 0 else side // 4


def made_federation(work: str, sizes: dict[str, int], side: Side, small: bool) -> tuple[Federation, dict[str, int]]:
    """Return the federation, and each client's number of tokens."""
    counts = client_sizes(sizes, side)
    total, draw = sum(counts), np.random.default_rng(7)
    targets = torch.from_numpy(draw.integers(CLASSES, size=total))
    table: Any
    if work == "bert":
        lengths = text_lengths(total, sizes["extent"], draw)
        if side.texts == "equal":
            lengths = np.full(total, round(lengths.mean()))
        offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
        ids = torch.from_numpy(draw.integers(1, WORDS[small], size=int(offsets[-1]), dtype=np.int32))
        table = RaggedExamples(ids, offsets, targets, sizes["extent"])
        kind = TEXT
    else:
        pixels = draw.integers(256, size=(total, 3, sizes["extent"], sizes["extent"]), dtype=np.uint8)
        table = Table({"pixel_values": torch.from_numpy(pixels)}, targets, scaled)
        lengths = np.full(total, (sizes["extent"] // patch(sizes["extent"])) ** 2 + 1)
        kind = IMAGE
    ends = np.cumsum(counts)
    rows = [torch.arange(end - count, end) for count, end in zip(counts, ends.tolist(), strict=True)]
    none = torch.zeros(0, dtype=torch.long)
    names = [f"c{place}" for place in range(len(counts))]
    task = Task("random", table, table, tuple(map(str, range(CLASSES))), kind=kind)
    federation = Federation(task, NamedClients(names), [(own, none, none) for own in rows])
    return federation, {name: int(lengths[own.numpy()].sum()) for name, own in zip(names, rows, strict=True)}


def scaled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.float() / 127.5 - 1 for name, value in inputs.items()}


def client_sizes(sizes: dict[str, int], side: Side) -> list[int]:
    """Return the number of examples of each client; all sides have the same total per client."""
    each = sizes["steps"] * sizes["batch"]
    if side.alpha is None:
        return [each] * side.clients
    shares = np.random.default_rng(3).dirichlet([side.alpha] * side.clients)
    counts = np.maximum(1, np.floor(shares * each * side.clients)).astype(int)
    counts[counts.argmax()] += each * side.clients - counts.sum()
    return [int(count) for count in counts]


def text_lengths(count: int, limit: int, draw: np.random.Generator) -> Any:
    found = np.exp(draw.normal(np.log(limit / 3), SPREAD, size=count))
    return np.clip(np.round(found), 4, limit).astype(int)


if __name__ == "__main__":
    main()
