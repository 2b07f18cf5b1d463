"""Which custom code this user trusts. A config or run folder from someone else may name code; looking must not run it.

The list of trusted code is a file in the user's state folder. Starting a run adds the code of its config. Commands that
open a run folder, or only look at a config, run its code only if the list has it, or if the user says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from partita.core.own_code import FOLDER, CodeError, Reference, digest, read_source

REMEDY = "read it, then repeat the command with --trust-code"
NEW = "which you have not run or trusted on this machine"


def trusted_file() -> Path:
    """Return the file with the list, one entry per line."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "partita" / "trusted_code"


def trust(references: Iterable[Reference]) -> None:
    """Add code to the list. If the list cannot be written, opening the run folder later asks for `--trust-code`."""
    known = _entries()
    new = [entry for entry in dict.fromkeys(map(_entry, references)) if entry not in known]
    if not new:
        return
    file = trusted_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as opened:
            opened.write("".join(f"{entry}\n" for entry in new))
    except OSError:
        return


def check_trusted(references: Iterable[Reference], own: Mapping[str, str] | None = None) -> None:
    """Check that this user trusts the code of a run folder, before it is loaded.

    Args:
        references: The functions that the recorded config names.
        own: Digests of the user's own code, which is trusted too.

    Raises:
        CodeError: If the list does not have one of them.
    """
    for reference in untrusted(references, own):
        shown = f"{FOLDER}/{reference.key}" if reference.path else str(reference)
        raise CodeError(f"the run uses {shown}, {NEW}; {REMEDY}")


def untrusted(references: Iterable[Reference], own: Mapping[str, str] | None = None) -> list[Reference]:
    """Return the functions whose code the list does not have.

    Args:
        references: The functions that a config names.
        own: Digests of the user's own code, which is trusted too.
    """
    known = _entries() | {*(own or {}).values()}
    return [reference for reference in references if _entry(reference) not in known]


def described(reference: Reference) -> str:
    """Return a text with what would run: a file with its digest, or a function of an installed module."""
    return f"{reference.path} (digest {_entry(reference)})" if reference.path else str(reference)


def _entry(reference: Reference) -> str:
    """Return a file's digest: a copy of it is as good. A module is named, because the user has installed it."""
    return digest(read_source(reference)) if reference.path else str(reference)


def _entries() -> frozenset[str]:
    try:
        return frozenset(trusted_file().read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError):
        return frozenset()
