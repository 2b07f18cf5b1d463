"""`partita export`: the model of a recorded run as a folder for transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from partita.storage.safe_text import printable

ADAPTER = "adapter_config.json"  # what a folder with a PEFT adapter holds


def register(app: typer.Typer) -> None:
    """Add the command of this file to the app."""
    app.command()(export)


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    client: Annotated[
        str | None, typer.Option(help="Write this client's own model, with the parameters that it keeps.")
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run own code in the folder even if you have not run it before.")
    ] = False,
) -> None:
    """Write the model of a run as a folder that loads without partita: for transformers, or as a PEFT adapter."""
    from partita.core.options import OptionError
    from partita.experiment.recorded_model import load_model

    if folder.exists():
        raise OptionError(f"{folder} exists already; move it away, or name another folder")
    model, params = load_model(run, client, trust_code)
    save = getattr(model, "save_pretrained", None)
    if save is None:
        raise OptionError(f"{model.name} is no model of transformers, so there is nothing to export")
    save(params, folder)
    print(printable(f"wrote {folder}"))
    kind = getattr(model, "kind", None)
    if kind is not None and kind.head == "lm":
        print(printable(f"next:\n  lm_eval --model hf --model_args {model_arguments(folder)} --tasks hellaswag"))


def model_arguments(folder: Path) -> str:
    """Return what `lm_eval --model hf` needs to load an exported folder: a whole model, or an adapter and its model."""
    file = folder / ADAPTER
    if not file.is_file():
        return f"pretrained={folder}"
    # The adapter's folder holds the tokenizer with the chat template that it was trained with.
    return f"pretrained={json.loads(file.read_text())['base_model_name_or_path']},peft={folder},tokenizer={folder}"
