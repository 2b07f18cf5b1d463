"""Replacement for a Flower program. It passes its arguments to the prefork server, which has all modules imported.

It is run by path and imports little, so it starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main(place: str, program: str, *words: str) -> int:
    """Run a program in a fork of the prefork server. The fork ends when this process ends for any reason.

    If the server cannot be reached, this process becomes the program itself.

    Args:
        place: Path of the server's socket.
        program: Path of the Flower program.
        *words: Its arguments.

    Returns:
        The exit status of the fork.
    """
    asked = {"words": [program, *words], "folder": os.getcwd(), "environment": dict(os.environ), "pid": os.getpid()}
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.connect(place)
        except OSError as error:
            print(
                f"cannot connect to {place} ({error.strerror}); starting {program} without the prefork server",
                file=sys.stderr,
                flush=True,
            )
            os.execv(program, [program, *words])
        socket.send_fds(door, [b"\n"], [0, 1, 2])
        door.sendall(json.dumps(asked).encode() + b"\n")
        status = door.recv(1)
    return status[0] if status else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
