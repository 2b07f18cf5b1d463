"""Build sdist and wheel, install each into an environment of its own, and use it from outside the repository.

The environment gets the dependencies by a real installation: borrowing those of .venv would save half a minute, but
would hide a dependency that only the dev extra brings.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOK = """
import partita
from partita.methods import INDEX
from partita.methods.cards import card
print(partita.__file__)
print(partita.__version__)
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
    """Build an sdist and, from the sdist, a wheel, both in `folder`. The wheel must hold all files of the package."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    [wheel] = folder.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("partita/")}
    package = ROOT / "src" / "partita"
    files = (path for path in package.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    present = {str(path.relative_to(package.parent)) for path in files}
    if packed != present:
        missing, extra = sorted(present - packed), sorted(packed - present)
        sys.exit(f"the wheel lacks {missing} and has {extra} besides; see package-data in pyproject.toml")
    return wheel


def install(package: Path, python: Path, *options: str) -> None:
    command = (sys.executable, ROOT / "scripts" / "install.py", "--python", python, "-c", ROOT / "constraints.txt")
    run(*command, *options, package, cwd=python.parent)


def use(python: Path, version: str) -> None:
    folder = python.parent.parent
    where, found, cards = run(python, "-c", LOOK, cwd=folder).split()
    if not Path(where).is_relative_to(folder):
        sys.exit(f"partita was imported from {where}, not from the environment of the wheel")
    printed = run(python.parent / "partita", "--version", cwd=folder).strip()
    if not found == version == printed.removeprefix("partita "):
        sys.exit(
            f"the file is of version {version}, partita.__version__ is {found}, and the command prints '{printed}'"
        )
    methods = json.loads(run(python.parent / "partita", "methods", "--json", cwd=folder))
    if not methods or int(cards) < len(methods):
        sys.exit(f"the installed package knows {len(methods)} methods but has {cards} cards; each method needs one")
    print(f"It works: version {version}, {len(methods)} methods, {cards} cards.", flush=True)


def check_release(tag: str, version: str, root: Path = ROOT) -> None:
    """Exit with an error unless the tag, the built version, the changelog and the citation are of one release."""
    if tag != f"v{version}":
        sys.exit(
            f"the tag is {tag}, but the package was built as {version}; a tag is 'v' and the version, on a clean clone"
        )
    if not re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        sys.exit(f"CHANGELOG.md has no section '## [{version}] - ' with a date; put the date of the release there")
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text():
        sys.exit(f"CITATION.cff is not of version {version}; change it")


def main() -> None:
    """Build, check, and keep the files if asked."""
    parser = argparse.ArgumentParser(description="Build sdist and wheel, install them elsewhere, and use them.")
    parser.add_argument("--out", type=Path, help="folder to keep both files in")
    parser.add_argument("--tag", help="the tag of a release, such as v0.2.0, whose files these must be")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="partita-wheel-") as name:
        folder = Path(name).resolve()
        print("Building sdist and wheel", flush=True)
        wheel = build(folder)
        [sdist] = folder.glob("*.tar.gz")
        version = wheel.name.split("-")[1]
        if options.tag:
            check_release(options.tag, version)
        venv.create(folder / "environment")
        python = folder / "environment" / "bin" / "python"
        print(f"Installing {sdist.name} and its dependencies elsewhere", flush=True)
        install(sdist, python)  # built with only what pyproject.toml requires for it
        use(python, version)
        print(f"Installing {wheel.name} in its place", flush=True)
        install(wheel, python, "--no-deps", "--force-reinstall")
        use(python, version)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            for file in (sdist, wheel):
                shutil.copy(file, options.out)


if __name__ == "__main__":
    main()
