"""`partita site doctor`: check a site before it takes part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from partita.site.doctor.checks import Finding

SIGNS = {"ok": "[green]✓[/]", "warning": "[yellow]![/]", "failed": "[red]✗[/]", "skipped": "[dim]–[/]"}


def register(app: typer.Typer) -> None:
    """Add the command of this file to the group `site`."""
    app.command()(doctor)


def doctor(
    site: Annotated[Path, typer.Argument(help="The site's folder, or its site.toml.")] = Path(),
    offline: Annotated[
        bool, typer.Option("--offline", help="Leave out the checks that connect to the server.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, without anything that may quote data.")] = False,
) -> None:
    """Check key, server, clock, versions, data and policy, and rehearse one round with fake weights.

    Nothing is sent but a request for the server's time. Exits with 1 if a check failed; each failure says what to do.
    """
    from partita.site.doctor.examination import examine

    console, found = Console(stderr=True), []
    with console.status("checking the settings") as status:
        for finding in examine(site, offline):
            found.append(finding)
            status.update(f"checked: {finding.check}")
    if as_json:
        print(json.dumps([finding.to_json() for finding in found], indent=1))
    else:
        Console().print(_table(found))
        print(_summary(found))
    raise typer.Exit(int(any(finding.outcome.status == "failed" for finding in found)))


def _table(found: list[Finding]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for finding in found:
        outcome = finding.outcome
        remedy = f"\n→ {outcome.remedy}" if outcome.remedy else ""
        table.add_row(SIGNS[outcome.status], finding.check, escape(printable(outcome.sentence)) + escape(remedy))
    return table


def _summary(found: list[Finding]) -> str:
    counts = {
        status: sum(finding.outcome.status == status for finding in found)
        for status in ("failed", "warning", "skipped")
    }
    if not any(counts.values()):
        return "all checks passed"
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)
