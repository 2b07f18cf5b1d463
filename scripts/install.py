"""Install packages with uv, which takes a third of pip's time, from where pip is configured to look for them.

The arguments are those of `pip install`; `python scripts/install.py compile ...` are those of `uv pip compile`. Where uv
cannot be installed, or fails, pip does the work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def settings() -> dict[str, str]:
    """Return what pip's files and environment variables say, as environment variables of uv, which reads neither."""
    from pip._internal.commands import create_command

    found = create_command("install").parse_args([])[0]
    said = {
        "UV_DEFAULT_INDEX": found.index_url,
        "UV_INDEX": " ".join(found.extra_index_urls),
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip: the best version of all indexes, not that of the first one
        "UV_FIND_LINKS": ",".join(found.find_links),
        "UV_NO_INDEX": "1" if found.no_index else "",
        "UV_INSECURE_HOST": " ".join(found.trusted_hosts),
        "UV_HTTP_TIMEOUT": str(int(found.timeout)),
        "ALL_PROXY": found.proxy,
        "SSL_CERT_FILE": found.cert,
        "SSL_CLIENT_CERT": found.client_cert,
    }
    return {name: value for name, value in said.items() if value and name not in os.environ}


def with_uv(*arguments: str) -> bool:
    """Run `uv pip`, and return whether it succeeded."""
    try:
        import uv  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        made = subprocess.run([*PIP, "install", "-qq", "--no-compile", "-c", CONSTRAINTS, "uv"], stderr=subprocess.DEVNULL)
        if made.returncode:
            return False
    try:
        environment = {**os.environ, **settings()}
    except (ImportError, AttributeError):  # of another pip
        return False
    return not subprocess.run([sys.executable, "-m", "uv", "pip", *arguments], env=environment).returncode


def install(*arguments: str, python: Path | str = sys.executable) -> None:
    """Install into the environment of an interpreter.

    Raises:
        CalledProcessError: If neither uv nor pip can.
    """
    if with_uv("install", "-q", "--python", str(python), *arguments):
        return
    print("uv cannot do it here; pip takes longer", flush=True)
    subprocess.run([*PIP, "--python", str(python), "install", "-qq", "--no-compile", *arguments], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["compile"]:
        sys.exit(not with_uv("compile", "-q", "--python", sys.executable, *sys.argv[2:]))
    try:
        install(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
