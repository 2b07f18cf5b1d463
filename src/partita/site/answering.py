"""A site's answer to one message: it is checked before the work and before it leaves, and logged in between."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from flwr.app import Message

from partita.core.client import ClientError
from partita.core.plan import Plan
from partita.engines.flower import messages
from partita.engines.flower.client import client_app
from partita.engines.flower.messages import ErrorReply, MessageError, SiteRequest, printable_line
from partita.engines.flower.outgoing import Outgoing, read_reply, refusal
from partita.engines.flower.site import JobKind, Site
from partita.engines.flower.task_loop import ANSWERED, Task
from partita.site.config import SiteConfig
from partita.site.consent import LEFT, History, JobConsent, Refusal
from partita.site.own_experiment import CodeRefused, open_own_site
from partita.site.policy import Policy, load_policy, policy_digest
from partita.site.site_log import FILE, SiteLog

# All that a server is told, whether the policy, a check of the message or an error is the reason.
REASON = "this site's policy does not allow this job, or the job failed; the site's log says why"
MASK = "train.mask"  # the stage of secure aggregation in which the masked update leaves; others send keys and shares
NAMED = 30  # most names in a line of the log; of more, it has the number and a digest


def site_log(site: SiteConfig) -> SiteLog:
    """Return the log of a site."""
    return SiteLog(site.state_folder / FILE)


def answer(site: SiteConfig, task: Task, now: Callable[[], datetime] = datetime.now) -> Message:
    """Return the reply to a message. It is in the log before this function returns.

    The app that came with the message, and the run config, are not used.

    Args:
        site: The site's settings.
        task: The message.
        now: Returns the local time.

    Raises:
        LogError: If the log is damaged. Then nothing leaves.
        DiskError: If the log cannot be written. Then nothing leaves.
    """
    return _Answering(site, task, now).reply()


@dataclass
class _Answering:
    site: SiteConfig
    task: Task
    now: Callable[[], datetime]
    consent: JobConsent | None = None  # of the job's experiment
    plan: Plan | None = None  # of the job, computed here
    number: int = 0  # its round
    error: Exception | None = None  # why the job was not answered
    about: dict[str, Any] = field(default_factory=dict)  # what every line of the log says

    def __post_init__(self) -> None:
        self.log = site_log(self.site)
        self.history = History(self.log.lines())  # nothing is answered over a damaged log

    def reply(self) -> Message:
        message = self.task.message
        self.about = {"app": self.task.app, **_job_in(message)}
        try:
            self.about["policy"] = policy_digest(self.site.policy_file)
            policy = load_policy(self.site.policy_file)
            self._check_task()
            app = client_app(lambda _: self.site.name, lambda _: self._open(policy), self._failed)
            reply = app(message, self.task.context)
            outgoing = read_reply(reply.content)
            if outgoing.error is None:
                self._release(outgoing)
                return reply
            error, reason = outgoing.error, outgoing.error.reason
        except Exception as unexpected:
            self._failed(unexpected)
            error, reason = ErrorReply("", fault=True), _reason(unexpected)
        refused = self.error is None or isinstance(self.error, ClientError | MessageError | CodeRefused)
        self.log.append("refused" if refused else "failed", reason=reason, **self.about)
        print(f"{'refused' if refused else 'failed'}: {reason}", file=sys.stderr, flush=True)
        return refusal(message, REASON, error)

    def _check_task(self) -> None:
        if self.task.kind != ANSWERED:
            kind = printable_line(self.task.kind)
            raise Refusal(self.site.name, f"the server asks for a task of type '{kind}'; a site only answers messages")

    def _failed(self, error: Exception) -> None:
        self.error = error

    def _open(self, policy: Policy) -> Site:
        """Build the site from its own files. The run config of the message has no part in it."""
        site, terms = open_own_site(self.site, policy)
        self.about["experiment"] = terms.digest
        self.consent = JobConsent(policy, terms, self.history, self.now)
        return replace(site, consent=self._decide)

    def _decide(self, kind: JobKind, request: SiteRequest, plan: Plan) -> None:
        assert self.consent is not None
        self.plan, self.number = plan, request.job_id.round
        self.consent(kind, request, plan)

    def _release(self, outgoing: Outgoing) -> None:
        """Check what is about to leave, and write it to the log."""
        found = {"numbers": list(outgoing.numbers), "digest": outgoing.digest, **self.about}
        if outgoing.kind == "name":
            self.log.append("name", **found)
            return
        if outgoing.kind == "stage" and self.consent is not None and self.about["asked"] != MASK:
            self.consent.check_standing()
            self.log.append("keys", bytes=outgoing.bytes, **found)
            return
        if self.consent is None or self.plan is None:
            raise Refusal(self.site.name, f"the reply holds {outgoing.kind}, but no job was accepted")
        if outgoing.kind == "scores":
            self.consent.check_scores()
            self.log.append("scores", **found)
            return
        if outgoing.kind == "stage":
            # The names are those of the plan. Masks differ in each session, but a round has one update.
            identity = hashlib.sha256(f"masked update of round {self.about['round']}".encode()).hexdigest()
            outgoing = replace(outgoing, names=self.plan.up, tensors=identity)
        cost = self.consent.check_update(outgoing, self.plan, self.number)
        roles = {role: len(names) for role, names in self.consent.terms.by_role(outgoing.names).items()}
        what = {"bytes": outgoing.bytes, "tensors": outgoing.tensors, "roles": roles, "names": _names(outgoing.names)}
        self.log.append(LEFT, **found, **what, **cost)


def _names(names: Iterable[str]) -> object:
    names = sorted(names)
    if len(names) <= NAMED:
        return names
    return {"count": len(names), "sha256": hashlib.sha256("\n".join(names).encode()).hexdigest()}


def _job_in(message: Message) -> dict[str, Any]:
    """Return round and session of a message, as far as they can be read. The server chose them."""
    about = {"asked": printable_line(message.metadata.message_type)}
    try:
        job_id = messages.decode_job_id(message.content, "job")
    except (MessageError, ValueError):
        return about
    return {**about, "round": job_id.round, "session": printable_line(job_id.session)}


def _reason(error: Exception) -> str:
    """Return an error's text if partita wrote it. Other texts might quote data, and people read the log."""
    if isinstance(error, ClientError):
        return printable_line(error.reason)
    origin = type(error).__module__
    if origin.startswith("partita.") and not origin.startswith("partita.data."):
        return printable_line(error)
    return f"failed with {type(error).__name__}"
