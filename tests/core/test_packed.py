"""Tensors packed into one buffer per client behave like a mapping of separate tensors."""

from __future__ import annotations

import operator
import pickle
from dataclasses import replace

import pytest
import torch
from graph_fixtures import max_relative_difference, small_vit_run
from hypothesis import given
from hypothesis import strategies as st
from packed_fixtures import pack_per_client

from partita import SimulationEngine, rounds
from partita.core import serialization, tensors
from partita.core.optim import SGD, AdamW
from partita.core.packed import ALIGNMENT, PackedTensors
from partita.core.rounds import RoundResult
from partita.core.tensors import Mean, Tensors
from partita.training import phase_trainer

SHAPES = st.lists(st.sampled_from([(), (1,), (3,), (16,), (4, 4), (2, 3, 5)]), min_size=1, max_size=5)


def random_tensors(shapes: list[tuple[int, ...]], clients: int, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"n{i}": torch.randn(clients, *shape, generator=generator) for i, shape in enumerate(shapes)}


@given(shapes=SHAPES, clients=st.integers(1, 3))
def test_packed_tensors_hold_the_values_of_each_client(shapes: list[tuple[int, ...]], clients: int) -> None:
    joined = random_tensors(shapes, clients)
    for rank, each in enumerate(pack_per_client(joined)):
        assert tensors.equal(each, {name: value[rank] for name, value in joined.items()})
        assert all(value.storage_offset() % ALIGNMENT == 0 for value in each.values())
        assert all(value.data_ptr() >= each.buffer.data_ptr() for value in each.values())
        assert tensors.equal(serialization.unpack(serialization.pack({"delta": each}))["delta"], {**each})
        assert serialization.byte_counts({"delta": each}) == serialization.byte_counts({"delta": {**each}})


def test_packed_tensors_keep_their_layout_when_pickled() -> None:
    left, right = pack_per_client(random_tensors([(3,), (2, 2)], 2))
    first, second = pickle.loads(pickle.dumps([left, right]))
    assert tensors.equal(first, left)
    assert first.layout is second.layout is left.layout
    assert first["n1"].data_ptr() == first.buffer[ALIGNMENT:].data_ptr()


def test_packed_tensors_do_not_support_item_assignment() -> None:
    [row] = pack_per_client(random_tensors([(3,)], 1))
    with pytest.raises(TypeError, match="'PackedTensors' object does not support item assignment"):
        operator.setitem(row, "n0", torch.zeros(3))
    assert {**row, "n0": 1}["n0"] == 1


@given(shapes=SHAPES, weights=st.lists(st.floats(0, 10), min_size=1, max_size=5), stray=st.integers(0, 5))
def test_mean_of_packed_tensors_equals_the_mean_by_name(
    shapes: list[tuple[int, ...]], weights: list[float], stray: int
) -> None:
    """Also when one update is a plain mapping that lacks a name."""
    by_row, by_name = Mean(), Mean()
    for place, (each, weight) in enumerate(
        zip(pack_per_client(random_tensors(shapes, len(weights))), weights, strict=True)
    ):
        given = {name: value for name, value in each.items() if name != "n0"} if place == stray else each
        by_row.add(given, weight)
        by_name.add(dict(given), weight)
    assert by_row.weight == by_name.weight
    torch.testing.assert_close(dict(by_row.value), dict(by_name.value))


def test_mean_does_not_change_the_first_packed_tensors() -> None:
    first, second = pack_per_client(random_tensors([(3,)], 2))
    before, mean = first["n0"].clone(), Mean()
    mean.add(first, 1.0)
    mean.add(second, 1.0)
    assert torch.equal(first["n0"], before)


CASES = {
    "fedavg": ("fedavg", AdamW(), {}),
    "two phases": ("fedrep", AdamW(), {}),
    "slots": ("scaffold", SGD(), {}),
    "by steps": ("fednova", SGD(), {}),
    "some names": ("fedper", AdamW(), {}),
    "over a wire": ("fedavg", AdamW(), {"wire": True}),
}


def play_small_run(method: str, optimizer: AdamW | SGD, **engine: bool) -> tuple[list[RoundResult], Tensors]:
    run, model, federation = small_vit_run(method, optimizer, 3)
    played = list(rounds(run, model, SimulationEngine(run, model, federation, block=4, **engine)))
    return played, played[-1].server.params


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("method", "optimizer", "engine"), CASES.values(), ids=CASES)
def test_run_with_packed_tensors_equals_a_plain_run(
    method: str, optimizer: AdamW | SGD, engine: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, params = play_small_run(method, optimizer, **engine)
    monkeypatch.setattr(phase_trainer, "PACKED_DEVICES", ("cpu",))
    seen: list[bool] = []
    add = Mean.add

    def watched(self: Mean, given: Tensors, weight: float) -> None:
        seen.append(isinstance(given, PackedTensors))
        add(self, given, weight)

    monkeypatch.setattr(Mean, "add", watched)
    in_rows, others = play_small_run(method, optimizer, **engine)
    assert max_relative_difference(others, params) < 1e-4
    for ours, theirs in zip(in_rows, plain, strict=True):
        assert ours.traffic == theirs.traffic
        assert ours.sent == theirs.sent
        for tag, measures in ours.drift.items():
            assert measures == pytest.approx(theirs.drift[tag], rel=1e-3, abs=1e-5)
    assert any(seen) == (method != "fedrep" and "wire" not in engine)  # phases and messages create plain dicts


def test_packed_update_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_trainer, "PACKED_DEVICES", ("cpu",))
    moved = phase_trainer.PhaseTrainer.deltas

    def broken(self: phase_trainer.PhaseTrainer) -> phase_trainer.PhaseDeltas:
        whole = moved(self)
        whole.deltas[1]["classifier.bias"].fill_(torch.nan)
        return replace(whole, largest=tensors.max_abs(whole.deltas[1]))

    monkeypatch.setattr(phase_trainer.PhaseTrainer, "deltas", broken)
    with pytest.raises(Exception, match=r"sent 'classifier.bias' with values that are not finite"):
        play_small_run("fedavg", AdamW())
