"""Layers that vmap can batch: patch embeddings as products, and linear layers under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from partita.models.vmap_layers import Linear, LinearPatchEmbedding, use_vmap_layers


@pytest.mark.parametrize(("size", "kernel"), [((8, 8), (4, 4)), ((10, 7), (4, 2)), ((3, 3), (3, 3))])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_patch_embedding_equals_the_convolution(
    size: tuple[int, int], kernel: tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, kernel, stride=kernel, bias=bias)
    pixels = torch.randn(2, 3, *size, requires_grad=True)
    wanted = conv(pixels)
    slopes = torch.autograd.grad(wanted.square().sum(), [pixels, *conv.parameters()])
    use_vmap_layers(conv)
    assert isinstance(conv, LinearPatchEmbedding)
    found = conv(pixels)
    torch.testing.assert_close(found, wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found.square().sum(), [pixels, *conv.parameters()]), slopes, strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "options", [{"stride": 1}, {"stride": 2, "padding": 1}, {"stride": 2, "groups": 2}, {"stride": 2, "dilation": 2}]
)
def test_other_convolutions_compute_the_same_and_follow_autocast_under_vmap(options: dict[str, int]) -> None:
    convolution = nn.Conv2d(4, 4, 2, **options)
    pixels = torch.randn(2, 3, 4, 8, 8)
    plain = [convolution(part) for part in pixels]
    with torch.autocast("cpu", torch.bfloat16):
        half = [convolution(part) for part in pixels]
    use_vmap_layers(nn.Sequential(convolution))
    assert all(torch.equal(convolution(part), expected) for part, expected in zip(pixels, plain, strict=True))
    params = {name: value.detach().expand(2, *value.shape) for name, value in convolution.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        together = torch.vmap(lambda own, given: functional_call(convolution, own, given))(params, pixels)
    assert together.dtype == torch.bfloat16
    for part, expected in zip(together, half, strict=True):
        torch.testing.assert_close(part, expected, atol=0.02, rtol=0.02)


def test_linear_layer_follows_autocast_under_vmap() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 4) for _ in range(3)]
    module = nn.Sequential(nn.Linear(6, 4))
    use_vmap_layers(module)
    assert type(module[0]) is Linear
    params = {
        f"0.{name}": torch.stack([dict(layer.named_parameters())[name] for layer in layers])
        for name in ("weight", "bias")
    }
    given = torch.randn(3, 5, 6)

    def call(params: dict[str, torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, params, (given,))

    with torch.autocast("cpu", torch.bfloat16):
        found = torch.vmap(call)(params, given)
        wanted = torch.stack([layer(each) for layer, each in zip(layers, given, strict=True)])
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)


def test_linear_layer_without_vmap_equals_torch_bit_for_bit() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4))
    given = torch.randn(5, 6)
    wanted = module(given)
    use_vmap_layers(module)
    assert torch.equal(module(given), wanted)
