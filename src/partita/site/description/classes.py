"""The list of classes that a group agreed on, as a file in every site's folder."""

from __future__ import annotations

import json
from pathlib import Path

from partita.site.description.record import MAX_BYTES, MAX_CLASSES, DescriptionError, check_name
from partita.storage import atomic_files
from partita.storage.atomic_files import DamageError, LinkError
from partita.storage.safe_text import printable

CLASSES_FILE = "classes.json"


def read_classes(path: Path) -> tuple[str, ...]:
    """Read the classes that the group agreed on, in order.

    Raises:
        DescriptionError: If the file is not a list of names.
    """
    try:
        names = atomic_files.parse_json(atomic_files.read(path, MAX_BYTES), printable(path))
    except (OSError, DamageError, LinkError) as error:
        raise DescriptionError(f"cannot read {printable(path)} ({type(error).__name__})") from error
    if not isinstance(names, list) or len(names) > MAX_CLASSES:
        raise DescriptionError(f"{printable(path)} is not a JSON list of at most {MAX_CLASSES} names")
    return tuple(check_name(name, f"a name in {printable(path)}") for name in names)


def write_classes(path: Path, classes: tuple[str, ...]) -> None:
    """Write the classes that the group agreed on."""
    atomic_files.write(path, (json.dumps(list(classes), ensure_ascii=False, indent=1) + "\n").encode())
