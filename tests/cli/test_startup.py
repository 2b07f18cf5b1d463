"""Commands import only the libraries they need, tested in fresh interpreters."""

from __future__ import annotations

import ast
import gc
import re
import runpy
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
from example_fixtures import write_encoder

import partita
from partita.cli.lazy_imports import top_level_packages
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
    "pyarrow",
    "scipy",
    "sklearn",
    "sympy",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "transformers",
]
EXAMPLES = Path(__file__).parents[2] / "examples"
COMMAND = "import runpy, sys; sys.argv[1:] = {words}; runpy.run_module('partita', run_name='__main__')"


def slow_imports(code: str, status: int = 0) -> set[str]:
    """The slow libraries that the code imports and not only names, also if it ends with an exit."""
    ending = (
        "import atexit, sys\nfrom partita.cli.lazy_imports import is_loaded\n"
        f"atexit.register(lambda: print('\\nbrought', *filter(is_loaded, {SLOW_LIBRARIES})))\n"
    )
    done = subprocess.run([sys.executable, "-c", ending + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    [*_, last] = done.stdout.splitlines()
    word, *found = last.split()
    assert word == "brought"
    return set(found)


def brought_by(words: list[object], status: int = 0) -> set[str]:
    return slow_imports(COMMAND.format(words=[str(word) for word in words]), status)


def test_slow_imports_sees_an_import() -> None:
    assert slow_imports("import numpy") == {"numpy"}


def test_importing_partita_imports_no_slow_library() -> None:
    assert slow_imports("import partita; dir(partita)") == set()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "words", ["--help", "run --help", "flower up --help", "--version", "methods", "methods --json", "methods fedprox"]
)
def test_help_and_methods_import_no_slow_library(words: str) -> None:
    assert brought_by([*words.split()]) == set()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("words", [f"config -c {EXAMPLES / 'digits.toml'}", "config --schema", "options", "init"])
def test_options_and_configs_are_known_without_torch(words: str, tmp_path: Path) -> None:
    out = ["--out", tmp_path / "new.toml"] if words == "init" else []
    assert brought_by([*words.split(), *out]) == {"numpy"}


def test_what_does_not_go_together_is_refused_without_torch() -> None:
    words = ["plan", "-c", EXAMPLES / "digits.toml", "--set", "evaluate.samples=2", "--set", "privacy.noise=1.0"]
    assert brought_by(words, status=1) == {"numpy"}


def test_a_table_is_inspected_without_torch(tmp_path: Path) -> None:
    rows = "".join(f"a short note number {place},{place % 2},h{place % 3}\n" for place in range(60))
    (tmp_path / "notes.csv").write_text(f"text,label,hospital\n{rows}")
    assert brought_by(["data", tmp_path / "notes.csv"]) == {"numpy", "pyarrow"}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "words",
    [
        "ls nowhere",
        "report nowhere",
        "resume nowhere",
        "audit nowhere",
        "export nowhere",
        "evaluate nowhere",
        "predict nowhere notes.csv",
        "run -c nowhere.toml",
        "run -c {digits} --set training.lrr=1",
        "run -c {digits} --set data.name=text --set data.path=nowhere.csv",
        "run -c {digits} --set model.name=pretrained --set model.path=no/where/at/all",
        "compare -c {digits} --methods fedprocks",
    ],
)
def test_paths_and_keys_are_checked_before_torch_is_imported(words: str) -> None:
    assert "torch" not in brought_by(words.format(digits=EXAMPLES / "digits.toml").split(), status=1)


@pytest.mark.slow
def test_plan_imports_only_torch() -> None:
    assert brought_by(["plan", "-c", EXAMPLES / "digits.toml"]) == {"torch", "numpy"}


@pytest.mark.slow
def test_commands_import_only_what_they_compute_with(tmp_path: Path) -> None:
    """sympy comes with torch.vmap of the loss, and torch's compiler with transformers."""
    words = ["run", "-c", EXAMPLES / "digits.toml", "--rounds", 1, "--out", tmp_path / "digits"]
    assert brought_by(words) == {"torch", "numpy", "sympy"}
    assert brought_by(["report", tmp_path / "digits"]) == set()
    assert brought_by(["ls", tmp_path]) == set()
    rows = "".join(f"pain in the {('left', 'right')[place % 2]} arm,{place % 2}\n" for place in range(60))
    (tmp_path / "notes.csv").write_text(f"text,label\n{rows}")
    (tmp_path / "notes.toml").write_text(NOTES.format(data=tmp_path / "notes.csv", model=write_encoder(tmp_path / "m")))
    model = {"torch", "torch._dynamo", "numpy", "sympy", "transformers", "pyarrow"}
    assert brought_by(["run", "-c", tmp_path / "notes.toml", "--out", tmp_path / "notes"]) == model
    assert brought_by(["export", tmp_path / "notes", "--to", tmp_path / "text"]) == model
    assert brought_by(["evaluate", tmp_path / "notes"]) == {*model, "scipy"}
    assert brought_by(["predict", tmp_path / "text", tmp_path / "notes.csv"]) == model - {"pyarrow"}


NOTES = """rounds = 1
data = {{name = "text", path = "{data}", text = "text", label = "label", max_length = 16}}
split = {{name = "iid", clients = 2}}
model = {{name = "pretrained", path = "{model}"}}
method = {{name = "fedavg"}}
"""


@pytest.mark.slow
def test_run_and_site_modules_import_only_torch_numpy_and_flower() -> None:
    both = "import partita.experiment.flower_app, partita.experiment.runner, partita.experiment.preview, partita.report"
    assert slow_imports(both) <= {"torch", "numpy", "flwr", "sympy"}


def loaded_lazily(code: str) -> str:
    given = "import sys\nfrom partita.cli.lazy_imports import import_lazily, is_loaded\nimport_lazily('torch')\n"
    done = subprocess.run([sys.executable, "-c", given + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_lazy_package_is_imported_when_it_is_used() -> None:
    code = "import torch\nimport torch\nprint(is_loaded('torch'), 'torch._C' in sys.modules)\n"
    code += "print(int(torch.ones(2).sum()), is_loaded('torch'), type(torch).__name__)"
    assert loaded_lazily(code).split() == ["False", "False", "2", "True", "module"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["from torch.nn import functional", "import torch._C", "import torch.utils.data"])
def test_a_submodule_of_a_lazy_package_exists_once(first: str) -> None:
    code = f"{first}\nimport torch\nname = {first.split()[1]!r}\n"
    code += "here = eval(name, {'torch': torch})\nprint(sys.modules[name] is here, here.__spec__.name)"
    assert loaded_lazily(code).split() == ["True", first.split()[1]]


def test_a_lazy_package_that_fails_says_why_each_time(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import not_there_at_all\n")
    code = f"sys.path.insert(0, {str(tmp_path)!r})\nimport_lazily('broken', 'nowhere_to_be_found')\nimport broken\n"
    code += "for _ in range(2):\n    try:\n        import broken; broken.name\n"
    code += "    except ModuleNotFoundError as error:\n        print(error.name)\n"
    assert loaded_lazily(code).split() == ["not_there_at_all"] * 2


def test_installed_packages_are_listed_as_by_importlib() -> None:
    found = {name: sorted(owners) for name, owners in top_level_packages().items()}
    assert found.items() >= {name: sorted(each) for name, each in metadata.packages_distributions().items()}.items()


@pytest.mark.slow
def test_a_command_finds_the_models_and_the_libraries_that_transformers_finds() -> None:
    asked = (
        "from pathlib import Path\nfrom transformers.utils import import_utils as names\n"
        "found = names.define_import_structure(Path(names.__file__).parents[1] / 'models')\n"
        "print(sorted((sorted(k), sorted((m, sorted(n)) for m, n in v.items())) for k, v in found.items()))\n"
        "print(names._is_package_available('PIL', True), names.is_accelerate_available())"
    )
    light = "from partita.cli.lazy_imports import lighten_transformers as light; light()\n"
    plain, lightened = (
        subprocess.run([sys.executable, "-c", code + asked], capture_output=True, text=True, timeout=120, check=True)
        for code in ("", light)
    )
    assert "modeling_bert" in plain.stdout
    assert lightened.stdout == plain.stdout


def test_type_checking_imports_match_the_lazy_exports() -> None:
    tree = ast.parse(Path(partita.__file__).read_text(encoding="utf-8"))
    conditions = [node for node in tree.body if isinstance(node, ast.If)]
    block = next(node for node in conditions if ast.unparse(node.test) == "TYPE_CHECKING")
    found = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in found for alias in node.names}
    packages = {name: homes.pop(name) for name in partita._PACKAGES}
    assert packages == {name: f"partita.{name}" for name in packages}
    assert homes == {name: f"partita.{place}" for name, place in partita._PLACE_OF.items()}
    assert homes.keys() == set(partita.__all__)
    for name, home in homes.items():
        module, _, own = home.rpartition(".")
        assert getattr(partita, name) is getattr(import_module(module), own)
    for name in packages:
        assert getattr(partita, name) is import_module(f"partita.{name}")
    assert set(partita.__all__) <= set(dir(partita))


def test_the_page_of_names_is_one_that_can_be_read_at_once() -> None:
    assert len(partita.__all__) <= 40
    assert not partita._OLD.keys() & partita._PLACE_OF.keys()


@pytest.mark.parametrize("name", partita._OLD)
def test_an_old_name_works_and_says_the_new_one(name: str) -> None:
    place = f"partita.{partita._OLD[name]}"
    module, _, new = place.rpartition(".")
    assert new == {"RecordedRun": "Fitted"}.get(name, name)
    for _ in range(2):  # each use is told, not only the first of the program
        with pytest.warns(
            DeprecationWarning, match=rf"partita\.{name} is {re.escape(place)} since 0\.2; .*next"
        ) as told:
            assert getattr(partita, name) is getattr(import_module(module), new)
        assert told[0].filename == __file__


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
