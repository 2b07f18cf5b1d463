"""The cross-entropy in chunks equals the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from partita.core.data import IGNORE_INDEX
from partita.core.layer_compiler import compiled_layers
from partita.core.model import HeadOutput
from partita.tasks import chunked_loss
from partita.tasks.chunked_loss import linear_cross_entropy
from partita.tasks.losses import token_cross_entropy

CLIENTS, EXAMPLES, TOKENS, WIDTH, WORDS = 3, 2, 7, 5, 11


@pytest.fixture(autouse=True, params=[0, 2**31], ids=["recomputed", "kept"])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens at a time, and never all at once. The gradient of the logits is recomputed, or kept."""
    monkeypatch.setattr(chunked_loss, "FEW", 0)
    monkeypatch.setattr(chunked_loss, "CHUNK", 3 * WORDS)
    monkeypatch.setattr(chunked_loss, "COMPILED_CHUNK", 3 * WORDS)
    monkeypatch.setattr(chunked_loss, "KEPT_BYTES", request.param)


def chunked(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(HeadOutput(states, weight), targets)


def plain(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_cross_entropy(HeadOutput(states, weight).logits, targets)


def random_batch(*lead: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(*lead, EXAMPLES, TOKENS, WIDTH, generator=draw).to(dtype)
    weight = torch.randn(*lead, WORDS, WIDTH, generator=draw).to(dtype)
    targets = torch.randint(WORDS, (*lead, EXAMPLES, TOKENS), generator=draw)
    targets[..., 0, 2:] = IGNORE_INDEX
    return states.requires_grad_(), weight.requires_grad_(), targets


def compare(left: Tensor, right: Tensor, leaves: list[Tensor], bound: float) -> None:
    """Compare losses, and gradients of their sum with a factor for each."""
    factors = torch.arange(1.0, left.numel() + 1).view(left.shape).to(left.dtype)
    grads = [torch.autograd.grad((losses * factors).sum(), leaves) for losses in (left, right)]
    for one, other in [(left, right), *zip(*grads, strict=True)]:
        assert one.dtype == other.dtype
        assert torch.allclose(one, other, rtol=bound, atol=bound)


def test_loss_and_gradients_equal_the_plain_ones() -> None:
    states, weight, targets = random_batch()
    compare(chunked(states, weight, targets), plain(states, weight, targets), [states, weight], 1e-6)


def test_a_frozen_head_gets_no_gradient() -> None:
    states, weight, targets = random_batch()
    weight = weight.detach()
    compare(chunked(states, weight, targets), plain(states, weight, targets), [states], 1e-6)


def test_a_trained_head_over_frozen_states() -> None:
    states, weight, targets = random_batch()
    states = states.detach()
    compare(chunked(states, weight, targets), plain(states, weight, targets), [weight], 1e-6)


@pytest.mark.parametrize("own_head", [False, True])
def test_a_block_of_clients_equals_the_plain_loss(own_head: bool) -> None:
    states, weight, targets = random_batch(CLIENTS)
    head, dims = (weight, (0, 0, 0)) if own_head else (weight.detach()[0], (0, None, 0))
    found, expected = (torch.vmap(loss, in_dims=dims)(states, head, targets) for loss in (chunked, plain))
    compare(found, expected, [states, weight] if own_head else [states], 1e-6)


def test_clients_with_the_same_texts_and_heads_of_their_own() -> None:
    states, weight, targets = random_batch(CLIENTS)
    given = states.detach()[0], weight, targets[0]
    found, expected = (torch.vmap(loss, in_dims=(None, 0, None))(*given) for loss in (chunked, plain))
    compare(found, expected, [weight], 1e-6)


def test_an_example_without_targets_has_loss_zero() -> None:
    states, weight, targets = random_batch()
    targets[0] = IGNORE_INDEX
    losses = chunked(states, weight, targets)
    assert losses[0] == 0
    assert not torch.autograd.grad(losses.sum(), states)[0][0].any()


def test_bfloat16_logits_have_a_float32_loss() -> None:
    states, weight, targets = random_batch(dtype=torch.bfloat16)
    found = chunked(states, weight, targets)
    assert found.dtype == torch.float32
    compare(found, plain(states, weight, targets), [states, weight], 0.03)


def test_autocast_computes_logits_in_bfloat16() -> None:
    states, weight, targets = random_batch()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = chunked(states, weight, targets), plain(states, weight, targets)
    compare(found, expected, [states, weight], 0.03)
    assert not torch.allclose(found, plain(states, weight, targets), atol=1e-6)


def test_per_example_gradients_use_the_plain_loss() -> None:
    states, weight, targets = random_batch()

    def loss(weight: Tensor, states: Tensor, targets: Tensor) -> Tensor:
        return chunked(states.unsqueeze(0), weight, targets.unsqueeze(0)).sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight.detach(), states.detach(), targets)
    whole = torch.autograd.grad(plain(states, weight, targets).sum(), weight)[0]
    assert torch.allclose(each.sum(0), whole, atol=1e-5)


def test_no_tensor_is_larger_than_a_chunk() -> None:
    """Except those with one number for each word and width, or each token and width."""
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            sizes.extend(
                each.numel() for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, Tensor)
            )
            return out

    states, weight, targets = random_batch()
    with Watch():
        torch.autograd.grad(chunked(states, weight, targets).sum(), [states, weight])
    assert max(sizes) <= max(3 * WORDS, WORDS * WIDTH, EXAMPLES * TOKENS * WIDTH) < EXAMPLES * TOKENS * WORDS


@pytest.mark.slow
def test_compiled_chunks_equal_plain_ones() -> None:
    """Also where the backward pass runs after the context that compiles, as in training."""
    torch.compiler.reset()
    states, weight, targets = random_batch()
    with compiled_layers(lambda function: torch.compile(function, fullgraph=True, backend="aot_eager")):
        found = chunked(states, weight, targets)
    compare(found, plain(states, weight, targets), [states, weight], 1e-6)
    torch.compiler.reset()


def test_the_backward_pass_computes_the_logits_once_more_only_if_they_were_not_kept() -> None:
    calls: list[int] = []

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(logits: Tensor, wanted: Tensor) -> Any:
            calls.append(logits.shape[1])
            return function(logits, wanted)

        return call

    states, weight, targets = random_batch()
    with compiled_layers(count):
        losses = chunked(states, weight, targets)
    chunks = list(calls)
    torch.autograd.grad(losses.sum(), [states, weight])
    assert sum(chunks) == EXAMPLES * TOKENS
    assert calls == (chunks if chunked_loss.KEPT_BYTES else 2 * chunks)
