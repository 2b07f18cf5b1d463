"""`partita export`: the model of a recorded run as a folder for transformers and PEFT, with a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options import TrustCode
from partita.cli.round_choice import parse_round
from partita.storage.safe_text import path_component, printable

ADAPTER = "adapter_config.json"  # what a folder with a PEFT adapter holds
WHAT = {"model": "a folder of transformers", "adapter": "an adapter of PEFT", "prompts": "prompts with their loader"}
GENERATES = ("lm", "chat", "choice")  # kinds that lm-evaluation-harness reads


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    round: Annotated[
        str, typer.Option(help="Which round: 'best' on validation examples, 'last', or a number of finished rounds.")
    ] = "last",
    client: Annotated[
        str | None, typer.Option(help="Write this client's own model, with the parameters that it keeps.")
    ] = None,
    all_clients: Annotated[
        bool, typer.Option("--all-clients", help="Write the shared model, and what differs from it for each client.")
    ] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="Write a folder that needs no other: an adapter with its base, prompts with CLIP."
        ),
    ] = False,
    to: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: RUN/export, RUN/export-CLIENT or RUN/export-clients.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(help="Also push the folder to this repository on the Hub, user/name.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public. Default: private.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Write the model of a run as a folder that loads without partita, with a model card.

    It is a folder of transformers, an adapter of PEFT, or prompts with their loader.
    """
    from partita.core.options import OptionError

    if client is not None and all_clients:
        raise OptionError("--client writes one client's model and --all-clients writes all; choose one")
    if public and push is None:
        raise OptionError("--public is for a repository on the Hub; name it with --push user/name")
    wanted = parse_round(round)
    folder = to or run / _default_name(client, all_clients)
    from partita.experiment import run_folder

    run_folder.require_run(run)
    from partita.experiment.gc_freeze import importing

    with importing():
        from partita.experiment import export as exporting
        from partita.experiment import hub_push
        from partita.experiment.recorded_model import load_recorded_model

    exporting.refuse_existing(folder)
    if push is not None:
        hub_push.check_push(push)
    recorded = load_recorded_model(run, wanted, trust_code)
    if push is not None:
        exporting.check_publishable(recorded, merge, own_models=client is not None or all_clients)
    if all_clients:
        about = exporting.export_clients(recorded, folder, merge, push or "")
    else:
        about = exporting.export_model(recorded, folder, client, merge, push or "")
    address = None if push is None else hub_push.push(folder, push, public)
    if as_json:
        found = {"folder": str(folder), "form": about.form, "kind": about.kind, "round": about.round}
        print(json.dumps({**found, "client": client, "pushed": address}))
        return
    print(printable(f"wrote {folder}: {WHAT[about.form]} after {about.round} rounds"))
    if address is not None:
        print(printable(f"pushed to {address}"))
    if about.privacy_unit == "client" and (client is not None or all_clients):
        print("the guarantee does not cover clients' own parameters; give each client only its own")
    if about.kind in GENERATES and not all_clients:
        print("next:")
        print(printable(f"  lm_eval --model hf --model_args {model_arguments(folder)} --tasks hellaswag"))


def _default_name(client: str | None, all_clients: bool) -> str:
    if all_clients:
        return "export-clients"
    return "export" if client is None else f"export-{path_component(client)}"


def model_arguments(folder: Path) -> str:
    """Return what `lm_eval --model hf` needs to load an exported folder: a whole model, or an adapter and its model."""
    file = folder / ADAPTER
    if not file.is_file():
        return f"pretrained={folder}"
    # The adapter's folder holds the tokenizer with the chat template that it was trained with.
    return f"pretrained={json.loads(file.read_text())['base_model_name_or_path']},peft={folder},tokenizer={folder}"
