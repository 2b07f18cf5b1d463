"""Hostile replies: named changes of an honest reply, and an engine in which one client sends them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partita.core import tensors
from partita.core.client import ClientState, Job
from partita.core.rounds import ClientFailure
from partita.core.update import Update
from partita.engines.simulation import SimulationEngine
from partita.storage.client_store import MemoryStore

HOSTILE_CLIENT, HOSTILE_ROUND = "b", 1  # the hostile client and its round
MOST_KNOWN = 3  # jobs of one client and round that are remembered: with the hostile reply and without it
Change = Callable[
    [Update], list[object] | None
]  # the replies sent instead of the honest one; None if the change does not apply


@dataclass(frozen=True)
class Case:
    """`refused` is the expected outcome; None if both are fine, such as for a reply in another client's name."""

    name: str
    change: Change
    refused: bool | None = True


class Replies:
    """Honest replies, each trained once: whatever the hostile client sends, the others get nearly the same jobs."""

    def __init__(self) -> None:
        self.known: list[tuple[Job, Update | ClientFailure, tuple[int, ClientState] | None]] = []

    def reply(self, engine: SimulationEngine, job: Job) -> Update | ClientFailure:
        """Return the reply to a job, and leave the client's state after it in the engine's store."""
        assert isinstance(engine.store, MemoryStore)
        for other, reply, state in self.known:
            if _same(job, other):
                if state is not None:
                    engine.store.held[job.client] = state
                return reply
        [reply] = engine.train([job])
        if sum((job.client, job.round) == (other.client, other.round) for other, *_ in self.known) < MOST_KNOWN:
            self.known.append((job, reply, engine.store.held.get(job.client)))
        return reply


def _same(job: Job, other: Job) -> bool:
    texts = [(each.round, each.client, each.stale, each.signal, each.slots.keys()) for each in (job, other)]
    return (
        texts[0] == texts[1]
        and tensors.equal(job.params, other.params)
        and all(tensors.equal(part, other.slots[slot]) for slot, part in job.slots.items())
    )


class HostileEngine:
    """An engine with one hostile client in one round, which replies at a place among the others.

    The client's state stays as if it had been absent.
    """

    def __init__(self, engine: SimulationEngine, case: Case, replies: Replies, place: int = 1) -> None:
        self.engine, self.case, self.replies, self.place = engine, case, replies, place
        self.possible = True

    def clients(self) -> Sequence[str]:
        return self.engine.clients()

    def train(self, jobs: Iterable[Job]) -> Iterator[Any]:
        asked = list(jobs)
        if hostile := [job for job in asked if (job.client, job.round) == (HOSTILE_CLIENT, HOSTILE_ROUND)]:
            asked.remove(hostile[0])
            asked.insert(self.place, hostile[0])
        for job in asked:
            if job not in hostile:
                yield self.replies.reply(self.engine, job)
                continue
            store = MemoryStore()
            assert isinstance(self.engine.store, MemoryStore)
            store.held = dict(self.engine.store.held)
            self.engine.store, kept = store, self.engine.store
            honest = self.replies.reply(self.engine, job)
            self.engine.store = kept
            assert isinstance(honest, Update)
            sent = self.case.change(honest)
            self.possible = sent is not None
            yield from [honest] if sent is None else sent

    def evaluate(self, jobs: Iterable[Job]) -> Iterator[tuple[str, dict[str, float]]]:
        raise NotImplementedError


# ---- ways to change one part of a reply


def all_tensors(change: Callable[[Tensor], object]) -> Change:
    """Change all tensors of the delta."""
    return lambda u: [replace(u, delta={name: change(each) for name, each in u.delta.items()})] if u.delta else None


def one_tensor(change: Callable[[Tensor], object]) -> Change:
    """Change one tensor of the delta, preferably one that is not quantized."""

    def changed(u: Update) -> list[object] | None:
        if not u.delta:
            return None
        name = min(u.delta, key=lambda name: (not u.delta[name].is_floating_point(), name))
        return [replace(u, delta={**u.delta, name: change(u.delta[name])})]

    return changed


def replace_fields(**fields: object) -> Change:
    return lambda u: [replace(u, **fields)]  # type: ignore[arg-type]


def all_slots(change: Callable[[dict[str, Tensor]], object]) -> Change:
    """Change every slot of the honest reply."""
    return lambda u: [replace(u, slots={slot: change(dict(p)) for slot, p in u.slots.items()})] if u.slots else None


def slot_tensors(change: Callable[[Tensor], object]) -> Change:
    return all_slots(lambda part: {name: change(value) for name, value in part.items()})


def set_steps(value: object) -> Change:
    return lambda u: [replace(u, steps=dict.fromkeys(u.steps, value))] if u.delta else None


def fill_with(value: float) -> Callable[[Tensor], Tensor]:
    return lambda each: torch.full_like(each, value) if each.is_floating_point() else each


def set_one_number(value: float) -> Callable[[Tensor], Tensor]:
    """Set one number and keep the others."""

    def change(each: Tensor) -> Tensor:
        spoilt = each.clone()
        spoilt.view(-1)[0] = value if each.is_floating_point() else 0
        return spoilt

    return change


class FailingMapping(Mapping[Any, Any]):
    """A mapping that raises when one of its methods is called."""

    def __init__(self, inner: Mapping[Any, Any], fails: str) -> None:
        self.inner, self.fails = inner, fails

    def _spring(self, method: str) -> None:
        if method == self.fails:
            raise KeyError(f"no {method} today")

    def __getitem__(self, key: Any) -> Any:
        self._spring("getitem")
        return self.inner[key]

    def __iter__(self) -> Iterator[Any]:
        self._spring("iter")
        return iter(self.inner)

    def __len__(self) -> int:
        self._spring("len")
        return len(self.inner)


class ChangingMapping(Mapping[str, Tensor]):
    """A mapping whose tensors are honest at the first access and NaN from the second on."""

    def __init__(self, inner: Mapping[str, Tensor]) -> None:
        self.inner, self.seen = inner, set[str]()

    def __getitem__(self, name: str) -> Tensor:
        value = self.inner[name]
        if name in self.seen:
            return value * math.nan
        self.seen.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


KINDS = {
    "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8,
    "bool": torch.bool, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64,
    "complex64": torch.complex64,
}  # fmt: skip
ODD: dict[str, object] = {
    "None": None, "text": "5", "list": [1.0], "True": True, "complex": 1j, "10^5000": 10**5000,
    "tensor": torch.ones(()), "dict": {"a": 1},
}  # fmt: skip
HUGE = {"3e38": 3e38, "-3e38": -3e38, "1e30": 1e30, "1e12": 1e12}
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
SHAPES: dict[str, Callable[[Tensor], object]] = {
    "0-d": lambda each: each.sum(),
    "empty": lambda each: each.new_zeros(0),
    "flat and longer": lambda each: each.new_zeros(each.numel() + 1),
    "one more dimension": lambda each: each.unsqueeze(0),
    "sparse": lambda each: each.to_sparse(),
    "meta": lambda each: each.to("meta"),
    "with a gradient": lambda each: each.float().clone().requires_grad_(),
    "None": lambda each: None,
    "a number": lambda each: 1.0,
    "a list": lambda each: each.tolist(),
}


def _tensor_cases() -> Iterator[Case]:
    for name, kind in KINDS.items():
        # Cast zeros, because a quantizing transform gives other int8 values a meaning.
        yield Case(f"delta as {name}", all_tensors(lambda each, kind=kind: torch.zeros_like(each).to(kind)))  # type: ignore[misc]
        yield Case(f"one of delta as {name}", one_tensor(lambda each, kind=kind: torch.zeros_like(each).to(kind)))  # type: ignore[misc]
    for name, change in SHAPES.items():
        yield Case(f"delta {name}", all_tensors(change))
        yield Case(f"one of delta {name}", one_tensor(change))
    for name, value in NOT_FINITE.items():
        yield Case(f"delta of {name}", all_tensors(fill_with(value)))
        yield Case(f"one number of delta {name}", one_tensor(set_one_number(value)))
    for name, value in HUGE.items():
        yield Case(f"delta of {name}", all_tensors(fill_with(value)))
        yield Case(f"one number of delta {name}", one_tensor(set_one_number(value)))
    yield Case("delta of subnormal numbers", all_tensors(fill_with(1e-40)), refused=False)
    yield Case("delta of zeros", all_tensors(fill_with(0.0)), refused=False)
    yield Case("delta a hundredfold", all_tensors(lambda each: each * 100 if each.is_floating_point() else each), False)
    yield Case(
        "delta in a strided view", all_tensors(lambda each: torch.stack([each, each], -1)[..., 0]), refused=False
    )


def _name_cases() -> Iterator[Case]:
    def with_name(name: object) -> Change:
        return lambda u: [replace(u, delta={**u.delta, name: torch.zeros(2)}, steps={**u.steps, name: 1})]  # type: ignore[dict-item]

    def personal(u: Update) -> list[object] | None:
        kept = u.steps.keys() - u.delta.keys()
        return [replace(u, delta={**u.delta, min(kept): torch.zeros(3, 4)})] if kept else None

    def missing(u: Update) -> list[object] | None:
        return [replace(u, delta={name: u.delta[name] for name in sorted(u.delta)[1:]})] if u.delta else None

    yield Case("an unknown name", with_name("nowhere"))
    yield Case("an empty name", with_name(""))
    yield Case("a name that is no text", with_name(7))
    yield Case("a name of markup", with_name("<script>alert(1)</script>" * 100))
    yield Case("a personal name", personal)
    yield Case("a name missing", missing, refused=None)
    yield Case("no names", lambda u: [replace(u, delta={}, slots={})] if u.delta else None, refused=None)


def _slot_cases() -> Iterator[Case]:
    def beside(slot: object, value: object = None) -> Change:
        return lambda u: [replace(u, slots={**u.slots, slot: u.delta if value is None else value})]  # type: ignore[dict-item]

    for slot in ("unknown", "delta", "params", "personal", "", 7):
        yield Case(f"a slot called {slot!r}", beside(slot))
    yield Case("an empty slot that is unknown", beside("unknown", {}))
    yield Case("a slot that is a list", beside("unknown", [1.0]))
    yield Case("half a slot", all_slots(lambda part: dict(sorted(part.items())[: len(part) // 2])))
    yield Case("an empty slot", all_slots(lambda part: {}))
    yield Case("a slot with a name more", all_slots(lambda part: {**part, "nowhere": torch.zeros(2)}), refused=None)
    yield Case("a slot that is None", all_slots(lambda part: None))
    yield Case("no slots", lambda u: [replace(u, slots={})] if u.slots else None)
    for name, kind in KINDS.items():
        yield Case(f"slots as {name}", slot_tensors(lambda each, kind=kind: torch.zeros_like(each).to(kind)), None)  # type: ignore[misc]
    for name, change in SHAPES.items():
        yield Case(f"slots {name}", slot_tensors(change), refused=None)
    for name, value in {**NOT_FINITE, **HUGE}.items():
        yield Case(f"slots of {name}", slot_tensors(fill_with(value)), refused=None)


def _number_cases() -> Iterator[Case]:
    weights = {"0": 0.0, "-1": -1.0, "1e12": 1e12, "1e308": 1e308, "its size and 1": 7.0, **NOT_FINITE, **ODD}
    for name, value in weights.items():
        yield Case(f"weight {name}", replace_fields(weight=value))
    yield Case("weight of subnormal size", replace_fields(weight=5e-324), refused=False)
    steps = {"0": 0, "-1": -1, "10^15": 10**15, "3": 3, "1.5": 1.5, **NOT_FINITE, **ODD}  # 6 examples: 2 steps
    for name, value in steps.items():
        yield Case(f"steps of {name}", set_steps(value))
        yield Case(f"steps {name}", lambda u, value=value: [replace(u, steps=value)] if u.delta else None)  # type: ignore[misc]
    yield Case("no steps", lambda u: [replace(u, steps={})] if u.delta else None)
    losses = {"-1e308": -1e308, "1e308": 1e308, **NOT_FINITE, **ODD}
    for name, value in losses.items():
        yield Case(f"loss {name}", replace_fields(loss=value), refused=name != "None")
    told: dict[str, object] = {
        **{f"of {name}": {"attention/layer.0": value} for name, value in {**NOT_FINITE, **ODD, "1e308": 1e308}.items()},
        **{name: value for name, value in ODD.items() if name != "dict"},
        "a layer that is not there": {"attention/layer.zero": 1.0},
        "a layer in other digits": {"attention/layer.٣": 1.0},
        "markup": {"<script>alert(1)</script>": 1.0},
        "a line break": {"attention/layer.0\n": 1.0},
        "a long text": {"a" * 10_000: 1.0},
        "many": {f"attention/{number}": 1.0 for number in range(5000)},
        "a number": {7: 1.0},
    }
    for name, value in told.items():
        yield Case(f"told {name}", replace_fields(metrics=value))


def _whole_reply_cases() -> Iterator[Case]:
    for field in ("delta", "slots", "steps", "metrics"):
        for name in ("None", "text", "list", "10^5000", "tensor"):
            if field != "metrics":
                yield Case(f"{field} is {name}", replace_fields(**{field: ODD[name]}))
        for fails in ("getitem", "iter", "len"):
            yield Case(
                f"{field} fails at {fails}",
                lambda u, field=field, fails=fails: [
                    replace(u, **{field: FailingMapping(getattr(u, field) or {"attention/layer.0": 1.0}, fails)})  # type: ignore[misc]
                ],
                refused=None if fails == "len" else True,
            )
    yield Case("delta changes while it is read", lambda u: [replace(u, delta=ChangingMapping(u.delta))], refused=None)
    for name, value in {**ODD, "no text": "", "a stranger": "mallory", "the next": "c", "the last": "a"}.items():
        yield Case(f"client is {name}", replace_fields(client=value), refused=None if name.startswith("the ") else True)
    for name, value in {"text": "hello", "None": None, "dict": {}, "number": 5, "error": ValueError("boom")}.items():
        yield Case(f"no update but {name}", lambda u, value=value: [value])  # type: ignore[misc]
    yield Case("the same reply twice", lambda u: [u, u], refused=False)
    yield Case("two replies", lambda u: [u, replace(u, weight=1.0)], refused=False)
    yield Case("a reply and junk", lambda u: [u, None, "x"], refused=False)
    yield Case("a reply and a stranger's", lambda u: [u, replace(u, client="mallory")], refused=False)
    yield Case("a reply and a loss", lambda u: [u, ClientFailure(u.client, "asleep")], refused=False)
    yield Case("a loss and a reply", lambda u: [ClientFailure(u.client, "asleep"), u])
    yield Case("the loss of a stranger", lambda u: [u, ClientFailure("mallory", "asleep")], refused=False)
    yield Case("no reply", lambda u: [])
    if "round" in Update.__dataclass_fields__:
        for name, value in {"0": 0, "2": 2, "99": 99, "-1": -1, "1.0": 1.0, **ODD}.items():
            yield Case(f"round {name}", replace_fields(round=value), refused=name != "None")
        yield Case("an old reply and the true one", lambda u: [replace(u, round=0), u], refused=False)  # type: ignore[call-arg]


CASES: tuple[Case, ...] = (*_tensor_cases(), *_name_cases(), *_slot_cases(), *_number_cases(), *_whole_reply_cases())
