"""Method cards: what each method is, in words beside its code, with the parts that code can prove kept true."""

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
    if name not in INDEX:
        raise OptionError(f"unknown method '{name}'; {closest_match(name, INDEX)}")
    return files("partita.methods").joinpath(path_of(name)).read_text()


def path_of(name: str) -> str:
    """A card lies beside the method's file and is called like its function."""
    return INDEX[name].partition(":")[2] + ".md"


def listing() -> list[dict[str, Any]]:
    """Every method with its parameters, the first line of its file, and the compositions it is known to work in."""
    rows = []
    for name in INDEX:
        function = import_from_registry(INDEX, name, "method")
        parameters = {each.name: each.default for each in inspect.signature(function).parameters.values()}
        about = (inspect.getdoc(inspect.getmodule(function)) or "").partition("\n")[0]
        composes = [each for each in COMPOSITIONS if name in each.split("+")]
        rows.append({"name": name, "parameters": parameters, "about": about, "compositions": composes})
    return rows
