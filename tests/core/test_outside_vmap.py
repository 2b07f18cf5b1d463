"""A function that leaves vmap sees whole blocks, and autograd sees through it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from partita.core.layer_compiler import compiled_layers, layer_compiler
from partita.core.outside_vmap import outside_vmap, under_vmap


def test_a_block_function_gets_stacked_values_and_their_dimensions() -> None:
    left = torch.arange(6.0).view(3, 2).requires_grad_()  # the client is the last dimension
    right = torch.tensor([1.0, 10.0, 100.0])
    seen: list[tuple[torch.Size, int | None]] = []

    def block(values: Sequence[Tensor], dims: Sequence[int | None]) -> tuple[Tensor, ...]:
        assert not under_vmap(values)
        seen.extend((value.shape, dim) for value, dim in zip(values, dims, strict=True))
        product = values[0].movedim(dims[0] or 0, 0) * values[1]
        return product, product.sum(1)

    def one(own: Tensor) -> tuple[Tensor, ...]:
        assert under_vmap([right, own])
        return outside_vmap(block, [own * 2, right])

    product, total = torch.vmap(one, in_dims=1)(left)
    assert seen == [((3, 2), 1), ((3,), None)] or seen == [((2, 3), 0), ((3,), None)]
    assert torch.equal(product, (left * 2).T * right)
    assert torch.equal(total, product.sum(1))
    assert torch.equal(torch.autograd.grad(total.sum(), left)[0], (2 * right).unsqueeze(1).expand(3, 2))


def test_values_that_all_clients_share_are_an_error() -> None:
    with pytest.raises(AssertionError, match="only called under vmap"):
        outside_vmap(lambda values, dims: tuple(values), [torch.ones(2)])


def test_the_compiler_is_set_inside_its_block_only() -> None:
    assert layer_compiler() is None

    def fail(outer: object) -> None:
        with compiled_layers(lambda function: function):
            assert layer_compiler() is not outer
            raise RuntimeError("stop")

    with compiled_layers(lambda function: function):
        outer = layer_compiler()
        assert outer is not None
        with pytest.raises(RuntimeError, match="stop"):
            fail(outer)
        assert layer_compiler() is outer
    assert layer_compiler() is None
