"""Write the plan tables into the cards and the README, as the code prints them; tests notice if they age."""

from __future__ import annotations

import re
from pathlib import Path

from partita.experiment.config import load
from partita.experiment.preview import plan_section, preview
from partita.methods import INDEX
from partita.methods.cards import path_of

ROOT = Path(__file__).parent.parent


def replaced(text: str, pattern: str, by: str) -> str:
    found = re.search(pattern, text, re.DOTALL)
    if found is None:
        raise SystemExit(f"nothing matches {pattern!r}")
    return text[: found.start(1)] + by + text[found.end(1) :]


def main() -> None:
    for name in INDEX:
        path = ROOT / "src" / "partita" / path_of(name)
        path.write_text(replaced(path.read_text(), r"## Plan\n(.*?)\n\n## ", plan_section(name)))
    readme = ROOT / "README.md"
    shown = preview(load(ROOT / "examples" / "digits.toml"), 12, "c3").to_text()
    readme.write_text(replaced(readme.read_text(), r"```text\n(.*?)```", shown))


if __name__ == "__main__":
    main()
