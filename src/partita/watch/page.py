"""The files of the page. They are read once, at the start, so that no request reaches the file system."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader

from partita.storage.safe_text import printable

HTML = "text/html; charset=utf-8"
ASSETS = {"watch.js": "text/javascript; charset=utf-8", "watch.css": "text/css; charset=utf-8"}


def page_files(roots: Sequence[Path]) -> dict[str, tuple[str, bytes]]:
    """Return (type, content) of each file by its name in the address; the page itself has an empty name."""
    environment = Environment(loader=PackageLoader("partita.watch"), autoescape=True)
    page = environment.get_template("page.html").render(roots=", ".join(printable(root) for root in roots))
    folder = files("partita.watch").joinpath("assets")
    return {"": (HTML, page.encode())} | {
        name: (kind, folder.joinpath(name).read_bytes()) for name, kind in ASSETS.items()
    }
