"""Sends messages over Flower's grid and collects the replies until a deadline."""

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

CONNECTION = (
    "httpx",
    "httpcore",
    "flwr.supercore.error",
)  # errors from these modules come from the SuperLink, not a site
GRACE = 30.0  # seconds after the deadline to download replies that had arrived in time


@dataclass
class Deadline:
    """Start and end of waiting, in monotonic time. The end moves closer once enough clients have answered.

    Attributes:
        started: When the wait began.
        end: When it ends.
    """

    started: float
    end: float

    @property
    def seconds(self) -> float:
        """The length of the wait."""
        return self.end - self.started


class Mailbox:
    """Sends messages to nodes and collects their replies.

    Args:
        grid: Flower's connection to the nodes.
        deadline: Seconds to wait for replies.
        poll: Seconds between two polls.
        patience: Seconds left for the others once enough clients have answered. The deadline still applies.
    """

    def __init__(self, grid: Grid, deadline: float, poll: float, patience: float = math.inf) -> None:
        self.grid, self.deadline, self.poll, self.patience = grid, deadline, poll, patience

    def send(self, content: RecordDict, node: int, kind: str, group: str = "") -> str | None:
        """Send a message and return its id, or None if Flower rejects it because the node has disconnected.

        Args:
            content: The records of the message.
            node: The id of the node.
            kind: Flower's message type, which selects the handler at the site.
            group: Flower's group id; the round, if the message is a job.
        """
        message = Message(content, node, kind, ttl=self.deadline + GRACE, group_id=group)
        return next(iter(self.grid.push_messages([message])), None) or None

    def fetch(self, message_ids: Sequence[str | None], started: float, enough: int) -> Iterator[Message | str]:
        """Collect replies in the order of the requests.

        Args:
            message_ids: Ids of the sent messages; None for a message that could not be sent.
            started: Monotonic time at which the round began.
            enough: Number of results after which the remaining clients have `patience` seconds.

        Yields:
            Each reply, or the reason why there is none.
        """
        limit = Deadline(started, started + self.deadline)
        if self.patience == math.inf:
            yield from (self._fetch(message, limit) for message in message_ids)
            return
        # Fetch all in parallel, to see who answers. The cost: replies are held in memory until it is their turn.
        queue: SimpleQueue[tuple[int, Message | str | Exception]] = SimpleQueue()
        for place, message in enumerate(message_ids):
            Thread(target=self._fetch_into, args=(queue, place, message, limit), daemon=True).start()
        received: dict[int, Message | str | Exception] = {}
        answers = 0
        for place in range(len(message_ids)):
            while place not in received:
                where, reply = queue.get()
                received[where] = reply
                answers += messages.has_result(reply)
                if answers == enough and messages.has_result(reply):
                    limit.end = min(limit.end, time.monotonic() + self.patience)
            current = received.pop(place)
            if isinstance(current, Exception):
                raise current
            yield current

    def peek(self, message: str) -> Message | str | None:
        """Return the reply if it has arrived, else None."""
        now = time.monotonic()
        return self._pull(message, Deadline(now, now + GRACE))

    def _fetch_into(
        self,
        queue: SimpleQueue[tuple[int, Message | str | Exception]],
        place: int,
        message: str | None,
        limit: Deadline,
    ) -> None:
        try:
            queue.put((place, self._fetch(message, limit)))
        except Exception as error:
            queue.put((place, error))

    def _fetch(self, message: str | None, limit: Deadline) -> Message | str:
        """Wait for a reply. One that arrived by the deadline counts, even if it is fetched later."""
        while message:
            overdue = time.monotonic() - limit.end
            reply = self._pull(message, limit, max(GRACE, overdue + 1.0) if overdue >= 0 else 0.0)
            if reply or overdue >= 0:
                return reply or f"gave no answer within {limit.seconds:.3g} s"
            time.sleep(max(0.0, min(self.poll, limit.end - time.monotonic())))
        return "is no longer connected"

    def _pull(self, message: str, limit: Deadline, grace: float = 0.0) -> Message | str | None:
        """Pull a reply in a thread: Flower blocks on an upload in progress, even if the sender died during it."""
        queue: SimpleQueue[Message | Exception | None] = SimpleQueue()

        def fetch() -> None:
            try:
                queue.put(next(iter(self.grid.pull_messages([message])), None))
            except Exception as error:
                queue.put(error)

        Thread(target=fetch, daemon=True).start()
        while True:
            try:
                reply = queue.get(timeout=self.poll)
                break
            except Empty:
                # Check the limit every time, since it may have moved closer.
                if time.monotonic() > limit.end + grace:
                    return f"had not sent its whole answer within {limit.seconds:.3g} s"
        if isinstance(reply, Exception):
            if isinstance(reply, OSError) or type(reply).__module__.startswith(CONNECTION):
                raise reply
            # Flower unpacks untrusted bytes from the site here, which can fail in many ways.
            return f"sent a message that cannot be unpacked ({type(reply).__name__})"
        if reply is not None and reply.metadata.reply_to_message_id != message:
            return "sent an answer to another message"
        return reply
