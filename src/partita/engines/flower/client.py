"""The site's side: it answers each message from its data and its folder.

Flower starts a new process for each message, so nothing stays in memory between messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import safetensors
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from partita.core import serialization, tensors
from partita.core.client import ClientError, Job
from partita.core.own_code import CodeError
from partita.core.plan import Plan
from partita.core.rounds import ClientFailure
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.engines.flower import answered_rounds, messages, secure_site
from partita.engines.flower.data_record import check_data
from partita.engines.flower.fingerprints import Fingerprints
from partita.engines.flower.message_checks import check_reply, check_request, largest_job, valid_scores
from partita.engines.flower.messages import ErrorReply, SiteRequest
from partita.engines.flower.secure_messages import Stage
from partita.engines.flower.site import JobKind, Site
from partita.storage import atomic_files
from partita.storage.client_store import DiskStore

COPY, SESSION, STATES, ANSWERED = "copy.safetensors", "session.json", "states", "answered.json"


def client_app(
    name: Callable[[Context], str],
    site: Callable[[Context], Site],
    failed: Callable[[Exception], None] = lambda error: None,
) -> ClientApp:
    """Create a site's Flower app.

    Args:
        name: Returns the client's name.
        site: Builds the site. This is expensive, so it is called only for jobs, not to report the name.
        failed: Called with the error if a message cannot be answered, before the error reply is made.
    """
    app = ClientApp()

    @app.query()
    def answer_query(message: Message, context: Context) -> Message:
        return _reply(message, lambda: messages.encode_name(name(context)), failed)

    @app.train()
    def answer_train(message: Message, context: Context) -> Message:
        return _reply(message, lambda: train(site(context), message.content), failed)

    @app.evaluate()
    def answer_evaluate(message: Message, context: Context) -> Message:
        return _reply(message, lambda: evaluate(site(context), message.content), failed)

    def answer_stage(stage: Stage, message: Message, context: Context) -> Message:
        return _reply(message, lambda: aggregate_securely(stage, site(context), message.content), failed)

    for stage in secure_site.STAGES:
        app.train(stage)(partial(answer_stage, stage))
    return app


def train(site: Site, content: RecordDict) -> RecordDict:
    """Answer a training job with an update, or with an error reply."""
    if site.run.secure_aggregation:
        raise ClientError(site.client, "was asked for an update in clear, but its experiment has [secure_aggregation]")
    answer = _train(site, content)
    return messages.encode_error(answer) if isinstance(answer, ErrorReply) else messages.encode_update(answer)


def aggregate_securely(stage: Stage, site: Site, content: RecordDict) -> RecordDict:
    """Answer a stage of secure aggregation; in the stage `mask` the site trains."""
    return secure_site.answer(
        stage, site, content, lambda job: _accept(site, job, "train"), lambda job: _train(site, job)
    )


def _train(site: Site, content: RecordDict) -> Update | ErrorReply:
    """Train for a job."""
    request, plan, store = _accept(site, content, "train")
    copy = _read_copy(site, request)
    job = _job(site, request, plan, copy)
    if isinstance(job, ErrorReply):
        return job
    noise, masks = site.run.method.privacy, site.run.secure_aggregation
    if (noise or masks) and not _may_answer(site, store, job):
        reuses = "answering again would reuse its noise, and " if noise else ""
        return ErrorReply(
            f"round {job.round} was already answered for another model; {reuses}the two answers together would reveal "
            f"what {'it hides' if noise else 'one hides; start a run with another seed'}"
        )
    if site.charge is not None:
        try:
            site.charge(job)
        except ValueError:
            logging.getLogger(__name__).exception("the privacy ledger does not allow round %d", job.round)
            # What the site spent on other runs is not the server's business.
            return ErrorReply(f"the privacy ledger of the site does not allow round {job.round}; see the site's log")
    if request.sent:
        # Save the copy before answering: the server assumes that a client holds everything it has answered to. If a
        # power cut damages it, the fingerprint of the next job differs, and the server sends everything again.
        atomic_files.write(site.folder / COPY, serialization.pack({"params": {**copy, **request.sent}}), sync=False)
    [answer] = site.engine(store).train([job])
    if isinstance(answer, ClientFailure):
        return ErrorReply(answer.reason)
    assert isinstance(answer, Update)
    check_reply(answer, plan, site.client)
    return answer


def evaluate(site: Site, content: RecordDict) -> RecordDict:
    """Answer an evaluation job with scores, or with an error reply."""
    request, plan, store = _accept(site, content, "evaluate")
    if site.run.method.privacy and site.run.method.adapt:
        return messages.encode_error(
            ErrorReply(f"{site.run.method.name} adapts to training examples before it is scored, without adding noise")
        )
    if request.part == "validation" and (site.run.method.privacy or site.run.hides_clients):
        return messages.encode_error(ErrorReply("a private run does not report scores on validation examples"))
    job = _job(site, request, plan, _read_copy(site, request))
    if isinstance(job, ErrorReply):
        return messages.encode_error(job)
    scored = dict(site.engine(store).evaluate([job], None if request.part == "test" else request.part))
    return messages.encode_scores(valid_scores(scored.get(site.client, {}), site.evaluator))


def _accept(site: Site, content: RecordDict, kind: JobKind) -> tuple[SiteRequest, Plan, DiskStore]:
    """Return the request, its plan, and the store of this one client. Check everything before changing any file."""
    request = messages.decode_job(content, largest_job(site.model))
    # Hashing a large base takes seconds, so it is done for the first job of a session.
    recorded = answered_rounds.base_in_session(site.folder / SESSION, request.job_id.session)
    base = site.base() if recorded is None else recorded
    done = int(kind == "evaluate")
    plan = check_request(site.run, site.model, site.client, site.config, base, request, done)
    check_data(site.folder, site.client, site.data_digest())
    site.consent(kind, request, plan)
    if answered_rounds.register_job(site.folder / SESSION, request.job_id, base):
        (site.folder / COPY).unlink(missing_ok=True)
    store = DiskStore(site.folder / STATES, site.device)
    store.rewind(request.void)
    # A store keeps what its last two commits need. No server checkpoint is older than `settled`, so commit it twice.
    store.commit(request.settled)
    store.commit(request.settled)
    return request, plan, store


def _may_answer(site: Site, store: DiskStore, job: Job) -> bool:
    state = store.load(site.client, job.round)
    request_fingerprint = answered_rounds.fingerprint(job, state, site.config, len(site.data.train), site.data_digest())
    return answered_rounds.claim(site.answered or site.folder / ANSWERED, job.round, request_fingerprint)


def _read_copy(site: Site, request: SiteRequest) -> Tensors:
    """Return what the site was sent in earlier rounds; nothing if the request replaces all of it."""
    if request.sent.keys() >= site.model.initial.keys():
        return {}
    try:
        return serialization.unpack((site.folder / COPY).read_bytes()).get("params", {})
    except (FileNotFoundError, safetensors.SafetensorError):
        return {}  # the fingerprint check notices what is missing


def _job(site: Site, request: SiteRequest, plan: Plan, copy: Tensors) -> Job | ErrorReply:
    """Return the job with all its parameters, or an error if they differ from the server's."""
    initial, known = site.model.initial, {**copy, **request.sent}
    params = {name: known[name] if name in known else initial[name].cpu() for name in sorted(plan.down)}
    if Fingerprints()(params) != request.fingerprint:
        return ErrorReply(
            "does not hold what it was sent in earlier rounds; the server will resend everything", empty=True
        )
    slots = {slot: tensors.to(part, site.device) for slot, part in request.slots.items()}
    stale, round = frozenset(request.sent), request.job_id.round
    return Job(round, site.client, tensors.to(params, site.device), stale, slots, request.signal)


def _reply(message: Message, work: Callable[[], RecordDict], failed: Callable[[Exception], None]) -> Message:
    """Answer a message. If an error's text might quote data, only its type leaves the site."""
    try:
        content = work()
    except Exception as error:
        failed(error)
        reason = error.reason if isinstance(error, ClientError) else str(error)
        origin = type(error).__module__
        # An error in the user's own code is quoted in a CodeError.
        if origin.startswith(("partita.data.", CodeError.__module__)) or not origin.startswith("partita."):
            logging.getLogger(__name__).exception("this message could not be answered")
            reason = f"failed with {type(error).__name__}; see the log of its SuperNode"
        content = messages.encode_error(ErrorReply(reason, fault=True))
    return Message(messages.with_job_id(content, message.content), reply_to=message)
