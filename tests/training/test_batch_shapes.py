"""The shapes of batches: enough for every client, and few."""

from __future__ import annotations

import pytest
import torch

from partita.core.batch_schedule import BatchSchedule
from partita.core.data import IGNORE_INDEX, Batch
from partita.core.rng import Key
from partita.data.ragged import RaggedExamples, ragged
from partita.data.seq2seq_examples import Seq2SeqExamples
from partita.data.task import Subset, Table
from partita.training.batch_shapes import BatchPadding, StepShape, few_clients, round_up, step_shapes, widen
from partita.training.batching import iterate_batches
from partita.training.padding_meter import PaddingMeter

FULL = 8
PADDING = BatchPadding(2, FULL)


def drawn_sizes(seed: int, clients: int) -> list[tuple[int, ...]]:
    """Batch sizes of clients with 1 to 60 examples, most steps first."""
    counts = torch.randint(1, 61, (clients,), generator=Key(seed).generator()).tolist()
    sizes = [(*[FULL] * (count // FULL), *[count % FULL] * (count % FULL > 0)) for count in counts]
    return sorted(sizes, key=len, reverse=True)


def present(sizes: list[tuple[int, ...]], step: int) -> list[int]:
    return [own[step] for own in sizes if step < len(own)]


@pytest.mark.parametrize("padding", [None, PADDING, BatchPadding(3, None)])
def test_shapes_hold_every_batch(padding: BatchPadding | None) -> None:
    for seed in range(20):
        sizes = drawn_sizes(seed, 1 + seed % 12)
        for step, shape in enumerate(step_shapes(sizes, padding)):
            batches = present(sizes, step)
            assert shape.active == len(batches) <= shape.clients <= len(sizes)
            assert shape.units >= max(batches)
            assert shape.masked or (shape.clients == shape.active and {*batches} == {shape.units})


def test_eager_steps_are_padded_to_the_largest_batch_only() -> None:
    assert step_shapes([(3, 3, 1), (3, 2)]) == [
        StepShape(2, 2, 3, False),
        StepShape(2, 2, 3, True),
        StepShape(1, 1, 1, False),
    ]
    assert step_shapes([(0,)]) == [StepShape(1, 1, 1, True)]


def test_captured_steps_of_unequal_clients_have_few_shapes() -> None:
    """One size for a block, and numbers of clients that grow by at least a third from four on."""
    for seed in range(20):
        clients = 2 + 3 * seed
        sizes = drawn_sizes(seed, clients)
        if len({*sizes}) == 1:
            continue
        shapes = {(shape.clients, shape.units, shape.masked) for shape in step_shapes(sizes, PADDING)}
        assert {masked for *_, masked in shapes} == {True}
        assert len({units for _, units, _ in shapes}) == 1
        assert len(shapes) <= 2 * clients.bit_length()
    # Whoever trains together, a run has no more than this.
    every = {(few_clients(count, 64), PADDING.units(size)) for count in range(1, 65) for size in range(1, FULL + 1)}
    assert len(every) == 12 * 4


def test_small_clients_are_padded_to_a_part_of_the_full_size() -> None:
    """The size of a block is that of its largest batch, rounded up: also for its last steps, which have less."""
    assert step_shapes([(5, 1), (3,)], PADDING) == [StepShape(2, 2, 6, True), StepShape(1, 1, 6, True)]


def test_captured_steps_of_equal_clients_are_not_padded() -> None:
    sizes = [(8, 8, 3)] * 4
    assert step_shapes(sizes, PADDING) == step_shapes(sizes)


def test_full_batches_of_a_single_client_are_not_padded() -> None:
    full, part, small = step_shapes([(8, 5, 1)], PADDING)
    assert (full, part, small) == (StepShape(1, 1, 8, False), StepShape(1, 1, 6, True), StepShape(1, 1, 2, True))


def test_padded_size_is_a_multiple_up_to_the_full_size() -> None:
    assert [BatchPadding(3, 8).units(size) for size in (0, 1, 3, 4, 7, 8)] == [3, 3, 3, 6, 8, 8]
    assert [BatchPadding(3, None).units(size) for size in (0, 3, 7, 10)] == [3, 3, 9, 12]


def test_clients_are_padded_by_less_than_a_half_and_tokens_by_less_than_a_quarter() -> None:
    for bits, share in ((2, 1 / 2), (3, 1 / 4)):
        found = [round_up(number, bits) for number in range(1, 1000)]
        assert found == sorted(found)
        assert all(number <= up < number * (1 + share) for number, up in enumerate(found, 1))
        assert all(bin(up).rstrip("0").count("1") <= bits and len(bin(up).rstrip("0")) <= 2 + bits for up in found)
    assert [few_clients(count, 7) for count in range(1, 8)] == [1, 2, 3, 4, 6, 6, 7]


# ---- widths of tokens


def texts(lengths: list[int], limit: int, each_token: bool = False) -> RaggedExamples:
    rows = [[1 + place] * length for place, length in enumerate(lengths)]
    if each_token:
        return ragged(rows, limit, tags=rows)
    return ragged(rows, limit, torch.arange(len(lengths)))


def test_widths_are_rounded_up_to_at_most_the_limit() -> None:
    wide = [widen(texts([length], 104).take(torch.arange(1)), (104, 0), 1) for length in (8, 33, 66, 97)]
    assert [batch.inputs["input_ids"].shape[1] for batch in wide] == [8, 40, 80, 104]
    for batch, length in zip(wide, (8, 33, 66, 97), strict=True):
        assert batch.inputs["attention_mask"].sum() == length
        assert batch.inputs["input_ids"].sum() == length
        assert batch.targets.shape == (1,)


def test_targets_of_tokens_are_widened_with_ignored_ones_and_others_are_not() -> None:
    by_token = texts([33], 64, each_token=True)
    batch = widen(by_token.take(torch.arange(1)), by_token.limits, 1)
    assert batch.targets.shape == (1, 40)
    assert (batch.targets == IGNORE_INDEX).sum() == 7
    several = Batch(texts([33], 64).take(torch.arange(1)).inputs, torch.zeros(1, 33))  # as many numbers as tokens
    assert widen(several, texts([33], 64).limits, 1).targets.shape == (1, 33)


def test_decoder_inputs_have_the_width_of_the_targets() -> None:
    pairs = Seq2SeqExamples(texts([33], 64), texts([70], 72), start=0)
    batch = widen(pairs.take(torch.arange(1)), pairs.limits, 1)
    assert {name: value.shape[1] for name, value in batch.inputs.items()} == {
        "input_ids": 40, "attention_mask": 40, "decoder_input_ids": 72,
    }  # fmt: skip
    assert batch.targets.shape == (1, 72)


def test_only_padded_steps_widen_tokens() -> None:
    part = Subset(texts([33, 5, 66, 79], 96), torch.arange(3))
    schedule = BatchSchedule(torch.arange(3), (2, 1))
    shapes = step_shapes([schedule.sizes], BatchPadding(1, 2))
    plain = list(iterate_batches([part], [schedule], torch.device("cpu")))
    padded = list(iterate_batches([part], [schedule], torch.device("cpu"), None, shapes))
    assert [batch.inputs["input_ids"].shape for batch in plain] == [(2, 40), (1, 72)]
    assert [batch.inputs["input_ids"].shape for batch in padded] == [(2, 40), (1, 80)]
    alike = Subset(texts([66, 66, 66], 96), torch.arange(3))  # no batch is longer than the longest text of the table
    padded = list(iterate_batches([alike], [schedule], torch.device("cpu"), None, shapes))
    assert [batch.inputs["input_ids"].shape for batch in padded] == [(2, 72), (1, 72)]


@pytest.mark.parametrize("shared", [True, False])
def test_finished_client_does_not_widen_a_batch(shared: bool) -> None:
    """Its place is taken by a masked copy, although its own first text is the longest of all."""
    lengths = [64, 3, 4, 5, 6, 7, 8, 5, 6, 7, 3]
    table = texts(lengths, 64)
    rows = [torch.tensor([place, place + 5]) for place in range(1, 6)] + [torch.tensor([0])]
    parts = [Subset(table if shared else texts(lengths, 64), own) for own in rows]
    schedules = [BatchSchedule(torch.arange(2), (1, 1))] * 5 + [BatchSchedule(torch.arange(1), (1,))]
    shapes = step_shapes([schedule.sizes for schedule in schedules], BatchPadding(1, 1))
    assert [(shape.active, shape.clients) for shape in shapes] == [(6, 6), (5, 6)]
    first, second = iterate_batches(parts, schedules, torch.device("cpu"), None, shapes)
    assert first.inputs["input_ids"].shape == (6, 1, 64)
    assert second.inputs["input_ids"].shape == (6, 1, 8)
    assert second.mask is not None
    assert second.mask.tolist() == [[1.0]] * 5 + [[0.0]]


# ---- how much is padding


def test_padding_of_examples_is_counted_by_client() -> None:
    table = Table({"x": torch.zeros(8, 2)}, torch.zeros(8))
    parts = [Subset(table, torch.arange(8))] * 6
    sizes = [(2, 2), (2, 2), (2, 2), (2, 2), (2, 1), (1,)]
    schedules = [BatchSchedule(torch.arange(sum(own)), own) for own in sizes]
    for padding, computed in ((None, [4, 4, 4, 4, 4, 2]), (BatchPadding(2, 2), [4, 4, 4, 4, 4, 4])):
        meter = PaddingMeter(len(parts))
        shapes = step_shapes(sizes, padding)
        list(iterate_batches(parts, schedules, torch.device("cpu"), None, shapes if padding else None, meter))
        assert [work.real for work in meter.work()] == [sum(own) for own in sizes]
        assert [work.computed for work in meter.work()] == computed


@pytest.mark.parametrize("clients", [1, 2])
def test_padding_of_tokens_is_counted_with_that_of_examples(clients: int) -> None:
    parts = [Subset(texts([3, 9, 20], 64), torch.arange(3))] * clients
    schedules = [BatchSchedule(torch.arange(3), (2, 1))] * clients
    meter = PaddingMeter(clients)
    shapes = step_shapes([(2, 1)], BatchPadding(2, 2)) if clients == 1 else None
    list(iterate_batches(parts, schedules, torch.device("cpu"), None, shapes, meter))
    last = 2 * 24 if clients == 1 else 24  # a single client's last batch is padded to two examples
    assert [(work.real, work.computed) for work in meter.work()] == [(3 + 9 + 20, 2 * 16 + last)] * clients


def test_full_batches_have_no_padding() -> None:
    meter = PaddingMeter(1)
    meter.add(Batch({"x": torch.zeros(5, 2)}, torch.zeros(5, 7)))
    assert [(work.real, work.computed) for work in meter.work()] == [(5, 5)]
