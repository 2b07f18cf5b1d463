"""Augmented images: what each change does, and what its draws depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architecture_fixtures import ThreeClients, make_case
from graph_fixtures import max_relative_difference
from helpers import Clients, final_params, max_difference, play, small_config, toy_model, toy_run
from torch import Tensor

from partita.core.data import EXAMPLE_SEEDS, Batch
from partita.core.keyed_bits import example_seeds
from partita.core.optim import SGD
from partita.core.rng import Key
from partita.core.settings import AUGMENT, RunError, Training
from partita.core.tensors import Tensors
from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.methods.fedavg import fedavg
from partita.training.augmentation import AUGMENTATIONS, PIXELS, augment

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


def test_blocks_and_accumulated_batches_have_the_same_images() -> None:
    alone = ends()
    assert max_difference(alone, ends()) == 0
    assert max_relative_difference(ends(block=3), alone) < 1e-4
    assert max_relative_difference(ends(batch_size=2, accumulate=2), alone) < 1e-4
    assert max_difference(alone, ends(augment=())) > 1e-4


def test_impossible_settings_are_refused() -> None:
    assert tuple(AUGMENTATIONS) == AUGMENT
    with pytest.raises(RunError, match=r"training.augment has 'flipp'; did you mean 'flip'"):
        Training(0.1, augment=("flipp",))
    with pytest.raises(RunError, match=r"training.augment is for images, but the inputs are x"):
        play(toy_run(fedavg(), 1, augment=("flip",)), toy_model(), Clients(a=4))
    raw = small_config("fedavg", 1)
    config = parse({"method": {"name": "fedavg"}, "training": {"augment": ["flip"]}, "data": raw.data,
                    "model": raw.model, "split": raw.split, "engine": {"cache_frozen": True}})  # fmt: skip
    with pytest.raises(RunError, match=r"training.augment and engine.cache_frozen are both set"):
        build(config)
