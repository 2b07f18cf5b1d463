"""`partita new`: what it writes works at once."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from shell import Shell

from partita.core.own_code import Reference, load_function
from partita.methods.cards import HEADINGS

NAMES = {"method": "fedmine", "task": "mytask", "model": "mymodel"}
FIXED = ("key", "task")  # parameters that are not options


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each kind."""
    from partita.cli.new import write

    to = tmp_path_factory.mktemp("new")
    for kind, name in NAMES.items():
        write(kind, name, to)  # type: ignore[arg-type]
    return to


@pytest.mark.slow
def test_written_tests_pass(folder: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error::UserWarning", "."]
    done = subprocess.run(words, cwd=folder, text=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", NAMES)
def test_written_config_runs(
    kind: str, folder: Path, tmp_path: Path, run_partita: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    name = NAMES[kind]
    code, out, err = run_partita("run", "--config", folder / f"{name}.toml", "--rounds", 1)
    assert code == 0, err
    assert name in out
    [run] = (tmp_path / "runs").iterdir()
    assert run.name == f"{name}-seed-0"
    assert (run / "code" / f"{name}.py").read_bytes() == (folder / f"{name}.py").read_bytes()


@pytest.mark.parametrize("kind", NAMES)
def test_card_lists_the_options_and_their_defaults(kind: str, folder: Path) -> None:
    name = NAMES[kind]
    card = (folder / f"{name}.md").read_text()
    function = load_function(Reference(str(folder / f"{name}.py"), name))
    options = [each for each in inspect.signature(function).parameters.values() if each.name not in FIXED]
    assert len(options) == 1
    assert re.findall(r"^\| `(\w+)` \| `(\S+)` \|", card, re.MULTILINE)[:1] == [
        (each.name, repr(each.default)) for each in options
    ]
    assert card.startswith(f"# {name}\n")
    headings = tuple(re.findall(r"^## (.+)$", card, re.MULTILINE))
    assert headings == HEADINGS if kind == "method" else {"Idea", "Parameters", "Evidence", "Citation"} < {*headings}


def test_method_has_a_card_and_options(folder: Path, run_partita: Shell) -> None:
    own = f"{folder / 'fedmine.py'}:fedmine"
    assert run_partita("methods", own)[1].startswith("# fedmine\n")
    assert "pull: a number from 0 to 1,000; default 0.01" in run_partita("options", f"method.{own}")[1]


def test_nothing_is_left_of_the_placeholder(folder: Path) -> None:
    assert len(list(folder.glob("*.*"))) == 12
    for path in folder.glob("*.*"):
        assert "example" not in path.name
        assert not re.search("fedexample|exampletask|examplemodel", path.read_text())
    for name in NAMES.values():
        tomllib.loads((folder / f"{name}.toml").read_text())


def test_nothing_is_overwritten(tmp_path: Path, run_partita: Shell) -> None:
    (tmp_path / "fedmine.toml").write_text("mine")
    code, _, err = run_partita("new", "method", "fedmine", "--to", tmp_path)
    assert code == 1
    assert "fedmine.toml exists already; move it away, choose another name, or another folder with --to" in err
    assert [path.name for path in tmp_path.iterdir()] == ["fedmine.toml"]
    assert (tmp_path / "fedmine.toml").read_text() == "mine"


def test_next_steps_name_the_files(tmp_path: Path, run_partita: Shell) -> None:
    code, out, _ = run_partita("new", "task", "mytask", "--to", tmp_path / "a b")
    assert code == 0
    assert f"  partita check '{tmp_path}/a b/mytask.py':mytask --kind data" in out
    assert f"  partita run --config '{tmp_path}/a b/mytask.toml' --set rounds=2" in out


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("my-method", "the name is 'my-method'; .* did you mean my_method?"),
        ("FedMine", "did you mean fedmine?"),
        ("3d", "for example fedmine"),
        ("lambda", "for example fedmine"),
        ("json", "a Python module 'json' is installed already; choose another name, such as my_json"),
        ("torch", "a Python module 'torch' is installed already"),
        ("fedavg", "partita has a method 'fedavg' already; choose another name, such as my_fedavg"),
    ],
)
def test_unusable_name_is_refused(name: str, error: str, tmp_path: Path, run_partita: Shell) -> None:
    code, _, err = run_partita("new", "method", name, "--to", tmp_path / "new")
    assert code == 1
    assert re.search(error, err)
    assert not (tmp_path / "new").exists()
