"""Which files a change touches, since a commit: those of the commits after it, and those not committed yet."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def changed(since: str = "", root: Path = ROOT) -> set[str] | None:
    """Return their paths; None if there is no git, or no commit to compare with.

    Args:
        since: A commit. Without one, or if it is unknown here, the first parent of the newest commit.
        root: The repository.
    """
    for base in filter(None, (since, "HEAD^")):
        known = _git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
        if known:
            new = _git(root, "ls-files", "--others", "--exclude-standard")
            return set((_git(root, "diff", "--name-only", known[0]) or []) + (new or []))
    return None


def _git(root: Path, *words: str) -> list[str] | None:
    try:
        done = subprocess.run(["git", "-c", "core.quotePath=false", *words], cwd=root, text=True, capture_output=True)
    except FileNotFoundError:
        return None
    return done.stdout.split("\n")[:-1] if not done.returncode else None


def concerned(pages: Iterable[str], touched: set[str] | None, root: Path = ROOT) -> list[str]:
    """Return the pages that are among these files, that name one of them, or that are the card of one.

    Only configs and studies are named: a page that prints a path of the code does not run it.
    """
    files = touched or set()
    named = [path for path in files if path.startswith(("examples/", "studies/")) and not path.endswith(".md")]

    def is_concerned(page: str) -> bool:
        if page in files or (page.startswith("src/") and page.removesuffix(".md") + ".py" in files):
            return True
        text = (root / page).read_text(encoding="utf-8") if named else ""
        return any(path in text for path in named)

    return [page for page in pages if is_concerned(page)]
