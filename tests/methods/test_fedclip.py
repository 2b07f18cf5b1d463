"""FedCLIP: the adapter."""

from __future__ import annotations

import image_fixtures
import torch
from torch import nn

from partita.core.model import Model
from partita.core.plan import RoundInfo, plan_for
from partita.core.rng import Key
from partita.methods.fedclip import fedclip

INPUTS = {"pixel_values": image_fixtures.pictures(5, seed=9).pixels}


def extended() -> Model:
    method = fedclip()
    assert method.extend
    return method.extend(image_fixtures.towers("float32"), Key(4))


def test_the_adapter_is_that_of_the_authors_code() -> None:
    model, towers = extended(), image_fixtures.towers("float32")
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


def test_where_all_entries_weigh_the_same_it_answers_as_the_towers() -> None:
    model, towers = extended(), image_fixtures.towers("float32")
    even = {name: torch.zeros_like(value) if ".out." in name else value for name, value in model.initial.items()}
    assert torch.allclose(model(even, INPUTS).logits, towers(towers.initial, INPUTS).logits, atol=1e-5)


def test_the_adapter_travels_whole() -> None:
    model = extended()
    plan = plan_for(fedclip().plan, model, RoundInfo(0, 3, "a"))
    assert plan.train == plan.up == plan.down == model.names("adapter")
    assert len(plan.up) == 4
    assert not plan.keep


def test_momentum_goes_on_from_round_to_round() -> None:
    assert image_fixtures.momentum_goes_on(fedclip())
