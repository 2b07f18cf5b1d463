"""Ctrl-C and SIGTERM end a command with a message and the exit code that shells expect."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """The user or the system asked this process to stop.

    It is not a KeyboardInterrupt, because typer would exit before `main` can say how to resume.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise Stopped in the main thread on SIGINT or SIGTERM. A second signal ends the process at once.

    A signal that is ignored, as SIGINT is in a background job of a script, stays ignored.
    """

    def stop(number: int, _: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(number)

    handled = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, stop) for each in handled}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
