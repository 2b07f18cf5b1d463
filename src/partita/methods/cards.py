"""Method cards: a Markdown description next to each method's code. Tests check the parts that follow from the code."""

from __future__ import annotations

import inspect
from importlib.resources import files
from typing import Any

from partita.core.options import OptionError, closest_match, import_from_registry
from partita.methods import COMPOSITIONS, INDEX

HEADINGS = (
    "Idea",
    "Formula",
    "Plan",
    "Parameters",
    "Reduction",
    "Deviations from the paper",
    "Evidence",
    "Privacy and cost",
    "Citation",
)


def card(name: str) -> str:
    """Return the Markdown text of a method's card.

    Raises:
        OptionError: If there is no method of this name.
    """
    if name not in INDEX:
        raise OptionError(f"unknown method '{name}'; {closest_match(name, INDEX)}")
    return files("partita").joinpath(path_of(name)).read_text()


def path_of(name: str) -> str:
    """Return the path of a card within the package: next to the method's module, named like the method's function."""
    module, _, function = INDEX[name].removeprefix("partita.").partition(":")
    return "/".join([*module.split(".")[:-1], f"{function}.md"])


def listing() -> list[dict[str, Any]]:
    """List every method with its parameters, the first line of its module docstring and its supported compositions."""
    rows = []
    for name in INDEX:
        function = import_from_registry(INDEX, name, "method")
        parameters = {
            parameter.name: parameter.default for parameter in inspect.signature(function).parameters.values()
        }
        about = (inspect.getdoc(inspect.getmodule(function)) or "").partition("\n")[0]
        composes = [composition for composition in COMPOSITIONS if name in composition.split("+")]
        rows.append({"name": name, "parameters": parameters, "about": about, "compositions": composes})
    return rows
