"""The bytes of a round are those of its messages, however the meter remembers them."""

from __future__ import annotations

from collections import Counter

import torch

from partita.core import serialization
from partita.core.client import Job
from partita.core.tensors import Slots, Tensors
from partita.core.traffic import TrafficMeter
from partita.core.update import Update

PARAMS = {"w": torch.zeros(8), "b": torch.zeros(2)}
BOTH = frozenset(PARAMS)


def make_job(stale: frozenset[str] = BOTH, params: Tensors = PARAMS, slots: Slots | None = None) -> Job:
    return Job(0, "a", params, stale, slots or {})


def bytes_of(part: Tensors, **slots: Tensors) -> Counter[str]:
    return serialization.total_bytes([serialization.byte_counts({"params": part, **slots})])


def down(*jobs: tuple[Job, bool]) -> Counter[str]:
    meter = TrafficMeter()
    for job, common in jobs:
        meter.add_job(job, common)
    return meter.total().down


def test_meter_counts_only_parameters_that_travel() -> None:
    assert down((make_job(frozenset({"w"})), True)) == bytes_of({"w": PARAMS["w"]})
    assert down((make_job(), True)) == bytes_of(PARAMS)
    assert bytes_of(PARAMS)["w"] > bytes_of({"w": PARAMS["w"]})["b"] == 0


def test_meter_counts_the_slots_of_a_job() -> None:
    slots = {"control": {"w": torch.zeros(8)}}
    assert down((make_job(slots=slots), False)) == bytes_of(PARAMS, **slots)


def test_meter_counts_each_client_of_a_common_message() -> None:
    one, part = bytes_of(PARAMS), bytes_of({"w": PARAMS["w"]})
    found = down((make_job(), True), (make_job(frozenset({"w"})), True), (make_job(), True))
    assert found == {name: 2 * one[name] + part[name] for name in one}


def test_meter_weighs_common_messages_once() -> None:
    """The second job has other tensors, which a common message would not have: the meter does not look at them."""
    large = {"w": torch.zeros(80), "b": torch.zeros(2)}
    double = {name: 2 * count for name, count in bytes_of(PARAMS).items()}
    assert down((make_job(), True), (make_job(params=large), True)) == double


def test_meter_weighs_each_message_with_tensors_of_its_own() -> None:
    """Neither is such a message remembered, nor is a remembered one used for it."""
    large = {"w": torch.zeros(80), "b": torch.zeros(2)}
    both = bytes_of(PARAMS) + bytes_of(large)
    assert down((make_job(), True), (make_job(params=large), False)) == both
    assert down((make_job(), False), (make_job(params=large), True)) == both


def test_meter_counts_updates_with_their_slots() -> None:
    meter = TrafficMeter()
    slots = {"control": {"w": torch.zeros(8)}}
    for _ in range(2):
        meter.add_update(Update("a", PARAMS, slots, 1.0, {}, None))
    traffic = meter.total()
    one = serialization.byte_counts({"delta": PARAMS, **slots})
    assert traffic.up == {name: 2 * count for name, count in one.items()}
    assert traffic.down == {}
