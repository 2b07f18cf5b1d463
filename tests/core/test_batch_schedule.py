"""Which examples a client trains on: shuffled and Poisson-sampled batches, and how many there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core import memory
from partita.core.batch_schedule import (
    MANY_EXAMPLES,
    BatchSchedule,
    count_steps,
    group_by_length,
    poisson_batches,
    shuffled_batches,
)
from partita.core.rng import Key
from partita.core.settings import Training


def test_schedule_yields_consecutive_parts_of_its_order() -> None:
    schedule = BatchSchedule(torch.tensor([4, 2, 0, 1, 3]), (2, 0, 3))
    assert len(schedule) == 3
    assert [batch.tolist() for batch in schedule] == [[4, 2], [], [0, 1, 3]]


@pytest.mark.parametrize(
    ("count", "epochs", "steps", "of_phase", "fraction", "wanted"),
    [
        (10, 1, None, None, 1.0, 3),
        (8, 1, None, None, 1.0, 2),
        (1, 1, None, None, 1.0, 1),
        (10, 2, None, None, 1.0, 6),
        (10, 2, None, 3, 1.0, 9),
        (10, 2, 7, None, 1.0, 7),
        (10, 2, 7, 3, 1.0, 9),
        (10, 2, None, None, 0.5, 3),
        (10, 2, None, None, 0.7, 4),
        (10, 2, None, None, 0.0, 1),
    ],
)
def test_steps_follow_from_epochs_batches_and_the_fraction_completed(
    count: int, epochs: int, steps: int | None, of_phase: int | None, fraction: float, wanted: int
) -> None:
    training = Training(lr=1.0, batch_size=4, epochs=epochs, steps=steps)
    assert count_steps(count, training, of_phase, fraction) == wanted
    assert len(shuffled_batches(count, training, of_phase, Key(0), fraction)) == wanted
    assert len(poisson_batches(count, training, of_phase, Key(0), fraction)) == wanted


@pytest.mark.parametrize(("count", "steps"), [(100, MANY_EXAMPLES // 4), (3, MANY_EXAMPLES // 3)])
def test_memory_is_checked_only_when_an_order_has_more_than_a_hundred_million_examples(
    monkeypatch: pytest.MonkeyPatch, count: int, steps: int
) -> None:
    """An index takes 8 bytes, and concatenating the epochs takes as much again."""
    asked: list[tuple[int, str, str]] = []
    monkeypatch.setattr(memory, "require", lambda *given: asked.append(given))
    training = Training(lr=1.0, batch_size=4, steps=steps)
    assert count_steps(count, training, None) == steps
    assert asked == []
    assert count_steps(count, replace(training, steps=steps + 1), None) == steps + 1
    what = f"the order of examples in {steps + 1:,} steps"
    assert asked == [(16 * (steps + 1) * min(count, 4), what, "train fewer epochs or steps per round")]


def test_shuffled_batches_follow_a_new_permutation_in_each_epoch() -> None:
    training, key = Training(lr=1.0, batch_size=4, epochs=2), Key(3)
    schedule = shuffled_batches(10, training, None, key)
    assert schedule.sizes == (4, 4, 2, 4, 4, 2)
    assert torch.equal(schedule.order, torch.cat([(key / epoch).permutation(10) for epoch in range(2)]))
    cut = shuffled_batches(10, training, None, key, fraction=0.7)
    assert cut.sizes == (4, 4, 2, 4)
    assert torch.equal(cut.order, schedule.order[:14])
    assert shuffled_batches(8, training, None, key).sizes == (4,) * 4


@pytest.mark.parametrize(("count", "share"), [(10, 0.4), (4, 1.0), (3, 1.0)])
def test_poisson_batches_draw_each_step_with_its_own_key(count: int, share: float) -> None:
    schedule = poisson_batches(count, Training(lr=1.0, batch_size=4, steps=5), None, Key(3))
    drawn = [(Key(3) / step).poisson(count, share) for step in range(5)]
    assert schedule.sizes == tuple(map(len, drawn))
    assert all(torch.equal(one, two) for one, two in zip(schedule, drawn, strict=True))


@given(
    count=st.integers(1, 40),
    size=st.integers(1, 12),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
    fraction=st.floats(0, 1),
)
@settings(max_examples=60)
def test_each_epoch_is_a_permutation_and_a_straggler_gets_a_prefix(
    count: int, size: int, epochs: int, seed: int, fraction: float
) -> None:
    training = Training(lr=1.0, batch_size=size, epochs=epochs)
    key = Key(seed) / "deal"
    batches = list(shuffled_batches(count, training, None, key))
    per_epoch = -(-count // size)
    assert len(batches) == epochs * per_epoch
    for epoch in range(epochs):
        own = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert all(len(batch) == size for batch in own[:-1])
        assert sorted(torch.cat(own).tolist()) == list(range(count))
    again = list(shuffled_batches(count, training, None, key, fraction))
    assert len(again) == max(1, int(len(batches) * fraction))
    assert all(torch.equal(one, two) for one, two in zip(batches, again, strict=False))


def test_batch_order_follows_key_phase_epochs_and_steps() -> None:
    training = Training(lr=1.0, batch_size=4, steps=7)

    def flat(*path: Any, **more: Any) -> list[int]:
        key = Key(0)
        for step in path:
            key = key / step
        return shuffled_batches(10, more.pop("training", training), more.pop("epochs", None), key).order.tolist()

    assert flat("a") == flat("a") != flat("b")
    assert len(shuffled_batches(10, training, None, Key(0))) == 7
    assert len(shuffled_batches(10, training, 2, Key(0))) == 6  # a phase's own epochs override the run's steps
    assert flat("a")[:10] == flat("a", epochs=1)
    assert flat("a")[:10] != flat("a")[10:20]


def test_poisson_batches_sample_examples_independently() -> None:
    training = Training(lr=1.0, batch_size=20, steps=2000)
    batches = list(poisson_batches(50, training, None, Key(1)))
    taken = torch.zeros(2000, 50)
    for step, batch in enumerate(batches):
        taken[step, batch] = 1.0
    assert torch.allclose(taken.mean(0), torch.full((50,), 0.4), atol=0.05)
    # Examples are independent: batch sizes vary like a binomial, while shuffled batches would not vary at all.
    assert abs(float(taken.sum(1).var()) - 50 * 0.4 * 0.6) < 1.5
    assert poisson_batches(50, replace(training, batch_size=64, steps=3), None, Key(1)).sizes == (50, 50, 50)
    assert count_steps(50, replace(training, steps=None, epochs=3), None) == 9


# ---- texts of similar lengths


@pytest.mark.slow
@given(
    count=st.integers(1, 130),
    size=st.integers(1, 2),
    accumulate=st.integers(1, 2),
    steps=st.none() | st.integers(1, 300),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_each_fifty_steps_of_an_epoch_are_sorted_longest_first(
    count: int, size: int, accumulate: int, steps: int | None, seed: int
) -> None:
    """As transformers describes its own option: shuffle, cut, sort. Nothing but the order within a part changes."""
    training = Training(lr=1.0, batch_size=size, accumulate=accumulate, epochs=2, steps=steps)
    lengths = torch.randint(1, 9, (count,), generator=Key(seed).generator())
    plain = shuffled_batches(count, training, None, Key(seed))
    grouped = group_by_length(plain, lengths, training)
    assert grouped.sizes == plain.sizes
    order, expected = plain.order.tolist(), []
    for start in range(0, len(order), count):
        epoch = order[start : start + count]
        for first in range(0, len(epoch), 50 * size * accumulate):
            part = epoch[first : first + 50 * size * accumulate]
            expected += [row for length in range(8, 0, -1) for row in part if lengths[row] == length]
        if start + count <= len(order):
            assert sorted(expected[start : start + count]) == list(range(count))
    assert grouped.order.tolist() == expected


def test_epoch_has_the_order_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers also swaps a longest text to the front; here all parts begin with one, so nothing is swapped."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    training, count = Training(lr=1.0, batch_size=3), 7 * 150 + 70
    lengths = torch.randint(1, 6, (count,), generator=Key(4).generator())
    plain = shuffled_batches(count, training, None, Key(5))
    monkeypatch.setattr(torch, "randperm", lambda *given, **more: plain.order)
    theirs = get_length_grouped_indices(lengths.tolist(), 3, mega_batch_mult=50)
    assert group_by_length(plain, lengths, training).order.tolist() == theirs


@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 3}, {"accumulate": 2, "steps": 70}])
def test_texts_of_one_length_stay_where_they_are(options: dict[str, Any]) -> None:
    training = Training(lr=1.0, batch_size=4, **options)
    plain = shuffled_batches(230, training, None, Key(2))
    grouped = group_by_length(plain, torch.full((230,), 7), training)
    assert grouped.sizes == plain.sizes
    assert torch.equal(grouped.order, plain.order)


def test_few_steps_train_on_texts_of_all_lengths() -> None:
    """Sorting a whole epoch before it is cut would leave only the longest texts."""
    training = Training(lr=1.0, batch_size=4, steps=2)
    lengths = torch.arange(100)
    seen = set()
    for seed in range(60):
        plain = shuffled_batches(100, training, None, Key(seed))
        grouped = group_by_length(plain, lengths, training)
        assert {*grouped.order.tolist()} == {*plain.order.tolist()}
        seen |= {*grouped.order.tolist()}
    assert len(seen) > 90
