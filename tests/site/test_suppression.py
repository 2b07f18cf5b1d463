"""Hidden counts stay hidden, also from someone who knows the rule and the total."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest

from partita.site.description.suppression import suppress_independent, suppress_partition


@pytest.mark.parametrize(
    ("least", "cells", "most"), [(2, 2, 8), (2, 3, 8), (3, 2, 12), (3, 3, 11), (2, 4, 6), (3, 4, 8)]
)
def test_shown_counts_leave_a_small_cell_every_small_value(least: int, cells: int, most: int) -> None:
    """All tables are tried. An attacker sees the shown counts and the total, and computes which tables fit them."""
    fitting: dict[object, list[tuple[int, ...]]] = defaultdict(list)
    for table in product(range(most + 1), repeat=cells):
        if sum(table) >= 2 * least:
            fitting[sum(table), tuple(suppress_partition(table, table, least))].append(table)
    checked = 0
    for (total, shown), tables in fitting.items():  # type: ignore[misc]
        if total > most:  # larger tables with the same total were not tried
            continue
        for place in range(cells):
            assert shown[place] is None or shown[place] >= least
            if any(table[place] < least for table in tables):
                checked += 1
                assert {table[place] for table in tables} >= set(range(least)), (total, shown, place)
    assert checked


def test_without_small_cells_all_is_shown() -> None:
    assert suppress_partition([10, 12, 30], [10, 12, 30], 10) == [10, 12, 30]


def test_single_small_cell_hides_a_second_one() -> None:
    assert suppress_partition([200, 9, 300], [200, 9, 300], 10) == [None, None, 300]


def test_small_sum_of_hidden_cells_hides_the_table() -> None:
    assert suppress_partition([12, 1, 300], [12, 1, 300], 10) == [None, None, None]


def test_rows_of_few_patients_are_few() -> None:
    """Fifty rows of one patient are one patient."""
    assert suppress_partition([50, 60, 70], [1, 60, 70], 10) == [None, None, 70]


def test_cell_of_nearly_all_is_hidden_too() -> None:
    assert suppress_independent([95, 50, 4], [95, 50, 4], 100, 10) == [None, 50, None]
