"""`partita model`: what a model consists of, before any weights are loaded."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def model(
    path: Annotated[str, typer.Argument(help="Folder written by save_pretrained, or Hugging Face Hub id.")],
    task: Annotated[
        str | None, typer.Option(help="Kind of task, e.g. text, tokens, image or lm. Default: the checkpoint's.")
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA adapter.")] = 8,
    clients: Annotated[int, typer.Option(min=1, help="Clients that train together, for the estimate of memory.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples in a batch, for the estimate of memory.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a text, for the estimate of memory.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the roles and layers of a model, whether its clients can train in blocks, and what methods cost on it.

    The last table shows the memory of a frozen base in float32, bfloat16, 8 and 4 bits, and of training a LoRA adapter.

    Only the config is read; no weights are downloaded or loaded.
    """
    from partita.experiment.model_table import model_table

    shown = model_table(path, task, rank, clients, batch_size, tokens)
    print(json.dumps(shown.to_json(), indent=1) if as_json else shown.to_text())
