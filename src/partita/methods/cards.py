"""Method cards: a Markdown description next to each method's code. Tests check the parts that follow from the code."""

from __future__ import annotations

import inspect
import re
from importlib.resources import files
from typing import Any

from partita.core.options import MISSING, OptionError, closest_match, import_from_registry, options_of
from partita.core.options import describe as describe_type
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
    return [_listed(name) for name in INDEX]


def _listed(name: str) -> dict[str, Any]:
    function = import_from_registry(INDEX, name, "method")
    parameters = {parameter.name: parameter.default for parameter in inspect.signature(function).parameters.values()}
    about = (inspect.getdoc(inspect.getmodule(function)) or "").partition("\n")[0]
    composes = [composition for composition in COMPOSITIONS if name in composition.split("+")]
    return {"name": name, "parameters": parameters, "about": about, "compositions": composes}


def describe(name: str) -> dict[str, Any]:
    """Describe one method: its parameters with default, type and meaning, its compositions and its card.

    Raises:
        OptionError: If there is no method of this name.
    """
    text = card(name)
    explained = meanings(name)
    parameters = [
        {
            "name": option.name,
            "default": None if option.default is MISSING else option.default,
            "type": describe_type(option.hint),
            "meaning": option.meaning or explained.get(option.name, ""),
        }
        for option in options_of(import_from_registry(INDEX, name, "method")).values()
    ]
    return {**_listed(name), "parameters": parameters, "card": text}


def meanings(name: str) -> dict[str, str]:
    """Return the meaning of each parameter of a method, from its card."""
    section = card(name).partition("## Parameters\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `.+?` \| (.+) \|$", section, re.MULTILINE))
