"""Vision-prompt FL: only the vision prompts are trained and sent."""

from __future__ import annotations

import image_fixtures
import torch
from helpers import final_params, play, toy_run

from partita.core import tensors
from partita.core.plan import RoundInfo, plan_for
from partita.core.rng import Key
from partita.methods.pfeddc import pfeddc
from partita.methods.vpfl import vpfl


def test_vpfl_trains_and_sends_only_vision_prompts() -> None:
    method = vpfl(vision_tokens=3, depth=2)
    assert method.extend
    model = method.extend(image_fixtures.tiny_clip(), Key(4))
    plan = plan_for(method.plan, model, RoundInfo(0, 5, "a"))
    assert plan.train == plan.up == plan.down == {"prompt.vision.global"}
    assert not plan.keep
    assert model.initial["prompt.vision.global"].shape == (2, 3, 32)
    after = final_params(play(toy_run(method, 2), model, image_fixtures.FOUR))["prompt.vision.global"]
    for layer in range(2):
        assert not torch.equal(after[layer], model.initial["prompt.vision.global"][layer]), "each layer learns its own"


def test_vpfl_without_prompts_answers_like_clip() -> None:
    method = vpfl(vision_tokens=0)
    assert method.extend
    towers = image_fixtures.tiny_clip()
    model = method.extend(towers, Key(4))
    inputs = {"pixel_values": image_fixtures.random_images(6).pixels}
    assert torch.equal(model(model.initial, inputs).logits, towers(towers.initial, inputs).logits)


def test_vpfl_prompts_start_from_a_gray_image() -> None:
    one, other = (
        vpfl(vision_tokens=2, vision_init=view).extend(image_fixtures.tiny_clip(), Key(4))
        for view in ("gray", "nothing")
    )  # type: ignore[misc]
    [name] = one.names("prompt")
    assert torch.allclose(
        one.initial[name] - other.initial[name], image_fixtures.tiny_clip().gray_image_states(2, 1).float(), atol=1e-6
    )


def test_vpfl_and_pfeddc_start_gray_unless_told_otherwise() -> None:
    towers = image_fixtures.tiny_clip()
    for method in (vpfl, pfeddc):
        plain, gray, nothing = (
            each.extend(towers, Key(4)).initial  # type: ignore[misc]
            for each in (method(), method(vision_init="gray"), method(vision_init="nothing"))
        )
        assert tensors.equal(plain, gray)
        assert not tensors.equal(plain, nothing)


def test_vpfl_clients_keep_momentum_between_rounds() -> None:
    assert image_fixtures.clients_keep_momentum(vpfl(vision_tokens=2))
