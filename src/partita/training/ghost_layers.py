"""Per-example gradients that are never computed: their squared norms, and their weighted sum.

A layer's gradient for one example follows from the layer's input and from the gradient of its output. For example, the
gradient of a linear layer is the sum over tokens of output gradient times input, so its squared norm needs only inner
products of tokens, and the weighted sum over examples is one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from partita.core import tensors
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


CHUNK = 2**24  # numbers of a temporary tensor: examples are processed in chunks of this size


class GhostError(ValueError):
    """The model uses a trained parameter in a way that ghost clipping does not support."""


@dataclass(frozen=True)
class Part:
    """The gradients of one parameter for all examples.

    Attributes:
        name: The parameter.
        squares: The squared norm of each gradient, (client, example).
        weighted: From a weight for each example, (client, example), to the weighted sum, (client, ...). An example with
            weight 0 adds nothing, even if its gradient is not finite.
    """

    name: str
    squares: torch.Tensor
    weighted: Callable[[torch.Tensor], torch.Tensor]


# (the layer's input (client, example, ...), gradient of its output (client, example, ...)) -> a part per parameter
Parts = Callable[[torch.Tensor, torch.Tensor], Iterator[Part]]


@dataclass(frozen=True)
class Layer:
    """One call that takes trained parameters.

    Attributes:
        names: The trained parameters that it takes.
        given: Its input, with the example as first dimension.
        call: Computes its output from the input. Parameters are constants in it.
        parts: The gradients of its trained parameters.
    """

    names: tuple[str, ...]
    given: torch.Tensor
    call: Callable[[torch.Tensor], torch.Tensor]
    parts: Parts


Name = Callable[[Any], str | None]  # value -> the name of the trained parameter that it is; None for all others


def linear(
    name: Name, count: int, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Layer:
    """`functional.linear`."""
    of_weight, of_bias = name(weight), name(bias)
    weight, fixed_bias = weight.detach(), None if bias is None else bias.detach()
    kind = given.device.type
    if torch.is_autocast_enabled(kind):  # here, so that the norms are those of the product that is computed
        dtype = torch.get_autocast_dtype(kind)
        # Under vmap, autocast misses the bias.
        given, fixed_bias = given.to(dtype), None if fixed_bias is None else fixed_bias.to(dtype)

    def parts(given: torch.Tensor, grad: torch.Tensor) -> Iterator[Part]:
        given, grad = _by_token(given), _by_token(grad)
        if of_bias:
            yield _vector(of_bias, grad.sum(2, dtype=_high(grad)))
        if of_weight:
            yield Part(of_weight, _linear_squares(given, grad), lambda shares: _linear_sum(given, grad, shares))

    return Layer(_names(of_weight, of_bias), given, lambda given: functional.linear(given, weight, fixed_bias), parts)


def layer_norm(
    name: Name, count: int, given: torch.Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Layer:
    """`functional.layer_norm` over the last dimension."""
    of_weight, of_bias = name(weight), name(bias)
    weight, bias = (value if value is None else value.detach() for value in (weight, bias))
    if len(shape) > 1:
        raise GhostError(f"'{of_weight or of_bias}' is used by a layer_norm over several dimensions")

    def parts(given: torch.Tensor, grad: torch.Tensor) -> Iterator[Part]:
        grad = tensors.upcast(_by_token(grad))
        if of_bias:
            yield _vector(of_bias, grad.sum(2))
        if of_weight:
            normalized = functional.layer_norm(tensors.upcast(given), shape, eps=eps)
            yield _vector(of_weight, (grad * _by_token(normalized)).sum(2))

    def call(given: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(given, shape, weight, bias, eps)

    return Layer(_names(of_weight, of_bias), given, call, parts)


def embedding(
    name: Name, count: int, tokens: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None,
    max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Layer:  # fmt: skip
    """`functional.embedding`. Tokens that all examples share, such as positions, are repeated for each example."""
    own = name(weight)
    assert own is not None
    rows, weight = len(weight), weight.detach()
    if max_norm is not None or scale_grad_by_freq:
        raise GhostError(f"'{own}' is used by an embedding with max_norm or scale_grad_by_freq")
    if len(tokens) == 1:
        tokens = tokens.expand(count, *tokens.shape[1:])

    def parts(tokens: torch.Tensor, grad: torch.Tensor) -> Iterator[Part]:
        tokens, grad = tokens.flatten(2), _by_token(grad)
        if padding_idx is not None:
            grad = grad.masked_fill((tokens == padding_idx % rows).unsqueeze(3), 0.0)
        yield Part(
            own, _embedding_squares(tokens, grad), lambda shares: _embedding_sum(tokens, grad, shares, rows)
        )  # fmt: skip

    return Layer((own,), tokens, lambda tokens: functional.embedding(tokens, weight, padding_idx), parts)


def scale(name: Name, count: int, left: torch.Tensor, right: torch.Tensor) -> Layer:
    """Multiplication by a weight per element of the last dimension, as in an RMS norm."""
    weight, other = (left, right) if name(left) else (right, left)
    own = name(weight)
    assert own is not None
    if weight.ndim != 1:
        raise GhostError(f"'{own}' has more than one dimension and is multiplied element-wise")
    if not isinstance(other, torch.Tensor) or name(other):
        raise GhostError(f"'{own}' is multiplied by a number or by another trained parameter")
    fixed = weight.detach()

    def parts(other: torch.Tensor, grad: torch.Tensor) -> Iterator[Part]:
        product = tensors.upcast(grad) * tensors.upcast(other)
        yield _vector(own, _by_token(product).sum(2))

    return Layer((own,), other, lambda other: other * fixed, parts)


KINDS: dict[Any, Callable[..., Layer]] = {
    functional.linear: linear,
    functional.layer_norm: layer_norm,
    functional.embedding: embedding,
    torch.Tensor.mul: scale,
    torch.Tensor.__mul__: scale,
}


def _names(*names: str | None) -> tuple[str, ...]:
    return tuple(name for name in names if name)


def _by_token(value: torch.Tensor) -> torch.Tensor:
    """The value as (client, example, token, width)."""
    return value.reshape(*value.shape[:2], -1, value.shape[-1])


def _high(value: torch.Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


def _square(value: torch.Tensor) -> torch.Tensor:
    return value.flatten(1).square().sum(1)


# ---- vectors: the gradients of all examples are small


def _vector(name: str, each: torch.Tensor) -> Part:
    """The part of a parameter whose gradients (client, example, width) are computed."""

    def weighted(shares: torch.Tensor) -> torch.Tensor:
        kept = each.masked_fill((shares == 0).unsqueeze(2), 0.0)
        return (shares.unsqueeze(1) @ kept).squeeze(1)

    return Part(name, each.square().sum(2), weighted)


# ---- matrices


def _linear_squares(given: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Squared norms from inner products of tokens, or from the gradients in chunks, whichever costs less."""
    _, _, tokens, wide = given.shape
    high = grad.shape[3]
    by_tokens = tokens * (wide + high) <= wide * high

    def squares(given: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if by_tokens:
            inner = (product(given, given.mT) * product(grad, grad.mT)).sum((1, 2))
            return _rounded_up(inner, (_lengths(given) * _lengths(grad)).sum(1).square())
        return _square(product(grad.mT, given))

    return _in_chunks(squares, given, grad, 2 * tokens**2 if by_tokens else wide * high)


def _linear_sum(given: torch.Tensor, grad: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The sum over all tokens of output gradient times input, (client, output, input), weighted by example.

    Rounding the weighted gradients to bfloat16 could make an example's contribution longer than the clip: terms of
    different tokens can cancel, and their errors do not. So the weight is rounded down instead (`scaled_parts`).
    """
    if given.shape[3] < grad.shape[3]:  # scale the narrower one
        return _linear_sum(grad, given, shares).mT.contiguous()
    kept = given.masked_fill((shares == 0).unsqueeze(2).unsqueeze(3), 0.0).flatten(1, 2)
    if can_split(grad) and kept.dtype == torch.bfloat16:
        first, second = (product(part.flatten(1, 2).mT, kept) for part in scaled_parts(grad, shares))
        return first.add_(second)
    return product(_scaled(grad, shares).flatten(1, 2).mT, kept)


def _embedding_squares(tokens: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    def squares(tokens: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        same = tokens.unsqueeze(1) == tokens.unsqueeze(2)  # (example, token, token)
        lengths = _lengths(grad)
        largest = (lengths.unsqueeze(1) * lengths.unsqueeze(2) * same).sum((1, 2))
        return _rounded_up((product(grad, grad.mT) * same).sum((1, 2)), largest)

    return _in_chunks(squares, tokens, grad, 2 * tokens.shape[2] ** 2)


def _lengths(value: torch.Tensor) -> torch.Tensor:
    """The norm of each token of (example, token, width)."""
    return torch.linalg.vector_norm(value, dim=2, dtype=_high(value))


def _rounded_up(squares: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return squared norms with an allowance for rounding, so that they are not below the true ones.

    A squared norm from inner products is a sum of terms that can cancel. Its error is relative to the terms, not to the
    result, and a norm that is too small would leave a gradient longer than the clip.

    Args:
        squares: The squared norms, (example,).
        largest: What they would be if no terms canceled, (example,).
    """
    return squares + 2 * torch.finfo(squares.dtype).eps * largest


def _embedding_sum(tokens: torch.Tensor, grad: torch.Tensor, shares: torch.Tensor, rows: int) -> torch.Tensor:
    clients = len(tokens)
    own_rows = tokens + rows * torch.arange(clients, device=tokens.device).view(-1, 1, 1)
    scaled = _scaled(grad, shares)
    total = torch.ops.aten.embedding_dense_backward(scaled, own_rows, clients * rows, -1, False)
    return total.view(clients, rows, -1)


def _scaled(grad: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Numbers (client, example, token, width) times the shares, in float32 or higher; 0 where a share is 0."""
    factors = shares.unsqueeze(2).unsqueeze(3)
    return (grad * factors).masked_fill_(factors == 0, 0.0)  # float32, the type of the shares, without a copy


def _in_chunks(
    squares: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], given: torch.Tensor, grad: torch.Tensor, numbers: int
) -> torch.Tensor:
    """Apply a function of (example, token, ...) to all clients' examples, in chunks; return (client, example)."""
    size = max(1, CHUNK // numbers)
    pairs = zip(given.flatten(0, 1).split(size), grad.flatten(0, 1).split(size), strict=True)
    return torch.cat([squares(*pair) for pair in pairs]).view(given.shape[:2])


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the matrix products of two batches in float32 or higher.

    A GPU multiplies bfloat16 numbers exactly and adds in float32, without a copy of the factors in float32.
    """
    if left.is_cuda and left.dtype == right.dtype == torch.bfloat16:
        return torch.bmm(left, right, out_dtype=torch.float32)
    high = torch.promote_types(_high(left), right.dtype)
    return torch.bmm(left.to(high), right.to(high))
