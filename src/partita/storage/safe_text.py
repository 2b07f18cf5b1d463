"""Untrusted names and messages, made safe for terminals, HTML pages and paths."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from urllib.parse import quote, unquote

MAX_LABEL = 180  # bytes of a path component; most file systems allow 255, and a suffix must fit too
HASH_CHARACTERS = "@"  # separates the start of a shortened name from its digest; quoting removes it from other names


def printable(text: object) -> str:
    """Return the text with invisible characters escaped, such as \\x1b: it cannot move the cursor or reorder text."""
    return "".join(char if _visible(char) else _escaped(char) for char in str(text))


def _visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def path_component(name: str) -> str:
    """Return a path component for any text, unique for each text; `client_of_folder` is the inverse."""
    quoted = quote(name, safe="", errors="surrogatepass").replace(".", "%2E")  # a client may be called ".."
    return quoted if 0 < len(quoted) <= MAX_LABEL else _shortened(quoted, name)


def client_of_folder(folder: str) -> str | None:
    """Return the text of a path component from `path_component`; None if it was shortened to a digest."""
    return None if HASH_CHARACTERS in folder else unquote(folder, errors="surrogatepass")


def label_folder(label: str) -> str:
    """Return a readable path component for a label. Different labels can have the same one."""
    plain = re.sub(r"[^\w.=+-]+", "_", label).strip("_")
    if not plain.strip("."):
        return "run"
    return plain if len(plain.encode()) <= MAX_LABEL else _shortened(plain, label)


def _shortened(start: str, name: str) -> str:
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return start.encode()[: MAX_LABEL - 33].decode(errors="ignore") + HASH_CHARACTERS + digest
