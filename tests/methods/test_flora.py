"""FLoRA aggregates the exact mean of products, where LoRA aggregates a product of means."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import play, toy_run
from image_fixtures import FOUR, ImageClients, low_rank_vit, random_images, small_vit
from torch import Tensor

from partita.core import tensors
from partita.core.client import Job
from partita.core.method import Method
from partita.core.plan import share
from partita.core.rng import Key
from partita.core.rounds import ClientFailure, RoundResult, initial_server, rounds
from partita.core.tensors import Tensors
from partita.core.update import Aggregate, Update
from partita.engines.simulation import SimulationEngine
from partita.methods.flora import flora
from partita.models import ModelError

MODEL = low_rank_vit()
# Away from the initialization of transformers, where the factors of the queries may hardly move.
for name, value in MODEL.initial.items():
    if ".lora_" not in name:
        MODEL.initial[name] = value + torch.randn(value.shape, generator=(Key(3) / name).generator())
INPUTS = {"pixel_values": random_images(6, seed=9).pixels}
FLORA = flora(rank=2, alpha=3.0)
LORA = Method("lora", plan=lambda model, round_info: share(train := model.names("lora", "head"), down=train))
LAYERS = ("vit.layers.0.attention.q_proj", "vit.layers.0.attention.v_proj")


@dataclass
class RecordingEngine:
    """An engine that records the updates of its clients."""

    engine: SimulationEngine
    sent: list[Update] = field(default_factory=list)

    def clients(self) -> Any:
        return self.engine.clients()

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | ClientFailure]:
        for reply in self.engine.train(jobs):
            assert isinstance(reply, Update)
            self.sent.append(reply)
            yield reply

    def evaluate(self, jobs: Iterable[Job]) -> Any:
        raise NotImplementedError


def play_one_round(method: Method, clients: ImageClients) -> tuple[RoundResult, list[Update]]:
    """One round of many steps, so that the factors of clients are far apart."""
    run = toy_run(method, 1, lr=1.0, steps=12)
    tap = RecordingEngine(SimulationEngine(run, MODEL, clients))
    return next(iter(rounds(run, MODEL, tap))), tap.sent


def factor_product(params: Tensors, layer: str) -> Tensor:
    A, B = (params[f"{layer}.{factor}.weight"].double() for factor in ("lora_A", "lora_B"))
    return 3.0 / 2 * B @ A


def relative_distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm())


def test_flora_aggregates_the_mean_of_products() -> None:
    one, sent = play_one_round(FLORA, FOUR)
    other, same = play_one_round(LORA, FOUR)
    assert all(tensors.equal(left.delta, right.delta) for left, right in zip(sent, same, strict=True))
    total = sum(update.weight for update in sent)
    for layer in LAYERS:
        exact = sum(
            factor_product(tensors.add(MODEL.initial, each.delta), layer) * each.weight / total for each in sent
        )
        assert isinstance(exact, Tensor)
        added = one.server.params[f"{layer}.weight"].double() - MODEL.initial[f"{layer}.weight"].double()
        assert relative_distance(added, exact) < 1e-5
        assert relative_distance(factor_product(other.server.params, layer), exact) > 1e-3


def test_flora_equals_stacking_as_in_the_paper() -> None:
    one, sent = play_one_round(FLORA, FOUR)
    total = sum(update.weight for update in sent)
    clients = [tensors.add(MODEL.initial, each.delta) for each in sent]
    for layer in LAYERS:
        B = torch.cat([each[f"{layer}.lora_B.weight"] for each in clients], 1)  # (out, client x rank)
        shares = [each.weight / total for each in sent]
        A = torch.cat([p * each[f"{layer}.lora_A.weight"] for p, each in zip(shares, clients, strict=True)])
        after = MODEL.initial[f"{layer}.weight"] + 3.0 / 2 * B @ A
        assert torch.allclose(one.server.params[f"{layer}.weight"], after, rtol=0, atol=1e-5)


def test_flora_with_one_client_merges_its_model_into_the_base() -> None:
    one, [update] = play_one_round(FLORA, ImageClients(a=9))
    own, params = tensors.add(MODEL.initial, update.delta), one.server.params
    merged = MODEL.merged(own)
    assert tensors.equal({name: params[name] for name in merged}, merged)
    assert torch.allclose(MODEL(params, INPUTS).logits, MODEL(own, INPUTS).logits, rtol=0, atol=1e-5)
    assert not torch.allclose(MODEL(params, INPUTS).logits, MODEL(MODEL.initial, INPUTS).logits, atol=1e-2)


def test_flora_uploads_and_head_equal_lora() -> None:
    (one, _), (other, _) = play_one_round(FLORA, FOUR), play_one_round(LORA, FOUR)
    head = MODEL.names("head")
    assert tensors.equal(tensors.select(one.server.params, head), tensors.select(other.server.params, head))
    assert one.traffic.up == other.traffic.up
    assert one.loss == other.loss


def test_flora_draws_new_factors_every_round() -> None:
    A, B = (f"{LAYERS[0]}.{factor}.weight" for factor in ("lora_A", "lora_B"))
    servers = [each.server for each in play(toy_run(FLORA, 3), MODEL, FOUR)]
    drawn = [MODEL.initial[A], *(server.params[A] for server in servers)]
    for place, value in enumerate(drawn):
        assert -0.5 <= value.min() < -0.2
        assert 0.2 < value.max() <= 0.5
        assert not any(torch.equal(value, other) for other in drawn[:place])
    assert all(server.params[B] is MODEL.initial[B] for server in servers)
    assert [int(server.state["flora"]["rounds"]) for server in servers] == [1, 2, 3]
    one, two = (servers[0].params[f"{layer}.lora_A.weight"] for layer in LAYERS)
    assert not torch.equal(one, two), "each layer has its own"
    again, other = (play(toy_run(flora(2, 3.0, seed=draw), 1), MODEL, FOUR)[0].server for draw in (0, 1))
    assert torch.equal(again.params[A], drawn[1])
    assert not torch.equal(other.params[A], drawn[1])
    assert tensors.equal({**again.params, A: drawn[0]}, {**servers[0].params, A: drawn[0]})


def test_flora_sends_the_base_every_round_and_zero_factors_once() -> None:
    first, second = play(toy_run(FLORA, 2), MODEL, FOUR)
    for layer in LAYERS:
        for each in (first, second):
            assert each.traffic.down[f"{layer}.weight"] == len(FOUR.clients) * 4 * 4 * 4
            assert f"{layer}.weight" not in each.traffic.up
        assert f"{layer}.lora_B.weight" in first.traffic.down
        assert f"{layer}.lora_B.weight" not in second.traffic.down


def test_flora_round_without_updates_changes_nothing() -> None:
    before = initial_server(toy_run(FLORA), MODEL)
    after = FLORA.server_rule.apply(before, Aggregate({}, {}, 0))
    assert all(after.params[name] is value for name, value in before.params.items())


def test_flora_uses_the_server_factor_when_one_was_not_sent() -> None:
    server, B = initial_server(toy_run(FLORA), MODEL), torch.ones(4, 2)
    half = Update("a", {f"{LAYERS[0]}.lora_B.weight": B}, {}, 1.0, {}, None)
    delta = FLORA.server_rule.reduce(server, [half], 1).delta
    expected = 1.5 * (B @ MODEL.initial[f"{LAYERS[0]}.lora_A.weight"])
    assert tensors.equal(delta, {f"{LAYERS[0]}.weight": expected})


def test_flora_does_not_hold_streamed_updates() -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def updates() -> Iterator[Update]:
        for _ in range(40):
            delta = {name: torch.ones_like(MODEL.initial[name]) for name in MODEL.names("lora", "head")}
            alive.update(delta.values())
            assert len(alive) <= 3 * len(delta)
            yield Update("a", delta, {}, 1.0, {}, None)

    assert FLORA.server_rule.reduce(initial_server(toy_run(FLORA), MODEL), updates(), 40).cohort == 40


def test_flora_result_can_only_be_saved_merged(tmp_path: Path) -> None:
    params = play_one_round(FLORA, FOUR)[0].server.params
    with pytest.raises(ModelError, match="use save_merged"):
        MODEL.save_pretrained(params, tmp_path)
    merged = MODEL.merged(params)
    assert torch.equal(small_vit()(merged, INPUTS).logits, MODEL(params, INPUTS).logits)
