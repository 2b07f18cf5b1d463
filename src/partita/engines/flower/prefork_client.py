"""Stands in for a program of Flower's: hands all it was started with to the process that has everything imported.

It is run by its path and imports little, so that it is done in milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main(place: str, program: str, *words: str) -> int:
    """The exit status of the fork that does the work; it ends when this process ends, however that is."""
    asked = {"words": [program, *words], "folder": os.getcwd(), "environment": dict(os.environ), "pid": os.getpid()}
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.connect(place)
        except OSError as error:
            print(f"{place} does not open ({error.strerror}); {program} is started anew", file=sys.stderr, flush=True)
            os.execv(program, [program, *words])
        socket.send_fds(door, [b"\n"], [0, 1, 2])
        door.sendall(json.dumps(asked).encode() + b"\n")
        status = door.recv(1)
    return status[0] if status else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
