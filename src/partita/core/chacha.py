"""Random numbers that nobody can predict without a 256-bit key: the ChaCha20 stream cipher, on CPUs and GPUs.

A CPU takes the cipher from the `cryptography` package. A GPU computes it with integer tensors, for many keys in one
pass; both give the same bits (RFC 8439), so a run draws the same noise wherever it trains.

Normal numbers are made in float64 by the Box-Muller transform from 64-bit integers. They reach 9.4 standard
deviations, and what is released is rounded to a grid that is far coarser than float64 (`private.add_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KEY_BYTES = 32
BLOCK_BYTES = 64
NORMALS = 8  # numbers made from one block
MAX_BLOCKS = 2**32  # the cipher counts blocks in 32 bits
_CPU = torch.device("cpu")
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_ROTATIONS = (16, 12, 8, 7)
_PASS = 2**21  # blocks that a GPU computes in one pass: 128 MiB of stream, and as much again for each temporary


class CipherError(ValueError):
    """Random numbers for privacy that cannot be drawn."""


def bernoulli(key: bytes, count: int, probability: float) -> NDArray[np.bool_]:
    """Independent draws that are true with this probability, to within 2**-53. Shape (count,)."""
    words = np.frombuffer(_cipher_stream(key, -(-count // NORMALS)), np.uint64)[:count]
    return np.asarray((words >> 11) * 2.0**-53 < probability)


def normal(keys: Sequence[bytes], counts: Sequence[int], device: torch.device | None = None) -> list[Tensor]:
    """Independent standard normal numbers, one float64 tensor of shape (count,) for each key.

    Args:
        keys: 32 bytes each. The same key always gives the same numbers.
        counts: How many numbers to draw with each key.
        device: Where to compute; the CPU unless set.
    """
    device = device or _CPU
    drawn: list[Tensor] = []
    for first, last in _passes(counts):
        wanted = counts[first:last]
        blocks = [-(-count // NORMALS) for count in wanted]
        numbers = _box_muller(torch.cat(_stream(keys[first:last], blocks, device)))
        parts = torch.split(numbers, [count * NORMALS for count in blocks])
        drawn += [part[:count] for part, count in zip(parts, wanted, strict=True)]
    return drawn


def _passes(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of draws whose numbers fit in memory together; a large draw stands alone."""
    first, size = 0, 0
    for place, count in enumerate(counts):
        if place > first and size + count > _PASS * NORMALS:
            yield first, place
            first, size = place, 0
        size += count
    if first < len(counts):
        yield first, len(counts)


def _box_muller(words: Tensor) -> Tensor:
    """Eight normal numbers from each block of eight 64-bit integers: four radii and four angles."""
    radii, angles = torch.split(words.view(-1, NORMALS), NORMALS // 2, dim=1)
    # 63 bits, and never zero. Near zero float64 resolves them all, which is where the tails come from.
    radii = radii.bitwise_and(2**63 - 1).double().add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_()
    angles = angles.double().mul_(2 * math.pi * 2.0**-64)
    return torch.cat([radii * angles.cos(), radii * angles.sin()], dim=1).flatten()


def _stream(keys: Sequence[bytes], blocks: Sequence[int], device: torch.device) -> list[Tensor]:
    """The cipher's stream for each key as int64, eight for each block."""
    if max(blocks, default=0) > MAX_BLOCKS:
        raise CipherError(f"one draw is limited to {MAX_BLOCKS * NORMALS:,} numbers; split the tensor")
    if device.type == "cpu":
        streams = (np.frombuffer(_cipher_stream(*pair), np.int64) for pair in zip(keys, blocks, strict=True))
        return [torch.from_numpy(np.array(words)) for words in streams]
    return list(torch.split(chacha20(keys, blocks, device), [NORMALS * count for count in blocks]))


def _cipher_stream(key: bytes, blocks: int) -> bytes:
    algorithms, cipher = _need()
    # The first 4 of these 16 bytes are the counter. A key serves one draw, so the nonce can be constant.
    encryptor = cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    stream: bytes = encryptor.update(bytes(BLOCK_BYTES * blocks))
    return stream


def chacha20(keys: Sequence[bytes], blocks: Sequence[int], device: torch.device) -> Tensor:
    """The streams of all keys one after another, by tensor operations, as int64.

    The four rows of the cipher's state are tensors of shape (4, block), so that each of the 20 rounds is a few
    operations however many blocks there are.
    """
    counts = torch.tensor(blocks, device=device)
    words = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.int32).view(-1, 8).to(device)
    words = words.repeat_interleave(counts, dim=0).T  # (8, block)
    counter = torch.cat([torch.arange(count, device=device) for count in blocks]).to(torch.int32)
    rows = [
        _signed(_CONSTANTS, device).unsqueeze(1).expand(4, len(counter)),
        words[:4],
        words[4:],
        torch.cat([counter.unsqueeze(0), counter.new_zeros(3, len(counter))]),
    ]
    state = [row.clone() for row in rows]
    for _ in range(10):
        _quarter_rounds(state)
        state = [row.roll(-place, 0) for place, row in enumerate(state)]  # diagonals become columns
        _quarter_rounds(state)
        state = [row.roll(place, 0) for place, row in enumerate(state)]
    mixed = torch.cat([row.add_(start) for row, start in zip(state, rows, strict=True)])  # (16, block)
    return mixed.T.contiguous().view(torch.int64).flatten()


def _quarter_rounds(state: list[Tensor]) -> None:
    a, b, c, d = state
    for (one, other, turned), bits in zip(((a, b, d), (c, d, b), (a, b, d), (c, d, b)), _ROTATIONS, strict=True):
        one.add_(other)
        turned.bitwise_xor_(one)
        high = turned << bits
        # The shift of a signed integer repeats its sign bit; the mask removes the copies.
        turned.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1).bitwise_or_(high)


def _signed(words: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32, device=device)


@cache
def _need() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ModuleNotFoundError as error:
        raise CipherError("privacy needs the package cryptography; pip install 'partita[privacy]'") from error
    return algorithms, Cipher
