"""pFedDC: its reductions to other methods, and what it sends."""

from __future__ import annotations

from typing import Any

import dual_encoder_fixtures
import image_fixtures
import pytest
import torch
from helpers import final_params, play, toy_run
from torch import Tensor

from partita.core import tensors
from partita.core.client import ClientState
from partita.core.data import Batch, ClientData
from partita.core.method import Method
from partita.core.method_error import MethodError
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

INPUTS = {"pixel_values": image_fixtures.random_images(6, seed=9).pixels}


def prompted_model(method: Method) -> Model:
    assert method.extend
    return method.extend(image_fixtures.tiny_clip("float32"), Key(4))


def play_method(method: Method) -> list[RoundResult]:
    return play(toy_run(method, 3, SGD(momentum=0.9), cohort=0.5), prompted_model(method), image_fixtures.FOUR, block=2)


def give_equal_runs(one: Method, two: Method) -> bool:
    pairs = list(zip(play_method(one), play_method(two), strict=True))
    same = all(tensors.equal(left.server.params, right.server.params) for left, right in pairs)
    return same and all(left.traffic == right.traffic for left, right in pairs)


def test_pfeddc_without_local_and_vision_prompts_is_promptfl() -> None:
    assert give_equal_runs(pfeddc(text_tokens=3, vision_tokens=0, local=False), promptfl(text_tokens=3))
    assert not give_equal_runs(pfeddc(text_tokens=3, vision_tokens=0), promptfl(text_tokens=3))


def test_pfeddc_without_local_and_text_prompts_is_vpfl() -> None:
    assert give_equal_runs(pfeddc(text_tokens=0, vision_tokens=3, depth=2, local=False), vpfl(vision_tokens=3, depth=2))


def test_pfeddc_without_local_prompts_shares_prompts_in_both_towers() -> None:
    """The same initial prompts as promptfl and vpfl, all of them shared."""
    model, text, vision = (prompted_model(each) for each in (pfeddc(3, 2, local=False), promptfl(3), vpfl(2)))
    assert tensors.equal(model.initial, {**text.initial, **vision.initial})
    method = pfeddc(3, 2, local=False)
    plan = plan_for(method.plan, model, RoundInfo(0, 3, "a"))
    assert plan.train == plan.up == plan.down == {"prompt.text.global", "prompt.vision.global"}
    assert not plan.keep


def test_pfeddc_without_fusion_is_promptfl_with_a_half_kept_context() -> None:
    model, longer = (
        prompted_model(pfeddc(text_tokens=2, vision_tokens=0, fusion="none")),
        prompted_model(promptfl(text_tokens=4)),
    )
    own, shared = (model.initial[f"prompt.text.{owner}"] for owner in ("local", "global"))
    both = {**longer.initial, "prompt.text.global": torch.cat([shared, own])}
    assert torch.equal(model(model.initial, INPUTS).logits, longer(both, INPUTS).logits)

    # And the first step of training is the same step.
    def stepped(method: Method, model: Model) -> tuple[ClientState, RoundResult]:
        run = toy_run(method, 1, SGD(), lr=0.5, steps=1)
        engine = SimulationEngine(run, model, image_fixtures.ImageClients(a=4))
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
def test_pfeddc_sends_only_global_prompts(fusion: Any) -> None:
    method = pfeddc(text_tokens=2, vision_tokens=2, fusion=fusion)
    model = prompted_model(method)
    plan = plan_for(method.plan, model, RoundInfo(0, 3, "a"))
    assert plan.up == plan.down == model.names("global")
    assert plan.keep == model.all_names() - model.names("global") - {"logit_scale"}
    assert plan.train == plan.up | plan.keep
    [only] = play(toy_run(method, 1), model, image_fixtures.FOUR)
    assert model.names("global") <= set(only.traffic.up)
    assert not set(only.traffic.up) & plan.keep


@pytest.mark.parametrize("fusion", ["local_queries", "global_queries", "both"])
def test_pfeddc_gives_every_trained_parameter_a_gradient(fusion: Any) -> None:
    model = prompted_model(pfeddc(text_tokens=2, vision_tokens=2, depth=2, fusion=fusion))
    draws = {
        name: torch.randn(value.shape, generator=(Key(1) / name).generator()) for name, value in model.initial.items()
    }
    params = {name: (value + 0.3 * draws[name]).requires_grad_() for name, value in model.initial.items()}
    out = model(params, INPUTS)
    model.losses(out, torch.zeros(6, dtype=torch.long)).sum().backward()
    for name, value in params.items():
        assert value.grad is not None, name
        assert value.grad.abs().max() > 1e-9, name


def test_pfeddc_local_prompts_differ_between_clients() -> None:
    method = pfeddc(text_tokens=2, vision_tokens=2)
    model = prompted_model(method)
    run = toy_run(method, 2)
    engine = SimulationEngine(run, model, image_fixtures.FOUR)
    params = final_params(list(rounds(run, model, engine)))
    own = [engine.store.load(client, 2).personal for client in image_fixtures.FOUR.clients]
    for name in model.names("local"):
        values = [each[name] for each in own]
        assert all(not torch.equal(values[0], other) for other in values[1:])
        assert torch.equal(params[name], model.initial[name]), "the server has not seen them"


def test_pfeddc_refuses_invalid_options() -> None:
    with pytest.raises(MethodError, match="no prompts with text_tokens = 0 and vision_tokens = 0; use zero-shot"):
        pfeddc(text_tokens=0, vision_tokens=0)
    with pytest.raises(ValueError, match=r"method\.fusion is 'locl'; it must be 'local_queries' or"):
        build("pfeddc", {"fusion": "locl"})


@pytest.mark.slow
def test_pfeddc_trains_the_prompts_of_a_siglip() -> None:
    towers = dual_encoder_fixtures.load_pair("siglip", dtype="float32")
    method = pfeddc(vision_tokens=2, text_tokens=2)
    assert method.extend is not None
    model = method.extend(towers, Key(4))
    population = SiglipClients()
    before = dict(model.initial)
    played = play(toy_run(method, 2, batch_size=2), model, population)
    after = final_params(played)
    shared = [name for name in after if name.startswith("prompt.") and name.endswith(".global")]
    assert len(shared) == 2
    assert all(not torch.equal(after[name], before[name]) for name in shared)
    both = final_params(play(toy_run(method, 2, batch_size=2), model, population, block=2))
    assert max(float((both[name] - value).abs().max()) for name, value in after.items()) < 1e-5


class SiglipClients:
    """Two clients with images of the size of the tiny SigLIP."""

    clients = ("a", "b")

    def __getitem__(self, client: str) -> ClientData:
        examples = _Pictures(self.clients.index(client))
        return ClientData(examples, examples, examples)


class _Pictures:
    def __init__(self, seed: int) -> None:
        self.pixels = dual_encoder_fixtures.images(4, seed).float()

    def __len__(self) -> int:
        return 4

    def take(self, indices: Tensor) -> Batch:
        return Batch({"pixel_values": self.pixels[indices]}, indices % 3)
