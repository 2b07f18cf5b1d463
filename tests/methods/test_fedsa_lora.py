"""FedSA-LoRA is LoRA for a single client, and FedPer that keeps B."""

from __future__ import annotations

from adapter_fixtures import adapted, clients
from helpers import max_difference, play, toy_run

from partita.core import tensors
from partita.core.serialization import HEADER
from partita.methods.fedavg import fedavg
from partita.methods.fedper import fedper
from partita.methods.fedsa_lora import fedsa_lora
from partita.storage.client_store import MemoryStore


def test_fedsa_lora_with_one_client_equals_lora_and_fedper_with_one_factor() -> None:
    model, case = adapted("llama-lm"), "llama-lm"
    population = clients(case)
    population.clients = ("a",)  # type: ignore[misc,assignment]
    store = MemoryStore()
    alone = play(toy_run(fedsa_lora(), 3), model, population, store=store)
    lora = play(toy_run(fedavg(), 3), model, population)
    A, B = model.names("lora_A"), model.names("lora_B")
    own = {**tensors.select(alone[-1].server.params, A), **tensors.select(store.load("a", 3).personal, B)}
    # Not bit for bit: a client keeps B, and the server adds a difference to it.
    assert max_difference(own, lora[-1].server.params) < 1e-6
    assert all(alone[-1].server.params[name] is model.initial[name] for name in B)
    assert alone[-1].traffic.up.keys() - {HEADER} == A
    both = [play(toy_run(method, 2), model, clients(case)) for method in (fedsa_lora(), fedper(("lora_B",), 0))]
    assert tensors.equal(both[0][-1].server.params, both[1][-1].server.params)
    assert both[0][-1].traffic == both[1][-1].traffic
