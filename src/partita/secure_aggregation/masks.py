"""Masks: pseudorandom integers from ChaCha20, added to a vector piece by piece, so that no whole mask is in memory."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from partita.core.chacha import stream_pieces


def add_mask(vector: torch.Tensor, key: bytes, sign: Literal[1, -1]) -> None:
    """Add the mask of a key to a vector of integers on the CPU, in place, or subtract it.

    Integers wrap around: the modulus is 2**32 or 2**64 by the vector's type. The same key gives the same mask.

    Args:
        vector: A contiguous vector of int32 or int64.
        key: 32 bytes that are used for one mask only.
        sign: 1 to add, -1 to subtract.
    """
    values = vector.numpy()
    combine, place = np.add if sign == 1 else np.subtract, 0
    for piece in stream_pieces(key, values.nbytes):
        part = np.frombuffer(piece, values.dtype)
        into = values[place : place + len(part)]
        combine(into, part, out=into)
        place += len(part)
