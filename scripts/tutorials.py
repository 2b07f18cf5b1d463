"""Run the tutorials as notebooks. The site shows what they print and draw, and offers them for download.

A tutorial is a Markdown page in docs/tutorials. Its blocks are the cells of a notebook, which run in order in one
kernel and one empty folder:

| block | cell |
|---|---|
| `python` | Python; one that draws says what in its first line: `# Figure: ...` |
| `sh` | shell, which ends at the first command that fails |
| any language with `title="FILE"` | is written to FILE |
| `text` | none; it is a part of the text |

The executed notebooks are in build/tutorials. One is run again only if its page or the package has changed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from changed import changed, concerned
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "tutorials"
DONE = ROOT / "build" / "tutorials"
LONGEST = 600  # seconds for one cell
BLOCK = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```\n', re.M | re.S)
COLORS = re.compile(r"\x1b\[[0-9;]*m")
FIGURE = re.compile(r"# Figure: (.+)")


class TutorialError(ValueError):
    """A tutorial that cannot be run or shown."""


@dataclass(frozen=True)
class Cell:
    """A part of a tutorial."""

    text: str  # as it is in the page
    code: str = ""  # as it is in the notebook; empty for prose


def names() -> list[str]:
    """Return the names of all tutorials."""
    return sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "README")


def cells(text: str) -> Iterator[Cell]:
    """Split a page into prose and blocks that run."""
    end = 0
    for found in BLOCK.finditer(text):
        if found["language"] == "text":
            continue
        if prose := text[end : found.start()].strip():
            yield Cell(prose)
        if found["title"]:
            code = f"%%writefile {found['title']}\n{found['code']}"
        elif found["language"] in ("python", "sh"):
            code = ("%%bash -e\n" if found["language"] == "sh" else "") + found["code"]
        else:
            raise TutorialError(f'a block in {found["language"]} does not run; give it title="FILE", or write text')
        yield Cell(found[0].rstrip(), code.rstrip())
        end = found.end()
    if prose := text[end:].strip():
        yield Cell(prose)


def notebook(text: str) -> Any:
    """Return the notebook of a page, without outputs."""
    made = nbformat.v4.new_notebook()
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, cell in enumerate(cells(text)):
        new = nbformat.v4.new_code_cell(cell.code) if cell.code else nbformat.v4.new_markdown_cell(cell.text)
        new["id"] = f"cell-{number}"
        made.cells.append(new)
    return made


@cache
def package_digest() -> str:
    """Return a digest of the package's code, with which outputs may change."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.toml"), Path(__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def digest_of(name: str) -> str:
    """Return a digest of all that the outputs of a tutorial depend on."""
    return hashlib.sha256(f"{package_digest()}\n{(PAGES / f'{name}.md').read_text()}".encode()).hexdigest()


def page_digest(name: str) -> str:
    """Return a digest of the page alone."""
    return hashlib.sha256((PAGES / f"{name}.md").read_bytes()).hexdigest()


def execute(name: str) -> str:
    """Run a tutorial, unless nothing has changed since it was run. Return what happened.

    Raises:
        TutorialError: If a cell fails.
    """
    started, path = time.monotonic(), DONE / f"{name}.ipynb"
    if state(name) == "new":
        return f"same   {name}"
    made = notebook((PAGES / f"{name}.md").read_text())
    with tempfile.TemporaryDirectory(prefix="partita-tutorial-") as folder:
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore:IProgress not found",  # of tqdm, about widgets that a page cannot show
        }
        client = NotebookClient(
            made,
            timeout=LONGEST,
            startup_timeout=LONGEST,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
            extra_arguments=["--log-level=ERROR"],  # not that messages between two processes here are not encrypted
        )
        try:
            client.execute(env=environment)
        except CellExecutionError as error:
            raise TutorialError(f"docs/tutorials/{name}.md: {COLORS.sub('', str(error))}") from None
        hide(made, folder)
    made.metadata["digest"], made.metadata["page"] = digest_of(name), page_digest(name)
    DONE.mkdir(parents=True, exist_ok=True)
    nbformat.write(made, path)
    return f"ran    {name}: {time.monotonic() - started:.0f} s"


def hide(made: Any, folder: str) -> None:
    """Remove from the outputs what differs between machines: the temporary folder, colors and times of cells."""
    for cell in made.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                output.text = COLORS.sub("", output.text).replace(str(Path(folder).resolve()), "~").replace(folder, "~")


# ---- for the site


def state(name: str) -> str:
    """Return how old the outputs are: "new", "old" if only the package has changed since, or "none"."""
    path = DONE / f"{name}.ipynb"
    said = nbformat.read(path, as_version=4).metadata if path.exists() else {}
    if said.get("digest") == digest_of(name):
        return "new"
    return "old" if said.get("page") == page_digest(name) else "none"


def describe(every: bool) -> str:
    """Return in one line which outputs the site has.

    Args:
        every: Whether all must be there and up to date, as before a release.

    Raises:
        TutorialError: If they must and are not.
    """
    states = {name: state(name) for name in names()}
    late = [name for name in states if states[name] != "new"]
    if late and every:
        raise TutorialError(f"not run since they or the package changed: {', '.join(late)}; run: make tutorials")
    said = {"old": "with outputs of an earlier version", "none": "without outputs"}
    parts = [
        f"{what}: {', '.join(found)}" for key, what in said.items() if (found := [n for n in late if states[n] == key])
    ]
    return f"Tutorials {'; '.join(parts)}. `make tutorials` runs them." if parts else "Tutorials: all outputs are new."


def executed(name: str) -> Any:
    """Return the notebook, with its outputs unless the page has changed since it was run."""
    if state(name) == "none":
        return notebook((PAGES / f"{name}.md").read_text())
    return nbformat.read(DONE / f"{name}.ipynb", as_version=4)


def attachments(name: str) -> dict[str, bytes]:
    """Return the files of a tutorial in the site: its pictures, and the notebook without outputs."""
    made = executed(name)
    pictures = {path: base64.b64decode(data) for cell in made.cells for path, data in _pictures(name, made, cell)}
    return {**pictures, f"{name}.ipynb": nbformat.writes(notebook((PAGES / f"{name}.md").read_text())).encode()}


def woven(name: str) -> str:
    """Return the page of a tutorial with the outputs under its cells."""
    made = executed(name)
    parts = []
    for cell, ran in zip(cells((PAGES / f"{name}.md").read_text()), made.cells, strict=True):
        parts.append(cell.text)
        said = "".join(_said(ran)).strip("\n")
        if said:
            parts.append('<div class="output" markdown>\n\n```text\n' + said + "\n```\n\n</div>")
        about = FIGURE.match(cell.code)
        parts += [f"![{about[1] if about else ''}]({path})" for path, _ in _pictures(name, made, ran)]
    first, rest = parts[0].split("\n", 1) if "\n" in parts[0] else (parts[0], "")
    download = f"[Download this page as a notebook]({name}.ipynb){{ .md-button download }}"
    return "\n\n".join([first, rest.strip(), *parts[1:], download]) + "\n"


def _said(cell: Any) -> Iterator[str]:
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            yield output.text
        elif "text/plain" in output.get("data", {}) and "image/png" not in output.data:
            yield output.data["text/plain"] + "\n"


def _pictures(name: str, made: Any, cell: Any) -> Iterator[tuple[str, str]]:
    for place, output in enumerate(cell.get("outputs", ())):
        if "image/png" in output.get("data", {}):
            yield f"{name}-{made.cells.index(cell)}-{place}.png", output.data["image/png"]


def main() -> None:
    """Run the tutorials and exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description="Run the tutorials as notebooks.")
    parser.add_argument("names", nargs="*", help="tutorials; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="tutorials that run at the same time")
    parser.add_argument("--since", metavar="COMMIT", help="only those whose page changed since; '': the last commit")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names()):
        sys.exit(f"error: there is no tutorial {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    wanted = options.names or names()
    if options.since is not None:
        pages = {str((PAGES / f"{name}.md").relative_to(ROOT)): name for name in wanted}
        wanted = [pages[page] for page in concerned(pages, changed(options.since))]
        print(f"of {len(pages)} tutorials, those that changed: {', '.join(wanted) or 'none'}")
    started = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(execute, name) for name in wanted]
        failures = []
        for each in running:
            try:
                print(each.result(), flush=True)
            except TutorialError as error:
                failures.append(str(error))
    print(f"{len(running) - len(failures)} of {len(running)} tutorials ran; {time.monotonic() - started:.0f} s")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
