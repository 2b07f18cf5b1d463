"""`partita site describe` and `partita sites describe`: what sites tell about their data, and what disagrees."""

from __future__ import annotations

import json
from contextlib import chdir
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from partita.cli.options import Json

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
    """Describe this site's data in a small file for the server's operator: counts, classes, lengths, image sizes.

    The file is printed, and nothing is sent. Names of classes are not protected.
    """
    from partita.core.options import OptionError
    from partita.site.config import load_site
    from partita.site.description.describe import charge, describe
    from partita.site.doctor.files import load_approved
    from partita.storage import atomic_files
    from partita.storage.safe_text import path_component, printable

    if least is not None and epsilon is not None:
        raise OptionError("--least hides small counts and --epsilon adds noise; choose one")
    settings = load_site(site)
    file = (out or settings.folder / f"{path_component(settings.name)}.json").resolve()
    with chdir(settings.folder):  # paths in the experiment and in [set] are relative to the site's folder
        found = describe(load_approved(settings), settings.name, least or 10, epsilon, groups)
    if found.protection.epsilon:
        total = charge(settings.state_folder, found.protection.epsilon)
        print(f"privacy of a row: epsilon {found.protection.epsilon:g} for this file, {total:g} for all so far")
    text = found.to_json()
    print(text, end="")
    atomic_files.write(file, text.encode())
    print(f"wrote {printable(file)}; this is all that it says, so read it before you send it")


def describe_sites(
    files: Annotated[list[Path], typer.Argument(help="Files that sites wrote with 'partita site describe'.")],
    classes: Annotated[
        Path | None, typer.Option(help="Write the classes that all sites agree on, for 'partita site doctor'.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the data of several sites and name what disagrees. Exits with 1 if something must be mended."""
    from partita.site.description.classes import write_classes
    from partita.site.description.compare import compare
    from partita.site.description.record import read_description

    sites = [read_description(file) for file in files]
    found = compare(sites)
    broken = any(each.must_mend for each in found)
    if as_json:
        shown = {"sites": [asdict(each) for each in sites], "disagreements": [asdict(each) for each in found]}
        print(json.dumps(shown, indent=1))
    else:
        console = Console()
        console.print(_table(sites))
        for each in found:
            console.print(("[red]mend[/]  " if each.must_mend else "[yellow]know[/]  ") + escape(each.sentence))
        if not found:
            print("nothing disagrees")
    if classes is not None and not broken:
        write_classes(classes, sites[0].classes)
    raise typer.Exit(int(broken))


def _table(sites: list[Description]) -> Table:
    from partita.site.description.compare import largest_class, rows_of
    from partita.site.description.describe import PARTS
    from partita.site.description.tables import LARGEST, MODE, SIDE, TOKENS

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("site", "rows", "train", "classes", "largest class", "median text or image", "protection"):
        table.add_column(heading, justify="right" if heading in ("rows", "train", "classes") else "left")
    for each in sites:
        largest, share = largest_class(each)
        tokens, side = (each.typical.get(name, {}).get("50%") for name in (TOKENS, SIDE))
        mode = each.typical.get(MODE, {}).get(LARGEST, "hidden")
        inputs = f"{tokens} tokens" if tokens else f"{side} pixels, {mode}" if side else "hidden"
        guard = each.protection
        how = f"epsilon {guard.epsilon:g}" if guard.epsilon else f"counts below {guard.least} hidden"
        table.add_row(
            escape(each.site),
            f"{rows_of(each):,}",
            f"{each.counts.get(PARTS, {}).get('train') or 0:,}",
            str(len(each.classes)),
            escape(f"{largest} ({share:.0%})") if largest else "hidden",
            escape(inputs),
            how,
        )
    return table
