"""What a client that takes no part trains before its test: its own parameters, while the shared ones stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from helpers import Clients, TorchLoop, max_difference, play, toy_model, toy_run
from method_options import BRIEF

from partita.core import tensors
from partita.core.batch_schedule import shuffled_batches
from partita.core.client import ClientState, adaptation_round, phases_before_test
from partita.core.compose import compose
from partita.core.method import Method
from partita.core.plan import Phase
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.server_rule import Server
from partita.core.settings import Run
from partita.core.tensors import Names, Tensors
from partita.engines import simulation
from partita.engines.simulation import SimulationEngine
from partita.methods import INDEX, build
from partita.methods.fedavg import fedavg
from partita.methods.fedbabu import fedbabu
from partita.methods.fedper import fedper
from partita.methods.fedprox import fedprox
from partita.methods.fedrep import fedrep
from partita.methods.local_only import local_only
from partita.testing.federations import federation_for
from partita.training.local_training import train_clients

MODEL = toy_model()
HEAD, ALL = MODEL.names("head"), MODEL.all_names()
TAKE_PART, EVERYONE = Clients(a=5, b=9), Clients(a=5, b=9, new=7, other=12)
NEW = ("new", "other")
ROUNDS = 2


def train_federation(method: Method, **training: Any) -> tuple[Run, Server]:
    """The server after rounds without the new clients."""
    run = toy_run(method, ROUNDS, lr=0.3, **training)
    return run, play(run, MODEL, TAKE_PART)[-1].server


def params_at_test(
    monkeypatch: pytest.MonkeyPatch, run: Run, server: Server, epochs: int, clients: Sequence[str] = NEW, block: int = 1
) -> dict[str, Tensors]:
    """The parameters with which each new client is tested."""
    seen: list[Tensors] = []

    def record(model: object, params: Tensors, *rest: object) -> dict[str, float]:
        seen.append(params)
        return {}

    monkeypatch.setattr(simulation, "score", record)
    engine = SimulationEngine(run, MODEL, EVERYONE, block=block)
    jobs = [make_job(run, MODEL, server, ROUNDS - 1, client)[0] for client in clients]
    names = [client for client, _ in engine.evaluate(replace(job, personal_epochs=epochs) for job in jobs)]
    assert all(engine.store.load(client, ROUNDS) == ClientState() for client in names), "nothing is kept"
    return dict(zip(names, seen, strict=True))


def plain_loop(run: Run, server: Server, client: str, kept: Names, phases: Sequence[tuple[Names, int]]) -> Tensors:
    """Bare PyTorch: the shared values of the server, the initial values of the rest, one phase after the other."""
    lr = run.training.adapt_lr or run.training.lr
    own = {name: MODEL.initial[name] for name in kept}
    loop = TorchLoop(MODEL, replace(run.training, lr=lr), {**server.params, **own})
    for place, (names, epochs) in enumerate(phases):
        for name, value in loop.params.items():
            value.requires_grad_(name in names)
            value.grad = None
        key = run.key / "round" / (ROUNDS - 1) / "client" / client / "adapt" / "batches" / place
        examples = EVERYONE[client].train
        loop.fit(examples, shuffled_batches(len(examples), run.training, epochs, key))
    return loop.values()


@pytest.mark.parametrize("adapt_lr", [None, 0.05])
@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (fedper(finetune=0), HEAD),
        (fedrep(head_epochs=1, finetune=0), HEAD),
        (compose(fedper(finetune=0), fedprox(mu=5.0)), HEAD),
        (local_only(), ALL),
    ],
    ids=["fedper", "fedrep", "fedper+fedprox", "local"],
)
def test_personal_parameters_train_as_in_a_plain_loop_with_the_rest_frozen(
    method: Method, kept: Names, adapt_lr: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, server = train_federation(method, adapt_lr=adapt_lr)
    before = tensors.digest(server.params)
    for client, params in params_at_test(monkeypatch, run, server, epochs=3).items():
        assert all(params[name] is server.params[name] for name in ALL - kept), "the server's own values"
        expected = plain_loop(run, server, client, kept, [(kept, 3)])
        assert max_difference(params, expected) < 1e-6
        assert max_difference(tensors.select(params, kept), tensors.select(MODEL.initial, kept)) > 1e-3
    assert tensors.digest(server.params) == before


def test_a_client_that_shares_nothing_trains_as_in_a_round_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one batch an epoch, the order of the examples plays no part: six epochs are a first round of six."""
    run, server = train_federation(local_only(), epochs=6, batch_size=32)
    engine = SimulationEngine(run, MODEL, EVERYONE)
    list(engine.train([make_job(run, MODEL, server, 0, client)[0] for client in NEW]))
    for client, params in params_at_test(monkeypatch, run, server, epochs=6).items():
        assert max_difference(params, engine.store.load(client, 1).personal) < 1e-6


def test_fine_tuning_of_the_method_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    run, server = train_federation(fedper(finetune=2))
    for client, params in params_at_test(monkeypatch, run, server, epochs=3).items():
        assert max_difference(params, plain_loop(run, server, client, HEAD, [(HEAD, 3), (ALL, 2)])) < 1e-6
    for client, params in params_at_test(monkeypatch, run, server, epochs=0).items():
        assert max_difference(params, plain_loop(run, server, client, HEAD, [(ALL, 2)])) < 1e-6


@pytest.mark.parametrize(
    "method",
    [fedavg(), fedavg(finetune=2), fedbabu(), fedbabu(finetune=0), fedper(personal=(), finetune=1)],
    ids=["fedavg", "fine-tuned", "fedbabu", "fixed head", "fedper of nothing"],
)
def test_a_client_without_personal_parameters_is_tested_as_before(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, server = train_federation(method)
    with_epochs, without = (params_at_test(monkeypatch, run, server, epochs) for epochs in (5, 0))
    assert all(tensors.equal(with_epochs[client], without[client]) for client in NEW)


@pytest.mark.parametrize("finetune", [0, 1])
def test_the_result_depends_on_no_other_client(finetune: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run, server = train_federation(fedper(finetune=finetune))
    both = params_at_test(monkeypatch, run, server, epochs=3)
    turned = params_at_test(monkeypatch, run, server, epochs=3, clients=NEW[::-1])
    alone = params_at_test(monkeypatch, run, server, epochs=3, clients=NEW[1:])
    block = params_at_test(monkeypatch, run, server, epochs=3, block=2)
    assert all(tensors.equal(both[client], turned[client]) for client in NEW)
    assert tensors.equal(both["other"], alone["other"])
    assert all(max_difference(both[client], block[client]) < 1e-6 for client in NEW)


@pytest.mark.parametrize("name", INDEX)
def test_personal_parameters_train_unless_clients_are_tested_with_others(name: str) -> None:
    """The builder refuses the second kind: the loss of training does not read what its clients keep."""
    method = replace(build(name, BRIEF.get(name, {})), client_rules=(), adapt=None, carry_optimizer=False)
    federation = federation_for(method)
    model = method.extend(federation.model, Key(1)) if method.extend else federation.model
    run, client = toy_run(method, 1, lr=0.3), federation.population.clients[0]
    job, plan = make_job(run, model, initial_server(run, model), 0, client)
    phases = phases_before_test(run, model, replace(job, personal_epochs=2))
    assert [phase.names for phase in phases] == ([plan.keep & plan.train] if plan.keep & plan.train else [])
    if not phases:
        return
    each = adaptation_round(run, model, job, ClientState(), federation.population[client].train, phases)
    if model.personal(model.initial) is model.initial:
        [result] = train_clients(run, [each])
        assert max_difference(result.params, tensors.select(model.initial, result.params)) > 0
    else:
        with pytest.raises(RuntimeError, match="does not require grad"):
            train_clients(run, [each])


def test_phases_are_what_the_client_keeps_and_trains_then_those_of_the_method() -> None:
    def phases(method: Method, epochs: int) -> tuple[Phase, ...]:
        run = toy_run(method, ROUNDS)
        job = make_job(run, MODEL, Server(dict(MODEL.initial)), 0, "new")[0]
        return phases_before_test(run, MODEL, replace(job, personal_epochs=epochs))

    assert phases(fedper(finetune=2), 3) == (Phase(HEAD, 3), Phase(ALL, 2))
    assert phases(fedper(finetune=2), 0) == (Phase(ALL, 2),)
    assert phases(fedper(finetune=0), 0) == ()
    assert phases(fedavg(), 3) == ()
    # A part of what is kept can be frozen in a round.
    planner = fedper().plan
    frozen = Method("m", plan=lambda model, round_info: planner(model, round_info).narrow(ALL - HEAD))
    assert phases(frozen, 3) == ()
