"""CoOp: each client alone, as plain torch would train it."""

from __future__ import annotations

import image_fixtures
import pytest
import torch
from helpers import client_batches, toy_run

from partita.core.optim import SGD
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.engines.simulation import SimulationEngine
from partita.methods.coop import coop

NAME = "prompt.text.local"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_coop_client_equals_a_torch_sgd_loop_over_all_rounds(momentum: float) -> None:
    method = coop(text_tokens=2)
    assert method.extend
    model = method.extend(image_fixtures.tiny_clip("float32"), Key(4))
    run = toy_run(method, 3, SGD(momentum=momentum))
    engine = SimulationEngine(run, model, image_fixtures.FOUR)
    played = list(rounds(run, model, engine))
    assert all(not each.traffic.up and not each.traffic.down for each in played)
    for client in image_fixtures.FOUR.clients:
        examples = image_fixtures.FOUR.parts[client]
        context = model.initial[NAME].clone().requires_grad_()
        optimizer = torch.optim.SGD([context], run.training.lr, momentum=momentum)
        for number in range(3):
            for indices in client_batches(run, number, client, examples):
                batch = examples.take(indices)
                optimizer.zero_grad()
                out = model({**model.initial, NAME: context}, batch.inputs)
                model.losses(out, batch.targets).mean().backward()
                optimizer.step()
        assert torch.equal(engine.store.load(client, 3).personal[NAME], context.detach())


def test_coop_context_starts_from_init_text() -> None:
    words = image_fixtures.tiny_clip("float32").embed(["photo of"])[0][0, 1:-1]
    for phrase, same in (("photo of", True), ("", False)):
        method = coop(text_tokens=2, init_text=phrase)
        assert method.extend
        assert torch.equal(method.extend(image_fixtures.tiny_clip("float32"), Key(4)).initial[NAME], words) == same
