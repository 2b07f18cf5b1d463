"""Cryptographically secure random numbers from a 256-bit key: the ChaCha20 stream cipher (RFC 8439).

On a CPU the cipher comes from the `cryptography` package. On a GPU a kernel computes it; it is checked against that
package before its first use. Both give the same bits, so a run draws the same noise on any device.

Normal numbers are computed in float64 with the Box-Muller transform from 64-bit integers. They reach 9.4 standard
deviations. Released values are rounded to a grid that is far coarser than float64 (`noise.add_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core.torch_private import create_jit_fn

KEY_BYTES = 32
BLOCK_BYTES = 64
NORMALS = 8  # numbers from one block
MAX_BLOCKS = 2**32  # the cipher counts blocks in 32 bits
_CPU = torch.device("cpu")
_PIECE = 2**18  # bytes of a piece of the stream: it stays in the processor's cache until it is used
_PASS = 2**21  # blocks that are processed together: 128 MiB of stream, and as much again for each temporary
# Each thread returns one 64-bit word of the stream. Eight threads compute the same block: arithmetic is cheaper than
# memory access.
_KERNEL = r"""
template <typename T> T chacha20(T index, T key0, T key1, T key2, T key3) {
    typedef unsigned int u32;
    typedef unsigned long long u64;
    u64 key[4] = {(u64)key0, (u64)key1, (u64)key2, (u64)key3};
    u32 start[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u};
    #pragma unroll
    for (int i = 0; i < 8; i++) start[4 + i] = (u32)(key[i / 2] >> 32 * (i % 2));
    start[12] = (u32)(index >> 3);
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
    u64 word = 0;
    #pragma unroll
    for (int i = 0; i < 8; i++)
        if ((index & 7) == i) word = (u64)(x[2 * i] + start[2 * i]) | (u64)(x[2 * i + 1] + start[2 * i + 1]) << 32;
    return (T)word;
}
"""


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


def normal(keys: Sequence[bytes], counts: Sequence[int], device: torch.device | None = None) -> list[Tensor]:
    """Draw independent standard normal numbers.

    Args:
        keys: 32 bytes each. The same key always gives the same numbers.
        counts: How many numbers to draw with each key.
        device: Where to compute; None for the CPU.

    Returns:
        One float64 tensor of shape (count,) for each key.

    Raises:
        CipherError: If a count is too large, the package `cryptography` is missing, or the GPU kernel is wrong.
    """
    device = device or _CPU
    drawn: list[Tensor] = []
    for first, last in _passes(counts):
        pass_counts = counts[first:last]
        blocks = [-(-count // NORMALS) for count in pass_counts]
        numbers = _box_muller(torch.cat(_stream(keys[first:last], blocks, device)))
        parts = torch.split(numbers, [count * NORMALS for count in blocks])
        drawn += [part[:count] for part, count in zip(parts, pass_counts, strict=True)]
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


def _box_muller(words: Tensor) -> Tensor:
    """Eight normal numbers from each block of eight 64-bit integers: four radii and four angles."""
    radii, angles = torch.split(words.view(-1, NORMALS), NORMALS // 2, dim=1)
    # 63 bits, and never zero. The tails come from values near zero, where float64 resolves all 63 bits.
    radii = radii.bitwise_and(2**63 - 1).double().add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_()
    angles = angles.double().mul_(2 * math.pi * 2.0**-64)
    return torch.cat([radii * angles.cos(), radii * angles.sin()], dim=1).flatten()


def _stream(keys: Sequence[bytes], blocks: Sequence[int], device: torch.device) -> list[Tensor]:
    """The cipher's stream for each key as int64, eight words per block."""
    if max(blocks, default=0) > MAX_BLOCKS:
        raise CipherError(f"one draw is limited to {MAX_BLOCKS * NORMALS:,} numbers; split the tensor")
    if device.type == "cpu":
        streams = (np.frombuffer(_cipher_stream(*pair), np.int64) for pair in zip(keys, blocks, strict=True))
        return [torch.from_numpy(np.array(words)) for words in streams]
    return _kernel_stream(_kernel(), keys, blocks, device)


def _cipher_stream(key: bytes, blocks: int) -> bytes:
    algorithms, cipher = _need()
    # The first 4 of these 16 bytes are the counter. Each key is used for one draw only, so the nonce can be constant.
    encryptor = cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    stream: bytes = encryptor.update(bytes(BLOCK_BYTES * blocks))
    return stream


def _kernel_stream(
    kernel: Callable[..., Tensor], keys: Sequence[bytes], blocks: Sequence[int], device: torch.device
) -> list[Tensor]:
    index = torch.arange(NORMALS * max(blocks), device=device)
    words = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.int64).view(-1, 4).to(device)
    # One launch for all streams of the same length: the clients of a block, and layers that are alike.
    places: dict[int, list[int]] = {}
    for place, count in enumerate(blocks):
        places.setdefault(count, []).append(place)
    streams: dict[int, Tensor] = {}
    for count, own in places.items():
        rows = kernel(index[: NORMALS * count], *words[own].unsqueeze(2).unbind(1))  # (stream, word)
        streams.update(zip(own, rows.unbind(), strict=True))
    return [streams[place] for place in range(len(blocks))]


@cache
def _kernel() -> Callable[..., Tensor]:
    """The compiled kernel, after a check against the library: a wrong stream would break privacy."""
    kernel: Callable[..., Tensor] = create_jit_fn(_KERNEL)
    key, blocks = bytes(range(KEY_BYTES)), 40
    [words] = _kernel_stream(kernel, [key], [blocks], torch.device("cuda"))
    if words.cpu().numpy().tobytes() != _cipher_stream(key, blocks):
        raise CipherError(
            "the stream of this GPU differs from that of the package cryptography; set engine.device = 'cpu'"
        )
    return kernel


@cache
def _need() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ModuleNotFoundError as error:
        raise CipherError("privacy needs the package cryptography; pip install 'partita[privacy]'") from error
    return algorithms, Cipher
