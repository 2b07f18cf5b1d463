"""Check values from a file, which may be untrusted, against a type. Unknown keys are dropped."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

MAX_ITEMS = 2**53  # floats are exact up to this count
Check = Callable[[Any, str], Any]  # (value, where) -> checked value; raises ShapeError


class ShapeError(ValueError):
    """A value does not have the type."""


def refuse(value: Any, where: str, expected: str) -> ShapeError:
    """Return the error that says what a value must be."""
    shown = repr(value)
    return ShapeError(f"{where} is {shown[:40] + '…' if len(shown) > 40 else shown}; it must be {expected}")


def only(allows: Callable[[Any], Any], expected: str) -> Check:
    """Return a check, also for `Annotated`: refuse values that the function does not allow."""

    def check(value: Any, where: str) -> Any:
        if not allows(value):
            raise refuse(value, where, expected)
        return value

    return check


Count = Annotated[int, only(lambda value: 0 <= value < MAX_ITEMS, "a whole number from 0 up")]
Number = float | None  # non-finite numbers pass; the code that computes with them handles them
Numbers = Mapping[str, Number]


@cache
def check_of(form: Any) -> Check:
    """Return the check of a type: a TypedDict, list, mapping, optional type, `int`, `float`, `str`, `bool` or `Any`.

    `Annotated` adds checks to a type. A check is returned as it is.
    """
    origin, arguments = get_origin(form), get_args(form)
    if is_typeddict(form):
        hints = get_type_hints(form, include_extras=True)
        needed = {name: hints.pop(name) for name in list(hints) if name in form.__required_keys__}
        return record(needed, hints)
    if origin is Annotated:
        return _all_of(check_of(arguments[0]), *(each for each in arguments[1:] if callable(each)))
    if origin in (Union, UnionType):
        return optional(*(each for each in arguments if each is not NoneType))
    if origin is list:
        return list_of(*arguments)
    if origin is Mapping:
        return table(arguments[1], arguments[0])
    if form is Any:
        return lambda value, where: value
    return _plain(*_PLAIN[form]) if form in _PLAIN else cast(Check, form)


_PLAIN: Mapping[Any, tuple[Any, str]] = {
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    str: (str, "a string"),
    bool: (bool, "true or false"),
}


def _plain(kind: Any, expected: str) -> Check:
    return only(lambda value: isinstance(value, kind) and not (isinstance(value, bool) and kind is int), expected)


def _all_of(*checks: Check) -> Check:
    def check(value: Any, where: str) -> Any:
        for each in checks:
            value = each(value, where)
        return value

    return check


def optional(form: Any) -> Check:
    """Accept None, or what the form accepts."""
    inner = check_of(form)
    return lambda value, where: None if value is None else inner(value, where)


def list_of(form: Any) -> Check:
    """Accept a list of items of a form."""
    inner, is_list = check_of(form), _plain(list, "a list")
    return lambda value, where: [inner(item, f"{where}[{place}]") for place, item in enumerate(is_list(value, where))]


def table(form: Any, key: Any = str) -> Check:
    """Accept a mapping with keys and values of given forms."""
    inner, of_key = check_of(form), check_of(key)
    return lambda value, where: {
        of_key(name, f"a key of {where}"): inner(item, f"{where}.{name}")
        for name, item in _is_table(value, where).items()
    }


def record(needed: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> Check:
    """Accept a mapping with the keys in `needed`, and optionally those in `others`. Drop all other keys."""
    checks = {name: check_of(form) for name, form in {**needed, **(others or {})}.items()}

    def check(value: Any, where: str) -> Any:
        _is_table(value, where)
        if missing := [name for name in needed if name not in value]:
            raise ShapeError(f"{where} has no '{missing[0]}'")
        return {name: checks[name](item, f"{where}.{name}") for name, item in value.items() if name in checks}

    return check


_is_table = _plain(Mapping, "a table")


def like(pattern: str, expected: str) -> Check:
    """Return a check, also for `Annotated`: refuse texts that do not match a regular expression."""
    return _all_of(check_of(str), only(re.compile(pattern).fullmatch, expected))
