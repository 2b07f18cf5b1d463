"""The picture of a split and its skew, against scipy."""

from __future__ import annotations

import base64
import re
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

from partita.report.split import NUMBERED, Split, picture, skew, to_json, to_text
from partita.report.templating import render


def split_of(counts: list[list[int]], population: int | None = None) -> Split:
    clients = [
        {"name": f"c{place}", "train": sum(own), "validation": 1, "test": 2, "labels": own}
        for place, own in enumerate(counts)
    ]
    return Split([], 0, population or len(counts), [f"k{n}" for n in range(len(counts[0]))], clients)


counts = st.integers(2, 5).flatmap(
    lambda classes: st.lists(st.lists(st.integers(0, 50), min_size=classes, max_size=classes), min_size=1, max_size=6)
)


@given(counts)
def test_skew_is_that_of_scipy(drawn: list[list[int]]) -> None:
    table = np.array(drawn)
    found = skew(split_of(drawn))
    pool = table.sum(0)
    if pool.sum():
        assert found.entropy == pytest.approx(stats.entropy(pool, base=2))
    for own, client in zip(table, found.clients, strict=True):
        if not own.sum():
            assert client.entropy is client.distance is None
            continue
        assert client.entropy == pytest.approx(stats.entropy(own, base=2), abs=1e-12)
        assert client.distance == pytest.approx(np.abs(own / own.sum() - pool / pool.sum()).sum() / 2)
        assert client.classes == np.count_nonzero(own)
    assert (found.smallest, found.largest) == (table.sum(1).min(), table.sum(1).max())


def test_equal_clients_have_no_distance_and_disjoint_ones_a_large_one() -> None:
    assert skew(split_of([[5, 5], [50, 50]])).mean_distance == 0
    assert skew(split_of([[9, 0], [0, 9]])).mean_distance == 0.5
    assert skew(split_of([[9, 0], [0, 9]])).mean_entropy == 0


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("clients", "classes"), [(3, 2), (3, 100), (1000, 2), (1000, 100), (24, 10), (1, 1)])
def test_picture_works_for_few_and_many(clients: int, classes: int) -> None:
    draw = np.random.default_rng(0)
    table = draw.integers(0, 9, (clients, classes))
    table[0, 0] = 20  # the largest count
    drawn = picture(split_of(table.tolist(), 5 * clients))
    image = Image.open(BytesIO(base64.b64decode(drawn["image"].partition(",")[2])))
    assert image.size == (clients, classes)
    opacity = np.asarray(image)[:, :, 3].T  # (client, class)
    assert np.array_equal(opacity == 0, table == 0)
    assert opacity[0, 0] == opacity.max()
    assert len(re.findall("M", drawn["bars"])) == clients
    assert len(drawn["cells"]) == (np.count_nonzero(table) if max(clients, classes) <= NUMBERED else 0)
    svg = render("split_svg", picture=drawn, title="t", standalone=True)
    assert len(svg) < 200_000
    assert (f"{clients} clients, the first of {5 * clients}" in svg) == (clients > 40)


def test_split_without_classes_has_bars_only() -> None:
    split = Split([], 0, 2, (), [{"name": n, "train": k, "validation": 0, "test": 0} for n, k in (("a", 3), ("b", 9))])
    drawn = picture(split)
    assert drawn["image"] is None
    assert drawn["summary"] == "2 of 2 clients with 3 to 9 training examples (median 6)."
    assert "entropy" not in to_text(split)
    assert to_json(split)["skew"]["mean_distance"] is None


def test_hostile_names_stay_text_on_terminals_and_in_pictures() -> None:
    split = Split(
        [], 0, 1, ["<b>\x1b[2J"], [{"name": "</svg>\x1b", "train": 1, "validation": 0, "test": 0, "labels": [1]}]
    )
    text = to_text(split)
    assert "\x1b" not in text
    assert "\\x1b" in text
    svg = render("split_svg", picture=picture(split), title="</title>", standalone=True)
    assert svg.count("</svg>") == 1
    assert "<b>" not in svg
    assert "\x1b" not in svg


def test_terminal_lists_the_first_clients_and_counts_the_others() -> None:
    text = to_text(split_of([[1, 2]] * 100, 300))
    assert "c59" in text
    assert "c60" not in text
    assert "240 more clients are not listed" in text
