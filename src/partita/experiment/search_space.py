"""The settings that `partita tune` may choose: 'training.lr=log(1e-5,1e-2)', or 'fedprox: method.mu=choice(0.1,1)'."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from partita.core.options import OptionError, closest_match, format_value
from partita.core.own_code import short_name
from partita.experiment.config import Config, settings_by_key
from partita.experiment.run_names import option_text, overrides_of, split_items

TABLES = ("training", "method", "model", "federation", "sampling")
KEYS = ("privacy.clip",)
DIGITS = 3  # significant digits of a drawn number, so that tables and commands stay readable
_FORM = re.compile(r"(?:(?P<method>.+?)\s*:\s*)?(?P<key>[\w.-]+)\s*=\s*(?P<kind>\w+)\s*\((?P<items>.*)\)", re.DOTALL)
_EXAMPLE = "write it as in 'training.lr=log(1e-5,1e-2)', with log(a,b), uniform(a,b), int(a,b[,log]) or choice(a,b,...)"


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False  # uniform in the logarithm
    whole: bool = False

    def text(self, value: float) -> str:
        """Return a number of the interval, rounded to a few digits, as one writes it in `--set`."""
        if self.whole:
            return str(round(value))
        return option_text(min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high), float)

    def number(self, text: str | None) -> float | None:
        """Return the number that a text stands for; None if it is not in the interval."""
        try:
            value = int(text or "") if self.whole else float(text or "")
        except ValueError:
            return None
        return value if self.low <= value <= self.high else None

    def size(self) -> int | None:
        """Return how many values there are; None for a continuum."""
        return round(self.high - self.low) + 1 if self.whole else None

    def grid(self, count: int) -> list[str]:
        """Return up to `count` values, evenly spaced; the middle if it is one."""
        size = self.size()
        count = count if size is None else min(count, size)
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        places = [0.5] if count == 1 else [place / (count - 1) for place in range(count)]
        values = [low + place * (high - low) for place in places]
        return list(dict.fromkeys(self.text(math.exp(value) if self.log else value) for value in values))


@dataclass(frozen=True)
class Choice:
    """One of several values, as one writes them in `--set`."""

    values: tuple[str, ...]

    def size(self) -> int:
        """Return how many values there are."""
        return len(self.values)


@dataclass(frozen=True)
class Space:
    """The values that one setting may take.

    Attributes:
        key: The key in the config, such as "training.lr".
        values: Its values.
        method: The only method that it is for; None for all methods.
        text: The space as the user wrote it, without the method.
    """

    key: str
    values: Interval | Choice
    method: str | None
    text: str


def parse_space(text: str) -> Space:
    """Read a space.

    Raises:
        OptionError: If it cannot be read, or has a key that must not be tuned.
    """
    found = _FORM.fullmatch(text.strip())

    def refuse(reason: str = "") -> NoReturn:
        raise OptionError(f"cannot read --space {format_value(text)}{reason and ': '}{reason}; {_EXAMPLE}")

    if not found:
        refuse()
    key, items = found["key"], split_items(found["items"])
    if key.partition(".")[0] not in TABLES and key not in KEYS:
        raise OptionError(
            f"--space {format_value(key)} cannot be tuned: trials would not be comparable, or it does not change the "
            f"model; only keys of {', '.join(TABLES)} and {', '.join(KEYS)} can"
        )
    if key == "method.name":
        raise OptionError("--space 'method.name' cannot be tuned; list the methods in --methods")
    kind = found["kind"]
    values: Interval | Choice
    if kind == "choice":
        if len(set(items)) < 2 or len(set(items)) < len(items):
            refuse("choice needs two or more different values")
        values = Choice(tuple(items))
    elif kind in ("log", "uniform", "int"):
        values = _interval(kind, items, refuse)
    else:
        refuse(f"'{kind}' is unknown")
    written = f"{kind}({', '.join(items)})"
    return Space(key, values, found["method"], f"{key}={written}")


def _interval(kind: str, items: Sequence[str], refuse: Callable[[str], NoReturn]) -> Interval:
    *bounds, last = items or [""]
    log = kind == "log" or (kind == "int" and last == "log")
    bounds = bounds if kind == "int" and last == "log" else [*bounds, last]
    try:
        numbers = [int(bound) if kind == "int" else float(bound) for bound in bounds]
    except ValueError:
        refuse(f"the bounds of {kind} must be {'whole numbers' if kind == 'int' else 'numbers'}")
    if len(numbers) != 2 or not all(map(math.isfinite, numbers)) or numbers[0] >= numbers[1]:
        refuse(f"{kind} needs a lower and a larger upper bound")
    if log and numbers[0] <= 0:
        refuse(f"the lower bound is {bounds[0]}, but a logarithm needs one above 0")
    return Interval(numbers[0], numbers[1], log, kind == "int")


def spaces_of(spec: str, spaces: Iterable[Space]) -> tuple[Space, ...]:
    """Return the spaces for one method: those for all, unless it has its own for the same key, and then its own.

    Args:
        spec: The method, with options.
        spaces: All spaces.

    Raises:
        OptionError: If it has no space, or two for the same key.
    """
    name = method_name(spec)
    own = [space for space in spaces if space.method is not None and _is(name, space.method)]
    keys = {space.key for space in own}
    chosen = [*(space for space in spaces if space.method is None and space.key not in keys), *own]
    for place, space in enumerate(chosen):
        if space.key in {other.key for other in chosen[:place]}:
            raise OptionError(f"{name} has two spaces for {space.key}; leave one of them out")
    if not chosen:
        raise OptionError(
            f"{name} has no --space, so it would get one trial and the others more; give one that is not for another "
            "method only"
        )
    return tuple(chosen)


def check_methods(specs: Sequence[str], spaces: Iterable[Space]) -> None:
    """Check that every space for one method is for a method of the list.

    Raises:
        OptionError: If not.
    """
    names = [method_name(spec) for spec in specs]
    for space in spaces:
        if space.method is not None and not any(_is(name, space.method) for name in names):
            raise OptionError(
                f"--space '{space.method}: {space.text}' is for a method that --methods does not have; "
                f"{closest_match(space.method, names)}"
            )


def checked(space: Space, load: Callable[[Mapping[str, str]], Config], method: str) -> Space:
    """Check the ends of a space, or all its choices, against the config.

    Args:
        space: The space.
        load: Loads the method's config with some settings.
        method: The method, for the error.

    Returns:
        The space, with its choices as the config writes them.

    Raises:
        OptionError: If the config does not take a value. The message names it and the method.
    """
    values = space.values
    texts = values.values if isinstance(values, Choice) else tuple(_bound(values, each) for each in ("low", "high"))
    written = []
    for text in texts:
        try:
            written.append(settings_by_key(load({space.key: text})).get(space.key, text))
        except ValueError as error:
            limit = f"; if it is not for {method}, limit it: --space 'METHOD: {space.text}'" if not space.method else ""
            raise OptionError(f"--space '{space.text}' does not fit {method}: {error}{limit}") from error
    return replace(space, values=Choice(tuple(written))) if isinstance(values, Choice) else space


def _bound(values: Interval, name: str) -> str:
    value = getattr(values, name)
    return str(value) if values.whole else option_text(value, float)


def with_settings(spec: str, settings: Mapping[str, str]) -> str:
    """Return a method with more options, as `compare --methods` takes it, such as "fedprox(mu=0.1, training.lr=0.01)".

    Args:
        spec: The method, with the options that it has already.
        settings: Texts by key of the config.
    """
    (first, *own), other = overrides_of(spec)
    pairs = [option.partition("=") for option in (*own, *other)]
    merged = {key.strip(): value.strip() for key, _, value in pairs} | dict(settings)
    options = ", ".join(f"{key.removeprefix('method.')}={value}" for key, value in merged.items())
    name = first.partition("=")[2]
    return f"{name}({options})" if options else name


def method_name(spec: str) -> str:
    """Return the name of a method without its options."""
    return spec.partition("(")[0].strip()


def _is(name: str, wanted: str) -> bool:
    return wanted in (name, "+".join(map(short_name, name.split("+"))))
