"""One check for every reply of every engine, before any arithmetic: is it what this client was asked for?

A reply that passes holds finite tensors of the server's own types and shapes, and numbers that an honest client could
have sent. What a reply claims is compared with what the server knows, never with what other replies claim.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from partita.core import serialization, tensors
from partita.core.batch_schedule import count_steps
from partita.core.client import Job, shaped, turn_of
from partita.core.method import Context, Local, Server, Update
from partita.core.model import Model, layers_of
from partita.core.packed import Form, Known, Laid, shapes
from partita.core.plan import Plan
from partita.core.settings import Run
from partita.core.tensors import Names, Slots, Tensors

# An honest round moves parameters by a fraction of their own norm, and new ones (a head, prompts, low-rank factors) by
# about 1. A thousand times that is divergence or an attack; it is also far from where float32 overflows. The limit is
# relative to the initial model: relative to the current one, an attacker could raise it round by round.
MOST_OF_INITIAL = 1000.0
LARGEST_NUMBER = 1e9  # of a loss or a score, whatever its sign
MOST_TOLD = 1024  # scores in one reply
_PLAIN = re.compile(r"[A-Za-z0-9_.\-]{1,64}(/[A-Za-z0-9_.\-]{1,64})?")  # what rules call their scores
_CONTAINERS = (dict, Counter, Known, Laid)  # mappings that cannot change between two looks


class Refused(ValueError):
    """A reply that cannot be used; the text says why."""


@dataclass(frozen=True)
class Checked:
    """A usable reply as the server's rule may see it."""

    update: Update
    norm: float | None  # of the delta as it was sent; None where client-level privacy hides it
    bounded: bool  # it was longer than federation.max_norm, and was scaled down


class Limits:
    """What the server knows of a run beforehand, and what follows from it for replies."""

    def __init__(self, run: Run, model: Model) -> None:
        self.run, self.model = run, model
        self.layers = frozenset(layers_of(model))
        self.slots: Names = frozenset[str]().union(*(rule.slots for rule in run.method.local))
        self.finishes = any(type(rule).finish is not Local.finish for rule in run.method.local)
        self.narrows = any(type(rule).narrow is not Local.narrow for rule in run.method.local)
        self.hides = any(transform.hides for transform in run.method.channel)
        self._squares: dict[str, float] = {}  # of the initial model
        self._norms: dict[Names, float] = {}
        self._trusts = False
        self.steps = lru_cache(maxsize=1024)(self._steps)

    def examples(self, client: str) -> int:
        """The most training examples that the client can have."""
        registered = self.run.examples
        if registered is None:
            return self.run.max_examples
        if size := registered.get(client, 0):
            return size
        if not self._trusts:
            self._trusts = True
            warnings.warn(
                f"the number of examples of client '{client}' is not known here, so weights are taken on trust up to "
                f"federation.max_examples = {self.run.max_examples}; set it to the most that a client can have",
                stacklevel=2,
            )
        return self.run.max_examples

    def _steps(self, plan: Plan, examples: int) -> Mapping[str, int]:
        """By name, the most steps that so many examples allow."""
        most = Counter[str]()
        for phase in plan.phases:
            most.update(dict.fromkeys(phase.names, count_steps(examples, self.run.training, phase.epochs)))
        return most

    def norm(self, names: Names) -> float:
        """The most that an update of these names may be long."""
        if names not in self._norms:
            new = {name: self.model.initial[name] for name in sorted(names - self._squares.keys())}
            self._squares |= tensors.squares(new)
            initial = math.sqrt(math.fsum(self._squares[name] for name in names))
            self._norms[names] = MOST_OF_INITIAL * max(1.0, initial)
        return self._norms[names]


class Inspector:
    """Checks the replies of one round."""

    def __init__(self, limits: Limits, server: Server, number: int, ask: Callable[[str], Job]) -> None:
        self.limits, self.params, self.number, self.ask = limits, server.params, number, ask
        self.run = limits.run
        self.forms = {name: (value.shape, _kind(value)) for name, value in server.params.items()}
        self.fits: dict[tuple[Form, Names, torch.dtype, torch.device], Mapping[str, int]] = {}  # with the steps
        self.honest: dict[tuple[Plan, Names], Mapping[str, Names] | None] = {}
        self.first: Names | None = None  # the names of the round's first reply

    def weigh(self, update: Update) -> tuple[Update, Mapping[str, int]]:
        """The reply with plain containers of plain tensors, and its bytes by name."""
        try:
            update = _readable(update)
        except Refused:
            raise
        except Exception as error:  # a mapping that is evaluated when it is read can fail in any way
            raise Refused(f"sent a reply that cannot be read: {short(error)}") from error
        return update, serialization.count({"delta": update.delta, **update.slots})

    def check(self, update: Update, plan: Plan) -> Checked:
        """The reply after the channel's transforms were undone. Raises Refused with the reason if it is of no use."""
        self._check_numbers(update, plan)
        self._check_slots(update, plan)
        try:
            for transform in reversed(self.run.method.channel):
                update = transform.open(update)
        except Exception as error:  # transforms meet tensors of any shape and type here
            raise Refused(f"sent what cannot be opened: {short(error)}") from error
        for slot in update.slots.keys() - self.limits.slots:
            raise Refused(f"sent the slot {short(slot)}, which {self.run.method.name} does not have")
        for part in (update.delta, *update.slots.values()):
            self._check_fit(part, plan, update)
        self._check_names(frozenset(update.delta), plan)
        return self._measured(update)

    def _check_numbers(self, update: Update, plan: Plan) -> None:
        weight, loss = _number(update.weight), _number(update.loss)
        most = self.limits.examples(update.client)
        if weight is None or not 0 < weight <= most:
            raise Refused(
                f"sent the weight {short(update.weight)}; it is the number of training examples, above 0 and here at "
                f"most {most}"
            )
        if update.loss is not None and (loss is None or abs(loss) > LARGEST_NUMBER):
            raise Refused(
                f"sent the loss {short(update.loss)}, which is not a number within {LARGEST_NUMBER:g}; lower "
                "training.lr, set training.clip, or look at the client's data"
            )
        if update.told:
            self._check_told(update.told)

    def _check_told(self, told: Mapping[str, float]) -> None:
        if not self.limits.narrows or len(told) > MOST_TOLD:
            most = MOST_TOLD if self.limits.narrows else 0
            raise Refused(f"told {len(told)} scores; clients of {self.run.method.name} tell at most {most}")
        for what, value in told.items():
            layer = what.partition("/")[2] if isinstance(what, str) else ""
            if not isinstance(what, str) or not _PLAIN.fullmatch(what):
                raise Refused(f"told a score called {short(what)}; it must be a short plain text")
            if layer.startswith("layer.") and layer not in self.limits.layers:
                raise Refused(f"told a score of {short(layer)}, which {self.limits.model.name} does not have")
            number = _number(value)
            if number is None or abs(number) > LARGEST_NUMBER:
                raise Refused(f"told {short(value)} for '{what}'; it must be a number within {LARGEST_NUMBER:g}")

    def _check_slots(self, update: Update, plan: Plan) -> None:
        """Before transforms, which may use slots up. A slot is sent for all names that an honest client sends it for,
        or not at all.
        """
        sent = {slot: frozenset(part) for slot, part in update.slots.items() if slot in self.limits.slots}
        if not sent and not self.limits.finishes:
            return
        names = frozenset(update.delta)
        if stray := names - plan.up:
            self._refuse_name(min(stray, key=str))
        honest = self._honest_slots(update.client, plan, names)
        if honest is None:  # what it sends depends on its examples
            honest = {slot: names & part for slot, part in sent.items()}
        for slot in sorted(sent.keys() | honest.keys()):
            wanted, given = honest.get(slot), sent.get(slot)
            if wanted != given:
                raise Refused(
                    f"sent the slot '{slot}' for {_count(given)}, not for the {_count(wanted)} of an honest reply"
                )

    def _honest_slots(self, client: str, plan: Plan, names: Names) -> Mapping[str, Names] | None:
        """By slot, the names for which an honest client sends it beside a delta of these names: as its rules answer
        when nothing has moved. None where they need to see examples first.
        """
        if (plan, names) not in self.honest:
            job, narrowed = self.ask(client), plan.narrow(names | plan.keep)
            anchor = {**self.limits.model.initial, **job.params}
            rules = [rule for rule in self.run.method.local if type(rule).finish is not Local.finish]
            try:
                memory = {slot: part for rule in rules for slot, part in rule.memory(anchor).items()}
                model, turn = shaped(self.run, self.limits.model, job), turn_of(self.run, job)
                ctx = Context(model, narrowed, anchor, job.slots, memory, self.run.training.lr, turn=turn)
                steps = dict.fromkeys(narrowed.train, 1)
                sent = [tensors.within(rule.finish(anchor, steps, ctx)[0], narrowed.up) for rule in rules]
                self.honest[plan, names] = {slot: frozenset(part) for each in sent for slot, part in each.items()}
            except Exception:
                self.honest[plan, names] = None
        return self.honest[plan, names]

    def _check_fit(self, part: Mapping[str, Tensor], plan: Plan, update: Update) -> None:
        taken = update.steps
        if isinstance(part, Laid):
            alike = part.form, plan.up, part.row.dtype, part.row.device
            if self.fits.get(alike) is taken:
                return  # as that of a client before
        if stray := taken.keys() - self.forms.keys():
            raise Refused(f"sent steps of {short(min(stray, key=str))}, which {self.limits.model.name} does not have")
        most = self.limits.steps(plan, self.limits.examples(update.client))
        kinds = [(part.row.dtype, part.row.device)] * len(part) if isinstance(part, Laid) else map(_kind, part.values())
        for name, shape, kind in zip(part, shapes(part), kinds, strict=True):
            if name not in plan.up:
                self._refuse_name(name)
            if (shape, kind) != self.forms[name]:
                own = self.params[name]
                raise Refused(
                    f"sent '{name}' of shape {tuple(shape)}, not {tuple(own.shape)}"
                    if shape != own.shape
                    else f"sent '{name}' as {kind[0]} on {kind[1]}, not {own.dtype} on {own.device}"
                )
            steps = taken.get(name)
            if type(steps) is not int or not 1 <= steps <= most[name]:
                raise Refused(
                    f"sent '{name}' after {short(steps)} steps; it must be a whole number from 1 to {most[name]}"
                )
        if isinstance(part, Laid):
            self.fits[alike] = taken

    def _refuse_name(self, name: object) -> None:
        raise Refused(f"sent {short(name)}, which its plan does not send up in round {self.number}")

    def _check_names(self, names: Names, plan: Plan) -> None:
        """Under client-level privacy all send the same, or names alone would tell who took part."""
        if not self.limits.hides:
            return
        self.first = self.first if self.first is not None else names
        if names != (wanted := self.first if self.limits.narrows else plan.up):
            raise Refused(
                f"sent {_count(names)}, not the {_count(wanted)} of the round; under client-level privacy all clients "
                "of a round send the same"
            )

    def _measured(self, update: Update) -> Checked:
        delta = update.delta if isinstance(update.delta, Known | Laid) else Known(update.delta)
        norm, limit = _norm(delta), self.limits.norm(frozenset(delta))
        delta.finite = True
        if norm > limit:
            raise Refused(
                f"sent an update of norm {norm:.3g}, and more than {limit:.3g} ({MOST_OF_INITIAL:g} times the initial "
                "model's) is implausible; lower training.lr, set training.clip, or look at the client's data"
            )
        for slot, part in update.slots.items():
            # A slot is as large as a gradient, that is as an update over the learning rate.
            if (size := _norm(part)) > limit / min(1.0, self.run.training.lr):
                raise Refused(f"sent the slot '{slot}' of norm {size:.3g}, which is implausible")
        if self.limits.hides:
            return Checked(replace(update, delta=delta), None, False)
        if self.run.max_norm is None or norm <= self.run.max_norm:
            return Checked(update if update.delta is delta else replace(update, delta=delta), norm, False)
        factor = self.run.max_norm / norm
        slots: Slots = {slot: tensors.scale(part, factor) for slot, part in update.slots.items()}
        return Checked(replace(update, delta=tensors.scale(delta, factor), slots=slots), norm, True)


def _norm(part: Mapping[str, Tensor]) -> float:
    if isinstance(part, Known | Laid):
        if part.finite and part.square is not None:
            return math.sqrt(part.square)
        if not part.finite:
            part.squares = None  # some client of its block is not finite, so each is looked at by itself
    squares = tensors.squares(part)
    total = math.fsum(squares.values()) if all(map(math.isfinite, squares.values())) else math.nan
    if not math.isfinite(total):
        wrong = next((name for name, square in squares.items() if not math.isfinite(square)), min(squares))
        raise Refused(f"sent '{wrong}' with values that are not finite; lower training.lr or set training.clip")
    if isinstance(part, Known | Laid):
        part.squares = squares  # drift asks for them again
    return math.sqrt(total)


def _kind(value: Tensor) -> tuple[torch.dtype, torch.device]:
    return value.dtype, value.device


def _readable(update: Update) -> Update:
    delta, steps, told = (_mapping(getattr(update, field), field) for field in ("delta", "steps", "told"))
    slots = {slot: _tensors(part, f"slot {short(slot)}") for slot, part in _mapping(update.slots, "slots").items()}
    delta = _tensors(delta, "delta")
    if all(new is getattr(update, field) for field, new in (("delta", delta), ("steps", steps), ("told", told))):
        return update if not slots else replace(update, slots=slots)
    return replace(update, delta=delta, slots=slots, steps=steps, told=told)


def _mapping(value: object, what: str) -> Mapping:  # type: ignore[type-arg]
    """A copy of whatever could change under our hands."""
    if type(value) in _CONTAINERS:
        return value  # type: ignore[return-value]
    if not isinstance(value, Mapping):
        raise Refused(f"sent {what} as {type(value).__name__}; it must be a mapping by name")
    return dict(value)


def _tensors(value: object, what: str) -> Tensors:
    part = _mapping(value, what)
    if isinstance(part, Known | Laid):
        return part  # type: ignore[return-value]  # only the engine of this process makes these
    for name, each in part.items():
        if type(name) is not str or type(each) is not Tensor:
            raise Refused(f"sent {short(name)} in its {what} as {type(each).__name__}; it must be a tensor by name")
        if (
            each.layout is not torch.strided
            or each.is_meta
            or each.requires_grad
            or each.dtype not in serialization.TYPES
        ):
            raise Refused(
                f"sent {short(name)} in its {what} as {each.dtype}, {each.layout} on {each.device}; it must be a "
                "dense tensor of numbers without a gradient"
            )
    return part  # type: ignore[return-value]


def _number(value: object) -> float | None:
    """A finite number, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _count(names: Names | None) -> str:
    return "none" if names is None else f"{len(names)} names"


def short(value: object) -> str:
    """For messages and rows, whatever a client sent."""
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else repr(value)
    except Exception:
        text = f"an odd {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
