"""A site's side: every message is answered from the site's data and from what its folder holds.

Flower starts a fresh process for each message, so nothing is kept in memory between two of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from partita.core import atomic_files, serialization, tensors
from partita.core.client import ClientFault, Job
from partita.core.client_store import Disk
from partita.core.data import ClientData
from partita.core.model import Model
from partita.core.plan import Plan
from partita.core.rounds import Lost
from partita.core.settings import Run
from partita.core.tensors import Tensors
from partita.engines.availability import Faults
from partita.engines.flower import answered_rounds, messages
from partita.engines.flower.fingerprints import Seals
from partita.engines.flower.message_checks import check_order, check_reply, presentable
from partita.engines.flower.messages import Order, Refusal
from partita.engines.simulation import Embedded
from partita.evaluation import Measure

COPY, SESSION, STATES, ANSWERED = "copy.safetensors", "session.json", "states", "answered.json"


@dataclass(frozen=True)
class Site:
    """One client, its data, and the folder where it keeps its state and its copy of what it was sent."""

    run: Run
    model: Model
    client: str
    data: ClientData
    folder: Path
    faults: Faults
    device: torch.device
    measure: Measure
    config: str = ""  # the digest of the config that server and sites share
    answered: Path | None = None  # the rounds for which noise was drawn by this site's secret; None: in the folder

    @property
    def clients(self) -> tuple[str, ...]:
        return (self.client,)

    def __getitem__(self, client: str) -> ClientData:
        return self.data


def client_app(name: Callable[[Context], str], site: Callable[[Context], Site]) -> ClientApp:
    """`site` is costly, so it is called for jobs alone; to say who is here, the name is enough."""
    app = ClientApp()

    @app.query()
    def meet(message: Message, context: Context) -> Message:
        return _reply(message, lambda: messages.of_name(name(context)))

    @app.train()
    def learn(message: Message, context: Context) -> Message:
        return _reply(message, lambda: train(site(context), message.content))

    @app.evaluate()
    def judge(message: Message, context: Context) -> Message:
        return _reply(message, lambda: evaluate(site(context), message.content))

    return app


def train(site: Site, content: RecordDict) -> RecordDict:
    order, plan, engine = _enter(site, content, done=0)
    held = _held(site.folder / COPY)
    job = _job(site, order, plan, held)
    if isinstance(job, Refusal):
        return messages.of_refusal(job)
    if site.run.method.privacy and not _may_answer(site, engine, job):
        return messages.of_refusal(
            Refusal(
                f"round {job.round} was already answered for another model; answering again would reuse its noise, and "
                "two answers would show what it hides"
            )
        )
    if order.sent:
        # Before the answer: what a client answered to, the server takes it to hold.
        atomic_files.write(site.folder / COPY, serialization.pack({"params": {**held, **order.sent}}))
    [answer] = engine.train([job])
    if isinstance(answer, Lost):
        return messages.of_refusal(Refusal(answer.reason))
    check_reply(answer, plan, site.client)
    return messages.of_update(answer)


def evaluate(site: Site, content: RecordDict) -> RecordDict:
    order, plan, engine = _enter(site, content, done=1)
    if site.run.method.privacy and site.run.method.adapt:
        return messages.of_refusal(
            Refusal(
                f"{site.run.method.name} adapts to training examples before it is scored, and adds no noise to that"
            )
        )
    job = _job(site, order, plan, _held(site.folder / COPY))
    if isinstance(job, Refusal):
        return messages.of_refusal(job)
    [(_, scores)] = engine.evaluate([job])
    return messages.of_scores({name: value for name, value in scores.items() if presentable(name, value)})


def _enter(site: Site, content: RecordDict, done: int) -> tuple[Order, Plan, Embedded]:
    """What is asked, the plan for it, and the engine of this one client. Nothing is touched before all is checked."""
    order = messages.to_order(content)
    plan = check_order(site.run, site.model, site.client, site.config, order, done)
    if answered_rounds.enter(site.folder / SESSION, order.ticket):
        (site.folder / COPY).unlink(missing_ok=True)
    store = Disk(site.folder / STATES, site.device)
    store.rewind(order.void)
    # A store keeps what its last two checkpoints need; behind both of the server's lies what is settled.
    store.commit(order.settled)
    store.commit(order.settled)
    engine = Embedded(
        site.run, site.model, site, device=site.device, store=store, faults=site.faults, measure=site.measure
    )
    return order, plan, engine


def _may_answer(site: Site, engine: Embedded, job: Job) -> bool:
    state = engine.store.load(site.client, job.round)
    asked = answered_rounds.fingerprint(job, state, site.config, len(site.data.train))
    return answered_rounds.claim(site.answered or site.folder / ANSWERED, job.round, asked)


def _held(path: Path) -> Tensors:
    try:
        return serialization.unpack(path.read_bytes()).get("params", {})
    except (FileNotFoundError, safetensors.SafetensorError):
        return {}  # the seal finds out what is missing


def _job(site: Site, order: Order, plan: Plan, held: Tensors) -> Job | Refusal:
    """The job with all its parameters, if they are those that the server means."""
    initial, known = site.model.initial, {**held, **order.sent}
    params = {name: known[name] if name in known else initial[name].cpu() for name in sorted(plan.down)}
    if Seals()(params) != order.seal:
        return Refusal("does not hold what it was sent in earlier rounds; it is sent everything anew", empty=True)
    slots = {slot: tensors.to(part, site.device) for slot, part in order.slots.items()}
    stale, round = frozenset(order.sent), order.ticket.round
    return Job(round, site.client, tensors.to(params, site.device), stale, slots, order.signal)


def _reply(message: Message, work: Callable[[], RecordDict]) -> Message:
    """Only the kind of an error leaves the site where its text might quote data."""
    try:
        content = work()
    except Exception as error:
        reason = error.reason if isinstance(error, ClientFault) else str(error)
        origin = type(error).__module__
        if origin.startswith("partita.data.") or not origin.startswith("partita."):
            logging.getLogger(__name__).exception("this message could not be answered")
            reason = f"failed with {type(error).__name__}; the log of its SuperNode says more"
        content = messages.of_refusal(Refusal(reason, fault=True))
    return Message(messages.stamped(content, message.content), reply_to=message)
