"""Loading a config for a command that only looks at it: custom code in it runs only if the user trusts it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from partita.core.own_code import Reference
    from partita.experiment.config import Config

TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Run custom code that you have not run or trusted on this machine.")
]


def look(path: Path, changes: Iterable[str] | None, trust_code: bool) -> Config:
    """Load a config. Ask about custom code on a terminal, and elsewhere refuse it, before anything of it runs.

    Args:
        path: The TOML file.
        changes: Overrides of its keys.
        trust_code: Trust its code, now and from now on.

    Raises:
        CodeError: If it names code that this user does not trust.
    """
    from partita.experiment.config import load

    return load(path, changes or (), lambda references: _allow(references, trust_code))


def _allow(references: Sequence[Reference], trust_code: bool) -> None:
    from partita.core.own_code import CodeError
    from partita.experiment.trusted_code import NEW, REMEDY, described, trust, untrusted

    new = [] if trust_code else untrusted(references)
    told = ", ".join(dict.fromkeys(printable(described(reference)) for reference in new))
    if new and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CodeError(f"the config runs {told}, {NEW}; {REMEDY}")
    if new and not typer.confirm(f"The config runs {told}, {NEW}. Trust it?", err=True):
        raise CodeError(f"the config runs {told}, which you do not trust")
    trust(references)
