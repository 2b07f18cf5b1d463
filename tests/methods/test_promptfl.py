"""PromptFL: only the context is trained and sent."""

from __future__ import annotations

from typing import Literal

import image_fixtures
import torch
from helpers import final_params, play, toy_run

from partita.core import tensors
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import SGD
from partita.core.plan import RoundInfo, plan_for, share
from partita.core.rng import Key
from partita.methods.promptfl import promptfl, share_global


def prompted_model(method: Method, dtype: Literal["float32", "float64"] = "float32") -> Model:
    assert method.extend
    return method.extend(image_fixtures.tiny_clip(dtype), Key(4))


def test_promptfl_trains_and_sends_only_the_context() -> None:
    method = promptfl(text_tokens=3)
    model = prompted_model(method)
    plan = plan_for(method.plan, model, RoundInfo(0, 5, "a"))
    assert plan == share(frozenset({"prompt.text.global"}), down=frozenset({"prompt.text.global"}))


def test_promptfl_full_batch_round_equals_a_step_on_pooled_data() -> None:
    """With one full batch per client, the mean update equals a step on the pooled examples."""
    method = promptfl(text_tokens=3)
    model = prompted_model(method, "float64")
    [played] = play(toy_run(method, 1, SGD(), lr=0.1, batch_size=100), model, image_fixtures.FOUR)
    params = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
    parts = [image_fixtures.FOUR.parts[client] for client in image_fixtures.FOUR.clients]
    out = model(params, {"pixel_values": torch.cat([part.pixels for part in parts])})
    model.losses(out, torch.cat([part.labels for part in parts])).mean().backward()
    context = params["prompt.text.global"]
    assert context.grad is not None
    assert context.grad.abs().max() > 1e-4
    expected = context.detach() - 0.1 * context.grad
    assert torch.allclose(played.server.params["prompt.text.global"], expected, atol=1e-7)


def test_promptfl_context_starts_from_init_text() -> None:
    one, other = prompted_model(promptfl(text_tokens=2, init_text="photo of")), prompted_model(promptfl(text_tokens=2))
    words = image_fixtures.tiny_clip("float32").embed(["photo of"])[0][0, 1:-1]
    assert torch.equal(one.initial["prompt.text.global"], words)
    assert not torch.equal(other.initial["prompt.text.global"], words)


def test_promptfl_blocks_in_float32_agree_with_single_clients() -> None:
    method = promptfl(text_tokens=3)
    run = toy_run(method, 2, SGD(momentum=0.9))
    one, two = (final_params(play(run, prompted_model(method), image_fixtures.FOUR, block=block)) for block in (1, 4))
    assert tensors.norm(tensors.subtract(one, two)) < 1e-6 * tensors.norm(one)


def test_promptfl_clients_keep_momentum_between_rounds() -> None:
    assert image_fixtures.clients_keep_momentum(promptfl(text_tokens=2))


def test_share_global_trains_local_prompts_without_sending_them() -> None:
    """The shared plan of methods with local prompts."""
    model = image_fixtures.tiny_clip("float32").prompted(
        "prompts", Key(4), text_tokens=2, owners=("global", "local"), fusion="none"
    )
    plan = plan_for(share_global, model, RoundInfo(0, 5, "a"))
    shared, own = frozenset({"prompt.text.global"}), frozenset({"prompt.text.local"})
    assert (plan.train, plan.up, plan.down, plan.keep) == (shared | own, shared, shared, own)
