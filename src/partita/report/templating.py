"""Jinja2 templates of the HTML pages. All text that a template prints is escaped.

A value of a run folder can be any text, so two rules hold for every template: print it with `{{ value }}`, which
escapes markup and shows invisible characters as `\\x1b`; and put values for scripts only into the JSON block of the
page. A template must not use `style="…"`, because the Content-Security-Policy of the page forbids it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from partita.report.plot_style import Style
from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

SIGNIFICANT = 5  # digits of a number in the page's data


def render(template: str, **values: Any) -> str:
    """Return a template of the folder `templates`, filled in with values."""
    return _environment().get_template(f"{template}.html.j2").render(**values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("partita.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "breakable": breakable,
        "preformatted": preformatted,
        "cell": cell,
        "dash_lengths": dash_lengths,
        "json_block": json_block,
    }
    environment.globals |= {"asset": asset, "hash_source": hash_source}
    return environment


def _shown(value: Any) -> Any:
    """Escape invisible characters in a printed value. Markup is the templates' own."""
    return value if hasattr(value, "__html__") else printable(value)


def asset(name: str) -> Markup:
    """Return the text of a file of the package for a style or script element, as it is."""
    from markupsafe import Markup

    return Markup((files("partita.report") / name).read_text(encoding="utf-8"))


def hash_source(text: str) -> str:
    """Return the source by which a Content-Security-Policy allows an inline style or script with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def breakable(text: object) -> Markup:
    """Allow line breaks inside long words, after punctuation marks only."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<=\w[,(./+_])(?=[^\s\d])", "<wbr>", str(escape(printable(text)))))


def preformatted(text: str) -> Markup:
    """Keep the line breaks of a text."""
    from markupsafe import Markup, escape

    return Markup("\n".join(str(escape(printable(line))) for line in text.split("\n")))


def cell(text: object) -> Markup:
    """Set the spread or interval after a value in small type. In other texts, allow line breaks."""
    from markupsafe import Markup

    value, space, rest = printable(text).partition(" ")
    if rest[:1] in ("±", "["):
        return Markup("{}{}<small>{}</small>").format(value, space, rest)
    return breakable(text)


def dash_lengths(style: Style) -> str:
    """Return the lengths of a dashed line for SVG; "" for a solid one."""
    return "" if style.dash == "solid" else " ".join(f"{3 * length:g}" for length in style.dash[1])


def json_block(values: Mapping[str, Any]) -> Markup:
    """Return values as JSON for a script element. It cannot end the element, and holds no NaN."""
    from markupsafe import Markup

    text = json.dumps(_plain(values), separators=(",", ":"), allow_nan=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)


def _plain(value: Any) -> Any:
    """Return a value for JSON: texts printable, numbers rounded, numbers that are not finite as None."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return _rounded(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {printable(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _rounded(value: float) -> float:
    short = float(f"{value:.{SIGNIFICANT}g}")
    return int(short) if short.is_integer() else short
