"""`partita site`: what runs at one site of a group, and what that site allows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from partita.site.config import SiteConfig

app = typer.Typer(help="Take part as a site of a group.", no_args_is_help=True, pretty_exceptions_enable=False)

SiteFile = Annotated[Path, typer.Argument(help="The site's settings, or the folder that holds site.toml.")]
HERE = Path("site.toml")


@app.command()
def run(path: SiteFile = HERE) -> None:
    """Take part in the group's experiment, within the site's policy, until Ctrl-C."""
    site = _load(path)
    from partita.site.program import restrict_environment, run_site

    restrict_environment(site)
    raise typer.Exit(run_site(site))


@app.command()
def plan(
    path: SiteFile = HERE,
    names: Annotated[bool, typer.Option("--names", help="Name every parameter.")] = False,
) -> None:
    """Print what the experiment asks of this site, as a consent form. Exits with 1 if the policy refuses a part."""
    site = _load(path)
    from partita.site.program import consent_form

    form = consent_form(site, names)
    print(form.to_text())
    raise typer.Exit(int(bool(form.refusals())))


@app.command()
def approve(
    path: SiteFile = HERE,
    scores: Annotated[
        bool, typer.Option("--scores", help="Also let scores on this site's own examples leave.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: a person has read the page.")] = False,
) -> None:
    """Show what the experiment asks of this site, and record a person's approval in the policy.

    The approval covers this experiment only. After any change of it, the site asks for a new one.
    """
    site = _load(path)
    from partita.site.approval import approve as approve_experiment
    from partita.site.toml_tables import SiteError

    def agree(shown: str, question: str) -> bool:
        print(shown)
        if not yes and not sys.stdin.isatty():
            raise SiteError("an approval needs a person at a terminal, or --yes from one who has read this page")
        return yes or typer.confirm(question)

    if not approve_experiment(site, agree, scores):
        print("not approved; nothing was changed")
        raise typer.Exit(1)
    print(f"approved in {printable(site.policy_file)}")


@app.command()
def log(
    path: SiteFile = HERE,
    verify: Annotated[bool, typer.Option("--verify", help="Check the chain of the log and print its head.")] = False,
    head: Annotated[
        str | None, typer.Option(help="Hash that was noted earlier; the log must continue from it. Implies --verify.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines as they are.")] = False,
) -> None:
    """Print what left this site, and what it refused."""
    from partita.site.config import load_site
    from partita.site.site_log import FILE, SiteLog

    found = SiteLog(load_site(path).state_folder / FILE)
    if verify or head is not None:
        print(found.verify(head))
        print(f"head: {found.head()}")
        if head is None:
            print("lines cut off at the end cannot be noticed here: note the head elsewhere, and check it with --head")
        return
    for line in found.lines():
        print(json.dumps(line) if as_json else printable(_row(line)))


def _load(path: Path) -> SiteConfig:
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise ValueError("this needs Flower; install it with: pip install 'partita[flower]'")
    from partita.site.config import load_site

    return load_site(path)


def _row(line: Mapping[str, Any]) -> str:
    """Return a line of the log for people."""
    number = f"round {line['round']}" if "round" in line else ""
    roles = ", ".join(f"{count} {role}" for role, count in line.get("roles", {}).items())
    size = f"{line['bytes']:,} bytes" if "bytes" in line else ""
    epsilon = f"epsilon {line['epsilon']:.4g}" if line.get("epsilon") is not None else ""
    numbers = ", ".join(line.get("numbers", ()))
    parts = [number, size, roles, numbers, epsilon, line.get("reason", "")]
    return f"{line['line']:>5}  {line['time']}  {line['kind']:<8}  {'; '.join(part for part in parts if part)}"
