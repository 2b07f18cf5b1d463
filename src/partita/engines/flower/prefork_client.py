"""Replacement for a Flower program. It passes its arguments to the prefork server, which has all modules imported.

It is run by path and imports little, so it starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main(socket_path: str, program: str, *arguments: str) -> int:
    """Run a program in a fork of the prefork server. The fork ends when this process ends for any reason.

    If the server cannot be reached, this process becomes the program itself.

    Args:
        socket_path: Path of the server's socket.
        program: Path of the Flower program.
        *arguments: Its arguments.

    Returns:
        The exit status of the fork.
    """
    request = {
        "words": [program, *arguments],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "pid": os.getpid(),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(socket_path)
        except OSError as error:
            print(
                f"cannot connect to {socket_path} ({error.strerror}); starting {program} without the prefork server",
                file=sys.stderr,
                flush=True,
            )
            os.execv(program, [program, *arguments])
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        connection.sendall(json.dumps(request).encode() + b"\n")
        status = connection.recv(1)
    return status[0] if status else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
