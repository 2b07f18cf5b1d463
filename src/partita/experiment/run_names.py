"""Names of runs: the method with the options that are not defaults, as in `partita compare --methods`.

`method_label` writes such a name, and `split_methods` and `overrides_of` read it.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from partita.core.options import MISSING, Option, OptionError, format_value
from partita.core.own_code import short_name
from partita.core.registry import options_by_name
from partita.storage.safe_text import label_folder

RUNS = Path("runs")
_BARE = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)  # texts that need no quotation marks, except these:
_NOT_TEXT = ("true", "false", "inf", "nan")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def default_folder(label: str, seed: int) -> Path:
    """Return the folder of a run, if the user does not choose one."""
    return RUNS / f"{label_folder(label)}-seed-{seed}"


def method_label(method: Mapping[str, Any], more: Mapping[str, str] | None = None) -> str:
    """Return the method's name and those of its options that are not defaults, such as "fedprox(mu=0.1)".

    Args:
        method: The method's name and options.
        more: Settings of other tables that belong to the label, as texts.
    """
    known = method_options(method["name"])
    given = {key: option_text(method[key], option.hint) for key, option in known.items() if key in method}
    own = {key: text for key, text in given.items() if text != _default_text(known[key])}
    options = ", ".join(f"{key}={text}" for key, text in {**own, **(more or {})}.items())
    name = "+".join(map(short_name, method["name"].split("+")))
    return f"{name}({options})" if options else name


def method_options(name: str) -> dict[str, Option]:
    """Return the options of a method, or of all parts of a composition."""
    parts = [options_by_name("method", part) for part in name.split("+")]
    return {key: option for part in parts for key, option in part.items()}


def option_text(value: Any, hint: Any = Any) -> str:
    """Return a value as one writes it in `--set`. Values that mean the same have the same text.

    Args:
        value: The value.
        hint: The option's type. A whole number has no decimal point if the type does not distinguish 1 from 1.0.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(float(value)).removesuffix(".0") if _is_float(hint) else repr(value)
    if isinstance(value, str) and _BARE.fullmatch(value) and value not in _NOT_TEXT:
        return value
    return _toml(value)


def _toml(value: Any) -> str:
    """Return a value as TOML on one line. In lists and tables, TOML needs quotation marks around every text."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml_key(key)}={_toml(each)}' for key, each in sorted(value.items()))}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    return option_text(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False, default=str)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key, ensure_ascii=False)


def _is_float(hint: Any) -> bool:
    """Whether a number of this type is always a float."""
    kinds = list(_kinds(hint))
    return float in kinds and int not in kinds


def _kinds(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        yield from _kinds(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for each in get_args(hint):
            yield from _kinds(each)
    else:
        yield hint


def _default_text(option: Option) -> str | None:
    return None if option.default in (None, MISSING) else option_text(option.default, option.hint)


def split_methods(text: str) -> list[str]:
    """Split 'fedavg, fedprox(mu=0.1)' into its methods.

    Raises:
        OptionError: If the text cannot be read.
    """
    specs = split_items(text)
    for spec in specs or [""]:
        if not re.fullmatch(r"[\w+.:/~-]+\s*(\(.*\))?", spec, re.DOTALL):
            raise OptionError(f"cannot read --methods {format_value(text)}; write it as in 'fedavg,fedprox(mu=0.1)'")
    return specs


def overrides_of(spec: str) -> tuple[list[str], list[str]]:
    """Read a method with its options, such as 'lora(rank=4, training.lr=0.1)'.

    Returns:
        The overrides of the method, and those of other tables: options whose name has a dot.

    Raises:
        OptionError: If an option has no value.
    """
    name, _, options = spec.partition("(")
    own, other = [f"method.name={name.strip()}"], []
    for option in split_items(options.strip().removesuffix(")")):
        key, equals, _ = option.partition("=")
        if not equals:
            raise OptionError(
                f"cannot read {format_value(option)} in --methods {format_value(spec)}; write option=value"
            )
        if "." in key:
            other.append(option)
        else:
            own.append(f"method.{option}")
    return own, other


def split_items(text: str) -> list[str]:
    """Split a list at the commas that are outside of brackets and quotation marks."""
    parts, closing, quote, escaped = [""], list[str](), "", False
    for char in text:
        if quote:
            quote = quote if escaped or char != quote else ""
            escaped = char == "\\" and quote == '"' and not escaped
        elif char in "\"'":
            quote = char
        elif char in _CLOSING:
            closing.append(_CLOSING[char])
        elif closing and char == closing[-1]:
            closing.pop()
        elif char == "," and not closing:
            parts.append("")
            continue
        parts[-1] += char
    return [part.strip() for part in parts if part.strip()]
