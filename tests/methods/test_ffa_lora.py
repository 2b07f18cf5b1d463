"""FFA-LoRA averages products exactly, because all clients have the same A."""

from __future__ import annotations

from typing import Any

import torch
from adapter_fixtures import adapted, clients, updates_of
from helpers import play, toy_run

from partita.core import tensors
from partita.core.method import Method
from partita.methods.fedavg import fedavg
from partita.methods.ffa_lora import ffa_lora


def test_ffa_lora_averages_products_exactly_and_equals_fedavg_with_a_frozen_factor() -> None:
    model, population = adapted("llama-lm"), clients("llama-lm")
    run = toy_run(ffa_lora(), 1, steps=3)
    played = play(run, model, population)
    sent = [reply.delta for reply in updates_of(run, model, population)]
    for name in model.names("lora_B"):
        A = model.initial[name.replace("lora_B", "lora_A")]
        products = [(model.initial[name] + delta[name]).double() @ A.double() for delta in sent]
        mean = played[0].server.params[name].double() @ A.double()
        assert torch.allclose(torch.stack(products).mean(0), mean, atol=1e-6), "all clients have four examples"
        assert played[0].server.params[name.replace("lora_B", "lora_A")] is A
        assert name.replace("lora_B", "lora_A") not in played[0].traffic.down
    plain = Method("frozen A", plan=lambda model, info: fedavg().plan(_Only(model, "lora_B"), info))
    assert tensors.equal(play(toy_run(plain, 1, steps=3), model, population)[0].server.params, played[0].server.params)


class _Only:
    """The names of one tag."""

    def __init__(self, model: Any, tag: str) -> None:
        self.own = model.names(tag)

    def all_names(self) -> frozenset[str]:
        return self.own
