"""`partita sites`: set up a group of sites and their server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.flower import require_flower

app = typer.Typer(
    help="Set up a group of sites and their server.", no_args_is_help=True, pretty_exceptions_enable=False
)


@app.command()
def init(
    group: Annotated[Path, typer.Argument(help="The group: its server, its sites and the experiment (TOML).")],
    out: Annotated[Path, typer.Option(help="Folder for the folders of all parties.")] = Path("parties"),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that differ. Keys, certificates and state always stay.")
    ] = False,
) -> None:
    """Write for each party a folder with all that it needs, but no key: keys are made where they stay."""
    require_flower()
    from partita.site.kit.folders import write_files
    from partita.site.kit.group import load_group
    from partita.site.kit.party_files import group_files, open_points
    from partita.storage.safe_text import printable

    described = load_group(group)
    written = write_files(group_files(described), out, force)
    parties = ["server", *(site.name for site in described.site)]
    print(printable(f"wrote {len(written)} files for {', '.join(parties)} to {out}; each folder has a README.md"))
    for point in open_points(described):
        print(printable(f"still open: {point}"))


@app.command()
def image(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("image"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that differ.")] = False,
) -> None:
    """Write what installs partita elsewhere without internet: the versions installed here, and two scripts."""
    require_flower()
    from partita.site.kit.folders import write_files
    from partita.site.kit.group import Images
    from partita.site.kit.party_files import image_files
    from partita.storage.safe_text import printable

    written = write_files(image_files(Images()), out, force)
    print(
        printable(f"wrote {len(written)} files to {out}; wheelhouse.sh collects the packages, install.sh installs them")
    )
