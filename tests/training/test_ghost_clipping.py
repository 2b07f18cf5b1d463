"""Ghost clipping: norms computed from layer inputs and outputs equal those of the gradients, or are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ghost_fixtures import KINDS, TextClients, tiny_batch, tiny_model
from helpers import Clients, final_params, max_difference, play, toy_model, toy_run
from torch import Tensor
from torch.nn import functional

from partita.core.data import Batch, ClientData
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.model import Model, Output
from partita.core.tensors import Tensors
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.training import private_gradients
from partita.training.client_axis import VmapError
from partita.training.dp_sgd import clipped_sum, per_example_gradients
from partita.training.ghost_clipping import check_norms, ghost_sum
from partita.training.ghost_layers import GhostError


def perturbed_params(model: Model) -> Tensors:
    """Parameters away from the initialization, whose zeros and ones hide mistakes."""
    draw = torch.Generator().manual_seed(5)
    return {name: value + 0.3 * torch.randn(value.shape, generator=draw) for name, value in model.initial.items()}


def example_loss(model: Model, rest: Tensors):  # type: ignore[no-untyped-def]
    def loss(trainable: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
        task = model.losses(model({**rest, **trainable}, inputs), targets).sum()
        return task, task

    return loss


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("tags", [(), ("query", "norm"), ("mlp", "head")], ids=["all", "query, norm", "mlp, head"])
@pytest.mark.parametrize("kind", KINDS)
def test_ghost_sum_and_norms_equal_per_example_gradients(kind: str, tags: tuple[str, ...]) -> None:
    model, batch = tiny_model(kind), tiny_batch(kind)
    params = perturbed_params(model)
    names = model.names(*tags) if tags else model.all_names()
    trainable = {name: params[name] for name in sorted(names)}
    rest = {name: value for name, value in params.items() if name not in trainable}
    loss = example_loss(model, rest)
    _, norms, losses = per_example_gradients(loss, trainable, batch.inputs, batch.targets)
    private, mask = PrivacySettings(clip=float(norms.median()), noise=0.0), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    wanted, _ = clipped_sum(loss, trainable, batch.inputs, batch.targets, mask, private)
    found, same, read = ghost_sum(
        lambda trainable: model.losses(model({**rest, **trainable}, batch.inputs), batch.targets),
        trainable,
        mask,
        5,
        private,
    )
    scale = max(float(value.abs().max()) for value in wanted.values())
    assert max_difference(found, wanted) < 1e-5 * scale
    assert torch.allclose(read, norms, rtol=1e-5)
    assert torch.allclose(same, losses, atol=1e-6)


class TokenModel(Model):
    """Repeats tokens in its embedding; its width decides which formula a linear layer uses."""

    name = "words"

    def __init__(self, width: int) -> None:
        draw = torch.Generator().manual_seed(1)
        shapes = {"embed": (6, width), "inner": (width, width), "bias": (width,), "head": (3, width)}
        self.initial = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        self.tags = {name: frozenset({"head"}) for name in shapes}

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        state = functional.embedding(inputs["tokens"], params["embed"])
        state = torch.tanh(functional.linear(state, params["inner"], params["bias"]))
        return Output(functional.linear(state, params["head"]).mean(1))

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return functional.cross_entropy(out.logits, targets, reduction="none")


@pytest.mark.parametrize("width", [2, 40])
def test_ghost_norms_cover_embeddings_and_both_linear_formulas(width: int) -> None:
    model = TokenModel(width)
    tokens, targets = torch.arange(48).reshape(4, 12) % 5, torch.tensor([0, 1, 2, 1])
    _, norms, _ = per_example_gradients(example_loss(model, {}), model.initial, {"tokens": tokens}, targets)
    *_, read = ghost_sum(
        lambda trainable: model.losses(model(trainable, {"tokens": tokens}), targets),
        model.initial,
        None,
        4,
        PrivacySettings(clip=1.0, noise=0.0),
    )
    assert torch.allclose(read, norms, rtol=1e-5)


def final_params_with(norms: str, noise: float = 0.5) -> Tensors:
    method = replace(build("fedprox"), privacy=PrivacySettings(clip=0.3, noise=noise, clipping=norms))  # type: ignore[arg-type]
    return final_params(play(toy_run(method, count=2), tiny_model("Bert"), TextClients()))


@pytest.mark.slow
def test_run_with_ghost_clipping_matches_direct_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, ghost = final_params_with("direct"), final_params_with("ghost")
    assert max_difference(direct, ghost) < 1e-3, "rounding can move a value to the next grid point"
    assert 0 < max_difference(final_params_with("direct", 0.0), final_params_with("ghost", 0.0)) < 1e-5
    assert max_difference(direct, {name: tiny_model("Bert").initial[name] for name in direct}) > 0.01
    assert (
        max_difference(direct, final_params_with("auto")) == 0
    )  # the per-example gradients are below the threshold here
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", 0)
    assert max_difference(ghost, final_params_with("auto")) == 0


def test_layer_without_ghost_norms_is_refused_or_clipped_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy model uses its embedding in a matmul, which has no ghost norm."""
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", 0)
    direct, auto, ghost = (
        replace(fedavg(), privacy=PrivacySettings(clip=0.3, noise=0.5, clipping=norms))  # type: ignore[arg-type]
        for norms in ("direct", "auto", "ghost")
    )
    played = [final_params(play(toy_run(method, count=1), toy_model(), Clients(a=8))) for method in (direct, auto)]
    assert max_difference(*played) == 0
    with pytest.raises(VmapError, match=r"'embed.weight' is used by .*matmul.*; set it to 'direct'"):
        play(toy_run(ghost), toy_model(), Clients(a=8))
    with pytest.raises(VmapError, match=r"'embed.weight' is used by .*matmul.*; set it to 'direct'"):
        play(toy_run(ghost), toy_model(), Clients(a=8, b=8), block=2)
    moon = Method(
        "moon", client_rules=build("moon").client_rules, privacy=PrivacySettings(clip=1.0, noise=1.0, clipping="ghost")
    )
    with pytest.raises(VmapError, match=r"privacy\.clipping = 'direct'"):
        play(toy_run(moon), toy_model(), Clients(a=8))


def run_ghost_sum(use) -> None:  # type: ignore[no-untyped-def]
    trainable = {"w": torch.randn(3, 3, generator=torch.Generator().manual_seed(0)), "b": torch.ones(3)}
    given = torch.ones(4, 3)
    ghost_sum(lambda trainable: use(trainable, given), trainable, None, 4, PrivacySettings(clip=1.0, noise=0.0))


def test_unsupported_parameter_uses_are_refused() -> None:
    def linear(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear(x, w)

    with pytest.raises(GhostError, match="'w' is used more than once"):
        run_ghost_sum(lambda trainable, x: linear(linear(x, trainable["w"]), trainable["w"]).sum(1))
    with pytest.raises(GhostError, match="'b' is used in a way that cannot be recorded"):
        run_ghost_sum(lambda trainable, x: (linear(x, trainable["w"]) + torch.stack([trainable["b"]])).sum(1))
    with pytest.raises(GhostError, match="is not the example"):
        run_ghost_sum(lambda trainable, x: linear(x.repeat(2, 1), trainable["w"]).sum(1)[:4])
    with pytest.raises(GhostError, match="more than one dimension"):
        run_ghost_sum(lambda trainable, x: (x.unsqueeze(1) * trainable["w"]).sum((1, 2)))
    trainable, inputs = {"w": torch.randn(3, 4)}, {"x": torch.randn(2, 4)}
    norms = ghost_sum(
        lambda trainable: loss_mixing_examples(trainable, inputs, torch.zeros(2)),
        trainable,
        None,
        2,
        PrivacySettings(clip=1.0, noise=0.0),
    )[2]
    with pytest.raises(GhostError, match="differ from the norms of its gradients"):
        check_norms(loss_mixing_examples, trainable, inputs, torch.zeros(2), norms, 1e-2)


def test_inspected_parameters_and_unused_outputs_are_accepted() -> None:
    """A model may look at a weight's size, and may compute an output that its loss ignores."""
    trainable = {"w": torch.arange(9.0).reshape(3, 3) / 9, "unused": torch.ones(3, 3)}
    given = torch.arange(12.0).reshape(4, 3)

    def losses(trainable: Tensors) -> Tensor:
        weight = trainable["w"]
        functional.linear(given, trainable["unused"])
        return functional.linear(given, weight).sum(1) * weight.size(0) * weight.dim() * len(weight) / weight.shape[0]

    total, _, norms = ghost_sum(losses, trainable, None, 4, PrivacySettings(clip=1e6, noise=0.0))
    expected = 6 * given.unsqueeze(1).expand(4, 3, 3)  # 3 * 2 * 3 / 3 times the input, in every row of the weight
    assert torch.allclose(total["w"], expected.sum(0))
    assert torch.allclose(norms, expected.flatten(1).norm(dim=1))
    assert not total["unused"].any()


def loss_mixing_examples(trainable: Tensors, inputs: Tensors, targets: Tensor) -> Tensor:
    """Looks like a per-example loss, but mixes neighboring examples."""
    out = functional.linear(inputs["x"], trainable["w"])
    return (out * out.roll(1, 0)).sum(1)


def test_ghost_clipping_with_client_level_privacy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"privacy\.clipping is about a client's examples"):
        PrivacySettings("client", noise=1.0, clipping="ghost")


class SumOfTokens(Model):
    """A linear layer with summed outputs, so an example's gradient is the sum of its tokens."""

    name = "sums"

    def __init__(self) -> None:
        self.initial = {"w": torch.ones(1, 12)}
        self.tags = {"w": frozenset({"head"})}

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(functional.linear(inputs["x"], params["w"]).sum(1))

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return out.logits.squeeze(1)


class InfiniteExampleClients:
    """One client with two tokens per example; one example may hold an infinite number."""

    clients = ("a",)

    def __init__(self, places: list[int], wrong: int | None = None, fill: float = 0.0) -> None:
        self.x = torch.arange(6.0 * 2 * 12).reshape(6, 2, 12).sub(70).div(50)[places]
        if wrong is not None:
            self.x[wrong] = fill
            self.x[wrong, 0, 3] = float("inf")

    def __len__(self) -> int:
        return len(self.x)

    def take(self, indices: Tensor) -> Batch:
        return Batch({"x": self.x[indices]}, torch.zeros(len(indices)))

    def __getitem__(self, client: str) -> ClientData:
        return ClientData(self, self, self)


@pytest.mark.parametrize("norms", ["ghost", "direct", "auto"])
@pytest.mark.parametrize("place", [0, 4], ids=["among those that are checked", "after them"])
@pytest.mark.parametrize("fill", [0.0, 1.0], ids=["not a number", "infinite"])
def test_infinite_gradient_is_left_out_with_every_clipping(
    fill: float, place: int, norms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum covers the other examples only. With ghost clipping the norm is infinity times the other token."""
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", 0)
    private = PrivacySettings(clip=0.5, noise=0.0, sampling="shuffle", clipping=norms)  # type: ignore[arg-type]
    run = toy_run(replace(fedavg(), privacy=private), count=1, lr=1.0, batch_size=6, steps=1)
    order = (run.key / "round" / 0 / "client" / "a" / "batches" / 0 / 0).permutation(6)
    wrong = int(order[place])
    others = [each for each in range(6) if each != wrong]
    broken = final_params(play(run, SumOfTokens(), InfiniteExampleClients(list(range(6)), wrong, fill)))["w"] - 1
    left = InfiniteExampleClients(others).take(torch.arange(5))
    total, _ = clipped_sum(
        example_loss(SumOfTokens(), {}), SumOfTokens().initial, left.inputs, left.targets, None, private
    )
    assert torch.allclose(broken, -total["w"] / 6, atol=1e-6)
    assert float(broken.abs().max()) > 0.01


@pytest.mark.slow
def test_auto_clipping_switches_to_ghost_above_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold compares batch size times parameters: at most six examples here, and usually at least one."""
    size = sum(value.numel() for value in tiny_model("Bert").initial.values())
    direct, ghost = (
        final_params_with("direct", 0.0),
        final_params_with("ghost", 0.0),
    )  # without noise, because its grid would hide the rounding
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", 6 * size)
    assert max_difference(direct, final_params_with("auto", 0.0)) == 0
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", size)
    assert max_difference(direct, final_params_with("auto", 0.0)) > 0
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", size - 1)
    assert max_difference(ghost, final_params_with("auto", 0.0)) == 0


def test_ghost_sum_of_an_unused_parameter_is_zero() -> None:
    trainable = {"w": torch.ones(2, 3), "spare": torch.ones(4)}
    x = torch.arange(12.0).reshape(4, 3)
    total, _, norms = ghost_sum(
        lambda trainable: functional.linear(x, trainable["w"]).sum(1),
        trainable,
        None,
        4,
        PrivacySettings(clip=1e3, noise=0.0),
    )
    assert torch.equal(total["spare"], torch.zeros(4))
    assert torch.allclose(total["w"], x.sum(0).expand(2, 3))
    assert torch.allclose(norms, x.norm(dim=1) * 2**0.5)
