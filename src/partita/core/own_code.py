"""The user's own functions and objects, named "file.py:function" or "package.module:function".

A file is one Python file that runs on its own. It is loaded from its text, so two versions of it can be loaded in one
process, and its digest says which version a run used.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

from partita.core.options import OptionError, closest_match, format_value

FOLDER = "code"  # folder next to a recorded config that holds copies of the files
SUFFIX = ".py"
MAIN = "if __name__ == '__main__':"
STARTS = ("fit", "patch", "federate")  # functions that start a run


class CodeError(OptionError):
    """The user's own code cannot be found or loaded."""


class FitCall(BaseException):
    """A file that is read as a config has called `fit`, `patch` or `federate`. This ends the file.

    Attributes:
        function: The function.
        config: The config that it was about to run, as nested dicts.
        objects: The data and the model that it was given, by table.
    """

    def __init__(self, function: Callable[..., Any], config: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
        super().__init__(f"{function.__name__} was called")
        self.function, self.config, self.objects = function, config, objects


_RUNNING: ContextVar[Literal["", "file", "main"]] = ContextVar("running", default="")


@dataclass(frozen=True)
class Reference:
    """A function or an object in the user's own file or package.

    Attributes:
        source: The path of a file, ending in ".py", or the name of a module.
        function: The name of the function or object.
    """

    source: str
    function: str

    @property
    def path(self) -> Path | None:
        """The file; None for a module."""
        return Path(self.source) if self.source.endswith(SUFFIX) else None

    @property
    def key(self) -> str:
        """The name in records: the file's name without its folder, or the module."""
        return self.path.name if self.path else self.source

    def __str__(self) -> str:
        return f"{self.source}:{self.function}"

    def relative_to(self, folder: Path) -> Reference:
        """Return the reference with the file's path as seen from a folder, made absolute."""
        if self.path is None:
            return self
        return Reference(os.path.abspath(folder / self.path.expanduser()), self.function)

    def named_from(self, folder: Path) -> Reference:
        """Return the reference with a path that is relative, if the file is in a folder."""
        found = self.relative_to(folder)
        return found if self.path is None else Reference(found.source.removeprefix(f"{folder}{os.sep}"), self.function)

    def portable(self) -> Reference:
        """Return the reference as a recorded config has it, with the copy of the file next to the config."""
        return Reference(f"{FOLDER}/{self.key}", self.function) if self.path else self


def parse_reference(name: str) -> Reference | None:
    """Read "file.py:function" or "package.module:function"; None for a name without a colon.

    Raises:
        CodeError: If it has a colon and is neither.
    """
    source, colon, function = name.rpartition(":")
    if not colon:
        return None
    is_module = all(part.isidentifier() for part in source.split("."))
    if not function.isidentifier() or not (source.endswith(SUFFIX) or is_module):
        raise CodeError(
            f"cannot read {format_value(name)}; write 'file.py:function' or 'package.module:function' for your own code"
        )
    return Reference(source, function)


def short_name(name: str) -> str:
    """Return the function's name of a reference, and any other name as it is."""
    reference = parse_reference(name)
    return reference.function if reference else name


def digest(text: bytes) -> str:
    """Return the digest that identifies a version of a file. Blank lines at its end do not count."""
    return hashlib.blake2b(text.rstrip(), digest_size=16).hexdigest()


def read_source(reference: Reference) -> bytes:
    """Return the text of the file, or of the module's own file. Nothing is executed, except parents of a module.

    Raises:
        CodeError: If there is none.
    """
    path = source_file(reference)
    try:
        return path.read_bytes()
    except OSError as error:
        raise CodeError(f"cannot read {path}: {error.strerror}; correct the path in '{reference}'") from error


def source_file(reference: Reference) -> Path:
    """Return the file of a reference, or that of its module.

    Raises:
        CodeError: If there is no such module.
    """
    return reference.path or _module_file(reference.source)


def digests(references: Iterable[Reference]) -> dict[str, str]:
    """Return the digest of each file or module by its key.

    Raises:
        CodeError: If one cannot be read, or if two files have the same name.
    """
    sources: dict[str, str] = {}
    found: dict[str, str] = {}
    for reference in references:
        other = sources.setdefault(reference.key, reference.source)
        if other != reference.source:
            raise CodeError(f"{other} and {reference.source} have the same name; rename one of them")
        found[reference.key] = digest(read_source(reference))
    return dict(sorted(found.items()))


def load_module(reference: Reference) -> ModuleType:
    """Load the file or module of a reference.

    Raises:
        CodeError: If it cannot be loaded.
    """
    return _load_file(reference.path) if reference.path else _load_package_module(reference.source)


def load_object(reference: Reference) -> Any:
    """Load the file or module and return what the name stands for, a function or another object.

    Raises:
        CodeError: If it cannot be loaded, or has no such name.
    """
    module = load_module(reference)
    if not hasattr(module, reference.function):
        known = [name for name, value in vars(module).items() if name[0] != "_" and _may_be_named(value, module)]
        hint = closest_match(reference.function, known) if known else "it is empty"
        raise CodeError(f"{reference.source} has no object or function '{reference.function}'; {hint}")
    return getattr(module, reference.function)


def _may_be_named(value: object, module: ModuleType) -> bool:
    made_elsewhere = inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value)
    return _is_own(value, module) or not (made_elsewhere or type(value).__module__ == "__future__")


def load_function(reference: Reference) -> Callable[..., Any]:
    """Load the file or module and return the function.

    Raises:
        CodeError: If it cannot be loaded, or has no such function.
    """
    module = load_module(reference)
    found = getattr(module, reference.function, None)
    if not callable(found):
        known = [name for name, value in vars(module).items() if callable(value) and _is_own(value, module)]
        hint = closest_match(reference.function, known) if known else "it has no functions"
        raise CodeError(f"{reference.source} has no function '{reference.function}'; {hint}")
    function: Callable[..., Any] = found
    return function


def _is_own(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__ and not getattr(value, "__name__", "_").startswith("_")


def _module_file(name: str) -> Path:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise CodeError(f"there is no module '{name}' ({error}); install its package, or correct the name") from error
    if spec is None or not spec.origin or not spec.origin.endswith(SUFFIX):
        raise CodeError(f"there is no Python module '{name}'; install its package, or correct the name")
    return Path(spec.origin)


def _load_package_module(name: str) -> ModuleType:
    path = _module_file(name)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise CodeError(f"cannot import '{name}': {describe_error(error, str(path))}") from error


def _load_file(path: Path) -> ModuleType:
    text = read_source(Reference(str(path), ""))
    name = f"partita_code_{path.stem}_{digest(text)}"
    module = sys.modules.get(name)
    if module is not None and module.__file__ == str(path):
        return module
    module = ModuleType(name)
    module.__file__ = str(path)
    linecache.checkcache(str(path))  # tracebacks show the lines of this version
    previous = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look modules up here
    try:
        with _running("file"):
            exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        raise CodeError(f"cannot load {path}: {describe_error(error, str(path))}") from error
    return module


@contextmanager
def _running(what: Literal["file", "main"]) -> Iterator[None]:
    token = _RUNNING.set(what)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def is_read_as_config(function: Callable[..., Any]) -> bool:
    """Return whether a function that starts a run is called only to find the config that it makes.

    Raises:
        CodeError: If a file is loaded for what it defines, which must not start a run.
    """
    if _RUNNING.get() == "file":
        raise CodeError(f"the file calls {function.__name__} when it is loaded; put the call under: {MAIN}")
    return _RUNNING.get() == "main"


def end_at_fit(function: Callable[..., Any], config: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """End the file if it is read as a config; the arguments are those of `FitCall`. Elsewhere, do nothing."""
    if is_read_as_config(function):
        raise FitCall(function, config, objects)


def read_fit_call(path: Path) -> FitCall:
    """Load a file, run what it has under `if __name__ == "__main__":` up to its call of `fit`, and return the call.

    Raises:
        CodeError: If the file cannot be loaded, or does not call `fit`, `patch` or `federate` exactly once.
    """
    module = _load_file(path)
    tree = ast.parse(read_source(Reference(str(path), "")))
    under_main: list[ast.stmt] = [
        each for each in tree.body if isinstance(each, ast.If) and "__name__" in _names(each.test)
    ]
    scope = {**vars(module), "__name__": "__main__"}
    try:
        with _running("main"):
            exec(compile(ast.Module(under_main, []), str(path), "exec", dont_inherit=True), scope)
    except FitCall as call:
        loops = (ast.For, ast.While, ast.comprehension)
        parts = [tree, *(each for each in ast.walk(tree) if isinstance(each, loops))]  # a loop may call it again
        names = [name for part in parts for name in _starts(part, scope)]
        if len(names) > 1:
            several = sorted({*names})
            what = " and ".join(several) if len(several) > 1 else f"{several[0]} more than once"
            raise CodeError(f"{path} calls {what}; leave one call under: {MAIN}") from None
        return call
    except (Exception, SystemExit) as error:
        raise CodeError(f"cannot run {path}: {describe_error(error, str(path))}") from error
    raise CodeError(f"{path} does not call fit; add a call of partita.fit(model, data, ...) under: {MAIN}")


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _starts(tree: ast.AST, scope: Mapping[str, Any]) -> list[str]:
    """Return the functions that start a run, by name, for each call that is written in a part of a file."""

    def meant(node: ast.expr) -> Any:
        if isinstance(node, ast.Attribute):
            return getattr(meant(node.value), node.attr, None)
        return scope.get(node.id) if isinstance(node, ast.Name) else None

    called = [meant(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)]
    functions = [each for each in called if isinstance(each, FunctionType) and each.__module__.startswith("partita.")]
    return [each.__name__ for each in functions if each.__name__ in STARTS]


def describe_error(error: BaseException, file: str) -> str:
    """Describe an error in the user's code on one line, with the line of the file where it happened."""
    lines = (
        [frame.lineno for frame in inspect.getinnerframes(error.__traceback__) if frame.filename == file]
        if (error.__traceback__)
        else []
    )
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    text = f"{f'line {line}: ' if line else ''}{type(error).__name__}: {' '.join(message.split())}"
    if isinstance(error, ModuleNotFoundError):
        text += "; own code is one file, so put what it needs into it, or install that as a package"
    return text
