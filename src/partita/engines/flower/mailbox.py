"""Sending over Flower's grid, and fetching replies by a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from partita.engines.flower import messages

CONNECTION = ("httpx", "httpcore", "flwr.supercore.error")  # their errors are of the SuperLink, not of a site
GRACE = 30.0  # seconds past the deadline in which to fetch what had arrived by then


@dataclass
class Deadline:
    """When waiting began and when it ends; the end comes nearer once enough have answered."""

    begun: float
    until: float

    @property
    def seconds(self) -> float:
        return self.until - self.begun


class Mailbox:
    """`deadline` is in seconds; `poll` is how long to wait between two looks.

    Once enough have answered, the others have `patience` seconds more, and never more than the deadline.
    """

    def __init__(self, grid: Grid, deadline: float, poll: float, patience: float = math.inf) -> None:
        self.grid, self.deadline, self.poll, self.patience = grid, deadline, poll, patience

    def send(self, content: RecordDict, node: int, kind: str, group: str = "") -> str | None:
        """The message's id; None where Flower does not take it, since the node has gone."""
        message = Message(content, node, kind, ttl=self.deadline + GRACE, group_id=group)
        return next(iter(self.grid.push_messages([message])), None) or None

    def fetch(self, asked: Sequence[str | None], begun: float, enough: int) -> Iterator[Message | str]:
        """For each in the order asked its reply, or why there is none."""
        limit = Deadline(begun, begun + self.deadline)
        if self.patience == math.inf:
            yield from (self._fetch(message, limit) for message in asked)
            return
        # All at once, to see who answers: the price is that answers are held here until their turn comes.
        box: SimpleQueue[tuple[int, Message | str | Exception]] = SimpleQueue()
        for place, message in enumerate(asked):
            Thread(target=self._fetch_into, args=(box, place, message, limit), daemon=True).start()
        found: dict[int, Message | str | Exception] = {}
        answers = 0
        for place in range(len(asked)):
            while place not in found:
                where, reply = box.get()
                found[where] = reply
                answers += messages.has_result(reply)
                if answers == enough and messages.has_result(reply):
                    limit.until = min(limit.until, time.monotonic() + self.patience)
            taken = found.pop(place)
            if isinstance(taken, Exception):
                raise taken
            yield taken

    def peek(self, message: str) -> Message | str | None:
        """The reply, if it is there."""
        now = time.monotonic()
        return self._pull(message, Deadline(now, now + GRACE))

    def _fetch_into(
        self, box: SimpleQueue[tuple[int, Message | str | Exception]], place: int, message: str | None, limit: Deadline
    ) -> None:
        try:
            box.put((place, self._fetch(message, limit)))
        except Exception as error:
            box.put((place, error))

    def _fetch(self, message: str | None, limit: Deadline) -> Message | str:
        """What arrived by the deadline counts, though its turn may come after it."""
        while message:
            late = time.monotonic() - limit.until
            reply = self._pull(message, limit, max(GRACE, late + 1.0) if late >= 0 else 0.0)
            if reply or late >= 0:
                return reply or f"gave no answer within {limit.seconds:.3g} s"
            time.sleep(max(0.0, min(self.poll, limit.until - time.monotonic())))
        return "is no longer connected"

    def _pull(self, message: str, limit: Deadline, grace: float = 0.0) -> Message | str | None:
        """In a thread, since Flower waits for an upload that has begun, even if the sender died in the middle of it."""
        box: SimpleQueue[Message | Exception | None] = SimpleQueue()

        def fetch() -> None:
            try:
                box.put(next(iter(self.grid.pull_messages([message])), None))
            except Exception as error:
                box.put(error)

        Thread(target=fetch, daemon=True).start()
        while True:
            try:
                found = box.get(timeout=self.poll)
                break
            except Empty:
                # Looked at anew each time, since the limit may have come nearer.
                if time.monotonic() > limit.until + grace:
                    return f"had not sent its whole answer within {limit.seconds:.3g} s"
        if isinstance(found, Exception):
            if isinstance(found, OSError) or type(found).__module__.startswith(CONNECTION):
                raise found
            # Flower unpacks what the site made up, and can fail in many ways.
            return f"sent a message that cannot be unpacked ({type(found).__name__})"
        if found is not None and found.metadata.reply_to_message_id != message:
            return "sent an answer to another message"
        return found
