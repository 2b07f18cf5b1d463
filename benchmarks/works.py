"""The options of benchmarks that measure several works, each with sizes of its own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

Sizes = Mapping[tuple[str, bool], Mapping[str, int]]  # (work, whether it is small) -> its numbers by name


def work_options(about: str | None, sizes: Sizes, repeats: int) -> argparse.ArgumentParser:
    """Return a parser to which a benchmark adds its own options."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(work for work, _ in sizes))
    options.add_argument("--works", nargs="*", choices=names, default=names)
    options.add_argument("--small", action="store_true", help="small models, for a CPU")
    for name in sizes[names[0], False]:
        options.add_argument(f"--{name}", type=int, help="instead of the work's own number")
    options.add_argument("--precision", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--sides", nargs="*", help="those whose names contain one of these words")
    options.add_argument("--repeats", type=int, default=repeats, help="timed rounds")
    options.add_argument("--out", type=Path)
    return options


def chosen_works(options: argparse.ArgumentParser, sizes: Sizes) -> tuple[Any, dict[str, dict[str, int]]]:
    """Return the options of the command, and the numbers of each work."""
    chosen = options.parse_args()
    chosen.precision = chosen.precision or ("bfloat16" if torch.device(chosen.device).type == "cuda" else "float32")
    return chosen, {
        work: {**sizes[work, chosen.small], **{name: n for name in sizes[work, False] if (n := vars(chosen)[name])}}
        for work in chosen.works
    }
