from __future__ import annotations

import pytest
import torch
from torch import nn

from partita.models.patches import Patches, take_patches_as_products


@pytest.mark.parametrize(("size", "kernel"), [((8, 8), (4, 4)), ((10, 7), (4, 2)), ((3, 3), (3, 3))])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_the_convolution(size: tuple[int, int], kernel: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, kernel, stride=kernel, bias=bias)
    pixels = torch.randn(2, 3, *size, requires_grad=True)
    wanted = conv(pixels)
    slopes = torch.autograd.grad(wanted.square().sum(), [pixels, *conv.parameters()])
    take_patches_as_products(conv)
    assert isinstance(conv, Patches)
    found = conv(pixels)
    torch.testing.assert_close(found, wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found.square().sum(), [pixels, *conv.parameters()]), slopes, strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "options", [{"stride": 1}, {"stride": 2, "padding": 1}, {"stride": 2, "groups": 2}, {"stride": 2, "dilation": 2}]
)
def test_others_are_left_alone(options: dict[str, int]) -> None:
    module = nn.Sequential(nn.Conv2d(4, 4, 2, **options))
    take_patches_as_products(module)
    assert type(module[0]) is nn.Conv2d
