"""From a name to an object: by built-in functions, those of installed packages, and the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from partita.core.options import Option, OptionError, closest_match, format_value, options_of, validate_options
from partita.core.own_code import CodeError, Reference, describe_error, load_function, parse_reference


@dataclass(frozen=True)
class Kind:
    """What a name can stand for.

    Attributes:
        group: The group of entry points by which packages add names.
        index: Where the built-in names are, as "module:name"; "" if there are none.
        returns: The types that a function of this kind may return, likewise.
        given: Parameters of the functions that are not options.
        shared: Options of all names, which others check.
    """

    group: str
    index: str = ""
    returns: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


KINDS = {
    "method": Kind("partita.methods", "partita.methods:INDEX", ("partita.core.method:Method",)),
    "data": Kind("partita.data", "partita.data:INDEX", ("partita.data.task:Task",), ("key",), ("shots", "new_classes")),
    "split": Kind(
        "partita.splits",
        "partita.data.split:SPLITS",
        ("partita.data.partition:Partition", "collections.abc:Mapping"),
        ("task", "key"),
        ("validation", "test", "unseen", "shots", "reorder", "reorder_size", "orders"),
    ),
    "model": Kind(
        "partita.models", "partita.models:INDEX", ("partita.core.model:Model",), ("task", "key"), ("adapter",)
    ),
    "sampling": Kind("partita.sampling", "partita.core.sampling:SAMPLING", ("partita.core.sampling:Uniform",)),
    "metric": Kind("partita.metrics"),
    "tracker": Kind("partita.trackers", "partita.track:TRACKERS", ("collections.abc:Callable",)),
}


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def built_in(what: str) -> Mapping[str, str]:
    """Return the built-in names of a kind, each with "module:function"."""
    index: Mapping[str, str] = _load(KINDS[what].index) if KINDS[what].index else {}
    return index


def offered(what: str) -> list[str]:
    """Return the names of a kind: the built-in ones, and those that installed packages register."""
    return list(dict.fromkeys((*built_in(what), *plugins(what))))


def find_function(what: str, name: str) -> Callable[..., Any]:
    """Return the function of a name.

    Args:
        what: What the name stands for, a key of `KINDS`.
        name: A built-in name, a name that an installed package registers, or a reference to the user's own function:
            "file.py:function" or "package.module:function".

    Raises:
        OptionError: If there is no such name, or the user's code cannot be loaded.
    """
    if (place := built_in(what).get(name)) is not None:
        function: Callable[..., Any] = _load(place)
        return function
    reference = find_reference(what, name)
    if reference is None:
        raise OptionError(
            f"unknown {what} {format_value(name)}; {closest_match(name, offered(what))}"
            + ("" if "." not in name else "; for your own code, write 'file.py:function'")
        )
    return load_function(reference)


def takes(what: str, name: str, parameter: str) -> bool:
    """Return whether the function of a name has a parameter."""
    return parameter in inspect.signature(find_function(what, name)).parameters


def find_reference(what: str, name: str) -> Reference | None:
    """Return where a name's function is, if it is not built in; None for a built-in or unknown name.

    Raises:
        CodeError: If the name is not a valid reference, or two packages register it.
    """
    if name in built_in(what):
        return None
    entry = plugins(what).get(name)
    return parse_reference(entry.value.partition(" ")[0] if entry else name)


def plugins(what: str) -> dict[str, EntryPoint]:
    """Return the names that installed packages register, with their entry points.

    Raises:
        CodeError: If two packages register the same name.
    """
    return _plugins(KINDS[what].group)


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


def named(table: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name in a table of a config, and its other keys."""
    return table["name"], {key: value for key, value in table.items() if key != "name"}


def options_by_name(what: str, name: str) -> dict[str, Option]:
    """Return the options of the function of a name, without those that all names share."""
    return options_of(find_function(what, name), KINDS[what].given)


def check_options(what: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of a name against the signature of its function, and return them as keyword arguments.

    Raises:
        OptionError: If the name or an option is unknown, or an option is missing or invalid.
    """
    kind = KINDS[what]
    return validate_options(find_function(what, name), options, what, kind.given, name, kind.shared)


def make(what: str, name: str, options: Mapping[str, Any], /, **given: Any) -> Any:
    """Make what a name stands for, with options from a config.

    Args:
        what: What the name stands for, a key of `KINDS`.
        name: The name.
        options: The options.
        **given: The other arguments of its function.

    Raises:
        OptionError: As `check_options`.
        CodeError: If the function fails or returns another type.
    """
    return call(what, name, **given, **check_options(what, name, options))


def call(what: str, name: str, /, *args: Any, **options: Any) -> Any:
    """Call the function of a name, and return its result.

    Raises:
        CodeError: If it returns another type, or if the user's own function fails with an error that is no message.
    """
    function = find_function(what, name)
    try:
        result = function(*args, **options)
    except Exception as error:
        if isinstance(error, ValueError | OSError) or _is_built_in(function):
            raise
        raise CodeError(f"the {what} '{name}' failed: {describe_error(error, _file(function))}") from error
    returns = tuple(map(_load, KINDS[what].returns))
    if not isinstance(result, returns):
        wanted = " or ".join(kind.__name__ for kind in returns)
        raise CodeError(f"the {what} '{name}' returned a {type(result).__name__}; it must return a {wanted}")
    return result


def _is_built_in(function: Callable[..., Any]) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _file(function: Callable[..., Any]) -> str:
    return getattr(getattr(function, "__code__", None), "co_filename", "")
