"""Secure aggregation on one machine: every client's side of the protocol runs for real, in memory."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from partita.core.client import ClientError, Job
from partita.core.data import EvaluateOn
from partita.core.model import Model
from partita.core.rounds import ClientFailure, Engine, Reply
from partita.core.settings import Run, RunError
from partita.core.update import MaskedUpdate, SecureSum, Update
from partita.engines import secure_setup
from partita.secure_aggregation.client import SecureClient
from partita.secure_aggregation.encoding import ProtocolError, TooFewClients
from partita.secure_aggregation.round_setup import RoundSetup
from partita.secure_aggregation.server import SecureServer

# Who drops out follows from the seed here, so a resumed run has the same sums and may draw the same noise.


class SecureEngine:
    """An engine whose clients mask their updates. A client that drops out does so after it shared its keys.

    Args:
        engine: The engine of this machine that trains the clients.
        run: The run, with `secure_aggregation`.
        model: The model.
    """

    def __init__(self, engine: Engine, run: Run, model: Model) -> None:
        self.engine, self.run, self.model = engine, run, model
        self.session = secrets.token_bytes(16)

    def clients(self) -> Sequence[str]:
        return self.engine.clients()

    def evaluate(self, jobs: Iterable[Job], on: EvaluateOn = None) -> Iterator[tuple[str, dict[str, float]]]:
        return self.engine.evaluate(jobs, on)

    def train(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Yield the reply of each client, and at last what the server learns of the round."""
        asked = list(jobs)  # the keys of all come first; jobs hold the server's own tensors, so they take no memory
        secure_setup.check_cohort(self.run, self.model, asked)
        setup = secure_setup.round_setup(self.run, self.model, asked[0], len(asked), self.session)
        protocol = _Protocol(self.run, setup, [job.client for job in asked])
        for reply in self.engine.train(asked):
            yield protocol.mask(reply)
        yield protocol.finish(asked[0].params)


class _Protocol:
    """Both sides of one round, with the time that each takes."""

    def __init__(self, run: Run, setup: RoundSetup, names: Sequence[str]) -> None:
        self.run, self.setup = run, setup
        self.server, self.clients = SecureServer(setup), {name: SecureClient(setup, name) for name in names}
        self.seconds = {"clients": 0.0, "server": 0.0}
        for name, client in self.clients.items():
            with self._timed("clients"):
                keys = client.advertise()
            with self._timed("server"):
                self.server.add_advertisement(name, keys)
        for name, client in self.clients.items():
            with self._timed("server"):
                roster = self.server.roster()
            with self._timed("clients"):
                shares = client.share_keys(roster)
            with self._timed("server"):
                self.server.add_shares(name, shares)
        for name, client in self.clients.items():
            with self._timed("server"):
                inbox = self.server.inbox(name)
            with self._timed("clients"):
                report = client.check(inbox)
            with self._timed("server"):
                self.server.add_checked(name, report)

    def mask(self, reply: Reply) -> MaskedUpdate | ClientFailure:
        """Pass the update of a client on in masked form."""
        if isinstance(reply, ClientFailure):
            return reply
        if not isinstance(reply, Update):
            raise RunError(f"the engine returns a {type(reply).__name__}, which is not an update to mask")
        name = reply.client
        with self._timed("server"):
            lists = self.server.present()
        if reason := self.server.expelled.get(name):
            return self._lost(name, reason)
        try:
            with self._timed("clients"):
                vector = secure_setup.encode(self.run, self.setup, reply, secure_setup.ONE_SUM)
                masked = self.clients[name].mask(lists, vector)
        except ProtocolError as error:
            return self._lost(name, str(error))
        with self._timed("server"):
            self.server.add_masked(name, masked)
        return MaskedUpdate(name)

    def finish(self, like: Mapping[str, torch.Tensor]) -> SecureSum:
        """Unmask the sum."""
        failure = None
        try:
            for name in self.server.survivors:
                with self._timed("server"):
                    lists = self.server.lists()
                with self._timed("clients"):
                    signature = self.clients[name].confirm(lists)
                with self._timed("server"):
                    self.server.add_confirmed(name, signature)
            for name in self.server.survivors:
                with self._timed("server"):
                    signatures = self.server.signatures()
                with self._timed("clients"):
                    shares = self.clients[name].unmask(signatures)
                try:
                    with self._timed("server"):
                        self.server.add_unmasked(name, shares)
                except ProtocolError as error:
                    self._lost(name, str(error))  # the right shares of others are enough
        except TooFewClients as error:
            failure = str(error)
        return secure_setup.finish(self.run, self.setup, self.server, like, self.seconds, failure)

    def _lost(self, client: str, reason: str) -> ClientFailure:
        if not self.run.federation.skip_failed_clients:
            raise ClientError(client, reason)
        return ClientFailure(client, reason)

    @contextmanager
    def _timed(self, side: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[side] += time.perf_counter() - started
