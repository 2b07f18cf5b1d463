"""Check the built site: every link, anchor, picture and script that it names is in it. Links to elsewhere are counted.

Pictures, headings of tables and dialogs must have a text, for those who do not see the page.

python scripts/check_links.py site             # exits with 1 if something is missing
python scripts/check_links.py site --elsewhere # also lists the addresses of other sites
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"img": "src", "script": "src", "source": "src", "iframe": "src", "link": "href"}  # what a browser fetches
NAMED = ("canonical", "edit")  # relations of <link> that a browser does not fetch


@dataclass
class Page(HTMLParser):
    """What a page names."""

    path: Path
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    unnamed: list[str] = field(default_factory=list)  # what has no text for those who do not see the page
    heading: str | None = None  # text of the table heading that is being read

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Collect the names in one tag."""
        values = {name: value or "" for name, value in attributes}
        self.anchors.update(values[name] for name in ("id", "name") if values.get(name))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag in LOADED and values.get(LOADED[tag]) and values.get("rel") not in NAMED:
            self.loaded.append(values[LOADED[tag]])
        if tag == "img":
            self.heading = None if self.heading is None else self.heading + values.get("alt", "")
            if not values.get("alt"):
                self.unnamed.append(f"the picture {values.get('src', '')}")
        elif tag == "th":
            self.heading = ""
        elif values.get("role") == "dialog" and not values.keys() & {"aria-label", "aria-labelledby"}:
            self.unnamed.append(f"the dialog <{tag}>")

    def handle_data(self, data: str) -> None:
        """Collect the text of a table heading."""
        if self.heading is not None:
            self.heading += data

    def handle_endtag(self, tag: str) -> None:
        """See whether a table heading has a text."""
        if tag == "th":
            if self.heading is not None and not self.heading.strip():
                self.unnamed.append("a heading of a table")
            self.heading = None


@dataclass
class Report:
    """What was found in a site."""

    pages: int = 0
    checked: int = 0
    elsewhere: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def check(site: Path) -> Report:
    """Check all pages of a built site."""
    site = site.resolve()
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    report = Report(pages=len(pages))
    for path, page in pages.items():
        if path == site / "404.html":
            continue  # its links begin at the root of the server, wherever the site will be
        name = path.relative_to(site)
        for link in page.links:
            if urlsplit(link).scheme or link.startswith("//"):
                report.elsewhere.add(link)
            else:
                report.checked += 1
                report.problems += [f"{name}: {problem}" for problem in _missing(link, path, site, pages)]
        for link in page.loaded:
            if urlsplit(link).scheme == "data":
                continue
            report.checked += 1
            if urlsplit(link).netloc:
                report.problems.append(f"{name}: {link} is loaded from another site")
            else:
                report.problems += [f"{name}: {problem}" for problem in _missing(link, path, site, pages)]
        report.problems += [f"{name}: {unnamed} has no text" for unnamed in page.unnamed]
    return report


def _missing(link: str, path: Path, site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    parts = urlsplit(link)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.is_relative_to(site) or not target.is_file():
        yield f"there is no {link}"
    elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        yield f"{link} has no such anchor"


def main(arguments: Iterable[str] | None = None) -> None:
    """Print what was found, and exit with 1 if something is missing."""
    parser = argparse.ArgumentParser(description="Check the links of a built site.")
    parser.add_argument("site", type=Path)
    parser.add_argument("--elsewhere", action="store_true", help="list the links to other sites, which are not tried")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    report = check(options.site)
    if options.elsewhere:
        print(*sorted(report.elsewhere), sep="\n")
    print(
        f"{report.checked:,} links, anchors and pictures of {report.pages} pages: {len(report.problems)} missing; "
        f"{len(report.elsewhere)} addresses of other sites, not tried"
    )
    if not report.pages or report.problems:
        sys.exit("\n".join(report.problems) or f"error: there is no page in {options.site}")


if __name__ == "__main__":
    main()
