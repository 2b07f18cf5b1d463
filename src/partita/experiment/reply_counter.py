"""Progress within a round: count the clients that have replied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from partita.core.client import Job
from partita.core.data import EvaluateOn
from partita.core.rounds import Engine, Reply
from partita.core.settings import Run
from partita.core.update import SecureSum

OnReply = Callable[[int, int], None]  # gets the number of replies in this round so far, and the size of the cohort


class ReplyCounter:
    """An engine that reports each reply to its jobs. Replies of one block of clients arrive together.

    Args:
        engine: The engine that trains the clients.
        run: The run.
        on_reply: Called at the start of a round, and for each reply.
    """

    def __init__(self, engine: Engine, run: Run, on_reply: OnReply) -> None:
        self.engine, self.run, self.on_reply = engine, run, on_reply

    def clients(self) -> Sequence[str]:
        return self.engine.clients()

    def train(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        cohort, count = self.run.cohort_size(len(self.clients())), 0
        self.on_reply(count, cohort)
        for reply in self.engine.train(jobs):
            if not isinstance(reply, SecureSum):  # it is the server's, not a client's
                count += 1
                self.on_reply(count, cohort)
            yield reply

    def evaluate(self, jobs: Iterable[Job], on: EvaluateOn = None) -> Iterator[tuple[str, dict[str, float]]]:
        return self.engine.evaluate(jobs, on)
