"""The server's side: an engine whose clients are Flower nodes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from partita.core import tensors
from partita.core.client import ClientError, ClientState, Job
from partita.core.data import EvaluateOn
from partita.core.model import Model
from partita.core.rounds import ClientFailure, Reply
from partita.core.settings import Run, RunError
from partita.core.update import Update
from partita.engines.flower import messages
from partita.engines.flower.fingerprints import Fingerprints
from partita.engines.flower.mailbox import Mailbox
from partita.engines.flower.message_checks import ExpectedReply, check_scores, expected_reply
from partita.engines.flower.messages import MessageError, Part, printable_line
from partita.engines.flower.node_registry import NodeRegistry
from partita.engines.flower.secure_server import train_securely
from partita.evaluation import ACCURACY, Evaluator
from partita.storage.checkpoint import States

_log = logging.getLogger(__name__)
Attach = Callable[[Job, RecordDict], RecordDict]


class RemoteClientStore:
    """Client store of a server whose clients keep their own state. It only records commits."""

    def __init__(self) -> None:
        self.commits = (0, 0)

    def load(self, client: str, round: int) -> ClientState:
        return ClientState()

    def save(self, client: str, round: int, state: ClientState) -> None:
        raise NotImplementedError("the state of a client on another machine is saved there")

    def commit(self, done: int, best: int | None = None) -> None:
        self.commits = (self.commits[1], done)

    def known(self) -> list[str]:
        return []

    def states(self) -> States:
        return {}


class FlowerEngine:
    """Engine that sends jobs to Flower nodes.

    All jobs are sent at once. Replies are read in the order of the jobs, so the result does not depend on which client
    is fastest. A client that has not answered by the deadline is lost for the round; it takes part again after it has
    reported its name.

    Args:
        run: The run.
        model: The model.
        population: The names of all clients.
        grid: Flower's connection to the nodes.
        session: Id that is unique to this start of the server.
        start: The first round of this session.
        deadline: Seconds from the start of a round until missing replies are given up.
        wait_for: Number of clients to wait for before the first round.
        device: The server's device. Default: the CPU.
        poll: Seconds between two polls.
        patience: Seconds left for the other clients once half of the cohort, and at least `federation.min_updates`,
            have answered.
        config: Digest of the config that server and sites share.
        base: Digest of the frozen weights, which every site must hold too.
        evaluator: Metrics of the task.
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
        config: str = "",
        base: str = "",
        evaluator: Evaluator = ACCURACY,
    ) -> None:
        self.run, self.model, self.population = run, model, population
        self.mailbox, self.config, self.evaluator = Mailbox(grid, deadline, poll, patience), config, evaluator
        self.base = base
        self.session, self.start, self.deadline = session, start, deadline
        self.device, self.poll, self.store = device or torch.device("cpu"), poll, RemoteClientStore()
        self.fingerprints = Fingerprints()
        self.answered: dict[str, int] = {}  # client -> the last round whose answer arrived
        self.registry = NodeRegistry(self.mailbox, population)
        self.nodes: dict[str, int] = {}  # client -> node
        self.connected: Sequence[str] = ()  # clients that were found the last time; another thread may read it
        cohort = run.federation.cohort
        self.enough = max(1, run.federation.min_updates, cohort if isinstance(cohort, int) else 1)
        self.required = max(self.enough, wait_for)  # clients needed before the first round; later `enough`

    def clients(self) -> Sequence[str]:
        """Wait until enough clients are connected, and return them in the population's order.

        Raises:
            RunError: If there are not enough clients after `deadline` seconds.
        """
        end = time.monotonic() + self.deadline
        while len(nodes := self.registry.online()) < self.required:
            self.connected = sorted(nodes)
            if time.monotonic() > end:
                connected = ", ".join(sorted(nodes)) or "none"
                raise RunError(
                    f"{self.required} clients are needed, but after {self.deadline:g} s there are {len(nodes)} "
                    f"({connected}); start the SuperNodes of the others, or configure fewer clients"
                )
            time.sleep(self.poll)
        self.required, self.nodes, self.connected = self.enough, nodes, sorted(nodes)
        return [client for client in self.population if client in nodes]

    def train(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        if self.run.secure_aggregation:
            yield from train_securely(self, jobs)
            return
        for expected, reply in self.exchange(MessageType.TRAIN, jobs):
            yield self._update(expected, reply)

    def evaluate(self, jobs: Iterable[Job], on: EvaluateOn = None) -> Iterator[tuple[str, dict[str, float]]]:
        """Score clients' models on their own examples. On other examples there are no scores: none are ever sent."""
        if on is not None and not isinstance(on, str):
            return
        for expected, reply in self.exchange(MessageType.EVALUATE, jobs, on or "test"):
            scores, client = self._scores(expected, reply), expected.job_id.client
            if isinstance(scores, ClientFailure):
                _log.warning("no scores of client '%s': %s", client, scores.reason)
            else:
                yield client, scores

    def _scores(self, expected: ExpectedReply, reply: Message | str) -> dict[str, float] | ClientFailure:
        try:
            content = self.content_of(expected, reply)
            if isinstance(content, ClientFailure):
                return content
            scores = messages.decode_scores(content)
            check_scores(scores, self.evaluator)
        except MessageError as error:
            return self.unusable(expected, error)
        return scores

    def _update(self, expected: ExpectedReply, reply: Message | str) -> Update | ClientFailure:
        try:
            content = self.content_of(expected, reply)
            if isinstance(content, ClientFailure):
                return content
            update = messages.decode_update(content, expected.job_id, expected.most)
        except MessageError as error:
            return self.unusable(expected, error)
        # A site keeps its new state even if its update is refused later, as in the simulation.
        self.answered[update.client] = expected.job_id.round
        slots = {slot: tensors.to(part, self.device) for slot, part in update.slots.items()}
        return replace(update, delta=tensors.to(update.delta, self.device), slots=slots)

    def unusable(self, expected: ExpectedReply, error: MessageError) -> ClientFailure:
        """Return the failure of a client whose reply cannot be used.

        Raises:
            ClientError: If the run does not skip failed clients.
        """
        client, reason = expected.job_id.client, printable_line(f"its answer cannot be used: {error}")
        if not self.run.federation.skip_failed_clients:
            raise ClientError(client, reason) from error
        return ClientFailure(client, reason, refused=True)

    def content_of(self, expected: ExpectedReply, reply: Message | str) -> RecordDict | ClientFailure:
        """Return the records of a reply, or why there are none.

        Raises:
            MessageError: If the reply cannot be read, or answers another job.
            ClientError: If the site reports an error and the run does not skip failed clients.
        """
        client = expected.job_id.client
        if isinstance(reply, str):
            return ClientFailure(client, reply)
        if reply.has_error():
            return ClientFailure(client, printable_line(f"could not answer: {reply.error.reason}"))
        if not reply.has_content():
            raise MessageError("it is empty")
        expected.check(messages.decode_job_id(reply.content))
        refusal = messages.decode_error(reply.content)
        if refusal is None:
            return reply.content
        if refusal.fault and not self.run.federation.skip_failed_clients:
            raise ClientError(client, refusal.reason)
        return ClientFailure(client, refusal.reason, refusal.empty)

    def exchange(
        self,
        kind: str,
        jobs: Iterable[Job],
        part: Part = "test",
        attach: Attach = lambda job, content: content,
        enough: int = 0,
    ) -> Iterator[tuple[ExpectedReply, Message | str]]:
        """Send all jobs, and yield the reply to each in their order, or the reason why there is none.

        Args:
            kind: Flower's message type.
            jobs: The jobs.
            part: The client's examples that an evaluation is on.
            attach: Adds records to the message of a job.
            enough: The least number of results after which the other clients have `patience` seconds.
        """
        started = time.monotonic()
        requests = [
            (expected_reply(self.run, self.model, job, self.session), self._send(kind, job, part, attach))
            for job in jobs
        ]
        enough = max(enough, self.run.federation.min_updates, -(-len(requests) // 2))
        replies = self.mailbox.fetch([message for _, message in requests], started, enough)
        for (expected, _), reply in zip(requests, replies, strict=True):
            if isinstance(reply, str):
                self.registry.forget(self.nodes[expected.job_id.client])
            yield expected, reply

    def _send(self, kind: str, job: Job, part: Part, attach: Attach) -> str | None:
        void = self.answered.get(job.client, self.start - 1) + 1
        content = messages.encode_job(
            job,
            self.fingerprints(job.params),
            self.session,
            self.config,
            self.base,
            void,
            self.store.commits[0],
            part,
        )
        return self.mailbox.send(attach(job, content), self.nodes[job.client], kind, str(job.round))


def server_app(main: Callable[[Grid, Context], None]) -> ServerApp:
    """Create a Flower server app that runs `main`."""
    app = ServerApp()
    app.main()(main)
    return app
