"""Ghost clipping of blocks of clients, in half precision, and of layers that are used in unusual ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ghost_fixtures import KINDS, TextClients, tiny_batch, tiny_model
from helpers import final_params, max_difference, play, toy_run
from kernel_on_cpu import CpuKernels
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from partita.core.data import Batch, ClientData
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.model import HeadOutput, Model
from partita.core.rng import Key, seeded
from partita.core.tensors import Tensors
from partita.data import Table
from partita.methods import build
from partita.models.hugging_face import from_module
from partita.tasks import LM, chunked_loss
from partita.training import ghost_layers, private_gradients
from partita.training.client_axis import VmapError
from partita.training.dp_sgd import gradient_of_one
from partita.training.ghost_clipping import ghost_sum
from partita.training.ghost_layers import GhostError

CLIP = PrivacySettings(clip=1.0, noise=0.0)


def params_of(model: Model, seed: int) -> Tensors:
    """Parameters away from the initialization, whose zeros and ones hide mistakes."""
    draw = torch.Generator().manual_seed(seed)
    return {name: value + 0.3 * torch.randn(value.shape, generator=draw) for name, value in model.initial.items()}


def losses_of(model: Model, inputs: Tensors, targets: Tensor, autocast: bool = False) -> Callable[[Tensors], Tensor]:
    def one(params: Tensors, inputs: Tensors, targets: Tensor) -> Tensor:
        return model.losses(model(params, inputs), targets)

    def losses(params: Tensors) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            return torch.vmap(one)(params, inputs, targets)

    return losses


def by_hand(model: Model, params: Tensors, batch: Batch, clip: float) -> tuple[Tensors, Tensor]:
    """The clipped sum and the norms by ordinary backward passes, one for each example."""

    def loss(params: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
        task = model.losses(model(params, inputs), targets).sum()
        return task, task

    total, norms = {name: torch.zeros_like(value) for name, value in params.items()}, []
    for place in range(len(batch.targets)):
        one = {name: value[place : place + 1] for name, value in batch.inputs.items()}
        grads, norm, _ = gradient_of_one(loss, params, one, batch.targets[place : place + 1])
        norms.append(norm)
        if batch.mask is None or batch.mask[place]:
            for name, value in grads.items():
                total[name] += value[0] * (clip / norm).clamp(max=1.0)
    return total, torch.cat(norms)


def assert_sums(found: Tensors, wanted: Tensors, close: float = 1e-5) -> None:
    scale = max(float(value.abs().max()) for value in wanted.values())
    assert max_difference(found, wanted) < close * scale


def lora(kind: str) -> Model:
    method = build("lora", {"rank": 2, "roles": ("query", "value")})
    assert method.extend is not None
    return method.extend(tiny_model(kind, ("embedding", "layer.0", "layer.1")), Key(0))


MODELS: dict[str, tuple[str, Callable[[], Model]]] = {
    "ViT": ("ViT", lambda: tiny_model("ViT")),
    "whole Bert": ("Bert", lambda: tiny_model("Bert", ())),
    "whole Llama": ("Llama", lambda: tiny_model("Llama", ())),
    "LoRA on Llama": ("Llama", lambda: lora("Llama")),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("chunk", [2**24, 40])
@pytest.mark.parametrize(("kind", "make"), MODELS.values(), ids=MODELS)
def test_a_block_is_clipped_as_its_clients_by_hand(
    kind: str, make: Callable[[], Model], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients with other parameters, other examples and a mask; embeddings of words and positions train too."""
    monkeypatch.setattr(ghost_layers, "CHUNK", chunk)
    model, batch = make(), tiny_batch(kind, 6)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    params = [params_of(model, seed) for seed in (5, 6)]
    inputs = {name: value.unflatten(0, (2, 3)) for name, value in batch.inputs.items()}
    targets = batch.targets.view(2, 3)
    parts = [Batch({name: v[rank] for name, v in inputs.items()}, targets[rank], mask[rank]) for rank in range(2)]
    clip = float(torch.cat([by_hand(model, *pair, 1.0)[1] for pair in zip(params, parts, strict=True)]).median())
    stacked = {name: torch.stack([own[name] for own in params]) for name in params[0]}
    found, _, norms = ghost_sum(losses_of(model, inputs, targets), stacked, mask, 3, replace(CLIP, clip=clip))
    assert norms.min() < clip < norms.max(), "some are clipped and some are not"
    for rank, part in enumerate(parts):
        wanted, by_example = by_hand(model, params[rank], part, clip)
        torch.testing.assert_close(norms[rank], by_example, rtol=1e-5, atol=0)
        assert_sums({name: value[rank] for name, value in found.items()}, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["ghost", "direct"])
def test_a_run_in_a_block_equals_one_by_one(clipping: Any) -> None:
    run = toy_run(replace(build("fedprox"), privacy=PrivacySettings(clip=0.3, noise=0.0, clipping=clipping)), count=2)
    model = tiny_model("Bert", ())
    alone, together = (final_params(play(run, model, TextClients(), block=block)) for block in (1, 2))
    assert max_difference(alone, together) < 1e-5
    assert max_difference(alone, model.initial) > 1e-2


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), 1e30])
def test_an_example_that_is_not_finite_is_left_out_of_its_client_only(wrong: float) -> None:
    model, batch = tiny_model("ViT"), tiny_batch("ViT", 6)
    params = params_of(model, 5)
    pixels = batch.inputs["pixel_values"].unflatten(0, (2, 3)).clone()
    targets = batch.targets.view(2, 3)
    pixels[1, 2, 0, 4, 4] = wrong
    stacked = {name: torch.stack([value] * 2) for name, value in params.items()}
    found, *_ = ghost_sum(losses_of(model, {"pixel_values": pixels}, targets), stacked, None, 3, CLIP)
    assert all(value.isfinite().all() for value in found.values())
    if wrong == 1e30:  # a layer norm makes it an ordinary example
        return
    kept = Batch({"pixel_values": pixels[1]}, targets[1], torch.tensor([1.0, 1.0, 0.0]))
    assert_sums({name: value[1] for name, value in found.items()}, by_hand(model, params, kept, 1.0)[0])
    whole = Batch({"pixel_values": pixels[0]}, targets[0])
    assert_sums({name: value[0] for name, value in found.items()}, by_hand(model, params, whole, 1.0)[0])


class Writers:
    """Clients with tokens to continue."""

    clients = ("a", "b")

    def __getitem__(self, client: str) -> ClientData:
        ids = torch.randint(20, (6, 9), generator=(Key(4) / client).generator())
        table = Table({"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous())
        return ClientData(table, table, table)


def writer(dtype: torch.dtype | None = None) -> tuple[Model, Method]:
    """LoRA on a language model."""
    with seeded(Key(0)):
        sizes = {name: value for name, value in KINDS["Llama"][1].items() if name != "num_labels"}
        module = LlamaForCausalLM(LlamaConfig(**sizes))
    method = build("lora", {"rank": 2, "roles": ("query", "value"), "head": False})
    assert method.extend is not None
    base = from_module("llama", module, ("embedding", "layer.0", "layer.1"), kind=LM, dtype=dtype)
    return method.extend(base, Key(0)), method


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about bfloat16 products on some CPUs
@pytest.mark.parametrize("block", [1, 2])
def test_factors_on_a_base_in_half_precision_are_clipped(block: int) -> None:
    model, method = writer(torch.bfloat16)
    ends = []
    for clipping in ("direct", "ghost"):
        settings = PrivacySettings(clip=0.1, noise=0.0, clipping=clipping)  # type: ignore[arg-type]
        ends.append(final_params(play(toy_run(replace(method, privacy=settings), 2), model, Writers(), block=block)))
    moved = max_difference(ends[0], model.initial)
    assert max_difference(*ends) < 0.05 * moved


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 2])
def test_language_models_with_a_frozen_head_compute_no_logits_of_a_whole_batch(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, method = writer()
    ends = []
    for clipping in ("direct", "ghost"):
        settings = PrivacySettings(clip=0.1, noise=0.0, clipping=clipping)  # type: ignore[arg-type]
        if clipping == "ghost":
            monkeypatch.setattr(chunked_loss, "FEW", 0)
            monkeypatch.setattr(HeadOutput, "logits", None)
        ends.append(final_params(play(toy_run(replace(method, privacy=settings), 2), model, Writers(), block=block)))
    assert max_difference(*ends) < 1e-5
    assert max_difference(ends[0], model.initial) > 1e-3


# ---- half precision


def test_half_precision_gives_the_norms_of_the_sums_that_are_released() -> None:
    """The norm of a single example's sum is exactly what its norm was said to be, though both differ from float32."""
    model, batch = tiny_model("Bert", ()), tiny_batch("Bert", 4)
    params = params_of(model, 5)
    stacked = {name: torch.stack([value] * 4) for name, value in params.items()}  # one example for each client
    inputs = {name: value.unsqueeze(1) for name, value in batch.inputs.items()}
    losses = losses_of(model, inputs, batch.targets.unsqueeze(1), autocast=True)
    for clip in (1e6, 0.5):
        found, _, norms = ghost_sum(losses, stacked, None, 1, replace(CLIP, clip=clip))
        lengths = torch.stack([value.flatten(1).square().sum(1) for value in found.values()]).sum(0).sqrt()
        torch.testing.assert_close(lengths, norms.squeeze(1).clamp(max=clip), rtol=1e-5, atol=0)
        assert all(value.dtype == torch.float32 for value in found.values())
    exact = torch.cat(
        [
            by_hand(
                model, params, Batch({n: v[i : i + 1] for n, v in batch.inputs.items()}, batch.targets[i : i + 1]), 1.0
            )[1]
            for i in range(4)
        ]
    )
    torch.testing.assert_close(norms.squeeze(1), exact, rtol=0.05, atol=0)


def test_half_precision_gives_the_gradient_of_the_product_that_is_computed() -> None:
    """An autocast product reads rounded inputs, and so does its gradient."""
    given, weight = torch.tensor([[1 + 2**-12, 3.0], [2.0, 1.0]]), {"w": torch.ones(1, 2)}

    def losses(params: Tensors) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return functional.linear(given, params["w"]).float().sum(1)

    total, _, norms = ghost_sum(losses, weight, None, 2, replace(CLIP, clip=1e6))
    assert total["w"].tolist() == [[3.0, 4.0]]
    assert norms.tolist() == pytest.approx([10**0.5, 5**0.5], rel=1e-6)


def canceling_tokens(width: int, high: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Equal inputs, and output gradients whose sum is small beside each of them. All numbers are exact in bfloat16."""
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randint(1, 128, (2, tokens // 3, high), generator=draw).float()
    grad = torch.cat([pairs[0], pairs[1], -pairs.sum(0)])
    grad[0] += 1
    return torch.ones(1, 1, len(grad), width).bfloat16(), grad.view(1, 1, -1, high).bfloat16()


def test_tokens_that_cancel_do_not_lengthen_a_contribution_in_half_precision() -> None:
    """The attack on rounded weights: the errors of large terms that cancel would exceed the clip."""
    given, grad = canceling_tokens(4, 3, 240)
    norm = ghost_layers._linear_squares(given, grad).sqrt()
    total = ghost_layers._linear_sum(given, grad, 1 / norm)
    assert 0.9 < float(total.norm()) <= 1 + 1e-3
    rounded = (grad.float() / norm).bfloat16().float().flatten(1, 2).mT @ given.float().flatten(1, 2)
    assert float(rounded.norm()) > 1.05, "otherwise this is no attack"


def test_norms_from_inner_products_are_not_too_small() -> None:
    """The attack on the norm: where nearly everything cancels, its rounding error is larger than itself."""
    draw, worst = torch.Generator().manual_seed(0), 0.0
    for _ in range(20):
        given, grad, rest = torch.randn(3, 24, 128, generator=draw)
        given = torch.cat([given, given]).view(1, 1, 48, 128)
        grad = torch.cat([grad, 1e-5 * rest - grad]).view(1, 1, 48, 128)
        exact = (grad.double().mT @ given.double()).norm()
        found = ghost_layers._linear_squares(given, grad).clamp(min=0).sqrt()
        assert float(exact / found) <= 1
        plain = ((given @ given.mT) * (grad @ grad.mT)).sum().clamp(min=1e-30).sqrt()
        worst = max(worst, float(exact / plain))
    assert worst > 100, "otherwise the allowance is not needed"


@pytest.mark.slow
def test_weighted_bfloat16_numbers_are_two_bfloat16_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's source on the CPU."""
    monkeypatch.setattr(ghost_layers, "launch", CpuKernels(tmp_path).launch)
    draw = torch.Generator().manual_seed(0)
    given = (1e3 * torch.randn(2, 3, 2, 8, generator=draw)).bfloat16()
    given[0, 1] = math.nan
    shares = torch.tensor([[0.3, 0.0, 1.0], [0.9999, 1e-3, 2**-0.5]])
    first, second = ghost_layers.scaled_parts(given, shares)
    weights = (first + second.double())[:, :, 0, 0] / given[:, :, 0, 0].double()
    kept = shares != 0
    assert bool((weights[kept] <= shares[kept]).all())
    assert bool((weights[kept] > shares[kept] * (1 - 2**-7)).all())
    wanted = (given.double() * weights[:, :, None, None]).nan_to_num(0.0)
    assert torch.equal(first + second.double(), wanted)
    assert torch.equal(weights[kept].float().bfloat16().double(), weights[kept])


# ---- uses of parameters


def ghost(use: Callable[[Tensors, Tensor], Tensor], trainable: Tensors) -> tuple[Tensors, Tensor, Tensor]:
    given = torch.arange(12.0).reshape(4, 3) / 10 - 0.4
    return ghost_sum(lambda trainable: use(trainable, given), trainable, None, 4, replace(CLIP, clip=1e6))


def test_a_cast_parameter_stands_for_the_parameter() -> None:
    weight = {"w": torch.arange(9.0).reshape(3, 3) / 9}
    plain = ghost(lambda p, x: functional.linear(x, p["w"]).square().sum(1), weight)
    cast = ghost(lambda p, x: functional.linear(x.double(), p["w"].to(torch.float64)).square().sum(1), weight)
    torch.testing.assert_close(plain[0], cast[0])
    assert cast[0]["w"].dtype == torch.float32
    other = ghost(lambda p, x: functional.linear(x.double().to(p["w"]), p["w"]).square().sum(1), weight)
    torch.testing.assert_close(plain[0], other[0])


@pytest.mark.parametrize("use", ["input", "output"])
def test_a_change_in_place_is_refused(use: str) -> None:
    """It would change what the norms are computed from."""

    def losses(params: Tensors, x: Tensor) -> Tensor:
        x = x.clone()
        out = functional.linear(x, params["w"])
        (x if use == "input" else out).mul_(2)
        return out.sum(1)

    with pytest.raises(GhostError, match="an input or output of 'w' is changed in place"):
        ghost(losses, {"w": torch.ones(3, 3)})


def test_a_parameter_that_is_also_used_elsewhere_is_refused() -> None:
    """The recorded use alone would give a norm that is too small."""
    with pytest.raises(GhostError, match="'w' is used in a way that cannot be recorded"):
        ghost(lambda p, x: functional.linear(x, p["w"]).sum(1) + torch.stack([p["w"]]).sum(), {"w": torch.ones(3, 3)})


@pytest.mark.parametrize("padding", [None, 2, -1])
def test_embeddings_skip_the_row_of_padding(padding: int | None) -> None:
    tokens, weight = torch.tensor([[0, 2, 2], [1, 3, 2]]), {"w": torch.randn(4, 5)}

    def losses(params: Tensors) -> Tensor:
        return functional.embedding(tokens, params["w"], padding).square().sum((1, 2))

    total, _, norms = ghost_sum(losses, weight, None, 2, replace(CLIP, clip=1e6))
    leaf = {"w": weight["w"].clone().requires_grad_()}
    each = [torch.autograd.grad(loss, leaf["w"], retain_graph=True)[0] for loss in losses(leaf)]
    torch.testing.assert_close(total["w"], each[0] + each[1])
    torch.testing.assert_close(norms, torch.stack([grad.norm() for grad in each]))


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_depend_on_the_batch_are_refused(options: dict[str, Any]) -> None:
    tokens = torch.zeros(4, 2, dtype=torch.long)
    with pytest.raises(GhostError, match="'w' is used by an embedding with max_norm or scale_grad_by_freq"):
        ghost(lambda p, x: functional.embedding(tokens, p["w"], **options).sum((1, 2)), {"w": torch.ones(4, 3)})


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (lambda p, x: functional.layer_norm(x, (4, 3), p["w"]).sum(1), "a layer_norm over several dimensions"),
        (lambda p, x: (p["b"] * 2.0 * x).sum(1), "multiplied by a number or by another"),
        (lambda p, x: (p["b"] * p["c"] * x).sum(1), "multiplied by a number or by another"),
    ],
)
def test_other_uses_are_refused(use: Callable[[Tensors, Tensor], Tensor], why: str) -> None:
    with pytest.raises(GhostError, match=why):
        ghost(use, {"w": torch.ones(4, 3), "b": torch.ones(3), "c": torch.ones(3)})


# ---- the check of norms in a block


@pytest.mark.slow
def test_wrong_norms_of_a_block_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    squares = ghost_layers._linear_squares
    monkeypatch.setattr(ghost_layers, "_linear_squares", lambda *given: 0.5 * squares(*given))
    run = toy_run(replace(build("fedavg"), privacy=PrivacySettings(clip=0.3, noise=0.5, clipping="ghost")), count=1)
    for block in (1, 2):
        with pytest.raises(
            VmapError, match="the norms computed from its layers differ from the norms of its gradients"
        ):
            play(run, tiny_model("Bert"), TextClients(), block=block)


@pytest.mark.slow
def test_norms_are_checked_in_the_first_step_that_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto", the first batches of a phase can be too small for ghost clipping."""
    model = tiny_model("Bert")
    size = sum(value.numel() for value in model.initial.values())
    calls, check = list[int](), private_gradients.check_norms

    def counted(*given: Any) -> None:
        calls.append(len(given[3]))
        check(*given)

    monkeypatch.setattr(private_gradients, "check_norms", counted)
    monkeypatch.setattr(private_gradients, "GHOST_THRESHOLD", 4 * size)
    run = toy_run(
        replace(build("fedavg"), privacy=PrivacySettings(clip=0.3, noise=0.5)), count=1, steps=12, batch_size=4
    )
    play(run, model, TextClients())
    assert calls == [2, 2], "once for each of the two clients"
