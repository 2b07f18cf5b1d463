"""Gradients of DP-SGD on a model whose per-example gradients are known by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import toy_run
from line_model import Line, line_batch, line_errors
from model_types import inputs_of, module_of
from torch import Tensor
from torch.nn import functional

from partita.core.client_rule import ClientRule, Context
from partita.core.data import Batch
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.model import Model, Output
from partita.core.noise import add_noise, gaussian_noise
from partita.core.plan import Phase, Plan
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models.hugging_face import from_module
from partita.tasks import KINDS
from partita.training import private_gradients
from partita.training.client_axis import ClientAxis, VmapError
from partita.training.dp_sgd import NoiseSource
from partita.training.ghost_clipping import CHECKED_EXAMPLES
from partita.training.ghost_layers import GhostError
from partita.training.objective import Objective
from partita.training.private_gradients import PrivateGradients

MODEL = Line()
CLIP = 0.75
QUIET = PrivacySettings(clip=CLIP, noise=0.0, clipping="direct")
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])


class Layer(Line):
    """The same line as a layer, which ghost clipping supports."""

    name = "layer"

    def __init__(self) -> None:
        self.initial = {"w": torch.tensor([[1.0, -2.0]]), "b": torch.tensor([0.5])}

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(functional.linear(inputs["x"], params["w"], params["b"]).squeeze(1))


@dataclass(frozen=True)
class Slope(ClientRule):
    """A penalty whose gradient with respect to b is `size`."""

    size: float | None
    per_example: bool = False

    def penalty(self, out: Any, params: Tensors, batch: Any, ctx: Context) -> Tensor | None:
        return None if self.size is None else self.size * params["b"].sum()


def make_estimator(
    settings: PrivacySettings = QUIET,
    clients: int = 1,
    rules: tuple[ClientRule, ...] = (),
    model: Model = MODEL,
    sources: Sequence[NoiseSource] = (),
    **training: Any,
) -> PrivateGradients:
    names = model.all_names()
    plan = Plan((Phase(names),), up=names, down=names)
    run = toy_run(Method("m", client_rules=rules, privacy=settings), **training)
    sources = sources or [NoiseSource(Key(rank), 4) for rank in range(clients)]
    return PrivateGradients(Objective(run, model, plan, 0.1, "cpu"), ClientAxis(clients), settings, sources)


def estimate(estimator: PrivateGradients, batch: Batch, params: Tensors | None = None) -> tuple[Tensors, Tensor]:
    values = [{}, {}, {}, {}, batch.inputs, batch.targets, batch.mask]
    return take_step(estimator, params or estimator.objective.model.initial, values, [None] * 8, 1)


def take_step(
    estimator: PrivateGradients, params: Tensors, values: list[Any], dims: list[Any], count: int
) -> tuple[Tensors, Tensor]:
    estimator.prepare(params, values, dims, count)
    return estimator(params, values, dims, count)


def clipped(batch: Batch, clip: float, shift: float = 0.0) -> Tensors:
    """The sum of clipped gradients, by hand; `shift` is the gradient of a per-example penalty for b."""
    total = {"w": torch.zeros(2), "b": torch.zeros(())}
    for place, error in enumerate(line_errors(MODEL.initial, batch)):
        if batch.mask is not None and not batch.mask[place]:
            continue
        own = {"w": error * batch.inputs["x"][place], "b": error + shift}
        norm = (own["w"].square().sum() + own["b"].square()).sqrt()
        for name, value in own.items():
            total[name] += value * min(1.0, clip / float(norm))
    return total


def assert_close(found: Tensors, expected: Tensors) -> None:
    torch.testing.assert_close(found, {name: expected[name].reshape(found[name].shape) for name in found})
    assert found.keys() == expected.keys()


# ---- clipping


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("microbatch", [None, 3])
def test_private_gradient_is_the_clipped_sum_over_the_expected_batch(
    mask: Tensor | None, microbatch: int | None
) -> None:
    """Some of these gradients are above the clip and some are below it. One of the parameters is a scalar."""
    batch = line_batch(4, mask)
    settings = PrivacySettings(clip=CLIP, noise=0.0, clipping="direct", microbatch=microbatch)
    grads, task = estimate(make_estimator(settings, sources=[NoiseSource(Key(0), 5)]), batch)
    assert_close(grads, {name: value / 5 for name, value in clipped(batch, CLIP).items()})
    losses = line_errors(MODEL.initial, batch).square() / 2
    weights = torch.ones(4) if mask is None else mask
    assert float(task) == pytest.approx(float((losses * weights).sum() / weights.sum()))


def test_private_gradients_of_a_block_are_those_of_each_client() -> None:
    """Each client's sum is divided by its own expected batch size; the last client has finished."""
    sources = [NoiseSource(Key(rank), 2 + rank) for rank in range(3)]
    estimator = make_estimator(clients=3, sources=sources)
    batches = [line_batch(4, MASK), line_batch(4, torch.ones(4))]
    params = {name: torch.stack([value, value]) for name, value in MODEL.initial.items()}
    x, targets, mask = (
        torch.stack(parts)
        for parts in ([b.inputs["x"] for b in batches], [b.targets for b in batches], [b.mask for b in batches])
    )
    values = [{}, {}, {}, {}, {"x": x}, targets, mask]
    grads, task = take_step(estimator, params, values, [0, None, None, None, None, 0, 0, 0], 2)
    assert task.shape == (2,)
    for rank, batch in enumerate(batches):
        own = {name: value[rank] for name, value in grads.items()}
        assert_close(own, {name: value / (2 + rank) for name, value in clipped(batch, CLIP).items()})


def test_penalties_are_clipped_only_if_they_read_examples() -> None:
    batch = line_batch(4)
    rules = (Slope(8.0), Slope(2.0, per_example=True), Slope(None), Slope(None, per_example=True), Slope(1.0))
    grads, task = estimate(make_estimator(rules=rules), batch)
    expected = {name: value / 4 for name, value in clipped(batch, CLIP, shift=2.0).items()}
    assert_close(grads, {"w": expected["w"], "b": expected["b"] + 9.0})
    assert float(task) == pytest.approx(float(line_errors(MODEL.initial, batch).square().mean() / 2))


# ---- noise


@pytest.mark.parametrize("clients", [1, 2])
def test_noise_is_drawn_for_each_step_and_client_at_noise_times_clip(clients: int) -> None:
    settings, quiet = PrivacySettings(clip=CLIP, noise=2.0, clipping="direct"), make_estimator(clients=clients)
    loud = make_estimator(settings, clients)
    batch = line_batch(4)
    params = MODEL.initial
    dims: list[Any] = [None] * 8
    if clients > 1:
        params = {name: torch.stack([value] * clients) for name, value in params.items()}
        batch = Batch({"x": torch.stack([batch.inputs["x"]] * clients)}, torch.stack([batch.targets] * clients))
        dims = [0, None, None, None, None, 0, 0, None]
    values = [{}, {}, {}, {}, batch.inputs, batch.targets, None]
    for step in range(2):
        found, plain = (take_step(each, params, values, dims, clients)[0] for each in (loud, quiet))
        for rank in range(clients):
            own = {name: value[rank] if clients > 1 else value for name, value in found.items()}
            total = {name: 4 * (value[rank] if clients > 1 else value) for name, value in plain.items()}
            noise = gaussian_noise(total, Key(rank) / step, 2.0 * CLIP)
            expected = {name: add_noise(value, noise[name], 2.0 * CLIP) / 4 for name, value in total.items()}
            torch.testing.assert_close(own, {name: expected[name] for name in own}, rtol=0, atol=1e-5)


@pytest.mark.parametrize("clients", [1, 2])
def test_a_new_phase_has_its_own_noise_and_batch_sizes_in_the_same_tensors(clients: int) -> None:
    """A captured step reads these tensors by address."""
    loud = make_estimator(PrivacySettings(clip=CLIP, noise=2.0, clipping="direct"), clients)
    params, batch, dims = MODEL.initial, line_batch(4), [0, None, None, None, None, 0, 0, None]
    if clients > 1:
        params = {name: torch.stack([value] * clients) for name, value in params.items()}
        batch = Batch({"x": torch.stack([batch.inputs["x"]] * clients)}, torch.stack([batch.targets] * clients))
    values = [{}, {}, {}, {}, batch.inputs, batch.targets, None]

    def addresses() -> list[int]:
        assert loud.shares is not None
        assert loud.noise is not None
        return [value.data_ptr() for value in (loud.shares, *loud.noise.held.values())]

    first, _ = take_step(loud, params, values, dims, clients)
    before = addresses()
    sources = [NoiseSource(Key(rank) / "later", 2 + rank) for rank in range(clients)]
    loud.begin(sources)
    again, _ = take_step(loud, params, values, dims, clients)
    assert addresses() == before
    fresh = make_estimator(PrivacySettings(clip=CLIP, noise=2.0, clipping="direct"), clients, sources=sources)
    torch.testing.assert_close(again, take_step(fresh, params, values, dims, clients)[0], rtol=0, atol=0)
    assert all(not torch.equal(first[name], again[name]) for name in first)


# ---- ghost clipping


@pytest.mark.parametrize("mask", [None, MASK])
def test_ghost_clipping_gives_the_same_gradient_as_direct_clipping(mask: Tensor | None) -> None:
    batch, model = line_batch(4, mask), Layer()
    expected = {name: value / 4 for name, value in clipped(batch, CLIP).items()}
    for clipping in ("direct", "ghost"):
        estimator = make_estimator(PrivacySettings(clip=CLIP, noise=0.0, clipping=clipping), model=model)  # type: ignore[arg-type]
        assert_close(estimate(estimator, batch)[0], expected)


@pytest.mark.parametrize(
    ("clipping", "clients", "rules", "ghost"),
    [
        ("direct", 1, (), False),
        ("auto", 1, (), True),
        ("ghost", 1, (), True),
        ("auto", 2, (), True),
        ("ghost", 2, (), True),
        ("auto", 1, (Slope(1.0), Slope(1.0, per_example=True)), False),
        ("auto", 1, (Slope(1.0),), True),
        ("ghost", 1, (Slope(1.0),), True),
        ("direct", 2, (), False),
    ],
)
def test_ghost_clipping_needs_a_loss_without_per_example_penalty(
    clipping: Any, clients: int, rules: tuple[ClientRule, ...], ghost: bool
) -> None:
    assert make_estimator(PrivacySettings(clip=CLIP, noise=0.0, clipping=clipping), clients, rules).ghost == ghost


@pytest.mark.parametrize("clients", [1, 2])
def test_required_ghost_clipping_is_refused_where_it_is_not_possible(clients: int) -> None:
    with pytest.raises(VmapError, match=r"the task's loss only.*; set privacy\.clipping = 'direct'$"):
        make_estimator(
            PrivacySettings(clip=CLIP, noise=0.0, clipping="ghost"), clients, (Slope(1.0, per_example=True),)
        )


class GhostCalls:
    """Counts calls of ghost_sum and the examples of each check, and passes them on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sums, self.checked = 0, list[tuple[int, int]]()
        ghost_sum, check_norms = private_gradients.ghost_sum, private_gradients.check_norms

        def counted_sum(*given: Any) -> Any:
            self.sums += 1
            return ghost_sum(*given)

        def counted_check(losses_of: Any, trainable: Tensors, inputs: Tensors, targets: Tensor, *more: Any) -> None:
            self.checked.append((len(inputs["x"]), len(targets)))
            check_norms(losses_of, trainable, inputs, targets, *more)

        monkeypatch.setattr(private_gradients, "ghost_sum", counted_sum)
        monkeypatch.setattr(private_gradients, "check_norms", counted_check)


def test_ghost_norms_are_checked_on_few_examples_in_the_first_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = GhostCalls(monkeypatch)
    estimator = make_estimator(PrivacySettings(clip=CLIP, noise=0.0, clipping="ghost"), model=Layer())
    for _ in range(3):
        estimate(estimator, line_batch(4))
    assert calls.checked == [(CHECKED_EXAMPLES, CHECKED_EXAMPLES)]
    assert calls.sums == 1 + 3, "one of the examples that are checked, and one per step"


@pytest.mark.parametrize(("threshold", "sums"), [(12, 0), (11, 1 + 1)])
def test_auto_clipping_uses_ghost_norms_above_the_threshold(
    threshold: int, sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four examples times three parameters."""
    calls = GhostCalls(monkeypatch)
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", threshold)
    estimate(make_estimator(PrivacySettings(clip=CLIP, noise=0.0, clipping="auto"), model=Layer()), line_batch(4))
    assert calls.sums == sums


def test_direct_clipping_never_uses_ghost_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = GhostCalls(monkeypatch)
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", 0)
    estimate(make_estimator(PrivacySettings(clip=CLIP, noise=0.0, clipping="direct"), model=Layer()), line_batch(4))
    assert calls.sums == 0


def test_unsupported_model_is_clipped_directly_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line uses its parameters in a matmul, which has no ghost norm."""
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", 0)
    estimator, batch = make_estimator(PrivacySettings(clip=CLIP, noise=0.0, clipping="auto")), line_batch(4)
    assert estimator.ghost
    assert_close(estimate(estimator, batch)[0], {name: value / 4 for name, value in clipped(batch, CLIP).items()})
    assert not estimator.ghost


def test_unsupported_model_is_refused_if_ghost_clipping_is_required() -> None:
    estimator = make_estimator(PrivacySettings(clip=CLIP, noise=0.0, clipping="ghost"))
    with pytest.raises(VmapError, match=r"'ghost', but line with m does not support it: '.' is used by") as caught:
        estimate(estimator, line_batch(4))
    assert isinstance(caught.value.__cause__, GhostError)


@pytest.mark.parametrize("clipping", ["ghost", "direct"])
def test_example_with_an_infinite_gradient_is_left_out(clipping: Any) -> None:
    """Beyond the examples that are checked, so that the sum of the whole batch must notice."""
    batch = line_batch(4)
    batch.inputs["x"][3, 0] = float("inf")
    found, _ = estimate(make_estimator(PrivacySettings(clip=CLIP, noise=0.0, clipping=clipping), model=Layer()), batch)
    batch = line_batch(4, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert_close(found, {name: value / 4 for name, value in clipped(batch, CLIP).items()})


@pytest.mark.parametrize("clipping", ["ghost", "direct"])
def test_forward_pass_runs_in_half_precision_and_sums_in_float32(clipping: Any) -> None:
    """Without a cache of casts: a cast made inside one transform is invalid in the next."""
    seen: list[tuple[torch.dtype, bool]] = []

    class Watched(Layer):
        def __call__(self, params: Tensors, inputs: Tensors) -> Output:
            out = super().__call__(params, inputs)
            seen.append((out.logits.dtype, torch.is_autocast_cache_enabled()))
            return Output(out.logits.float())

    settings = PrivacySettings(clip=CLIP, noise=0.0, clipping=clipping)
    batch = line_batch(4)
    found, _ = estimate(make_estimator(settings, model=Watched(), precision="bfloat16"), batch)
    assert seen[-1] == (torch.bfloat16, False)
    assert all(value.dtype == torch.float32 for value in found.values())
    for name, value in clipped(batch, CLIP).items():
        torch.testing.assert_close(found[name], value.reshape(found[name].shape) / 4, rtol=0.05, atol=0.02)


# ---- errors of vmap


class Branching(Line):
    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        out = super().__call__(params, inputs)
        return out if out.logits.sum() > 0 else Output(-out.logits)


@pytest.mark.parametrize(
    ("clients", "precision", "remedy"),
    [
        (1, "float32", "use another model, or no privacy"),
        (1, "bfloat16", "set training.precision = 'float32'"),
        (2, "float32", "set engine.clients_per_block = 1 to train clients one by one"),
        (2, "bfloat16", "set training.precision = 'float32'"),
    ],
)
def test_vmap_error_names_what_to_change(clients: int, precision: str, remedy: str) -> None:
    estimator = make_estimator(clients=clients, model=Branching(), precision=precision)
    batch, params = line_batch(4), dict(MODEL.initial)
    dims: list[Any] = [None] * 8
    if clients > 1:
        params = {name: torch.stack([value] * clients) for name, value in params.items()}
        batch = Batch({"x": torch.stack([batch.inputs["x"]] * clients)}, torch.stack([batch.targets] * clients))
        dims[0] = dims[5] = dims[6] = 0
    values = [{}, {}, {}, {}, batch.inputs, batch.targets, None]
    with pytest.raises(VmapError) as caught:
        take_step(estimator, params, values, dims, clients)
    text = str(caught.value)
    assert text.startswith("vmap does not support line with m over clients and, for privacy, over examples: ")
    assert text.endswith(f"; {remedy}")


# ---- a model that torch.vmap does not support


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("clipping", ["auto", "direct"])
def test_examples_of_a_model_that_vmap_cannot_lift_are_clipped_one_by_one(
    clipping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", 0)  # "auto" would try ghost clipping
    model, inputs = from_module("mpnet", module_of("mpnet-text"), kind=KINDS["text"]), inputs_of("text")
    batch = Batch(inputs, torch.arange(len(inputs["input_ids"])) % 2)
    wanted = {name: torch.zeros_like(value) for name, value in model.initial.items()}
    norms = []
    for place in range(len(batch.targets)):
        leaves = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
        one = {name: value[place : place + 1] for name, value in inputs.items()}
        loss = model.losses(model(leaves, one), batch.targets[place : place + 1]).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        norms.append(float(torch.stack([grad.square().sum() for grad in found]).sum().sqrt()))
        for name, grad in zip(leaves, found, strict=True):
            wanted[name] += grad * min(1.0, 0.1 / norms[-1]) / 4
    assert min(norms) > 0.1
    estimator = make_estimator(PrivacySettings(clip=0.1, noise=0.0, clipping=clipping), model=model)
    grads, _ = estimate(estimator, batch)
    torch.testing.assert_close(grads, wanted, atol=1e-6, rtol=1e-4)


class Unliftable(Layer):
    """A layer that claims that `torch.vmap` does not support it, with a parameter that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.initial["unused"] = torch.ones(3)
        self.asked = 0

    def why_one_by_one(self, inputs: Tensors) -> str:
        self.asked += 1
        return "it cannot"


@pytest.mark.parametrize("clipping", ["auto", "direct"])
def test_the_model_is_asked_once_and_ghost_clipping_is_not_tried(
    clipping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", 0)
    monkeypatch.setattr(private_gradients, "ghost_sum", None)
    monkeypatch.setattr(torch, "vmap", None)
    model = Unliftable()
    estimator = make_estimator(PrivacySettings(clip=CLIP, noise=0.0, clipping=clipping), model=model)
    for _ in range(2):
        grads, _ = estimate(estimator, line_batch())
        expected = {name: value / 4 for name, value in clipped(line_batch(), CLIP).items()}
        assert_close(grads, {**expected, "unused": torch.zeros(3)})
    assert model.asked == 1


def test_a_block_does_not_ask_the_model() -> None:
    model = Unliftable()
    batch = line_batch()
    stacked = {name: torch.stack([value] * 2) for name, value in model.initial.items()}
    inputs = {name: torch.stack([value] * 2) for name, value in batch.inputs.items()}
    values = [{}, {}, {}, {}, inputs, torch.stack([batch.targets] * 2), None]
    take_step(make_estimator(QUIET, 2, model=model), stacked, values, [0] * 7 + [None], 2)
    assert model.asked == 0


def test_ghost_clipping_stays_off_where_a_rule_forbids_it() -> None:
    estimator = make_estimator(
        PrivacySettings(clip=CLIP, noise=0.0, clipping="auto"), rules=(Slope(1.0, per_example=True),)
    )
    estimate(estimator, line_batch())
    assert not estimator.ghost
