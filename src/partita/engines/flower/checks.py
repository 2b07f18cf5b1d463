"""What each side accepts of the other. Nobody here trusts that the other side runs partita."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from partita.core import tree
from partita.core.learn import ClientFault, Job
from partita.core.method import Local, Update
from partita.core.model import Model, layers_of
from partita.core.plan import Plan, Turn, plan_for
from partita.core.rounds import ask, begin
from partita.core.run import Run
from partita.core.tree import Names, Slots
from partita.engines.flower.messages import MessageError, Order, Ticket, plain, stray
from partita.evaluate import Measure

LARGEST = 1e100  # of a number in a message: squares and sums of such numbers stay finite
HEAVIEST = 1e12  # training examples of a client
ENTRY = 256  # bytes of a tensor's entry in a header, beside its name
SHARES = frozenset({"accuracy", "macro_f1", "micro_f1", "auroc", "precision", "recall", "f1"})  # from 0 to 1


# ---- the server's side


@dataclass(frozen=True)
class Expected:
    """What an honest answer to one job can hold."""

    ticket: Ticket
    plan: Plan
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
    return Expected(Ticket(job.round, job.client, session), plan, copies * values + entries * headers)


def check_update(update: Update, expected: Expected, run: Run, model: Model) -> None:
    """What must not reach the rounds: strange names, odd types, absurd numbers, and what cannot be opened.

    The rounds look at shapes, steps and values themselves.
    """
    for part in (update.delta, *update.slots.values()):
        if (strange := stray(part, expected.plan.up)) is not None:
            raise MessageError(
                f"sent '{plain(strange)}', which its plan does not send up in round {expected.ticket.round}"
            )
    own = {slot for rule in run.method.local for slot in rule.slots}
    opened = _opened(update, run)
    if (strange := stray(opened.slots, own)) is not None:
        raise MessageError(f"sent the slot '{plain(strange)}', which {run.method.name} does not send")
    for part in (opened.delta, *opened.slots.values()):
        for name, value in part.items():
            if value.dtype != (kind := model.initial[name].dtype):
                raise MessageError(f"sent '{name}' as {value.dtype}, not {kind}")
    if (strange := stray(update.steps, expected.plan.train)) is not None:
        raise MessageError(f"sent steps of '{plain(strange)}', which its plan does not train")
    if not 0 <= update.weight <= HEAVIEST:
        raise MessageError(f"sent the weight {update.weight}; it must be a number from 0 to {HEAVIEST:g}")
    if update.loss is not None and not abs(update.loss) <= LARGEST:
        raise MessageError(f"sent the loss {update.loss}; it must be a finite number up to {LARGEST:g}")
    _check_told(update.told, run, model)


def _opened(update: Update, run: Run) -> Update:
    """As the rounds will open it: only then its types can be seen."""
    try:
        for transform in reversed(run.method.channel):
            update = transform.open(update)
    except Exception as error:  # tensors made up by somebody else make a transform fail in any way it can
        raise MessageError(f"sent what cannot be opened ({plain(error)})") from error
    return update


def _check_told(told: Mapping[str, float], run: Run, model: Model) -> None:
    tells = any(type(rule).narrow is not Local.narrow for rule in run.method.local)
    layers = layers_of(model)
    most = max(100, 2 * len(layers)) if tells else 0
    if len(told) > most:
        raise MessageError(f"told {len(told)} numbers, and {run.method.name} tells at most {most}")
    for name, value in told.items():
        layer = name.partition("/")[2]
        if name != plain(name) or (layer.startswith("layer.") and layer not in layers):
            raise MessageError(f"told a number of '{plain(name)}', which is none of {model.name}")
        if not abs(value) <= LARGEST:
            raise MessageError(f"told {value} for '{name}'; it must be a finite number up to {LARGEST:g}")


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
        if value.is_floating_point() and not math.isfinite(tree.largest({name: value}).item()):
            raise ClientFault(client, f"the server's '{name}' has values that are not finite")


def check_reply(update: Update, plan: Plan, client: str) -> None:
    """The last gate before an answer leaves: nothing that the plan keeps, and nothing that it does not send."""
    for part in (update.delta, *update.slots.values()):
        if (strange := stray(part, plan.up)) is not None:
            raise ClientFault(client, f"would send '{strange}', which the plan of the round does not send up")
