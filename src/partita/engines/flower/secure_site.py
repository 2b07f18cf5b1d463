"""The site's side of secure aggregation. Each stage is a message, and so a new process.

The secrets of a round are in a file that only its owner can read. The file is replaced before each answer leaves, and
the secrets are gone from it after the last stage. A site checks everything by itself: it does not trust the server.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from flwr.app import RecordDict

from partita.core.client import ClientError, Job
from partita.core.plan import RoundInfo, plan_for
from partita.core.rounds import initial_server
from partita.core.tensors import restrict_slots
from partita.core.update import Update
from partita.engines import secure_setup
from partita.engines.flower import answered_rounds, messages, secure_messages
from partita.engines.flower.message_checks import largest_job
from partita.engines.flower.messages import ErrorReply, SiteRequest, printable_line
from partita.engines.flower.secure_messages import Stage
from partita.engines.flower.site import Site
from partita.engines.flower.site_files import lock, read_record
from partita.secure_aggregation.client import SecureClient
from partita.secure_aggregation.eligibility import check_plans
from partita.secure_aggregation.fixed_point import OutOfRange
from partita.secure_aggregation.messages import Sign, Verify, read_roster
from partita.secure_aggregation.round_setup import RoundSetup
from partita.secure_aggregation.signatures import ssh_signer, ssh_verifier
from partita.storage import atomic_files

STAGES: tuple[Stage, ...] = get_args(Stage)
ROUND, UNMASKED = "secure_round.json", "unmasked.json"
_log = logging.getLogger(__name__)

Accept = Callable[[RecordDict], object]  # checks a job and records it; raises an error if the site refuses it
Train = Callable[[RecordDict], Update | ErrorReply]


def answer(stage: Stage, site: Site, content: RecordDict, accept: Accept, train: Train) -> RecordDict:
    """Answer a stage of secure aggregation.

    Args:
        stage: The stage.
        site: The site.
        content: The server's message.
        accept: Checks and records a job.
        train: Checks and records a job, and trains.

    Raises:
        ClientError: If the site refuses.
        ProtocolError: If the message breaks the protocol.
    """
    if site.run.secure_aggregation is None:
        raise ClientError(
            site.client, "was asked to aggregate securely, but its experiment has no [secure_aggregation]"
        )
    order, data, clients = secure_messages.decode_request(content)
    request = messages.decode_job(order, largest_job(site.model))
    if stage == "advertise":
        accept(order)
        return _begin(site, request, clients)
    _check_current(site, request)  # before the lock, which creates a file
    with lock(site.folder / ROUND):
        secure = SecureRound(site, _check_current(site, request))
        if STAGES[secure.client.stage] != stage:
            raise ClientError(site.client, f"was asked to '{stage}' twice or too early; each stage happens once")
        if stage == "share_keys":
            reply = secure.share_keys(data)
        elif stage == "check":
            reply = secure.client.check(data, secure.sign())
        elif stage == "confirm":
            reply = secure.confirm(data)
        elif stage == "unmask":
            reply = secure.unmask(data)
        else:
            update = train(order)
            if isinstance(update, ErrorReply):
                return messages.encode_error(update)
            reply = secure.mask(data, update)
        secure.save()
        return secure_messages.encode_reply(reply)


def _begin(site: Site, request: SiteRequest, clients: int) -> RecordDict:
    """Start a round with new secrets, in place of those of an earlier round."""
    if not 0 < clients <= len(site.peers):
        raise ClientError(
            site.client, f"was sent a cohort of {clients} clients, but the experiment has {len(site.peers)}"
        )
    about = {"session": request.job_id.session, "round": request.job_id.round, "base": request.base}
    with lock(site.folder / ROUND):
        if _is_current(read_record(site.folder / ROUND), request):
            raise ClientError(
                site.client, f"advertised keys for round {request.job_id.round} already; this is an old message"
            )
        secure = SecureRound(site, {**about, "clients": clients, "signal": dict(request.signal)})
        keys = secure.advertise()
        secure.save()
    return secure_messages.encode_reply(keys)


def _is_current(record: dict[str, Any] | None, request: SiteRequest) -> bool:
    job_id = request.job_id
    return record is not None and (record["session"], record["round"]) == (job_id.session, job_id.round)


def _check_current(site: Site, request: SiteRequest) -> dict[str, Any]:
    """Return the record of the round, which the first stage has made and which is not over."""
    record = read_record(site.folder / ROUND)
    if record is None or request.job_id.client != site.client or not _is_current(record, request):
        raise ClientError(
            site.client,
            f"has no keys for round {request.job_id.round} of this session; this is an old message, or one for another "
            "site",
        )
    if not record["state"]:
        raise ClientError(site.client, f"has finished round {request.job_id.round}; each stage happens once")
    return record


@dataclass
class SecureRound:
    """A round at a site: its record in the site's folder, and the client's side of the protocol.

    Attributes:
        site: The site.
        record: What the file holds: session, round, base, size of the cohort, signal, and the client's state.
    """

    site: Site
    record: dict[str, Any]

    def __post_init__(self) -> None:
        state = self.record.get("state")
        setup = self._setup()
        self.client = (
            SecureClient.from_bytes(setup, bytes.fromhex(state)) if state else SecureClient(setup, self.site.client)
        )

    def save(self) -> None:
        """Write the client's new state. After the last stage there is none."""
        done = self.client.stage == len(STAGES)
        record = {**self.record, "state": "" if done else self.client.to_bytes().hex()}
        atomic_files.write(self.site.folder / ROUND, json.dumps(record).encode(), mode=0o600)

    def advertise(self) -> bytes:
        """Return the client's public keys, signed if the experiment lists the clients' long-term keys."""
        sign, verify = self.sign(), self._verify()
        if sign and verify and not verify(self.site.client, b"", sign(b"")):
            raise ClientError(self.site.client, "its private key is not the one in secure_aggregation.signers")
        return self.client.advertise(sign)

    def share_keys(self, roster: bytes) -> bytes:
        """Check who takes part, and return sealed shares of the client's secrets."""
        run, round, names = self.site.run, self.record["round"], read_roster(roster).keys()
        if strangers := names - set(self.site.peers):
            raise ClientError(
                self.site.client,
                f"was sent keys of '{printable_line(min(strangers))}', which is not a client of the experiment",
            )
        infos = {name: RoundInfo(round, run.rounds, name, self.record["signal"]) for name in sorted(names)}
        check_plans(run, round, ((name, plan_for(run.method.plan, self.site.model, infos[name])) for name in infos))
        return self.client.share_keys(roster, self._verify())

    def mask(self, lists: bytes, update: Update) -> bytes:
        """Return the masked update."""
        try:
            # A site never confirms another sum of the round. Equal noise makes a round that is started again the same
            # sum, which reveals nothing more.
            vector = secure_setup.encode(self.site.run, self.client.setup, update, secure_setup.ONE_SUM)
        except OutOfRange as error:
            # The text quotes a number of the update, which the server must not learn.
            _log.warning("the update of this round cannot be masked: %s", error)
            raise ClientError(
                self.site.client, "a number of its update is out of range; see the log of its SuperNode"
            ) from None
        return self.client.mask(lists, vector)

    def confirm(self, lists: bytes) -> bytes:
        """Check and sign who is in the sum, and never another sum of this round.

        Training repeats exactly if a server starts again and asks for a round again. If one sum had a client and the
        other not, their difference would be the update of that client. Two confirmed sums of the same clients have an
        honest client in common that signed both lists, so they are the same.
        """
        signature = self.client.confirm(lists, self.sign())
        digest = hashlib.sha256(json.dumps(self.client.survivors).encode()).hexdigest()
        if not answered_rounds.claim(self.site.folder / UNMASKED, self.record["round"], digest):
            raise ClientError(
                self.site.client,
                f"has confirmed round {self.record['round']} for other clients before; two sums of a round would "
                "reveal the update of a client that is in one of them. Continue when the same clients take part, or "
                "start a run with another seed",
            )
        return signature

    def unmask(self, signatures: bytes) -> bytes:
        """Return the shares that unmask the sum that enough sites confirmed."""
        return self.client.unmask(signatures, self._verify())

    def sign(self) -> Sign | None:
        """Return the function that signs with the site's key; None if the experiment lists no keys."""
        if self.client.setup.settings.signers is None:
            return None
        if self.site.key is None:
            raise ClientError(
                self.site.client,
                "the experiment has secure_aggregation.signers, but the site has no private key; add key=PATH to its "
                "node config",
            )
        return ssh_signer(self.site.key)

    def _verify(self) -> Verify | None:
        signers = self.client.setup.settings.signers
        return None if signers is None else ssh_verifier(signers)

    def _setup(self) -> RoundSetup:
        site, record = self.site, self.record
        rule, round, signal = site.run.method.server_rule, record["round"], record["signal"]
        plan = plan_for(site.run.method.plan, site.model, RoundInfo(round, site.run.rounds, site.client, signal))
        params, slots = rule.send(initial_server(site.run, site.model), site.client, plan.down)
        job = Job(round, site.client, params, frozenset(), restrict_slots(slots, plan.train), signal)
        session = secure_messages.round_id(record["session"], site.config, record["base"])
        return secure_setup.round_setup(site.run, site.model, job, record["clients"], session)
