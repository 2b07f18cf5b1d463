"""FedALA: against a plain torch loop over rounds, and FedAvg with a personal copy."""

from __future__ import annotations

from dataclasses import replace
from statistics import pstdev
from typing import Any

import pytest
import torch
from helpers import Clients, client_batches, final_params, max_difference, play, toy_run

from partita.core import tensors
from partita.core.client import ClientRound, ClientState, begin_round, client_params
from partita.core.compose import compose
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.optim import SGD, AdamW
from partita.core.personal_copy import copy_name, personal_values
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.settings import Run
from partita.core.tensors import Tensors
from partita.methods import fedala as module
from partita.methods.fedala import FedALAClient, fedala
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen
from partita.methods.scaffold import scaffold
from partita.storage.client_store import MemoryStore
from partita.testing.toy import ToyTransformer
from partita.training.local_training import train_clients

BASE = ToyTransformer(width=4, layers=2)
CLIENTS = Clients(a=5, b=9, c=6)
TOP = BASE.names("head", "layer.1")
OPTIONS: dict[str, Any] = {"batch_size": 3, "passes": 12, "threshold": 1e-4, "eta": 20.0, "share": 0.7}


def extended(method: Method) -> Model:
    assert method.extend is not None
    return method.extend(BASE, Key(5))


# ---- a plain torch loop


def gradient(params: Tensors, names: Any, batch: Any) -> tuple[float, Tensors]:
    live = {name: params[name].clone().requires_grad_() for name in sorted(names)}
    loss = BASE.losses(BASE({**params, **live}, batch.inputs), batch.targets).mean()
    return float(loss.detach()), dict(zip(live, torch.autograd.grad(loss, list(live.values())), strict=True))


def learn_weights(own: Tensors, received: Tensors, weights: Tensors | None, examples: Any, key: Key) -> Tensors:
    first, losses = weights is None, []
    weights = weights or {name: torch.ones_like(own[name]) for name in TOP}
    order = (key / "sample").permutation(len(examples))[: int(OPTIONS["share"] * len(examples))]
    while True:
        for part in order.split(OPTIONS["batch_size"]):
            mixed = {name: own[name] + (received[name] - own[name]) * weights[name] for name in TOP}
            loss, grads = gradient({**received, **mixed}, TOP, examples.take(part))
            for name in TOP:
                weight = weights[name] - OPTIONS["eta"] * grads[name] * (received[name] - own[name])
                weights[name] = torch.clamp(weight, 0, 1)
        losses.append(loss)
        if not first or len(losses) == OPTIONS["passes"]:
            return weights
        if len(losses) > 10 and pstdev(losses[-10:]) < OPTIONS["threshold"]:
            return weights


def reference(run: Run) -> tuple[Tensors, dict[str, Tensors], dict[str, Tensors]]:
    """The global model, and each client's own model and weights, after all rounds."""
    world = {name: value.clone() for name, value in BASE.initial.items()}
    own: dict[str, Tensors] = {client: dict(world) for client in CLIENTS.clients}
    weights: dict[str, Tensors] = {}
    for number in range(run.rounds):
        cohort = run.draw_cohort(number, CLIENTS.clients)
        sizes = {client: len(CLIENTS[client].train) for client in cohort}
        models = {}
        for client in cohort:
            examples, params = CLIENTS[client].train, dict(world)
            if max_difference(own[client], world) > 0:
                key = run.key / "round" / number / "client" / client / "start" / 0
                weights[client] = learn_weights(own[client], world, weights.get(client), examples, key)
                for name in TOP:
                    params[name] = own[client][name] + (world[name] - own[client][name]) * weights[client][name]
            for indices in client_batches(run, number, client, examples):
                for name, grad in gradient(params, params, examples.take(indices))[1].items():
                    params[name] = params[name] - run.training.lr * grad
            models[client] = own[client] = params
        total = sum(sizes.values())
        world = {name: sum(sizes[c] / total * models[c][name] for c in cohort) for name in world}  # type: ignore[misc]
    return world, own, weights


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("block", [1, 2])
def test_rounds_equal_a_torch_loop(block: int) -> None:
    """Two of three clients take part in each round, so a client's own model can be several rounds old."""
    method, store = fedala(**OPTIONS), MemoryStore()
    run = toy_run(method, 4, cohort=2, lr=0.3)
    found = final_params(play(run, extended(method), CLIENTS, block=block, store=store))
    world, own, weights = reference(run)
    assert max_difference({name: found[name] for name in world}, world) < 1e-5
    assert len(weights) == 3
    for client in CLIENTS.clients:
        state = store.load(client, run.rounds)
        assert max_difference(state.personal, {copy_name(name): value for name, value in own[client].items()}) < 1e-5
        assert max_difference(state.memory["mixing"], weights[client]) < 1e-4
        assert any(0 < float(value.min()) < 1 or float(value.max()) < 1 for value in weights[client].values())


# ---- reductions


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("optimizer", [SGD(), AdamW(weight_decay=0.1)], ids=["sgd", "adamw"])
def test_weights_that_stay_at_one_give_fedavg_bit_for_bit(optimizer: Any) -> None:
    """And every client keeps the model that it trained last."""
    method, store = fedala(eta=0.0), MemoryStore()
    run = toy_run(method, 3, optimizer)
    one = play(run, extended(method), CLIENTS, block=3, store=store)
    two = play(toy_run(fedavg(), 3, optimizer), BASE, CLIENTS, block=3)
    assert tensors.equal({name: final_params(one)[name] for name in BASE.initial}, final_params(two))
    assert [each.loss for each in one] == [each.loss for each in two]
    state = store.load("a", 3)
    assert all(bool((value == 1).all()) for value in state.memory["mixing"].values())


def started(method: Method, own_scale: float = 1.5, round: int = 2, **more: Any) -> tuple[Run, list[ClientRound]]:
    """Rounds of two clients whose own models differ from the received one."""
    run, model = toy_run(method, 4, **more), extended(method)
    server = initial_server(run, model)
    begun = []
    for rank, client in enumerate(("a", "b")):
        job, _ = make_job(run, model, server, round, client)
        own = {copy_name(name): (own_scale + rank) * value for name, value in BASE.initial.items()}
        begun.append(begin_round(run, model, job, ClientState(own), CLIENTS[client].train))
    return run, begun


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), AdamW(weight_decay=0.1)], ids=["momentum", "adamw"])
def test_own_model_after_training_is_the_trained_model_bit_for_bit(optimizer: Any) -> None:
    run, begun = started(fedala(), optimizer=optimizer, clip=0.5)
    for learned in train_clients(run, begun):
        shared = {name: learned.params[name] for name in BASE.initial}
        assert tensors.equal(shared, {name: learned.params[copy_name(name)] for name in BASE.initial})


def test_own_model_takes_part_in_the_corrections_of_another_method() -> None:
    run, begun = started(compose(scaffold(), fedala()))
    assert isinstance(run.method.client_rules[-1], FedALAClient)
    control = {name: torch.ones_like(value) for name, value in BASE.initial.items()}
    [learned] = train_clients(
        run, [_with_memory(begun[0], {"control": {**control, **{copy_name(n): 0 * v for n, v in control.items()}}})]
    )
    shared = {name: learned.params[name] for name in BASE.initial}
    assert tensors.equal(shared, {name: learned.params[copy_name(name)] for name in BASE.initial})


def _with_memory(begun: ClientRound, memory: Any) -> ClientRound:
    return replace(begun, ctx=replace(begun.ctx, memory={**begun.ctx.memory, **memory}))


# ---- where training starts


@pytest.mark.slow
def test_only_the_top_is_mixed_and_the_rest_is_as_received() -> None:
    for layers, top in ((0, BASE.names("head")), (1, TOP), (2, TOP | BASE.names("layer.0")), (9, None)):
        _, [begun, _] = started(fedala(layers=layers, eta=50.0))
        mixed = set(begun.ctx.notes["mixing"])
        assert mixed == (top or BASE.all_names() - BASE.names("embedding"))
        own = personal_values(begun.ctx.anchor)
        for name, value in BASE.initial.items():
            weight = begun.ctx.notes["mixing"].get(name, torch.ones_like(value))
            expected = own[name] + (value - own[name]) * weight
            torch.testing.assert_close(begun.start[name], expected)
            assert begun.start[name] is begun.start[copy_name(name)]
        assert any(not torch.equal(begun.start[name], BASE.initial[name]) for name in mixed)


def test_weights_stay_between_zero_and_one() -> None:
    _, [begun, _] = started(fedala(eta=1e6))
    values = torch.cat([value.flatten() for value in begun.ctx.notes["mixing"].values()])
    assert (float(values.min()), float(values.max())) == (0.0, 1.0)


def test_client_whose_model_is_the_received_one_learns_nothing() -> None:
    _, [begun, _] = started(fedala(), own_scale=1.0)
    assert begun.ctx.notes == {}
    assert all(begun.start[name] is value for name, value in BASE.initial.items())


@pytest.mark.parametrize(
    ("options", "known", "expected"),
    [
        ({"eta": 0.0}, False, 11),
        ({"eta": 0.0, "passes": 4}, False, 4),
        ({"eta": 0.0, "threshold": 0.0, "passes": 13}, False, 13),
        ({"eta": 0.0}, True, 1),
    ],
    ids=["converged", "most passes", "never converged", "later rounds"],
)
def test_number_of_passes(options: dict[str, Any], known: bool, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With constant weights the loss is the same in every pass. Four of five examples make two batches."""
    sizes: list[int] = []

    def counted(params: Tensors, names: Any, batch: Any, ctx: Any) -> Any:
        sizes.append(len(batch.targets))
        return inner(params, names, batch, ctx)

    inner = module._gradient
    _, [begun, _] = started(fedala())
    monkeypatch.setattr(module, "_gradient", counted)
    rule = fedala(batch_size=3, **options).client_rules[0]
    memory = {"mixing": {name: torch.full_like(BASE.initial[name], 0.25) for name in TOP}} if known else {}
    begun = _with_memory(begun, memory)
    _, notes = rule.start(begun.ctx.anchor, begun.examples, begun.ctx, begun.key)
    assert sizes == [3, 1] * expected
    assert all(bool((value == (0.25 if known else 1.0)).all()) for value in notes["mixing"].values())


def test_plan_that_freezes_parameters_is_refused() -> None:
    method = compose(fedfrozen(0), fedala())
    with pytest.raises(MethodError, match=r"fedala: 'personal\..*key.*' does not train in this round"):
        play(toy_run(method, 1), extended(method), CLIENTS)


def test_client_is_evaluated_on_the_model_that_it_trained() -> None:
    method, store = fedala(), MemoryStore()
    run, model = toy_run(method, 2), extended(method)
    play(run, model, CLIENTS, store=store)
    job, _ = make_job(run, model, initial_server(run, model), 1, "a")
    _, params = client_params(run, model, job, store.load("a", 2))
    assert tensors.equal(
        {name: model.personal(params)[name] for name in BASE.initial},
        personal_values(store.load("a", 2).personal | params),
    )


@pytest.mark.parametrize(
    "options", [{"layers": -1}, {"eta": -1.0}, {"share": 0.0}, {"share": 1.1}, {"batch_size": 0}, {"passes": 0}]
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=r"method\.layers is"):
        fedala(**options)


def test_rule_says_that_it_reads_examples() -> None:
    """What reads examples outside the training steps is refused with example-level privacy."""
    assert FedALAClient.uses_data
