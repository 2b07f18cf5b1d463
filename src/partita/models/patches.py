"""Patches of images as products of matrices."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Patches(nn.Conv2d):
    """A convolution whose windows do not overlap is a linear layer on each of them.

    vmap makes clients' convolutions groups of one, which is many times slower than the product that it makes of this.
    """

    def forward(self, pixels: Tensor) -> Tensor:
        high, wide = self.kernel_size
        rows, columns = pixels.shape[-2] // high, pixels.shape[-1] // wide
        windows = (
            pixels[..., : rows * high, : columns * wide].unflatten(-2, (rows, high)).unflatten(-1, (columns, wide))
        )
        windows = windows.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (example, row, column, number)
        return functional.linear(windows, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def take_patches_as_products(module: nn.Module) -> None:
    for part in module.modules():
        if type(part) is nn.Conv2d and _apart(part):
            part.__class__ = Patches  # the same parameters under the same names


def _apart(part: nn.Conv2d) -> bool:
    plain = part.groups == 1 and part.dilation == (1, 1) and part.padding in ((0, 0), "valid")
    return plain and part.kernel_size == part.stride
