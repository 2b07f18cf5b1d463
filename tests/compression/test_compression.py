"""Pruning and quantization together: what they promise, what they save with SAFL, what cannot be decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from architecture_fixtures import ThreeClients, make_case, make_model
from compression_fixtures import WIDE_MODEL, random_normal
from helpers import Clients, ScriptedEngine, play, toy_run
from torch import Tensor

from partita.compression import CompressionError
from partita.compression.prune import (
    COLUMNS,
    MARKS,
    PLACES,
    ROWS,
    SHAPE,
    HeadPruner,
    prune,
)
from partita.compression.quantize import SCALE, quantize
from partita.core.client import ClientError, Job
from partita.core.compose import compose
from partita.core.method import Method
from partita.core.rng import Key
from partita.core.rounds import RoundResult, rounds
from partita.core.update import Update
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.safl import safl
from partita.testing.conformance import check_method
from partita.testing.toy import ToyTransformer

# ---- together


@pytest.mark.parametrize(
    ("name", "options", "model"),
    [
        pytest.param("prune", {"keep": 0.1}, WIDE_MODEL, marks=pytest.mark.slow),
        pytest.param("quantize", {}, WIDE_MODEL, marks=pytest.mark.slow),
        pytest.param("quantize", {"rows": False}, WIDE_MODEL, marks=pytest.mark.slow),
        pytest.param("safl+prune+quantize", {"k": 1, "keep": 0.1}, WIDE_MODEL, marks=pytest.mark.slow),
    ],
)
def test_compression_conforms_and_halves_the_bytes(name: str, options: dict[str, Any], model: ToyTransformer) -> None:
    """Conformance includes that serialized messages change neither the result nor the bytes."""
    found = check_method(build(name, options), model, Clients(c0=3, c1=9, c2=12, c3=6), tolerance=1e-4)
    plain = check_method(fedavg(), model, Clients(c0=3, c1=9, c2=12, c3=6), tolerance=1e-4)
    assert 0 < found.bytes_up < 0.5 * plain.bytes_up


@pytest.mark.slow
def test_head_pruning_conforms() -> None:
    model = make_model("bert-text")
    model = replace(
        model, initial={name: value + 0.3 * random_normal(1, *value.shape) for name, value in model.initial.items()}
    )
    method = compose(safl(k=1, every=2), prune("heads"), quantize())
    assert check_method(method, model, ThreeClients(make_case("bert-text")), tolerance=1e-4).bytes_up > 0


def bytes_up(method: Method, model: Any, population: Any) -> int:
    [each] = play(toy_run(method, 1, steps=1), model, population)
    return sum(each.traffic.up.values())


@pytest.mark.slow
def test_safl_with_pruned_heads_saves_three_quarters_of_the_bytes() -> None:
    """BERT-base at an eighth of its width, which keeps the proportions of its parts."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 384}
    model = make_model("bert-text", sizes={**sizes, "vocab_size": 3815, "max_position_embeddings": 64})
    clients = ThreeClients(make_case("bert-text"))
    whole = bytes_up(fedavg(), model, clients)
    less = {
        name: 1 - bytes_up(build(name, options), model, clients) / whole
        for name, options in {
            "safl": {},
            "safl+prune": {"by": "heads"},
            "safl+prune+quantize": {"by": "heads"},
        }.items()
    }
    assert less == pytest.approx({"safl": 0.735, "safl+prune": 0.777, "safl+prune+quantize": 0.940}, abs=6e-4)
    assert less["safl+prune"] > 0.75


# ---- updates that cannot be decoded


def round_with_changed_update(
    change: Callable[[Update], Update], method: Method, skip_failed_clients: bool
) -> RoundResult:
    """A round in which client a's update arrives changed."""
    run = toy_run(method, 1, skip_failed_clients=skip_failed_clients)

    def answer(job: Job) -> Update:
        delta = {name: random_normal(1, *value.shape) for name, value in WIDE_MODEL.initial.items()}
        update = Update(job.client, delta, {}, 1.0, dict.fromkeys(delta, 1), 0.5)
        for index, transform in enumerate(method.transforms):
            update, _ = transform.encode(update, {}, Key(0) / index)
        return change(update) if job.client == "a" else update

    return next(iter(rounds(run, WIDE_MODEL, ScriptedEngine(answer))))


def with_slot(update: Update, slot: str, name: str, value: Tensor | None) -> Update:
    part = {key: each for key, each in update.slots[slot].items() if key != name}
    return replace(update, slots={**update.slots, slot: part if value is None else {**part, name: value}})


NAME = "layers.0.query.weight"
BROKEN_UPDATES: dict[str, tuple[Method, Callable[[Update], Update], str]] = {
    "no scale": (quantize(), lambda u: with_slot(u, SCALE, NAME, None), "is torch.int8 .* scale of shape None"),
    "odd scale": (quantize(), lambda u: with_slot(u, SCALE, NAME, torch.ones(3)), r"with a scale of shape \(3,\)"),
    "no places": (prune(), lambda u: with_slot(u, MARKS, NAME, None), "its indices are missing or given twice"),
    "few places": (prune(), lambda u: with_slot(u, MARKS, NAME, torch.zeros(162).byte()), "indices that do not fit"),
    "short marks": (prune(), lambda u: with_slot(u, MARKS, NAME, torch.zeros(9).byte()), "indices that do not fit"),
    "a huge shape": (
        prune(),
        lambda u: with_slot(u, SHAPE, NAME, torch.tensor([10**6, 10**6])),
        "values of shape .* for shape",
    ),
    "no numbers": (
        prune(),
        lambda u: replace(u, delta={k: v for k, v in u.delta.items() if k != NAME}),
        "has no values",
    ),
    "places outside": (
        prune(keep=0.01),
        lambda u: with_slot(u, PLACES, NAME, torch.full((13,), 32767, dtype=torch.int16)),
        "indices that do not fit",
    ),
    "no heads": (
        Method("cut", transforms=(HeadPruner(),)),
        lambda u: replace(u, slots={ROWS: {NAME: torch.zeros(4).bool()}}),
        "does not consist of 0 heads",
    ),
    "odd heads": (
        Method("cut", transforms=(HeadPruner(),)),
        lambda u: replace(u, slots={COLUMNS: {NAME: torch.tensor([1, 1, 1, 1, 1]).bool()}}),
        "does not consist of 5 heads",
    ),
}


@pytest.mark.parametrize("kind", BROKEN_UPDATES)
def test_update_that_cannot_be_decoded_is_blamed_on_its_client(kind: str) -> None:
    method, change, message = BROKEN_UPDATES[kind]
    with pytest.raises(ClientError, match=rf"client 'a': sent an update that cannot be decoded: .*{message}"):
        round_with_changed_update(change, method, skip_failed_clients=False)
    each = round_with_changed_update(change, method, skip_failed_clients=True)
    assert [lost.client for lost in each.lost] == ["a"]
    assert list(each.sent) == ["b"]
    assert issubclass(CompressionError, ValueError)
