"""The runner of the documentation's commands, and what the pages tell it to do."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

import partita
from partita.cli.main import app

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "scripts"))  # as when run_docs.py is run
run_docs, changes = import_module("run_docs"), import_module("changed")

PAGE = """# A page

```sh
echo one \\
    two > out.txt   # a comment
# only a comment
cat << END >> out.txt
three
END
```

    for n in 4 5; do
        echo $n >> out.txt
    done

```toml title="a/b.toml"
x = 1
```

```python
print("six", file=open("out.txt", "a"))
```

| in | a table |
|---|---|
| `partita ls` | `partita plan --config a/b.toml`, `partita run --config ...` |

```text
nothing
```
"""


ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("src", "docs", "tests", "studies", "benchmarks", "examples", "scripts")
SUFFIXES = (".py", ".md", ".ipynb")


def names_of_partita(text: str) -> set[str]:
    """The names in `from partita import ...`, and after `partita.` and `pt.`."""
    imported = " ".join(re.findall(r"\bfrom partita import (\([^)]*\)|[^\n]*)", text))
    return {*re.findall(r"\w+", imported), *re.findall(r"\b(?:partita|pt)\.(\w+)", text)}


def test_every_public_name_is_in_a_page_that_a_person_wrote() -> None:
    pages = [page for page in ROOT.glob("docs/**/*.md") if "reference" not in page.parts]
    shown = names_of_partita("\n".join(page.read_text() for page in (ROOT / "README.md", *pages)))
    missing = set(partita.__all__) - shown
    assert not missing


@pytest.mark.slow
def test_no_file_uses_an_old_name() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if path.suffix in SUFFIXES]
    found = {
        path: names_of_partita(path.read_text()) & partita._OLD.keys()
        for path in files
        if path.relative_to(ROOT).parts[:2] != ("docs", "decisions")  # what was said then
    }
    assert len(found) > 1000
    assert not {path: names for path, names in found.items() if names}


def run(text: str, tmp_path: Path, page: str = "page.md") -> object:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return run_docs.run_page(page, run_docs.steps(page, text), tmp_path / "page", environment)


def test_blocks_are_split_into_steps_with_their_lines() -> None:
    steps = run_docs.steps("page.md", PAGE)
    assert [(step.line, step.kind, step.text.splitlines()[0]) for step in steps] == [
        (4, "sh", "echo one \\"),
        (7, "sh", "cat << END >> out.txt"),
        (12, "sh", "for n in 4 5; do"),
        (17, "file", "x = 1"),
        (21, "python", 'print("six", file=open("out.txt", "a"))'),
        (26, "sh", "partita plan --config a/b.toml"),
    ]
    assert steps[3].title == "a/b.toml"


def test_page_runs_in_order_in_its_own_folder(tmp_path: Path) -> None:
    outcome = run(PAGE.replace("`partita plan --config a/b.toml`", ""), tmp_path)
    assert outcome.failure == ""
    assert len(outcome.ran) == 5
    assert (tmp_path / "page" / "page" / "out.txt").read_text() == "one two\nthree\n4\n5\nsix\n"
    assert (tmp_path / "page" / "page" / "a" / "b.toml").read_text() == "x = 1\n"


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (
            "```sh\necho before\necho broken; false\ntouch after\n```",
            "page.md:3: exit code 1\n    $ echo broken; false\n    | broken",
        ),
        ("```sh\nexport A=1 && cd /\n```\n\n```sh\ntest $A = 1 && test $PWD != /\n```", "page.md:6: exit code 1"),
        ("```sh\nexit 0\n```", "page.md:2: it ended the shell"),
        ("```python\nraise SystemExit(3)\n```", "page.md:2: exit code 3"),
        pytest.param("```toml\nrounds = 'many'\n```", "page.md:2: exit code 1", marks=pytest.mark.slow),
        ("```sh\nsleep 600 &\n```", "page.md: after its last command these still run:\n    | sleep 600"),
        ("```sh\nsetsid sleep 601 < /dev/null &\n```", "page.md: after its last command these still run"),
    ],
)
def test_failure_names_the_line_the_command_and_its_output(
    text: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_docs, "EXITING", 0.5)
    outcome = run(text, tmp_path)
    assert outcome.failure.startswith(failure)
    assert not (tmp_path / "page" / "page" / "after").exists(), "a page stops at its first failure"
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if bytes(tmp_path / "page") in read(path)]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_command_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_docs, "LONGEST", 0.5)
    assert run("```sh\nsleep 602\n```", tmp_path).failure.startswith("page.md:2: not finished after")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```yaml\na: 1\n```", r'page.md:1: the block has the language "yaml"'),
        ("text\n\n    core/  (the contracts\n    more", r"page.md:3: this is not a complete command: 'core/  \(the"),
    ],
)
def test_block_that_cannot_run_is_an_error(text: str, error: str) -> None:
    with pytest.raises(run_docs.DocsError, match=error):
        run_docs.steps("page.md", text)


def test_exceptions_skip_or_shorten_and_must_match() -> None:
    steps = run_docs.steps("page.md", "    make demo\n    partita compare\n    partita ls\n")
    skip = run_docs.NotAsWritten("*.md", "make ", "elsewhere")
    shorten = run_docs.NotAsWritten("page.md", "partita compare", "long", "--set rounds=1")
    run, skipped, shortened = run_docs.arrange(steps, [skip], [shorten])
    assert [step.text for step in run] == ["partita compare --set rounds=1", "partita ls"]
    assert [(step.text, why) for step, why in skipped] == [("make demo", skip)]
    assert [step for step, _ in shortened] == run[:1]
    for stale in (run_docs.NotAsWritten("*.md", "flwr", ""), run_docs.NotAsWritten("b.md", "make", "")):
        with pytest.raises(run_docs.DocsError, match=r"no command of .* begins with"):
            run_docs.arrange(steps, [skip, stale], [])


def test_a_change_concerns_the_pages_that_it_touches_and_names(tmp_path: Path) -> None:
    pages = {"a.md": "`examples/x.toml`", "src/partita/methods/m.md": "", "b.md": "see src/partita/core/plan.py"}
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for touched, expected in [
        ({"b.md"}, ["b.md"]),
        ({"examples/x.toml"}, ["a.md"]),
        ({"src/partita/methods/m.py"}, ["src/partita/methods/m.md"]),
        ({"src/partita/core/plan.py"}, []),
        (None, []),
    ]:
        assert changes.concerned(pages, touched, tmp_path) == expected


def test_changes_are_those_since_a_commit_and_those_not_committed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    assert changes.changed(root=tmp_path) is None
    git("init", "--quiet")
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text("")
        git("add", name)
        git("commit", "--quiet", "--message", name)
    (tmp_path / "new").write_text("")
    (tmp_path / "one").write_text("changed")
    assert changes.changed(root=tmp_path) == {"one", "three", "new"}
    assert changes.changed("HEAD~2", tmp_path) == {"one", "two", "three", "new"}
    assert changes.changed("0" * 40, tmp_path) == {"one", "three", "new"}, "what a new branch has before it"


@pytest.mark.slow
def test_partita_commands_of_all_pages_have_known_options() -> None:
    """This also covers commands that cannot run in CI."""
    steps = run_docs.all_steps()
    run_docs.arrange(steps)
    known = typer.main.get_command(app)
    commands = [step for step in steps if step.kind == "sh" and step.text.startswith("partita ")]
    assert len(commands) > 40
    for step in commands:
        lexer = shlex.shlex(step.text.replace("\\\n", " "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = lexer.commenters == "#"
        words = list(lexer)[1:]
        words = words[: next((place for place, word in enumerate(words) if word in (">", "&", "|", "||", "&&")), None)]
        command, name = known, ""
        while words and hasattr(command, "commands"):
            name = words.pop(0)
            assert name in command.commands, f"{step}: there is no such command"
            command = command.commands[name]
        command.make_context(name, words)
