"""FedCLIP: the adapter."""

from __future__ import annotations

import image_fixtures
import torch
from torch import nn

from partita.core.model import Model
from partita.core.plan import RoundInfo, plan_for
from partita.core.rng import Key
from partita.methods.fedclip import fedclip

INPUTS = {"pixel_values": image_fixtures.random_images(5, seed=9).pixels}


def fedclip_model() -> Model:
    method = fedclip()
    assert method.extend
    return method.extend(image_fixtures.tiny_clip("float32"), Key(4))


def test_fedclip_adapter_matches_the_authors_code() -> None:
    model, towers = fedclip_model(), image_fixtures.tiny_clip("float32")
    image = towers.encode_image(INPUTS["pixel_values"])[:, 0]
    layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softmax(dim=1))
    state = {
        f"{place}.{leaf}": model.initial[f"adapter.{part}.{leaf}"]
        for place, part in ((0, "in"), (2, "out"))
        for leaf in ("weight", "bias")
    }
    layers.load_state_dict(state)
    weighed = layers(image) * image
    weighed = weighed / weighed.norm(dim=1, keepdim=True)
    texts = towers.precomputed["texts"] / towers.precomputed["texts"].norm(dim=1, keepdim=True)
    expected = model.initial["logit_scale"].exp() * weighed @ texts.T
    assert torch.allclose(model(model.initial, INPUTS).logits, expected, atol=1e-5)
    assert all(0.15 < value.abs().max() <= 0.25 for name, value in model.initial.items() if name.startswith("adapter"))


def test_fedclip_with_a_uniform_adapter_answers_like_clip() -> None:
    model, towers = fedclip_model(), image_fixtures.tiny_clip("float32")
    even = {name: torch.zeros_like(value) if ".out." in name else value for name, value in model.initial.items()}
    assert torch.allclose(model(even, INPUTS).logits, towers(towers.initial, INPUTS).logits, atol=1e-5)


def test_fedclip_trains_and_sends_the_whole_adapter() -> None:
    model = fedclip_model()
    plan = plan_for(fedclip().plan, model, RoundInfo(0, 3, "a"))
    assert plan.train == plan.up == plan.down == model.names("adapter")
    assert len(plan.up) == 4
    assert not plan.keep


def test_fedclip_clients_keep_momentum_between_rounds() -> None:
    assert image_fixtures.clients_keep_momentum(fedclip())
