"""The files of the page. They are read once, at the start, so that no request reaches the file system."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader

from partita.storage.safe_text import printable

SCRIPT, STYLE, HTML = "text/javascript; charset=utf-8", "text/css; charset=utf-8", "text/html; charset=utf-8"
ASSETS = {  # name in the address -> (package, file, type)
    "watch.js": ("partita.watch", "watch.js", SCRIPT),
    "watch.css": ("partita.watch", "watch.css", STYLE),
    "uplot.js": ("partita.report", "uplot.min.js", SCRIPT),
    "uplot.css": ("partita.report", "uplot.min.css", STYLE),
}


def page_files(roots: Sequence[Path]) -> dict[str, tuple[str, bytes]]:
    """Return (type, content) of each file by its name in the address; the page itself has an empty name."""
    environment = Environment(loader=PackageLoader("partita.watch"), autoescape=True)
    shown = ", ".join(printable(root) for root in roots)
    page = environment.get_template("page.html").render(roots=shown)
    assets = {
        name: (kind, files(package).joinpath("assets", file).read_bytes())
        for name, (package, file, kind) in ASSETS.items()
    }
    return {"": (HTML, page.encode()), **assets}
