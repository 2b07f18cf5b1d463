"""The server's side: an engine whose clients are Flower's nodes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from partita.core import tree
from partita.core.checkpoint import States
from partita.core.learn import ClientFault, ClientState, Job
from partita.core.method import Update
from partita.core.model import Examples, Model
from partita.core.rounds import Lost
from partita.core.run import Run, RunError
from partita.engines.flower import messages
from partita.engines.flower.messages import MessageError
from partita.engines.flower.names import Names
from partita.engines.flower.post import Post
from partita.engines.flower.seals import Seals

_log = logging.getLogger(__name__)


class Elsewhere:
    """The store of a server whose clients keep their own state: it knows of none, only of what is settled."""

    def __init__(self) -> None:
        self.commits = (0, 0)

    def load(self, client: str, round: int) -> ClientState:
        return ClientState()

    def save(self, client: str, round: int, state: ClientState) -> None:
        raise NotImplementedError("the state of a client on another machine is saved there")

    def commit(self, done: int) -> None:
        self.commits = (self.commits[1], done)

    def known(self) -> list[str]:
        return []

    def states(self) -> States:
        return {}


class Flower:
    """Jobs go out at once; answers are fetched in the order asked, so the result does not depend on who is fast.

    Those who have not answered by the deadline, in seconds from the start of a round, are lost to that round, and take
    part again once they have said that they are there. Once half of those asked, and no fewer than the run's minimum,
    have answered, the others have `patience` seconds more.
    """

    def __init__(
        self,
        run: Run,
        model: Model,
        population: Sequence[str],
        grid: Grid,
        session: str,
        start: int = 0,
        deadline: float = 600.0,
        wait_for: int = 1,
        device: torch.device | None = None,
        poll: float = 0.2,
        patience: float = math.inf,
    ) -> None:
        self.run, self.population, self.post = run, population, Post(grid, deadline, poll, patience)
        self.session, self.start, self.deadline = session, start, deadline
        self.device, self.poll, self.store = device or torch.device("cpu"), poll, Elsewhere()
        self.seals = Seals()
        self.answered: dict[str, int] = {}  # client -> the last round whose answer arrived
        self.names = Names(self.post, population)
        self.nodes: dict[str, int] = {}  # by client
        self.enough = max(1, run.minimum, run.cohort if isinstance(run.cohort, int) else 1)
        self.need = max(self.enough, wait_for)  # of clients, before the first round; later enough are enough
        slots = sum(len(rule.slots) for rule in run.method.local)
        whole = sum(value.numel() * value.element_size() + 1024 for value in model.initial.values())
        self.limit = (1 + slots) * whole

    def clients(self) -> Sequence[str]:
        """Those connected now, in the population's order; it waits until there are enough."""
        until = time.monotonic() + self.deadline
        while len(nodes := self.names.online()) < self.need:
            if time.monotonic() > until:
                here = ", ".join(sorted(nodes)) or "none"
                raise RunError(
                    f"{self.need} clients are needed, and after {self.deadline:g} s there are {len(nodes)} "
                    f"({here}); start the SuperNodes of the others, or ask for fewer clients"
                )
            time.sleep(self.poll)
        self.need, self.nodes = self.enough, nodes
        return [client for client in self.population if client in nodes]

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | Lost]:
        for round, client, reply in self._ask(MessageType.TRAIN, jobs):
            yield self._update(round, client, reply)

    def evaluate(self, jobs: Iterable[Job], on: Examples | None = None) -> Iterator[tuple[str, dict[str, float]]]:
        """Examples that the server holds are not sent out, so on those there are no scores."""
        for _, client, reply in self._ask(MessageType.EVALUATE, jobs) if on is None else ():
            try:
                opened = self._open(client, reply)
                scores = opened if isinstance(opened, Lost) else messages.to_scores(opened)
            except MessageError as error:
                scores = Lost(client, str(error))
            if isinstance(scores, Lost):
                _log.warning("no scores of client '%s': %s", client, scores.reason)
            else:
                yield client, scores

    def _update(self, round: int, client: str, reply: Message | str) -> Update | Lost:
        try:
            opened = self._open(client, reply)
            update = opened if isinstance(opened, Lost) else messages.to_update(opened, client, self.limit)
        except MessageError as error:
            if not self.run.tolerate:
                raise ClientFault(client, f"its answer is of no use: {error}") from error
            return Lost(client, f"its answer is of no use: {error}")
        if isinstance(update, Lost):
            return update
        self.answered[client] = round
        slots = {slot: tree.to(part, self.device) for slot, part in update.slots.items()}
        return replace(update, delta=tree.to(update.delta, self.device), slots=slots)

    def _open(self, client: str, reply: Message | str) -> RecordDict | Lost:
        if isinstance(reply, str):
            return Lost(client, reply)
        if reply.has_error():
            return Lost(client, f"could not answer: {reply.error.reason}")
        refusal = messages.to_refusal(reply.content)
        if refusal is None:
            return reply.content
        if refusal.fault and not self.run.tolerate:
            raise ClientFault(client, refusal.reason)
        return Lost(client, refusal.reason, refusal.empty)

    def _ask(self, kind: str, jobs: Iterable[Job]) -> Iterator[tuple[int, str, Message | str]]:
        begun = time.monotonic()
        asked = [(job.round, job.client, self._send(kind, job)) for job in jobs]
        enough = max(self.run.minimum, -(-len(asked) // 2))
        replies = self.post.fetch([message for _, _, message in asked], begun, enough)
        for (round, client, _), reply in zip(asked, replies, strict=True):
            if isinstance(reply, str):
                self.names.doubt(self.nodes[client])
            yield round, client, reply

    def _send(self, kind: str, job: Job) -> str | None:
        void = self.answered.get(job.client, self.start - 1) + 1
        content = messages.of_job(job, self.seals(job.params), self.session, void, self.store.commits[0])
        return self.post.send(content, self.nodes[job.client], kind, str(job.round))


def server_app(main: Callable[[Grid, Context], None]) -> ServerApp:
    app = ServerApp()
    app.main()(main)
    return app
