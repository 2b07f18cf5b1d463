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

from partita.core import files, tree, wire
from partita.core.learn import ClientFault, Job
from partita.core.model import ClientData, Model
from partita.core.plan import Turn, plan_for
from partita.core.rounds import Lost
from partita.core.run import Run
from partita.core.store import Disk
from partita.core.tree import Tensors
from partita.engines.embedded import Embedded
from partita.engines.faults import Faults
from partita.engines.flower import messages
from partita.engines.flower.messages import Order, Refusal
from partita.engines.flower.seals import Seals
from partita.evaluate import Measure

COPY, SESSION, STATES = "copy.safetensors", "session", "states"


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
    order, engine, held, job = _enter(site, content)
    if isinstance(job, Refusal):
        return messages.of_refusal(job)
    if order.sent:
        # Before the answer: what a client answered to, the server takes it to hold.
        files.write(site.folder / COPY, wire.pack({"params": {**held, **order.sent}}))
    [answer] = engine.train([job])
    if isinstance(answer, Lost):
        return messages.of_refusal(Refusal(answer.reason))
    return messages.of_update(answer)


def evaluate(site: Site, content: RecordDict) -> RecordDict:
    _, engine, _, job = _enter(site, content)
    if isinstance(job, Refusal):
        return messages.of_refusal(job)
    [(_, scores)] = engine.evaluate([job])
    return messages.of_scores(scores)


def _enter(site: Site, content: RecordDict) -> tuple[Order, Embedded, Tensors, Job | Refusal]:
    """What is asked, the engine of this one client, what it holds of the server's parameters, and the job."""
    order = messages.to_order(content)
    if order.client != site.client:
        raise ClientFault(order.client, f"this site is '{site.client}'; look at the node config of both")
    store, seen = Disk(site.folder / STATES, site.device), site.folder / SESSION
    store.rewind(order.void)
    # A store keeps what its last two checkpoints need; behind both of the server's lies what is settled.
    store.commit(order.settled)
    store.commit(order.settled)
    if not seen.exists() or seen.read_text() != order.session:
        (site.folder / COPY).unlink(missing_ok=True)
        files.write(seen, order.session.encode())
    engine = Embedded(
        site.run, site.model, site, device=site.device, store=store, faults=site.faults, measure=site.measure
    )
    held = _held(site.folder / COPY)
    return order, engine, held, _job(site, order, held)


def _held(path: Path) -> Tensors:
    try:
        return wire.unpack(path.read_bytes()).get("params", {})
    except (FileNotFoundError, safetensors.SafetensorError):
        return {}  # the seal finds out what is missing


def _job(site: Site, order: Order, held: Tensors) -> Job | Refusal:
    """The job with all its parameters, if they are those that the server means."""
    initial = site.model.initial
    for name, value in order.sent.items():
        if name not in initial or initial[name].shape != value.shape:
            here = f"is {tuple(initial[name].shape)}" if name in initial else "does not exist"
            raise ClientFault(
                site.client,
                f"the server's '{name}' is {tuple(value.shape)} and here it {here}; are model and classes the same?",
            )
    turn = Turn(order.round, site.run.rounds, site.client, order.signal)
    down = plan_for(site.run.method.plan, site.model, turn).down
    known = {**held, **order.sent}
    params = {name: known[name] if name in known else initial[name].cpu() for name in sorted(down)}
    if Seals()(params) != order.seal:
        return Refusal("does not hold what it was sent in earlier rounds; it is sent everything anew", empty=True)
    slots = {slot: tree.to(part, site.device) for slot, part in order.slots.items()}
    stale = frozenset(order.sent)
    return Job(order.round, site.client, tree.to(params, site.device), stale, slots, order.signal)


def _reply(message: Message, work: Callable[[], RecordDict]) -> Message:
    """Of an error that partita did not write only the kind leaves the site: its words might quote data."""
    try:
        content = work()
    except Exception as error:
        reason = error.reason if isinstance(error, ClientFault) else str(error)
        if not type(error).__module__.startswith("partita."):
            logging.getLogger(__name__).exception("this message could not be answered")
            reason = f"failed with {type(error).__name__}; the log of its SuperNode says more"
        content = messages.of_refusal(Refusal(reason, fault=True))
    return Message(content, reply_to=message)
