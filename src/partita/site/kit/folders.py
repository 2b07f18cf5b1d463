"""Write the files of a kit. Keys, certificates and state are made next to them later, and never touched here."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from partita.site.toml_tables import SiteError
from partita.storage.atomic_files import LinkError, read, write

SHELL = b"#!/usr/bin/env bash"  # the first line of a script


def write_files(files: Mapping[str, bytes], folder: Path, force: bool = False) -> list[Path]:
    """Write files to a folder, for their owner only.

    Args:
        files: Contents by path in the folder.
        folder: Where to write them.
        force: Overwrite files that differ.

    Returns:
        The files that were written. Those that were there already with the same content are left out.

    Raises:
        SiteError: If a file is there with another content and `force` is not set. Then nothing is written.
        LinkError: If a folder or file to write is a link.
    """
    found = {folder / path: content for path, content in files.items()}
    differing = [path for path, content in found.items() if _differs(folder, path, content)]
    if not force and (present := [path for path in differing if path.exists()]):
        raise SiteError(
            f"{present[0]} exists and differs; compare it, and overwrite all files that differ with --force, or choose "
            "another folder with --out"
        )
    for path in differing:
        for parent in reversed([each for each in path.parents if each == folder or folder in each.parents]):
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(path, found[path], sync=False)
        path.chmod(stat.S_IRWXU if found[path].startswith(SHELL) else stat.S_IRUSR | stat.S_IWUSR)
    return differing


def _differs(folder: Path, path: Path, content: bytes) -> bool:
    """Return whether a file has to be written.

    Raises:
        LinkError: If it, or a folder on the way to it, is a link. It would lead out of the party's folder.
    """
    for part in (path, *path.parents):
        if part == folder:
            break
        if part.is_symlink():
            raise LinkError(f"{part} is a symbolic link; put the folder or file itself there, or delete the link")
    return not path.exists() or read(path) != content
