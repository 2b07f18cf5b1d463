"""check_method passes every correct method, and names the property that a wrong method breaks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import Any

import image_fixtures
import numpy as np
import pytest
import torch
from helpers import Clients, ServerMomentum, toy_model
from method_options import BRIEF
from torch import Tensor

from partita.core import tensors
from partita.core.client_rule import ClientRule, Context, GradientAt, LayerSelection
from partita.core.compose import compose
from partita.core.data import Batch, Examples
from partita.core.method import Method
from partita.core.model import Model, Output
from partita.core.optim import SGD, Optimizer
from partita.core.plan import Plan, RoundInfo, share, share_everything
from partita.core.rng import Key
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Names, Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.core.update_transform import UpdateTransform
from partita.methods import COMPOSITIONS, INDEX, NEEDS_FACTORS, build
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedprox import fedprox
from partita.testing.conformance import ConformanceError, ConformanceReport, check_method
from partita.testing.toy import PooledPopulation


def check_on_small_federation(
    method: Method, tolerance: float = 1e-5, optimizer: Optimizer | None = None
) -> ConformanceReport:
    """Check on one layer and four small clients: the same properties in a quarter of the time."""
    if method.extend:
        return check_method(method, image_fixtures.small_vit(), image_fixtures.FOUR, optimizer, tolerance)
    if method.name in NEEDS_FACTORS:
        return check_method(method, image_fixtures.adapted_vit(), image_fixtures.FOUR, optimizer, tolerance)
    return check_method(method, toy_model(), Clients(c0=3, c1=9, c2=12, c3=6), optimizer, tolerance)


# ---- correct methods


@cache
def report_for(name: str) -> ConformanceReport:
    # A key bias has no gradient but rounding errors, and softmax is invariant to it. AdamW divides Ditto's pull on its
    # copy by the pull's own size, so these errors grow to full steps, even in float64.
    optimizer = SGD(momentum=0.9) if "ditto" in name.split("+") else None
    return check_on_small_federation(build(name, BRIEF.get(name.partition("+")[0], {})), optimizer=optimizer)


# The fast suite covers all methods, one of the FedOpt family, and one composition of each kind.
SLOW = {*COMPOSITIONS, "fedyogi", "fedadagrad"} - {"fedfrozen+scaffold", "fedper+moon+fedadam", "lora+fedprox+fedadam"}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in (*INDEX, *COMPOSITIONS)]
)
def test_every_method_and_supported_composition_conforms(name: str) -> None:
    findings = report_for(name)
    assert 0 <= findings.block_difference < 1e-5
    silent = name in ("local-only", "centralized", "coop", "zero-shot")
    assert (findings.bytes_up == 0) == (findings.bytes_down == 0) == silent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {}),
        ("fedprox", {"mu": 0.0}),
        ("fedprox", {"mu": 3.0}),
        ("fedfrozen", {"warmup": 0}),
        ("fedfrozen", {"warmup": 1.0}),
        ("fedfrozen", {"warmup": 2, "scope": "value"}),
        ("fedfrozen", {"warmup": 1, "freeze": "random", "seed": 3}),
        ("fedfrozen", {"warmup": 1, "freeze": "value"}),
        ("fedfrozen", {"warmup": 1, "freeze": "mlp"}),
        ("fedfrozen+fedprox", {"warmup": 2, "mu": 0.5}),
        ("scaffold", {"lr": 0.5}),
        ("feddyn", {"alpha": 1.0}),
        ("moon", {"mu": 5.0}),
        ("fedadam", {"debias": False}),
        ("fedpart", {"full_rounds": 1, "rounds_per_layer": 1}),
        ("layer-skipping", {"layers": [0]}),
        ("fedper", {"personal": ["head", "norm"]}),
        ("fedrep", {"body_epochs": 2}),
        ("fedbabu", {"tune": "head"}),
        ("fedtp", {"hidden": 4, "embedding": 2}),
        ("apfl", {"adaptive": False}),
        ("pfedme", {"inner_steps": 2, "beta": 2.0}),
        ("local-only", {}),
        ("centralized", {}),
    ],
)
def test_every_method_conforms_in_every_setting(name: str, options: dict[str, Any]) -> None:
    """The method itself conforms with AdamW, above. Here is the other optimizer, with all it can do."""
    method, optimizer = build(name, options), SGD(momentum=0.9, nesterov=True, weight_decay=0.01)
    check_on_small_federation(method, optimizer=optimizer if method.supports_optimizer(optimizer.name) else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedfrozen"])
def test_default_federation_of_the_check(name: str) -> None:
    assert check_method(build(name, {})).block_difference < 1e-5


def test_fedfrozen_sends_fewer_bytes_than_fedavg() -> None:
    plain, thrifty = report_for("fedavg"), report_for("fedfrozen")
    assert thrifty.bytes_up < plain.bytes_up
    assert thrifty.bytes_down < plain.bytes_down


HEAD = frozenset({"head.weight"})


def plan_keeping_the_head(model: Model, round_info: RoundInfo) -> Plan:
    return share(model.all_names(), down=model.all_names() - HEAD, keep=HEAD)


@dataclass(frozen=True)
class DragRule(ClientRule):
    """A rule with memory, a gradient correction from it, and a slot sent up."""

    slots: Names = frozenset({"drag"})

    def memory(self, anchor: Tensors) -> Slots:
        return {"drag": {name: torch.zeros_like(value) for name, value in anchor.items()}}

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        return {name: grad + 0.1 * ctx.memory["drag"][name] for name, grad in grads.items()}

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        drag = {"drag": {name: (ctx.anchor[name] - params[name]) / (steps[name] * ctx.lr) for name in steps}}
        return drag, drag


@dataclass(frozen=True)
class RandomRounding(UpdateTransform):
    """Perturbs the delta with its key."""

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        delta = {name: value + 1e-3 * (key / name).uniform() for name, value in update.delta.items()}
        return replace(update, delta=delta), {}


@pytest.mark.slow
def test_method_with_every_kind_of_state_conforms() -> None:
    """Personal parameters, memory, slots, a keyed transform, a carried optimizer and a server with momentum."""
    parts = (
        Method("own", plan_keeping_the_head, (DragRule(),)),
        Method("b", transforms=(RandomRounding(),), server_rule=ServerMomentum()),
    )
    whole = replace(compose(*parts, fedprox(0.5)), carry_optimizer=True)
    assert (
        check_on_small_federation(whole, tolerance=2e-5).bytes_up > report_for("fedavg").bytes_up
    )  # the slot is sent too


@dataclass(frozen=True)
class LargestGradients(ClientRule):
    """Trains the half of the names with the larger gradients at the anchor: a choice made on the client's data."""

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        batch = probe.take(torch.arange(min(4, len(probe))))
        names = sorted(plan.train)
        live = {name: ctx.anchor[name].detach().clone().requires_grad_() for name in names}
        losses = ctx.model.losses(ctx.model(live, batch.inputs), batch.targets)
        slopes = torch.autograd.grad(losses.mean(), list(live.values()))
        ranked = sorted(zip(names, slopes, strict=True), key=lambda pair: -float(pair[1].norm()))
        return LayerSelection(frozenset(name for name, _ in ranked[: len(ranked) // 2]))


@pytest.mark.slow
def test_method_that_selects_by_data_conforms() -> None:
    check_on_small_federation(Method("largest", client_rules=(LargestGradients(),)))


CALLS = count()


@dataclass(frozen=True)
class StartsAhead(ClientRule):
    """Starts one gradient step ahead on its own data, remembers where, and steps by a gradient further ahead."""

    mistake: str = ""
    uses_data: bool = True
    slots: Names = frozenset({"start"})

    def memory(self, anchor: Tensors) -> Slots:
        return {"start": anchor}

    def start(self, params: Tensors, examples: Examples, ctx: Context, key: Key) -> tuple[Tensors, Slots]:
        shift = 1e-2 * len(examples) + 1e-2 * (key / "shift").uniform()
        if self.mistake == "counts calls":
            shift += 1e-4 * next(CALLS)
        values = {name: params[name] + shift * ctx.memory["start"][name] for name in sorted(ctx.plan.train)}
        if self.mistake == "writes memory":
            next(iter(ctx.memory["start"].values())).mul_(0.5)
        return values, {"started": values}

    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        grads = gradient_at({})
        factor = 0.05 / tensors.norm(grads)
        if self.mistake == "writes params":
            for name in grads:
                params[name].mul_(0.99)
        return gradient_at({name: params[name] + factor * grad for name, grad in grads.items()})

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        return {}, {"start": ctx.notes.get("started", {})}


@pytest.mark.slow
def test_method_that_starts_elsewhere_and_evaluates_gradients_itself_conforms() -> None:
    check_on_small_federation(Method("ahead", client_rules=(StartsAhead(),)))


def test_data_of_any_inputs_can_be_pooled() -> None:
    pooled = PooledPopulation(image_fixtures.FOUR)["pooled"].train
    parts = [image_fixtures.FOUR[client].train for client in image_fixtures.FOUR.clients]
    assert len(pooled) == sum(map(len, parts))
    last = parts[-1].take(torch.tensor([2]))
    batch = pooled.take(torch.tensor([len(pooled) - len(parts[-1]) + 2]))
    assert torch.equal(batch.inputs["pixel_values"], last.inputs["pixel_values"])
    assert torch.equal(batch.targets, last.targets)


# ---- wrong methods


@dataclass
class HiddenMemory(ClientRule):
    """Keeps state in self that it should return."""

    seen: dict[str, float] = field(default_factory=dict)

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        self.seen["steps"] = self.seen.get("steps", 0.0) + 1
        return {}, {}

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        factor = 1 + 0.1 * self.seen.get("steps", 0.0)
        return {name: grad * factor for name, grad in grads.items()}


@dataclass
class ForgetsOnResume(ServerRule):
    """Keeps its velocity in self and resets it in a new run, so only a resumed run is wrong."""

    velocity: Tensors = field(default_factory=dict)

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        if not server.versions.held:  # the first round of a run
            self.velocity = {}
        self.velocity = {name: 0.5 * self.velocity.get(name, 0.0) + value for name, value in aggregate.delta.items()}
        return super().apply(server, replace(aggregate, delta=self.velocity))


@dataclass(frozen=True)
class GlobalNoise(ClientRule):
    """Draws from torch's global state instead of a key."""

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        return {name: grad + 0.1 * torch.randn(grad.shape, dtype=grad.dtype) for name, grad in grads.items()}


@dataclass(frozen=True)
class NumpyNoise(ClientRule):
    """Draws from numpy's global state."""

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        return {name: grad + 0.1 * float(np.random.random()) for name, grad in grads.items()}


@dataclass(frozen=True)
class PythonNoise(ClientRule):
    """Draws from Python's global state."""

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        return {name: grad + 0.1 * random.random() for name, grad in grads.items()}


@dataclass(frozen=True)
class SendsHint(ServerRule):
    """Sends the parameters again as a slot."""

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        params, _ = super().send(server, client, names)
        return params, {"hint": {name: value.clone() for name, value in params.items()}}


@dataclass(frozen=True)
class WritesHint(ClientRule):
    """Changes a slot that the server sent in place."""

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        ctx.sent["hint"]["head.weight"].add_(1e-3)
        return {}, {}


@dataclass(frozen=True)
class OtherNoise(UpdateTransform):
    """Draws from Python's global state."""

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        return replace(update, delta={name: value + random.random() for name, value in update.delta.items()}), {}


@dataclass(frozen=True)
class MovesFrozen(ServerRule):
    """A weight decay at the server, over all names."""

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        server = super().apply(server, aggregate)
        return replace(server, params={name: value * 0.99 for name, value in server.params.items()})


@dataclass(frozen=True)
class InPlace(ServerRule):
    """Changes the server's tensors in place, so that the change cannot be detected."""

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        for name, value in aggregate.delta.items():
            server.params[name].add_(value)
        return server


@dataclass(frozen=True)
class InPlaceState(ServerMomentum):
    """Changes its state in place."""

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        for value in server.state["velocity"].values():
            value.mul_(0.5)
        return super().apply(server, aggregate)


@dataclass(frozen=True)
class LeaksPersonalName(UpdateTransform):
    """Adds a personal name to the update after the plan was applied."""

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        return replace(update, delta={**update.delta, "head.weight": torch.zeros(3, 4)}), {}


@dataclass(frozen=True)
class SendsFrozenName(UpdateTransform):
    """Sends a frozen name."""

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        extra = torch.zeros(4, 4, dtype=update.delta["head.weight"].dtype)
        return replace(update, delta={**update.delta, "layers.0.key.weight": extra}), {}


@dataclass
class PlanWithCounter:
    """A plan that depends on a counter of its calls."""

    calls: int = 0

    def __call__(self, model: Model, round_info: RoundInfo) -> Plan:
        self.calls += 1
        return share_everything(model, round_info).narrow(
            model.all_names() - (HEAD if self.calls % 7 == 0 else frozenset())
        )


@dataclass
class FollowsOthers(ClientRule):
    """Carries a number from one client to the next."""

    last: float = 0.0

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> Tensor:
        factor = 0.3 if self.last == ctx.lr * len(batch.targets) else 0.1
        self.last = ctx.lr * len(batch.targets)
        return factor * params["head.weight"].pow(2).sum()


@dataclass(frozen=True)
class SeesTheBlock(ClientRule):
    """A penalty that counts examples, including the padding of a block."""

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> Tensor:
        return 0.1 * len(batch.targets) * params["head.weight"].pow(2).sum()


@dataclass(frozen=True)
class WritesAnchor(ClientRule):
    """Changes the anchor in place."""

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        ctx.anchor["head.weight"].add_(1e-3)
        return {}, {}


@dataclass(frozen=True)
class SendsLess(UpdateTransform):
    """Sends fewer names when the update is small, which the plan cannot predict."""

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        small = {name for name, value in update.delta.items() if float(value.abs().max()) < 0.02}
        return replace(update, delta={name: value for name, value in update.delta.items() if name not in small}), {}


@dataclass(frozen=True)
class Momentum(UpdateTransform):
    """Sends a velocity that it remembers, as one of the mistakes that there are."""

    mistake: str = ""
    slots: Names = frozenset({"velocity"})

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        old = memory.get("velocity", {})
        if self.mistake == "writes memory":
            for value in old.values():
                value.mul_(0.5)
        if self.mistake == "writes the update":
            next(iter(update.delta.values())).add_(1e-3)
        new = {name: value + 0.5 * old[name] if name in old else value for name, value in update.delta.items()}
        return replace(update, delta=new), {"other" if self.mistake == "another slot" else "velocity": new}


@pytest.mark.slow
def test_a_transform_with_memory_conforms() -> None:
    check_on_small_federation(Method("momentum", transforms=(Momentum(), RandomRounding())), tolerance=2e-5)


@dataclass
class MemoryInSelf(UpdateTransform):
    """Remembers in self, by round, so that runs from the start agree."""

    last: dict[str, Tensors] = field(default_factory=dict)

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        old = self.last.get(update.client, {}) if update.round else {}
        self.last[update.client] = new = {
            name: value + 0.5 * old[name] if name in old else value for name, value in update.delta.items()
        }
        return replace(update, delta=new), {}


@dataclass(frozen=True)
class CopiesUnchanged(ServerRule):
    """Copies unchanged tensors, so that all are sent again in every round."""

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        server = super().apply(server, aggregate)
        return replace(server, params={name: value.clone() for name, value in server.params.items()})


WRONG_METHODS: dict[str, tuple[Method, str]] = {
    "hidden memory": (Method("m", client_rules=(HiddenMemory(),)), "the same run gives two results"),
    "global noise": (Method("m", client_rules=(GlobalNoise(),)), "torch's global random state"),
    "numpy's noise": (Method("m", client_rules=(NumpyNoise(),)), "numpy's global random state"),
    "python's noise in a rule": (Method("m", client_rules=(PythonNoise(),)), "Python's global random state"),
    "changes a slot it was sent": (
        Method("m", client_rules=(WritesHint(),), server_rule=SendsHint()),
        "it modifies the tensors it was sent",
    ),
    "python's noise": (Method("m", transforms=(OtherNoise(),)), "OtherNoise.encode gives two results for the same"),
    "a velocity in self": (Method("m", server_rule=ForgetsOnResume()), "resumed after round 0 .* the result differs"),
    "a plan with a counter": (Method("m", plan=PlanWithCounter()), "its plan for .* differs from one call to the next"),
    "hands on copies": (
        Method("m", fedfrozen(1).plan, server_rule=CopiesUnchanged()),
        r"'layers\.0\.key\.bias' did not change in round 1, but was copied",
    ),
    "moves a frozen name": (
        Method("m", fedfrozen(2).plan, server_rule=MovesFrozen()),
        r"'layers\.0\.key\.bias' changed in round 2, but no client trained it",
    ),
    "moves in place": (
        Method("m", server_rule=InPlace()),
        "it modifies the server's tensors in place in round 0, so no client is sent the change",
    ),
    "moves its state in place": (
        Method("m", server_rule=InPlaceState()),
        "it modifies the server's tensors in place in round 1",
    ),
    "leaks a personal name": (
        Method("m", plan_keeping_the_head, transforms=(LeaksPersonalName(),)),
        "'head.weight' is kept by the client, but is in its update",
    ),
    "sends a frozen name": (
        Method("m", fedfrozen(0).plan, transforms=(SendsFrozenName(),)),
        r"'layers\.0\.key\.weight' is in an update, but the plan does not send it up",
    ),
    "follows other clients": (Method("m", client_rules=(FollowsOthers(),)), "differs|depends"),
    "sees the block": (Method("m", client_rules=(SeesTheBlock(),)), "in blocks of"),
    "changes what it was sent": (Method("m", client_rules=(WritesAnchor(),)), "it modifies the tensors it was sent"),
    "writes its memory": (
        Method("m", transforms=(Momentum("writes memory"),)),
        r"Momentum\.encode modifies the update or the memory that it is given",
    ),
    "writes the update": (
        Method("m", transforms=(Momentum("writes the update"),)),
        r"Momentum\.encode modifies the update or the memory that it is given",
    ),
    "remembers another slot": (
        Method("m", transforms=(Momentum("another slot"),)),
        r"Momentum\.encode remembers 'other', which is not in its slots",
    ),
    "remembers in self": (
        Method("m", transforms=(MemoryInSelf(),)),
        r"MemoryInSelf\.encode gives two results for the same update and memory",
    ),
    "starts elsewhere at each call": (
        Method("m", client_rules=(StartsAhead("counts calls"),)),
        r"StartsAhead\.start gives two results for the same arguments",
    ),
    "writes its memory at the start": (
        Method("m", client_rules=(StartsAhead("writes memory"),)),
        r"StartsAhead\.start modifies the tensors that it is given|it modifies the",
    ),
    "writes the parameters in a step": (
        Method("m", client_rules=(StartsAhead("writes params"),)),
        r"StartsAhead\.step_gradient modifies the tensors that it is given",
    ),
    "sends other names than planned": (Method("m", transforms=(SendsLess(),)), "the dry run predicts other bytes"),
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("kind", WRONG_METHODS)
def test_broken_promise_is_named(kind: str) -> None:
    method, message = WRONG_METHODS[kind]
    with pytest.raises(ConformanceError, match=message):
        check_on_small_federation(method)
