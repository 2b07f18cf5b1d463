"""FedTP: the hypernetwork's gradient step, personal weights, and its limit FedAvg."""

from __future__ import annotations

import pytest
import torch
from helpers import Clients, distance, last, play, run_of, small
from torch.testing import assert_close

from partita.core import tensors
from partita.core.method import MethodError, Server
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.methods.fedavg import fedavg
from partita.methods.fedtp import fedtp
from partita.testing.toy import Float64Model, Float64Population

CLIENTS = Clients(a=6, b=6, c=6)
MODEL = small()
MADE = MODEL.names("query", "key", "value")


def trained(lr: float = 0.3) -> Server:
    """A server after some rounds, when every part of the hypernetwork has moved."""
    return play(run_of(fedtp(lr, embedding=3, hidden=4), 3, lr=0.3), MODEL, CLIENTS)[-1].server


def test_a_round_is_a_step_along_the_gradient_of_the_agreement_with_the_deltas() -> None:
    """The gradient of sum p_i <delta_i, w_i(z_i, hypernetwork)> by autograd."""
    rule, server, lr = fedtp(0.3, embedding=3, hidden=4).server_rule, trained(), 0.3
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
        for name in MADE:
            goal = goal + weights[client] / 4.0 * (made[name] * deltas[client][name]).sum()
    slopes = torch.autograd.grad(goal, list(leaves.values()), allow_unused=True)
    for (slot, name), slope in zip(leaves, slopes, strict=True):
        old = server.state[slot][name]
        wanted = old if slope is None else old + lr * slope
        assert_close(after.state[slot][name], wanted, rtol=1e-4, atol=1e-5)
        if slot != "embedding" or name != "c":
            assert not torch.equal(after.state[slot][name], old), f"{slot} {name} did not learn"
    rest = MODEL.all_names() - MADE
    for name in rest:
        mean = (deltas["a"][name] + 3 * deltas["b"][name]) / 4
        assert_close(after.params[name], server.params[name] + mean)
    assert all(after.params[name] is server.params[name] for name in MADE)


def test_every_client_is_sent_weights_of_its_own_and_the_rest_is_common() -> None:
    rule, server = fedtp(0.3, embedding=3, hidden=4).server_rule, trained()
    one, two = (rule.send(server, client, MODEL.all_names())[0] for client in "ab")
    # No loss depends on a key bias, so it moves by rounding alone.
    assert all(not torch.equal(one[name], two[name]) for name in MADE - {"layers.0.key.bias"})
    assert all(one[name] is two[name] for name in MODEL.all_names() - MADE)
    assert tensors.equal(one, rule.send(server, "a", MODEL.all_names())[0])


def test_only_what_is_asked_for_is_made() -> None:
    some = MODEL.names("query", "mlp")
    assert fedtp().server_rule.send(trained(), "a", some)[0].keys() == some


def test_a_client_that_weighs_nothing_teaches_nothing() -> None:
    rule, server = fedtp(0.3, embedding=3, hidden=4).server_rule, trained()
    delta = {name: torch.ones_like(value) for name, value in MODEL.initial.items()}
    aggregate = rule.reduce(server, [Update("a", delta, {}, 0.0, {}, None)], 3)
    assert aggregate.slots["embedding"]["a"].abs().max() == 0


def test_a_newcomer_is_served_too() -> None:
    made, _ = fedtp(0.3, embedding=3, hidden=4).server_rule.send(trained(), "never seen", MODEL.all_names())
    assert all(bool(torch.isfinite(value).all()) for value in made.values())


def test_newcomers_are_told_apart() -> None:
    method = fedtp(0.3)
    server = play(run_of(method, 2, lr=0.3), MODEL, CLIENTS)[-1].server
    one, two = (
        method.server_rule.send(server, client, MODEL.all_names())[0] for client in ("never seen", "nor this one")
    )
    # Softmax does not depend on a key bias, so its gradient is zero up to rounding.
    assert all(not torch.equal(one[name], two[name]) for name in MADE - {"layers.0.key.bias"})


def test_layers_are_drawn_apart_and_keep_the_size_of_what_they_are_given() -> None:
    trunk = fedtp(embedding=200, hidden=200).server_rule.init(MODEL)["trunk"]
    assert not torch.equal(trunk["in.weight"], trunk["out.weight"])
    for part in ("in", "out"):
        assert trunk[f"{part}.weight"].std().item() == pytest.approx(200**-0.5, rel=0.03)


def test_all_start_from_the_model_as_it_was_loaded() -> None:
    rule = fedtp().server_rule
    made, _ = rule.send(Server(dict(MODEL.initial), rule.init(MODEL)), "a", MODEL.all_names())
    assert tensors.equal(made, MODEL.initial)


def test_without_a_hidden_layer_the_first_round_is_fedavgs_bit_for_bit_and_the_others_to_rounding() -> None:
    """Only the bias is left, which is the same for all clients."""
    plain = play(run_of(fedavg(), 4), MODEL, CLIENTS)
    rule = fedtp(lr=1.0, hidden=0)
    ours = play(run_of(rule, 4), MODEL, CLIENTS)
    sent = [rule.server_rule.send(each.server, "a", MODEL.all_names())[0] for each in ours]
    assert tensors.equal(sent[0], last(plain[:1]))
    assert distance(sent[3], last(plain)) < 1e-5


def test_the_first_round_is_fedavgs_for_all_that_is_shared() -> None:
    one, two = (last(play(run_of(method, 1), MODEL, CLIENTS)) for method in (fedtp(), fedavg()))
    assert tensors.equal(tensors.select(one, MODEL.all_names() - MADE), tensors.select(two, MODEL.all_names() - MADE))


def test_another_draw_gives_other_embeddings_and_wide_models_work() -> None:
    model, clients = Float64Model(MODEL), Float64Population(CLIENTS)
    one, two = (play(run_of(fedtp(0.3, seed=draw), 2), model, clients)[-1].server for draw in (0, 1))
    assert not torch.equal(one.state["embedding"]["a"], two.state["embedding"]["a"])
    assert one.state["maps"][sorted(MADE)[0]].dtype == torch.float64


@pytest.mark.parametrize("wrong", [{"embedding": 0}, {"hidden": -1}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(MethodError, match=r"method.embedding is"):
        fedtp(**wrong)  # type: ignore[arg-type]
