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
from partita.core.client import Job, client_model, round_info_of
from partita.core.method import ClientRule, Context, Server, Update
from partita.core.model import Model, layer_tags
from partita.core.packed import CheckedTensors, PackedLayout, PackedTensors, shapes
from partita.core.plan import Plan
from partita.core.settings import Run
from partita.core.tensors import Names, Slots, Tensors

# An honest round moves parameters by a fraction of their own norm, and new ones (a head, prompts, low-rank factors) by
# about 1. A thousand times that is divergence or an attack; it is also far from where float32 overflows. The limit is
# relative to the initial model: relative to the current one, an attacker could raise it round by round.
MAX_NORM_RATIO = 1000.0
MAX_ABS = 1e9  # of a loss or a score, whatever its sign
MAX_METRICS = 1024  # scores in one reply
_METRIC_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}(/[A-Za-z0-9_.\-]{1,64})?")  # what rules call their scores
_CONTAINERS = (dict, Counter, CheckedTensors, PackedTensors)  # mappings that cannot change between two looks


class InvalidUpdate(ValueError):
    """A reply that cannot be used; the text says why."""


@dataclass(frozen=True)
class CheckedUpdate:
    """A usable reply as the server's rule may see it."""

    update: Update
    norm: float | None  # of the delta as it was sent; None where client-level privacy hides it
    bounded: bool  # it was longer than federation.max_norm, and was scaled down


class UpdateLimits:
    """What the server knows of a run beforehand, and what follows from it for replies."""

    def __init__(self, run: Run, model: Model) -> None:
        self.run, self.model = run, model
        self.layers = frozenset(layer_tags(model))
        self.slots: Names = frozenset[str]().union(*(rule.slots for rule in run.method.client_rules))
        self.finishes = any(type(rule).finish is not ClientRule.finish for rule in run.method.client_rules)
        self.narrows = any(type(rule).narrow is not ClientRule.narrow for rule in run.method.client_rules)
        self.hides = any(transform.hides for transform in run.method.transforms)
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
            self._squares |= tensors.squared_norms(new)
            initial = math.sqrt(math.fsum(self._squares[name] for name in names))
            self._norms[names] = MAX_NORM_RATIO * max(1.0, initial)
        return self._norms[names]


class UpdateValidator:
    """Checks the replies of one round."""

    def __init__(self, limits: UpdateLimits, server: Server, number: int, ask: Callable[[str], Job]) -> None:
        self.limits, self.params, self.number, self.ask = limits, server.params, number, ask
        self.run = limits.run
        self.forms = {name: (value.shape, _kind(value)) for name, value in server.params.items()}
        self.fits: dict[tuple[PackedLayout, Names, torch.dtype, torch.device], Mapping[str, int]] = {}  # with the steps
        self.honest: dict[tuple[Plan, Names], Mapping[str, Names] | None] = {}
        self.first: Names | None = None  # the names of the round's first reply

    def weigh(self, update: Update) -> tuple[Update, Mapping[str, int]]:
        """The reply with plain containers of plain tensors, and its bytes by name."""
        try:
            update = _readable(update)
        except InvalidUpdate:
            raise
        except Exception as error:  # a mapping that is evaluated when it is read can fail in any way
            raise InvalidUpdate(f"sent a reply that cannot be read: {shorten(error)}") from error
        return update, serialization.byte_counts({"delta": update.delta, **update.slots})

    def check(self, update: Update, plan: Plan) -> CheckedUpdate:
        """The reply after the channel's transforms were undone. Raises Refused with the reason if it is of no use."""
        self._check_numbers(update, plan)
        self._check_slots(update, plan)
        try:
            for transform in reversed(self.run.method.transforms):
                update = transform.decode_update(update)
        except Exception as error:  # transforms meet tensors of any shape and type here
            raise InvalidUpdate(f"sent what cannot be opened: {shorten(error)}") from error
        for slot in update.slots.keys() - self.limits.slots:
            raise InvalidUpdate(f"sent the slot {shorten(slot)}, which {self.run.method.name} does not have")
        for part in (update.delta, *update.slots.values()):
            self._check_fit(part, plan, update)
        self._check_names(frozenset(update.delta), plan)
        return self._measured(update)

    def _check_numbers(self, update: Update, plan: Plan) -> None:
        weight, loss = _number(update.weight), _number(update.loss)
        most = self.limits.examples(update.client)
        if weight is None or not 0 < weight <= most:
            raise InvalidUpdate(
                f"sent the weight {shorten(update.weight)}; it is the number of training examples, above 0 and here at "
                f"most {most}"
            )
        if update.loss is not None and (loss is None or abs(loss) > MAX_ABS):
            raise InvalidUpdate(
                f"sent the loss {shorten(update.loss)}, which is not a number within {MAX_ABS:g}; lower "
                "training.lr, set training.clip, or look at the client's data"
            )
        if update.metrics:
            self._check_told(update.metrics)

    def _check_told(self, metrics: Mapping[str, float]) -> None:
        if not self.limits.narrows or len(metrics) > MAX_METRICS:
            most = MAX_METRICS if self.limits.narrows else 0
            raise InvalidUpdate(f"told {len(metrics)} scores; clients of {self.run.method.name} tell at most {most}")
        for what, value in metrics.items():
            layer = what.partition("/")[2] if isinstance(what, str) else ""
            if not isinstance(what, str) or not _METRIC_NAME.fullmatch(what):
                raise InvalidUpdate(f"told a score called {shorten(what)}; it must be a short plain text")
            if layer.startswith("layer.") and layer not in self.limits.layers:
                raise InvalidUpdate(f"told a score of {shorten(layer)}, which {self.limits.model.name} does not have")
            number = _number(value)
            if number is None or abs(number) > MAX_ABS:
                raise InvalidUpdate(f"told {shorten(value)} for '{what}'; it must be a number within {MAX_ABS:g}")

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
                raise InvalidUpdate(
                    f"sent the slot '{slot}' for {_count(given)}, not for the {_count(wanted)} of an honest reply"
                )

    def _honest_slots(self, client: str, plan: Plan, names: Names) -> Mapping[str, Names] | None:
        """By slot, the names for which an honest client sends it beside a delta of these names: as its rules answer
        when nothing has moved. None where they need to see examples first.
        """
        if (plan, names) not in self.honest:
            job, narrowed = self.ask(client), plan.narrow(names | plan.keep)
            anchor = {**self.limits.model.initial, **job.params}
            rules = [rule for rule in self.run.method.client_rules if type(rule).finish is not ClientRule.finish]
            try:
                memory = {slot: part for rule in rules for slot, part in rule.memory(anchor).items()}
                model, round_info = client_model(self.run, self.limits.model, job), round_info_of(self.run, job)
                ctx = Context(model, narrowed, anchor, job.slots, memory, self.run.training.lr, {}, round_info)
                steps = dict.fromkeys(narrowed.train, 1)
                sent = [tensors.restrict_slots(rule.finish(anchor, steps, ctx)[0], narrowed.up) for rule in rules]
                self.honest[plan, names] = {slot: frozenset(part) for each in sent for slot, part in each.items()}
            except Exception:
                self.honest[plan, names] = None
        return self.honest[plan, names]

    def _check_fit(self, part: Mapping[str, Tensor], plan: Plan, update: Update) -> None:
        taken = update.steps
        if isinstance(part, PackedTensors):
            alike = part.layout, plan.up, part.buffer.dtype, part.buffer.device
            if self.fits.get(alike) is taken:
                return  # as that of a client before
        if stray := taken.keys() - self.forms.keys():
            raise InvalidUpdate(
                f"sent steps of {shorten(min(stray, key=str))}, which {self.limits.model.name} does not have"
            )
        most = self.limits.steps(plan, self.limits.examples(update.client))
        kinds = (
            [(part.buffer.dtype, part.buffer.device)] * len(part)
            if isinstance(part, PackedTensors)
            else map(_kind, part.values())
        )
        for name, shape, kind in zip(part, shapes(part), kinds, strict=True):
            if name not in plan.up:
                self._refuse_name(name)
            if (shape, kind) != self.forms[name]:
                own = self.params[name]
                raise InvalidUpdate(
                    f"sent '{name}' of shape {tuple(shape)}, not {tuple(own.shape)}"
                    if shape != own.shape
                    else f"sent '{name}' as {kind[0]} on {kind[1]}, not {own.dtype} on {own.device}"
                )
            steps = taken.get(name)
            if type(steps) is not int or not 1 <= steps <= most[name]:
                raise InvalidUpdate(
                    f"sent '{name}' after {shorten(steps)} steps; it must be a whole number from 1 to {most[name]}"
                )
        if isinstance(part, PackedTensors):
            self.fits[alike] = taken

    def _refuse_name(self, name: object) -> None:
        raise InvalidUpdate(f"sent {shorten(name)}, which its plan does not send up in round {self.number}")

    def _check_names(self, names: Names, plan: Plan) -> None:
        """Under client-level privacy all send the same, or names alone would tell who took part."""
        if not self.limits.hides:
            return
        self.first = self.first if self.first is not None else names
        if names != (wanted := self.first if self.limits.narrows else plan.up):
            raise InvalidUpdate(
                f"sent {_count(names)}, not the {_count(wanted)} of the round; under client-level privacy all clients "
                "of a round send the same"
            )

    def _measured(self, update: Update) -> CheckedUpdate:
        delta = (
            update.delta if isinstance(update.delta, CheckedTensors | PackedTensors) else CheckedTensors(update.delta)
        )
        norm, limit = _norm(delta), self.limits.norm(frozenset(delta))
        delta.finite = True
        if norm > limit:
            raise InvalidUpdate(
                f"sent an update of norm {norm:.3g}, and more than {limit:.3g} ({MAX_NORM_RATIO:g} times the initial "
                "model's) is implausible; lower training.lr, set training.clip, or look at the client's data"
            )
        for slot, part in update.slots.items():
            # A slot is as large as a gradient, that is as an update over the learning rate.
            if (size := _norm(part)) > limit / min(1.0, self.run.training.lr):
                raise InvalidUpdate(f"sent the slot '{slot}' of norm {size:.3g}, which is implausible")
        if self.limits.hides:
            return CheckedUpdate(replace(update, delta=delta), None, False)
        if self.run.max_norm is None or norm <= self.run.max_norm:
            return CheckedUpdate(update if update.delta is delta else replace(update, delta=delta), norm, False)
        factor = self.run.max_norm / norm
        slots: Slots = {slot: tensors.scale(part, factor) for slot, part in update.slots.items()}
        return CheckedUpdate(replace(update, delta=tensors.scale(delta, factor), slots=slots), norm, True)


def _norm(part: Mapping[str, Tensor]) -> float:
    if isinstance(part, CheckedTensors | PackedTensors):
        if part.finite and part.square is not None:
            return math.sqrt(part.square)
        if not part.finite:
            part.squares = None  # some client of its block is not finite, so each is looked at by itself
    squares = tensors.squared_norms(part)
    total = tensors.exact_sum(squares.values())
    if not math.isfinite(total):
        wrong = next((name for name, square in squares.items() if not math.isfinite(square)), min(squares))
        raise InvalidUpdate(f"sent '{wrong}' with values that are not finite; lower training.lr or set training.clip")
    if isinstance(part, CheckedTensors | PackedTensors):
        part.squares = squares  # drift asks for them again
    return math.sqrt(total)


def _kind(value: Tensor) -> tuple[torch.dtype, torch.device]:
    return value.dtype, value.device


def _readable(update: Update) -> Update:
    delta, steps, metrics = (_mapping(getattr(update, field), field) for field in ("delta", "steps", "metrics"))
    slots = {slot: _tensors(part, f"slot {shorten(slot)}") for slot, part in _mapping(update.slots, "slots").items()}
    delta = _tensors(delta, "delta")
    if all(new is getattr(update, field) for field, new in (("delta", delta), ("steps", steps), ("metrics", metrics))):
        return update if not slots else replace(update, slots=slots)
    return replace(update, delta=delta, slots=slots, steps=steps, metrics=metrics)


def _mapping(value: object, what: str) -> Mapping:  # type: ignore[type-arg]
    """A copy of whatever could change under our hands."""
    if type(value) in _CONTAINERS:
        return value  # type: ignore[return-value]
    if not isinstance(value, Mapping):
        raise InvalidUpdate(f"sent {what} as {type(value).__name__}; it must be a mapping by name")
    return dict(value)


def _tensors(value: object, what: str) -> Tensors:
    part = _mapping(value, what)
    if isinstance(part, CheckedTensors | PackedTensors):
        return part  # type: ignore[return-value]  # only the engine of this process makes these
    for name, each in part.items():
        if type(name) is not str or type(each) is not Tensor:
            raise InvalidUpdate(
                f"sent {shorten(name)} in its {what} as {type(each).__name__}; it must be a tensor by name"
            )
        if (
            each.layout is not torch.strided
            or each.is_meta
            or each.requires_grad
            or each.dtype not in serialization.DTYPES
        ):
            raise InvalidUpdate(
                f"sent {shorten(name)} in its {what} as {each.dtype}, {each.layout} on {each.device}; it must be a "
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


def shorten(value: object) -> str:
    """For messages and rows, whatever a client sent."""
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else repr(value)
    except Exception:
        text = f"an odd {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
