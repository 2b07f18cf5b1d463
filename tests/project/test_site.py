"""The documentation site: pages from the repository, their links, the tutorials, and the link checker."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from partita.experiment import run_folder
from partita.methods import INDEX
from partita.record import file_names

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from run_files import RUN_FILES  # noqa: E402

site_pages = import_module("site_pages")
tutorials = import_module("tutorials")
check_links = import_module("check_links")


@pytest.mark.parametrize(
    ("link", "page", "uri", "rewritten"),
    [
        ("../reference/config.md", "docs/guide/data.md", "guide/data.md", "../reference/config.md"),
        ("../../examples/chat.toml", "docs/guide/data.md", "guide/data.md", "../examples/chat.toml"),
        (
            "../../src/partita/methods/fedper.md#idea",
            "docs/guide/data.md",
            "guide/data.md",
            "../methods/fedper.md#idea",
        ),
        ("../compression/prune.md", "src/partita/methods/safl.md", "methods/safl.md", "prune.md"),
        ("../methods", "src/partita/core/x.md", "core/x.md", "../methods/README.md"),
        ("digits", "studies/README.md", "studies/README.md", "digits/README.md"),
        ("digits", "studies/README.md", "claims.md", "studies/digits/README.md"),
        ("../../studies/README.md#verdicts", "docs/guide/data.md", "guide/data.md", "../claims.md"),
        ("docs/glossary.md", "CONTRIBUTING.md", "CONTRIBUTING.md", "glossary.md"),
        ("README.md", "CONTRIBUTING.md", "CONTRIBUTING.md", "index.md"),
        ("#below", "docs/guide/data.md", "guide/data.md", "#below"),
        ("https://flower.ai/docs", "docs/guide/data.md", "guide/data.md", "https://flower.ai/docs"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(link: str, page: str, uri: str, rewritten: str) -> None:
    assert site_pages.rewrite(f"see [it]({link}).", page, uri) == f"see [it]({rewritten})."


def test_links_in_code_stay() -> None:
    text = "`[a](../../x.md)` and\n\n```text\n[b](../../y.md)\n```\n"
    assert site_pages.rewrite(text, "docs/guide/data.md", "guide/data.md") == text


def test_every_page_is_in_the_navigation_once() -> None:
    config = {"nav": yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]}
    listed = sorted(site_pages.leaves(site_pages.on_config(config)["nav"]))
    assert listed == sorted(site_pages.sources())
    assert "methods/fedprox.md" in listed


def test_all_claims_are_on_their_page_and_no_other() -> None:
    pages = site_pages.sources()
    verdicts = (ROOT / "studies" / "README.md").read_text().partition("## See what held\n")[0]
    ids = re.findall(r"^\| `([\w-]+)` \|", verdicts, re.MULTILINE)
    assert len(ids) > 20
    assert re.findall(r"^\| `([\w-]+)` \|", pages["claims.md"].text, re.MULTILINE) == ids
    assert f"Of {len(ids)} claims" in pages["claims.md"].text
    before, _, rest = pages["studies/README.md"].text.partition("## See what held\n")  # a table of the same ids
    assert "| `" not in before + rest.partition("\n## ")[2]
    with pytest.raises(Exception, match="no section"):
        site_pages.split_claims("# Studies\n")


def test_formulas_become_mathml() -> None:
    page = '<p>a <span class="arithmatex">\\(x \\lt y\\)</span></p><div class="arithmatex">\\[z^2\\]</div>'
    drawn = site_pages.with_formulas(page)
    assert drawn.count("<math") == 2
    assert "<msup>" in drawn
    assert "arithmatex" not in drawn


def test_formulas_of_all_cards_can_be_drawn() -> None:
    pages = site_pages.sources()
    for name in INDEX:
        for tex in re.findall(r"\$\$(.+?)\$\$", pages[f"methods/{name}.md"].text, re.DOTALL):
            assert "<math" in site_pages.with_formulas(f'<div class="arithmatex">\\[{tex}\\]</div>'), name


# ---- tutorials

TUTORIAL = """# A tutorial

Text with a block that does not run:

```text
nothing
```

```sh
partita ls
```

```toml title="a.toml"
x = 1
```

```python
# Figure: A line
draw()
```

The end.
"""


def test_blocks_of_a_tutorial_are_the_cells_of_a_notebook() -> None:
    made = tutorials.notebook(TUTORIAL)
    assert [(cell.cell_type, cell.source.splitlines()[0]) for cell in made.cells] == [
        ("markdown", "# A tutorial"),
        ("code", "%%bash -e"),
        ("code", "%%writefile a.toml"),
        ("code", "# Figure: A line"),
        ("markdown", "The end."),
    ]
    assert "nothing" in made.cells[0].source
    with pytest.raises(tutorials.TutorialError, match="does not run"):
        list(tutorials.cells("```toml\nx = 1\n```\n"))


def test_outputs_are_under_their_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tutorials, "PAGES", tmp_path)
    monkeypatch.setattr(tutorials, "DONE", tmp_path)
    (tmp_path / "a.md").write_text(TUTORIAL)
    made = tutorials.notebook(TUTORIAL)
    assert tutorials.describe(every=False) == "Tutorials without outputs: a. `make tutorials` runs them."
    with pytest.raises(tutorials.TutorialError, match="make tutorials"):
        tutorials.describe(every=True)
    assert "```sh\npartita ls\n```" in tutorials.woven("a")
    assert set(tutorials.attachments("a")) == {"a.ipynb"}
    made.metadata["digest"], made.metadata["page"] = tutorials.digest_of("a"), tutorials.page_digest("a")
    new = tutorials.nbformat.v4.new_output
    made.cells[1].outputs = [new("stream", name="stdout", text="a list of runs\n")]
    made.cells[3].outputs = [new("display_data", data={"image/png": "cGljdHVyZQ==", "text/plain": "<Figure>"})]
    tutorials.nbformat.write(made, tmp_path / "a.ipynb")
    text = tutorials.woven("a")
    assert text.index("partita ls") < text.index("a list of runs") < text.index("a.toml") < text.index("![A line]")
    assert "<Figure>" not in text
    assert tutorials.attachments("a")["a-3-0.png"] == b"picture"
    assert tutorials.describe(every=True) == "Tutorials: all outputs are new."
    monkeypatch.setattr(tutorials, "package_digest", lambda: "of another version")
    assert tutorials.state("a") == "old"
    assert tutorials.woven("a") == text, "outputs of an earlier version are shown"
    (tmp_path / "a.md").write_text(TUTORIAL + "more")
    assert tutorials.state("a") == "none"
    assert "a list of runs" not in tutorials.woven("a")


def test_there_are_six_short_tutorials_and_every_figure_has_a_text() -> None:
    assert len(tutorials.names()) == 6
    for name in tutorials.names():
        cells = list(tutorials.cells((tutorials.PAGES / f"{name}.md").read_text()))
        assert 8 <= len(cells) <= 24, name
        for cell in cells:
            assert ("plt.show()" in cell.code) == bool(tutorials.FIGURE.match(cell.code)), name


# ---- the link checker


def test_empty_headings_become_cells_and_the_search_has_a_name() -> None:
    table = '<table><tr><th></th><th style="text-align: right;"> </th><th>a</th></tr></table>'
    made = site_pages.on_page_content(table)
    assert made == '<table><tr><td></td><td style="text-align: right;"></td><th>a</th></tr></table>'
    named = site_pages.on_post_page('<div class="md-search" role="dialog">')
    assert named == '<div class="md-search" role="dialog" aria-label="Search">'


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="missing.html">x</a>', "there is no missing.html"),
        ('<a href="other.html#nowhere">x</a>', "has no such anchor"),
        ('<a href="#nowhere">x</a>', "has no such anchor"),
        ('<img alt="x" src="missing.png">', "there is no missing.png"),
        ('<a href="../outside.html">x</a>', "there is no ../outside.html"),
        ('<script src="https://cdn.example.org/x.js"></script>', "is loaded from another site"),
        ('<img src="picture.png">', "the picture picture.png has no text"),
        ("<table><tr><th>a</th><th> </th></tr></table>", "a heading of a table has no text"),
        ('<div role="dialog">x</div>', "the dialog <div> has no text"),
        ('<div role="dialog" aria-label="Search"><th><code>a</code></th><td></td></div>', ""),
        ('<th><img alt="x" src="picture.png"></th>', ""),
        ('<a href="other.html#here">x</a><a href="folder/">y</a><a href="https://example.org">z</a>', ""),
    ],
)
def test_link_checker_names_what_is_missing(body: str, problem: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "folder").mkdir(parents=True)
    (tmp_path / "outside.html").write_text("")
    (site / "index.html").write_text(body)
    (site / "other.html").write_text('<h1 id="here">x</h1>')
    (site / "folder" / "index.html").write_text("")
    (site / "picture.png").write_text("")
    found = check_links.check(site).problems
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_link_checker_refuses_an_empty_site(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no page"):
        check_links.main([str(tmp_path)])


def test_reference_of_the_run_folder_has_every_file() -> None:
    names = {value for name, value in vars(run_folder).items() if name.isupper() and isinstance(value, str)}
    files = {name.rstrip("/") for name in RUN_FILES}
    others = {run_folder.REMEDY, run_folder.IDENTITY, run_folder.BEST, file_names.EXPORTED}
    assert names - others <= files
