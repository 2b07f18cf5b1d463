"""`partita split`: what each client would hold, before anything is trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options import ConfigFile, Json, TrustCode, look
from partita.storage.safe_text import printable


def split(
    config: ConfigFile,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Override a config key, e.g. --set split.alpha=0.1. Repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also draw the split to a file: .png, .svg or .html.")] = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Show how many examples of which classes each client gets, and how uneven that is.

    The data is read and split as for a run. No model is loaded, and nothing is trained.
    """
    from partita.report import split as shown

    if out is not None:
        shown.check_file(out)
    from partita.experiment.split_record import split_of_config

    settings = look(config, changes, trust_code)
    held = shown.read_split(split_of_config(settings), settings.seed)
    if as_json:
        print(json.dumps(shown.to_json(held), indent=1))
    else:
        print(shown.to_text(held))
        if settings.privacy:
            print("These counts are exact. The privacy guarantee does not cover them, so a private run records none.")
    if out is not None:
        title = f"What clients hold: {settings.split['name']} split of {settings.data['name']}, seed {settings.seed}"
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix.lower() == ".png":
            from partita.report.draw import split_figure

            figure = split_figure([held])
            assert figure is not None
            figure.savefig(out, dpi=150)
        else:
            shown.write_picture(held, out, title)
        print(f"picture: {printable(out)}", file=sys.stderr if as_json else sys.stdout)
