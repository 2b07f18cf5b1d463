"""What each side accepts of the other. Nobody here trusts that the other side runs partita."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from partita.core import tensors
from partita.core.client import ClientFault, Job
from partita.core.method import Update
from partita.core.model import Model
from partita.core.plan import Plan, Turn, plan_for
from partita.core.rounds import ask, begin
from partita.core.settings import Run
from partita.core.tensors import Names, Slots
from partita.engines.flower.messages import MessageError, Order, Ticket, plain, stray
from partita.evaluation import Measure

LARGEST = 1e100  # of a number in a message: squares and sums of such numbers stay finite
ENTRY = 256  # bytes of a tensor's entry in a header, beside its name
SHARES = frozenset({"accuracy", "macro_f1", "micro_f1", "auroc", "precision", "recall", "f1"})  # from 0 to 1


# ---- the server's side


@dataclass(frozen=True)
class Expected:
    """What can be said of an answer before its tensors are read. `core/update_checks.py` checks the update itself."""

    ticket: Ticket
    limit: int  # bytes of tensors

    def check(self, ticket: Ticket) -> None:
        if ticket != self.ticket:
            raise MessageError(
                f"it answers round {ticket.round} of client '{plain(ticket.client)}' in session "
                f"'{plain(ticket.session)}', not round {self.ticket.round} of '{self.ticket.client}' in session "
                f"'{self.ticket.session}'"
            )


def expect(run: Run, model: Model, job: Job, session: str) -> Expected:
    plan = plan_for(run.method.plan, model, Turn(job.round, run.rounds, job.client, job.signal))
    own = {slot for rule in run.method.local for slot in rule.slots}
    # A transform may add slots, each smaller than what they describe, and the header has an entry for each tensor.
    copies, entries = 1 + len(own) + len(run.method.channel), 1 + len(own) + 4 * len(run.method.channel)
    values = sum(model.initial[name].numel() * model.initial[name].element_size() for name in plan.up)
    headers = sum(len(name.encode()) + ENTRY for name in plan.up)
    return Expected(Ticket(job.round, job.client, session), copies * values + entries * headers)


def check_scores(scores: Mapping[str, float], measure: Measure) -> None:
    for name, value in scores.items():
        if name not in measure.metrics:
            raise MessageError(f"sent a score of '{plain(name)}'; there are only: {', '.join(measure.metrics)}")
        if not presentable(name, value):
            raise MessageError(f"sent {value} for {name}; it must be {_range(name)}")


def presentable(name: str, value: float) -> bool:
    """Whether a score can be recorded and averaged."""
    return 0 <= value <= 1 if name in SHARES else abs(value) <= LARGEST


def _range(name: str) -> str:
    return "a share from 0 to 1" if name in SHARES else f"a finite number up to {LARGEST:g}"


# ---- a site's side


def check_order(run: Run, model: Model, client: str, config: str, order: Order, done: int) -> Plan:
    """The plan by which this site answers, made here. `done` is 1 if the job's round is over, as for an evaluation.

    Raises:
        ClientFault: with the reason, where the order asks for what this run does not do.
    """
    ticket = order.ticket
    if ticket.client != client:
        raise ClientFault(client, f"this site is '{client}'; look at the node config of both")
    if order.config != config:
        raise ClientFault(
            client,
            f"the config of the server has the digest '{plain(order.config)}' and the one here '{config}'; run the "
            "same app with the same run config on both sides (only data. and engine. keys may differ)",
        )
    if not 0 <= ticket.round < run.rounds:
        raise ClientFault(client, f"was asked for round {ticket.round}; this run has rounds 0 to {run.rounds - 1}")
    for what, number in (("void", order.void), ("settled", order.settled)):
        if not 0 <= number <= ticket.round + done:
            raise ClientFault(client, f"was told {what} = {number} in round {ticket.round}; it cannot be beyond it")
    if not 0 < len(ticket.session) <= 100 or ticket.session != plain(ticket.session):
        raise ClientFault(client, "was told a session that is no short text")
    known = _known_slots(run, model, client, order) if order.signal or order.slots else {}
    plan = plan_for(run.method.plan, model, Turn(ticket.round, run.rounds, client, order.signal))
    _check_sent(order.sent, model.initial, plan.down, client, f"the plan of round {ticket.round} does not bring down")
    for slot, part in order.slots.items():
        like = {**model.initial, **known[slot]}
        _check_sent(part, like, plan.train, client, f"is not trained in round {ticket.round}")
    return plan


def _known_slots(run: Run, model: Model, client: str, order: Order) -> Slots:
    """Those of an honest server before the first round; the names of signal and slots must be the same."""
    honest, _ = ask(run, model, begin(run, model), order.ticket.round, client)
    for what, given, known in (("signal", order.signal, honest.signal), ("slot", order.slots, honest.slots)):
        if (strange := stray(given, known)) is not None:
            raise ClientFault(client, f"was sent the {what} '{plain(strange)}', which {run.method.name} does not know")
    for name, number in order.signal.items():
        if not abs(number) <= LARGEST:
            raise ClientFault(client, f"was sent {number} as the signal '{name}'; it must be a finite number")
    return honest.slots


def _check_sent(sent: Mapping[str, Tensor], initial: Mapping[str, Tensor], names: Names, client: str, why: str) -> None:
    for name, value in sent.items():
        if name not in initial or initial[name].shape != value.shape:
            here = f"is {tuple(initial[name].shape)}" if name in initial else "does not exist"
            raise ClientFault(
                client,
                f"the server's '{plain(name)}' is {tuple(value.shape)} and here it {here}; are model and classes the "
                "same?",
            )
        if value.dtype != initial[name].dtype:
            raise ClientFault(client, f"the server's '{name}' is {value.dtype} and here it is {initial[name].dtype}")
        if name not in names:
            raise ClientFault(client, f"the server sent '{name}', which {why}")
        if value.is_floating_point() and not math.isfinite(tensors.largest({name: value}).item()):
            raise ClientFault(client, f"the server's '{name}' has values that are not finite")


def check_reply(update: Update, plan: Plan, client: str) -> None:
    """The last gate before an answer leaves: nothing that the plan keeps, and nothing that it does not send."""
    for part in (update.delta, *update.slots.values()):
        if (strange := stray(part, plan.up)) is not None:
            raise ClientFault(client, f"would send '{strange}', which the plan of the round does not send up")
