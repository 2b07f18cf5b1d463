"""Random changes of training images, drawn from the seeds of the examples.

All of them commute with the normalization of pixels, so they work on normalized images as on raw ones: what is outside
the image is a copy of its edge, and what is cut out becomes the mean color of the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

from partita.core.data import EXAMPLE_SEEDS, Batch
from partita.core.keyed_bits import place_id, random_words, uniforms
from partita.core.settings import RunError

PIXELS = "pixel_values"
CROP = 8  # an image moves by up to 1 / CROP of its side, which is 4 pixels of 32
CUTOUT = 2  # the cut square has 1 / CUTOUT of the side
CONTRAST = 0.4  # contrast changes by a factor from 1 - CONTRAST to 1 + CONTRAST
BRIGHTNESS = 0.4  # brightness changes by up to this many standard deviations of the channel
ROTATE = math.pi / 12  # an image turns by up to 15 degrees
SHEAR = 0.3  # a row or column moves by up to this many pixels for each pixel from the center
SHIFT = 0.125  # as `CROP`, but by parts of a pixel
SHARPNESS = 0.9  # from a blend with a blurred image to its opposite
RANDOM_OPERATIONS = 2  # as RandAugment's N; its M is the range of each operation above


def augment(batch: Batch, names: Sequence[str]) -> Batch:
    """Return a batch with augmented images. A map of classes, one for each pixel, moves with its image.

    Args:
        batch: Images (..., channel, height, width) in "pixel_values", and seeds (...) in `EXAMPLE_SEEDS`.
        names: The augmentations, in order.

    Raises:
        RunError: If the batch has no images.
    """
    if PIXELS not in batch.inputs:
        given = ", ".join(name for name in batch.inputs if name != EXAMPLE_SEEDS)
        raise RunError(f"training.augment is for images, but the inputs are {given}; leave it out")
    pixels, targets = batch.inputs[PIXELS], batch.targets
    images = pixels.flatten(0, -4) if pixels.ndim > 4 else pixels  # (example, channel, height, width)
    seeds = batch.inputs[EXAMPLE_SEEDS].to(pixels.device).flatten()
    # One class for each pixel, (example, 1, height, width).
    has_map = targets.shape == (*pixels.shape[:-3], *pixels.shape[-2:])
    classes = targets.reshape(len(images), 1, *images.shape[-2:]) if has_map else None
    for name in names:
        draws = uniforms(random_words(seeds, place_id(f"augment.{name}"), (DRAWS.get(name, 2),)))
        if name in MOVES:
            images, classes = MOVES[name](images, draws), None if classes is None else MOVES[name](classes, draws)
        elif name == "randaugment":
            images, classes = _randaugment(images, classes, draws)
        else:
            images = CHANGES[name](images, draws)
    moved = targets if classes is None else classes.view(targets.shape)
    return Batch({**batch.inputs, PIXELS: images.view(pixels.shape)}, moved, batch.mask)


def _flip(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    return torch.where(_column(draws[:, 0] < 0.5), images.flip(-1), images)


def _crop(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    for dim, draw in ((2, draws[:, 0]), (3, draws[:, 1])):
        side = images.shape[dim]
        reach = max(1, side // CROP)
        shift = (draw * (2 * reach + 1)).long() - reach  # (example,)
        index = (torch.arange(side, device=images.device) + shift.unsqueeze(1)).clamp(0, side - 1)  # (example, side)
        shape = [len(images), 1, side, 1] if dim == 2 else [len(images), 1, 1, side]
        images = images.gather(dim, index.view(shape).expand(images.shape))
    return images


def _rotate(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    return _warp(images, _rotations(ROTATE * _signed(draws[:, 0])))


def _shear(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    return _warp(images, _affine(draws, {(0, 1): SHEAR * _signed(draws[:, 0]), (1, 0): SHEAR * _signed(draws[:, 1])}))


def _cutout(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    inside = []
    for dim, draw in ((2, draws[:, 0]), (3, draws[:, 1])):
        side = images.shape[dim]
        center = (draw * side).long().unsqueeze(1)
        away = (torch.arange(side, device=images.device) - center).abs()
        inside.append(2 * away < side // CUTOUT)  # (example, side)
    square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    return torch.where(square, images.mean((2, 3), keepdim=True), images)


def _contrast(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    factor = _column(1 + CONTRAST * _signed(draws[:, 0])).to(images.dtype)
    mean = images.mean((2, 3), keepdim=True)
    return mean + (images - mean) * factor


def _brightness(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    step = _column(BRIGHTNESS * _signed(draws[:, 0])).to(images.dtype)
    return images + step * images.std((2, 3), keepdim=True)


def _sharpness(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    factor = _column(SHARPNESS * _signed(draws[:, 0])).to(images.dtype)
    blurred = functional.avg_pool2d(functional.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return images + factor * (images - blurred)


def _randaugment(
    images: torch.Tensor, classes: torch.Tensor | None, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Change each image by `RANDOM_OPERATIONS` operations that are drawn for it.

    The moves come first, as one resampling. Each operation has two draws: which one, and how strong.
    """
    moves = torch.eye(3, device=images.device).expand(len(images), 3, 3)
    strengths: dict[str, torch.Tensor] = {}
    for which, strength in zip(draws[:, 0::2].unbind(1), draws[:, 1::2].unbind(1), strict=True):
        chosen = (which * (len(RANDOM_MOVES) + len(RANDOM_CHANGES) + 1)).long()  # the last one changes nothing
        for place, move in enumerate(RANDOM_MOVES):
            amount = torch.where(chosen == place, _signed(strength), 0)
            moves = moves @ move(amount)
        for place, name in enumerate(RANDOM_CHANGES, start=len(RANDOM_MOVES)):
            own = torch.where(chosen == place, strength, strengths.get(name, torch.full_like(strength, 0.5)))
            strengths[name] = own
    images, classes = _warp(images, moves), None if classes is None else _warp(classes, moves)
    for name, strength in strengths.items():  # a strength of 1/2 changes nothing
        images = CHANGES[name](images, strength.unsqueeze(1))
    return images, classes


def _warp(images: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
    """Sample images (example, channel, height, width) at moved places. Classes are those of the nearest pixel.

    Args:
        images: The images, or maps of classes.
        moves: For each image a 3 x 3 matrix from the new to the old coordinates, in which the side is from -1 to 1.
    """
    grid = functional.affine_grid(moves[:, :2], list(images.shape), align_corners=False)
    if images.is_floating_point():
        moved = functional.grid_sample(images, grid.to(images.dtype), padding_mode="border", align_corners=False)
    else:
        found = functional.grid_sample(
            images.double(), grid.double(), "nearest", padding_mode="border", align_corners=False
        )
        moved = found.to(images.dtype)
    unmoved = (moves == torch.eye(3, device=moves.device)).flatten(1).all(1)
    return torch.where(_column(unmoved), images, moved)  # sampling rounds even where nothing moves


def _rotations(angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles.cos(), angles.sin()
    return _affine(angles, {(0, 0): cos, (0, 1): -sin, (1, 0): sin, (1, 1): cos})


def _affine(like: torch.Tensor, entries: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    """Return identity matrices (example, 3, 3) with the given entries, each of shape (example,)."""
    rows = torch.eye(3, device=like.device).repeat(len(like), 1, 1)
    for (row, column), values in entries.items():
        rows[:, row, column] = values
    return rows


def _signed(draws: torch.Tensor) -> torch.Tensor:
    return 2 * draws - 1


def _column(values: torch.Tensor) -> torch.Tensor:
    return values[:, None, None, None]


# (images, uniform draws for each example) -> images. Moves apply to maps of classes too.
Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MOVES: dict[str, Change] = {"flip": _flip, "crop": _crop, "rotate": _rotate, "shear": _shear}
CHANGES: dict[str, Change] = {
    "cutout": _cutout,
    "contrast": _contrast,
    "brightness": _brightness,
    "sharpness": _sharpness,
}
# For each example an amount from -1 to 1 -> a matrix (example, 3, 3); an amount of 0 gives the identity.
RANDOM_MOVES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda amount: _rotations(ROTATE * amount),
    lambda amount: _affine(amount, {(0, 1): SHEAR * amount}),
    lambda amount: _affine(amount, {(1, 0): SHEAR * amount}),
    lambda amount: _affine(amount, {(0, 2): 2 * SHIFT * amount}),
    lambda amount: _affine(amount, {(1, 2): 2 * SHIFT * amount}),
)
RANDOM_CHANGES = ("contrast", "brightness", "sharpness")
DRAWS = {"randaugment": 2 * RANDOM_OPERATIONS}  # 2 for all others
