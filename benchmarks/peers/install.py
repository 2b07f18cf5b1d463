"""Make an environment for each peer, from the pinned requirements beside this file; those that are there are kept."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HOME = Path("~/.cache/partita-peers").expanduser()
REQUIREMENTS = Path(__file__).parent / "requirements"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--home", type=Path, default=HOME)
    options.add_argument("--peers", nargs="*", default=sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))
    options.add_argument("--python", default=sys.executable, help="3.10 to 3.12: pfl asks for it")
    chosen = options.parse_args()
    failed = [peer for peer in chosen.peers if not install(peer, chosen.home, chosen.python)]
    if failed:
        raise SystemExit(f"could not install {', '.join(failed)}; drive.py will name it as not run")


def install(peer: str, home: Path, python: str) -> bool:
    mark = home / peer / "ready"
    pins = REQUIREMENTS / f"{peer}.txt"
    if mark.exists() and mark.read_text() == pins.read_text():
        print(f"{peer}: there already")
        return True
    print(f"{peer}: installing into {home / peer}", flush=True)
    subprocess.run([python, "-m", "venv", "--clear", home / peer], check=True)
    pip = [str(python_of(home, peer)), "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check"]
    if subprocess.run([*pip, "-r", str(pins)]).returncode:
        return False
    mark.write_text(pins.read_text())
    return True


def python_of(home: Path, peer: str) -> Path:
    return home / peer / "bin" / "python"


if __name__ == "__main__":
    main()
