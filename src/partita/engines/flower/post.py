"""Sending over Flower's grid, and fetching replies by a deadline."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from threading import Thread

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

GRACE = 30.0  # seconds past the deadline in which to fetch what had arrived by then


class Post:
    """`deadline` is in seconds; `poll` is how long to wait between two looks."""

    def __init__(self, grid: Grid, deadline: float, poll: float) -> None:
        self.grid, self.deadline, self.poll = grid, deadline, poll

    def send(self, content: RecordDict, node: int, kind: str, group: str = "") -> str | None:
        """The message's id; None where Flower does not take it, since the node has gone."""
        message = Message(content, node, kind, ttl=self.deadline + GRACE, group_id=group)
        return next(iter(self.grid.push_messages([message])), None) or None

    def fetch(self, message: str | None, until: float) -> Message | str:
        """The reply, or why there is none. What arrived by the deadline counts, though its turn may come after it."""
        while message:
            left = until - time.monotonic()
            reply = self._pull(message, left if left > 0 else max(1.0, left + GRACE))
            if reply or left <= 0:
                return reply or f"gave no answer within {self.deadline:g} s"
            time.sleep(min(self.poll, left))
        return "is no longer connected"

    def peek(self, message: str) -> Message | str | None:
        """The reply, if it is there."""
        return self._pull(message, GRACE)

    def _pull(self, message: str, seconds: float) -> Message | str | None:
        """In a thread, since Flower waits for an upload that has begun, even if the sender died in the middle of it."""
        box: SimpleQueue[Message | Exception | None] = SimpleQueue()

        def fetch() -> None:
            try:
                box.put(next(iter(self.grid.pull_messages([message])), None))
            except Exception as error:
                box.put(error)

        Thread(target=fetch, daemon=True).start()
        try:
            found = box.get(timeout=seconds)
        except Empty:
            return f"had not sent its whole answer within {self.deadline:g} s"
        if isinstance(found, TypeError | ValueError | KeyError):
            return f"sent a message that cannot be unpacked ({type(found).__name__})"
        if isinstance(found, Exception):
            raise found
        return found
