"""Elements of the page that sections return as data, and templates turn into HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Table:
    """A table. Its first column names the rows."""

    caption: str  # said by screen readers
    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    kind: str = "text"  # CSS class: "text", or "numbers" for columns of numbers
    groups: Sequence[str] = ()  # group of each heading, in a row above; equal neighbours are joined
    labels: bool = False  # whether cells of the first column and headings that are labels show the label's line

    @property
    def joined_groups(self) -> list[tuple[str, int]]:
        """The groups with their numbers of columns."""
        return [(group, len(list(members))) for group, members in groupby(self.groups)]

    def starts_group(self, column: int) -> bool:
        """Return whether a column is the first of its group, and so has a rule at its left."""
        return bool(column and self.groups and self.groups[column] and self.groups[column] != self.groups[column - 1])


@dataclass(frozen=True)
class HeatMap:
    """A picture of shares: the stronger the color of a cell, the higher its share."""

    name: str  # id of the element
    title: str  # bold start of the caption
    caption: str  # rest of the caption
    summary: str  # what the picture shows, for screen readers
    rows: Sequence[str]  # names from top to bottom
    columns: Sequence[str]  # names from left to right
    shares: Sequence[Sequence[float | None]]  # (row, column), from 0 to 1; None where there is none
