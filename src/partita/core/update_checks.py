"""Validation of every update of every engine, before any arithmetic: is it what this client was asked for?

An update that passes has finite tensors with the server's own types and shapes, and numbers that an honest client could
have sent. Claims in an update are compared with what the server knows, never with claims in other updates.
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

from partita.core import serialization, tensors
from partita.core.batch_schedule import count_steps
from partita.core.client import ClientState, Job, OneExample, begin_round, client_model, round_info_of
from partita.core.client_rule import Context, overrides
from partita.core.model import Model, layer_tags
from partita.core.packed import PackedLayout, PackedTensors, shapes
from partita.core.plan import Plan
from partita.core.server_rule import Server
from partita.core.settings import Run
from partita.core.tensors import Names, Slots, Tensors
from partita.core.update import ComputedWork, DeltaFacts, Update

# An honest round changes parameters by a fraction of their norm, and new parameters (a head, prompts, low-rank factors)
# by about 1. A thousand times that is divergence or an attack, and still far from float32 overflow. The limit is
# relative to the initial model: if it were relative to the current one, an attacker could raise it round by round.
MAX_NORM_RATIO = 1000.0
MAX_ABS = 1e9  # maximum absolute value of a loss or a metric
MAX_METRICS = 1024  # metrics in one update
_METRIC_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}(/[A-Za-z0-9_.\-]{1,64})?")  # metric names of client rules
_CONTAINERS = (dict, Counter, PackedTensors)  # mappings whose content cannot change between two reads


class InvalidUpdate(ValueError):
    """An update that cannot be used; the message says why."""


@dataclass(frozen=True)
class CheckedUpdate:
    """A valid, decoded update, ready for the server rule.

    Attributes:
        update: The update.
        norm: The norm of the delta as sent; None under client-level privacy, which hides it.
        bounded: Whether the delta was longer than `federation.max_norm` and was scaled down.
    """

    update: Update
    norm: float | None
    bounded: bool


class UpdateLimits:
    """The limits on updates that follow from the settings and the model of a run."""

    def __init__(self, run: Run, model: Model) -> None:
        self.run, self.model = run, model
        self.layers = frozenset(layer_tags(model))
        self.slots: Names = frozenset[str]().union(*(rule.slots for rule in run.method.client_rules))
        self.finishes = any(overrides(rule, "finish") for rule in run.method.client_rules)
        self.narrows = any(overrides(rule, "narrow") for rule in run.method.client_rules)
        self.hides = run.hides_clients
        self._squares: dict[str, float] = {}  # squared norms of the initial model's parameters
        self._norms: dict[Names, float] = {}
        self._trusts = False
        self.steps = lru_cache(maxsize=1024)(self._steps)

    def examples(self, client: str) -> int:
        """Return the maximum number of training examples that the client can have."""
        registered, most = self.run.examples, self.run.federation.max_examples
        if registered is None:
            return most
        if size := registered.get(client, 0):
            return size
        if not self._trusts:
            self._trusts = True
            warnings.warn(
                f"the number of examples of client '{client}' is not known here, so weights are trusted up to "
                f"federation.max_examples = {most}; set that to the most that a client can have",
                stacklevel=2,
            )
        return most

    def _steps(self, plan: Plan, examples: int) -> Mapping[str, int]:
        """By name, the maximum number of steps for this number of examples."""
        most = Counter[str]()
        for phase in plan.phases:
            most.update(dict.fromkeys(phase.names, count_steps(examples, self.run.training, phase.epochs)))
        return most

    def norm(self, names: Names) -> float:
        """Return the maximum norm of an update of these names."""
        if names not in self._norms:
            new = {name: self.model.initial[name] for name in sorted(names - self._squares.keys())}
            self._squares |= tensors.squared_norms(new)
            initial = math.sqrt(math.fsum(self._squares[name] for name in names))
            self._norms[names] = MAX_NORM_RATIO * max(1.0, initial)
        return self._norms[names]


class UpdateValidator:
    """Checks the updates of round `number`. `ask` returns the job of a client, as the server made it."""

    def __init__(self, limits: UpdateLimits, server: Server, number: int, ask: Callable[[str], Job]) -> None:
        self.limits, self.params, self.number, self.ask = limits, server.params, number, ask
        self.run = limits.run
        self.forms = {name: (value.shape, _kind(value)) for name, value in server.params.items()}
        # Layouts that already passed, with the steps that they passed with.
        self.fits: dict[tuple[PackedLayout, Names, torch.dtype, torch.device], Mapping[str, int]] = {}
        self.honest: dict[tuple[Plan, Names], Mapping[str, Names] | None] = {}
        self.same: dict[Plan, Names] = {}  # under client-level privacy, the names that all clients send

    def check(self, update: Update, plan: Plan) -> CheckedUpdate:
        """Decode an update with the method's transforms and check it.

        Args:
            update: The update from `readable`.
            plan: The client's plan before narrowing.

        Raises:
            InvalidUpdate: If the update cannot be used.
        """
        self._check_numbers(update, plan)
        self._check_slots(update, plan)
        try:
            for transform in reversed(self.run.method.transforms):
                update = transform.decode_update(update)
        except Exception as error:  # the tensors can have any shape and type here
            raise InvalidUpdate(f"sent an update that cannot be decoded: {shorten(error)}") from error
        for slot in update.slots.keys() - self.limits.slots:
            raise InvalidUpdate(f"sent the slot {shorten(slot)}, which {self.run.method.name} does not have")
        for part in (update.delta, *update.slots.values()):
            self._check_fit(part, plan, update)
        if self.limits.hides:
            self._check_names(frozenset(update.delta), plan, update.client)
        return self._measured(update)

    def _check_numbers(self, update: Update, plan: Plan) -> None:
        weight, loss = _number(update.weight), _number(update.loss)
        most = self.limits.examples(update.client)
        if weight is None or not 0 < weight <= most:
            raise InvalidUpdate(
                f"sent the weight {shorten(update.weight)}; it must be the number of training examples, above 0 and at "
                f"most {most}"
            )
        if update.loss is not None and (loss is None or abs(loss) > MAX_ABS):
            raise InvalidUpdate(
                f"sent the loss {shorten(update.loss)}; it must be a number from {-MAX_ABS:g} to {MAX_ABS:g}; lower "
                "training.lr, set training.clip, or check the client's data"
            )
        if update.metrics:
            self._check_metrics(update.metrics)

    def _check_metrics(self, metrics: Mapping[str, float]) -> None:
        if not self.limits.narrows or len(metrics) > MAX_METRICS:
            most = MAX_METRICS if self.limits.narrows else 0
            raise InvalidUpdate(f"sent {len(metrics)} metrics; clients of {self.run.method.name} send at most {most}")
        for what, value in metrics.items():
            layer = what.partition("/")[2] if isinstance(what, str) else ""
            if not isinstance(what, str) or not _METRIC_NAME.fullmatch(what):
                raise InvalidUpdate(
                    f"sent a metric named {shorten(what)}; a name has letters, digits, '_', '.' and '-', at most 64, "
                    "and optionally '/' and a second such part"
                )
            if layer.startswith("layer.") and layer not in self.limits.layers:
                raise InvalidUpdate(f"sent a metric of {shorten(layer)}, which {self.limits.model.name} does not have")
            number = _number(value)
            if number is None or abs(number) > MAX_ABS:
                raise InvalidUpdate(
                    f"sent {shorten(value)} for the metric '{what}'; it must be a number from {-MAX_ABS:g} to "
                    f"{MAX_ABS:g}"
                )

    def _check_slots(self, update: Update, plan: Plan) -> None:
        """Each slot must have exactly the names of an honest update.

        Runs before transforms decode the update, because they may remove slots.
        """
        sent = {slot: frozenset(part) for slot, part in update.slots.items() if slot in self.limits.slots}
        if not sent and not self.limits.finishes:
            return
        names = frozenset(update.delta)
        if stray := names - plan.up:
            self._refuse_name(min(stray, key=str))
        honest = self._honest_slots(update.client, plan, names)
        if honest is None:  # the slots depend on the client's examples
            honest = {slot: names & part for slot, part in sent.items()}
        for slot in sorted(sent.keys() | honest.keys()):
            expected, given = honest.get(slot), sent.get(slot)
            if expected != given:
                raise InvalidUpdate(
                    f"sent the slot '{slot}' for {_count(given)}; an honest update has it for {_count(expected)}"
                )

    def _honest_slots(self, client: str, plan: Plan, names: Names) -> Mapping[str, Names] | None:
        """By slot, the names that an honest client sends together with a delta of `names`.

        Found by calling the rules' `finish` on unchanged parameters. None if a rule fails without examples.
        """
        if (plan, names) not in self.honest:
            job, narrowed = self.ask(client), plan.narrow(names | plan.keep)
            anchor = {**self.limits.model.initial, **job.params}
            rules = [rule for rule in self.run.method.client_rules if overrides(rule, "finish")]
            try:
                memory = {slot: part for rule in rules for slot, part in rule.memory(anchor).items()}
                model, round_info = client_model(self.run, self.limits.model, job), round_info_of(self.run, job)
                ctx = Context(model, narrowed, anchor, job.slots, memory, self.run.training.lr, {}, round_info)
                steps = dict.fromkeys(narrowed.train, 1)
                sent = [tensors.restrict_slots(rule.finish(anchor, steps, ctx)[0], narrowed.up) for rule in rules]
                self.honest[plan, names] = {slot: frozenset(part) for slots in sent for slot, part in slots.items()}
            except Exception:
                self.honest[plan, names] = None
        return self.honest[plan, names]

    def _check_fit(self, part: Mapping[str, torch.Tensor], plan: Plan, update: Update) -> None:
        taken = update.steps
        if isinstance(part, PackedTensors):
            packed_key = part.layout, plan.up, part.buffer.dtype, part.buffer.device
            if self.fits.get(packed_key) is taken:
                return  # an equal update of another client has passed
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
            self.fits[packed_key] = taken

    def _refuse_name(self, name: object) -> None:
        raise InvalidUpdate(f"sent {shorten(name)}, which its plan does not send up in round {self.number}")

    def _check_names(self, names: Names, plan: Plan, client: str) -> None:
        """Under client-level privacy all clients send the same names: differing names would reveal who took part.

        They follow from the job and from rules that read no examples, so no reply decides what the others may send.
        """
        if plan not in self.same:
            begun = begin_round(
                self.run, self.limits.model, self.ask(client), ClientState(), OneExample(), trains=False
            )
            self.same[plan] = begun.plan.up
        if names != (expected := self.same[plan]):
            raise InvalidUpdate(
                f"sent {_count(names)}, not the {_count(expected)} of the round; under client-level privacy all "
                "clients of a round must send the same names"
            )

    def _measured(self, update: Update) -> CheckedUpdate:
        facts = _measure(update)
        assert facts.square is not None
        norm, limit = math.sqrt(facts.square), self.limits.norm(frozenset(update.delta))
        if norm > limit:
            raise InvalidUpdate(
                f"sent an update of norm {norm:.3g}; more than {limit:.3g} ({MAX_NORM_RATIO:g} times the norm of the "
                "initial model, or of 1 if that is larger) is implausible; lower training.lr, set training.clip, or "
                "check the client's data"
            )
        for slot, part in update.slots.items():
            # A slot can be as large as a gradient, which is an update divided by the learning rate.
            if (size := math.sqrt(_squares(part)[0])) > limit / min(1.0, self.run.training.lr):
                raise InvalidUpdate(f"sent the slot '{slot}' of norm {size:.3g}, which is implausible")
        update = update if update.facts is facts else replace(update, facts=facts)
        if self.limits.hides:
            return CheckedUpdate(update, None, False)
        most = self.run.federation.max_norm
        if most is None or norm <= most:
            return CheckedUpdate(update, norm, False)
        factor = most / norm
        slots: Slots = {slot: tensors.scale(part, factor) for slot, part in update.slots.items()}
        return CheckedUpdate(replace(update, delta=tensors.scale(update.delta, factor), slots=slots), norm, True)


def _measure(update: Update) -> DeltaFacts:
    """Return the facts about a finite delta, with its norm.

    Raises:
        InvalidUpdate: If a value is not finite.
    """
    facts = update.known_facts()
    if facts is not None and facts.finite and facts.square is not None:
        return facts
    # Facts that are not finite may be due to another client of the same block, so this one is measured by itself.
    return DeltaFacts(update.delta, True, *_squares(update.delta))


def _squares(part: Mapping[str, torch.Tensor]) -> tuple[float, dict[str, float]]:
    """Return the squared norm over all names, and by name."""
    squares = tensors.squared_norms(part)
    total = tensors.exact_sum(squares.values())
    if not math.isfinite(total):
        bad_name = next((name for name, square in squares.items() if not math.isfinite(square)), min(squares))
        raise InvalidUpdate(
            f"sent '{bad_name}' with values that are not finite; lower training.lr or set training.clip"
        )
    return total, squares


def _kind(value: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return value.dtype, value.device


def readable(update: Update) -> Update:
    """Return the update with plain containers of plain tensors.

    Raises:
        InvalidUpdate: If the update cannot be read.
    """
    try:
        return _readable(update)
    except InvalidUpdate:
        raise
    except Exception as error:  # a lazy mapping can raise anything when it is read
        raise InvalidUpdate(f"sent a reply that cannot be read: {shorten(error)}") from error


def _readable(update: Update) -> Update:
    if update.facts is not None and type(update.facts) is not DeltaFacts:
        raise InvalidUpdate(f"sent facts as {type(update.facts).__name__}")
    if update.work is not None and type(update.work) is not ComputedWork:
        raise InvalidUpdate(f"sent work as {type(update.work).__name__}")
    delta, steps, metrics = (_mapping(getattr(update, field), field) for field in ("delta", "steps", "metrics"))
    slots = {slot: _tensors(part, f"slot {shorten(slot)}") for slot, part in _mapping(update.slots, "slots").items()}
    delta = _tensors(delta, "delta")
    if all(new is getattr(update, field) for field, new in (("delta", delta), ("steps", steps), ("metrics", metrics))):
        return update if not slots else replace(update, slots=slots)
    return replace(update, delta=delta, slots=slots, steps=steps, metrics=metrics)


def _mapping(value: object, what: str) -> Mapping:  # type: ignore[type-arg]
    """Copy any mapping whose content could change between two reads."""
    if type(value) in _CONTAINERS:
        return value  # type: ignore[return-value]
    if not isinstance(value, Mapping):
        raise InvalidUpdate(f"sent {what} as {type(value).__name__}; it must be a mapping from names")
    return dict(value)


def _tensors(value: object, what: str) -> Tensors:
    part = _mapping(value, what)
    if isinstance(part, PackedTensors):
        return part  # type: ignore[return-value]  # only the engine of this process creates this type
    for name, tensor in part.items():
        if type(name) is not str or type(tensor) is not torch.Tensor:
            raise InvalidUpdate(
                f"sent {shorten(name)} in its {what} as {type(tensor).__name__}; it must be a tensor named by a text"
            )
        if (
            tensor.layout is not torch.strided
            or tensor.is_meta
            or tensor.requires_grad
            or serialization.code_of(tensor.dtype) is None
        ):
            raise InvalidUpdate(
                f"sent {shorten(name)} in its {what} as {tensor.dtype}, {tensor.layout} on {tensor.device}; it must be "
                "a dense tensor of numbers without a gradient"
            )
    return part  # type: ignore[return-value]


def _number(value: object) -> float | None:
    """The value as a float if it is a finite number, else None."""
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
    """Return a short text for any value that a client sent, for messages and records."""
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else repr(value)
    except Exception:
        text = f"an odd {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
