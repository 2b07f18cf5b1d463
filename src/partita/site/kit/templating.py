"""The templates of the kit. A file that ends in `.j2` is filled in, and any other is copied as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

import tomli_w

from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from jinja2 import Environment

FILLED_IN = ".j2"


def render_folder(folder: str, values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a folder of templates by their paths in it, filled in with values."""
    return {
        path.removesuffix(FILLED_IN): (
            _environment().get_template(f"{folder}/{path}").render(**values).encode()
            if path.endswith(FILLED_IN)
            else source.read_bytes()
        )
        for path, source in _files(files("partita.site.kit") / "templates" / folder)
    }


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from _files(entry, f"{path}/")
        else:
            yield path, entry


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("partita.site.kit"),
        autoescape=False,  # no HTML here; `group` admits only characters that mean nothing in any of the files
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"json": _json, "toml": _toml, "comment": printable}
    return environment


def _json(value: Any) -> str:
    """Return a value as JSON, which is YAML too."""
    return json.dumps(value, ensure_ascii=False)


def _toml(value: Any) -> str:
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
