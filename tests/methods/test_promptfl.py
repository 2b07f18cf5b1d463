"""PromptFL: only the context is trained and sent."""

from __future__ import annotations

from typing import Literal

import image_fixtures
import torch
from helpers import last, play, run_of

from partita.core import tensors
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import SGD
from partita.core.plan import RoundInfo, plan_for, share
from partita.core.rng import Key
from partita.methods.promptfl import promptfl, share_global


def extended(method: Method, dtype: Literal["float32", "float64"] = "float32") -> Model:
    assert method.extend
    return method.extend(image_fixtures.towers(dtype), Key(4))


def test_only_the_context_trains_and_travels() -> None:
    method = promptfl(text_tokens=3)
    model = extended(method)
    plan = plan_for(method.plan, model, RoundInfo(0, 5, "a"))
    assert plan == share(frozenset({"prompt.text.global"}), down=frozenset({"prompt.text.global"}))


def test_a_step_of_all_clients_is_a_step_on_all_their_data() -> None:
    """With one full batch per client, the mean update equals a step on the pooled examples."""
    method = promptfl(text_tokens=3)
    model = extended(method, "float64")
    [played] = play(run_of(method, 1, SGD(), lr=0.1, batch_size=100), model, image_fixtures.FOUR)
    params = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
    parts = [image_fixtures.FOUR.parts[client] for client in image_fixtures.FOUR.clients]
    out = model(params, {"pixel_values": torch.cat([part.pixels for part in parts])})
    model.losses(out, torch.cat([part.labels for part in parts])).mean().backward()
    context = params["prompt.text.global"]
    assert context.grad is not None
    assert context.grad.abs().max() > 1e-4
    expected = context.detach() - 0.1 * context.grad
    assert torch.allclose(played.server.params["prompt.text.global"], expected, atol=1e-7)


def test_a_phrase_is_where_it_starts() -> None:
    one, other = extended(promptfl(text_tokens=2, init_text="photo of")), extended(promptfl(text_tokens=2))
    words = image_fixtures.towers("float32").embed(["photo of"])[0][0, 1:-1]
    assert torch.equal(one.initial["prompt.text.global"], words)
    assert not torch.equal(other.initial["prompt.text.global"], words)


def test_blocks_of_float32_towers_agree_with_single_clients() -> None:
    method = promptfl(text_tokens=3)
    run = run_of(method, 2, SGD(momentum=0.9))
    one, two = (last(play(run, extended(method), image_fixtures.FOUR, block=block)) for block in (1, 4))
    assert tensors.norm(tensors.subtract(one, two)) < 1e-6 * tensors.norm(one)


def test_momentum_goes_on_from_round_to_round() -> None:
    assert image_fixtures.momentum_goes_on(promptfl(text_tokens=2))


def test_what_is_a_clients_own_trains_and_stays() -> None:
    """The shared plan of methods with local prompts."""
    model = image_fixtures.towers("float32").prompted(
        "prompts", Key(4), text_tokens=2, owners=("global", "local"), fusion="none"
    )
    plan = plan_for(share_global, model, RoundInfo(0, 5, "a"))
    shared, own = frozenset({"prompt.text.global"}), frozenset({"prompt.text.local"})
    assert (plan.train, plan.up, plan.down, plan.keep) == (shared | own, shared, shared, own)
