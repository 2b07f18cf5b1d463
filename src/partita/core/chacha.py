"""Cryptographically secure random numbers from a 256-bit key: the ChaCha20 stream cipher (RFC 8439).

On a CPU the cipher comes from the `cryptography` package. On a GPU a kernel computes it and the numbers from it; it is
checked against the CPU before its first use. Both have the same stream, so a run draws the same noise on any device.

Normal numbers are computed in float64 with the Box-Muller transform from 64-bit integers. They reach 9.4 standard
deviations. Released values are rounded to a grid that is far coarser than float64 (`noise.add_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.cuda_kernels import MAX_THREADS, THREAD, launch

KEY_BYTES = 32
BLOCK_BYTES = 64
NORMALS = 8  # numbers from one block
MAX_BLOCKS = 2**32  # the cipher counts blocks in 32 bits
_PIECE = 2**18  # bytes of a piece of the stream: it stays in the processor's cache until it is used
_PASS = 2**21  # blocks that are processed together: 128 MiB of stream, and as much again for each temporary
# Each thread computes one block of a stream. `table` has one row per stream: four words of the key, how many blocks and
# how many numbers the streams before it have, and how many numbers it has itself.
_KERNELS = (
    THREAD
    + r"""
__device__ u32 find_stream(const long long* table, u64 block, int streams) {
    u32 low = 0, high = streams;  // the last stream that starts at this block or before
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if ((u64)table[7 * middle + 4] <= block) low = middle; else high = middle;
    }
    return low;
}
__device__ void chacha20(const long long* key, u32 counter, u64* words) {
    u32 start[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u};
    #pragma unroll
    for (int i = 0; i < 8; i++) start[4 + i] = (u32)((u64)key[i / 2] >> 32 * (i % 2));
    start[12] = counter;
    start[13] = start[14] = start[15] = 0;
    u32 x[16];
    #pragma unroll
    for (int i = 0; i < 16; i++) x[i] = start[i];
    #define MIX(a, b, d, bits) x[a] += x[b]; x[d] ^= x[a]; x[d] = x[d] << bits | x[d] >> (32 - bits);
    #define QUARTER(a, b, c, d) MIX(a, b, d, 16) MIX(c, d, b, 12) MIX(a, b, d, 8) MIX(c, d, b, 7)
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        QUARTER(0, 4, 8, 12) QUARTER(1, 5, 9, 13) QUARTER(2, 6, 10, 14) QUARTER(3, 7, 11, 15)
        QUARTER(0, 5, 10, 15) QUARTER(1, 6, 11, 12) QUARTER(2, 7, 8, 13) QUARTER(3, 4, 9, 14)
    }
    #pragma unroll
    for (int i = 0; i < 8; i++)
        words[i] = (u64)(x[2 * i] + start[2 * i]) | (u64)(x[2 * i + 1] + start[2 * i + 1]) << 32;
}
extern "C" __global__ void stream_words(const long long* table, u64* out, int streams, int blocks) {
    THREAD(blocks)
    const long long* row = table + 7 * find_stream(table, thread, streams);
    chacha20(row, (u32)(thread - row[4]), out + 8 * thread);
}
extern "C" __global__ void normals(
    const long long* table, const double* std, double* out, int streams, int blocks
) {
    THREAD(blocks)
    const long long* row = table + 7 * find_stream(table, thread, streams);
    u64 words[8], block = thread - row[4];
    chacha20(row, (u32)block, words);
    #pragma unroll
    for (int i = 0; i < 4; i++) {  // as in _box_muller
        double radius = sqrt(-2.0 * log(((double)(long long)(words[i] & 0x7fffffffffffffffull) + 0.5) * 0x1p-63));
        double angle = (double)(long long)words[4 + i] * (6.283185307179586 * 0x1p-64);
        long long place = 8 * block + i;
        if (place < row[6]) out[row[5] + place] = radius * cos(angle) * *std;
        if (place + 4 < row[6]) out[row[5] + place + 4] = radius * sin(angle) * *std;
    }
}
"""
)


class CipherError(ValueError):
    """Random numbers for privacy cannot be drawn."""


def bernoulli(key: bytes, count: int, probability: float) -> NDArray[np.bool_]:
    """Draw independent booleans, of shape (count,), that are true with `probability`, to within 2**-53.

    Args:
        key: 32 bytes. The same key always gives the same draws.
        count: How many to draw.
        probability: The probability of True.
    """
    return np.asarray((integers(key, count) >> 11) * 2.0**-53 < probability)


def integers(key: bytes, count: int) -> NDArray[np.uint64]:
    """Draw independent uniform 64-bit integers, of shape (count,).

    Args:
        key: 32 bytes. The same key always gives the same draws.
        count: How many to draw.
    """
    return np.frombuffer(_cipher_stream(key, -(-count // NORMALS)), np.uint64)[:count]


def normal(
    keys: Sequence[bytes], counts: Sequence[int], device: torch.device | None = None, std: float = 1.0
) -> torch.Tensor:
    """Draw independent normal numbers with mean 0.

    Args:
        keys: 32 bytes each. The same key always gives the same numbers.
        counts: How many numbers to draw with each key.
        device: Where to compute; None for the CPU.
        std: The standard deviation.

    Returns:
        The numbers of all keys, one after another, in float64.

    Raises:
        CipherError: If a count is too large, the package `cryptography` is missing, or the GPU kernel is wrong.
    """
    device = device or torch.device("cpu")
    blocks = [-(-count // NORMALS) for count in counts]
    if max(blocks, default=0) > MAX_BLOCKS:
        raise CipherError(f"one draw is limited to {MAX_BLOCKS * NORMALS:,} numbers; split the tensor")
    if device.type != "cpu":
        _check_kernels(device)
        return _kernel_normals(keys, counts, device, std)
    drawn = torch.empty(sum(counts), dtype=torch.float64)
    parts = iter(torch.split(drawn, list(counts)))
    for first, last in _passes(counts):
        words = torch.cat([_cpu_stream(*pair) for pair in zip(keys[first:last], blocks[first:last], strict=True)])
        numbers = torch.split(_box_muller(words).mul_(std), [count * NORMALS for count in blocks[first:last]])
        for own, part in zip(numbers, parts, strict=False):  # in this order: `parts` goes on in the next pass
            part.copy_(own[: len(part)])
    return drawn


def stream_pieces(key: bytes, size: int) -> Iterator[memoryview]:
    """Yield the first `size` bytes of the cipher's stream in pieces. The next piece overwrites the one before.

    Args:
        key: 32 bytes. The same key always gives the same bytes.
        size: The number of bytes.

    Raises:
        CipherError: If the stream would be too long, or if the package `cryptography` is missing.
    """
    if size > MAX_BLOCKS * BLOCK_BYTES:
        raise CipherError(f"one stream is limited to {MAX_BLOCKS * BLOCK_BYTES:,} bytes; split the vector")
    algorithms, cipher = _need()
    encryptor = cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros, piece = bytes(_PIECE), memoryview(bytearray(_PIECE))
    for start in range(0, size, _PIECE):
        count = min(_PIECE, size - start)
        encryptor.update_into(memoryview(zeros)[:count], piece[:count])
        yield piece[:count]


def _passes(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of draws that fit in memory together; a large draw has a range of its own."""
    first, size = 0, 0
    for place, count in enumerate(counts):
        if place > first and size + count > _PASS * NORMALS:
            yield first, place
            first, size = place, 0
        size += count
    if first < len(counts):
        yield first, len(counts)


def _box_muller(words: torch.Tensor) -> torch.Tensor:
    """Eight normal numbers from each block of eight 64-bit integers: four radii and four angles."""
    radii, angles = torch.split(words.view(-1, NORMALS), NORMALS // 2, dim=1)
    # 63 bits, and never zero. The tails come from values near zero, where float64 resolves all 63 bits.
    radii = radii.bitwise_and(2**63 - 1).double().add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_()
    angles = angles.double().mul_(2 * math.pi * 2.0**-64)
    return torch.cat([radii * angles.cos(), radii * angles.sin()], dim=1).flatten()


def _cpu_stream(key: bytes, blocks: int) -> torch.Tensor:
    """The cipher's stream as int64, eight words per block."""
    return torch.from_numpy(np.array(np.frombuffer(_cipher_stream(key, blocks), np.int64)))


def _cipher_stream(key: bytes, blocks: int) -> bytes:
    algorithms, cipher = _need()
    # The first 4 of these 16 bytes are the counter. Each key is used for one draw only, so the nonce can be constant.
    encryptor = cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    stream: bytes = encryptor.update(bytes(BLOCK_BYTES * blocks))
    return stream


def _kernel_normals(keys: Sequence[bytes], counts: Sequence[int], device: torch.device, std: float) -> torch.Tensor:
    """The same numbers as on a CPU, in one launch for all keys."""
    out = torch.empty(sum(counts), dtype=torch.float64, device=device)
    table, blocks = _streams(keys, counts, device)
    scale = torch.full((1,), std, dtype=torch.float64, device=device)
    launch(_KERNELS, "normals", blocks, table, scale, out, len(keys))
    return out


def _streams(keys: Sequence[bytes], counts: Sequence[int], device: torch.device) -> tuple[torch.Tensor, int]:
    """The table of streams that the kernels read, (stream, 7), and the number of their blocks together."""
    own = np.array(counts, np.int64).reshape(-1, 1)
    blocks = -(-own // NORMALS)
    if blocks.sum() > MAX_THREADS:
        raise CipherError(f"a draw on a GPU is limited to {MAX_THREADS * NORMALS:,} numbers; split the tensors")
    words = np.frombuffer(b"".join(keys), np.int64).reshape(-1, 4)
    table = np.concatenate([words, blocks.cumsum(0) - blocks, own.cumsum(0) - own, own], 1)
    return torch.from_numpy(table).to(device), int(blocks.sum())


@cache
def _check_kernels(device: torch.device) -> None:
    """Compare the kernels with the CPU before their first use: a wrong stream would break privacy."""
    keys, counts = [bytes(range(start, start + KEY_BYTES)) for start in (0, 7)], [321, 8]
    table, blocks = _streams(keys, counts, device)
    words = torch.empty(NORMALS * blocks, dtype=torch.int64, device=device)
    launch(_KERNELS, "stream_words", blocks, table, words, len(keys))
    streams = [_cipher_stream(key, -(-count // NORMALS)) for key, count in zip(keys, counts, strict=True)]
    numbers = _kernel_normals(keys, counts, device, 0.5).cpu()
    same = words.cpu().numpy().tobytes() == b"".join(streams)
    if not (same and torch.allclose(numbers, normal(keys, counts, std=0.5), rtol=1e-12, atol=1e-12)):
        raise CipherError(
            "the stream of this GPU differs from that of the package cryptography; set engine.device = 'cpu'"
        )


@cache
def _need() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ModuleNotFoundError as error:
        raise CipherError("privacy needs the package cryptography; pip install 'partita[privacy]'") from error
    return algorithms, Cipher
