"""FedAvg with fine-tuning before a personal test, and the learning rate of this fine-tuning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import Clients, TorchLoop, final_params, play, toy_model, toy_run

from partita.core import tensors
from partita.core.batch_schedule import shuffled_batches
from partita.core.method import Method
from partita.core.optim import Schedule
from partita.core.plan import Phase
from partita.core.rounds import make_job
from partita.core.server_rule import Server, ServerRule
from partita.core.settings import Run
from partita.engines.simulation import SimulationEngine
from partita.evaluation import score
from partita.methods.fedavg import fedavg
from partita.methods.fedbabu import fedbabu
from partita.methods.fedper import fedper
from partita.methods.fedrep import fedrep
from partita.storage.client_store import MemoryStore

CLIENTS = Clients(a=5, b=9, c=6)
MODEL = toy_model()
ROUNDS = 6
COSINE = Schedule("cosine")


def personal_scores(run: Run, server: Server, store: MemoryStore) -> dict[str, dict[str, float]]:
    """The clients' scores after the last round."""
    engine = SimulationEngine(run, MODEL, CLIENTS, store=store)
    jobs = (make_job(run, MODEL, server, run.rounds - 1, client)[0] for client in CLIENTS.clients)
    return dict(engine.evaluate(jobs))


def test_fedavg_without_fine_tuning_adapts_nothing() -> None:
    rule = ServerRule()
    assert replace(fedavg(finetune=0), server_rule=rule) == Method("fedavg", server_rule=rule)


def test_fedavg_fine_tunes_everything() -> None:
    adapt = fedavg(finetune=4).adapt
    assert adapt is not None
    assert adapt(MODEL) == (Phase(MODEL.all_names(), 4),)


def test_fine_tuning_changes_scores_but_no_round() -> None:
    found = []
    for method in (fedavg(), fedavg(finetune=3), fedper(personal=(), finetune=3)):
        run, store = toy_run(method, ROUNDS, lr=0.3), MemoryStore()
        server = play(run, MODEL, CLIENTS, store=store)[-1].server
        found.append((server.params, personal_scores(run, server, store)))
    (plain, before), (tuned, after), (reference, wanted) = found
    assert tensors.equal(plain, tuned)
    assert tensors.equal(tuned, reference)
    assert after == wanted
    assert all(after[client]["loss"] < before[client]["loss"] for client in CLIENTS.clients)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("adapt_lr", [None, 0.02])
def test_fine_tuning_is_a_plain_loop_at_its_own_rate(adapt_lr: float | None) -> None:
    run = toy_run(fedavg(finetune=2), ROUNDS, lr=0.3, schedule=COSINE, adapt_lr=adapt_lr)
    server = play(run, MODEL, CLIENTS)[-1].server
    scores = personal_scores(run, server, MemoryStore())
    for client in CLIENTS.clients:
        examples = CLIENTS[client].train
        key = run.key / "round" / (ROUNDS - 1) / "client" / client / "adapt" / "batches" / 0
        loop = TorchLoop(MODEL, replace(run.training, lr=adapt_lr or 0.3), server.params)
        loop.fit(examples, shuffled_batches(len(examples), run.training, 2, key, 1.0))
        assert scores[client]["loss"] == pytest.approx(score(MODEL, loop.values(), examples)["loss"], abs=1e-6)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "method",
    [fedavg(finetune=2), fedper(), fedrep(head_epochs=1, finetune=2), fedbabu(), fedbabu(tune="head")],
    ids=["fedavg", "fedper", "fedrep", "fedbabu", "fedbabu head"],
)
def test_personal_scores_do_not_depend_on_the_schedule(method: Method) -> None:
    """From the same weights, a cosine that has nearly reached 0 gives the scores of a constant rate."""
    constant = toy_run(method, ROUNDS, lr=0.3)
    store = MemoryStore()
    server = play(constant, MODEL, CLIENTS, store=store)[-1].server
    cosine = replace(constant, training=replace(constant.training, schedule=COSINE))
    assert cosine.lr(ROUNDS - 1) < 0.1 * constant.lr(ROUNDS - 1)
    wanted = personal_scores(constant, server, store)
    assert personal_scores(cosine, server, store) == wanted
    own = replace(constant, training=replace(constant.training, adapt_lr=0.02))
    assert all(personal_scores(own, server, store)[client] != wanted[client] for client in CLIENTS.clients)


def test_rate_of_fine_tuning_is_not_that_of_training() -> None:
    runs = [toy_run(fedavg(finetune=1), 2, lr=0.3, adapt_lr=rate) for rate in (None, 0.02)]
    assert tensors.equal(*(final_params(play(run, MODEL, CLIENTS)) for run in runs))
