"""Options checked against a signature: an unknown key, a wrong type or a missing value is named, with the remedy."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class OptionError(ValueError):
    """An option that is unknown, missing, or of the wrong type."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' or, where nothing is near, the list."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"it can be: {', '.join(known)}"


def pick(index: Mapping[str, str], name: str, what: str) -> Callable[..., Any]:
    """The function that an index lists under the name as "module:function", imported only now."""
    if name not in index:
        raise OptionError(f"unknown {what} '{name}'; {nearest(name, index)}")
    module, _, function = index[name].partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def bind(
    target: Callable[..., Any], options: Mapping[str, Any], where: str, given: Iterable[str] = ()
) -> dict[str, Any]:
    """The options as arguments of a function or dataclass; `given` are those that come from elsewhere."""
    parameters = {name: each for name, each in inspect.signature(target).parameters.items() if name not in set(given)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    open_names = [name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD]
    for key, value in options.items():
        if key not in open_names and not takes_any:
            remedy = nearest(key, open_names) if open_names else "there are no options here"
            raise OptionError(f"unknown key '{where}.{key}'; {remedy}")
        if key in open_names and key in hints and not fits(value, hints[key]):
            raise OptionError(f"{where}.{key} is {value!r}; it must be {describe(hints[key])}")
    for name in open_names:
        if name not in options and parameters[name].default is inspect.Parameter.empty:
            raise OptionError(f"'{where}.{name}' is missing; it must be {describe(hints.get(name, Any))}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def fits(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in get_args(hint))
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in get_args(hint))
    if origin in (tuple, list):
        return isinstance(value, tuple | list) and all(fits(each, get_args(hint)[0]) for each in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is None or hint is type(None):
        return value is None
    return isinstance(value, hint)


def describe(hint: Any) -> str:
    plain = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "left out"}
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(each) for each in get_args(hint))
    if origin is Literal:
        return " or ".join(f"'{each}'" if isinstance(each, str) else str(each) for each in get_args(hint))
    if origin in (tuple, list):
        return f"a list, each {describe(get_args(hint)[0])}"
    return plain.get(hint, getattr(hint, "__name__", str(hint)))
