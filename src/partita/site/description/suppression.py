"""Suppression of small counts, such that the counts that are shown do not reveal those that are hidden."""

from __future__ import annotations

from collections.abc import Sequence

Shown = list[int | None]  # None: hidden


def suppress_partition(counts: Sequence[int], units: Sequence[int], least: int) -> Shown:
    """Hide the small cells of a table in which each row is in exactly one cell, so that its total is known.

    If a cell has fewer than `least` units, the first cell with enough of them is hidden too: the total then reveals
    only the sum of all hidden cells. That sum must leave every small cell any value from 0 to `least` - 1, or the whole
    table is hidden. Which cell is hidden in addition, and whether the table is, depends only on what anyone can see. So
    not even someone who knows this rule learns more about a small cell than that it is small.

    Args:
        counts: Rows in each cell.
        units: Distinct units in each cell, such as patients; at most the rows.
        least: Smallest number of units that is shown.

    Returns:
        The counts, None where hidden.
    """
    small = [place for place, held in enumerate(units) if held < least]
    if not small:
        return list(counts)
    large = [place for place in range(len(counts)) if place not in small]
    hidden = {*small, *large[:1]}
    if not large or sum(counts[place] for place in hidden) < len(small) * (least - 1) + least:
        hidden = set(range(len(counts)))
    return [None if place in hidden else count for place, count in enumerate(counts)]


def suppress_independent(counts: Sequence[int], units: Sequence[int], total: int, least: int) -> Shown:
    """Hide the small cells of a table in which a row can be in any number of cells.

    No sum is known, so no further cell needs to be hidden. A cell that almost all units are in is hidden too: it would
    say how few are not in it.

    Args:
        counts: Rows in each cell.
        units: Distinct units in each cell.
        total: Number of all units.
        least: Smallest number of units that is shown.
    """
    return [None if held < least or total - held < least else count for count, held in zip(counts, units, strict=True)]
