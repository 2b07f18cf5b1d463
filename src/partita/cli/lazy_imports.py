"""Large libraries that a command imports when it first uses them, or without parts that it never uses.

Checking a config takes a tenth of a second, and importing torch two. Python 3.15 has a statement for this: `lazy
import`. importlib's LazyLoader does not serve: a second `import` statement loads the module, and submodules load twice.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_loader
from inspect import getmodulename
from types import ModuleType
from typing import Any

from partita.experiment.gc_freeze import importing


def import_lazily(*names: str) -> None:
    """Let `import NAME` cost nothing until an attribute or a submodule is used.

    Args:
        names: Top-level packages. Those that are imported already, or not installed, are left as they are.
    """
    for name in names:
        spec = None if name in sys.modules else find_spec(name)
        if spec is not None and spec.loader is not None:
            module = module_from_spec(spec)
            module.__class__ = _Lazy
            sys.modules[name] = module
    sys.meta_path.insert(0, _Submodules())


def lighten_transformers() -> None:
    """Let transformers import its models without the libraries that partita never uses through it.

    These are torch.distributed, which shards models over machines, and scipy's optimizers, which losses of object
    detection use. Together they take a second.
    """
    sys.meta_path.insert(0, _LightTransformers())


def is_loaded(name: str) -> bool:
    """Whether a module was imported, and not only named."""
    return name in sys.modules and type(sys.modules[name]) is not _Lazy


class _Lazy(ModuleType):
    """A package that is not imported yet. A command uses it first in its main thread, before it starts others."""

    def __getattribute__(self, attribute: str) -> Any:
        spec: ModuleSpec = object.__getattribute__(self, "__spec__")
        if attribute == "__spec__":  # an import statement reads it
            return spec
        if attribute == "__path__":  # the import of a submodule reads it
            return spec.submodule_search_locations
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert spec.loader is not None
        try:
            with importing():
                spec.loader.exec_module(self)
        except BaseException:
            del sys.modules[spec.name]  # so that the next import statement fails with the reason, too
            raise
        return getattr(self, attribute)


class _Submodules:
    """Imports a lazy package before its submodules; most of them are then there."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package == name or is_loaded(package) or package not in sys.modules:
            return None
        _ = sys.modules[package].__name__  # imports it
        if name not in sys.modules:
            return None
        module = sys.modules[name]
        module.__spec__ = spec_from_loader(name, _Present(module.__spec__))  # importlib goes by the module's own
        return module.__spec__


class _Present(Loader):
    """Loads a module that is there already, and gives it its own spec back."""

    def __init__(self, spec: ModuleSpec | None) -> None:
        self.spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


def top_level_packages() -> dict[str, list[str]]:
    """Return what `importlib.metadata.packages_distributions` does, ten times faster: of a path it reads the folder."""
    found: dict[str, list[str]] = {}
    for each in metadata.distributions():
        about = each.read_text("METADATA") or each.read_text("PKG-INFO") or ""
        declared = (each.read_text("top_level.txt") or "").split()
        paths = [] if declared else (each.read_text("RECORD") or "").splitlines()
        firsts = {path.partition("/")[0] if "/" in path else getmodulename(path.partition(",")[0]) for path in paths}
        for package in declared or {first for first in firsts if first and "." not in first}:
            found.setdefault(package, []).extend(re.findall(r"(?m)^Name: *(.+)$", about)[:1])
    return found


LIBRARIES = "transformers.utils.import_utils"  # says which libraries are there
LEFT_OUT = ("is_torch_distributed_available", "is_scipy_available")


class _LightTransformers:
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == LIBRARIES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _LightLoader(spec.loader)
        return spec


class _LightLoader(Loader):
    """Lets the module that says which libraries are there deny some."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        slow, metadata.packages_distributions = metadata.packages_distributions, top_level_packages
        try:
            self.loader.exec_module(module)
        finally:
            metadata.packages_distributions = slow
        vars(module).update(dict.fromkeys(LEFT_OUT, lambda: False))
        if (exported := vars(module).get("fetch__all__")) is not None:  # it splits all lines of all models
            vars(module)["fetch__all__"] = lambda text: exported(text[text.rfind("\n__all__") + 1 :])
