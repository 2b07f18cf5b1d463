"""Vision-prompt FL: only the vision prompts are trained and sent."""

from __future__ import annotations

import image_fixtures
import torch
from helpers import last, play, run_of

from partita.core.plan import RoundInfo, plan_for
from partita.core.rng import Key
from partita.methods.vpfl import vpfl


def test_only_the_prompts_of_images_train_and_travel() -> None:
    method = vpfl(vision_tokens=3, depth=2)
    assert method.extend
    model = method.extend(image_fixtures.towers(), Key(4))
    plan = plan_for(method.plan, model, RoundInfo(0, 5, "a"))
    assert plan.train == plan.up == plan.down == {"prompt.vision.global"}
    assert not plan.keep
    assert model.initial["prompt.vision.global"].shape == (2, 3, 32)
    after = last(play(run_of(method, 2), model, image_fixtures.FOUR))["prompt.vision.global"]
    for layer in range(2):
        assert not torch.equal(after[layer], model.initial["prompt.vision.global"][layer]), "each layer learns its own"


def test_without_prompts_it_answers_as_the_towers_do() -> None:
    method = vpfl(vision_tokens=0)
    assert method.extend
    towers = image_fixtures.towers()
    model = method.extend(towers, Key(4))
    inputs = {"pixel_values": image_fixtures.pictures(6).pixels}
    assert torch.equal(model(model.initial, inputs).logits, towers(towers.initial, inputs).logits)


def test_a_view_is_where_it_starts() -> None:
    one, other = (
        vpfl(vision_tokens=2, vision_init=view).extend(image_fixtures.towers(), Key(4)) for view in ("grey", "nothing")
    )  # type: ignore[misc]
    [name] = one.names("prompt")
    assert torch.allclose(
        one.initial[name] - other.initial[name], image_fixtures.towers().gray_image_states(2, 1).float(), atol=1e-6
    )


def test_momentum_goes_on_from_round_to_round() -> None:
    assert image_fixtures.momentum_goes_on(vpfl(vision_tokens=2))
