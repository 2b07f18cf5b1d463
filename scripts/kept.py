"""Results that are kept in .mutate, for as long as nothing that they depend on changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".mutate"


def key_of(what: str, tests: Iterable[str]) -> str:
    """Of a result that rests on the package, on these tests, and on what is named or written out here."""
    files = sorted({test.partition("::")[0] for test in tests})
    parts = [what, *tests, _shared(), *(_digest(file) for file in files)]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def keep(key: str, value: Any) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / key).write_text(json.dumps(value))


def recall(key: str) -> Any:
    """None: nothing was kept."""
    path = FOLDER / key
    return json.loads(path.read_text()) if path.exists() else None


@cache
def _shared() -> str:
    """The package, and what tests have in common."""
    paths = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").glob("*.py")]
    return " ".join(_digest(str(path.relative_to(ROOT))) for path in sorted(paths) if path.name[:5] != "test_")


@cache
def _digest(file: str) -> str:
    return hashlib.blake2b((ROOT / file).read_bytes(), digest_size=16).hexdigest()
