"""Zero-shot: the loaded model is evaluated unchanged."""

from __future__ import annotations

import image_fixtures
from helpers import last, play, run_of

from partita.core import tensors
from partita.methods.fedavg import fedavg
from partita.methods.zero_shot import zero_shot


def test_it_is_fedavg_without_a_step() -> None:
    model = image_fixtures.towers()
    played = play(run_of(zero_shot(), 2), model, image_fixtures.FOUR)
    assert all(not each.traffic.up and not each.traffic.down and each.loss is None for each in played)
    assert tensors.equal(last(played), model.initial)
    still = run_of(fedavg(), 2, lr=1e-45)
    assert tensors.equal(last(play(still, model, image_fixtures.FOUR)), last(played))


def test_it_takes_any_model() -> None:
    model = image_fixtures.small()
    assert tensors.equal(last(play(run_of(zero_shot(), 1), model, image_fixtures.FOUR, block=4)), model.initial)
