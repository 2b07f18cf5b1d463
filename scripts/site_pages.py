"""MkDocs hooks: bring the pages of the repository into the site, with their links, pictures and formulas.

The site mirrors the repository. `docs/` is its root, the card of a method is at `methods/NAME`, and every other file
keeps its path. So nothing is copied by hand, and a link works on both sides. A link to a file that is no page, such as
a config, puts that file into the site.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]  # the cards of this clone, wherever partita is installed

import tutorials  # noqa: E402

from partita.methods import INDEX  # noqa: E402
from partita.methods.cards import path_of  # noqa: E402

HOME = "docs/index.md"  # of the site; the README is that of the repository
METHODS = "docs/methods/README.md"
CLAIMS = "claims.md"  # the verdicts of studies/README.md, on a page of their own
FOLDERS = {"src/partita/methods": METHODS, "src/partita/compression": METHODS, "": HOME}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(
    r"(^(?P<fence>```+|~~~+).*?^(?P=fence)\s*?$|(?<!`)(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`))", re.M | re.S
)
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.S)
EMPTY_HEADING = re.compile(r"<th([^>]*)>\s*</th>")
VERDICTS = re.compile(r"(?<=^## Verdicts\n).*?(?=^## )", re.M | re.S)


@dataclass(frozen=True)
class Source:
    """Where the text of a page comes from."""

    path: str  # in the repository
    text: str


def sources(root: Path = ROOT) -> dict[str, Source]:
    """Return the source of every page by its path in the site."""
    found = {
        "CHANGELOG.md": "CHANGELOG.md",
        "CONTRIBUTING.md": "CONTRIBUTING.md",
        "SECURITY.md": "SECURITY.md",
        **{f"methods/{name}.md": f"src/partita/{path_of(name)}" for name in INDEX},
        **{
            str(path.relative_to(root)): str(path.relative_to(root))
            for folder in ("studies", "benchmarks")
            for path in sorted((root / folder).rglob("README.md"))
        },
        **{
            str(path.relative_to(root / "docs")): str(path.relative_to(root))
            for path in sorted((root / "docs").rglob("*.md"))
        },
    }
    pages = {uri: Source(path, (root / path).read_text(encoding="utf-8")) for uri, path in found.items()}
    studies = pages["studies/README.md"]
    claims, rest = split_claims(studies.text)
    return {**pages, CLAIMS: Source(studies.path, claims), "studies/README.md": Source(studies.path, rest)}


def split_claims(text: str) -> tuple[str, str]:
    """Split the page of the studies into the page of claims, and the rest.

    Raises:
        PluginError: If it has no section of verdicts.
    """
    found = VERDICTS.search(text)
    if not found:
        raise PluginError('studies/README.md has no section "## Verdicts", of which the site makes its page of claims')
    body = re.sub(r"^### ", "## ", found[0].strip(), flags=re.M)
    verdicts = Counter(re.findall(r"\| (held|did not hold|could not be tested|not yet tested) \|", body))
    counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
    claims = (
        "# Claims\n\nWhat the papers claim, and what [the studies](README.md) found. A verdict is about the regime "
        f"in its row and no other. Of {verdicts.total()} claims: {counts}.\n\n"
        f'<div class="filtered" data-columns="verdict" markdown>\n\n{body}\n\n</div>\n'
    )
    rest = VERDICTS.sub("\nThe verdicts are on the page [Claims](../docs/claims.md).\n\n", text, count=1)
    return claims, rest


# ---- links


def outside_code(text: str) -> Iterator[tuple[bool, str]]:
    """Split a text into pieces, each with whether it is outside of code."""
    end = 0
    for found in CODE.finditer(text):
        yield True, text[end : found.start()]
        yield False, found[0]
        end = found.end()
    yield True, text[end:]


def target_of(link: str, page: str, root: Path = ROOT) -> str | None:
    """Return the path in the site of what a page links to; None for a link that stays as it is.

    Args:
        link: The link, without its fragment.
        page: The path of the page in the repository.
        root: The repository.
    """
    if not link or re.match(r"\w+:|/", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    path = "" if path in (".", "README.md") else path
    path = FOLDERS.get(path, path)
    if (root / path).is_dir():
        path = f"{path}/README.md"
    card = re.fullmatch(r"src/partita/(?:methods|compression)/\w+\.md", path)
    if card:
        return next((f"methods/{name}.md" for name in INDEX if f"src/partita/{path_of(name)}" == path), None)
    return path.removeprefix("docs/")


def rewrite(text: str, page: str, uri: str, root: Path = ROOT) -> str:
    """Return the text of a page with links that work in the site."""

    def rewritten(found: re.Match[str]) -> str:
        link, mark, fragment = found[2].partition("#")
        target = target_of(link, page, root)
        if target is None:
            return found[0]
        if (target, fragment) == ("studies/README.md", "verdicts"):
            target, mark, fragment = CLAIMS, "", ""
        return found[1] + posixpath.relpath(target, posixpath.dirname(uri) or ".") + mark + fragment + found[3]

    return "".join(LINK.sub(rewritten, piece) if plain else piece for plain, piece in outside_code(text))


def linked(source: Source, root: Path = ROOT) -> set[str]:
    """Return the paths in the site of all that a page links to."""
    links = (found[2] for plain, piece in outside_code(source.text) if plain for found in LINK.finditer(piece))
    targets = (target_of(link.partition("#")[0], source.path, root) for link in links)
    return {target for target in targets if target}


def with_formulas_apart(text: str) -> str:
    """Return a text with its displayed formulas as paragraphs of their own, which Python-Markdown asks for."""
    return "".join(
        re.sub(r"\s*(\$\$.+?\$\$)\s*", r"\n\n\1\n\n", piece, flags=re.S) if plain else piece
        for plain, piece in outside_code(text)
    )


def with_formulas(page: str) -> str:
    """Return the HTML of a page with its formulas as MathML, which browsers draw without a script."""
    return FORMULA.sub(
        lambda found: convert(html.unescape(found["tex"]), display="block" if found["tag"] == "div" else "inline"), page
    )


def with_cells(page: str) -> str:
    """Return the HTML of a page in which a table's empty headings are plain cells: a heading names something."""
    return EMPTY_HEADING.sub(r"<td\1></td>", page)


# ---- what MkDocs calls


def on_config(config: Any) -> Any:
    """Write out the patterns in the navigation, such as `methods/*.md`: the pages that no other entry names.

    Raises:
        PluginError: If the outputs of all tutorials must be there (`TUTORIALS=all`) and are not.
    """
    try:
        print(tutorials.describe(os.environ.get("TUTORIALS") == "all"), file=sys.stderr)
    except tutorials.TutorialError as error:
        raise PluginError(str(error)) from None
    uris = set(sources()) - set(leaves(config["nav"]))
    config["nav"] = [entry for raw in config["nav"] for entry in _expanded(raw, sorted(uris))]
    return config


def leaves(entry: Any) -> list[str]:
    """Return all pages and patterns of a navigation."""
    if isinstance(entry, str):
        return [entry]
    return [leaf for each in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(each)]


def _expanded(entry: Any, uris: list[str]) -> Iterator[Any]:
    if isinstance(entry, dict):
        [(title, value)] = entry.items()
        nested = isinstance(value, list)
        yield {title: [each for raw in value for each in _expanded(raw, uris)] if nested else value}
    elif "*" in entry:
        yield from (uri for uri in uris if fnmatch(uri, entry) and uri.count("/") == entry.count("/"))
    else:
        yield entry


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/, the files they link to, and the outputs of the tutorials."""
    pages = sources()
    for uri, source in pages.items():
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=source.text))
    for uri in sorted(set().union(*map(linked, pages.values()))):
        if files.get_file_from_path(uri) is None and (ROOT / uri).is_file():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri)))
    for name in tutorials.names():
        for path, content in tutorials.attachments(name).items():
            files.append(File.generated(config, f"tutorials/{path}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **more: Any) -> str:
    """Rewrite the links of a page, and put the outputs of a tutorial under its cells."""
    uri = page.file.src_uri
    source = sources().get(uri)
    if source is None:
        return markdown
    if uri.startswith("tutorials/") and Path(uri).stem in tutorials.names():
        markdown = tutorials.woven(Path(uri).stem)
    return with_formulas_apart(rewrite(markdown, source.path, uri))


def on_page_content(html: str, **more: Any) -> str:
    """Draw the formulas, and make tables right."""
    return with_cells(with_formulas(html))


def on_post_page(output: str, **more: Any) -> str:
    """Name the theme's search for screen readers."""
    return output.replace(' role="dialog">', ' role="dialog" aria-label="Search">')
