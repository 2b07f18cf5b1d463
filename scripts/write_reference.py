"""Write the pages of the reference that follow from the code, and the table of all methods.

The keys of a config come from the annotations that the code checks, the commands from the same objects that print
`--help`, and the methods from the registry.
"""

from __future__ import annotations

import inspect
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import typer

import partita
from partita.cli.main import app
from partita.cli.stopping import Stopped
from partita.core import settings
from partita.core.rules import ANY, TASK, Rule
from partita.experiment import fits
from partita.experiment.config import headings
from partita.experiment.reference import Key, about, keys_under

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import method_table  # noqa: E402
from run_files import RUN_FILES  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
INTRODUCTION = """# Reference: configs

<!-- Written by scripts/write_reference.py from the annotations that the code checks; do not edit it by hand. -->

A config is a TOML file. Every key is checked when it is read: an unknown key, a wrong type or a value out of its range
is an error that names the key and what it must be. Whole numbers fit 64 bits, numbers are finite, and texts are one
line. A key without a default must be given; a key whose default is "–" may be left out.
"""
CLI_INTRODUCTION = """# Reference: commands

<!-- Written by scripts/write_reference.py from the commands themselves; do not edit it by hand. -->

`partita COMMAND --help` prints the same as this page. Set `PARTITA_DEBUG=1` to see the traceback of an error."""
EXIT_CODES = f"""# Reference: exit codes

<!-- Written by scripts/write_reference.py from the commands themselves; do not edit it by hand. -->

| code | meaning |
|--:|---|
| 0 | the command did what it was asked, and the answer is yes where it is a question |
| 1 | an error, in one line that names what is wrong and the remedy; or the answer is no, as below |
| 2 | unknown command or option, or a missing argument |
| {Stopped(signal.SIGINT).exit_code} | stopped by Ctrl-C (SIGINT); `partita resume` continues the run |
| {Stopped(signal.SIGTERM).exit_code} | stopped by SIGTERM; `partita resume` continues the run |

A command that is killed (SIGKILL, no memory, no power) has the code that the system gives it, such as 137, and its run
can be resumed too. `PARTITA_DEBUG=1` shows the traceback of an error.

## Commands that answer a question

| command | ends with 1 if |
|---|---|
"""
RUN_FOLDER = """# Reference: run folder

<!-- Written by scripts/write_reference.py from the code; do not edit it by hand. -->

A run's folder holds everything that is known about the run. [Stop and resume](../guide/folders.md) says what can be
done with it.

| file | contents | written |
|---|---|---|
"""
FITS = """# Reference: what goes together

<!-- Written by scripts/write_reference.py from the tables that are checked; do not edit it by hand. -->

Settings of different tables that do not go together, why, and what to do. An error begins with the settings and their
values, and is the same from every command, from Python and at a site. What the config shows is refused when it is read,
before any data is loaded. Each table here is checked when what its heading names is there.

Values that no run can have, and settings of one table, are in the [reference of configs](config.md). A
[method's card](../methods/README.md) says which optimizer, privacy and aggregation it takes.
"""
NAMES = """# Names

<!-- Written by scripts/write_reference.py from `partita.__all__`; do not edit it by hand. -->

`import partita as pt`, and these are the names. Each is imported when it is used first. The classes and functions that
they work with are on the other pages of this chapter, under the module that the place names.
"""
HEADINGS = {
    "": "Top level",
    "method": "`[method]`: `name` says which, `a+b` composes two",
    "data": "`[data]`: `name` says which",
    "split": "`[split]`: `name` says which",
    "model": "`[model]`: `name` says which",
    "sampling": "`[sampling]`: `name` says which",
}


def config_page() -> str:
    """Every table and key of a config."""
    parts, last = [INTRODUCTION], None
    for heading in headings():
        table, _, name = heading.partition(" ")
        if table != last:
            parts.append(f"## {HEADINGS.get(table, f'`[{table}]`')}\n")
            last = table
        if name:
            parts.append(f"### `{name}`\n")
            parts.append(about(heading) + "\n")
        keys = keys_under(heading)
        parts.append(_rows(keys) if keys else "No options.\n")
    return "\n".join(parts)


def _rows(keys: list[Key]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        if not key.meaning:
            raise SystemExit(f"'{key.name}' has no meaning; write one into its annotation, or into the method's card")
        lines.append(f"| `{key.name}` | {key.value} | {key.default} | {key.meaning} |")
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """Every command with its arguments and options."""
    group = typer.main.get_command(app)
    context = click.Context(group, info_name="partita")
    parts = [CLI_INTRODUCTION, _lines(group.help or ""), *_commands(group, context)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _commands(group: Any, context: click.Context) -> Iterator[str]:
    for name, command in group.commands.items():
        own = click.Context(command, info_name=name, parent=context)
        usage = f"{own.command_path} {' '.join(command.collect_usage_pieces(own))}"
        yield f"## `{own.command_path}`"
        yield _lines(command.help or "")
        if hasattr(command, "commands"):
            yield from _commands(command, own)
            continue
        yield f"```text\n{usage}\n```"
        rows = [_parameter(each, own) for each in command.params if each.name != "help"]
        if rows:
            yield "\n".join(["| argument or option | meaning |", "|---|---|", *rows])


def exit_codes_page() -> str:
    """The exit codes, and the commands that answer a question by theirs."""
    group = typer.main.get_command(app)
    answers = [
        f"| [`{path}`](cli.md#{path.replace(' ', '-')}) | {found[1]} |"
        for path, help in _helps(group, "partita")
        if (found := re.search(r"Exits with 1 if (.+?)\.", _lines(help)))
    ]
    return EXIT_CODES + "\n".join(answers) + "\n"


def _helps(group: Any, path: str) -> Iterator[tuple[str, str]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _helps(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command.help or ""


def run_folder_page() -> str:
    """Every file of a run folder."""
    return RUN_FOLDER + "".join(
        f"| {', '.join(f'`{each}`' for each in name.split(', '))} | {file.contents} | {file.written} |\n"
        for name, file in RUN_FILES.items()
    )


def fits_page() -> str:
    """Every rule about settings that do not go together."""
    parts = [FITS]
    for when in dict.fromkeys(fits.STAGES.values()):
        parts.append(f"## When {when}\n\n| settings | why | remedy |\n|---|---|---|")
        stages = [stage for stage, name in fits.STAGES.items() if name == when]
        rules = [rule for stage in stages for rule in fits.RULES[stage]]
        rules += settings.RULES if "method" in stages else ()
        parts += [f"| {_settings(rule)} | {rule.why} | {rule.advice} |" for rule in rules]
        parts.append("")
    return "\n".join(parts)


def names_page() -> str:
    """The public names by what they are for, with a sentence on each and its place."""
    parts = [NAMES]
    for purpose, places in partita._PLACES.items():
        parts.append(f"## To {purpose}\n\n| name | what it is | where it is |\n|---|---|---|")
        for name, place in places.items():
            about = (inspect.getdoc(getattr(partita, name)) or "").partition("\n\n")[0].replace("\n", " ")
            parts.append(f"| `{name}` | {about} | `partita.{place}` |")
        parts.append("")
    return "\n".join(parts)


def _settings(rule: Rule) -> str:
    said = ""
    for key, value in rule.settings.items():
        name = key if key == TASK else f"`{key}`"
        if value is not True and value is not False and value is not ANY:
            values = value if isinstance(value, tuple) else (value,)
            name += " = " + " or ".join(f"`{each}`" for each in values)
        said += f"{' without ' if value is False else ', ' if said else ''}{name}"
    return said


def _parameter(parameter: Any, context: click.Context) -> str:
    record = parameter.get_help_record(context)
    shown, meaning = record if record else (parameter.human_readable_name, parameter.help or "")
    return f"| `{' '.join(shown.split())}` | {_lines(meaning).replace('|', chr(92) + '|')} |"


def _lines(text: str) -> str:
    """A paragraph of a docstring on one line each."""
    paragraphs = inspect.cleandoc(text).replace("\\[", "[").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs)


PAGES: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "cli.md": cli_page,
    "exit-codes.md": exit_codes_page,
    "run-folder.md": run_folder_page,
    "what-goes-together.md": fits_page,
    "api/names.md": names_page,
    "../methods/README.md": method_table.page,
}

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
