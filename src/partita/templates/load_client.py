"""Write the whole model of a client from the shared model and what differs from it in the client's.

This file needs torch and safetensors only. `python load_client.py NAME FOLDER` writes a folder that loads like the
one in `shared`: with transformers, with PEFT, or with its load_prompts.py.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent


def write_client(client: str, folder: str | Path, export: str | Path = HERE) -> Path:
    """Write the model of a client.

    Args:
        client: The name of the client.
        folder: The folder to write. It must not exist.
        export: The folder that `partita export --all-clients` wrote.
    """
    export, folder = Path(export), Path(folder)
    known = json.loads((export / "clients.json").read_text(encoding="utf-8"))["clients"]
    if client not in known:
        raise SystemExit(f"there is no client {client!r}; clients are {', '.join(list(known)[:3])}")
    own = export / "clients" / Path(known[client]).name
    shutil.copytree(export / "shared", folder)
    changed = load_file(own / "difference.safetensors")
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        values = load_file(path)
        values |= {name: changed.pop(name) for name in values.keys() & changed.keys()}
        save_file(values, path, metadata)
    if changed:
        raise SystemExit(f"the shared model has no '{min(changed)}'; export the run again")
    for name in ("partita.json", "README.md"):
        shutil.copyfile(own / name, folder / name)
    return folder


if __name__ == "__main__":
    write_client(*sys.argv[1:3])
