"""A CUDA kernel for the weighted sum of ghost clipping in bfloat16."""

from __future__ import annotations

import torch

from partita.core.cuda_kernels import MAX_THREADS, THREAD, launch

EACH = 8  # numbers of a thread: 16 bytes, which a GPU loads at once
_SOURCE = (
    THREAD
    + r"""
__device__ float from_bfloat16(u16 value) {
    union { u32 bits; float number; } both;
    both.bits = (u32)value << 16;
    return both.number;
}
__device__ u16 to_bfloat16(float value) {  // to the nearest, and to even if there are two
    union { float number; u32 bits; } both;
    both.number = value;
    return (u16)((both.bits + 0x7fffu + (both.bits >> 16 & 1u)) >> 16);
}
__device__ float rounded_down(float value) {  // to a number that bfloat16 can hold
    union { float number; u32 bits; } both;
    both.number = value;
    return from_bfloat16((u16)(both.bits >> 16));
}
struct __align__(16) Eight { u16 at[8]; };
extern "C" __global__ void scaled_parts(
    const Eight* given, const float* shares, Eight* first, Eight* second, int each, int count
) {
    THREAD(count)
    float share = rounded_down(shares[thread / (u32)each]);
    Eight numbers = given[thread], high, low;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        float value = share == 0.0f ? 0.0f : from_bfloat16(numbers.at[i]) * share;
        high.at[i] = to_bfloat16(value);
        low.at[i] = to_bfloat16(value - from_bfloat16(high.at[i]));
    }
    first[thread] = high;
    second[thread] = low;
}
"""
)


def can_split(given: torch.Tensor) -> bool:
    """Whether `scaled_parts` supports numbers (client, example, token, width)."""
    fits = given.shape[2] * given.shape[3] % EACH == 0 and given.numel() <= EACH * MAX_THREADS
    return given.is_cuda and given.dtype == torch.bfloat16 and fits


def scaled_parts(given: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two bfloat16 tensors whose sum is `given` times a weight for its example; 0 where the weight is 0.

    The weights are the shares, rounded down to what bfloat16 can hold: at most 0.8% less. Then the sum is exact, since
    the product of two bfloat16 numbers has 16 significant bits. So a clipped gradient is not longer than the clip.

    Args:
        given: bfloat16 numbers (client, example, token, width), for which `can_split` is true.
        shares: Numbers from 0 to 1 in float32, (client, example).
    """
    given, shares = given.contiguous(), shares.contiguous()
    first, second = torch.empty_like(given), torch.empty_like(given)
    each = given.shape[2] * given.shape[3] // EACH
    launch(_SOURCE, "scaled_parts", given.numel() // EACH, given, shares, first, second, each)
    return first, second
