"""`partita new`: write a working method, task or model, with a card, a test and a config, to start from."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from partita.storage.safe_text import printable

Kind = Literal["method", "task", "model"]
# The name that stands for the new one in the templates of a kind.
PLACEHOLDERS: dict[Kind, str] = {"method": "fedexample", "task": "exampletask", "model": "examplemodel"}
FILES = ("{}.py", "{}.md", "test_{}.py", "{}.toml")
CHECKS: dict[Kind, str] = {"method": "", "task": " --kind data", "model": " --kind model"}


def new(
    kind: Annotated[Kind, typer.Argument(help="What to write.")],
    name: Annotated[str, typer.Argument(help="Its name, in lower case, such as fedmine. It also names the files.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write to. It is created if it does not exist.")] = Path(),
) -> None:
    """Write a working method, task or model to start from, with a card, a test and a config. Overwrites nothing."""
    _check_name(kind, name)
    written = write(kind, name, to)
    print(f"wrote {', '.join(printable(path) for path in written)}")
    code, test, config = (shlex.quote(str(to / each.format(name))) for each in (FILES[0], FILES[2], FILES[3]))
    steps = {
        f"partita check {code}:{name}{CHECKS[kind]}": "which promises it keeps",
        f"{Path(sys.executable).name} -m pytest {test}": "its own test",
        f"partita run --config {config} --set rounds=2": "a first run",
    }
    width = max(map(len, steps))
    print("next:", *(printable(f"  {step:<{width}}  # {why}") for step, why in steps.items()), sep="\n")


def write(kind: Kind, name: str, folder: Path) -> list[Path]:
    """Write the files of a new method, task or model.

    Args:
        kind: What to write.
        name: Its name.
        folder: Where to. It is created if it does not exist.

    Returns:
        The files.

    Raises:
        ConfigError: If one of them exists, or cannot be written. Nothing is written if one exists.
    """
    from partita.core.own_code import Reference
    from partita.experiment.starter import ConfigError, write_new
    from partita.experiment.trusted_code import trust

    placeholder, targets = PLACEHOLDERS[kind], [folder / each.format(name) for each in FILES]
    for path in targets:
        if path.exists():
            raise ConfigError(f"{path} exists already; move it away, choose another name, or another folder with --to")
    templates = files("partita").joinpath("templates")
    texts = [templates.joinpath(each.format(placeholder)).read_text(encoding="utf-8") for each in FILES]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the folder {folder}: {error.strerror}; choose another with --to") from error
    for path, text in zip(targets, texts, strict=True):
        write_new(path, text.replace(placeholder, name))
    trust([Reference(str(targets[0]), name)])
    return targets


def _check_name(kind: Kind, name: str) -> None:
    """Refuse a name that is not a function's name, or that something else has.

    Raises:
        OptionError: If the name cannot be used.
    """
    from partita import data, methods, models
    from partita.core.options import OptionError, format_value

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        close = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        usable = re.fullmatch(r"[a-z][a-z0-9_]*", close) and not keyword.iskeyword(close)
        hint = f"did you mean {close}?" if usable else "for example fedmine"
        raise OptionError(
            f"the name is {format_value(name)}; it names a file and a function, so it must be lower-case letters, "
            f"digits and underscores, starting with a letter; {hint}"
        )
    index = {"method": methods.INDEX, "task": data.INDEX, "model": models.INDEX}[kind]
    if name in index:
        raise OptionError(f"partita has a {kind} '{name}' already; choose another name, such as my_{name}")
    if name in sys.stdlib_module_names or find_spec(name) is not None:
        raise OptionError(f"a Python module '{name}' is installed already; choose another name, such as my_{name}")
