"""FedTP: the hypernetwork's gradient step, personal weights, and its limit FedAvg."""

from __future__ import annotations

import pytest
import torch
from helpers import Clients, final_params, max_difference, play, toy_model, toy_run
from torch.testing import assert_close

from partita.core import tensors
from partita.core.method_error import MethodError
from partita.core.rng import Key
from partita.core.server_rule import Server
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.methods.fedavg import fedavg
from partita.methods.fedtp import fedtp
from partita.testing.toy import Float64Model, Float64Population

CLIENTS = Clients(a=6, b=6, c=6)
MODEL = toy_model()
GENERATED = MODEL.names("query", "key", "value")


def trained_server(lr: float = 0.3) -> Server:
    """A server after some rounds, when every part of the hypernetwork has moved."""
    return play(toy_run(fedtp(lr, embedding=3, hidden=4), 3, lr=0.3), MODEL, CLIENTS)[-1].server


def test_fedtp_round_is_a_gradient_step_by_autograd() -> None:
    """The gradient of sum p_i <delta_i, w_i(z_i, hypernetwork)> by autograd."""
    rule, server, lr = fedtp(0.3, embedding=3, hidden=4).server_rule, trained_server(), 0.3
    draw = Key(2).generator()
    deltas = {c: {n: torch.randn(v.shape, generator=draw) for n, v in MODEL.initial.items()} for c in "ab"}
    weights = {"a": 1.0, "b": 3.0}
    updates = [Update(client, deltas[client], {}, weights[client], {}, None) for client in "ab"]
    after = rule.apply(server, rule.reduce(server, updates, 3))

    leaves = {
        (slot, name): value.clone().requires_grad_()
        for slot, part in server.state.items()
        for name, value in part.items()
    }
    state: dict[str, Tensors] = {}
    for (slot, name), value in leaves.items():
        state.setdefault(slot, {})[name] = value
    goal = torch.zeros(())
    for client in "ab":
        made, _ = rule.send(Server(server.params, state), client, MODEL.all_names())
        for name in GENERATED:
            goal = goal + weights[client] / 4.0 * (made[name] * deltas[client][name]).sum()
    slopes = torch.autograd.grad(goal, list(leaves.values()), allow_unused=True)
    for (slot, name), slope in zip(leaves, slopes, strict=True):
        old = server.state[slot][name]
        wanted = old if slope is None else old + lr * slope
        assert_close(after.state[slot][name], wanted, rtol=1e-4, atol=1e-5)
        if slot != "embedding" or name != "c":
            assert not torch.equal(after.state[slot][name], old), f"{slot} {name} did not learn"
    rest = MODEL.all_names() - GENERATED
    for name in rest:
        mean = (deltas["a"][name] + 3 * deltas["b"][name]) / 4
        assert_close(after.params[name], server.params[name] + mean)
    assert all(after.params[name] is server.params[name] for name in GENERATED)


def test_fedtp_sends_personal_attention_weights_and_shares_the_rest() -> None:
    rule, server = fedtp(0.3, embedding=3, hidden=4).server_rule, trained_server()
    one, two = (rule.send(server, client, MODEL.all_names())[0] for client in "ab")
    # No loss depends on a key bias, so it moves by rounding alone.
    assert all(not torch.equal(one[name], two[name]) for name in GENERATED - {"layers.0.key.bias"})
    assert all(one[name] is two[name] for name in MODEL.all_names() - GENERATED)
    assert tensors.equal(one, rule.send(server, "a", MODEL.all_names())[0])


def test_fedtp_sends_only_the_requested_names() -> None:
    some = MODEL.names("query", "mlp")
    assert fedtp().server_rule.send(trained_server(), "a", some)[0].keys() == some


def test_fedtp_client_of_weight_zero_changes_nothing() -> None:
    rule, server = fedtp(0.3, embedding=3, hidden=4).server_rule, trained_server()
    delta = {name: torch.ones_like(value) for name, value in MODEL.initial.items()}
    aggregate = rule.reduce(server, [Update("a", delta, {}, 0.0, {}, None)], 3)
    assert aggregate.slots["embedding"]["a"].abs().max() == 0


def test_fedtp_sends_finite_weights_to_a_new_client() -> None:
    made, _ = fedtp(0.3, embedding=3, hidden=4).server_rule.send(trained_server(), "never seen", MODEL.all_names())
    assert all(bool(torch.isfinite(value).all()) for value in made.values())


def test_fedtp_sends_different_weights_to_different_new_clients() -> None:
    method = fedtp(0.3)
    server = play(toy_run(method, 2, lr=0.3), MODEL, CLIENTS)[-1].server
    one, two = (
        method.server_rule.send(server, client, MODEL.all_names())[0] for client in ("never seen", "nor this one")
    )
    # Softmax does not depend on a key bias, so its gradient is zero up to rounding.
    assert all(not torch.equal(one[name], two[name]) for name in GENERATED - {"layers.0.key.bias"})


def test_fedtp_trunk_layers_are_independent_with_fan_in_scale() -> None:
    trunk = fedtp(embedding=200, hidden=200).server_rule.init(MODEL)["trunk"]
    assert not torch.equal(trunk["in.weight"], trunk["out.weight"])
    for part in ("in", "out"):
        assert trunk[f"{part}.weight"].std().item() == pytest.approx(200**-0.5, rel=0.03)


def test_fedtp_starts_from_the_initial_model() -> None:
    rule = fedtp().server_rule
    made, _ = rule.send(Server(dict(MODEL.initial), rule.init(MODEL)), "a", MODEL.all_names())
    assert tensors.equal(made, MODEL.initial)


def test_fedtp_without_a_hidden_layer_is_fedavg() -> None:
    """Only the bias is left, which is the same for all clients."""
    plain = play(toy_run(fedavg(), 4), MODEL, CLIENTS)
    rule = fedtp(lr=1.0, hidden=0)
    ours = play(toy_run(rule, 4), MODEL, CLIENTS)
    sent = [rule.server_rule.send(each.server, "a", MODEL.all_names())[0] for each in ours]
    assert tensors.equal(sent[0], final_params(plain[:1]))
    assert max_difference(sent[3], final_params(plain)) < 1e-5


def test_fedtp_first_round_is_fedavg_for_shared_parameters() -> None:
    one, two = (final_params(play(toy_run(method, 1), MODEL, CLIENTS)) for method in (fedtp(), fedavg()))
    assert tensors.equal(
        tensors.select(one, MODEL.all_names() - GENERATED), tensors.select(two, MODEL.all_names() - GENERATED)
    )


def test_fedtp_seed_changes_embeddings_and_float64_models_work() -> None:
    model, clients = Float64Model(MODEL), Float64Population(CLIENTS)
    one, two = (play(toy_run(fedtp(0.3, seed=draw), 2), model, clients)[-1].server for draw in (0, 1))
    assert not torch.equal(one.state["embedding"]["a"], two.state["embedding"]["a"])
    assert one.state["maps"][sorted(GENERATED)[0]].dtype == torch.float64


@pytest.mark.parametrize("wrong", [{"embedding": 0}, {"hidden": -1}])
def test_fedtp_refuses_invalid_options(wrong: dict[str, int]) -> None:
    with pytest.raises(MethodError, match=r"method.embedding is"):
        fedtp(**wrong)  # type: ignore[arg-type]
