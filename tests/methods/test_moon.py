"""MOON against a plain loop with the paper's loss written as a two-way classification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Clients, client_batches, final_params, max_difference, play, toy_model, toy_run
from torch.nn import functional

from partita.core import tensors
from partita.core.client_rule import Context
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Output
from partita.core.plan import RoundInfo, share_everything
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.methods.fedavg import fedavg
from partita.methods.moon import MoonClient, moon
from partita.testing.toy import Float64Model, Float64Population, ToyTransformer


def test_moon_rounds_match_the_paper() -> None:
    mu, temperature, rate = 2.0, 0.3, 0.2
    model, clients = Float64Model(toy_model()), Float64Population(Clients(a=6, b=6))
    run = toy_run(moon(mu, temperature), 3, lr=rate)
    ours, sent = play(run, model, clients), dict(model.initial)
    last = dict.fromkeys(clients.clients, sent)
    for number in range(3):
        for client in clients.clients:
            live = sent
            for indices in client_batches(run, number, client, clients[client].train):
                live = {name: value.detach().requires_grad_() for name, value in live.items()}
                batch = clients[client].train.take(indices)
                out = model(live, batch.inputs)
                others = [model(other, batch.inputs).features for other in (sent, last[client])]
                logits = torch.stack([functional.cosine_similarity(out.features, z) for z in others], 1) / temperature
                contrast = functional.cross_entropy(logits, torch.zeros(len(indices), dtype=torch.long))
                loss = model.losses(out, batch.targets).mean() + mu * contrast
                gradients = torch.autograd.grad(loss, list(live.values()))
                live = {name: live[name] - rate * gradient for name, gradient in zip(live, gradients, strict=True)}
            last[client] = {name: value.detach() for name, value in live.items()}
        sent = {name: (last["a"][name] + last["b"][name]) / 2 for name in sent}
        assert max_difference(ours[number].server.params, sent) < 1e-12


@pytest.mark.parametrize("names", ["a", "ab"])
def test_moon_contrast_acts_once_a_clients_last_model_differs_from_the_servers(names: str) -> None:
    """The two are equal in the first round, and with a single client in all rounds; then the term has no gradient."""
    model, clients = Float64Model(toy_model()), Float64Population(Clients(**dict.fromkeys(names, 7)))
    without, strong = (play(toy_run(moon(mu), 3, lr=0.2), model, clients) for mu in (0.0, 5.0))
    apart = [max_difference(one.server.params, two.server.params) for one, two in zip(without, strong, strict=True)]
    assert apart[0] < 1e-12
    assert (max(apart) < 1e-12) == (names == "a")
    assert names == "a" or min(apart[1:]) > 1e-3


def test_moon_penalty_ignores_masked_examples() -> None:
    model, data = toy_model(), Clients(a=4)["a"].train
    other = {
        name: value + 0.3 * torch.randn(value.shape, generator=Key(1).generator())
        for name, value in model.initial.items()
    }
    plan = share_everything(model, RoundInfo(0, 1, "a"))
    ctx = Context(model, plan, model.initial, {}, {"last": other}, 0.1)
    rule, live = MoonClient(1.0, 0.5), tensors.scale(other, 0.7)
    whole, padded = data.take(torch.arange(3)), data.take(torch.tensor([0, 1, 2, 0]))
    masked = replace(padded, mask=torch.tensor([1.0, 1.0, 1.0, 0.0]))
    penalties = [rule.penalty(model(live, batch.inputs), live, batch, ctx) for batch in (whole, masked, padded)]
    torch.testing.assert_close(penalties[0], penalties[1])
    assert abs(float(penalties[0]) - float(penalties[2])) > 1e-3, "the example that is repeated does matter"


def test_moon_with_mu_zero_is_fedavg_bit_for_bit() -> None:
    clients = Clients(a=5, b=9, c=6)
    one, two = (play(toy_run(method, 3, cohort=2), toy_model(), clients) for method in (moon(mu=0.0), fedavg()))
    assert tensors.equal(final_params(one), final_params(two))


class ModelWithoutFeatures(ToyTransformer):
    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(super().__call__(params, inputs).logits)


def test_moon_refuses_a_model_without_features() -> None:
    with pytest.raises(MethodError, match="moon compares features, and tiny attention gives none"):
        play(toy_run(moon()), ModelWithoutFeatures(width=4, layers=1), Clients(a=5))


@pytest.mark.parametrize("make", [lambda: moon(-1.0), lambda: moon(1.0, 0.0)])
def test_moon_refuses_invalid_options(make: object) -> None:
    with pytest.raises(MethodError, match=r"method.mu is"):
        _: Method = make()  # type: ignore[operator]
