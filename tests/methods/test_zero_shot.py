"""Zero-shot: the loaded model is evaluated unchanged."""

from __future__ import annotations

import image_fixtures
from helpers import final_params, play, toy_run

from partita.core import tensors
from partita.methods.fedavg import fedavg
from partita.methods.zero_shot import zero_shot


def test_zero_shot_sends_nothing_and_keeps_the_model() -> None:
    model = image_fixtures.tiny_clip()
    played = play(toy_run(zero_shot(), 2), model, image_fixtures.FOUR)
    assert all(not each.traffic.up and not each.traffic.down and each.loss is None for each in played)
    assert tensors.equal(final_params(played), model.initial)
    still = toy_run(fedavg(), 2, lr=1e-45)
    assert tensors.equal(final_params(play(still, model, image_fixtures.FOUR)), final_params(played))


def test_zero_shot_accepts_any_model() -> None:
    model = image_fixtures.small_vit()
    assert tensors.equal(
        final_params(play(toy_run(zero_shot(), 1), model, image_fixtures.FOUR, block=4)), model.initial
    )
