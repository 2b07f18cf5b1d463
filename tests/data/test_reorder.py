"""Orders by client: patches and tokens are permuted, not changed; one order per client; off leaves every bit alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita import data
from partita.core.rng import Key
from partita.data import DataError, Federation, Task
from partita.data.ragged import ragged
from partita.data.reorder import permute_patches, reversed_places, window_places
from partita.tasks import TEXT

quick = settings(max_examples=30, deadline=None)
CLS, SEP, UNK = 1, 2, 3
TOKENIZER: Any = SimpleNamespace(all_special_ids=[0, CLS, SEP, UNK], unk_token_id=UNK)


class OnDisk:
    """Images that are not in memory."""

    targets = torch.zeros(4, dtype=torch.long)

    def __len__(self) -> int:
        return 4


def digits(**options: Any) -> Federation:
    return data.split(data.load("digits", Key(0)), "iid", clients=4, key=Key(1), **options)


def texts(rows: list[list[int]], **options: Any) -> Federation:
    """One client for each row, in an order of the rows that is the same with and without `reorder`."""
    table = ragged(rows, 64, torch.zeros(len(rows), dtype=torch.long))
    columns = {"own": np.array([f"{place:03}" for place in range(len(rows))])}
    task = Task("toy", table, table, ("a",), columns, kind=TEXT, vocabulary_size=99, tokenizer=TOKENIZER)
    return data.split(task, "by_column", column="own", key=Key(1), validation=0.0, test=0.0, **options)


def tokens(federation: Federation) -> list[list[int]]:
    taken = [federation[client].train.take(torch.arange(1)).inputs for client in federation.clients]
    return [batch["input_ids"][0, : int(batch["attention_mask"].sum())].tolist() for batch in taken]


def pixels(examples: Any) -> torch.Tensor:
    return examples.take(torch.arange(len(examples))).inputs["pixel_values"]


def patches(images: torch.Tensor, size: int) -> torch.Tensor:
    """The patches by plain slicing, (row, patch, pixel)."""
    side = images.shape[-1] // size
    cut = [
        images[..., y * size : (y + 1) * size, x * size : (x + 1) * size].flatten(1)
        for y in range(side)
        for x in range(side)
    ]
    return torch.stack(cut, 1)


def order_of(before: torch.Tensor, after: torch.Tensor, size: int) -> list[int]:
    """The one permutation that maps the patches of all images, found by comparing them."""
    old, new = patches(before, size), patches(after, size)
    same = (new[:, :, None] == old[:, None]).all(-1).all(0)  # (new, old)
    assert (same.sum(1) == 1).all()
    assert (same.sum(0) == 1).all()
    return same.int().argmax(1).tolist()


@quick
@given(side=st.integers(1, 4), size=st.integers(1, 3), channels=st.integers(1, 3), seed=st.integers(0, 999))
def test_patch_i_of_the_result_is_the_patch_that_the_permutation_names(side, size, channels, seed):
    images = torch.arange(2 * channels * (side * size) ** 2).reshape(2, channels, side * size, side * size)
    permutation = Key(seed).permutation(side * side)
    after = permute_patches(images, size, permutation)
    assert torch.equal(patches(after, size), patches(images, size)[:, permutation])
    assert torch.equal(permute_patches(after, size, permutation.argsort()), images)


def test_each_client_has_one_order_in_all_its_parts():
    plain, changed = digits(), digits(reorder="patches", reorder_size=2)
    orders = []
    for client in plain.clients:
        before, after = plain[client], changed[client]
        parts = [(before.train, after.train), (before.validation, after.validation), (before.test, after.test)]
        found = [order_of(pixels(old), pixels(new), 2) for old, new in parts]
        assert found[0] == found[1] == found[2]
        assert sorted(found[0]) == list(range(16))
        orders.append(tuple(found[0]))
        assert torch.equal(*(each.train.take(torch.arange(20)).targets for each in (before, after)))
    assert len(set(orders)) == 4


def test_clients_take_turns_with_fewer_orders():
    plain, changed = digits(), digits(reorder="patches", reorder_size=4, orders=2)
    found = [order_of(pixels(plain[name].train), pixels(changed[name].train), 4) for name in plain.clients]
    assert found[0] == found[2] != found[1] == found[3]


def test_the_central_test_set_is_dealt_out_evenly_over_the_orders():
    plain, changed = digits(), digits(reorder="patches", reorder_size=2, orders=3)
    orders = {tuple(order_of(pixels(plain[name].train), pixels(changed[name].train), 2)) for name in plain.clients}
    assert len(orders) == 3
    counts = dict.fromkeys(orders, 0)
    old, new = patches(pixels(plain.test), 2), patches(pixels(changed.test), 2)
    for before, after in zip(old, new, strict=True):
        fits = [order for order in orders if torch.equal(after, before[list(order)])]
        assert fits
        if len(fits) == 1:
            counts[fits[0]] += 1
    assert max(counts.values()) - min(counts.values()) <= 1
    assert changed.test.targets.equal(plain.test.targets)


def test_without_it_the_tables_are_the_same_objects():
    task = data.load("digits", Key(0))
    federation = data.split(task, "iid", clients=4, key=Key(1))
    assert federation.task is task


def test_the_pooled_data_keeps_the_orders_of_its_clients():
    changed = digits(reorder="patches", reorder_size=2)
    pooled = changed.pooled()["pooled"].train
    assert torch.equal(pixels(pooled), torch.cat([pixels(changed[name].train) for name in changed.clients]))


def test_every_second_client_reads_backwards_and_special_tokens_stay():
    rows = [[CLS, 10, 11, 12, SEP], [CLS, 10, 11, UNK, 13, SEP], [CLS, SEP], [CLS, 20, SEP, 21, 22, SEP]]
    turned = tokens(texts(rows, reorder="reverse"))
    assert turned == [rows[0], [CLS, 13, UNK, 11, 10, SEP], rows[2], [CLS, 22, SEP, 21, 20, SEP]]


@quick
@given(lengths=st.lists(st.integers(0, 11), min_size=1, max_size=5), size=st.integers(1, 5), seed=st.integers(0, 99))
def test_windows_are_permuted_within_themselves(lengths, size, seed):
    rows = [[CLS, *range(10, 10 + length), SEP] for length in lengths]
    content = torch.tensor([token >= 10 for row in rows for token in row])
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    of_row = torch.arange(len(rows)) % 2
    permutations = torch.stack([Key(seed + order).permutation(size) for order in range(2)])
    sources = window_places(content, offsets, of_row, permutations)
    flat = torch.tensor([token for row in rows for token in row])[sources].tolist()
    for place, length in enumerate(lengths):
        got = flat[int(offsets[place]) : int(offsets[place + 1])]
        expected = [CLS]
        for start in range(0, length, size):
            window = range(10 + start, 10 + min(start + size, length))
            expected += [window[index] for index in permutations[place % 2].tolist() if index < len(window)]
        assert got == [*expected, SEP]


def test_reversing_twice_changes_nothing():
    content, offsets = torch.tensor([0, 1, 1, 1, 0, 1, 1], dtype=torch.bool), torch.tensor([0, 5, 7])
    sources = reversed_places(content, offsets, torch.ones(2, dtype=torch.long))
    assert torch.equal(sources[sources], torch.arange(7))
    assert sources.tolist() == [0, 3, 2, 1, 4, 6, 5]


def test_windows_of_a_split_follow_the_client():
    row = [CLS, *range(10, 22), SEP]
    got = tokens(texts([row] * 4, reorder="windows", reorder_size=6, orders=2))
    assert got[0] == got[2] != got[1] == got[3]
    for each in got:
        assert (each[0], each[-1]) == (CLS, SEP)
        assert sorted(each[1:7]) == list(range(10, 16))
        assert sorted(each[7:13]) == list(range(16, 22))
        assert [token - 6 for token in each[7:13]] == each[1:7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reorder_size": 2}, "split.reorder_size has no effect without split.reorder"),
        ({"orders": 2}, "split.orders has no effect without split.reorder"),
        ({"reorder": "patches"}, "needs split.reorder_size, the side of a patch in pixels"),
        ({"reorder": "patches", "reorder_size": 3}, "images of 8 pixels must be several patches; use 1, 2, 4"),
        ({"reorder": "patches", "reorder_size": 8}, "images of 8 pixels must be several patches; use 1, 2, 4"),
        ({"reorder": "reverse"}, "is for tasks of texts with a target per text, not for digits"),
        ({"reorder": "windows", "reorder_size": 4}, "is for tasks of texts with a target per text, not for digits"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        digits(**options)


def test_texts_refuse_patches_and_needless_sizes():
    rows = [[CLS, 10, 11, SEP]] * 2
    with pytest.raises(DataError, match="is for tasks of images with a target per image, not for toy"):
        texts(rows, reorder="patches", reorder_size=2)
    with pytest.raises(DataError, match="'reverse' has no size and two orders"):
        texts(rows, reorder="reverse", orders=3)
    with pytest.raises(DataError, match=r"needs split\.reorder_size, the tokens of a window"):
        texts(rows, reorder="windows")


def test_pairs_and_images_on_disk_are_refused():
    rows = [[CLS, 10, 11, SEP]] * 2
    pairs = ragged(rows, 64, torch.zeros(2, dtype=torch.long), segments=[[0, 0, 1, 1]] * 2)
    task = Task("toy", pairs, pairs, ("a",), kind=TEXT, vocabulary_size=99, tokenizer=TOKENIZER)
    with pytest.raises(DataError, match="is for single texts"):
        data.split(task, "iid", clients=2, key=Key(0), reorder="reverse")
    images: Any = OnDisk()
    task = Task("toy", images, images, ("a",), channels=1, size=4)
    with pytest.raises(DataError, match=r"needs the images in memory; raise data\.memory"):
        data.split(task, "iid", clients=2, key=Key(0), reorder="patches", reorder_size=2)
