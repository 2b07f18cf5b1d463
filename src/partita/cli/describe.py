"""`partita site describe` and `partita sites describe`: what sites tell about their data, and what disagrees."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from partita.site.description.record import Description


def register_site(app: typer.Typer) -> None:
    """Add the site's command to the group `site`."""
    app.command("describe")(describe_site)


def register_sites(app: typer.Typer) -> None:
    """Add the server's command to the group `sites`."""
    app.command("describe")(describe_sites)


def describe_site(
    site: Annotated[Path, typer.Argument(help="The site's folder, or its site.toml.")] = Path(),
    out: Annotated[Path | None, typer.Option(help="File to write. Default: NAME.json in the site's folder.")] = None,
    least: Annotated[
        int | None,
        typer.Option(min=3, help="Hide counts of fewer rows, or of fewer groups with --groups. Default: 10."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(min=0.001, max=100, help="Add noise instead, with this privacy budget of a row.")
    ] = None,
    groups: Annotated[str | None, typer.Option(help="Column with the patient, or another unit, of each row.")] = None,
) -> None:
    """Describe this site's data in a small file for the server's operator: counts, classes, lengths.

    The file is printed, and nothing is sent. Names of classes are not protected.
    """
    from partita.core.options import OptionError
    from partita.site.config import load_site
    from partita.site.description.describe import charge, describe
    from partita.site.description.record import to_json
    from partita.site.own_experiment import load_approved
    from partita.storage import atomic_files
    from partita.storage.safe_text import path_component, printable

    if least is not None and epsilon is not None:
        raise OptionError("--least hides small counts and --epsilon adds noise; choose one")
    settings = load_site(site)
    file = (out or settings.folder / f"{path_component(settings.name)}.json").resolve()
    with chdir(settings.folder):  # paths in the experiment and in [set] are relative to the site's folder
        found = describe(load_approved(settings), settings.name, least or 10, epsilon, groups)
    if cost := found["protection"]["epsilon"]:
        total = charge(settings.state_folder, cost)
        print(f"privacy of a row: epsilon {cost:g} for this file, {total:g} for all so far")
    text = to_json(found)
    print(text, end="")
    atomic_files.write(file, text.encode())
    print(f"wrote {printable(file)}; this is all that it says, so read it before you send it")


def describe_sites(
    files: Annotated[list[Path], typer.Argument(help="Files that sites wrote with 'partita site describe'.")],
    classes: Annotated[
        Path | None, typer.Option(help="Write the classes that all sites agree on, for 'partita site doctor'.")
    ] = None,
) -> None:
    """Compare the data of several sites and name what disagrees. Exits with 1 if something must be mended."""
    from partita.site.description.compare import compare
    from partita.site.description.record import read_description
    from partita.storage import atomic_files

    sites = [read_description(file) for file in files]
    found = compare(sites)
    Console().print(_table(sites))
    for sentence in found:
        Console().print(f"[red]mend[/]  {escape(sentence)}")
    if not found:
        print("nothing disagrees")
        if classes is not None:
            text = json.dumps(sites[0]["classes"], ensure_ascii=False, indent=1)
            atomic_files.write(classes, f"{text}\n".encode())
    raise typer.Exit(int(bool(found)))


def _table(sites: list[Description]) -> Table:
    from partita.site.description.compare import largest_class, rows_of

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("site", "rows", "classes", "largest class", "median tokens", "protection"):
        table.add_column(heading, justify="right" if heading in ("rows", "classes") else "left")
    for each in sites:
        largest, share = largest_class(each)
        least, epsilon = each["protection"]["least"], each["protection"]["epsilon"]
        table.add_row(
            escape(each["site"]),
            f"{rows_of(each):,}",
            str(len(each["classes"])),
            escape(f"{largest} ({share:.0%})") if largest else "hidden",
            escape(each["typical"].get("50%", "")),
            f"epsilon {epsilon:g}" if epsilon else f"counts below {least} hidden",
        )
    return table
