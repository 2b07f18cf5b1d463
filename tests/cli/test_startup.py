"""Commands import only the libraries they need, tested in fresh interpreters."""

from __future__ import annotations

import ast
import gc
import runpy
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

import partita
from partita.experiment.gc_freeze import importing

SLOW_LIBRARIES = [
    "datasets",
    "dp_accounting",
    "flwr",
    "flwr_datasets",
    "matplotlib",
    "numpy",
    "opacus",
    "pandas",
    "peft",
    "scipy",
    "sklearn",
    "torch",
    "transformers",
]
EXAMPLES = Path(__file__).parents[2] / "examples"
COMMAND = "import runpy, sys; sys.argv[1:] = {words}; runpy.run_module('partita', run_name='__main__')"


def slow_imports(code: str, status: int = 0) -> set[str]:
    """The slow libraries that the code imports, also if it ends with an exit."""
    ending = (
        f"import atexit, sys; atexit.register(lambda: print('brought', *{{*{SLOW_LIBRARIES}}} & {{*sys.modules}}))\n"
    )
    done = subprocess.run([sys.executable, "-c", ending + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    [*_, last] = done.stdout.splitlines()
    word, *found = last.split()
    assert word == "brought"
    return set(found)


def test_slow_imports_sees_an_import() -> None:
    assert slow_imports("import numpy") == {"numpy"}


def test_importing_partita_imports_no_slow_library() -> None:
    assert slow_imports("import partita; dir(partita)") == set()


@pytest.mark.parametrize("words", ["--help", "run --help", "flower up --help"])
def test_help_imports_no_slow_library(words: str) -> None:
    assert slow_imports(COMMAND.format(words=words.split())) == set()


@pytest.mark.parametrize("words", ["--version", "methods", "methods --json", "methods fedprox"])
def test_version_and_methods_import_no_slow_library(words: str) -> None:
    assert slow_imports(COMMAND.format(words=words.split())) == set()


def test_ls_imports_no_slow_library() -> None:
    assert slow_imports(COMMAND.format(words=["ls", "nowhere"]), status=1) == set()


def test_plan_imports_only_torch_and_the_library_of_the_model() -> None:
    """numpy comes with torch, and scipy with transformers; older ones import scikit-learn too."""
    words = ["plan", "-c", str(EXAMPLES / "digits.toml")]
    assert slow_imports(COMMAND.format(words=words)) <= {"torch", "numpy", "transformers", "scipy", "sklearn"}


def test_run_and_site_modules_import_only_torch_numpy_and_flower() -> None:
    both = "import partita.experiment.flower_app, partita.experiment.runner, partita.experiment.preview, partita.report"
    assert slow_imports(both) == {"torch", "numpy", "flwr"}


def test_type_checking_imports_match_the_lazy_exports() -> None:
    tree = ast.parse(Path(partita.__file__).read_text(encoding="utf-8"))
    conditions = [node for node in tree.body if isinstance(node, ast.If)]
    block = next(node for node in conditions if ast.unparse(node.test) == "TYPE_CHECKING")
    found = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in found for alias in node.names}
    assert homes.keys() == set(partita.__all__)
    for name, home in homes.items():
        assert getattr(partita, name) is getattr(import_module(home), name)
    assert set(partita.__all__) <= set(dir(partita))


def test_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert partita.__version__ == metadata.version("partita")
    monkeypatch.delitem(vars(partita), "__version__")
    monkeypatch.setattr(metadata.Distribution, "discover", lambda **_: iter(()))  # source on the path, not installed
    with pytest.raises(AttributeError, match=r"not installed: pip install -e \."):
        _ = partita.__version__


def test_unknown_package_attribute_is_an_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Plann'"):
        _ = partita.Plann
    with pytest.raises(ImportError, match="Plann"):
        from partita import Plann  # noqa: F401


def test_importing_freezes_garbage_only_after_a_new_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    frozen: list[bool] = []
    with importing():
        import json  # noqa: F401
    assert not frozen
    (tmp_path / "never_seen_before.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError), importing():  # noqa: PT012
        import_module("never_seen_before")
        _ = 1 / 0
    assert frozen == [False]
    assert gc.isenabled()
    monkeypatch.delitem(sys.modules, "never_seen_before")


def test_windows_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="needs Linux or macOS"):
        runpy.run_path(str(partita.__file__))


@pytest.mark.parametrize("triton", [True, False])
def test_frozen_objects_are_released_at_the_end_only_for_triton(triton: bool) -> None:
    code = (
        "import atexit, gc, sys, types\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"  # the first one registered is called last
        "from partita.experiment.gc_freeze import importing\n"
        "with importing():\n    import email.message\n"
    )
    ready = "import sys, types\nsys.modules['triton'] = types.ModuleType('triton')\n" if triton else ""
    done = subprocess.run([sys.executable, "-c", ready + code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(not triton)], done.stderr
