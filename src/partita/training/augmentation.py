"""Random changes of training images, drawn from the seeds of the examples.

All of them commute with the normalization of pixels, so they work on normalized images as on raw ones: what is outside
the image is a copy of its edge, and what is cut out becomes the mean color of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from partita.core.data import EXAMPLE_SEEDS, Batch
from partita.core.keyed_bits import place_id, random_words, uniforms
from partita.core.settings import RunError

PIXELS = "pixel_values"
CROP = 8  # an image moves by up to 1 / CROP of its side, which is 4 pixels of 32
CUTOUT = 2  # the cut square has 1 / CUTOUT of the side
CONTRAST = 0.4  # contrast changes by a factor from 1 - CONTRAST to 1 + CONTRAST


def augment(batch: Batch, names: Sequence[str]) -> Batch:
    """Return a batch with augmented images.

    Args:
        batch: Images (..., channel, height, width) in "pixel_values", and seeds (...) in `EXAMPLE_SEEDS`.
        names: The augmentations, in order.

    Raises:
        RunError: If the batch has no images.
    """
    if PIXELS not in batch.inputs:
        given = ", ".join(name for name in batch.inputs if name != EXAMPLE_SEEDS)
        raise RunError(f"training.augment is for images, but the inputs are {given}; leave it out")
    pixels = batch.inputs[PIXELS]
    images = pixels.flatten(0, -4) if pixels.ndim > 4 else pixels  # (example, channel, height, width)
    seeds = batch.inputs[EXAMPLE_SEEDS].to(pixels.device).flatten()
    for name in names:
        images = AUGMENTATIONS[name](images, uniforms(random_words(seeds, place_id(f"augment.{name}"), (2,))))
    return Batch({**batch.inputs, PIXELS: images.view(pixels.shape)}, batch.targets, batch.mask)


def _flip(images: Tensor, draws: Tensor) -> Tensor:
    return torch.where((draws[:, 0] < 0.5)[:, None, None, None], images.flip(-1), images)


def _crop(images: Tensor, draws: Tensor) -> Tensor:
    for dim, draw in ((2, draws[:, 0]), (3, draws[:, 1])):
        side = images.shape[dim]
        reach = max(1, side // CROP)
        shift = (draw * (2 * reach + 1)).long() - reach  # (example,)
        index = (torch.arange(side, device=images.device) + shift.unsqueeze(1)).clamp(0, side - 1)  # (example, side)
        shape = [len(images), 1, side, 1] if dim == 2 else [len(images), 1, 1, side]
        images = images.gather(dim, index.view(shape).expand(images.shape))
    return images


def _cutout(images: Tensor, draws: Tensor) -> Tensor:
    inside = []
    for dim, draw in ((2, draws[:, 0]), (3, draws[:, 1])):
        side = images.shape[dim]
        center = (draw * side).long().unsqueeze(1)
        away = (torch.arange(side, device=images.device) - center).abs()
        inside.append(2 * away < side // CUTOUT)  # (example, side)
    square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    return torch.where(square, images.mean((2, 3), keepdim=True), images)


def _contrast(images: Tensor, draws: Tensor) -> Tensor:
    factor = (1 + CONTRAST * (2 * draws[:, 0] - 1))[:, None, None, None].to(images.dtype)
    mean = images.mean((2, 3), keepdim=True)
    return mean + (images - mean) * factor


# (images, two uniform draws for each example) -> images
AUGMENTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flip": _flip,
    "crop": _crop,
    "cutout": _cutout,
    "contrast": _contrast,
}
