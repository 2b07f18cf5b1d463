"""Guess the noise of a private client, as a server would: try every seed that a torch CPU generator can tell apart.

partita once drew DP noise by `torch.Generator().manual_seed(seed)`, which keeps 32 bits of its seed. This script
attacks that scheme to the end. The same search against today's noise finds nothing, and the search that would be needed
has 2**256 keys.

    python benchmarks/attack/guess_noise.py [--targets 12] [--bits 32] [--scheme seeds|cipher]
"""

from __future__ import annotations

import argparse
import math
import resource
import secrets
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from partita.core.noise import gaussian_noise
from partita.core.rng import Key

SIZE = 4096  # numbers in a tensor
SIGNAL = 0.007  # the length of a clipped sum beside that of its noise
PAIRS = 4  # as in search.c
SLACK = 0.05  # how far a released number may lie from its noise


def cosine(left: Tensor, right: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(left.double(), right.double(), dim=0))


def by_seed(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def draw_noise(scheme: str, bits: int) -> Tensor:
    if scheme == "seeds":
        return by_seed(secrets.randbits(31) << 32 | secrets.randbits(bits))
    return gaussian_noise({"w": torch.empty(SIZE)}, Key(secrets.randbits(256)), 1.0)["w"].float()


def bit_ranges(x: float, y: float) -> list[int]:
    """In which ranges the low 24 bits behind a Box-Muller pair lie, given the pair up to SLACK: (start, width) each."""
    radius, spread = math.hypot(x, y), 1.5 * SLACK
    near, far = (1 - math.exp(-0.5 * r * r) for r in (max(0.0, radius - spread), radius + spread))
    round_info, wide = math.atan2(y, x) / (2 * math.pi), spread / (2 * math.pi * max(radius, spread))
    start = int((round_info - wide) * 2**24) % 2**24
    return [int(near * 2**24), int((far - near) * 2**24) + 2, start, int(2 * wide * 2**24) + 2]


def search(released: list[Tensor], bits: int) -> list[int | None]:
    """For each tensor the seed whose noise it carries."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "search"
        subprocess.run(["cc", "-O3", "-march=native", "-o", program, Path(__file__).with_name("search.c")], check=True)
        pairs = [(float(each[k]), float(each[k + 8])) for each in released for k in range(PAIRS)]
        ranges = [str(number) for pair in pairs for number in bit_ranges(*pair)]
        found = subprocess.run([program, "0", str(2**bits), *ranges], check=True, capture_output=True, text=True)
    best: list[int | None] = [None] * len(released)
    for line in found.stdout.splitlines():
        target, seed = map(int, line.split())
        if cosine(by_seed(seed), released[target]) > 0.9:
            best[target] = seed
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, default=12)
    parser.add_argument("--bits", type=int, default=32, help="of the seeds that are searched; 32 is all")
    parser.add_argument("--scheme", choices=["seeds", "cipher"], default="seeds")
    asked = parser.parse_args()
    sums = [
        torch.nn.functional.normalize(torch.randn(SIZE), dim=0) * SIGNAL * math.sqrt(SIZE) for _ in range(asked.targets)
    ]
    released = [part + draw_noise(asked.scheme, asked.bits) for part in sums]
    seeds = search(released, asked.bits)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    before = max(abs(cosine(part, whole)) for part, whole in zip(sums, released, strict=True))
    found = [(part, whole, seed) for part, whole, seed in zip(sums, released, seeds, strict=True) if seed is not None]
    result = f"{len(found)} of {asked.targets} found"
    print(f"{asked.scheme}: tried 2**{asked.bits} seeds in {seconds:.0f} s of one core: {result}")
    print(f"cosine of a sum with what was released: {before:.3f} at most")
    if found:
        after = min(cosine(part, whole - by_seed(seed)) for part, whole, seed in found)
        print(f"after subtracting the noise that was found: {after:.3f} at least")


if __name__ == "__main__":
    main()
