"""`partita watch`: a live page of runs, for a browser on this machine."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer


def watch(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders that contain them. Default: runs.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1. 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show runs on a live page while they train. Reads their folders only; start and stop it at any time.

    The page is reachable from this machine only, by an address with a random token.
    """
    from partita.core.options import OptionError
    from partita.storage.safe_text import printable
    from partita.watch.server import WatchServer
    from partita.watch.state import Watcher

    folders = runs or [Path("runs")]
    for folder in folders:
        if folder.is_file():
            raise OptionError(f"{folder} is a file; name a run folder, or a folder that contains run folders")
    try:
        server = WatchServer(Watcher(folders), port)
    except OSError as error:
        raise OptionError(
            f"port {port} on 127.0.0.1 cannot be used ({error.strerror}); choose another --port"
        ) from error
    missing = [folder for folder in folders if not folder.exists()]
    print(printable(f"watching {', '.join(map(str, folders))} at {server.address} (stop with Ctrl-C)"), flush=True)
    if missing:
        print(printable(f"{missing[0]} does not exist yet; the page shows its runs as soon as they start"), flush=True)
    with server:
        if browser and _has_display():
            webbrowser.open(server.opening_address)
        with suppress(OSError):
            os.nice(10)  # the runs come first
        server.serve_forever()


def _has_display() -> bool:
    """Return whether a browser can open a window. Without one, it would take over the terminal."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
