"""Build the wheel, install it into an environment of its own, and use it from outside the repository.

The environment gets the dependencies by a real installation: borrowing those of .venv would save half a minute, but
would hide a dependency that only the dev extra brings.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = ("__pycache__", "*.egg-info")

LOOK = """
import partita
from partita.methods import INDEX
from partita.methods.cards import card
print(partita.__file__)
print(sum(bool(card(name)) for name in INDEX))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The command's output. What it says on failure is shown."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def build(folder: Path) -> Path:
    """Built from a copy, because setuptools would also pack what an older build left in build/."""
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns(*NOT_SHIPPED))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, cwd=folder)
    [wheel] = folder.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("partita/")}
    package = source / "src" / "partita"
    present = {str(path.relative_to(package.parent)) for path in package.rglob("*") if path.is_file()}
    if packed != present:
        missing, extra = sorted(present - packed), sorted(packed - present)
        sys.exit(f"the wheel lacks {missing} and has {extra} besides; see package-data in pyproject.toml")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "-qq", "--no-compile", wheel, "-c", ROOT / "constraints.txt", cwd=folder)
    return python


def use(python: Path, folder: Path) -> None:
    where, cards = run(python, "-c", LOOK, cwd=folder).split()
    if not Path(where).is_relative_to(folder):
        sys.exit(f"partita was imported from {where}, not from the environment of the wheel")
    methods = json.loads(run(python.parent / "partita", "methods", "--json", cwd=folder))
    if not methods or int(cards) < len(methods):
        sys.exit(f"the installed wheel knows {len(methods)} methods but has {cards} cards; each method needs one")
    print(f"The wheel works: {len(methods)} methods, {cards} cards.")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="partita-wheel-") as name:
        folder = Path(name).resolve()
        print("Building the wheel", flush=True)
        wheel = build(folder)
        print(f"Installing {wheel.name} and its dependencies elsewhere", flush=True)
        use(install(wheel, folder / "environment"), folder)


if __name__ == "__main__":
    main()
