"""FedAdamW against torch.optim.AdamW by hand, its reductions, and what travels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Clients, client_batches, final_params, play, toy_model, toy_run
from torch import Tensor

from partita.core import tensors
from partita.core.method_error import MethodError
from partita.core.optim import SGD, AdamW
from partita.core.rng import Key
from partita.core.server_rule import Server
from partita.core.settings import Run
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.methods import build
from partita.methods.fedadamw import BlockMeans, block_means, fedadamw, spread
from partita.methods.fedavg import fedavg

CLIENTS = Clients(a=22, b=5, c=12)
# With a smaller eps, key biases, whose gradient is rounding error alone, would move at full size.
ADAMW = AdamW(eps=1e-3, weight_decay=0.1)


@pytest.mark.slow
def test_without_its_two_parts_it_is_fedavg_bit_for_bit() -> None:
    one, two = (play(toy_run(method, 3, ADAMW), toy_model(), CLIENTS) for method in (fedadamw(0.0, False), fedavg()))
    assert tensors.equal(final_params(one), final_params(two))
    assert [each.traffic for each in one] == [each.traffic for each in two]


def test_first_round_is_fedavg_bit_for_bit() -> None:
    one, two = (play(toy_run(method, 1, ADAMW), toy_model(), CLIENTS) for method in (fedadamw(), fedavg()))
    assert tensors.equal(final_params(one), final_params(two))


def rows(value: Tensor) -> Tensor:
    """Every element replaced by the mean of its row, or of its vector."""
    return (
        value.flatten(1).mean(1).view(-1, *[1] * (value.ndim - 1)).expand_as(value)
        if value.ndim > 1
        else (value.mean().expand_as(value))
    )


def torch_client(
    run: Run, client: str, number: int, start: Tensors, second: Tensors, age: int, step: Tensors, alpha: float
) -> tuple[Tensors, Tensors, int]:
    """One client's round with torch.optim.AdamW: parameters, second moments and number of steps."""
    model, examples = toy_model(), CLIENTS[client].train
    params = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.AdamW(params.values(), run.training.lr, eps=1e-3, weight_decay=0.1)
    if age:
        for name, value in params.items():
            optimizer.state[value] = {
                "step": torch.tensor(float(age)),
                "exp_avg": torch.zeros_like(value),
                "exp_avg_sq": second[name].clone(),
            }
    batches = client_batches(run, number, client, examples)
    for indices in batches:
        batch = examples.take(indices)
        optimizer.zero_grad()
        model.losses(model(params, batch.inputs), batch.targets).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for name, value in params.items():
                value += alpha * step[name]
    moments = {name: optimizer.state[value]["exp_avg_sq"] for name, value in params.items()}
    return {name: value.detach() for name, value in params.items()}, moments, len(batches)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("alpha", "shared"), [(0.5, True), (0.0, True), (0.8, False)])
def test_rounds_match_torch_optim(alpha: float, shared: bool) -> None:
    run = toy_run(fedadamw(alpha, shared), 3, ADAMW)
    params = dict(toy_model().initial)
    second, step, age = tensors.zeros_like(params), tensors.zeros_like(params), 0
    weights = {client: len(CLIENTS[client].train) for client in CLIENTS.clients}
    total = sum(weights.values())
    for result in play(run, toy_model(), CLIENTS):
        found = {
            client: torch_client(run, client, result.number, params, second, age if shared else 0, step, alpha)
            for client in CLIENTS.clients
        }

        def mean(values: dict[str, Tensor]) -> Tensor:
            return sum((weights[client] * value for client, value in values.items()), torch.zeros(())) / total

        delta = {name: mean({c: own[0][name] - params[name] for c, own in found.items()}) for name in params}
        second = {name: mean({c: rows(own[1][name]) for c, own in found.items()}) for name in params}
        steps = sum(weights[client] * own[2] for client, own in found.items()) / total
        age += round(steps)
        step = {name: value / steps for name, value in delta.items()}
        params = tensors.add(params, delta)
        for name, value in params.items():
            torch.testing.assert_close(result.server.params[name], value, rtol=1e-4, atol=1e-6)
        if shared:
            assert {int(value) for value in result.server.state["age"].values()} == {age}
        params = dict(result.server.params)  # rounding does not add up


def test_a_block_is_a_row_or_a_vector() -> None:
    value = torch.arange(12.0).reshape(2, 3, 2)
    assert block_means(value).tolist() == [2.5, 8.5]
    assert block_means(torch.tensor([1.0, 3.0])).tolist() == 2.0
    assert block_means(torch.tensor(4.0)).tolist() == 4.0
    assert spread(block_means(value), value).tolist() == [[[2.5] * 2] * 3, [[8.5] * 2] * 3]
    assert spread(torch.tensor(2.0), torch.zeros(2)).tolist() == [2.0, 2.0]
    assert spread(torch.tensor(4.0), torch.zeros(())).tolist() == 4.0


def test_only_block_means_travel_up() -> None:
    delta = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    second = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.0, 2.0])}
    sent, kept = BlockMeans().encode(Update("a", delta, {"second": second}, 1.0, {}, None), {}, Key(0))
    assert kept == {}
    assert {name: value.tolist() for name, value in sent.slots["second"].items()} == {"w": [1.0, 4.0], "b": 1.5}
    back = BlockMeans().decode_update(sent).slots["second"]
    assert {name: value.tolist() for name, value in back.items()} == {"w": [[1.0] * 3, [4.0] * 3], "b": [1.5, 1.5]}


def test_names_that_never_trained_start_from_zero() -> None:
    """With FedFrozen, query and key train in the first rounds only; their age stays."""
    run = toy_run(build("fedfrozen+fedadamw", {"warmup": 1}), 3, ADAMW)
    played = play(run, toy_model(), CLIENTS)
    ages = [{name: int(age) for name, age in each.server.state["age"].items()} for each in played]
    frozen = toy_model().names("query", "key")
    assert {ages[0][name] for name in frozen} == {ages[2][name] for name in frozen}
    assert all(ages[2][name] > ages[1][name] for name in ages[2].keys() - frozen)


def test_negative_second_moments_are_not_used() -> None:
    rule = fedadamw().server_rule
    model = toy_model()
    server = Server(dict(model.initial), rule.init(model))
    name = "head.weight"
    bad = Update(
        "a",
        {name: torch.zeros_like(model.initial[name])},
        {"second": {name: torch.full_like(model.initial[name], -1.0)}},
        1.0,
        {name: 2},
        None,
    )
    after = rule.apply(server, rule.reduce(server, [bad], 1))
    assert after.state["second"][name].tolist() == [0.0] * len(model.initial[name])


def test_it_needs_adamw_and_no_state_of_the_clients_own() -> None:
    with pytest.raises(
        MethodError,
        match=r"fedadamw: FedAdamWClient is derived for adamw, not for sgd; set training.optimizer = .adamw.$",
    ):
        toy_run(fedadamw(), optimizer=SGD())
    with pytest.raises(MethodError, match="fedadamw: its clients start from an optimizer state that the server sends"):
        replace(fedadamw(), carry_optimizer=True)
    toy_run(fedadamw(), optimizer=AdamW(), warmup_steps=2, layer_decay=0.5)


def test_rule_without_its_own_state_leaves_the_optimizer_alone() -> None:
    assert not fedavg().sets_optimizer_state
    assert fedadamw().sets_optimizer_state


def test_clients_send_one_second_moment_for_each_row_of_a_matrix() -> None:
    model, population = toy_model(), Clients(c0=4, c1=4)
    [result] = play(toy_run(fedadamw(), 1, AdamW()), model, population)
    for name, value in model.initial.items():
        blocks = len(value) if value.ndim > 1 else 1
        assert result.traffic.up[name] == 2 * 4 * (value.numel() + blocks), name
