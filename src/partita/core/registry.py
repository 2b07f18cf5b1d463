"""Find functions by name: built-in ones, those of installed packages, and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from partita.core.options import OptionError, closest_match, format_value
from partita.core.own_code import CodeError, Reference, load_function, parse_reference

T = TypeVar("T")

# What a name stands for -> the group of entry points by which packages add such names.
GROUPS = {
    "method": "partita.methods",
    "data": "partita.data",
    "model": "partita.models",
    "split": "partita.splits",
    "sampling": "partita.sampling",
    "metric": "partita.metrics",
    "tracker": "partita.trackers",
}


def find_function(index: Mapping[str, str], name: str, what: str) -> Callable[..., Any]:
    """Return the function of a name.

    Args:
        index: The built-in names, each with "module:function".
        name: A built-in name, a name that an installed package registers, or a reference to the user's own function:
            "file.py:function" or "package.module:function".
        what: What the name stands for, a key of `GROUPS`.

    Raises:
        OptionError: If there is no such name, or the user's code cannot be loaded.
    """
    if name in index:
        module, _, function = index[name].partition(":")
        imported: Callable[..., Any] = getattr(import_module(module), function)
        return imported
    reference = find_reference(index, name, what)
    if reference is None:
        known = {*index, *plugins(what)}
        raise OptionError(
            f"unknown {what} {format_value(name)}; {closest_match(name, known)}"
            + ("" if "." not in name else "; for your own code, write 'file.py:function'")
        )
    return load_function(reference)


def find_reference(index: Mapping[str, str], name: str, what: str) -> Reference | None:
    """Return where a name's function is, if it is not built in; None for a built-in or unknown name.

    Raises:
        CodeError: If the name is not a valid reference, or two packages register it.
    """
    if name in index:
        return None
    entry = plugins(what).get(name)
    return parse_reference(entry.value.partition(" ")[0] if entry else name)


def plugins(what: str) -> dict[str, EntryPoint]:
    """Return the names that installed packages register, with their entry points.

    Raises:
        CodeError: If two packages register the same name.
    """
    return _plugins(GROUPS[what])


@cache
def _plugins(group: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other != entry:
            raise CodeError(
                f"the packages {package_of(other)} and {package_of(entry)} both register '{entry.name}' in '{group}'; "
                "uninstall one of them, or name the function as 'package.module:function'"
            )
    return found


def package_of(entry: EntryPoint) -> str:
    """Return the name and version of the package that has an entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "(unknown)"


def check_result(result: object, kind: type[T], name: str, what: str) -> T:
    """Return what a function returned, if it has the expected type.

    Raises:
        CodeError: If it has another type.
    """
    if not isinstance(result, kind):
        raise CodeError(
            f"the {what} '{name}' returned a {type(result).__name__}; it must return a partita {kind.__name__}"
        )
    return result
