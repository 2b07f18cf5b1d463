"""Augmented images: what each change does, and what its draws depend on."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from architecture_fixtures import ThreeClients, make_case
from graph_fixtures import max_relative_difference
from helpers import Clients, final_params, max_difference, play, toy_model, toy_run
from torch import Tensor

from partita.core.data import EXAMPLE_SEEDS, Batch
from partita.core.keyed_bits import example_seeds, place_id, random_words, uniforms
from partita.core.optim import SGD
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.core.settings import Augmentation, RunError, Training
from partita.core.tensors import Tensors
from partita.methods.fedavg import fedavg
from partita.training.augmentation import CHANGES, MOVES, PIXELS, augment

AUGMENT = get_args(Augmentation)
IMAGES = torch.rand(400, 2, 16, 16, generator=torch.Generator().manual_seed(0))
SEEDS = example_seeds([Key(0)], 0, torch.arange(400))[0]


def changed(name: str, images: Tensor = IMAGES, seeds: Tensor = SEEDS) -> Tensor:
    batch = Batch({PIXELS: images, EXAMPLE_SEEDS: seeds}, torch.zeros(len(images), dtype=torch.long))
    return augment(batch, [name]).inputs[PIXELS]


def test_half_of_the_images_are_mirrored() -> None:
    found = changed("flip")
    mirrored = (found == IMAGES.flip(-1)).flatten(1).all(1)
    assert torch.equal(mirrored, ~(found == IMAGES).flatten(1).all(1))
    assert 150 < int(mirrored.sum()) < 250


def test_crop_moves_an_image_in_all_directions_and_repeats_its_edge() -> None:
    found = changed("crop")
    moves = set()
    for image, original in zip(found, IMAGES, strict=True):
        padded = torch.nn.functional.pad(original[None], (2, 2, 2, 2), mode="replicate")[0]
        own = [
            (row, column)
            for row in range(5)
            for column in range(5)
            if torch.equal(padded[:, row : row + 16, column : column + 16], image)
        ]
        assert len(own) == 1
        moves.add(own[0])
    assert len(moves) == 25


def test_crop_moves_a_small_image_by_a_pixel() -> None:
    places = torch.arange(4.0).expand(400, 1, 4, 4)
    moved = changed("crop", places)[:, 0, :, 1:3].mean((1, 2)) - 1.5
    assert {round(float(move), 2) for move in moved} == {-1.0, 0.0, 1.0}


def test_cutout_sets_one_square_to_the_mean_color() -> None:
    found = changed("cutout")
    differs = (found != IMAGES).all(1)  # (example, height, width)
    means = IMAGES.mean((2, 3), keepdim=True).expand(IMAGES.shape)
    assert torch.equal(found, torch.where(differs.unsqueeze(1), means, IMAGES))
    rows, columns = differs.any(2), differs.any(1)
    assert torch.equal(differs, rows.unsqueeze(2) & columns.unsqueeze(1))
    assert int(rows.sum(1).max()) == 7
    assert rows.any(0).all()
    assert columns.any(0).all()


def test_contrast_keeps_the_mean_color() -> None:
    found = changed("contrast")
    torch.testing.assert_close(found.mean((2, 3)), IMAGES.mean((2, 3)))
    factors = found.std((2, 3)) / IMAGES.std((2, 3))
    torch.testing.assert_close(factors[:, 0], factors[:, 1])
    assert 0.6 <= float(factors.min()) < 0.63
    assert 1.37 < float(factors.max()) <= 1.4 + 1e-5


def test_brightness_shifts_all_pixels_of_a_channel_alike() -> None:
    shifts = changed("brightness") - IMAGES
    torch.testing.assert_close(shifts, shifts.mean((2, 3), keepdim=True).expand(shifts.shape))
    steps = shifts.mean((2, 3)) / IMAGES.std((2, 3))
    torch.testing.assert_close(steps[:, 0], steps[:, 1])
    assert -0.4 - 1e-5 <= float(steps.min()) < -0.37
    assert 0.37 < float(steps.max()) <= 0.4 + 1e-5


def test_sharpness_blends_with_a_blurred_image_or_its_opposite() -> None:
    blurred = torch.nn.functional.avg_pool2d(torch.nn.functional.pad(IMAGES, (1, 1, 1, 1), mode="replicate"), 3, 1)
    away, moved = IMAGES - blurred, changed("sharpness") - IMAGES
    factors = (moved * away).sum((1, 2, 3)) / away.square().sum((1, 2, 3))
    torch.testing.assert_close(moved, factors[:, None, None, None] * away)
    assert -0.9 - 1e-5 <= float(factors.min()) < -0.85
    assert 0.85 < float(factors.max()) <= 0.9 + 1e-5


def ramps(side: int = 16) -> Tensor:
    """Two channels that hold a pixel's column and row, from the center: after a move, they say where it came from."""
    places = torch.arange(side, dtype=torch.float32) - (side - 1) / 2
    columns = places.expand(side, side)
    return torch.stack([columns, columns.T]).expand(400, 2, side, side)


def derivatives(images: Tensor) -> Tensor:
    """The matrix of the move, (example, 2, 2), from the four pixels around the center."""
    center = images[:, :, 7:9, 7:9]
    along = (center[..., 1] - center[..., 0]).mean(2)
    down = (center[:, :, 1] - center[:, :, 0]).mean(2)
    return torch.stack([along, down], 2)


def test_rotation_turns_by_up_to_15_degrees_around_the_center() -> None:
    found = derivatives(changed("rotate", ramps()))
    angles = torch.atan2(found[:, 1, 0], found[:, 0, 0])
    cos, sin = angles.cos(), angles.sin()
    torch.testing.assert_close(found, torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1))
    assert -15 - 1e-3 <= float(angles.rad2deg().min()) < -14
    assert 14 < float(angles.rad2deg().max()) <= 15 + 1e-3


def test_shear_moves_rows_and_columns_in_proportion_to_their_distance() -> None:
    found = derivatives(changed("shear", ramps()))
    torch.testing.assert_close(found[:, [0, 1], [0, 1]], torch.ones(400, 2))
    for row, column in ((0, 1), (1, 0)):
        assert -0.3 - 1e-5 <= float(found[:, row, column].min()) < -0.28
        assert 0.28 < float(found[:, row, column].max()) <= 0.3 + 1e-5


def draws_of(name: str, count: int = 2) -> Tensor:
    return uniforms(random_words(SEEDS, place_id(f"augment.{name}"), (count,)))


def test_changes_follow_their_draws() -> None:
    signed = 2 * draws_of("flip") - 1
    assert torch.equal((changed("flip") == IMAGES).flatten(1).all(1), signed[:, 0] >= 0)
    signed = 2 * draws_of("contrast") - 1
    torch.testing.assert_close(changed("contrast").std((2, 3))[:, 0] / IMAGES.std((2, 3))[:, 0], 1 + 0.4 * signed[:, 0])
    signed = 2 * draws_of("brightness") - 1
    torch.testing.assert_close((changed("brightness") - IMAGES).mean((1, 2, 3)).sign(), signed[:, 0].sign())
    signed = 2 * draws_of("sharpness") - 1
    noise = (changed("sharpness") - IMAGES.roll(1, 3)).square().mean((1, 2, 3))
    assert float(noise[signed[:, 0] > 0.5].min()) > float(noise[signed[:, 0] < -0.5].max())
    signed = 2 * draws_of("rotate") - 1
    angles = torch.atan2(*derivatives(changed("rotate", ramps()))[:, [1, 0], 0].unbind(1))
    torch.testing.assert_close(angles, signed[:, 0] * math.pi / 12, atol=1e-5, rtol=1e-5)
    signed = 2 * draws_of("shear") - 1
    torch.testing.assert_close(derivatives(changed("shear", ramps()))[:, [0, 1], [1, 0]], 0.3 * signed)


def test_crop_and_cutout_draw_the_row_first() -> None:
    rows, columns = (draws_of("crop") * 5).long().unbind(1)
    for image, original, row, column in zip(changed("crop"), IMAGES, rows, columns, strict=True):
        padded = torch.nn.functional.pad(original[None], (2, 2, 2, 2), mode="replicate")[0]
        assert torch.equal(image, padded[:, row : row + 16, column : column + 16])
    rows, columns = (draws_of("cutout") * 16).long().unbind(1)
    cut = changed("cutout") != IMAGES
    assert cut[torch.arange(400), :, rows, columns].all()


def random_moves(which: float, amount: float) -> Tensor | None:
    """The matrix of an operation of RandAugment, in coordinates from -1 to 1; None if it changes pixels."""
    cos, sin = math.cos(amount * math.pi / 12), math.sin(amount * math.pi / 12)
    matrices = [
        [[cos, -sin, 0], [sin, cos, 0]],
        [[1, 0.3 * amount, 0], [0, 1, 0]],
        [[1, 0, 0], [0.3 * amount, 1, 0]],
        [[1, 0, 0.25 * amount], [0, 1, 0]],
        [[1, 0, 0], [0, 1, 0.25 * amount]],
    ]
    return torch.tensor([*matrices[int(which * 9)], [0, 0, 1]]) if which * 9 < 5 else None


def test_randaugment_moves_by_two_operations() -> None:
    draws, found = draws_of("randaugment", 4), changed("randaugment", ramps())
    seen = 0
    for row, image in zip(draws, found, strict=True):
        moves = [random_moves(float(row[place]), 2 * float(row[place + 1]) - 1) for place in (0, 2)]
        if moves[0] is None or moves[1] is None:
            continue
        seen += 1
        places = (torch.arange(16) - 7.5) / 8
        points = torch.stack([places.expand(16, 16), places.expand(16, 16).T, torch.ones(16, 16)])
        sources = (moves[0] @ moves[1] @ points.flatten(1)).view(3, 16, 16)[:2] * 8
        torch.testing.assert_close(image, sources.clamp(-7.5, 7.5), atol=1e-4, rtol=1e-4)
    assert seen > 80  # 25 of 81 on average


def test_randaugment_changes_pixels_by_two_operations() -> None:
    draws, found = draws_of("randaugment", 4), changed("randaugment")
    names = ["contrast", "brightness", "sharpness", "nothing"]
    seen = set()
    for row, image, original in zip(draws, found, IMAGES, strict=True):
        chosen = [int(float(row[place]) * 9) - 5 for place in (0, 2)]
        if min(chosen) < 0:
            continue
        strengths = {names[each]: row[place] for each, place in zip(chosen, (1, 3), strict=True)}
        seen |= {*strengths}
        expected = original[None]
        for name in names[:3]:
            if name in strengths:
                expected = CHANGES[name](expected, strengths[name].view(1, 1))
        torch.testing.assert_close(image, expected[0], atol=1e-5, rtol=1e-5)
    assert seen == {*names}


@pytest.mark.parametrize("name", [*MOVES, "randaugment"])
def test_a_map_of_classes_moves_with_its_image(name: str) -> None:
    """The image holds its own map of classes as pixels, in large areas: only at their edges can rounding differ."""
    areas = (IMAGES[:, :1, ::8, ::8] * 2).long().repeat_interleave(8, 2).repeat_interleave(8, 3).to(torch.int16)
    batch = Batch({PIXELS: areas.float(), EXAMPLE_SEEDS: SEEDS}, areas[:, 0])
    moved = augment(batch, [name])
    blocks = {name: value.view(4, 100, *value.shape[1:]) for name, value in batch.inputs.items()}
    block = augment(Batch(blocks, batch.targets.view(4, 100, 16, 16)), [name])
    assert torch.equal(block.targets.flatten(0, 1), moved.targets)
    assert moved.targets.dtype == torch.int16
    assert not torch.equal(moved.targets, areas[:, 0])
    pixels = moved.inputs[PIXELS][:, 0]
    if name in ("flip", "crop"):
        assert torch.equal(pixels, moved.targets.float())
    elif name != "randaugment":  # it changes the pixels as well
        assert torch.equal(
            pixels[sharp := (pixels - pixels.round()).abs() < 1e-4].round(), moved.targets[sharp].float()
        )
        assert float(sharp.float().mean()) > 0.5


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_of_pixels_keeps_their_classes(name: str) -> None:
    classes = (IMAGES[:, 0] * 8).to(torch.int16)
    assert torch.equal(augment(Batch({PIXELS: IMAGES, EXAMPLE_SEEDS: SEEDS}, classes), [name]).targets, classes)


@pytest.mark.parametrize("name", AUGMENT)
def test_it_commutes_with_normalization_and_does_not_depend_on_the_batch(name: str) -> None:
    found = changed(name)
    torch.testing.assert_close(changed(name, (IMAGES - 0.3) / 0.2), (found - 0.3) / 0.2, atol=1e-5, rtol=1e-5)
    rows = torch.tensor([7, 3])
    assert torch.equal(changed(name, IMAGES[rows], SEEDS[rows]), found[rows])
    block = changed(name, IMAGES.view(4, 100, 2, 16, 16), SEEDS.view(4, 100))
    assert torch.equal(block.flatten(0, 1), found)


def ends(block: int = 1, **options: Any) -> Tensors:
    case = make_case("vit-image")
    run = toy_run(fedavg(), 2, SGD(0.9), **{"augment": AUGMENT, **options})
    return final_params(play(run, case.model, ThreeClients(case), block=block))


@pytest.mark.slow
def test_blocks_and_accumulated_batches_have_the_same_images() -> None:
    alone = ends()
    assert max_difference(alone, ends()) == 0
    assert max_relative_difference(ends(block=3), alone) < 1e-4
    assert max_relative_difference(ends(batch_size=2, accumulate=2), alone) < 1e-4
    assert max_difference(alone, ends(augment=())) > 1e-4


def test_impossible_settings_are_refused() -> None:
    assert {*MOVES, *CHANGES, "randaugment"} == {*AUGMENT}
    with pytest.raises(OptionError, match=r"training.augment is \('flipp',\); it must be a list, each 'flip' or"):
        Training(augment=("flipp",))  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"training.augment is for images, but the inputs are x"):
        play(toy_run(fedavg(), 1, augment=("flip",)), toy_model(), Clients(a=4))
