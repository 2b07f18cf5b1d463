"""pFedDC: its reductions to other methods, and what it sends."""

from __future__ import annotations

from typing import Any

import image_fixtures
import pytest
import torch
from helpers import last, play, run_of

from partita.core import tensors
from partita.core.client import ClientState
from partita.core.method import Method, MethodError
from partita.core.model import Model
from partita.core.optim import SGD
from partita.core.plan import RoundInfo, plan_for
from partita.core.rng import Key
from partita.core.rounds import RoundResult, rounds
from partita.engines.simulation import SimulationEngine
from partita.methods import build
from partita.methods.pfeddc import pfeddc
from partita.methods.promptfl import promptfl
from partita.methods.vpfl import vpfl

INPUTS = {"pixel_values": image_fixtures.pictures(6, seed=9).pixels}


def extended(method: Method) -> Model:
    assert method.extend
    return method.extend(image_fixtures.towers("float32"), Key(4))


def played(method: Method) -> list[RoundResult]:
    return play(run_of(method, 3, SGD(momentum=0.9), cohort=0.5), extended(method), image_fixtures.FOUR, block=2)


def alike(one: Method, two: Method) -> bool:
    pairs = list(zip(played(one), played(two), strict=True))
    same = all(tensors.equal(left.server.params, right.server.params) for left, right in pairs)
    return same and all(left.traffic == right.traffic for left, right in pairs)


def test_without_own_prompts_and_vision_it_is_promptfl() -> None:
    assert alike(pfeddc(text_tokens=3, vision_tokens=0, local=False), promptfl(text_tokens=3))
    assert not alike(pfeddc(text_tokens=3, vision_tokens=0), promptfl(text_tokens=3))


def test_without_own_prompts_and_text_it_is_vpfl() -> None:
    assert alike(pfeddc(text_tokens=0, vision_tokens=3, depth=2, local=False), vpfl(vision_tokens=3, depth=2))


def test_without_own_prompts_it_is_federated_prompts_in_both_towers() -> None:
    """The same initial prompts as promptfl and vpfl, all of them shared."""
    model, text, vision = (extended(each) for each in (pfeddc(3, 2, local=False), promptfl(3), vpfl(2)))
    assert tensors.equal(model.initial, {**text.initial, **vision.initial})
    method = pfeddc(3, 2, local=False)
    plan = plan_for(method.plan, model, RoundInfo(0, 3, "a"))
    assert plan.train == plan.up == plan.down == {"prompt.text.global", "prompt.vision.global"}
    assert not plan.keep


def test_without_fusion_it_is_promptfl_with_a_longer_context_of_which_half_is_kept() -> None:
    model, longer = extended(pfeddc(text_tokens=2, vision_tokens=0, fusion="none")), extended(promptfl(text_tokens=4))
    own, shared = (model.initial[f"prompt.text.{owner}"] for owner in ("local", "global"))
    both = {**longer.initial, "prompt.text.global": torch.cat([shared, own])}
    assert torch.equal(model(model.initial, INPUTS).logits, longer(both, INPUTS).logits)

    # And the first step of training is the same step.
    def stepped(method: Method, model: Model) -> tuple[ClientState, RoundResult]:
        run = run_of(method, 1, SGD(), lr=0.5, steps=1)
        engine = SimulationEngine(run, model, image_fixtures.Albums(a=4))
        [only] = list(rounds(run, model, engine))
        return engine.store.load("a", 1), only

    state, one = stepped(pfeddc(text_tokens=2, vision_tokens=0, fusion="none"), model)
    longer.initial.update(both)
    _, two = stepped(promptfl(text_tokens=4), longer)
    after = two.server.params["prompt.text.global"]
    assert torch.equal(one.server.params["prompt.text.global"], after[:2])
    # Sent values are rounded twice, as a difference and as a sum; kept values are not.
    assert torch.allclose(state.personal["prompt.text.local"], after[2:], rtol=0, atol=1e-8)
    assert not torch.equal(after[2:], own)


@pytest.mark.parametrize("fusion", ["local_queries", "global_queries", "both", "mean", "none"])
def test_only_shared_prompts_travel(fusion: Any) -> None:
    method = pfeddc(text_tokens=2, vision_tokens=2, fusion=fusion)
    model = extended(method)
    plan = plan_for(method.plan, model, RoundInfo(0, 3, "a"))
    assert plan.up == plan.down == model.names("global")
    assert plan.keep == model.all_names() - model.names("global") - {"logit_scale"}
    assert plan.train == plan.up | plan.keep
    [only] = play(run_of(method, 1), model, image_fixtures.FOUR)
    assert model.names("global") <= set(only.traffic.up)
    assert not set(only.traffic.up) & plan.keep


@pytest.mark.parametrize("fusion", ["local_queries", "global_queries", "both"])
def test_all_that_trains_has_a_gradient_once_the_output_has_left_zero(fusion: Any) -> None:
    model = extended(pfeddc(text_tokens=2, vision_tokens=2, depth=2, fusion=fusion))
    draws = {
        name: torch.randn(value.shape, generator=(Key(1) / name).generator()) for name, value in model.initial.items()
    }
    params = {name: (value + 0.3 * draws[name]).requires_grad_() for name, value in model.initial.items()}
    out = model(params, INPUTS)
    model.losses(out, torch.zeros(6, dtype=torch.long)).sum().backward()
    for name, value in params.items():
        assert value.grad is not None, name
        assert value.grad.abs().max() > 1e-9, name


def test_own_prompts_of_clients_part_ways() -> None:
    method = pfeddc(text_tokens=2, vision_tokens=2)
    model = extended(method)
    run = run_of(method, 2)
    engine = SimulationEngine(run, model, image_fixtures.FOUR)
    params = last(list(rounds(run, model, engine)))
    own = [engine.store.load(client, 2).personal for client in image_fixtures.FOUR.clients]
    for name in model.names("local"):
        values = [each[name] for each in own]
        assert all(not torch.equal(values[0], other) for other in values[1:])
        assert torch.equal(params[name], model.initial[name]), "the server has not seen them"


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(MethodError, match="no prompts with text_tokens = 0 and vision_tokens = 0; use zero-shot"):
        pfeddc(text_tokens=0, vision_tokens=0)
    with pytest.raises(ValueError, match=r"method\.fusion is 'locl'; it must be 'local_queries' or"):
        build("pfeddc", {"fusion": "locl"})
