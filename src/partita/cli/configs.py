"""`partita init`, `partita data` and `partita options`: write a config, look at data, explain the keys."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from partita.data.inspection import Column, Findings

SHOWN = 30  # characters of a value; data may be confidential
LISTED = 20  # classes or sites

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
TextColumn = Annotated[str | None, typer.Option("--text", help="Text column. Default: chosen by name and content.")]
LabelColumn = Annotated[str | None, typer.Option("--label", help="Label column. Default: chosen likewise.")]
SiteColumn = Annotated[
    str | None, typer.Option("--site", help="Column with the site (hospital, writer, ...) of a row. Default: by name.")
]
ModelPath = Annotated[
    str | None, typer.Option("--model", help="Pretrained model for the config: a folder or a Hugging Face Hub id.")
]


def init(
    data: Annotated[
        str | None, typer.Option("--data", help="Data: a file, a folder, a Hub id, or 'digits'. Default: digits.")
    ] = None,
    text: TextColumn = None,
    label: LabelColumn = None,
    site: SiteColumn = None,
    model: ModelPath = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Number of clients. Default: one per site, or 4 if there are no sites.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Federated method. Default: fedavg.")] = None,
    example: Annotated[
        str | None, typer.Option(help="Write this example and its data, such as chat, clinical or digits.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: experiment.toml, or EXAMPLE.toml.")] = None,
) -> None:
    """Write a config that runs: from your data, or an example. Asks for what is missing if on a terminal."""
    from partita.core.options import OptionError
    from partita.experiment.config import load
    from partita.experiment.starter import BUILT_IN, CLIENTS, config_for, to_commented_toml, write_example, write_new

    if example is not None:
        given = {"data": data, "text": text, "label": label, "site": site, "model": model, "method": method}
        if extra := [name for name, value in given.items() if value is not None]:
            raise OptionError(f"--example and --{extra[0]} are both given; give one of them")
        file = out or Path(f"{example}.toml")
        written = write_example(example, file)
        print(f"wrote {', '.join(map(_show, written))}")
        _next_steps(file)
        return
    file = out or Path("experiment.toml")
    if file.exists():  # before any question
        raise OptionError(f"{file} exists already; move it away, or name another file with --out")
    data = _answer(data, "Data (a file, a folder, a Hub id, or digits)", "--data", "digits")
    findings, longest = None, None
    if data not in BUILT_IN:
        from partita.data.inspection import inspect_data

        findings = inspect_data(data, None, model, text, label, site)
        longest = _longest(model, findings)
        print(_summary(findings))
        for problem in findings.problems:
            _note(problem)
    elif text or label or site:
        raise OptionError(f"--text, --label and --site are for your own data, not for '{data}'; leave them out")
    if findings is not None and findings.task is not None and model is None and "image" not in findings.roles:
        model = _answer(None, "Model (a folder or a Hub id)", "--model", config_for(findings)["model"]["path"])
        longest = _longest(model, findings) if Path(model).is_dir() else None
    sites = len(findings.sites) if findings and findings.site else 0
    if clients is None and sites < 2:
        answer = _answer(None, "Number of clients", "--clients", str(CLIENTS))
        if not answer.isdecimal() or not int(answer):
            raise OptionError(f"the number of clients is '{answer}'; it must be a whole number from 1")
        clients = int(answer)
    method = _answer(method, "Method ('partita methods' lists them)", "--method", "fedavg")
    raw = config_for(findings, model, clients, method, data, longest)
    introduction = (
        "# Written by 'partita init'. Paths are relative to the folder in which you run partita.\n"
        "# 'partita options TABLE' explains all keys of a table, for example: partita options training"
    )
    write_new(file, to_commented_toml(raw, introduction))
    load(file)
    print(f"wrote {_show(file)}")
    path = raw["model"].get("path")
    if path and not Path(path).is_dir():
        _note(f"the first run downloads the model {path} from the Hugging Face Hub")
    _next_steps(file)


def data(
    path: Annotated[str, typer.Argument(help="A file, a folder, or a Hugging Face Hub id.")],
    config: Annotated[str | None, typer.Option("--hub-config", help="Configuration of a Hub dataset.")] = None,
    text: TextColumn = None,
    label: LabelColumn = None,
    site: SiteColumn = None,
    model: ModelPath = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Count tokens with this tokenizer: a folder or a Hub id. Default: the model's.")
    ] = None,
    no_values: Annotated[bool, typer.Option("--no-values", help="Show no values, class names or site names.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is in a data set, what is wrong with it, and a config for it.

    Values are shortened to 30 characters and shown per column, never as whole rows. --no-values hides them.
    """
    from partita.data.inspection import inspect_data
    from partita.experiment.starter import config_for, to_commented_toml

    findings = inspect_data(path, config, tokenizer or model, text, label, site)
    toml = None
    if findings.task is not None:
        raw = config_for(findings, model, longest=_longest(model, findings))
        toml = to_commented_toml({**raw, "data": raw["data"] | ({"config": config} if config else {})})
    shown = _without_values(findings) if no_values else _shortened(findings)
    if as_json:
        print(json.dumps({**asdict(shown), "toml": toml}, indent=1))
        return
    print("\n".join(printable(line) for line in _describe(shown, no_values)))
    if toml:
        print(f"\nA config for it ('partita init --data {_show(path)}' writes it to a file):\n")
        print("\n".join(printable(line) for line in toml.splitlines()))


def options(
    table: Annotated[
        str | None,
        typer.Argument(help="A table, such as 'training', or one of its names, such as 'method.fedprox' or 'split'."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain the keys of a config: what each takes, its default and its meaning."""
    from partita.experiment.config import headings
    from partita.experiment.reference import about, find_headings, keys_under

    found = [""] if table is None else find_headings(table)
    tables = {heading: (about(heading), keys_under(heading)) for heading in found}
    if as_json:
        dotted = {heading.replace(" ", "."): keys for heading, (_, keys) in tables.items()}
        print(json.dumps({name: [key.to_json() for key in keys] for name, keys in dotted.items()}, indent=1))
        return
    for heading, (what, keys) in tables.items():
        name, _, which = heading.partition(" ")
        print((f"[{name}]" + (f" name = {which}" if which else "")) if name else "top level")
        if what:
            print(what)
        for key in keys:
            print(f"  {key.name}: {_plain(key.value)}; {_default(key.default)}\n      {_plain(key.meaning)}")
        print("" if keys else "  no options\n")
    if table is None:
        named: dict[str, list[str]] = {}
        for heading in headings()[1:]:
            name, _, which = heading.partition(" ")
            named.setdefault(name, []).extend([which] if which else [])
        print("tables; show one with: partita options TABLE, or TABLE.NAME")
        for name, names in named.items():
            print(f"  [{name}]" + (f": {', '.join(names)}" if names else ""))


def _plain(text: str) -> str:
    return text.replace("`", "")


def _default(text: str) -> str:
    return {"must be given": "must be given", "–": "may be left out"}.get(text, f"default {_plain(text)}")


def _answer(given: str | None, question: str, option: str, default: str) -> str:
    """Return a given answer, else ask for it on a terminal, else use the default and say so."""
    if given is not None:
        return given
    if sys.stdin.isatty() and sys.stdout.isatty():
        answer: str = typer.prompt(question, default=default)
        return answer.strip()
    _note(f"{option} is not given; using {default}")
    return default


def _longest(model: str | None, findings: Findings) -> int | None:
    """Return the number of tokens that the model takes, if a model for texts is given."""
    if model is None or "image" in findings.roles:
        return None
    from partita.data.tokenization import load_tokenizer

    return load_tokenizer(model)[2]


def _summary(findings: Findings) -> str:
    rows = ", ".join(f"{count:,} {name}" for name, count in findings.parts.items())
    named = {**findings.roles, **({"sites": findings.site} if findings.site else {})}
    columns = ", ".join(f"{role} = '{column}'" for role, column in named.items())
    return printable(f"found {rows} rows; task {findings.task or 'unknown'}" + (f": {columns}" if columns else ""))


def _next_steps(file: Path) -> None:
    name = _show(file)
    print(
        "next:\n"
        f"  partita plan --config {name}                  # what a client trains and sends\n"
        f"  partita run --config {name} --set rounds=2    # a first try"
    )


def _show(value: object) -> str:
    return printable(value)


def _note(text: str) -> None:
    print(printable(f"note: {text}"), file=sys.stderr)


def _shortened(findings: Findings) -> Findings:
    def short(text: str) -> str:
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"

    def few(counts: Mapping[str, int]) -> dict[str, int]:
        shown: dict[str, int] = {}
        for name, count in counts.items():
            same = short(name)
            shown[f"{same} ({len(shown) + 1})" if same in shown else same] = count
        return shown

    columns = tuple(replace(each, common=tuple(map(short, each.common))) for each in findings.columns)
    return replace(findings, columns=columns, classes=few(findings.classes), sites=few(findings.sites))


def _without_values(findings: Findings) -> Findings:
    """Hide the values, and the names of classes and sites, which are values too."""

    def numbered(counts: Mapping[str, int], what: str) -> dict[str, int]:
        return {f"{what} {place}": count for place, count in enumerate(counts.values(), 1)}

    columns = tuple(replace(each, common=()) for each in findings.columns)
    problems = tuple(each.partition(": '")[0] for each in findings.problems)
    classes, sites = numbered(findings.classes, "class"), numbered(findings.sites, "site")
    return replace(findings, columns=columns, classes=classes, sites=sites, problems=problems)


def _describe(findings: Findings, no_values: bool) -> Iterator[str]:
    yield f"{findings.path}: " + ", ".join(f"{name} {count:,} rows" for name, count in findings.parts.items())
    yield ""
    yield "columns" + ("" if no_values else f" (with common values, cut at {SHOWN} characters; --no-values hides them)")
    width = max(len(column.name) for column in findings.columns)
    for column in findings.columns:
        yield f"  {column.name:<{width}}  {_column_text(column)}"
    yield ""
    if findings.task:
        roles = ", ".join(f"{role} = '{column}'" for role, column in findings.roles.items())
        yield f"task: {findings.task}" + (f" ({roles})" if roles else "")
    for role, names in findings.candidates.items():
        others = [name for name in names if name not in (*findings.roles.values(), findings.site)]
        if others:
            yield f"  could be the {role} too: {', '.join(others)} (choose with --{role})"
    if findings.characters:
        yield f"text length: median {findings.characters[0]:,}, longest {findings.characters[1]:,} characters"
    if findings.tokens:
        yield f"text length: median {findings.tokens[0]:,}, longest {findings.tokens[1]:,} tokens"
    if findings.size:
        yield f"first image: {findings.size[0]} by {findings.size[1]} pixels"
    for what, counts in (("classes", findings.classes), (f"sites in '{findings.site}'", findings.sites)):
        if counts:
            yield f"{len(counts):,} {what}: {_counted(counts)}"
    yield ""
    yield "problems" if findings.problems else "no problems found"
    for problem in findings.problems:
        yield f"  - {problem}"


def _column_text(column: Column) -> str:
    facts = [column.kind]
    if column.distinct is not None:
        facts.append(f"{column.distinct:,} distinct")
    if column.longest:
        facts.append(f"up to {column.longest:,} characters")
    if column.missing:
        facts.append(f"{column.missing:,} missing")
    values = ": " + ", ".join(repr(value) for value in column.common) if column.common else ""
    return ", ".join(facts) + values


def _counted(counts: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:LISTED])
    return shown + (f" and {len(counts) - LISTED} more" if len(counts) > LISTED else "")
