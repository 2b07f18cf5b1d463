"""The secret key of a private run's noise: 32 bytes from the operating system, in a file that only its owner can read.

Anyone who knows it can recompute the noise and subtract it. Resuming a run needs it, so it is stored in the run's
private folder. It appears nowhere else: not in the config, the rows, the report or an export.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from contextlib import suppress
from pathlib import Path

from partita.core.dp_settings import PrivacyError
from partita.core.rng import Key
from partita.storage.atomic_files import DiskError

FILE = Path("private", "secret")
KEY_BYTES = 32
MIN_BYTES = 16  # minimum length of a file that a user provides


def draw(more: Key | None = None) -> Key:
    """Draw a new secret. Who knows the draw of the operating system, but not `more`, does not know the secret."""
    drawn = secrets.token_bytes(KEY_BYTES)
    return Key(int.from_bytes((more / drawn.hex()).digest(KEY_BYTES) if more else drawn, "big"))


def save(folder: Path, key: Key) -> Path:
    """Write the secret below the folder. Never replace an existing one, because rounds may depend on it.

    Returns:
        The path of the file.

    Raises:
        PrivacyError: If the folder already has a secret.
        DiskError: If the file cannot be written.
    """
    path = folder / FILE
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.unlink(missing_ok=True)  # of a process with this number that was killed
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # exclusive: it follows no symlink
        with os.fdopen(handle, "wb") as file:
            file.write(key.root.to_bytes(KEY_BYTES, "big"))
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)
    except FileExistsError as error:
        raise PrivacyError(
            f"{path} already exists; a run never replaces its secret, so choose another folder"
        ) from error
    except OSError as error:
        raise DiskError(f"cannot write {path} ({error.strerror}); make room or fix the folder") from error
    finally:
        with suppress(OSError):
            part.unlink()
    return path


def load(folder: Path) -> Key:
    """Read the secret that `save` wrote.

    Raises:
        PrivacyError: If the file is missing, unreadable or damaged.
    """
    path = folder / FILE
    words = _read(path, "restore it from a copy, or start a new run: with other noise it would be a different run")
    if len(words) != KEY_BYTES:
        raise PrivacyError(
            f"{path} is damaged: it holds {len(words)} bytes and not {KEY_BYTES}; restore it from a copy"
        )
    return Key(int.from_bytes(words, "big"))


def load_or_save(folder: Path, new: Key) -> Key:
    """Read the folder's secret, or save a new one if there is none."""
    if not (folder / FILE).exists():
        with suppress(PrivacyError):  # another process was faster
            save(folder, new)
    return load(folder)


def from_file(path: Path) -> Key:
    """Read engine.secret_file, a file of random bytes that a user provides.

    Raises:
        PrivacyError: If the file cannot be read, or if it is shorter than `MIN_BYTES`.
    """
    words = _read(path, "engine.secret_file must name a file of 16 or more random bytes")
    if len(words) < MIN_BYTES:
        raise PrivacyError(
            f"engine.secret_file, {path}, holds {len(words)} bytes; fill it with {MIN_BYTES} or more that "
            "nobody can guess"
        )
    if path.stat().st_mode & 0o077:
        warnings.warn(f"engine.secret_file, {path}, can be read by other users; run: chmod 600 {path}", stacklevel=2)
    return Key(int.from_bytes(hashlib.blake2b(words, digest_size=KEY_BYTES).digest(), "big"))


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PrivacyError(f"cannot read {path} ({error.strerror}); {remedy}") from error
