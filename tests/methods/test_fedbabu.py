"""FedBABU: the head is neither trained nor sent, and is tuned before a client is evaluated."""

from __future__ import annotations

import pytest
import torch
from helpers import Clients, TorchLoop, final_params, play, toy_model, toy_run

from partita.core import tensors
from partita.core.batch_schedule import shuffled_batches
from partita.core.method_error import MethodError
from partita.core.plan import Phase, RoundInfo, plan_for
from partita.core.rounds import make_job
from partita.engines.simulation import SimulationEngine
from partita.evaluation import score
from partita.methods.fedavg import fedavg
from partita.methods.fedbabu import fedbabu

CLIENTS = Clients(a=5, b=9, c=6)
MODEL = toy_model()
HEAD = MODEL.names("head")
BODY = MODEL.all_names() - HEAD


def test_fedbabu_trains_and_sends_only_the_body() -> None:
    plan = plan_for(fedbabu().plan, MODEL, RoundInfo(0, 3, "a"))
    assert plan.train == plan.up == plan.down == BODY
    assert not plan.keep


def test_fedbabu_head_keeps_its_initial_value() -> None:
    final = final_params(play(toy_run(fedbabu(), 2), MODEL, CLIENTS))
    assert all(final[name] is MODEL.initial[name] for name in HEAD)
    assert all(not torch.equal(final[name], MODEL.initial[name]) for name in MODEL.names("value", "mlp"))


@pytest.mark.parametrize(("tune", "names"), [("all", MODEL.all_names()), ("head", HEAD), ("body", BODY)])
def test_fedbabu_adapts_the_chosen_part_before_evaluation(tune: str, names: frozenset[str]) -> None:
    adapt = fedbabu(finetune=3, tune=tune).adapt  # type: ignore[arg-type]
    assert adapt is not None
    assert adapt(MODEL) == (Phase(names, 3),)
    assert fedbabu(finetune=0).adapt is None


def test_fedbabu_evaluation_equals_a_plain_fine_tuning_loop() -> None:
    run = toy_run(fedbabu(finetune=2), 2)
    (*_, final) = play(run, MODEL, CLIENTS)
    job, _ = make_job(run, MODEL, final.server, 1, "b")
    ((client, scores),) = SimulationEngine(run, MODEL, CLIENTS).evaluate([job])
    data = CLIENTS[client].train
    loop = TorchLoop(MODEL, run.training, final.server.params)
    key = run.key / "round" / 1 / "client" / "b" / "adapt" / "batches" / 0
    loop.fit(data, shuffled_batches(len(data), run.training, 2, key))
    assert scores == pytest.approx(score(MODEL, loop.values(), data), abs=1e-6)
    assert scores["loss"] < score(MODEL, final.server.params, data)["loss"]


def test_fedbabu_with_nothing_fixed_is_fedavg_bit_for_bit() -> None:
    one, two = (play(toy_run(method, 3, cohort=2), MODEL, CLIENTS) for method in (fedbabu(fixed=()), fedavg()))
    assert tensors.equal(final_params(one), final_params(two))


def test_fedbabu_refuses_to_tune_an_unnamed_head() -> None:
    with pytest.raises(MethodError, match="name the tags of the head"):
        fedbabu(fixed=(), tune="head")
