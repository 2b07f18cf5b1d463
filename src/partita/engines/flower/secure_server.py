"""The server's side of secure aggregation: the six stages of a round as six exchanges of messages.

The job travels with the fourth exchange, so a round has five exchanges more than one in clear. A client that does not
answer a stage is not asked for the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from flwr.app import Message, MessageType, RecordDict

from partita.core.client import ClientError, Job
from partita.core.model import Model
from partita.core.rounds import ClientFailure, Reply
from partita.core.settings import Run
from partita.core.update import MaskedUpdate, SecureSum
from partita.engines import secure_setup
from partita.engines.flower import secure_messages
from partita.engines.flower.message_checks import MAX_ENTRY_BYTES, ExpectedReply
from partita.engines.flower.messages import MessageError
from partita.engines.flower.secure_messages import Stage
from partita.secure_aggregation.encoding import MAX_NAME, ProtocolError, TooFewClients
from partita.secure_aggregation.neighbors import threshold_of
from partita.secure_aggregation.server import SecureServer
from partita.secure_aggregation.signatures import ssh_verifier

_log = logging.getLogger(__name__)


class Carrier(Protocol):
    """What carries the messages of a round: the server's engine."""

    run: Run
    model: Model
    session: str
    config: str
    base: str
    answered: dict[str, int]

    def exchange(
        self, kind: str, jobs: Iterable[Job], *, attach: Callable[[Job, RecordDict], RecordDict], enough: int
    ) -> Iterator[tuple[ExpectedReply, Message | str]]:
        """Send all jobs, and yield the reply to each, or the reason why there is none."""

    def content_of(self, expected: ExpectedReply, reply: Message | str) -> RecordDict | ClientFailure:
        """Return the records of a reply, or why there are none."""

    def unusable(self, expected: ExpectedReply, error: MessageError) -> ClientFailure:
        """Return the failure of a client whose reply cannot be used."""


def train_securely(engine: Carrier, jobs: Iterable[Job]) -> Iterator[Reply]:
    """Train the jobs, and yield the reply of each client and at last what the server learns of the round."""
    asked = list(jobs)  # the keys of all come first
    yield from SecureExchange(engine, asked).run()


class SecureExchange:
    """One round.

    Args:
        engine: The server's engine.
        jobs: The jobs of all clients of the cohort.
    """

    def __init__(self, engine: Carrier, jobs: Sequence[Job]) -> None:
        self.engine, self.jobs = engine, {job.client: job for job in jobs}
        secure_setup.check_cohort(engine.run, engine.model, jobs)
        session = secure_messages.round_id(engine.session, engine.config, engine.base)
        self.setup = secure_setup.round_setup(engine.run, engine.model, jobs[0], len(jobs), session)
        signers = self.setup.settings.signers
        self.server = SecureServer(self.setup, None if signers is None else ssh_verifier(signers))
        self.seconds = {"server": 0.0}

    def run(self) -> Iterator[Reply]:
        """Yield the replies of the engine."""
        left, failure = list(self.jobs), None
        stages: list[tuple[Stage, Callable[[str], bytes], Callable[[str, bytes], None]]] = [
            ("advertise", lambda client: b"", self.server.add_advertisement),
            ("share_keys", lambda client: self.server.roster(), self.server.add_shares),
            ("check", self.server.inbox, self.server.add_checked),
            ("mask", lambda client: self.server.present(), self.server.add_masked),
        ]
        for stage, message, add in stages:
            try:
                messages = {client: message(client) for client in left}
            except TooFewClients as error:
                failure = str(error)
                yield from (
                    ClientFailure(
                        client, self.server.expelled.get(client, "was ready when too few others were"), refused=True
                    )
                    for client in left
                )
                break
            if stage == "mask":
                yield from self._expelled(messages)
            left = []
            for client, lost in self._exchange(stage, messages, add):
                if lost:
                    yield lost
                elif stage == "mask":
                    self.engine.answered[client] = self.jobs[client].round
                    yield MaskedUpdate(client)
                else:
                    left.append(client)
        yield self._finish(failure)

    def _expelled(self, messages: dict[str, bytes]) -> Iterator[ClientFailure]:
        """Take those out of the messages whose shares others cannot use, and yield them."""
        for said in self.server.disputes.values():
            _log.warning("%s; one of the two is wrong", said)
        for client, reason in self.server.expelled.items():
            if not self.engine.run.federation.skip_failed_clients:
                raise ClientError(client, reason)
            del messages[client]
            yield ClientFailure(client, reason, refused=True)

    def _finish(self, failure: str | None) -> SecureSum:
        """Let those whose vector arrived confirm the same sum, ask them for their shares, and unmask it."""
        if failure is None:
            stages: list[tuple[Stage, Callable[[], bytes], Callable[[str, bytes], None]]] = [
                ("confirm", self.server.lists, self.server.add_confirmed),
                ("unmask", self.server.signatures, self.server.add_unmasked),
            ]
            left = list(self.server.survivors)
            try:
                for stage, message, add in stages:
                    messages, left = {client: message() for client in left}, []
                    for client, lost in self._exchange(stage, messages, add):
                        if lost:  # its update is in the sum all the same
                            _log.warning("client '%s' did not help to unmask the sum: %s", client, lost.reason)
                        else:
                            left.append(client)
            except TooFewClients as error:
                failure = str(error)
        like = next(iter(self.jobs.values())).params
        return secure_setup.finish(self.engine.run, self.setup, self.server, like, self.seconds, failure)

    def _exchange(
        self, stage: Stage, messages: dict[str, bytes], add: Callable[[str, bytes], None]
    ) -> Iterator[tuple[str, ClientFailure | None]]:
        """Send each client its message and add the answers; yield each client, and why it is lost if it is."""
        started, count = time.monotonic(), len(self.jobs)
        jobs = [self.jobs[client] for client in messages]
        if stage != "mask":  # the model travels once
            jobs = [replace(job, params={}, stale=frozenset(), slots={}) for job in jobs]
        replies = self.engine.exchange(
            f"{MessageType.TRAIN}.{stage}",
            jobs,
            attach=lambda job, content: secure_messages.encode_request(content, messages[job.client], count),
            # Patience is for slow training. In the stages before it, it would only make the round fail more easily.
            enough=threshold_of(self.setup.settings, count) if stage in ("mask", "unmask") else len(jobs),
        )
        for expected, reply in replies:
            yield expected.job_id.client, self._add(stage, expected, reply, add)
        self.seconds[stage] = time.monotonic() - started

    def _add(
        self, stage: Stage, expected: ExpectedReply, reply: Message | str, add: Callable[[str, bytes], None]
    ) -> ClientFailure | None:
        try:
            content = self.engine.content_of(expected, reply)
            if isinstance(content, ClientFailure):
                return content
            data = secure_messages.decode_reply(content, self._limit(stage))
            started = time.perf_counter()
            try:
                add(expected.job_id.client, data)
            except ProtocolError as error:
                raise MessageError(str(error)) from error
            self.seconds["server"] += time.perf_counter() - started
        except MessageError as error:
            return self.engine.unusable(expected, error)
        return None

    def _limit(self, stage: Stage) -> int:
        """Return the maximum bytes of an honest answer."""
        if stage == "mask":
            return self.setup.layout.length * self.setup.dtype.itemsize + MAX_ENTRY_BYTES
        return (MAX_NAME + MAX_ENTRY_BYTES) * (1 if stage == "advertise" else len(self.jobs))
