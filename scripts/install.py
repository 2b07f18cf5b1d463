"""Install packages with uv, which takes a third of pip's time, from where pip is configured to look for them.

The arguments are those of `pip install`; after `compile`, those of `uv pip compile`. Where uv cannot be installed, or
fails, pip does the work.
"""

from __future__ import annotations

import argparse
import importlib.util
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
    if importlib.util.find_spec("uv") is None:
        command = (*PIP, "install", "-qq", "--no-compile", "-c", str(CONSTRAINTS), "uv")
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
            return False
    try:
        environment = {**os.environ, **settings()}
    except (ImportError, AttributeError):  # of another pip
        return False
    return not subprocess.run([sys.executable, "-m", "uv", "pip", *arguments], env=environment).returncode


def main() -> None:
    """Install, with uv if it can be, and exit with 1 if nothing can."""
    parser = argparse.ArgumentParser(description="Install packages with uv, or else with pip.", allow_abbrev=False)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment to install into")
    options, arguments = parser.parse_known_args()
    if arguments[:1] == ["compile"]:
        sys.exit(not with_uv("compile", "-q", "--python", options.python, *arguments[1:]))
    if not with_uv("install", "-q", "--python", options.python, *arguments):
        print("uv cannot do it here; pip takes longer", flush=True)
        pip = (*PIP, "--python", options.python, "install", "-qq", "--no-compile")
        sys.exit(subprocess.run([*pip, *arguments]).returncode)


if __name__ == "__main__":
    main()
