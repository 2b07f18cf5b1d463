"""References to the user's own functions, and how their files are loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint
from inspect import signature
from pathlib import Path

import pytest

from partita.core import registry
from partita.core.options import OptionError
from partita.core.own_code import (
    CodeError,
    Reference,
    digest,
    digests,
    load_function,
    parse_reference,
    read_source,
    short_name,
)
from partita.core.registry import (
    KINDS,
    Kind,
    built_in,
    call,
    find_function,
    find_reference,
    make,
    offered,
    options_by_name,
    plugins,
)
from partita.methods import INDEX


def write(path: Path, text: str) -> Reference:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return Reference(str(path), "f")


@pytest.mark.parametrize(
    ("name", "source", "function"),
    [
        ("mine.py:f", "mine.py", "f"),
        ("/a b/c:d/mine.py:f", "/a b/c:d/mine.py", "f"),
        ("package.module:f", "package.module", "f"),
        ("module:f", "module", "f"),
    ],
)
def test_references_name_a_file_or_a_module(name: str, source: str, function: str) -> None:
    assert parse_reference(name) == Reference(source, function)
    assert str(parse_reference(name)) == name
    assert short_name(name) == function


@pytest.mark.parametrize("name", ["mine.py:", "mine.py:f()", "mine-1.txt:f", ":f", "a..b:f", "a b:f", "mine.py:f:g h"])
def test_other_names_with_a_colon_are_refused(name: str) -> None:
    with pytest.raises(CodeError, match=r"write 'file.py:function' or 'package.module:function'"):
        parse_reference(name)


def test_names_without_a_colon_are_no_references() -> None:
    assert parse_reference("fedavg") is None
    assert short_name("fedavg") == "fedavg"


def test_paths_are_relative_to_the_given_folder_and_recorded_next_to_the_config(tmp_path: Path) -> None:
    file = Reference("lab/../mine.py", "f")
    assert file.relative_to(tmp_path) == Reference(str(tmp_path / "mine.py"), "f")
    assert Reference("/there/mine.py", "f").relative_to(tmp_path).source == "/there/mine.py"
    assert file.portable() == Reference("code/mine.py", "f")
    assert file.key == "mine.py"
    module = Reference("package.module", "f")
    assert module.relative_to(tmp_path) == module.portable() == module
    assert module.key == "package.module"


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Reference("~/mine.py", "f").relative_to(Path("/elsewhere")).source == str(tmp_path / "mine.py")


def test_file_is_loaded_once_for_each_version(tmp_path: Path) -> None:
    reference = write(tmp_path / "mine.py", "class C: pass\ndef f(): return 1\n")
    first = load_function(reference)
    assert load_function(reference) is first
    write(tmp_path / "mine.py", "class C: pass\ndef f(): return 2\n")
    second = load_function(reference)
    assert (first(), second()) == (1, 2)
    assert sys.modules[second.__module__].__dict__["C"].__module__ == second.__module__


def test_equal_files_in_different_places_are_loaded_each(tmp_path: Path) -> None:
    one, two = (write(tmp_path / place / "mine.py", "def f(): return __file__\n") for place in ("a", "b"))
    assert load_function(one)() == one.source
    assert load_function(two)() == two.source


def test_dataclasses_and_later_annotations_work_in_a_file(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass C:\n    x: int = 3\n\ndef f() -> C:\n    return C()\n"
    )
    assert load_function(write(tmp_path / "mine.py", text))().x == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "line 1: SyntaxError: "),
        ("x = 1\nx.y\n\ndef f(): pass\n", "line 2: AttributeError: 'int' object has no attribute 'y'"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        (
            "import no_such_thing\n",
            "No module named 'no_such_thing'; own code is one file, so put what it needs into it",
        ),
        ("raise ValueError('two\\nlines')\n", "ValueError: two lines$"),
    ],
)
def test_error_in_a_file_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    reference = write(tmp_path / "mine.py", text)
    before = set(sys.modules)
    with pytest.raises(CodeError, match=message) as caught:
        load_function(reference)
    assert str(caught.value).startswith(f"cannot load {reference.source}: ")
    assert {name for name in sys.modules if name.startswith("partita_code_")} <= before


def test_missing_functions_files_and_modules_are_named(tmp_path: Path) -> None:
    reference = write(tmp_path / "mine.py", "from math import floor\ndef fedmine(): pass\ndef _g(): pass\nX = 3\n")
    with pytest.raises(CodeError, match=r"has no function 'fedmin'; did you mean 'fedmine'\?"):
        load_function(Reference(reference.source, "fedmin"))
    with pytest.raises(CodeError, match=r"has no function 'X'; it can be: fedmine$"):
        load_function(Reference(reference.source, "X"))
    with pytest.raises(CodeError, match="has no function 'f'; it has no functions"):
        load_function(write(tmp_path / "empty.py", ""))
    with pytest.raises(CodeError, match=r"cannot read .*other\.py: No such file or directory; correct the path"):
        read_source(Reference(str(tmp_path / "other.py"), "f"))
    for module in ("no_such_package.module", "sys", "no_such_module"):
        with pytest.raises(CodeError, match="there is no"):
            load_function(Reference(module, "f"))


def test_module_whose_import_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "broken_package" / "__init__.py", "")
    write(tmp_path / "broken_package" / "module.py", "\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CodeError, match=r"cannot import 'broken_package.module': line 2: ZeroDivisionError"):
        load_function(Reference("broken_package.module", "f"))


def test_digest_is_of_the_text_without_blank_lines_at_its_end(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.py", "x = 1\n"), write(tmp_path / "two.py", "x = 2\n")
    found = digests([two, one, one])
    assert found == {"one.py": digest(b"x = 1"), "two.py": digest(b"x = 2\n\n")}
    assert list(found) == ["one.py", "two.py"]
    assert found["one.py"] != found["two.py"]
    json_text = Path(sys.modules["json"].__file__ or "").read_bytes()
    assert digests([Reference("json", "dumps")]) == {"json": digest(json_text)}


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    one, two = (write(tmp_path / place / "mine.py", "") for place in ("a", "b"))
    with pytest.raises(CodeError, match="have the same name; rename one of them"):
        digests([one, two])


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points of installed packages."""
    listed: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: [each for each in listed if each.group == group])
    registry._plugins.cache_clear()
    yield listed
    registry._plugins.cache_clear()


def test_packages_register_names(packages: list[EntryPoint]) -> None:
    packages += [
        EntryPoint("dumps", "json:dumps", "partita.methods"),
        EntryPoint("fedavg", "json:loads", "partita.methods"),
        EntryPoint("loads", "json:loads", "partita.data"),
    ]
    assert find_function("method", "dumps")([1]) == "[1]"
    assert find_reference("method", "dumps") == Reference("json", "dumps")
    assert find_function("method", "fedavg")().name == "fedavg"  # a built-in name cannot be replaced
    assert find_reference("method", "fedavg") is None
    assert offered("method") == [*INDEX, "dumps"]
    assert set(plugins("data")) == {"loads"}
    with pytest.raises(ValueError, match=r"unknown method 'dump'; did you mean 'dumps'\?"):
        find_function("method", "dump")


def test_name_that_two_packages_register_is_refused(packages: list[EntryPoint]) -> None:
    packages += [EntryPoint("x", "json:dumps", "partita.splits"), EntryPoint("x", "json:loads", "partita.splits")]
    with pytest.raises(CodeError, match=r"both register 'x' in 'partita.splits'"):
        find_function("split", "x")


def test_unknown_name_with_a_dot_hints_at_own_code() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'mine.py'; .*; for your own code, write 'file.py:function'"):
        find_function("method", "mine.py")
    with pytest.raises(ValueError, match=r"unknown sampling 'mine'; it can be: available, by_size, [\w, ]+$"):
        find_function("sampling", "mine")


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind whose functions return a whole number."""
    monkeypatch.setitem(
        KINDS, "number", Kind("partita.numbers", returns=("builtins:int",), given=("x",), shared=("z",))
    )


@pytest.mark.usefixtures("numbers")
def test_function_must_return_the_expected_type() -> None:
    assert call("number", "json:loads", "3") == 3
    with pytest.raises(CodeError, match=r"the number 'json:dumps' returned a str; it must return a int"):
        call("number", "json:dumps", 3)


@pytest.mark.usefixtures("numbers")
def test_options_of_a_name_are_checked_before_its_call(tmp_path: Path) -> None:
    name = str(write(tmp_path / "mine.py", "def f(x: int, y: int = 2) -> int:\n    return 10 * x + y\n"))
    assert make("number", name, {}, x=3) == 32
    assert make("number", name, {"y": 4}, x=3) == 34
    assert set(options_by_name("number", name)) == {"y"}
    with pytest.raises(OptionError, match=r"^number.y is 'a'; it must be a whole number$"):
        make("number", name, {"y": "a"}, x=3)
    with pytest.raises(OptionError, match=r"^unknown key 'number.x'; it can be: y, z; 'partita options number.*mine"):
        make("number", name, {"x": 4}, x=3)


@pytest.mark.parametrize("what", KINDS)
def test_every_kind_is_where_the_table_says(what: str) -> None:
    """So that none is found only when a run needs it."""
    assert all(place.startswith("partita.") for place in built_in(what).values())
    for place in KINDS[what].returns:
        assert isinstance(place, str)
        module, _, kind = place.partition(":")
        assert isinstance(getattr(import_module(module), kind), type)
    for name in built_in(what):
        given = set(signature(find_function(what, name)).parameters)
        assert what == "data" or {*KINDS[what].given} <= given, name


def test_error_in_an_own_function_names_its_line(tmp_path: Path) -> None:
    reference = write(
        tmp_path / "mine.py", "def f(x):\n    return x.y\n\ndef g(x):\n    raise ValueError('say this')\n"
    )
    with pytest.raises(CodeError, match=r"the data '.*mine.py:f' failed: line 2: AttributeError: 'int' object has no"):
        call("data", str(reference), 3)
    with pytest.raises(ValueError, match=r"^say this$"):
        call("data", str(Reference(reference.source, "g")), 3)
    with pytest.raises(AttributeError):  # an error in partita itself keeps its traceback
        call("method", "partita.core.own_code:parse_reference", 3)
