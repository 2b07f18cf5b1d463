"""Frozen linear weights in 8 or 4 bits, which hold under torch.vmap, torch.func, torch.compile and CUDA graphs.

"8bit" stores an int8 per weight and the largest absolute value of each output row, as LLM.int8 does for weights. "4bit"
is QLoRA's format: the 16 values of NF4, the largest absolute value of each block of 64 weights, and these in 8 bits
again, in blocks of 256. Codes are those of bitsandbytes. Decision 0020 says why its kernels are not used.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.autograd import Function
from torch.nn import functional

from partita.core.tensors import Names, Tensors
from partita.core.torch_private import own_parameters
from partita.models import ModelError
from partita.models.architectures import tags_of

Mode = Literal["8bit", "4bit"]
BLOCK, SCALE_BLOCK = 64, 256  # weights that share a scale, and scales that share a scale
CHUNK = 2**14  # blocks that are quantized at once, to save memory
LARGEST = 127  # absolute value of an int8 code
# Quantiles of the normal distribution, scaled to [-1, 1], as in bitsandbytes.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class QuantizedLinear(torch.nn.Linear):
    """A linear layer whose frozen weight is dequantized in each forward pass, and again in each backward pass.

    `weight` is a vector of bytes, the codes followed by the scales: one parameter under the name of the original, so
    that it is shared, moved and hashed like any other.
    """

    mode: Mode
    tables: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not inputs.is_meta and torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
        out: torch.Tensor = _Product.apply(inputs, self.weight, self.tables, self.mode, self.shape, False)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight, (out, in)."""
        return self.out_features, self.in_features

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, (out, in)."""
        return dequantize(self.weight.data, self.tables, self.mode, self.shape, dtype)


class _Product(Function):
    """inputs @ weight.T, or inputs @ weight if transposed. Only the codes are kept for the backward pass."""

    @staticmethod
    def forward(
        inputs: torch.Tensor,
        packed: torch.Tensor,
        tables: torch.Tensor,
        mode: Mode,
        shape: tuple[int, int],
        transposed: bool,
    ) -> torch.Tensor:
        weight = dequantize(packed, tables, mode, shape, inputs.dtype)
        return functional.linear(inputs, weight.mT if transposed else weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, packed, tables, *ctx.options = inputs
        ctx.save_for_backward(packed, tables)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mode, shape, transposed = ctx.options
        inputs: torch.Tensor = _Product.apply(grad, *ctx.saved_tensors, mode, shape, not transposed)
        return inputs, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        inputs: torch.Tensor,
        packed: torch.Tensor,
        tables: torch.Tensor,
        *options: Any,
    ) -> tuple[torch.Tensor, int]:
        """All clients share the weight, so their axis is one more axis of rows in the same product."""
        assert in_dims[0] is not None, "only the inputs differ between clients"
        product: torch.Tensor = _Product.apply(inputs.movedim(in_dims[0], 0), packed, tables, *options)
        return product, 0


def quantize_frozen(module: torch.nn.Module, mode: Mode, layers: Names) -> None:
    """Quantize the weights of linear layers, in place. Layers that an adapter of PEFT already wraps are found too.

    Args:
        module: The module, with values.
        mode: The format.
        layers: The names of the weights, from `quantizable`.
    """
    tables = _tables()
    for path, part in list(module.named_modules()):
        if isinstance(part, torch.nn.Linear) and f"{path}.weight".replace(".base_layer.", ".") in layers:
            packed = quantize(part.weight.data, mode)
            part.__class__ = QuantizedLinear
            assert isinstance(part, QuantizedLinear)
            part.mode = mode
            part.register_buffer("tables", tables.to(packed.device), persistent=False)
            own_parameters(part)["weight"] = torch.nn.Parameter(packed, requires_grad=False)


def quantizable(model: str, module: Any, frozen_names: Names) -> Names:
    """Return the names of the weights to quantize: those of frozen linear layers, but not of the head.

    Args:
        model: Name of the model, for messages.
        module: The module, before it is quantized. It may be on the meta device.
        frozen_names: The names of its frozen parameters.

    Raises:
        ModelError: If there are none.
    """
    if chosen := _linear_weights(module) & frozen_names:
        return chosen
    raise ModelError(
        f"quantize: no linear weight of {model} is frozen, and only frozen ones are quantized; set "
        "[model.adapter], or remove quantize"
    )


def warn_of_trained(module: Any, frozen_names: Names) -> None:
    """Warn if linear weights outside the head train, so that they are not quantized."""
    if trained := sorted(_linear_weights(module) - frozen_names):
        warnings.warn(
            f"model.quantize: {len(trained)} linear weights train and stay in float32, such as '{trained[0]}'; add "
            "them to model.frozen to quantize them",
            stacklevel=3,
        )


def _linear_weights(module: Any) -> Names:
    """Return the names of the weights of linear layers, without head, embeddings, and weights that layers share."""
    tags = tags_of(module)
    paths = list(module.named_parameters(remove_duplicate=False))
    uses = Counter(id(value) for _, value in paths)
    linear = {f"{path}.weight" for path, part in module.named_modules() if isinstance(part, torch.nn.Linear)}
    own = {name for name, value in paths if name in linear and uses[id(value)] == 1}
    return frozenset(name for name in own if not {"head", "embedding"} & tags[name])


def quantize(weight: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Return the codes and scales of a weight (out, in) as one vector of bytes."""
    if mode == "8bit":
        scales = weight.float().abs().amax(1)
        codes = (weight.float() * (LARGEST / scales.clamp(min=1e-38)).unsqueeze(1)).round().to(torch.int8)
        return torch.cat(list(_parts(codes, scales)))
    values = _blocks(weight.float().flatten(), BLOCK)
    scales = values.abs().amax(1)
    code_book = torch.tensor(NF4)
    codes = _nearest(values, scales, code_book).flatten()
    # In float64, so that the sum does not depend on the order of its terms, and every machine has the same offset.
    offset = scales.double().mean().float()
    centered = _blocks(scales - offset, SCALE_BLOCK)
    outer = centered.abs().amax(1)
    inner = _nearest(centered, outer, dynamic_code_book()).flatten()[: len(scales)]
    return torch.cat(list(_parts(codes[::2] << 4 | codes[1::2], outer, offset.reshape(1), inner)))


def dequantize(
    packed: torch.Tensor, tables: torch.Tensor, mode: Mode, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a weight (out, in) from its codes and scales. The scales are applied in float32."""
    out, into = shape
    if mode == "8bit":
        codes, scales = _split(packed, [(out * into, torch.int8), (out, torch.float32)])
        return (codes.view(out, into) * (scales / LARGEST).unsqueeze(1)).to(dtype)
    blocks = -(-out * into // BLOCK)
    kinds = [(blocks * BLOCK // 2, torch.uint8), (-(-blocks // SCALE_BLOCK), torch.float32), (1, torch.float32)]
    codes, outer, offset, inner = _split(packed, [*kinds, (blocks, torch.uint8)])
    scales = functional.embedding(inner.int(), tables[:, 2:]).flatten()
    scales = scales * outer.unsqueeze(1).expand(-1, SCALE_BLOCK).reshape(-1)[:blocks] + offset
    pairs = functional.embedding(codes.int(), tables[:, :2])  # a byte holds two codes
    values = (pairs.view(blocks, BLOCK) * scales.unsqueeze(1)).to(dtype)
    return values.flatten()[: out * into].view(out, into)


def dequantized(module: torch.nn.Module, state: Tensors, dtype: torch.dtype) -> Tensors:
    """Return a state dict with every quantized weight as a plain one of this dtype."""
    layers = {f"{path}.weight": part for path, part in module.named_modules() if isinstance(part, QuantizedLinear)}
    return {name: layers[name].dequantized(dtype) if name in layers else value for name, value in state.items()}


def stored_bytes(mode: Mode, out: int, into: int) -> int:
    """Return the number of bytes of the codes and scales of a weight."""
    if mode == "8bit":
        return _padded(out * into) + 4 * out
    blocks = -(-out * into // BLOCK)
    return blocks * BLOCK // 2 + 4 * -(-blocks // SCALE_BLOCK) + 4 + _padded(blocks)


def dynamic_code_book() -> torch.Tensor:
    """Return the 256 values of bitsandbytes' dynamic 8-bit type: seven decades with ever more values in each."""
    values = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32)


def _tables() -> torch.Tensor:
    """Return what a byte stands for, (256, 3): the two NF4 values of a pair of codes, and the value of a scale's code.

    A buffer and not a constant, because a CUDA graph cannot capture a copy from the host.
    """
    byte, book = torch.arange(256), torch.tensor(NF4)
    return torch.stack([book[byte >> 4], book[byte & 15], dynamic_code_book()], 1)


def _nearest(values: torch.Tensor, scales: torch.Tensor, code_book: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest entry of the code book to each value (block, value) over its block's scale."""
    ends, found = (code_book[:-1] + code_book[1:]) / 2, []
    for part, scale in zip(values.split(CHUNK), scales.split(CHUNK), strict=True):
        scaled = (part * (1.0 / scale.clamp(min=1e-38)).unsqueeze(1)).clamp_(-1, 1)
        found.append(torch.bucketize(scaled, ends, out_int32=True).to(torch.uint8))
    return torch.cat(found)


def _blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return a vector in rows of this size, the last one padded with zeros."""
    return functional.pad(values, (0, -len(values) % size)).view(-1, size)


def _padded(count: int) -> int:
    return -(-count // 4) * 4  # so that a float32 may follow


def _parts(*values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield tensors as bytes, padded so that each starts where a float32 can."""
    for value in values:
        data = value.contiguous().flatten().view(torch.uint8)
        yield functional.pad(data, (0, _padded(len(data)) - len(data)))


def _split(packed: torch.Tensor, kinds: list[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Return the parts of a vector of bytes: for each kind, so many elements of a dtype."""
    found: list[torch.Tensor] = []
    start = 0
    for count, dtype in kinds:
        size = count * dtype.itemsize
        found.append(packed[start : start + size].view(dtype))
        start += _padded(size)
    return found
