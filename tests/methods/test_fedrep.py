"""FedRep: trains the head on the received body, then the body with the new head."""

from __future__ import annotations

from helpers import Clients, TorchLoop, final_params, max_difference, play, toy_model, toy_run

from partita.core import tensors
from partita.core.batch_schedule import shuffled_batches
from partita.core.plan import Phase, RoundInfo, plan_for
from partita.core.tensors import Names, Tensors
from partita.methods.fedavg import fedavg
from partita.methods.fedrep import fedrep
from partita.storage.client_store import MemoryStore

CLIENTS = Clients(a=5, b=9, c=6)
MODEL = toy_model()
HEAD = MODEL.names("head")
BODY = MODEL.all_names() - HEAD


def test_fedrep_trains_the_head_then_the_body() -> None:
    plan = plan_for(fedrep(head_epochs=7, body_epochs=2).plan, MODEL, RoundInfo(0, 3, "a"))
    assert plan.phases == (Phase(HEAD, 7), Phase(BODY, 2))
    assert plan.up == plan.down == BODY
    assert plan.keep == HEAD


def test_fedrep_round_equals_two_consecutive_plain_loops() -> None:
    run, store = toy_run(fedrep(head_epochs=2, body_epochs=1), 1, cohort=1), MemoryStore()
    (played,) = play(run, MODEL, CLIENTS, store=store)
    (client,) = played.cohort
    data = CLIENTS[client].train
    values: Tensors = MODEL.initial
    for index, (names, epochs) in enumerate([(HEAD, 2), (BODY, 1)]):
        key = run.key / "round" / 0 / "client" / client / "batches" / index
        loop = TorchLoop(MODEL, run.training, values)
        _train_only(loop, names)
        loop.fit(data, shuffled_batches(len(data), run.training, epochs, key))
        values = loop.values()
    assert max_difference(store.load(client, 1).personal, tensors.select(values, HEAD)) < 1e-7
    assert max_difference(tensors.select(played.server.params, BODY), tensors.select(values, BODY)) < 1e-7


def _train_only(loop: TorchLoop, names: Names) -> None:
    for name, value in loop.params.items():
        value.requires_grad_(name in names)


def test_fedrep_with_nothing_personal_is_fedavg_bit_for_bit() -> None:
    same = fedrep(personal=(), body_epochs=None)
    one, two = (play(toy_run(method, 3, cohort=2), MODEL, CLIENTS) for method in (same, fedavg()))
    assert tensors.equal(final_params(one), final_params(two))
    assert same.adapt is None


def test_fedrep_adapts_only_the_head_before_evaluation() -> None:
    adapt = fedrep(finetune=3).adapt
    assert adapt is not None
    assert adapt(MODEL) == (Phase(HEAD, 3),)
    assert fedrep(finetune=0).adapt is None
