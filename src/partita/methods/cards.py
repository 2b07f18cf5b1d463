"""Method cards: a Markdown description next to each method's code. Tests check the parts that follow from the code."""

from __future__ import annotations

import ast
import inspect
import re
from importlib.resources import files
from typing import Any

from partita.core.options import MISSING, OptionError, closest_match
from partita.core.options import describe as describe_type
from partita.core.own_code import source_file
from partita.core.registry import find_function, find_reference, offered, options_by_name, package_of, plugins
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
    """Return the Markdown text of a method's card. That of a user's own method lies next to its code.

    Raises:
        OptionError: If there is no method of this name.
    """
    if name in INDEX:
        return files("partita").joinpath(path_of(name)).read_text()
    reference = find_reference("method", name)
    if reference is None:
        raise OptionError(f"unknown method '{name}'; {closest_match(name, offered('method'))}")
    file = source_file(reference).with_name(f"{reference.function}.md")
    if not file.is_file():
        raise OptionError(f"the method '{name}' has no card; write one next to its code: {file}")
    return file.read_text(encoding="utf-8")


def path_of(name: str) -> str:
    """Return the path of a card within the package: next to the method's module, named like the method's function."""
    module, _, function = INDEX[name].removeprefix("partita.").partition(":")
    return "/".join([*module.split(".")[:-1], f"{function}.md"])


def listing() -> list[dict[str, Any]]:
    """List every method with its parameters, the first line of its module docstring and its supported compositions."""
    own = {name: package_of(entry) for name, entry in plugins("method").items() if name not in INDEX}
    return [_listed(name, "partita") for name in INDEX] + [_listed(name, package) for name, package in own.items()]


def _listed(name: str, source: str) -> dict[str, Any]:
    parameters, about = _read_source(INDEX[name]) if name in INDEX else _inspect(name)
    composes = [composition for composition in COMPOSITIONS if name in composition.split("+")]
    return {
        "name": name,
        "parameters": parameters,
        "about": about.partition("\n")[0],
        "compositions": composes,
        "source": source,
    }


def _read_source(entry: str) -> tuple[dict[str, Any], str]:
    """Return a built-in method's parameters with their defaults, and its module's docstring.

    They are read from the source, because importing the methods imports torch, which takes longer than the rest of the
    command. A built-in method's defaults are literals.
    """
    module, _, function = entry.removeprefix("partita.").partition(":")
    tree = ast.parse(files("partita").joinpath(f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    [found] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    parameters, defaults = [*found.args.args, *found.args.kwonlyargs], [*found.args.defaults, *found.args.kw_defaults]
    literals = [default and ast.literal_eval(default) for default in defaults]
    return dict(zip((each.arg for each in parameters), literals, strict=True)), ast.get_docstring(tree) or ""


def _inspect(name: str) -> tuple[dict[str, Any], str]:
    function = find_function("method", name)
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters}, inspect.getdoc(inspect.getmodule(function)) or ""


def describe(name: str) -> dict[str, Any]:
    """Describe one method: its parameters with default, type and meaning, its compositions and its card.

    Raises:
        OptionError: If there is no method of this name.
    """
    text = card(name)
    explained = meanings(name)
    entry = plugins("method").get(name)
    source = "partita" if name in INDEX else package_of(entry) if entry else "own code"
    parameters = [
        {
            "name": option.name,
            "default": None if option.default is MISSING else option.default,
            "type": describe_type(option.hint),
            "meaning": option.meaning or explained.get(option.name, ""),
        }
        for option in options_by_name("method", name).values()
    ]
    return {**_listed(name, source), "parameters": parameters, "card": text}


def meanings(name: str) -> dict[str, str]:
    """Return the meaning of each parameter of a method, from its card."""
    section = card(name).partition("## Parameters\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `.+?` \| (.+) \|$", section, re.MULTILINE))
