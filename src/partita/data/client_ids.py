"""Sequences of client names, numbered or listed, with constant-time lookup by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from partita.core.options import format_value
from partita.data.errors import DataError


class NamedClients(Sequence[str]):
    """A list of client names with constant-time lookup of the position of a name.

    Raises:
        DataError: If two clients have the same name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._positions = {name: position for position, name in enumerate(self._names)}
        if len(self._positions) < len(self._names):
            twice = next(name for position, name in enumerate(self._names) if self._positions[name] != position)
            raise DataError(f"two clients are named {format_value(twice)}; give each client a unique name")

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, position: int) -> str: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[str]: ...
    def __getitem__(self, position: int | slice) -> str | Sequence[str]:
        return self._names[position]

    def __contains__(self, name: object) -> bool:
        return name in self._positions

    def index(self, name: Any, start: int = 0, stop: int | None = None) -> int:
        return _inside(self, name, self._positions.get(name), start, stop)


class NumberedClients(Sequence[str]):
    """Client names c0, c1, c2 and so on, created on access: a million names take no memory."""

    def __init__(self, count: int) -> None:
        self._numbers = range(count)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, position: int) -> str: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[str]: ...
    def __getitem__(self, position: int | slice) -> str | Sequence[str]:
        if isinstance(position, slice):
            return tuple(f"c{number}" for number in self._numbers[position])
        return f"c{self._numbers[position]}"

    def __contains__(self, name: object) -> bool:
        return self._position(name) is not None

    def index(self, name: Any, start: int = 0, stop: int | None = None) -> int:
        return _inside(self, name, self._position(name), start, stop)

    def _position(self, name: object) -> int | None:
        if not isinstance(name, str) or not name[1:].isdecimal():
            return None
        number = int(name[1:])
        return number if number in self._numbers and name == f"c{number}" else None  # "c07" is not "c7"


def _inside(names: Sequence[str], name: object, position: int | None, start: int, stop: int | None) -> int:
    if position is None or position not in range(len(names))[start:stop]:
        raise DataError(f"no client '{name}'; there are {len(names):,}, from '{names[0]}' to '{names[-1]}'")
    return position
