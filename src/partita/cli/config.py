"""`partita config`: a config with all defaults, or the JSON Schema of configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options import Changes, TrustCode, look
from partita.storage.safe_text import printable


def config(
    file: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="Check this config and complete it: TOML, or a Python file that calls fit."
        ),
    ] = None,
    changes: Changes = None,
    trust_code: TrustCode = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of configs, for editors.")] = False,
) -> None:
    """Print a config with all defaults filled in, or the JSON Schema with which editors check configs."""
    from partita.core.options import OptionError

    if schema == (file is not None):
        raise OptionError("give either --config FILE or --schema")
    if schema:
        from partita.experiment.json_schema import config_schema

        print(json.dumps(config_schema(), indent=1))
    elif file is not None:
        print("\n".join(map(printable, look(file, changes, trust_code).to_toml(Path.cwd()).splitlines())))
