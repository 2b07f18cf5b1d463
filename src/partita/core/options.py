"""Validation of options against a function signature: unknown keys, wrong types, values out of range, missing keys."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import reprlib
import types
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

MISSING = inspect.Parameter.empty
WORD = 2**63  # integers must be in [-WORD, WORD): TOML, torch and numpy use 64 bits
SHOWN_CHARACTERS = 200  # maximum characters of a value in a message
MAX_NUMBER = 10**9  # a common upper bound: products of a few such numbers still fit a 32-bit float and a 64-bit integer


class OptionError(ValueError):
    """An option is unknown, missing, of the wrong type, or out of range."""


@dataclass(frozen=True)
class Range:
    """Bounds of a number, or of the length of a text. `low` and `high` are inclusive, `above` and `below` exclusive.

    Numbers must be finite even without an upper bound; `high=math.inf` allows infinity.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        lower = None if self.low is None else f"from {_format_bound(self.low)}"
        lower = lower if self.above is None else f"above {_format_bound(self.above)}"
        upper = None if self.high is None else f"to {_format_bound(self.high)}"
        upper = upper if self.below is None else f"below {_format_bound(self.below)}"
        if lower and upper:
            joint = " " if self.above is None and self.below is None else " and up " if self.below is None else " and "
            return f"{lower}{joint}{upper}"
        return lower or (f"up {upper}" if self.high is not None else upper) or ""


# Common ranges.
Count = Annotated[int, Range(low=1, high=MAX_NUMBER)]
Whole = Annotated[int, Range(low=0, high=MAX_NUMBER)]
Positive = Annotated[float, Range(above=0, high=MAX_NUMBER)]
NotNegative = Annotated[float, Range(low=0, high=MAX_NUMBER)]
Share = Annotated[float, Range(low=0, high=1)]
PartialShare = Annotated[float, Range(low=0, below=1)]
PositiveShare = Annotated[float, Range(above=0, high=1)]
Seed = Annotated[int, Range(low=0, high=10**18)]  # far below 2**63, so that seed + 1, seed + 2, ... are valid too
Text = Annotated[str, Range()]  # may be empty; a plain `str` may not

IN_CODE = object()  # marks, in a union, what only Python code can give: Literal["a"] | Annotated[A, IN_CODE]

_DEFAULT = {int: Range(low=-WORD, below=WORD), float: Range(), str: Range(low=1)}


@dataclass(frozen=True)
class Option:
    """A parameter that a config can set.

    Attributes:
        name: The parameter's name.
        hint: Its type annotation, without what is marked `IN_CODE`.
        default: Its default; MISSING if the config must set it.
        meaning: The texts in its `Annotated` type.
        code_hint: Its whole type annotation.
    """

    name: str
    hint: Any
    default: Any
    meaning: str
    code_hint: Any


def closest_match(word: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" with the closest known word, or the list of all if none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, cutoff=0.5)
    return f"did you mean {format_value(close[0])}?" if close else f"it can be: {', '.join(map(format_name, known))}"


def unknown_key(name: str, known: Iterable[str], table: str = "") -> OptionError:
    """Return the error for an unknown key. It lists the known keys, nearest first.

    Args:
        name: The key with the table it is in, such as "split.tset".
        known: The keys that the table takes.
        table: The table as `partita options` takes it, such as "split.iid"; empty for the top level.
    """
    word = name.rpartition(".")[2]
    known = sorted(known, key=lambda each: (-difflib.SequenceMatcher(None, word, each).ratio(), each))
    shown = format_value(name)
    if not known:
        return OptionError(f"unknown key {shown}; there are no options here")
    closest, listed = closest_match(word, known), ", ".join(map(format_name, known))
    remedy = f"{closest} It can be: {listed}" if closest.startswith("did") else f"it can be: {listed}"
    return OptionError(f"unknown key {shown}; {remedy}; '{f'partita options {table}'.rstrip()}' explains them")


def options_of(target: Callable[..., Any], given: Iterable[str] = ()) -> dict[str, Option]:
    """Return the options of a function or dataclass by name, without the parameters in `given`.

    Args:
        target: The function or dataclass.
        given: Parameters that come from elsewhere and are not options.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(target).parameters.items()
        if name not in set(given) and parameter.kind is not parameter.VAR_KEYWORD
    }
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    written = getattr(function, "__annotations__", {})  # a class without `__init__` has none
    # Of the options only: the types of other parameters may need an import that checking a config does without.
    annotated = types.SimpleNamespace(__annotations__={name: written[name] for name in parameters if name in written})
    hints = get_type_hints(annotated, getattr(function, "__globals__", {}), include_extras=True)
    options = {}
    for name, parameter in parameters.items():
        hint = hints.get(name, Any)
        notes = [note for note in get_args(hint)[1:] if isinstance(note, str)] if _annotated(hint) else []
        options[name] = Option(name, _for_config(hint), parameter.default, " ".join(notes), hint)
    return options


def validate_options(
    target: Callable[..., Any],
    options: Mapping[str, Any],
    where: str,
    given: Iterable[str] = (),
    name: str = "",
    others: Iterable[str] = (),
) -> dict[str, Any]:
    """Check options and return them as keyword arguments of a function or dataclass.

    Args:
        target: The function or dataclass.
        options: The options from a config.
        where: The config section, for error messages.
        given: Parameters that come from elsewhere and are not options.
        name: Which task, split, model or method the options are for; the error message names it.
        others: Further keys of the section, checked elsewhere; the error message lists them too.

    Raises:
        OptionError: If an option is unknown, missing, of the wrong type, or out of range.
    """
    known = options_of(target, given)
    parameters = inspect.signature(target).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for key, value in options.items():
        full = f"{where}.{key}" if where else key
        if key not in known and not takes_any:
            raise unknown_key(full, {*known, *others}, f"{where}.{name}" if name else where)
        hint = known[key].hint if key in known else Any
        _check(full, value, hint, hint)
    for key, option in known.items():
        if key not in options and option.default is MISSING:
            full = f"{where}.{key}" if where else key
            raise OptionError(f"'{full}' is missing; it must be {describe(option.hint)}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def validate_fields(table: object, where: str, in_code: bool = True) -> None:
    """Check the fields of a dataclass as the keys of a config.

    Args:
        table: The dataclass.
        where: The config section, for error messages.
        in_code: Whether what is marked `IN_CODE` passes too.

    Raises:
        OptionError: If a value is of the wrong type or out of range.
    """
    for name, option in _options_of_table(type(table)).items():
        _check(f"{where}.{name}", getattr(table, name), option.code_hint if in_code else option.hint, option.hint)


# Reading annotations takes longer than checking values.
_options_of_table: Callable[[type], dict[str, Option]] = functools.cache(options_of)


def _check(full: str, value: object, accepted: Any, described: Any) -> None:
    if not matches_type(value, accepted):
        raise OptionError(f"{format_name(full)} is {format_value(value)}; it must be {describe(described)}")


def matches_type(value: object, hint: Any) -> bool:
    """Whether a value has the annotated type `hint` and is in its range.

    NaN and texts with several lines never match. Infinity matches only if the upper bound is infinity.
    """
    if hint is Any:
        return _json_like(value)
    kind, bounds = _bounded(hint)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(matches_type(value, each) for each in get_args(kind))
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in get_args(kind))
    if origin in (tuple, list):
        return isinstance(value, tuple | list) and all(matches_type(each, get_args(kind)[0]) for each in value)
    if origin in (dict, Mapping):
        key, each = get_args(kind)
        return isinstance(value, Mapping) and all(
            matches_type(k, key) and matches_type(v, each) for k, v in value.items()
        )
    if kind in (int, float):
        infinite = bounds.high == math.inf and value == math.inf
        return (
            isinstance(value, int if kind is int else int | float) and (infinite or _number(value)) and value in bounds
        )
    if kind is str:
        return isinstance(value, str) and one_line(value) and len(value) in bounds
    if kind is None or kind is type(None):
        return value is None
    return isinstance(value, kind) and not isinstance(value, type)  # a class has the members of a protocol too


def one_line(text: str) -> bool:
    """Whether a text has no control characters, line breaks or lone surrogates."""
    return text.isprintable() or not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text)


def describe(hint: Any) -> str:
    """Return a description of an annotated type for an error message, such as "a whole number from 0 to 10"."""
    plain = {int: "a whole number", float: "a number", bool: "true or false", type(None): "left out"}
    hint, bounds = _bounded(hint)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(each) for each in get_args(hint))
    if origin is Literal:
        return " or ".join(f"'{each}'" if isinstance(each, str) else str(each) for each in get_args(hint))
    if origin in (tuple, list):
        return f"a list, each {describe(get_args(hint)[0])}"
    if origin in (dict, Mapping):
        each = get_args(hint)[1]
        return "a table" if each is Any else f"a table, each {describe(each)}"
    if hint is Any:
        return "a value that TOML can hold, of 64 bits if it is a number and of one line if it is a text"
    if hint is str:
        return "a text of one line" if 0 in bounds else "a text of one line that is not empty"
    kind = plain.get(hint, getattr(hint, "__name__", str(hint)))
    return kind if bounds in (None, _DEFAULT.get(hint)) else f"{kind} {bounds}"


def format_value(value: object) -> str:
    """Return a value as text for a message, on one line and shortened."""
    try:
        text = _shorten.repr(value)
    except ValueError:  # Python does not print integers of more than a few thousand digits
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def format_name(name: str) -> str:
    """Return a name for a message, without quotation marks unless it needs them."""
    return name if one_line(name) and len(name) <= SHOWN_CHARACTERS else format_value(name)


_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = SHOWN_CHARACTERS


def bounds_of(hint: Any) -> Range:
    """Return the range of a type: its own, the default of its kind, or one without bounds."""
    return _bounded(hint)[1] or Range()


def _annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated


def _for_config(hint: Any) -> Any:
    """The type without what is marked `IN_CODE`."""
    kind = get_args(hint)[0] if _annotated(hint) else hint
    if get_origin(kind) not in (Union, types.UnionType):
        return hint
    kept: Any = Union[tuple(each for each in get_args(kind) if IN_CODE not in getattr(each, "__metadata__", ()))]  # noqa: UP007
    return Annotated[kept, *hint.__metadata__] if _annotated(hint) else kept


def _bounded(hint: Any) -> tuple[Any, Any]:
    """The type without `Annotated`, and its range or None."""
    kind = get_args(hint)[0] if _annotated(hint) else hint
    own = [note for note in get_args(hint)[1:] if isinstance(note, Range)] if _annotated(hint) else []
    default = _DEFAULT.get(kind) if isinstance(kind, type) else None
    return kind, own[-1] if own else default


def _number(value: float) -> bool:
    if isinstance(value, bool):
        return False
    return -WORD <= value < WORD if isinstance(value, int) else math.isfinite(value)


def _json_like(value: object, depth: int = 10) -> bool:
    """Whether a value is allowed for `Any`: finite 64-bit numbers, one-line texts, and nesting up to `depth`."""
    if not depth:
        return False
    if isinstance(value, bool):
        return True
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, Mapping):
        return all(_json_like(each, depth - 1) for pair in value.items() for each in pair)
    return all(_json_like(each, depth - 1) for each in value) if isinstance(value, tuple | list) else True


def _format_bound(bound: float) -> str:
    if isinstance(bound, int):
        return f"{bound:,}" if bound < MAX_NUMBER else f"{bound:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{bound:g}"
