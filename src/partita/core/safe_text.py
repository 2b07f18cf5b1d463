"""Names and messages that others wrote, made safe for a terminal, a page and a path."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from urllib.parse import quote, unquote

MAX_LABEL = 180  # bytes of a path component, which most file systems limit to 255; a suffix must fit too
HASH_CHARACTERS = "@"  # between the beginning of a name and its digest; quoting leaves none in other names


def printable(text: object) -> str:
    """The text with everything invisible as an escape such as \\x1b: nothing in it moves a cursor or reorders text."""
    return "".join(each if _visible(each) else _escaped(each) for each in str(text))


def _visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def path_component(name: str) -> str:
    """A path component for any text, different for different texts; `named` goes back from it."""
    quoted = quote(name, safe="", errors="surrogatepass").replace(".", "%2E")  # a client may be called ".."
    return quoted if 0 < len(quoted) <= MAX_LABEL else _shortened(quoted, name)


def client_of_folder(folder: str) -> str | None:
    """The text that a path component stands for; None where only its digest is left."""
    return None if HASH_CHARACTERS in folder else unquote(folder, errors="surrogatepass")


def label_folder(label: str) -> str:
    """A readable path component for a label. Different labels may share one."""
    plain = re.sub(r"[^\w.=+-]+", "_", label).strip("_")
    if not plain.strip("."):
        return "run"
    return plain if len(plain.encode()) <= MAX_LABEL else _shortened(plain, label)


def _shortened(start: str, name: str) -> str:
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return start.encode()[: MAX_LABEL - 33].decode(errors="ignore") + HASH_CHARACTERS + digest
